"""The machines of a round in one world: three members, and every message on its way, in every order of events.

`World` holds the state machines that run in the protocol. `search` visits every state that they can reach. Sums are not
messages here: a reducer may finish the average of its tile at any moment. So more can happen than in the protocol.

A state is the pickles of its parts, equal ones for equal parts. A step reads and writes only the machines that it uses.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, Self, TypeVar

import msgspec

from shoal.averaging.allreduce.commit import Ask, Average, MemberRules, Order
from shoal.averaging.allreduce.coordinator import Coordinator, CoordinatorAction, Send
from shoal.averaging.allreduce.lateness import Lateness
from shoal.averaging.allreduce.member import Contributions, Finish, MemberAction, MemberMachine
from shoal.base.peer import PeerID
from shoal.protocol.wire import Abort, Assign, Commit, Contact, Gone, Held, Message, PartAbsent, Report
from shoal.protocol.wire import Member as WireMember
from tests.model.commit_model import COORDINATOR, PEERS, Broken

ROUND = b"r" * 16

M = TypeVar("M")
State = tuple[bytes, ...]
"""The pickles of what is on its way, of the members, and of the coordinator."""


class _Anytime(Contributions):
    """Waits for nobody: the world says when a sum is complete."""

    def own(self, tile: int, attempt: int, now: float) -> list[Finish]:
        return []

    def exclude(self, sender: int) -> list[Finish]:
        return []


_ANYTIME = _Anytime(0, (), silence_s=1.0, now=0.0)


@cache
def _group(contributes: tuple[bool, ...]) -> list[WireMember]:
    peers = [PeerID(bytes([index]) * 32) for index in PEERS]
    return [WireMember(Contact(peer), True, None, b"", values) for peer, values in zip(peers, contributes, strict=True)]


class Member(MemberMachine):
    """The machine of a member, without the parts of it that are the same in all states."""

    def __init__(self, me: int, reducers: Sequence[int], contributes: tuple[bool, ...]) -> None:
        super().__init__(ROUND, me, COORDINATOR, _group(contributes), reducers, silence_s=1.0, now=0.0)
        self.contributions, self.contributing = _ANYTIME, contributes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _SAME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        same = _member(state["me"], state["contributing"])
        self.__dict__.update(same.__dict__, **state)
        # Who is late makes a difference to later rounds only. Who gave an average makes one where somebody lies: here
        # the look for the giver would fail.
        self._reducing, self._owed, self.unheard, self._giver = _NOBODY, Counter[int](), set(), {}


_NOBODY = Lateness((), now=0.0)
_SAME = {
    *("contributions", "members", "coordinator", "round_id", "most_weights", "_most_weight", "_able", "_has_brief"),
    *("_began", "_complete_at", "_promised_s", "_first_reducer", "_reducing", "_owed", "unheard", "_giver"),
}


@cache
def _member(me: int, contributes: tuple[bool, ...]) -> Member:
    return Member(me, (0, 0), contributes)


@cache
def _dead(me: int, contributes: tuple[bool, ...]) -> bytes:
    """A member that does nothing any more."""
    member = Member(me, (), contributes)
    member.rules = MemberRules(me, (), contributes=contributes[me])
    member.rules.failed = "dead"
    return _written(member)


class Decider(Coordinator):
    """The machine of the coordinator, without what it does after some time: none passes here."""

    def __init__(self, reducers: Sequence[int], contributes: Sequence[bool]) -> None:
        reduces, few = [True] * len(contributes), 2
        super().__init__(ROUND, reducers, reduces, contributes, COORDINATOR, min_group_size=few, stall_s=1.0, now=0.0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _OF_TIME}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(_decider(len(state["reduces"])).__dict__, **state)


_OF_TIME = {
    *("brief", "stall_s", "_allowed_s", "_margin_s", "_began", "_ticked", "_progress", "_heard", "_moved_bytes"),
    *("_reducing", "_receiving", "_given_at", "_named_at", "_words", "_is_signed", "_unsaid_at"),
}


@cache
def _decider(members: int) -> Decider:
    return Decider((), (True,) * members)


# --------------------------------------------------------------------------------------------------------- the pickles

_messages: list[Message] = []
_numbers: dict[tuple[type, bytes], int] = {}


def _message(number: int) -> Message:
    return _messages[number]


def _numbered(message: Message) -> tuple[Callable[[int], Message], tuple[int]]:
    """A message never changes: its number stands for it."""
    number = _numbers.setdefault((type(message), msgspec.msgpack.encode(message)), len(_messages))
    if number == len(_messages):
        _messages.append(message)
    return _message, (number,)


class _Pickler(pickle.Pickler):
    dispatch_table = dict.fromkeys((Abort, Assign, Commit, Gone, Held, Report), _numbered)


def _written(part: object) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.fast = True  # whether two parts refer to one object, or to equal ones, makes no difference
    pickler.dump(part)
    return file.getvalue()


_read = cache(pickle.loads)


class _Machines(Generic[M]):
    """Machines: each is read from its pickle when it is used, and written again only then."""

    def __init__(self, pickles: Sequence[bytes]) -> None:
        self._pickles, self._used = list(pickles), dict[int, M]()

    def __getitem__(self, place: int) -> M:
        if place not in self._used:
            self._used[place] = pickle.loads(self._pickles[place])
        return self._used[place]

    def __setitem__(self, place: int, pickled: bytes) -> None:
        self._used.pop(place, None)
        self._pickles[place] = pickled

    def look(self, place: int) -> M:
        """To look at only: states share it."""
        machine: M = self._used[place] if place in self._used else _read(self._pickles[place])
        return machine

    def pickles(self) -> list[bytes]:
        """All, as they are now."""
        for place, machine in self._used.items():
            self._pickles[place] = _written(machine)
        return self._pickles


class World:
    """One state of the search.

    Args:
        reducers: of the two tiles, at first.
        auxiliary: the members that have no values.
        may_step_aside: the coordinator may leave itself out.
        may_doubt: members may give up on a coordinator that lives.
    """

    def __init__(
        self, reducers: tuple[int, ...], auxiliary: set[int], *, may_step_aside: bool = False, may_doubt: bool = False
    ) -> None:
        self.may_step_aside, self.aside, self.may_doubt = may_step_aside, False, may_doubt
        self.gave_up: list[int] = []  # on the coordinator; as if they had crashed
        self.alive = [True] * 3
        self.contributes = tuple(peer not in auxiliary for peer in PEERS)
        self.members = _Machines[Member]([_written(Member(peer, reducers, self.contributes)) for peer in PEERS])
        self._decider = _Machines[Decider]([_written(Decider(reducers, self.contributes))])
        self.averaging: list[tuple[int, int, int]] = []  # peer, tile, attempt
        self.finished: list[tuple[int, int]] = []
        self.averages: list[tuple[int, int, int, int]] = []  # tile, attempt, sender, receiver
        self.asks: list[tuple[int, int, int, int]] = []  # tile, attempt, asked, asking
        self.reports: list[list[Report]] = [[], [], []]
        self.control: list[list[Any]] = [[], [], []]
        for peer in PEERS:
            self.do(peer, self.members[peer].start(0.0))

    @property
    def coordinator(self) -> Decider:
        """The machine that decides."""
        return self._decider[0]

    # ----------------------------------------------------------------------------------------------------- the steps

    def moves(self, crashes: int) -> Iterator[tuple[str, bool, tuple[Any, ...]]]:
        """Every step from here: (method, whether it must happen sooner or later, arguments)."""
        rules, decides = self.coordinator.rules, self.alive[COORDINATOR]
        yield from (("finish", True, work) for work in self.averaging)
        members = [self.members.look(peer) for peer in PEERS]
        yield from (("obtain", True, each) for each in self.averages if not members[each[3]].is_ahead(*each[:2]))
        yield from (("answer", True, ask) for ask in self.asks if self.alive[ask[2]])
        lost = {(sender, receiver) for *_, sender, receiver in (*self.averages, *self.asks) if not self.alive[sender]}
        yield from (("stream_breaks", True, pair) for pair in sorted(lost))
        for peer in PEERS:
            if self.reports[peer] and decides:
                yield "hear", True, (peer,)
            if self.control[peer]:
                yield "obey", True, (peer,)
            if peer != COORDINATOR and not decides and self.members[peer].may_learn and self.alive[peer]:
                yield "cut", False, (peer,)
            if peer != COORDINATOR and peer in rules.live and decides and rules.verdict is None:
                yield "suspect", not self.alive[peer], (peer,)
            if peer == COORDINATOR and self.may_step_aside and len(rules.live) == len(PEERS) and decides:
                yield "suspect", False, (COORDINATOR,)
            if self.alive[peer]:
                yield from self._moves_of(peer)
                if self.alive.count(False) - len(self.gave_up) < crashes:
                    yield "crash", False, (peer,)

    def _moves_of(self, peer: int) -> Iterator[tuple[str, bool, tuple[Any, ...]]]:
        member = self.members[peer]
        others = [other for other in PEERS if other != peer and self.alive[other]]
        if member.rules.commit is not None:
            yield from (("relay", True, (other, peer)) for other in others if not self.members[other].decided)
        elif self.may_doubt and peer != COORDINATOR and not member.decided:
            if member.may_learn:
                yield "doubt", False, (peer,)
            elif not self.hopes(peer):
                yield "leave", True, (peer,)

    def hopes(self, peer: int) -> bool:
        """Whether another member says that it knows the verdict, or may still learn it: what `AskVerdict` asks."""
        others = [self.members[other] for other in PEERS if other not in (peer, COORDINATOR) and self.alive[other]]
        return any(each.rules.commit is not None or each.may_learn for each in others)

    def finish(self, peer: int, tile: int, attempt: int) -> None:
        """A reducer averages a tile, and sends it to everybody."""
        self.averaging.remove((peer, tile, attempt))
        if attempt < self.members[peer].rules.attempt[tile]:
            return
        if (tile, attempt) in self.finished:
            raise Broken(f"tile {tile} attempt {attempt} was averaged twice")
        self.finished = sorted([*self.finished, (tile, attempt)])
        self.hold(peer, tile, attempt, peer)
        self.averages += [(tile, attempt, peer, other) for other in PEERS if other != peer and self.contributes[other]]

    def obtain(self, tile: int, attempt: int, sender: int, receiver: int) -> None:
        """An average reaches a member."""
        self.averages.remove((tile, attempt, sender, receiver))
        self.hold(receiver, tile, attempt, sender)

    def hold(self, peer: int, tile: int, attempt: int, giver: int) -> None:
        """The bytes of an average are at a member."""
        member = self.members[peer]
        if member.takes(tile, attempt, giver):
            member.rules.expect(tile, attempt)
            member.averaged(Held(tile, attempt, b"\x07", 3.0, f"{tile}/{attempt}".encode().ljust(16)), 0.0, giver)
        self.do(peer, [])

    def answer(self, tile: int, attempt: int, asked: int, asking: int) -> None:
        """A member gives an average that it is asked for, or says that it has none; as `Exchange._requested` does."""
        self.asks.remove((tile, attempt, asked, asking))
        rules = self.members[asked].rules
        held = rules.held[tile]
        if held is not None and held.attempt >= attempt:
            self.averages.append((tile, held.attempt, asked, asking))
        elif rules.commit is not None or rules.failed is not None or rules.reducer[tile] != asked:
            self.do(asking, self.members[asking].source_lost(asked, PartAbsent(tile, attempt)))
        # Otherwise it averages the tile itself, and gives it to everybody then.

    def stream_breaks(self, sender: int, receiver: int) -> None:
        """The other side is dead: what it was to give does not come."""
        self.averages = [each for each in self.averages if each[2:] != (sender, receiver)]
        self.asks = [each for each in self.asks if each[2:] != (sender, receiver)]
        self.do(receiver, self.members[receiver].source_lost(sender, None))

    def hear(self, peer: int) -> None:
        """The coordinator reads a member's next report."""
        self.tell(self.coordinator.reported(peer, self.reports[peer].pop(0), 0.0))

    def suspect(self, peer: int) -> None:
        """The coordinator leaves a member out, perhaps itself."""
        self.aside = self.aside or peer == COORDINATOR
        self.tell(self.coordinator.leave_out(peer, "suspected", 0.0))

    def tell(self, actions: list[CoordinatorAction]) -> None:
        """Send what the coordinator says."""
        for action in actions:
            if isinstance(action, Send):
                self.control[action.member].append(action.message)

    def obey(self, peer: int) -> None:
        """A member reads the coordinator's next message."""
        message: Order = self.control[peer].pop(0)
        member = self.members[peer]
        if isinstance(message, Assign) and not member.decided:
            assert member.fits(message), "an honest word is taken for a lie"
        self.do(peer, self.members[peer].obey(message, 0.0))

    def relay(self, peer: int, knows: int) -> None:
        """A member hears the verdict from another one."""
        commit = self.members[knows].rules.commit
        assert commit is not None
        self.do(peer, self.members[peer].obey(commit, 0.0))

    def doubt(self, peer: int) -> None:
        """A member takes the coordinator for lost, rightly or not. What the coordinator says still arrives."""
        self.do(peer, self.members[peer].coordinator_lost("silent"))

    def cut(self, peer: int) -> None:
        """The stream of a dead coordinator ends: what was on its way is lost."""
        self.control[peer] = []
        self.doubt(peer)

    def leave(self, peer: int) -> None:
        """A member gives up on a coordinator that it doubts."""
        if self.members[peer].give_up("outcome unknown"):
            self.alive[peer] = False
            self.gave_up = sorted([*self.gave_up, peer])

    def crash(self, peer: int) -> None:
        """A member dies."""
        self.alive[peer] = False

    def do(self, peer: int, actions: list[MemberAction]) -> None:
        """Carry out what a member is to do, and let it report."""
        for action in actions:
            match action:
                case Average(tile, attempt):
                    self.averaging = sorted({*self.averaging, (peer, tile, attempt)})
                case Ask(tile, attempt, source):
                    self.asks = sorted({*self.asks, (tile, attempt, source, peer)})
        member = self.members[peer]
        if not member.decided and ((report := member.report(0)).held or report.lost):
            self.reports[peer].append(report)

    # ----------------------------------------------------------------------------------------------------- the states

    @classmethod
    def at(cls, state: State) -> Self:
        """The world in this state."""
        world = cls.__new__(cls)
        world.__dict__.update(pickle.loads(state[0]))
        world.members, world._decider = _Machines(state[1:-1]), _Machines(state[-1:])
        return world

    def state(self) -> State:
        """The state, without what can make no difference any more."""
        for peer in PEERS:
            rules = self.members.look(peer).rules
            if not self.alive[peer]:
                self.control[peer] = []
                self.members[peer] = _dead(peer, self.contributes)
            elif rules.succeeded and rules.reducer:
                rules = self.members[peer].rules
                rules.reducer, rules._owner, rules.replaced = [], [], set()
                self.members[peer]._asked = {}
            if not self.alive[peer] or rules.succeeded:
                self.averaging = [work for work in self.averaging if work[0] != peer]
        rules_of_all = self._decider.look(0).rules
        if (rules_of_all.verdict is not None or not self.alive[COORDINATOR]) and rules_of_all.live:
            verdict = rules_of_all.verdict
            self._decider[0] = _written(Decider((), ()))
            self.coordinator.rules.verdict = verdict
        live = self._decider.look(0).rules.live
        self.reports = [queue if peer in live else [] for peer, queue in enumerate(self.reports)]
        wants = [self.members.look(peer).rules.wants for peer in PEERS]
        self.averages = sorted({each for each in self.averages if wants[each[3]](*each[:2])})
        self.asks = [each for each in self.asks if wants[each[3]](*each[:2])]
        others = {name: value for name, value in self.__dict__.items() if name not in ("members", "_decider")}
        return _written(others), *self.members.pickles(), *self._decider.pickles()

    def check(self) -> None:
        """Agreement: members that succeeded, dead or alive, hold the same committed averages."""
        done = [(peer, rules) for peer in PEERS if (rules := self.members.look(peer).rules).succeeded]
        commits = [tuple(due.digest for due in rules.commit.tiles) for _, rules in done if rules.commit is not None]
        if len(set(commits)) > 1:
            raise Broken(f"members succeeded with different verdicts: {commits}")
        for peer, rules in done:
            held = [each.digest if each else None for each in rules.held]
            if any(a != due and (a or self.contributes[peer]) for a, due in zip(held, commits[0], strict=True)):
                raise Broken(f"peer {peer} succeeded with {held}, committed was {commits[0]}")

    def check_end(self) -> None:
        """When nothing more must happen, and the coordinator lives: see `commit_model.check_end`."""
        verdict = self.coordinator.rules.verdict
        if not self.alive[COORDINATOR]:
            return
        if verdict is None:
            raise Broken("the coordinator lives and there is no verdict")
        for peer in self.gave_up if isinstance(verdict, Commit) else ():
            if any(self.alive[other] and self.members[other].may_learn for other in PEERS if other != COORDINATOR):
                raise Broken(f"peer {peer} gave up a round that was committed, and another knows the verdict")
        for peer in PEERS:
            others = [other for other in PEERS if other != peer and self.contributes[other]]
            without = self.aside or not self.contributes[COORDINATOR]
            if without and others and not any(self.alive[other] for other in others):
                continue
            if isinstance(verdict, Commit) and self.alive[peer] and not self.members[peer].rules.succeeded:
                raise Broken(f"peer {peer} lives and never gets the average: {self.members[peer].rules.failed}")


def search(world: World, crashes: int) -> int:
    """Visit every state that can be reached with so many crashes; returns how many there are.

    Raises:
        Broken: a state breaks a promise; with the way there.
    """
    first = world.state()
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    frontier = [first]
    while frontier:
        state = frontier.pop()
        try:
            here = World.at(state)
            here.check()
            must = False
            for name, fair, arguments in list(here.moves(crashes)):
                world = World.at(state)
                getattr(world, name)(*arguments)
                after = world.state()
                must = must or (fair and after != state)
                if after not in came_from:
                    came_from[after] = state, f"{name}{arguments}"
                    frontier.append(after)
            if not must:
                here.check_end()
        except Broken as error:
            way = []
            while (before := came_from[state]) is not None:
                state, step = before
                way.append(step)
            raise Broken(f"{error}; after {', '.join(reversed(way))}") from error
    return len(came_from)
