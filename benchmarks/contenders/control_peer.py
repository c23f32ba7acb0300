"""One peer of `benchmarks.control`, told what to do by lines of JSON: it trains nothing, but gives and loads a state,
averages, and meanwhile makes small calls all the time.

=========  ==========================================  =============================================================
request    meaning                                     answer
=========  ==========================================  =============================================================
start      join the peers at `invites` (none: begin)   `invite`: how others find this peer
meet       call all peers, of whom there are `peers`   nothing
watch      make small calls from now on                nothing
load       download the state                          `seconds`
average    one round of all                            `seconds`
delays     what the calls have taken since `watch`     lists of [host of the other peer, seconds], by kind
stop       leave                                       nothing
=========  ==========================================  =============================================================
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import defaultdict
from contextlib import suppress
from functools import partial
from typing import Any

import torch

import shoal
from benchmarks.contenders.orders import now, obey
from benchmarks.contenders.shoal_state import StateAverager
from benchmarks.contenders.state_worker import state
from shoal.base.peer import PeerID
from shoal.base.tasks import Tasks
from shoal.errors import PeerError
from shoal.protocol.wire import DhtPing, Message

_EVERY_S = 0.1
_GIVE_UP_S = 20.0
"""What takes longer counts as this."""


class Told(Message, frozen=True):
    """A note, as progress is told: when it was sent, on the clock that all processes of a machine share."""

    sent: float


class ControlPeer:
    """The peer.

    Args:
        host: the address to listen at.
        donor: whether it has a state to give.
        state_bytes: the size of the state.
        numel: float32 values of a round.
        upload_limit: bytes per second; 0 for none.
    """

    def __init__(self, host: str, donor: bool, state_bytes: int, numel: int, upload_limit: float) -> None:
        self._host, self._donor, self._upload_limit = host, donor, upload_limit
        self._shared = state(state_bytes) if donor else []
        self._values = torch.ones(numel)
        self._delays: dict[str, list[tuple[str, float]]] = defaultdict(list)
        self._tasks = Tasks(lambda error: print(repr(error), file=sys.stderr))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "start":
                return {"invite": self._start(request["invites"])}
            case "meet":
                self._averager = self._make_averager(request["peers"])
                self._dht.loop_thread.run(self._meet(request["peers"]), 30.0)
            case "watch":
                self._dht.loop_thread.run(self._watch(), 10.0)
            case "load":
                began = now()
                assert self._averager.load_state_from_peers(timeout=300) is not None, "no state came"
                return {"seconds": now() - began}
            case "average":
                began = now()
                self._averager.step(timeout=120.0, allow_retries=False)
                return {"seconds": now() - began}
            case "delays":
                return {"delays": self._dht.loop_thread.run(self._stop_watching(), 10.0)}
            case "stop":
                self._averager.shutdown()
                self._dht.shutdown()
        return {}

    def _start(self, invites: list[str]) -> str:
        place, options = f"/ip4/{self._host}/tcp/0", {}
        if self._upload_limit:  # a base may not have it
            options["upload_limit"] = self._upload_limit
        self._dht = shoal.DHT(initial_peers=invites, host_maddrs=place, start=True, **options)  # type: ignore[arg-type]
        return str(self._dht.get_visible_maddrs()[0])

    def _make_averager(self, peers: int) -> StateAverager:
        averager = StateAverager(
            [self._values],
            self._dht,
            start=False,
            prefix="control",
            target_group_size=peers,
            min_group_size=peers,
            allow_state_sharing=self._donor,
        )
        averager.shared = self._shared
        averager.run_in_background()
        return averager

    async def _meet(self, peers: int) -> None:
        core = self._dht.core()
        core.endpoint.take_notes(Told, self._told)
        while len(core.endpoint.peers) < peers - 1:
            await core.node.look_around()
            await asyncio.sleep(0.1)
        await core.node.store("control", 1, core.env.clock.time() + 3000)

    def _told(self, peer: PeerID, note: Told) -> None:
        self._delays["progress"].append((self._where(peer), now() - note.sent))

    async def _watch(self) -> None:
        self._delays.clear()
        self._tasks.spawn(self._calls())

    async def _stop_watching(self) -> dict[str, list[tuple[str, float]]]:
        await self._tasks.cancel()
        return self._delays

    async def _calls(self) -> None:
        core = self._dht.core()
        while True:
            peers = core.endpoint.peers
            core.endpoint.tell(peers, Told(now()))
            for peer in peers:
                ask = partial(core.endpoint.call, peer, DhtPing(), timeout_s=_GIVE_UP_S)
                self._tasks.spawn(self._measure("heartbeat", self._where(peer), ask))
            self._tasks.spawn(self._measure("DHT", "", partial(core.node.get, "control", latest=True)))
            await asyncio.sleep(_EVERY_S)

    async def _measure(self, kind: str, host: str, work: Any) -> None:
        began = now()
        with suppress(PeerError):
            await work()
        self._delays[kind].append((host, now() - began))

    def _where(self, peer: PeerID) -> str:
        return self._dht.core().endpoint.hosts_of(peer)[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    host, donor, state_bytes, numel, upload_limit, congestion = sys.argv[1:]
    if congestion != "bbr":
        del socket.TCP_CONGESTION  # as on a system that lets nobody choose
    peer = ControlPeer(host, bool(int(donor)), int(state_bytes), int(numel), float(upload_limit))
    obey(peer.answer, leave_s=1.0)
