"""The commit rule as a pure model: three peers, two tiles, every order of messages, crashes and suspicions.

This is the specification that `docs/why/decisions/0001-commit-and-fork-rules.md` puts in words;
`shoal.averaging.allreduce.commit` follows it. A state is a tuple of small tuples, so that all reachable states can be
held in a set. What is *not* modelled is over-approximated: contributions are not messages here, a reducer may finish
the average of its tile at any moment; a member may learn a commit from any living peer that knows it, at any moment.
More can happen here than in the protocol.

Some peers may be *auxiliary*: they average what they own, and want no averages. They hold what they averaged themselves
and nothing else; the commit is all that they need.

The coordinator may *step aside*, if it is the one that is slow: it leaves itself out like any other member, and goes on
deciding. It does so while more than `MIN_GROUP` are left, and need not do so at all.

A member may *doubt* the coordinator, wrongly too: it has been silent. Then it asks the others, and gives up when none
of them may still learn the verdict. A member that gives up is out of the round, as if it had crashed.

An average is named by (tile, attempt): the model checks that no two peers ever finish the same one, so equal names mean
equal bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

PEERS = (0, 1, 2)
TILES = (0, 1)
COORDINATOR = 0
MIN_GROUP = 2
NONE = -1

Pair = tuple[int, int]


class Member(NamedTuple):
    """What one peer knows: per tile the attempt and reducer it believes in, and the attempt that it holds."""

    attempt: Pair
    reducer: Pair
    held: Pair = (NONE, NONE)
    commit: Pair | None = None
    succeeded: Pair | None = None


class State(NamedTuple):
    """Everything: peers, coordinator, and what is on its way."""

    contributes: tuple[bool, bool, bool]  # False: auxiliary
    aside: bool | None  # whether the coordinator has stepped aside; None: it never does
    alive: tuple[bool, bool, bool]
    members: tuple[Member, Member, Member]
    finished: tuple[tuple[int, ...], tuple[int, ...]]  # per tile: attempts that somebody averaged, in that order
    suspects: frozenset[int]
    attempt: Pair  # the coordinator's assignment
    reducer: Pair
    reported: tuple[Pair, Pair, Pair]  # what the coordinator knows each member to hold
    commit: Pair | None
    aborted: bool
    averages: frozenset[tuple[int, int, int, int]]  # (tile, attempt, sender, receiver) on the way
    reports: tuple[tuple[Pair, ...], ...]  # member -> coordinator, in order
    control: tuple[tuple[object, ...], ...]  # coordinator -> member, in order
    doubts: frozenset[int] | None = None  # who doubts the coordinator, or has; None: nobody ever does
    gave_up: frozenset[int] = frozenset()  # for that reason


class Broken(AssertionError):
    """A reachable state breaks the rule."""


def start(
    reducer: Pair, auxiliary: frozenset[int] = frozenset(), *, aside: bool = False, doubts: bool = False
) -> State:
    """The group has begun; nothing was averaged."""
    member = Member(attempt=(0, 0), reducer=reducer)
    return State(
        contributes=(0 not in auxiliary, 1 not in auxiliary, 2 not in auxiliary),
        aside=False if aside else None,
        alive=(True, True, True),
        members=(member, member, member),
        finished=((), ()),
        suspects=frozenset(),
        attempt=(0, 0),
        reducer=reducer,
        reported=((NONE, NONE),) * 3,
        commit=None,
        aborted=False,
        averages=frozenset(),
        reports=((), (), ()),
        control=((), (), ()),
        doubts=frozenset() if doubts else None,
    )


def _put(items: tuple, index: int, value: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:index], value, *items[index + 1 :])


def _with_member(state: State, peer: int, member: Member) -> State:
    """Replace a member; it succeeds the moment it holds exactly what was committed; report what it newly holds.

    An auxiliary one succeeds with the commit.
    """
    before = state.members[peer]
    if member.commit is not None and member.succeeded is None:
        if not state.contributes[peer]:
            member = member._replace(succeeded=member.commit)
        elif member.held == member.commit:
            member = member._replace(succeeded=member.held)
    state = state._replace(members=_put(state.members, peer, member))
    if member.held != before.held:
        if peer == COORDINATOR:
            state = state._replace(reported=_put(state.reported, peer, member.held))
        else:
            state = state._replace(reports=_put(state.reports, peer, (*state.reports[peer], member.held)))
    return state


def _hold(state: State, peer: int, tile: int, attempt: int) -> State:
    member = state.members[peer]
    if attempt < member.attempt[tile] or member.held[tile] >= attempt:
        return state  # older bytes are void
    if member.commit is not None and attempt != member.commit[tile]:
        return state
    return _with_member(
        state,
        peer,
        member._replace(attempt=_put(member.attempt, tile, attempt), held=_put(member.held, tile, attempt)),
    )


def _send(state: State, peers: Iterator[int] | frozenset[int], message: object) -> State:
    for peer in sorted(peers):
        state = state._replace(control=_put(state.control, peer, (*state.control[peer], message)))
    return state


def _assigned(state: State, peer: int, tile: int, attempt: int, reducer: int) -> State:
    """A member processes Assign."""
    member = state.members[peer]
    if member.commit is not None or attempt < member.attempt[tile]:
        return state
    held = member.held if member.held[tile] >= attempt else _put(member.held, tile, NONE)
    member = member._replace(
        attempt=_put(member.attempt, tile, attempt), reducer=_put(member.reducer, tile, reducer), held=held
    )
    # The member's loss of an old average needs no report: the coordinator raised the attempt itself.
    state = state._replace(members=_put(state.members, peer, member))
    asks = state.contributes[peer] and held[tile] == NONE and reducer != peer
    if asks and state.alive[reducer] and state.members[reducer].held[tile] >= attempt:
        theirs = state.members[reducer].held[tile]
        state = state._replace(averages=state.averages | {(tile, theirs, reducer, peer)})
    return state


def _need(state: State, live: list[int]) -> list[int]:
    """The members that must hold every tile before the commit: those that contribute."""
    return [peer for peer in live if state.contributes[peer]]


def _suspect(state: State, lost: int) -> State:
    """The coordinator leaves `lost` out: another reducer holds its tiles already, or averages them again."""
    state = state._replace(suspects=state.suspects | {lost})
    live = [peer for peer in PEERS if peer not in state.suspects]
    need = _need(state, live)
    if len(live) < MIN_GROUP or not need:
        return state._replace(aborted=True)
    for tile in TILES:
        if state.reducer[tile] != lost:
            continue
        holders = [peer for peer in live if state.reported[peer][tile] == state.attempt[tile]]
        if set(need) <= set(holders):
            continue
        attempt = state.attempt[tile] if holders else state.attempt[tile] + 1
        reducer = (holders or live)[0]
        state = state._replace(attempt=_put(state.attempt, tile, attempt), reducer=_put(state.reducer, tile, reducer))
        for peer in live:
            if peer == COORDINATOR:
                state = _assigned(state, peer, tile, attempt, reducer)
            else:
                state = _send(state, frozenset({peer}), ("assign", tile, attempt, reducer))
    return state


def _forget(state: State) -> State:
    """Drop what can make no difference any more, so that equal futures are one state."""
    members = state.members
    for peer, member in enumerate(members):
        if not state.alive[peer]:
            members = _put(members, peer, Member((0, 0), (0, 0), succeeded=member.succeeded))
        elif member.commit is not None:
            members = _put(members, peer, member._replace(attempt=member.commit, reducer=(NONE, NONE)))
    useful = {
        (tile, attempt, sender, receiver)
        for tile, attempt, sender, receiver in state.averages
        if state.alive[receiver]
        and attempt >= members[receiver].attempt[tile]
        and attempt > members[receiver].held[tile]
        and members[receiver].succeeded is None
    }
    state = state._replace(members=members, averages=frozenset(useful))
    control = tuple(queue if state.alive[peer] else () for peer, queue in enumerate(state.control))
    if not state.alive[COORDINATOR] or state.commit is not None or state.aborted:
        state = state._replace(
            reported=((NONE, NONE),) * 3,
            reports=((), (), ()),
            attempt=(0, 0),
            reducer=(0, 0),
            suspects=frozenset(),
        )
    else:
        reports = tuple(() if peer in state.suspects else queue for peer, queue in enumerate(state.reports))
        state = state._replace(reports=reports)
    return state._replace(control=control)


def steps(state: State, crashes: int) -> Iterator[tuple[str, bool, State]]:
    """Every step from here: (name, whether it must happen sooner or later, the state after)."""
    yield from _member_steps(state)
    yield from _delivery_steps(state)
    yield from _coordinator_steps(state)
    yield from _doubt_steps(state)
    if sum(not alive for alive in state.alive) - len(state.gave_up) < crashes:
        for peer in PEERS:
            if state.alive[peer]:
                yield f"crash {peer}", False, state._replace(alive=_put(state.alive, peer, False))


def _member_steps(state: State) -> Iterator[tuple[str, bool, State]]:
    for peer in PEERS:
        member = state.members[peer]
        if not state.alive[peer]:
            continue
        for tile in TILES:
            attempt = member.attempt[tile]
            if member.reducer[tile] == peer and member.held[tile] < attempt and member.commit is None:
                if attempt in state.finished[tile]:
                    raise Broken(f"tile {tile} attempt {attempt} was averaged twice")
                after = _hold(state, peer, tile, attempt)
                sent = {(tile, attempt, peer, other) for other in PEERS if other != peer and state.contributes[other]}
                finished = _put(after.finished, tile, (*after.finished[tile], attempt))
                after = after._replace(finished=finished, averages=after.averages | sent)
                yield f"{peer} averages tile {tile} attempt {attempt}", True, after
        if member.commit is None:
            continue
        for other in PEERS:
            if other == peer or not state.alive[other]:
                continue
            if state.members[other].commit is None:
                yield f"{peer} relays the commit to {other}", True, _learn(state, other, member.commit)
            for tile in TILES if state.contributes[peer] else ():
                if member.held[tile] != member.commit[tile] and state.members[other].held[tile] == member.commit[tile]:
                    yield (
                        f"{peer} fetches tile {tile} from {other}",
                        True,
                        _hold(state, peer, tile, member.commit[tile]),
                    )


def _learn(state: State, peer: int, commit: Pair) -> State:
    member = state.members[peer]
    held: Pair = tuple(h if h == c else NONE for h, c in zip(member.held, commit, strict=True))  # type: ignore[assignment]
    return _with_member(state, peer, member._replace(commit=commit, attempt=commit, held=held))


def _delivery_steps(state: State) -> Iterator[tuple[str, bool, State]]:
    for average in state.averages:
        tile, attempt, sender, receiver = average
        left = state._replace(averages=state.averages - {average})
        if state.alive[receiver]:
            yield f"{receiver} receives tile {tile} attempt {attempt}", True, _hold(left, receiver, tile, attempt)
        if not state.alive[sender] or not state.alive[receiver]:
            yield f"tile {tile} attempt {attempt} to {receiver} is lost", False, left
    for peer in PEERS:
        if state.control[peer]:
            message, rest = state.control[peer][0], state.control[peer][1:]
            left = state._replace(control=_put(state.control, peer, rest))
            if state.alive[peer]:
                assert isinstance(message, tuple)
                after = (
                    _learn(left, peer, message[1]) if message[0] == "commit" else _assigned(left, peer, *message[1:])
                )
                yield f"{peer} receives {message}", True, after
            if not state.alive[COORDINATOR]:
                yield f"control to {peer} is lost", False, state._replace(control=_put(state.control, peer, ()))
        if state.reports[peer] and state.alive[COORDINATOR]:
            held, later = state.reports[peer][0], state.reports[peer][1:]
            left = state._replace(reports=_put(state.reports, peer, later), reported=_put(state.reported, peer, held))
            yield f"coordinator hears that {peer} holds {held}", True, left


def _coordinator_steps(state: State) -> Iterator[tuple[str, bool, State]]:
    if not state.alive[COORDINATOR] or state.commit is not None or state.aborted:
        return
    live = [peer for peer in PEERS if peer not in state.suspects]
    if all(state.reported[peer] == state.attempt for peer in _need(state, live)):
        after = state._replace(commit=state.attempt)
        after = _learn(after, COORDINATOR, state.attempt)
        yield "coordinator commits", True, _send(after, frozenset(PEERS) - {COORDINATOR}, ("commit", state.attempt))
    for peer in PEERS:
        if peer != COORDINATOR and peer not in state.suspects:
            yield f"coordinator suspects {peer}", not state.alive[peer], _suspect(state, peer)
    if state.aside is False and len(live) > MIN_GROUP:
        yield "coordinator steps aside", False, _suspect(state, COORDINATOR)._replace(aside=True)


def _doubt_steps(state: State) -> Iterator[tuple[str, bool, State]]:
    for peer in PEERS if state.doubts is not None else ():
        if peer == COORDINATOR or not state.alive[peer] or state.members[peer].commit is not None:
            continue
        assert state.doubts is not None
        if peer not in state.doubts:
            yield f"{peer} doubts the coordinator", False, state._replace(doubts=state.doubts | {peer})
        elif _may_give_up(state, peer):
            alive = _put(state.alive, peer, False)
            yield f"{peer} gives up", True, state._replace(alive=alive, gave_up=state.gave_up | {peer})


def _may_give_up(state: State, peer: int) -> bool:
    """Whether none of the others may still learn the verdict: each doubts the coordinator too, and has no verdict."""
    assert state.doubts is not None
    others = [other for other in PEERS if other not in (peer, COORDINATOR) and state.alive[other]]
    return all(other in state.doubts and state.members[other].commit is None for other in others)


def check(state: State) -> None:
    """Agreement: nobody that succeeded, dead or alive, holds anything but what was committed."""
    for peer in PEERS:
        if (result := state.members[peer].succeeded) is not None and result != state.commit:
            raise Broken(f"peer {peer} succeeded with {result}, committed was {state.commit}")


def check_end(state: State) -> None:
    """When nothing more must happen and the coordinator lives: all who live have the average, or too few are left.

    One exception: a coordinator that is auxiliary, or stepped aside, may hold nothing. A member that was left out
    then needs another contributing member to get the average from, and fails if all of them died after the commit.
    """
    if not state.alive[COORDINATOR] or state.aborted:
        return
    if state.commit is None:
        raise Broken("the coordinator lives, enough members live, and there is no verdict")
    for peer in state.gave_up:
        if any(state.alive[other] and other not in (state.doubts or ()) for other in PEERS if other != COORDINATOR):
            raise Broken(f"peer {peer} gave up a round that was committed, and another knows the verdict")
    for peer in PEERS:
        if state.alive[peer] and state.members[peer].succeeded is None and not _orphaned(state, peer):
            raise Broken(f"peer {peer} lives and never learns the average")


def _orphaned(state: State, peer: int) -> bool:
    """Whether the commit was made without the coordinator's averages, and everybody else who has them is dead."""
    others = [other for other in PEERS if other != peer and state.contributes[other]]
    without = state.aside is True or not state.contributes[COORDINATOR]
    return without and bool(others) and not any(state.alive[other] for other in others)


def explore(
    reducer: Pair,
    crashes: int,
    auxiliary: frozenset[int] = frozenset(),
    *,
    aside: bool = False,
    doubts: bool = False,
) -> int:
    """Visit every reachable state; returns how many there are. Raises `Broken` with the way there."""
    first = start(reducer, auxiliary, aside=aside, doubts=doubts)
    came_from: dict[State, tuple[State, str] | None] = {first: None}
    frontier = [first]
    while frontier:
        state = frontier.pop()
        try:
            check(state)
            must = False
            for name, fair, after in steps(state, crashes):
                after = _forget(after)
                must = must or (fair and after != state)
                if after not in came_from:
                    came_from[after] = (state, name)
                    frontier.append(after)
            if not must:
                check_end(state)
        except Broken as broken:
            path = []
            step = came_from[state]
            while step is not None:
                path.append(step[1])
                step = came_from[step[0]]
            raise Broken(f"{broken}, after: {'; '.join(reversed(path))}") from None
    return len(came_from)
