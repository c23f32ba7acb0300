"""Rounds with a member that lies: the others end with equal bits, or without an average, and name the liar alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from itertools import count
from typing import Any

import pytest
import torch
from blake3 import blake3
from msgspec.structs import replace

from shoal.averaging.allreduce.round import Outcome, Round
from shoal.averaging.allreduce.vector import NO_DIGEST
from shoal.base.peer import PeerID
from shoal.errors import RoundFailed
from shoal.events import PeerDropped
from shoal.protocol import wire
from shoal.protocol.wire import Abort, Assign, Commit, Held, PartAverage, Reduce, Report, Shown, encode
from tests.sim.round_kit import ROUND, RoundPeer, gather_group, signed_by
from tests.sim.rpc_kit import SimNet, on_sim
from tests.situations import reaches

NUMEL = 600
SLICES = [200, 200, 200]


async def group_of(net: SimNet, word: str) -> list[RoundPeer]:
    """A letter for each member: `t` contributes and reduces, `c` only dials, `a` is auxiliary; the first decides."""
    group = [
        await RoundPeer.make(net, f"p{i}", torch.full((NUMEL,), float(i)), auxiliary=kind == "a", client=kind == "c")
        for i, kind in enumerate(word)
    ]
    await gather_group(group)
    return group


async def members(net: SimNet, names: Sequence[str] = ("p0", "p1", "p2")) -> list[RoundPeer]:
    """A group; the first one decides."""
    group = [await RoundPeer.make(net, name, torch.full((NUMEL,), float(i))) for i, name in enumerate(names)]
    await gather_group(group)
    return group


async def played(
    group: Sequence[RoundPeer],
    twist: Callable[[list[Round]], None],
    *,
    shares: Sequence[int] = SLICES,
    **options: Any,
) -> list[Outcome | RoundFailed]:
    """One round, of which `twist` makes a member lie; what each member ends with."""
    rounds = [each.round(group, shares, **options) for each in group]
    twist(rounds)
    ends = await asyncio.gather(*(round_.run() for round_ in rounds), return_exceptions=True)
    for each, end in zip(group, ends, strict=True):
        if isinstance(end, Outcome) and not each.auxiliary:
            each.vector.overwrite()
    await asyncio.gather(*(round_.close() for round_ in rounds))
    for each in group:
        each.release()
    assert all(isinstance(end, Outcome | RoundFailed) for end in ends)
    return [end for end in ends if isinstance(end, Outcome | RoundFailed)]


def named(peer: RoundPeer) -> set[PeerID]:
    """The peers that this one has dropped."""
    return {event.peer for event in peer.peer.seen(PeerDropped)}


def bits(peer: RoundPeer) -> bytes:
    """Its tensor."""
    return peer.vector.tensors[0].numpy().tobytes()


def gives_each_other_bytes(liar: Round, how: str) -> None:
    """It gives the second member that gets a tile other values; when that one asks again the true ones, or these."""
    average, given = liar._tiles.average, Counter[int]()

    async def lying(number: int) -> Any:
        message, data = await average(number)  # type: ignore[misc]
        assert isinstance(message, PartAverage)
        assert data is not None
        given[number] += 1
        if given[number] == 1 or (given[number] > 2 and how == "once"):
            return message, data
        wrong = bytearray(data)
        wrong[:4] = torch.tensor([0.25]).numpy().tobytes()
        held = message.held
        if how != "under the same digest":
            held = replace(held, digest=liar._tiles._digests.of(held, wrong))
        return PartAverage(held), wrong

    liar._tiles.average = lying  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["under the same digest", "once", "always"])
@pytest.mark.parametrize("where", [1, 2])
@pytest.mark.parametrize("group", ["ttt", "tttt", "aattt", "ttac"])
def test_a_reducer_that_gives_one_member_other_bytes_is_named_by_it(group: str, where: int, how: str) -> None:
    """The cheated one takes the average that all others have. Nobody names it.

    If the reducer stayed with its lie, the cheated one took nothing, and named the leader, which was honest.
    """

    async def scenario(net: SimNet) -> None:
        made = await group_of(net, group)
        shares = [0] * len(group)
        shares[where] = NUMEL
        ends = await played(made, lambda rounds: gives_each_other_bytes(rounds[where], how), shares=shares)
        assert all(isinstance(end, Outcome) for end in ends)
        takers = [each for each, kind in zip(made, group, strict=True) if kind != "a"]
        assert len({bits(each) for each in takers}) == 1
        liar = made[where].peer.peer_id
        accused = [named(each) for index, each in enumerate(made) if index != where]
        assert {liar} in accused
        assert all(names <= {liar} for names in accused)

    on_sim(scenario)


@pytest.mark.parametrize("how", ["under the same digest", "once", "always"])
def test_a_leader_that_gives_one_member_other_bytes_is_named_by_it(how: str) -> None:
    """The cheated one asks it alone, as what it commits is its own word. If it stays with its lie, the round fails."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)
        plan = reaches("a reducer gives a member two averages of one tile") if how == "once" else nullcontext()
        with plan:
            ends = await played(group, lambda rounds: gives_each_other_bytes(rounds[0], how), shares=[NUMEL, 0, 0])
        failed = [index for index, end in enumerate(ends) if not isinstance(end, Outcome)]
        assert len(failed) == (how == "always")
        assert len({bits(each) for index, each in enumerate(group) if index not in failed}) == 1
        accused = [named(each) for each in group[1:]]
        assert sorted(accused, key=len) == [set(), {group[0].peer.peer_id}]

    on_sim(scenario)


def cheats(liar: Round, victim: int) -> None:
    """It gives this member averages of its own, and stays with them."""
    average, serve, asker = liar._tiles.average, liar._exchange.serve, ContextVar[int]("asker")

    async def lying(number: int) -> Any:
        found = await average(number)
        if asker.get() != victim or found is None or not isinstance(message := found[0], PartAverage):
            return found
        wrong = bytearray(torch.full((NUMEL // 3,), 7.0).numpy().tobytes())
        return PartAverage(replace(message.held, digest=liar._tiles._digests.of(message.held, wrong))), wrong

    async def serving(stream: Any, sender: int) -> None:
        asker.set(sender)
        await serve(stream, sender)

    liar._tiles.average, liar._exchange.serve = lying, serving  # type: ignore[method-assign]


@pytest.mark.parametrize("victim", [0, 2, 3], ids=["the leader", "a reducer", "a client"])
def test_each_member_that_a_reducer_cheats_has_the_average_of_all_others(victim: int) -> None:
    """The victim names it; nobody else is named by anybody. Its average was committed if the leader was the victim."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "tttc")
        ends = await played(group, lambda rounds: cheats(rounds[1], victim), shares=[*SLICES, 0])
        assert all(isinstance(end, Outcome) and len(end.contributors) == 4 for end in ends)
        assert [each.vector.tensors[0].tolist() for each in group] == [[1.5] * NUMEL] * 4
        liar = group[1].peer.peer_id
        assert [named(each) for each in group] == [{liar} if place == victim else set() for place in range(4)]

    on_sim(scenario)


@pytest.mark.parametrize("group", ["tattt", "aatt"])
def test_a_reducer_that_does_not_say_which_average_it_made_is_named(group: str) -> None:
    """It is auxiliary, and reports only that it moves bytes. The leader was named, and the round failed at its end."""

    async def scenario(net: SimNet) -> None:
        made = await group_of(net, group)

        def twist(rounds: list[Round]) -> None:
            cheats(rounds[1], 2)
            moved = count(1)

            def report(moved_bytes: int) -> Report:
                return Report(moved_bytes=moved_bytes + next(moved))

            rounds[1].machine.report = report  # type: ignore[method-assign]

        with reaches("the maker of a disputed tile does not say what it made"):
            ends = await played(made, twist, shares=[*SLICES, *([0] * (len(group) - 3))])
        assert all(isinstance(end, Outcome) for end in ends)
        assert asyncio.get_running_loop().time() < 5.0
        takers = [each for each, kind in zip(made, group, strict=True) if kind != "a"]
        assert len({bits(each) for each in takers}) == 1
        assert named(made[0]) == {made[1].peer.peer_id}
        assert all(named(each) <= {made[1].peer.peer_id} for each in takers)

    on_sim(scenario)


def reports(liar: Round, change: Callable[[Held], Held], first: int = 1) -> None:
    """It reports something else of the first tile of this member (the second one) than it holds."""
    report, first = liar.machine.report, liar.machine.rules.reducer.index(first)

    def lying(moved_bytes: int) -> Any:
        honest = report(moved_bytes)
        return replace(honest, held=[change(held) if held.tile == first else held for held in honest.held])

    liar.machine.report = lying  # type: ignore[method-assign]


@pytest.mark.parametrize("how", ["another average", "a false signature"])
def test_a_reducer_that_signs_what_it_did_not_give_reduces_no_more(how: str) -> None:
    """The leader names it, and has the tile averaged anew; its values count all the same."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)

        def twist(rounds: list[Round]) -> None:
            if how == "another average":
                reports(rounds[1], lambda held: replace(held, digest=b"another one 16 b"))
            else:
                gives_each_other_bytes(rounds[1], "always")
                rounds[1]._words.signed_report = lambda report: report  # type: ignore[method-assign]

        ends = await played(group, twist)
        assert all(isinstance(end, Outcome) and len(end.contributors) == 3 for end in ends)
        assert [each.vector.tensors[0].tolist() for each in group] == [[1.0] * NUMEL] * 3
        assert named(group[0]) == {group[1].peer.peer_id}
        assert named(group[2]) <= {group[1].peer.peer_id}

    on_sim(scenario)


def test_a_member_that_reports_another_average_than_it_was_given_has_nobody_named() -> None:
    """It is shown what the reducer has signed; that is what it knows already."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)
        ends = await played(
            group, lambda rounds: reports(rounds[2], lambda held: replace(held, digest=b"another one 16 b"))
        )
        assert all(isinstance(end, Outcome) for end in ends)
        assert len({bits(each) for each in group}) == 1
        assert [named(each) for each in group] == [set()] * 3

    on_sim(scenario)


def test_a_leader_whose_reducers_lie_was_named_by_the_only_trainer() -> None:
    """It has most reducers replaced. Each has signed another average than it gave, and the trainer is shown that."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "aaat")
        seen = list[Any]()

        def twist(rounds: list[Round]) -> None:
            for liar in (1, 2):
                reports(rounds[liar], lambda held: replace(held, digest=b"another one 16 b"), first=liar)
            seen.append(rounds[3])

        ends = await played(group, twist, shares=[*SLICES, 0])
        assert isinstance(ends[3], Outcome)
        assert named(group[3]) == {group[1].peer.peer_id, group[2].peer.peer_id}
        assert not seen[0].seen().led_badly

    on_sim(scenario)


@pytest.mark.parametrize("word", ["aat", "att"])
@pytest.mark.parametrize("said", [{"weight": 0.5}, {"contributors": b"\x01"}])
def test_a_reducer_that_says_of_its_average_what_it_does_not_had_the_leader_named(
    word: str, said: dict[str, Any]
) -> None:
    """The leader does not hold that average, and heard one word against one. The trainers could not take its commit."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, word)
        seen = list[Round]()

        def twist(rounds: list[Round]) -> None:
            reports(rounds[1], lambda held: replace(held, **said))
            seen.extend(rounds)

        ends = await played(group, twist, shares=[NUMEL // 2, NUMEL // 2, 0])
        assert isinstance(ends[2], Outcome)
        assert group[0].peer.peer_id not in named(group[2])
        assert not seen[2].seen().led_badly

    on_sim(scenario)


def takes_none(round_: Round) -> None:
    """It reads no average of others."""

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    round_._exchange._answered = never  # type: ignore[assignment, method-assign]
    round_._watch_coordinator = lambda now: None  # type: ignore[method-assign]


def test_a_leader_waited_to_the_end_for_one_that_takes_none_of_its_averages() -> None:
    """Nobody else held its tiles, so it waited for itself; as on a line that loses large packets one way."""

    async def scenario(net: SimNet) -> None:
        group = await members(net, ["p0", "p1"])
        seen = list[Round]()

        def twist(rounds: list[Round]) -> None:
            takes_none(rounds[1])
            seen.extend(rounds)

        ends = await played(group, twist, shares=[NUMEL // 2, NUMEL // 2])
        assert isinstance(ends[0], RoundFailed)
        assert asyncio.get_running_loop().time() < 15.0
        assert named(group[0]) == {group[1].peer.peer_id}
        assert seen[0].seen().late == {group[1].peer.peer_id}

    on_sim(scenario)


def test_a_leader_of_two_that_takes_none_of_its_averages_failed_nobody() -> None:
    """It aborted the round, and its member counted on it in the next one."""

    async def scenario(net: SimNet) -> None:
        group = await members(net, ["p0", "p1"])
        seen = list[Round]()

        def twist(rounds: list[Round]) -> None:
            takes_none(rounds[0])
            seen.extend(rounds)

        ends = await played(group, twist, shares=[NUMEL // 2, NUMEL // 2])
        assert isinstance(ends[1], RoundFailed)
        assert seen[1].seen().late == {group[0].peer.peer_id}
        assert not seen[1].seen().led_badly  # else neither would follow the other one

    on_sim(scenario)


@pytest.mark.parametrize("liar", [1, 2])
def test_an_auxiliary_leader_left_the_honest_one_of_two_out_as_slow(liar: int) -> None:
    """Its tile came to nobody, as the only other one that was to hold it took none. The round came to nothing."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "att")
        honest = 3 - liar
        ends = await played(group, lambda rounds: takes_none(rounds[liar]))
        end = ends[honest]
        assert isinstance(end, Outcome)
        assert group[honest].peer.peer_id in end.contributors
        assert named(group[0]) == {group[liar].peer.peer_id}

    on_sim(scenario)


def test_what_a_reducer_has_signed_is_checked_once() -> None:
    """However often the leader shows it."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)
        checked = list[Any]()

        def twist(rounds: list[Round]) -> None:
            report = rounds[1].machine.report

            def telling(moved_bytes: int) -> Report:
                found = report(moved_bytes)
                if rounds[1].machine.has_made(found):
                    for _ in range(100):
                        rounds[0]._control._to_say[2].put_nowait(Shown(1, rounds[1]._words.signed_report(found)))
                return found

            rounds[1].machine.report = telling  # type: ignore[method-assign]
            takes = rounds[2]._words.takes

            def checking(message: Any) -> bool:
                checked.append(message)
                return takes(message)

            rounds[2]._words.takes = checking  # type: ignore[method-assign]

        await played(group, twist)
        assert sum(isinstance(each, Shown) for each in checked) == 1
        assert named(group[2]) == set()

    on_sim(scenario)


def test_a_leader_that_shows_what_the_reducer_has_not_signed_is_named() -> None:
    """And its word is worth nothing."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)
        false = Shown(1, Report([Held(1, 0, b"\x07", 3.0, b"d" * 16)], signature=b"s" * 64))
        await played(group, lambda rounds: rounds[0]._control._to_say[2].put_nowait(false))
        assert named(group[2]) == {group[0].peer.peer_id}
        assert named(group[1]) <= {group[2].peer.peer_id}

    on_sim(scenario)


def gives_what_nobody_assigned(liar: Round) -> None:
    """Before each average it gives one of a tile of the leader, under an attempt that nobody has heard of."""
    tiles = liar._tiles
    serve = liar._exchange.serve

    async def serving(stream: Any, sender: int) -> None:
        send = stream.send

        async def sending(message: Any, data: Any = None) -> None:
            held = replace(message.held, tile=0, attempt=1, digest=NO_DIGEST)
            await send(PartAverage(replace(held, digest=tiles._digests.of(held, data))), data)
            await send(message, data)

        stream.send = sending
        await serve(stream, sender)

    liar._exchange.serve = serving  # type: ignore[method-assign]


def test_an_average_of_an_attempt_that_nobody_assigned_voided_the_one_that_was_held() -> None:
    """Its receiver reported a tile that nobody knew, and was left out. Now the liar's stream waits, and it is."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)
        ends = await played(group, lambda rounds: gives_what_nobody_assigned(rounds[1]))
        assert all(isinstance(end, Outcome) for end in ends)
        assert named(group[0]) == {group[1].peer.peer_id}
        assert bits(group[0]) == bits(group[1]) == bits(group[2])

    on_sim(scenario)


def commits_otherwise(leader: Round, victim: int, **said: Any) -> None:
    """The leader gives one member another commit than the others."""
    put = leader._control._to_say[victim].put_nowait

    def lying(message: Any) -> None:
        if isinstance(message, Commit):
            other = Commit(message.round_id, [replace(held, **said) for held in message.tiles])
            message = signed_by(leader._table.identity, leader, other)
        put(message)

    leader._control._to_say[victim].put_nowait = lying  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("said", [{"weight": 2.0}, {"contributors": b"\x03"}, {"attempt": 1}], ids=str)
def test_a_leader_that_gives_each_member_another_commit_is_named(said: dict[str, Any]) -> None:
    """The one that it lies to asks the others for the verdict, and ends with the commit that all others have."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)
        ends = await played(group, lambda rounds: commits_otherwise(rounds[0], 1, **said))
        commits = [end.commit for end in ends if isinstance(end, Outcome)]
        assert len(commits) == 3
        assert commits[0] == commits[1] == commits[2]
        assert named(group[1]) == {group[0].peer.peer_id}
        assert named(group[2]) == set()

    on_sim(scenario)


@pytest.mark.parametrize("second", [Abort(ROUND, "no"), Commit(ROUND, [Held(0, 0, b"\x07", 3.0, b"d" * 16)] * 3)])
def test_a_leader_that_takes_its_commit_back_is_named(second: Any) -> None:
    """Its members keep what was committed. A member that still fetched an average gave the round up."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)

        def twist(rounds: list[Round]) -> None:
            put = rounds[0]._control._to_say[1].put_nowait

            def lying(message: Any) -> None:
                put(message)
                if isinstance(message, Commit):
                    put(signed_by(rounds[0]._table.identity, rounds[0], second))

            rounds[0]._control._to_say[1].put_nowait = lying  # type: ignore[method-assign, assignment]

        ends = await played(group, twist)
        assert all(isinstance(end, Outcome) for end in ends)
        assert named(group[1]) == {group[0].peer.peer_id}
        assert named(group[2]) == set()
        assert bits(group[0]) == bits(group[1]) == bits(group[2])

    on_sim(scenario)


@pytest.mark.parametrize("lie", ["gathered", "tile_bytes"])
def test_a_leader_that_begins_another_group_with_each_member_is_named(lie: str) -> None:
    """Other words of the members would make other options and other names of one step: no two take different ones."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)
        rounds = [each.round(group, SLICES) for each in group]
        begin = wire.Begin(ROUND, [each.member() for each in group], 0, SLICES, 1024)
        assert rounds[0].terms == blake3(encode(begin)).digest(length=16)
        if lie == "gathered":
            begin = replace(begin, members=[replace(begin.members[0], gathered=b"\x01"), *begin.members[1:]])
        else:
            begin = replace(begin, tile_bytes=begin.tile_bytes + 1)
        rounds[2].terms = blake3(encode(begin)).digest(length=16)
        rounds[2]._exchange._opening = Reduce(ROUND, rounds[2].terms)
        ends = await asyncio.gather(*(round_.run() for round_ in rounds), return_exceptions=True)
        await asyncio.gather(*(round_.close() for round_ in rounds))
        for each in group:
            each.release()
        leader = group[0].peer.peer_id
        assert leader in named(group[1]) | named(group[2])
        assert not (
            isinstance(ends[1], Outcome)
            and isinstance(ends[2], Outcome)
            and group[2].peer.peer_id in ends[1].contributors
        )

    on_sim(scenario)


def test_a_member_that_reports_what_its_average_does_not_say_is_named_by_the_coordinator() -> None:
    """Its word was committed if its place was the first one: then nobody could succeed."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)

        def twist(rounds: list[Round]) -> None:
            report = rounds[1].machine.report

            def lying(moved_bytes: int) -> Any:
                honest = report(moved_bytes)
                return replace(honest, held=[replace(held, weight=1.0) for held in honest.held])

            rounds[1].machine.report = lying  # type: ignore[method-assign]

        ends = await played(group, twist)
        commits = [end.commit for end in ends if isinstance(end, Outcome)]
        assert len(commits) == 3
        assert {held.weight for held in commits[0].tiles} == {3.0}
        assert named(group[0]) == {group[1].peer.peer_id}
        assert named(group[2]) == set()

    on_sim(scenario)


@pytest.mark.parametrize(
    "order",
    [
        Assign([0], 1 << 62, 1),
        Assign([0], 4, 1),
        Assign([0], 1, 1023),
        Assign([8191], 1, 1),
        Commit(b"round of a test!", [Held(0, 1 << 62, b"\x07", 3.0, b"d" * 16)]),
        Abort(b"another round id", "no"),
    ],
    ids=["attempt of 2^62", "attempt", "reducer", "tile", "commit of 2^62", "abort"],
)
def test_an_order_that_has_no_place_in_the_round_costs_its_leader_the_round(order: Any) -> None:
    """Its member is not stuck, names it, and asks the others for the verdict: the round goes on without its word."""

    async def scenario(net: SimNet) -> None:
        group = await members(net)

        def twist(rounds: list[Round]) -> None:
            rounds[0]._control._to_say[1].put_nowait(signed_by(rounds[0]._table.identity, rounds[0], order))

        ends = await played(group, twist)
        assert isinstance(ends[2], Outcome)
        assert named(group[1]) == {group[0].peer.peer_id}
        assert group[0].peer.peer_id not in named(group[2])

    on_sim(scenario)
