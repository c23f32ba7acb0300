"""The fork rule of a model in fragments: a vector of chains of states, one for each, as `shoal.strategies` has them.

Three peers, two fragments. A round is of one fragment, and of any peers at one state of it, wherever they are with the
other one; only some of its members learn the verdict. A peer that knows of a better state of a fragment adopts that
fragment alone. What a peer has heard may be long stale: it adopts the present state of a peer that was once better.

Checked in every reachable world: equal names of a fragment are equal histories of it; no peer's key of any fragment
goes down, whatever happens to the other one; and when nobody has anything to adopt, all are at one state of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import NamedTuple

from tests.model.fork_model import PEERS, STEP, Broken, State, key, name

FRAGMENTS = (0, 1)
_LIMIT = 100_000

States = tuple[State, ...]


class FragmentWorld(NamedTuple):
    """For each fragment, the state of each peer."""

    fragments: tuple[States, ...]


Adopt = Callable[[FragmentWorld, int, int, int], FragmentWorld]
"""The world after a peer has adopted what a donor has, as the donor's state of one fragment is better."""


def adopt_fragment(world: FragmentWorld, fragment: int, me: int, donor: int) -> FragmentWorld:
    """The rule: a download is of one fragment."""
    return _changed(world, fragment, {me: world.fragments[fragment][donor]})


def _changed(world: FragmentWorld, fragment: int, states: dict[int, State]) -> FragmentWorld:
    after = tuple(states.get(peer, state) for peer, state in enumerate(world.fragments[fragment]))
    return FragmentWorld(tuple(after if each == fragment else others for each, others in enumerate(world.fragments)))


class FragmentSearch:
    """Visits every reachable world.

    Args:
        adopt: the rule, or a mutant.
        epochs: no fragment is merged more often on any chain.
        named: the name of the state that a round of these members gives; of a fragment.
    """

    def __init__(
        self,
        adopt: Adopt = adopt_fragment,
        *,
        epochs: tuple[int, ...] = (2, 1),
        named: Callable[[State, tuple[int, ...], int], bytes] | None = None,
    ) -> None:
        self._adopt, self._epochs = adopt, epochs
        self._named = named or (lambda parent, members, fragment: name(parent, members, f"{STEP} {fragment}"))

    def run(self) -> int:
        """How many worlds there are.

        Raises:
            Broken: one of them breaks the rule.
        """
        starts = (State.of(0, 0, bytes([fragment]) * 32, (fragment,)) for fragment in FRAGMENTS)
        first = FragmentWorld(tuple((start,) * len(PEERS) for start in starts))
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

    def _rounds(self, world: FragmentWorld) -> Iterator[FragmentWorld]:
        for fragment, states in enumerate(world.fragments):
            for members in _subsets(PEERS):
                parent = states[members[0]]
                if parent.epoch == self._epochs[fragment] or any(states[peer] is not parent for peer in members):
                    continue
                digest = self._named(parent, members, fragment)
                history = (parent.history, members, fragment)
                after = State.of(parent.epoch + 1, parent.samples + len(members), digest, history)
                for learned in _subsets(members):
                    yield _changed(world, fragment, dict.fromkeys(learned, after))

    def _adoptions(self, world: FragmentWorld) -> Iterator[FragmentWorld]:
        for fragment, states in enumerate(world.fragments):
            for me in PEERS:
                for donor in PEERS:
                    if key(states[donor]) > key(states[me]):
                        yield self._adopt(world, fragment, me, donor)

    @staticmethod
    def _check(world: FragmentWorld, *, settled: bool) -> None:
        for fragment, states in enumerate(world.fragments):
            for one, other in combinations(states, 2):
                if one.digest == other.digest and one is not other:
                    raise Broken(f"one name for two states of fragment {fragment}: {one} and {other}")
            if settled and len(set(states)) > 1:
                raise Broken(f"nobody moves, and they are not at one state of fragment {fragment}")
        if {state.digest for state in world.fragments[0]} & {state.digest for state in world.fragments[1]}:
            raise Broken("one name for states of two fragments")

    @staticmethod
    def _check_step(before: FragmentWorld, after: FragmentWorld) -> None:
        for fragment, (was, now) in enumerate(zip(before.fragments, after.fragments, strict=True)):
            for peer in PEERS:
                if key(now[peer]) < key(was[peer]):
                    raise Broken(f"fragment {fragment} of peer {peer} went back")


def _subsets(items: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for size in range(1, len(items) + 1):
        yield from combinations(items, size)
