"""The fork rule as a pure model: three peers, every order of rounds, lost verdicts, stale news and adoptions.

This is the specification that `docs/decisions/0001-commit-and-fork-rules.md` puts in words; `shoal.progress` follows it.

A peer is at a *state*: epoch, samples, digest, and what the parameters really are (`history`, which no peer can see).
What can happen, in any order:

- a *round* of any peers at the same state: it commits, but only some of them learn the verdict and move on together, by
  a step (one epoch more, as many samples as members) or by an averaging of states (same epoch, one sample more);
- a peer *hears* where another one stands now, or *loses* it from view; what it heard before may be long stale;
- a peer that sees a better key than its own *adopts* the present state of one of those that it believes to be best.

Checked in every reachable state: equal digests are equal histories; an adoption makes the adopter's key larger, so
nothing goes in circles; and when everybody sees everybody and nobody has anything to adopt, all are at one state, which
is as good as the best one before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import chain, combinations
from typing import NamedTuple

from shoal.progress import StateKey

PEERS = (0, 1, 2)
STEP, MIX = "step", "mix"


class Broken(AssertionError):
    """A reachable state breaks the rule."""


class State(NamedTuple):
    """What one peer has. `history` is what its parameters are made of; the rest is what others are told."""

    epoch: int
    samples: int
    digest: bytes
    history: tuple[object, ...]


View = tuple[State | None, State | None, State | None]


class World(NamedTuple):
    """Everybody: where each peer is, and what each has heard of the others last."""

    states: tuple[State, State, State]
    views: tuple[View, View, View]


# ------------------------------------------------------------------------------------- the rule, in replaceable pieces


def key(state: State) -> tuple[object, ...]:
    """What makes a state better than another."""
    return StateKey.of(state.epoch, state.samples, state.digest)


def name(parent: State, members: tuple[int, ...], kind: str, salt: str) -> bytes:
    """The digest of the state that a round gives."""
    return hashlib.sha256(f"{salt}{members}{kind}".encode() + parent.digest).digest()


def leaders(me: int, own: State, view: View) -> tuple[int, ...]:
    """Whose state this peer would adopt: those with the best key in its view, if that is better than its own."""
    seen = [(peer, key(state)) for peer, state in enumerate(view) if state is not None and peer != me]
    best = max([key(own), *(each for _, each in seen)])  # type: ignore[type-var]
    return tuple(peer for peer, each in seen if each == best and each != key(own))


def adopted(own: State, seen: State, present: State) -> State:
    """What the adopter has afterwards, given the donor's state as it was seen and as it is."""
    return present


# ----------------------------------------------------------------------------------------------------------- the search


def start() -> World:
    """All at the same genesis, nothing heard."""
    genesis = State(0, 0, bytes(32), ())
    return World((genesis,) * 3, ((None,) * 3,) * 3)


def _subsets(items: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(items, size) for size in range(1, len(items) + 1))


def _rounds(world: World, epochs: int, salt: str) -> Iterator[World]:
    for members in _subsets(PEERS):
        parent = world.states[members[0]]
        if any(world.states[peer].digest != parent.digest for peer in members):
            continue
        for kind in (STEP, MIX):
            mixed = bool(parent.history) and parent.history[-1] == (MIX,)
            if (kind == STEP and parent.epoch == epochs) or (kind == MIX and (mixed or len(members) == 1)):
                continue
            after = State(
                parent.epoch + (kind == STEP),
                parent.samples + (len(members) if kind == STEP else 1),
                name(parent, members, kind, salt),
                (parent.history, members, (kind,)),
            )
            for learned in _subsets(members):
                states = tuple(after if peer in learned else world.states[peer] for peer in PEERS)
                yield world._replace(states=states)  # type: ignore[arg-type]


def _see(world: World, me: int, other: int, state: State | None) -> World:
    view = tuple(state if peer == other else seen for peer, seen in enumerate(world.views[me]))
    return world._replace(views=tuple(view if peer == me else v for peer, v in enumerate(world.views)))  # type: ignore[arg-type]


def _adoptions(world: World) -> Iterator[tuple[int, World]]:
    for me in PEERS:
        for other in leaders(me, world.states[me], world.views[me]):
            seen = world.views[me][other]
            assert seen is not None
            mine = adopted(world.states[me], seen, world.states[other])
            yield me, world._replace(states=tuple(mine if p == me else s for p, s in enumerate(world.states)))  # type: ignore[arg-type]


def moves(world: World, epochs: int, salt: str) -> Iterator[World]:
    """Every next state of the world."""
    yield from _rounds(world, epochs, salt)
    for me in PEERS:
        for other in PEERS:
            if me != other:
                yield _see(world, me, other, world.states[other])
                yield _see(world, me, other, None)
    yield from (after for _, after in _adoptions(world))


def check(world: World) -> None:
    """What holds in every reachable state."""
    for one, other in combinations(world.states, 2):
        if one.digest == other.digest and one.history != other.history:
            raise Broken(f"one digest for two histories: {one.history} and {other.history}")
    present = all(world.views[a][b] == world.states[b] for a in PEERS for b in PEERS if a != b)
    adoptions = list(_adoptions(world))
    for me, after in adoptions:
        if not key(after.states[me]) > key(world.states[me]):  # type: ignore[operator]
            raise Broken(f"peer {me} adopts a state that is no better than its own")
        if max(map(key, after.states)) < max(map(key, world.states)):  # type: ignore[type-var]
            raise Broken("the best state got lost")
    if present and not adoptions and len({state.digest for state in world.states}) > 1:
        raise Broken("all see each other, nobody moves, and they are not at one state")


def explore(*, epochs: int, salt: str = "", limit: int = 10**6) -> int:
    """Visit every reachable world; returns how many there are.

    Raises:
        Broken: one of them breaks the rule.
    """
    first = start()
    seen = {first}
    frontier = [first]
    while frontier:
        world = frontier.pop()
        check(world)
        for after in moves(world, epochs, salt):
            for peer in PEERS:
                if key(after.states[peer]) < key(world.states[peer]):  # type: ignore[operator]
                    raise Broken(f"the key of peer {peer} went down")
            if after not in seen:
                seen.add(after)
                frontier.append(after)
                if len(seen) > limit:
                    raise RuntimeError(f"more than {limit} states: make the model smaller")
    return len(seen)
