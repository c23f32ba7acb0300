"""Many group machines on one table: a small world of messages, directory and faults, without a loop or a network.

It does what the shell does (streams, timeouts, directory), on its own queue of events, so that thousands of whole
searches run in seconds. `World.check` holds the invariants after every event.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.averaging.matchmaking import MatchmakingConfig
from shoal.averaging.matchmaking.declarations import Memory
from shoal.averaging.matchmaking.events import (
    Action,
    Answer,
    Answered,
    AskToLead,
    Cancel,
    Declaration,
    Declare,
    Declared,
    DeclareFailed,
    DirectoryFailed,
    DirectoryRead,
    Enter,
    Event,
    Fail,
    JoinEnded,
    JoinRequested,
    LeaderLost,
    LeaveLeader,
    Nudge,
    Nudged,
    PeerLost,
    ReadDirectory,
    SearchPhase,
    Start,
    Tick,
    Withdraw,
)
from shoal.averaging.matchmaking.machine import GroupMachine
from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Begin, Contact, JoinAccepted, JoinRedirected, JoinRefused, Member

Message = JoinAccepted | JoinRefused | JoinRedirected | Begin

WALL_S = 1_000_000.0
REQUEST_TIMEOUT_S = 3.0
BEGIN = Begin(bytes(16), [], 0, [], 1)
"""The machine takes each `Begin` as it is: the shell has checked it."""


def peer_id(number: int) -> PeerID:
    """A peer id that sorts and prints by its number."""
    return PeerID(number.to_bytes(2, "big") * 16)


def contact_of(number: int) -> Contact:
    """A peer that can be dialed."""
    peer = peer_id(number)
    return Contact(peer, (Address("10.0.0.1", 1000 + number, peer),))


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How one peer forms groups."""

    target_group_size: int | None = None
    min_group_size: int = 2
    window_s: float = 5.0
    request_timeout_s: float = REQUEST_TIMEOUT_S
    deadline_s: float | None = None
    reduces: bool = True
    contributes: bool = True
    leads: bool = True

    def machine(self, number: int, memory: Memory, **options: Any) -> GroupMachine:
        """The machine of the peer of this number."""
        contact = contact_of(number) if self.leads else Contact(peer_id(number))
        config = MatchmakingConfig(
            target_group_size=self.target_group_size,
            min_group_size=self.min_group_size,
            window_s=self.window_s,
            request_timeout_s=self.request_timeout_s,
        )
        member = Member(contact, self.reduces, None, b"", self.contributes)
        return GroupMachine(member, config, memory, deadline_s=self.deadline_s, **options)


@dataclass(kw_only=True)
class Weather:
    """What the world does to messages."""

    latency_s: float = 0.002
    jitter_s: float = 0.0
    store_s: float = 0.012
    read_s: float = 0.008
    visible_after_s: float = 0.0
    silence_s: float = 5.0


@dataclass(eq=False)
class Pipe:
    """One Join stream, as both sides see it."""

    asker: Node
    leader: Node
    nudge: bool
    expiration: float
    open: bool = True
    answered: bool = False
    clear_at: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})


@dataclass(eq=False)
class Node:
    """One peer."""

    number: int
    contact: Contact
    setup: Setup
    skew_s: float = 0.0
    memory: Memory = field(default_factory=Memory)
    machine: GroupMachine | None = None
    called_at: float = 0.0
    alive: bool = True
    vanished: bool = False
    tick: int = 0
    directory_write: int = 0
    asking: Pipe | None = None
    inbound: dict[PeerID, Pipe] = field(default_factory=dict)
    met: set[int] = field(default_factory=set)
    group: Group | None = None
    failure: Fail | None = None
    cancelled: bool = False
    ended_at: float | None = None

    @property
    def peer(self) -> PeerID:
        return self.contact.peer

    @property
    def searching(self) -> bool:
        return self.machine is not None and self.machine.phase is not SearchPhase.OVER


@dataclass(eq=False)
class Group:
    """What one Start made."""

    leader: Node
    members: tuple[PeerID, ...]
    at: float


class World:
    """Peers, messages, a directory, and a clock."""

    def __init__(self, seed: int, weather: Weather | None = None) -> None:
        self.rng = random.Random(seed)
        self.weather = weather or Weather()
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.serial = itertools.count()
        self.nodes: dict[PeerID, Node] = {}
        self.directory: dict[PeerID, Declaration] = {}
        self.groups: list[Group] = []
        self.messages = 0

    # ---------------------------------------------------------------------------------------------------- set-up

    def add(self, number: int, setup: Setup, *, skew_s: float = 0.0) -> Node:
        """Add a peer that does not search yet."""
        contact = contact_of(number)
        if not setup.leads:
            contact = Contact(contact.peer)
        node = Node(number, contact, setup, skew_s)
        self.nodes[node.peer] = node
        return node

    def call(self, node: Node, at: float, expected: Callable[[], frozenset[PeerID] | None] | None = None) -> None:
        """The peer begins to search at this time."""

        def begin() -> None:
            if node.alive:
                node.machine = node.setup.machine(
                    node.number,
                    node.memory,
                    now=self.now,
                    wall_offset_s=WALL_S + node.skew_s,
                    expected=expected,
                )
                node.called_at, node.group, node.failure, node.ended_at = self.now, None, None, None
                node.asking, node.cancelled = None, False
                node.inbound.clear()
                self.act(node, node.machine.start(self.now))

        self.at(at, begin)

    def cancel(self, node: Node, at: float) -> None:
        """The peer stops to search at this time."""

        def stop() -> None:
            if node.alive and node.searching:
                node.cancelled = True
                self.feed(node, Cancel())

        self.at(at, stop)

    def crash(self, node: Node, at: float, *, vanish: bool = False) -> None:
        """The peer dies: others see closed links soon, or (vanish) only silence."""

        def die() -> None:
            if not node.alive:
                return
            node.alive, node.vanished = False, vanish
            delay_s = self.weather.silence_s if vanish else self.latency()
            pipes = [*node.inbound.values(), *([node.asking] if node.asking else [])]
            for other in self.nodes.values():
                pipes += [p for p in (*other.inbound.values(), other.asking) if p and node in (p.asker, p.leader)]
            for pipe in dict.fromkeys(pipes):
                self.later(delay_s, partial(self.break_pipe, pipe))
            for other in self.nodes.values():
                if other.number in node.met:
                    self.later(delay_s, partial(self.gone, other, node))

        self.at(at, die)

    def gone(self, node: Node, lost: Node) -> None:
        """`node` learns that its link to `lost` is closed."""
        if node.alive:
            node.memory.lose(lost.peer, self.now + WALL_S + node.skew_s + node.setup.window_s)
            self.feed(node, PeerLost(lost.peer))

    # ------------------------------------------------------------------------------------------------------ time

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do this then."""
        heapq.heappush(self.queue, (when, next(self.serial), what))

    def later(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do this in a while."""
        self.at(self.now + delay_s, what)

    def latency(self) -> float:
        """How long one message takes."""
        return self.weather.latency_s + self.weather.jitter_s * self.rng.random()

    def run(self, until: float = 1000.0, limit: int = 200_000) -> None:
        """Until nothing happens any more."""
        for _ in range(limit):
            if not self.queue or self.queue[0][0] > until:
                return
            self.now, _, what = heapq.heappop(self.queue)
            what()
            self.check()
        raise AssertionError(f"the world does not come to rest: {limit} events, time {self.now:.3f}")

    # -------------------------------------------------------------------------------------------------- machines

    def feed(self, node: Node, event: Event) -> None:
        """Hand an event to a living peer's machine and do what it says."""
        if node.alive and node.machine is not None:
            self.act(node, node.machine.handle(event, self.now))

    def act(self, node: Node, actions: list[Action]) -> None:
        """Do what a machine says."""
        assert node.machine is not None
        for action in actions:
            self.do(node, action)
        if node.machine.phase is SearchPhase.OVER and node.ended_at is None:
            node.ended_at = self.now
        node.tick += 1
        deadline, tick = node.machine.deadline(), node.tick
        if deadline is not None:
            self.at(max(deadline, self.now), lambda: self.feed(node, Tick()) if node.tick == tick else None)

    def do(self, node: Node, action: Action) -> None:
        """Do one thing that a machine says."""
        match action:
            case Declare(expiration):
                self.write(node, Declaration(node.contact, expiration))
            case Withdraw():
                self.write(node, None)
            case ReadDirectory():
                self.read(node)
            case AskToLead(contact, expiration):
                assert node.asking is None, "asks two at a time"
                node.asking = self.join(node, contact, expiration, nudge=False)
            case LeaveLeader():
                assert node.asking is not None
                self.leave(node.asking)
                node.asking = None
            case Nudge(contact, expiration):
                self.join(node, contact, expiration, nudge=True)
            case Fail():
                node.failure = action
            case Enter():
                assert node.group is not None
            case _:
                self.tell(node, action)

    def tell(self, node: Node, action: Answer | Start) -> None:
        """Tell those that asked what a machine says."""
        match action:
            case Answer(peer, answer):
                self.down(node, peer, answer)
            case Start(followers):
                group = Group(node, (node.peer, *followers), self.now)
                self.groups.append(group)
                node.group = group
                for peer in followers:
                    self.down(node, peer, BEGIN, group)

    # ------------------------------------------------------------------------------------------------- directory

    def write(self, node: Node, declaration: Declaration | None) -> None:
        """Declare or withdraw."""
        node.directory_write += 1
        serial = node.directory_write
        took_s = self.weather.store_s * self.rng.uniform(0.5, 1.5)
        seen: list[Declaration] = []

        def visible() -> None:
            if serial == node.directory_write:
                if declaration is None:
                    self.directory.pop(node.peer, None)
                else:
                    self.directory[node.peer] = declaration

        def done() -> None:
            if serial == node.directory_write and declaration is not None:
                fails = self.rng.random() < 0.02
                self.feed(node, DeclareFailed("lost") if fails else Declared(tuple(seen)))

        stored_s = took_s * self.rng.random()
        self.later(stored_s + self.weather.visible_after_s * self.rng.random(), visible)
        self.later(stored_s, lambda: seen.extend(self.directory.values()))
        self.later(took_s, done)

    def read(self, node: Node) -> None:
        """Read the directory."""
        took_s = self.weather.read_s * self.rng.uniform(0.5, 1.5)
        seen: list[Declaration] = []
        search = node.machine

        def look() -> None:
            seen.extend(self.directory.values())

        def done() -> None:
            if node.machine is search:
                fails = self.rng.random() < 0.02
                self.feed(node, DirectoryFailed("lost") if fails else DirectoryRead(tuple(seen)))

        self.later(took_s * self.rng.random(), look)
        self.later(took_s, done)

    # -------------------------------------------------------------------------------------------------- messages

    def send(self, pipe: Pipe, way: str, what: Callable[[], None], *, delay_s: float | None = None) -> None:
        """A message on a pipe, in order behind those before it."""
        self.messages += 1
        arrives = max(self.now + (self.latency() if delay_s is None else delay_s), pipe.clear_at[way])
        pipe.clear_at[way] = arrives
        self.at(arrives, what)

    def join(self, node: Node, contact: Contact, expiration: float, *, nudge: bool) -> Pipe:
        """Open a stream; a new one costs a few round trips."""
        leader = self.nodes[contact.peer]
        pipe = Pipe(node, leader, nudge, expiration)
        search = node.machine

        def arrive() -> None:
            if not leader.alive:
                if not leader.vanished:
                    self.later(self.latency(), lambda: self.break_pipe(pipe))
                return
            if not pipe.open:
                return
            node.met.add(leader.number)
            leader.met.add(node.number)
            if leader.machine is None:
                self.answer(pipe, JoinRefused("not-looking", ""))
                return
            if (old := leader.inbound.get(node.peer)) is not None:
                if expiration < old.expiration:
                    self.answer(pipe, JoinRefused("later", ""))
                    return
                del leader.inbound[node.peer]
                self.answer(old, JoinRefused("replaced", ""))
                self.feed(leader, JoinEnded(node.peer))
            leader.inbound[node.peer] = pipe
            self.feed(leader, JoinRequested(node.contact, expiration, node.setup.reduces, node.setup.contributes))

        def timeout() -> None:
            if not pipe.answered and node.machine is search:
                self.break_pipe(pipe)

        self.send(pipe, "up", arrive, delay_s=self.latency() * (1 if leader.number in node.met else 5))
        self.later(REQUEST_TIMEOUT_S, timeout)
        return pipe

    def leave(self, pipe: Pipe) -> None:
        """The asker closes its side."""
        pipe.open = False

        def arrive() -> None:
            if pipe.leader.inbound.get(pipe.asker.peer) is pipe:
                del pipe.leader.inbound[pipe.asker.peer]
                self.feed(pipe.leader, JoinEnded(pipe.asker.peer))

        self.send(pipe, "up", arrive)

    def break_pipe(self, pipe: Pipe) -> None:
        """Both sides see the end."""
        node, leader = pipe.asker, pipe.leader
        if leader.inbound.get(node.peer) is pipe:
            del leader.inbound[node.peer]
            self.feed(leader, JoinEnded(node.peer))
        was_open, pipe.open, pipe.answered = pipe.open, False, True
        if was_open and pipe.nudge:
            self.feed(node, Nudged(leader.peer, None))
        elif was_open and node.asking is pipe:
            node.asking = None
            self.feed(node, LeaderLost(leader.peer, "lost"))

    def down(self, node: Node, peer: PeerID, message: Message, group: Group | None = None) -> None:
        """A leader's message to one that asked it."""
        pipe = node.inbound.get(peer)
        assert pipe is not None, f"answers {type(message).__name__} to one that has not asked"
        if isinstance(message, JoinRefused | JoinRedirected):
            del node.inbound[peer]
        self.answer(pipe, message, group)

    def answer(self, pipe: Pipe, message: Message, group: Group | None = None) -> None:
        """Send an answer down."""
        node, leader = pipe.asker, pipe.leader

        def arrive() -> None:
            if not pipe.open or not node.alive:
                return
            pipe.answered = True
            if pipe.nudge:
                pipe.open = False
                assert isinstance(message, JoinRefused | JoinRedirected), "a nudge is never accepted"
                self.feed(node, Nudged(leader.peer, message))
                return
            assert node.asking is pipe
            if isinstance(message, JoinRefused | JoinRedirected):
                pipe.open = False
                node.asking = None
            if group is not None:
                assert node.machine is not None
                assert node.machine.phase is SearchPhase.FOLLOWING
                assert node.group is None, "in two groups"
                node.group = group
            self.feed(node, Answered(leader.peer, message))

        self.send(pipe, "down", arrive)

    # ------------------------------------------------------------------------------------------------ invariants

    def check(self) -> None:
        """What holds after every event."""
        for node in self.nodes.values():
            machine = node.machine
            if machine is None or not node.alive or machine.phase is SearchPhase.OVER:
                continue
            if machine.phase is SearchPhase.FOLLOWING:
                assert not machine.followers, "follows and leads"
            for peer in machine.followers:
                follower = self.nodes[peer]
                counted = follower.asking is not None and follower.asking.leader is node and follower.machine
                if counted and follower.setup.leads and follower.alive:
                    assert counted.key > machine.key, "a follower that is earlier than its leader"

    def check_groups(self) -> None:
        """What holds in the end."""
        taken: dict[PeerID, Group] = {}
        for group in self.groups:
            assert len(set(group.members)) == len(group.members), "a member twice"
            assert group.leader.peer in group.members
        for node in self.nodes.values():
            if node.group is not None:
                assert node.peer in node.group.members, "began in a group that does not name it"
                assert node.peer not in taken
                taken[node.peer] = node.group
            if node.machine is not None and node.alive:
                assert node.machine.phase is SearchPhase.OVER, f"{node.number} searches for ever"
                assert (node.group is not None) + (node.failure is not None) + node.cancelled >= 1
        for group in self.groups:
            for peer in group.members:
                member = self.nodes[peer]
                if member.group is not group:
                    lost = not member.alive or not group.leader.alive or member.cancelled
                    assert lost, f"{member.number} was begun without knowing it"
