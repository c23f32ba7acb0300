"""The fork rule of a model in parts: a vector of chains of states, one for each part, as `shoal.strategies` has them.

Three peers, two parts. A round is of one part, and of any peers at one state of that part, wherever they are with the
other one; only some of its members learn the verdict. A peer that knows of a better state of a part adopts that part
alone. What a peer has heard may be long stale: it adopts the present state of a peer that was once better.

Checked in every reachable world: equal names of a part are equal histories of it; no peer's key of any part goes down,
whatever happens to the other part; and when nobody has anything to adopt, all are at one state of each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from tests.model.fork_model import PEERS, STEP, Broken, State, key, name

PARTS = (0, 1)
_LIMIT = 100_000

States = tuple[State, ...]


class PartWorld(NamedTuple):
    """For each part, the state of each peer."""

    parts: tuple[States, ...]


Adopt = Callable[[PartWorld, int, int, int], PartWorld]
"""The world after a peer has adopted what a donor has, as the donor's state of one part is better."""


def adopt_part(world: PartWorld, part: int, me: int, donor: int) -> PartWorld:
    """The rule: a download is of one part."""
    return _changed(world, part, {me: world.parts[part][donor]})


def _changed(world: PartWorld, part: int, states: dict[int, State]) -> PartWorld:
    after = tuple(states.get(peer, state) for peer, state in enumerate(world.parts[part]))
    return PartWorld(tuple(after if each == part else others for each, others in enumerate(world.parts)))


class PartSearch:
    """Visits every reachable world.

    Args:
        adopt: the rule, or a mutant.
        epochs: no part is merged more often on any chain.
        named: the name of the state that a round of these members gives; of a part.
    """

    def __init__(
        self,
        adopt: Adopt = adopt_part,
        *,
        epochs: tuple[int, ...] = (2, 1),
        named: Callable[[State, tuple[int, ...], int], bytes] | None = None,
    ) -> None:
        self._adopt, self._epochs = adopt, epochs
        self._named = named or (lambda parent, members, part: name(parent, members, f"{STEP} {part}"))

    def run(self) -> int:
        """How many worlds there are.

        Raises:
            Broken: one of them breaks the rule.
        """
        first = PartWorld(tuple((State.of(0, 0, bytes([part]) * 32, (part,)),) * len(PEERS) for part in PARTS))
        seen, frontier = {first}, [first]
        while frontier:
            world = frontier.pop()
            adoptions = list(self._adoptions(world))
            self._check(world, settled=not adoptions)
            for after in (*self._rounds(world), *adoptions):
                self._check_step(world, after)
                if after not in seen:
                    seen.add(after)
                    frontier.append(after)
            if len(seen) > _LIMIT:
                raise RuntimeError(f"more than {_LIMIT} worlds: make the model smaller")
        return len(seen)

    def _rounds(self, world: PartWorld) -> Iterator[PartWorld]:
        for part, states in enumerate(world.parts):
            for members in _subsets(PEERS):
                parent = states[members[0]]
                if parent.epoch == self._epochs[part] or any(states[peer] is not parent for peer in members):
                    continue
                digest = self._named(parent, members, part)
                history = (parent.history, members, part)
                after = State.of(parent.epoch + 1, parent.samples + len(members), digest, history)
                for learned in _subsets(members):
                    yield _changed(world, part, dict.fromkeys(learned, after))

    def _adoptions(self, world: PartWorld) -> Iterator[PartWorld]:
        for part, states in enumerate(world.parts):
            for me in PEERS:
                for donor in PEERS:
                    if key(states[donor]) > key(states[me]):
                        yield self._adopt(world, part, me, donor)

    @staticmethod
    def _check(world: PartWorld, *, settled: bool) -> None:
        for part, states in enumerate(world.parts):
            for one, other in combinations(states, 2):
                if one.digest == other.digest and one is not other:
                    raise Broken(f"one name for two states of part {part}: {one} and {other}")
            if settled and len(set(states)) > 1:
                raise Broken(f"nobody moves, and they are not at one state of part {part}")
        if {state.digest for state in world.parts[0]} & {state.digest for state in world.parts[1]}:
            raise Broken("one name for states of two parts")

    @staticmethod
    def _check_step(before: PartWorld, after: PartWorld) -> None:
        for part, (was, now) in enumerate(zip(before.parts, after.parts, strict=True)):
            for peer in PEERS:
                if key(now[peer]) < key(was[peer]):
                    raise Broken(f"part {part} of peer {peer} went back")


def _subsets(items: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)
