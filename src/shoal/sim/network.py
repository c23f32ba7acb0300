"""A simulated network of named hosts, with the faults of real ones. Implements `transport.base.Network`.

Faults of a host, and how others see them:

=============  =======================================  ============================================================
fault          the host itself                          what others see
=============  =======================================  ============================================================
`stall`        frozen, as by SIGSTOP: its tasks and     silence; bytes and connection attempts wait; nothing ends
               timers run late, after `unstall`
`slow`         its lines are slower, its latencies      slowness
               longer; its computing takes no time
`partition`    runs on                                  silence between the groups until `heal`; nothing ends
`wall`         runs on, and dials the others            nobody else can dial it; what is open goes on
`crash`        tasks cancelled and timers dropped at    after one latency its connections break; dialing it is
               once, nothing leaves any more            refused (the machine lives, nobody listens)
`vanish`       as `crash`                               silence, for ever; once the machine is started again, old
                                                        connections break
`restart`      a new life: same name, no tasks, no      it can be dialed again once it listens
               listeners, no connections
=============  =======================================  ============================================================

Tasks belong to a host if they were started through `spawn`, or by such a task. On an ordinary event loop the network
works the same, but tasks are the caller's own affair: nothing is frozen or cancelled there.

`shoal.sim.pipes` describes how bytes move. All chance comes from the seed; `trace_digest` is a hash over every
delivery: equal seeds, equal digests.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from shoal.errors import ClosedError, ConfigError, LocalError, PeerError, PeerRefused, PeerUnreachable
from shoal.sim.loop import VirtualLoop
from shoal.sim.medium import Delivery, Link, Medium
from shoal.sim.owner import Owner, current_owner
from shoal.sim.pipes import Dial, Flow, Host, PipeEnd
from shoal.transport.base import PipeAcceptor, PipeUser

__all__ = ["SimNetwork"]

T = TypeVar("T")


class SimNetwork:
    """Hosts and the network between them. Made inside of a running event loop, virtual or not.

    Args:
        seed: the source of jitter and losses: a number, or a random source of its own.
        latency_s: the latency one way between any two hosts; 0 within a host. `set_link` changes it for a pair.
        jitter_s: each segment takes up to this much longer.
        loss: the share of packets that is lost (and comes later), from 0 to below 1.
        bandwidth_bytes_s: how fast each host sends, and receives; None for no limit. `add_host` sets it for one host.
        window_bytes: how much may be in flight and unread on one direction of a pipe.
        fair: small messages go ahead of bulk on the hosts' lines. Otherwise each line has one queue, as in a plain
            router.
        backs_off: bytes that a partition has stopped come when TCP tries again, ever more rarely. Otherwise they come
            at once.
        dial_round_trips: the round trips before a new connection is open (2: as with TCP and TLS 1.3).
        keep_trace: keep every delivery in `trace`, for looking at; the digest is always kept.

    Raises:
        ConfigError: a number is out of its range.
        LocalError: no event loop is running.
    """

    def __init__(  # noqa: PLR0913 (keyword-only, and each of its own)
        self,
        seed: int | random.Random = 0,
        *,
        latency_s: float = 0.01,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        bandwidth_bytes_s: float | None = None,
        window_bytes: int = 4 << 20,
        fair: bool = True,
        backs_off: bool = False,
        dial_round_trips: int = 2,
        keep_trace: bool = False,
    ) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise LocalError("make a SimNetwork inside of the event loop that it is to run on") from None
        if window_bytes < 1:
            raise ConfigError(f"window_bytes must be at least 1, got {window_bytes}")
        if dial_round_trips < 1:
            raise ConfigError(f"dial_round_trips must be at least 1, got {dial_round_trips}")
        rng = seed if isinstance(seed, random.Random) else random.Random(f"{seed}/network")
        self._loop = loop
        self._medium = Medium(loop, rng, window_bytes, fair=fair, backs_off=backs_off, log=keep_trace)
        self._link = Link(latency_s=latency_s, jitter_s=jitter_s, loss=loss)
        self._links: dict[tuple[str, str], Link] = {}
        self._rate = _rate("bandwidth_bytes_s", bandwidth_bytes_s)
        self._dial_round_trips = dial_round_trips
        self._hosts: dict[str, Host] = {}
        self._waiting_dials: list[Dial] = []

    # --------------------------------------------------------------------------------------------------------- hosts

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of all hosts, in the order in which they were added."""
        return tuple(self._hosts)

    def add_host(self, name: str, *, up_bytes_s: float | None = None, down_bytes_s: float | None = None) -> None:
        """Add a host with its own rates (None: the network's `bandwidth_bytes_s`). Other hosts add themselves on use.

        Raises:
            ConfigError: the name is taken, or a rate is not above 0.
        """
        if name in self._hosts:
            raise ConfigError(f"there is a host {name!r} already")
        up, down = _rate("up_bytes_s", up_bytes_s) or self._rate, _rate("down_bytes_s", down_bytes_s) or self._rate
        self._hosts[name] = Host(self._medium, name, len(self._hosts), up=up, down=down)

    def set_link(
        self,
        a: str,
        b: str,
        *,
        latency_s: float | None = None,
        jitter_s: float | None = None,
        loss: float | None = None,
        bandwidth_bytes_s: float | None = None,
    ) -> None:
        """Change the way between two hosts, both ways, also for open pipes. None keeps a value; see `Link`."""
        given = {"latency_s": latency_s, "jitter_s": jitter_s, "loss": loss, "bandwidth_bytes_s": bandwidth_bytes_s}
        link = replace(self.link(a, b), **{name: value for name, value in given.items() if value is not None})
        self._links[a, b] = self._links[b, a] = link
        for end in [*self._host(a).ends, *self._host(b).ends]:
            if {end.out.src.name, end.out.dst.name} == {a, b}:
                end.out.link = end.into.link = link

    def owner(self, host: str) -> Owner:
        """The present life of a host, to which its tasks belong."""
        return self._host(host).life

    def is_alive(self, host: str) -> bool:
        """Whether the host's process runs (also if it is stalled)."""
        return self._host(host).alive

    def spawn(self, host: str, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task on a host. It stops when the host does, with all that it starts.

        Raises:
            ClosedError: the host is down.
        """
        found = self._host(host)
        if not found.alive:
            coroutine.close()
            raise ClosedError(f"host {host!r} is down: restart it first")
        if isinstance(self._loop, VirtualLoop):
            return self._loop.spawn(found.life, coroutine, name=name)
        return self._loop.create_task(coroutine, name=name)

    # ---------------------------------------------------------------------------------------------------- deliveries

    def trace_digest(self) -> str:
        """The hash over (time, source, target, length, content) of every delivery so far, 32 hexadecimal digits."""
        return self._medium.digest()

    @property
    def trace(self) -> Sequence[Delivery]:
        """Every delivery, if the network was made with `keep_trace`."""
        return self._medium.log or ()

    @property
    def deliveries(self) -> int:
        """The number of segments that arrived."""
        return self._medium.deliveries

    @property
    def delivered_bytes(self) -> int:
        """The number of bytes that arrived."""
        return self._medium.delivered_bytes

    def traffic(self, host: str) -> tuple[int, int]:
        """The bytes of this host that arrived at others, and the bytes that it received."""
        found = self._host(host)
        return found.bytes_out, found.bytes_in

    # ---------------------------------------------------------------------------------------- the Protocol `Network`

    def listen(self, host: str, port: int, acceptor: PipeAcceptor, *, greeting: bytes) -> int:
        found = self._usable(host)
        if port == 0:
            while found.next_port in found.listeners:
                found.next_port += 1
            port = found.next_port
            found.next_port += 1
        if port in found.listeners:
            raise ConfigError(f"port {port} of host {host!r} is taken: choose another, or 0 for any that is free")
        found.listeners[port] = (acceptor, greeting)
        return port

    def unlisten(self, host: str, port: int) -> None:
        self._host(host).listeners.pop(port, None)

    async def open(self, source: str, host: str, port: int, *, greeting: bytes, user: PipeUser) -> None:
        src, dst = self._usable(source), self._hosts.get(host)
        if dst is None:
            raise PeerUnreachable(f"there is no host {host!r}")
        dial = Dial(src, dst, port, greeting, user)
        delay_s = self._delay_s(src, dst)
        self._medium.at(self._medium.time() + (2 * self._dial_round_trips - 1) * delay_s, partial(self._knock, dial))
        try:
            await dial.future
        except BaseException:
            if dial.end is not None:
                dial.end.abort("given up")
            raise

    def _knock(self, dial: Dial) -> None:
        """The attempt reaches the other host."""
        src, dst = dial.src, dial.dst
        if dial.future.done():
            return
        if dial.life is not src.life or not src.alive:
            dial.fail(PeerUnreachable(f"host {src.name!r} went down"))
        elif not dst.awake or src.group != dst.group or (src is not dst and dst.walled is False):
            self._waiting_dials.append(dial)
        elif src is not dst and dst.walled:
            self._answer_no(dial, PeerUnreachable("connection refused: a wall stands there", nobody_listens=True))
        elif dial.port not in dst.listeners:
            self._answer_no(dial, PeerUnreachable("connection refused: nobody listens there", nobody_listens=True))
        else:
            acceptor, greeting = dst.listeners[dial.port]
            user = acceptor(dial.greeting)
            if user is None:
                self._answer_no(dial, PeerRefused("the peer there is not the one that was dialed, or it refused"))
            else:
                self._connect(dial, user, greeting)

    def _answer_no(self, dial: Dial, error: PeerError) -> None:
        def arrive() -> None:
            if dial.src.awake and dial.src.group == dial.dst.group:
                dial.fail(error)
            else:
                self._waiting_dials.append(dial)

        self._medium.at(self._medium.time() + self._delay_s(dial.src, dial.dst), arrive)

    def _connect(self, dial: Dial, user: PipeUser, greeting: bytes) -> None:
        near, far = PipeEnd(dial.src, dial.user), PipeEnd(dial.dst, user)
        link = self.link(dial.src.name, dial.dst.name)
        near.out = far.into = Flow(self._medium, near, far, link)
        far.out = near.into = Flow(self._medium, far, near, link)
        dial.end = near

        def opened() -> None:
            if near.open and not dial.future.done():
                near.opened = True
                dial.user.pipe_opened(near, greeting)
                dial.future.set_result(None)

        far.out.signal(opened)
        far.opened = True
        user.pipe_opened(far, dial.greeting)

    # -------------------------------------------------------------------------------------------------------- faults

    def partition(self, groups: Iterable[Iterable[str]]) -> None:
        """Silence between hosts of different groups, until `heal`. Hosts that no group names form one more group.

        Raises:
            ConfigError: a host is in two groups.
        """
        sides: dict[str, int] = {}
        for number, group in enumerate(groups, start=1):
            for name in group:
                if sides.setdefault(self._host(name).name, number) != number:
                    raise ConfigError(f"host {name!r} is in two groups of the partition")
        self._regroup(sides)

    def heal(self) -> None:
        """End the partition: waiting bytes arrive, in order, after one latency."""
        self._regroup({})

    def wall(self, host: str, *, refuses: bool = False) -> None:
        """Let nobody else dial this host, as a router that translates addresses, or a firewall: until `open_wall`.

        Args:
            host: its name.
            refuses: others are refused. Otherwise they wait for an answer that never comes.
        """
        self._host(host).walled = refuses

    def open_wall(self, host: str) -> None:
        """Let the others dial this host."""
        self._host(host).walled = None
        self._retry_dials()

    def _regroup(self, sides: dict[str, int]) -> None:
        for host in self._hosts.values():
            host.group = sides.get(host.name, 0)
        for host in self._hosts.values():
            host.reopen(at_once=False)
        self._retry_dials()

    def stall(self, host: str, duration_s: float | None = None) -> None:
        """Freeze a host for so long (None: until `unstall`). A longer stall that is under way goes on."""
        found = self._host(host)
        until = float("inf") if duration_s is None else self._medium.time() + duration_s
        if not found.alive or (found.stalled_until is not None and found.stalled_until >= until):
            return
        found.set_state(alive=True, up=True, stalled_until=until)
        if isinstance(self._loop, VirtualLoop):
            self._loop.freeze(found.life)
        if duration_s is not None:
            self._medium.at(until, lambda: self.unstall(host) if found.stalled_until == until else None)

    def unstall(self, host: str) -> None:
        """Let a stalled host go on: its late timers fire, and the bytes that came for it arrive, at once."""
        found = self._host(host)
        if not found.alive or found.stalled_until is None:
            return
        found.set_state(alive=True, up=True, stalled_until=None)
        if isinstance(self._loop, VirtualLoop):
            self._loop.thaw(found.life)
        found.reopen(at_once=True)
        self._retry_dials()

    def slow(self, host: str, factor: float) -> None:
        """Make the host's lines slower and its latencies longer by `factor`; 1 ends it.

        Raises:
            ConfigError: `factor` is not above 0.
        """
        if not factor > 0:
            raise ConfigError(f"factor must be above 0, got {factor}")
        found = self._host(host)
        before = found.slowness
        found.slow_down(factor)
        for flow in [end.into for each in self._hosts.values() for end in each.ends]:
            if found in (flow.src, flow.dst) and flow.src is not flow.dst:
                other = flow.src.slowness if flow.dst is found else flow.dst.slowness
                flow.stretch(max(factor, other) / max(before, other))

    def crash(self, host: str) -> None:
        """Kill the host's process: its connections break at the others after one latency. No effect if it is down."""
        self._end_life(host, machine_stays=True)

    def vanish(self, host: str) -> None:
        """Take the whole machine away: the others hear nothing. After a crash, it takes the machine away as well."""
        self._end_life(host, machine_stays=False)

    def _end_life(self, name: str, *, machine_stays: bool) -> None:
        host = self._host(name)
        if host.alive:
            for end in list(host.ends):
                if machine_stays:
                    end.out.reset("the connection broke: the other process died")
                else:
                    host.ghosts.append(end)
                end.lose("this host went down")
            host.listeners.clear()
            if isinstance(self._loop, VirtualLoop):
                self._loop.kill(host.life)
        host.set_state(alive=False, up=host.up and machine_stays, stalled_until=None)
        self._retry_dials()

    def restart(self, host: str) -> Owner:
        """Start the machine, if it vanished, and a new process with the same name; returns the owner of its tasks.

        Raises:
            LocalError: the host is alive.
        """
        found = self._host(host)
        if found.alive:
            raise LocalError(f"host {host!r} is alive: crash it before it can be restarted")
        found.life = Owner(host)
        found.set_state(alive=True, up=True, stalled_until=None)
        # The machine does not know its old connections, and answers so to hosts that still send on them.
        for end in found.ghosts:
            end.out.reset("the connection broke: the other machine was started again")
        found.ghosts = []
        self._retry_dials()
        return found.life

    def _retry_dials(self) -> None:
        dials, self._waiting_dials = self._waiting_dials, []
        for dial in dials:
            if not dial.future.done():
                delay_s = self._delay_s(dial.src, dial.dst)
                self._medium.at(self._medium.time() + delay_s, partial(self._knock, dial))

    # ------------------------------------------------------------------------------------------------------- lookups

    def _host(self, name: str) -> Host:
        if name not in self._hosts:
            self.add_host(name)
        return self._hosts[name]

    def _usable(self, name: str) -> Host:
        """The host, if the caller may use its network. A killed process may not, even after a restart."""
        host, owner = self._host(name), current_owner()
        if not host.alive or (owner is not None and owner.killed):
            raise PeerUnreachable(f"host {name!r} is down")
        return host

    def link(self, a: str, b: str) -> Link:
        """The way between two hosts as it is now."""
        return self._links.get((a, b), self._link)

    def _delay_s(self, src: Host, dst: Host) -> float:
        if src is dst:
            return 0.0
        return self.link(src.name, dst.name).latency_s * max(src.slowness, dst.slowness)


def _rate(name: str, rate: float | None) -> float | None:
    """Check a rate."""
    if rate is not None and not rate > 0:
        raise ConfigError(f"{name} must be above 0 bytes per second, or None for no limit; got {rate}")
    return rate
