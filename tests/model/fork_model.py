"""The fork rule as a pure model: three peers, every order of rounds, lost verdicts, stale news and adoptions.

This is the specification that `docs/why/decisions/0001-commit-and-fork-rules.md` puts in words;
`shoal.run.view.progress` follows it.

A peer is at a *state*: epoch, samples, digest, and what its parameters are really made of (`history`, which no peer can
see). What can happen, in any order:

- a *round* of any peers at the same state: it commits, but only some of them learn the verdict and move on together, by
  a step (one epoch more, as many samples as members) or by an averaging of states (same epoch, one sample more);
- a peer *hears* where another one stands now; what it heard before may be long stale. (It may also *lose* it from
  view, but that leads nowhere new: a test counts.)
- a peer that sees a better key than its own *adopts* the present state of one of those that it believes to be best.

Checked in every reachable world: equal digests are equal histories; no peer's key goes down, and an adoption makes it
larger, so nothing goes in circles; no adoption loses the best state; and when all see each other and nobody has
anything to adopt, all are at one state.

One of the peers may be a *client*, which nobody can download from. Then all this holds for the others among themselves;
the client's key may go down once after each round that it was alone in, and in the end it is at the state of the others
or at one that it made together with some of them, which they did not learn of. If it lends (it gives its state to those
that it has dialed), the same holds, and what it did alone is lost only where the others came as far.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain, combinations
from typing import Any, NamedTuple

from shoal.run.view.progress import StateKey

PEERS = (0, 1, 2)
STEP, MIX = "step", "mix"
_LIMIT = 200_000

History = tuple[Any, ...]


class Broken(AssertionError):
    """A reachable world breaks the rule."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """What one peer has: `epoch`, `samples` and `digest` are told to others. Equal states are one object."""

    epoch: int
    samples: int
    digest: bytes
    history: History

    @staticmethod
    @cache
    def of(epoch: int, samples: int, digest: bytes, history: History) -> State:
        """The one object with these values."""
        return State(epoch, samples, digest, history)


View = tuple[State | None, State | None, State | None]


class World(NamedTuple):
    """Everybody: where each peer is, and what each has heard of the others last (None: nothing that matters)."""

    states: tuple[State, State, State]
    views: tuple[View, View, View]


# ----------------------------------------------------------------------------------------------------------- the rule


@dataclass(frozen=True)
class Rule:
    """The rule in pieces; a mutant replaces one of them.

    Attributes:
        key: makes states comparable: the larger is the better one.
        name: the digest of the state that a round of these members gives.
        leaders: whose states a peer would adopt, given its own and what it sees of the others.
        adopted: what the adopter has afterwards, given its own state, the donor's as it was seen, and as it is.
    """

    key: Callable[[State], Any]
    name: Callable[[State, tuple[int, ...], str], bytes]
    leaders: Callable[[Rule, int, State, View], tuple[int, ...]]
    adopted: Callable[[State, State, State], State]


def key(state: State) -> Any:
    """The real order of states."""
    return StateKey.of(state.epoch, state.samples, state.digest)


def name(parent: State, members: tuple[int, ...], kind: str) -> bytes:
    """A hash over the parent, the members and the kind of round."""
    return hashlib.sha256(f"{members}{kind}".encode() + parent.digest).digest()


def leaders(rule: Rule, me: int, own: State, view: View) -> tuple[int, ...]:
    """Those with the best key in view, if that is better than ours."""
    seen = [(rule.key(state), peer) for peer, state in enumerate(view) if state is not None]
    best = max([rule.key(own), *(each for each, _ in seen)])
    return tuple(peer for each, peer in seen if each == best and each != rule.key(own))


def adopted(own: State, seen: State, present: State) -> State:
    """The donor's state as it is by then."""
    return present


RULE = Rule(key, name, leaders, adopted)


# ----------------------------------------------------------------------------------------------------------- the search


def _subsets(items: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, size) for size in range(1, len(items) + 1))


class Search:
    """Visits every reachable world.

    Args:
        rule: the rule, or a mutant.
        epochs: no peer steps further.
        mixes: states are averaged too, once after each step.
        losses: peers are lost from view, and seen again.
        client: a peer that gives its state to nobody.
        lends: but to the others, if these are behind it in epoch and samples.
    """

    def __init__(
        self,
        rule: Rule = RULE,
        *,
        epochs: int,
        mixes: bool = False,
        losses: bool = False,
        client: int | None = None,
        lends: bool = False,
    ) -> None:
        self._lends = lends
        self.rule, self.epochs, self.mixes, self.losses, self.client = rule, epochs, mixes, losses, client
        self._donors = [peer for peer in PEERS if peer != client]
        self._key = cache(rule.key)
        self._after = cache(self._after_round)
        self._leaders = cache(lambda me, own, view: rule.leaders(rule, me, own, view))
        self._matters = cache(self._would_move)
        self._news = cache(self._that_matter)

    def run(self) -> int:
        """How many worlds there are.

        Raises:
            Broken: one of them breaks the rule.
        """
        genesis = State.of(0, 0, bytes(32), ())
        first = World((genesis,) * 3, ((None,) * 3,) * 3)
        seen, frontier = {first}, [first]
        while frontier:
            world = frontier.pop()
            self._check(world)
            for after in self._moves(world):
                if after not in seen:
                    self._check_step(world, after)
                    seen.add(after)
                    frontier.append(after)
            if len(seen) > _LIMIT:
                raise RuntimeError(f"more than {_LIMIT} worlds: make the model smaller")
        return len(seen)

    def _after_round(self, parent: State, members: tuple[int, ...], kind: str) -> State | None:
        """The state that a round gives; None where the model does not go."""
        mixed = parent.history[-1:] == (MIX,)
        if kind == MIX and (not self.mixes or mixed or len(members) < 2 or not parent.epoch):
            return None
        if kind == STEP and parent.epoch == self.epochs:
            return None
        epoch, samples = (1, len(members)) if kind == STEP else (0, 1)
        digest = self.rule.name(parent, members, kind)
        return State.of(parent.epoch + epoch, parent.samples + samples, digest, (parent.history, members, kind))

    def _moves(self, world: World) -> Iterator[World]:
        states = world.states
        for members in _subsets(PEERS):
            parent = states[members[0]]
            if any(states[peer] is not parent for peer in members):
                continue
            for kind in (STEP, MIX):
                if (after := self._after(parent, members, kind)) is not None:
                    for learned in _subsets(members):
                        yield self._world([after if p in learned else states[p] for p in PEERS], world.views)
        for me in PEERS:
            for other in PEERS:
                if me != other:
                    for news in (states[other], None) if self.losses else (states[other],):
                        if world.views[me][other] is not news:
                            view = tuple(news if peer == other else seen for peer, seen in enumerate(world.views[me]))
                            yield self._world(states, [view if p == me else v for p, v in enumerate(world.views)])
        for _, after_adoption in self._adoptions(world):
            yield after_adoption

    def _world(self, states: Any, views: Any) -> World:
        """As given, without what can make no difference: news that alone would not make its hearer move."""
        return World(tuple(states), tuple(self._news(me, states[me], view) for me, view in enumerate(views)))  # type: ignore[arg-type]

    def _that_matter(self, me: int, own: State, view: View) -> View:
        return tuple(  # type: ignore[return-value]
            seen if seen is not None and self._matters(me, own, other, seen) else None
            for other, seen in enumerate(view)
        )

    def _would_move(self, me: int, own: State, other: int, seen: State) -> bool:
        return bool(self._leaders(me, own, tuple(seen if peer == other else None for peer in PEERS)))

    def _adoptions(self, world: World) -> Iterator[tuple[int, World]]:
        for me in PEERS:
            for other in self._leaders(me, world.states[me], world.views[me]):
                seen = world.views[me][other]
                if other == self.client and (
                    not self._lends or self._key(world.states[other]) <= self._key(world.states[me])
                ):
                    continue  # a copy that is no better is not taken, and the client's key may have gone down
                assert seen is not None
                states = list(world.states)
                states[me] = self.rule.adopted(world.states[me], seen, world.states[other])
                yield me, self._world(states, world.views)

    # -- what must hold ------------------------------------------------------------------------------------------

    def _check(self, world: World) -> None:
        states = world.states
        for one, other in combinations(states, 2):
            if one.digest == other.digest and one is not other:
                raise Broken(f"one digest for two states: {one} and {other}")
        adoptions = list(self._adoptions(world))
        for me, after in adoptions:
            if not self._key(after.states[me]) > self._key(states[me]) and not self._was_alone(me, states[me]):
                raise Broken(f"peer {me} adopts a state that is no better than its own")
            if max(self._key(after.states[p]) for p in self._donors) < max(self._key(states[p]) for p in self._donors):
                raise Broken("the best state got lost")
        settled = [state for peer, state in enumerate(states) if peer != self.client or self._was_alone(peer, state)]
        if adoptions or len(set(settled)) == 1:
            return
        everything = [[state if other != me else None for other, state in enumerate(states)] for me in PEERS]
        if self._world(states, [tuple(view) for view in everything]) == world:
            raise Broken("all see each other, nobody moves, and they are not at one state")

    def _was_alone(self, peer: int, state: State) -> bool:
        """Whether this is the client's own: a state that nobody else can have."""
        return peer == self.client and bool(state.history) and state.history[1] == (peer,)

    def _check_step(self, world: World, after: World) -> None:
        for peer in PEERS:
            before = world.states[peer]
            if self._key(after.states[peer]) < self._key(before) and not self._was_alone(peer, before):
                raise Broken(f"the key of peer {peer} went down")
