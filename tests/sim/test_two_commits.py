"""A leader that gives members other averages of its tiles, and the commit that fits: its signatures prove the lie."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from shoal import sim
from shoal.averaging.allreduce.round import Outcome, Round
from shoal.base.peer import PeerID
from shoal.errors import RoundFailed
from shoal.events import Event, PeerDropped
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Commit, CommitDigest, Held, PartAverage, Report
from shoal.strategies import DiLoCo, Strategy
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.round_kit import OPTIONS, ROUND, RoundPeer, gather_group, signed_by
from tests.sim.rpc_kit import SimNet, on_sim
from tests.sim.test_lying_members import bits, group_of, named
from tests.situations import reaches

NUMEL = 600


def two_commits(leader: Round, victims: Collection[int]) -> None:
    """The leader gives these members other averages of its tiles than the others, and a signed commit of them."""
    tiles, deciding = leader._tiles, leader._coordinating
    assert deciding is not None
    asker, lies = ContextVar[PeerID]("asker"), dict[int, tuple[Held, Held]]()
    cheated = {leader.members[victim].contact.peer for victim in victims}
    average, serve, reported = tiles.average, leader._exchange.serve, deciding.reported

    async def lying(number: int) -> Any:
        found = await average(number)
        if asker.get() not in cheated or found is None or not isinstance(message := found[0], PartAverage):
            return found
        assert found[1] is not None
        wrong = bytearray((torch.frombuffer(bytearray(found[1]), dtype=torch.float32) + 1.0).numpy().tobytes())
        lies[number] = message.held, replace(message.held, digest=tiles._digests.of(message.held, wrong))
        return PartAverage(lies[number][1]), wrong

    async def serving(stream: Any, sender: int) -> None:
        asker.set(stream.peer_id)
        await serve(stream, sender)

    def other(held: Held, place: int) -> Held:
        pair = lies.get(held.tile, (held, held))
        return pair[place] if held.digest in (pair[0].digest, pair[1].digest) else held

    def true_words(member: int, message: Report, now: float) -> Any:
        if member in victims:
            message = replace(message, held=[other(held, 0) for held in message.held])
        return reported(member, message, now)

    tiles.average, leader._exchange.serve, deciding.reported = lying, serving, true_words  # type: ignore[method-assign, assignment]

    def says(victim: int) -> None:
        put = leader._control._to_say[victim].put_nowait

        def saying(message: Any) -> None:
            if isinstance(message, Commit):
                lie = Commit(message.round_id, [other(held, 1) for held in message.tiles])
                message = signed_by(leader._table.identity, leader, lie)
            put(message)

        leader._control._to_say[victim].put_nowait = saying  # type: ignore[method-assign, assignment]

    for victim in victims:
        says(victim)
    leader._words.told = lambda _: None  # type: ignore[method-assign, assignment] # it helps nobody to compare
    leader._witness.compare = lambda *_: None  # type: ignore[method-assign]


def shares(group: Sequence[RoundPeer]) -> list[int]:
    """The same share for each member that reduces."""
    reduces = [not each.client for each in group]
    return [NUMEL // sum(reduces) * does for does in reduces]


async def ends_of(group: Sequence[RoundPeer], rounds: Sequence[Round]) -> list[Outcome]:
    """The whole round, which succeeds everywhere, applied and closed."""
    ends = await asyncio.gather(*(round_.run() for round_ in rounds))
    for each in group:
        if not each.auxiliary:
            each.vector.overwrite()
    await asyncio.gather(*(round_.close() for round_ in rounds))
    for each in group:
        each.release()
    return list(ends)


@pytest.mark.parametrize(
    ("word", "victims"),
    [
        ("tttt", {2}),
        ("tttc", {3}),
        ("ttt", {1}),
        ("tttttt", {3, 4, 5}),
        ("attt", {2}),
        ("tcct", {1}),
        ("tttttc", {2, 5}),
    ],
    ids=[
        "a reducer",
        "a client",
        "of three",
        "a half of six",
        "auxiliary",
        "the clients of one reducer",
        "two victims",
    ],
)
def test_a_leader_that_commits_two_averages_was_named_by_nobody(word: str, victims: set[int]) -> None:
    """Both sides succeed, and go on from different averages; each honest member has the proof, and names it alone.

    A client hears what reducers were told. If they were told the same as it, it does not hear of another client.
    """

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, word)
        lied_to = list[PeerID]()
        rounds = [each.round(group, shares(group), on_lie=lied_to.append) for each in group]
        two_commits(rounds[0], victims)
        ends = await ends_of(group, rounds)
        others = [place for place in range(1, len(word)) if place not in victims]
        assert len({bits(group[place]) for place in others}) == 1
        assert {bits(group[place]) for place in victims}.isdisjoint({bits(group[place]) for place in others})
        assert {end.commit.signature for end in ends} == {b""}
        liar, honest = group[0].peer.peer_id, range(1, len(group))
        hear = {place for place in honest if place in victims or not group[place].client}
        if any(not group[victim].client for victim in victims):
            hear.update(honest)
        assert [named(group[place]) for place in honest] == [{liar} if place in hear else set() for place in honest]
        assert {liar} == set(lied_to)

    on_sim(scenario)


def test_a_reducer_without_a_verdict_compares_when_it_has_one() -> None:
    """The client tells its commit half a second before the reducers have theirs."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "tttc")
        rounds = [each.round(group, shares(group)) for each in group]
        two_commits(rounds[0], {3})
        for queue in (rounds[0]._control._to_say[1], rounds[0]._control._to_say[2]):
            put: Any = queue.put_nowait
            later: Any = partial(asyncio.get_running_loop().call_later, 0.5, put)
            queue.put_nowait = later  # type: ignore[method-assign]
        with reaches("a member tells its commit before its reducer has one"):
            ends = [asyncio.ensure_future(round_.run()) for round_ in rounds]
            await ends[3]
            await rounds[3].end_streams()
        await asyncio.gather(*ends, *(round_.close() for round_ in rounds))
        for each in group:
            each.release()
        assert [named(each) for each in group[1:]] == [{group[0].peer.peer_id}] * 3

    on_sim(scenario)


def test_a_commit_with_a_false_signature_names_its_leader() -> None:
    """Its member asks the others, and takes the commit that the leader has signed."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "ttt")
        rounds = [each.round(group, shares(group)) for each in group]
        put = rounds[0]._control._to_say[1].put_nowait

        def lying(message: Any) -> None:
            put(replace(message, signature=b"s" * 64) if isinstance(message, Commit) else message)

        rounds[0]._control._to_say[1].put_nowait = lying  # type: ignore[method-assign, assignment]
        await ends_of(group, rounds)
        assert len({bits(each) for each in group}) == 1
        assert [named(each) for each in group] == [set(), {group[0].peer.peer_id}, set()]

    on_sim(scenario)


def test_a_commit_that_another_member_relays_is_taken_only_with_the_leaders_signature() -> None:
    """A member could commit what it likes at each member that has lost the leader."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "ttt")
        rounds = [each.round(group, shares(group)) for each in group]
        made = Commit(ROUND, [Held(tile, 0, b"\x07", 3.0, b"d" * 16) for tile in range(3)])
        for forged in (made, replace(made, signature=b"s" * 64), signed_by(rounds[2]._table.identity, rounds[2], made)):
            assert rounds[1].machine.fits(forged)
            assert not rounds[1].obey(forged)
        assert rounds[1].obey(signed_by(rounds[0]._table.identity, rounds[0], made))
        await asyncio.gather(*(round_.close(orderly=False) for round_ in rounds))
        for each in group:
            each.release()

    on_sim(scenario)


@pytest.mark.parametrize("how", ["made up", "of another round", "of a member"])
def test_a_member_that_tells_a_commit_that_nobody_signed_is_named(how: str) -> None:
    """It cannot have an honest leader named."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "tttt")
        rounds = [each.round(group, shares(group)) for each in group]
        leader, liar = (net.swarm.identity(name) for name in ("p0", "p2"))
        digest = b"d" * 32
        begun = rounds[0].begun
        said: dict[str, tuple[Identity, bytes]] = {
            "made up": (Identity.ephemeral(), begun),
            "of another round": (leader, b"d" * 32),
            "of a member": (liar, begun),
        }
        signer, signed = said[how]
        false = CommitDigest(digest, signer.sign(b"commit", signed + digest))
        rounds[2]._words.told = lambda _: false  # type: ignore[method-assign, assignment]
        await ends_of(group, rounds)
        assert len({bits(each) for each in group}) == 1
        assert [named(each) for place, each in enumerate(group) if place != 2] == [{liar.peer_id}] * 3

    on_sim(scenario)


def test_a_leader_that_used_a_round_id_twice_had_an_honest_member_named() -> None:
    """It showed in the second round what the member had signed in the first one. Now nobody takes part in that one."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "ttt")
        leader = group[0].peer.peer_id
        await ends_of(group, [each.round(group, shares(group)) for each in group])
        await gather_group(group)
        before = [bits(each) for each in group]
        group[0].table._used.clear()  # its own table does not hold it back
        rounds = [each.round(group, shares(group)) for each in group]
        with reaches("the id of a round is used again"):
            ends = await asyncio.gather(*(round_.run() for round_ in rounds), return_exceptions=True)
        assert all(isinstance(end, RoundFailed) for end in ends)
        assert [named(each) for each in group[1:]] == [{leader}] * 2
        assert [round_.seen().led_badly for round_ in rounds[1:]] == [True] * 2
        assert [bits(each) for each in group] == before
        for round_ in rounds:
            await round_.close(orderly=False)
        for each in group:
            each.release()

    on_sim(scenario)


def test_who_copies_the_id_of_a_round_has_nobody_named() -> None:
    """A member hears the id as its leader begins, and could be the first to use it at a peer that is in both rounds."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "ttt")
        round_ = group[1].round(group, shares(group))
        group[1].table._used[ROUND] = group[2].peer.peer_id
        with pytest.raises(RoundFailed, match="its id was used before"):
            await round_.run()
        assert not named(group[1])
        await round_.close(orderly=False)
        for each in group:
            each.release()

    on_sim(scenario)


def test_what_is_signed_in_one_round_is_worth_nothing_in_another_with_its_id() -> None:
    """The two differ in what a member gives to all, say."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "ttt")
        first, second = (group[1].round(group, [200, 400 - each, each]) for each in (200, 0))
        assert first.round_id == second.round_id
        report = first._words.signed_report(Report([Held(1, 0, b"\x07", 3.0, b"d" * 16)]))
        assert first._words.has_signed(1, report)
        assert not second._words.has_signed(1, report)
        for round_ in (first, second):
            await round_.close(orderly=False)
        for each in group:
            each.release()

    on_sim(scenario)


def test_a_group_of_two_signs_nothing_and_tells_nothing() -> None:
    """Nobody is there to compare with."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "tt")
        rounds = [each.round(group, shares(group)) for each in group]
        await ends_of(group, rounds)
        assert [round_.machine.rules.commit.signature for round_ in rounds if round_.machine.rules.commit] == [b""] * 2
        assert [round_._words._told for round_ in rounds] == [None, None]

    on_sim(scenario)


@pytest.mark.parametrize("strategy", [None, DiLoCo(4)], ids=["synchronous", "diloco"])
def test_each_step_under_a_leader_with_two_commits_had_two_states(
    strategy: Strategy | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now the first step has, and the leader leads no other: all that it lied to have the proof."""
    epochs, names, led = 8, ("p0", "p1", "p2", "p3"), list[str]()

    async def main() -> None:
        run, dropped, play = Run(target=32, dtype=torch.float32), defaultdict[str, set[PeerID]](set), Round.run
        peers = dict[PeerID, str]()

        async def lying(round_: Round) -> Outcome:
            if round_._coordinating is not None:
                led.append(peers[round_.endpoint.peer_id])
                if led[-1] == led[0]:  # whoever leads first lies
                    others = [each.contact.peer for each in round_.members]
                    two_commits(round_, {others.index(min({*others} - {round_.endpoint.peer_id}))})
            return await play(round_)

        monkeypatch.setattr(Round, "run", lying)
        for name in names:

            def note(event: Event, name: str = name) -> None:
                if isinstance(event, PeerDropped):
                    dropped[name].add(event.peer)

            peers[(await run.add(name, strategy=strategy, events=note)).participant.core.peer_id] = name
        await sim.sleep(3.0)
        run.announce_end(epochs)

        async def loop(trainer: Trainer) -> None:
            while not trainer.finished:
                await trainer.take_batch(4, duration_s=0.2)

        trainers = [run.swarm.peer(name) for name in names]
        await asyncio.gather(*(run.swarm.run_on(name, loop, run.swarm.peer(name)) for name in names))
        assert led.count(led[0]) == 1
        states = defaultdict[int, set[bytes]](set)
        for trainer in trainers:
            for _, epoch, _, digest in trainer.epochs:
                states[epoch].add(digest)
        assert [len(states[epoch]) for epoch in range(1, epochs + 1)] == [2] + [1] * (epochs - 1)
        assert len({trainer.participant.state for trainer in trainers}) == 1
        liar = run.swarm.peer(led[0]).participant.core.peer_id
        assert {name: dropped[name] for name in names if name != led[0]} == {
            name: {liar} for name in names if name != led[0]
        }
        await run.close()

    sim.run(main, seed=1)


@pytest.mark.parametrize(
    ("line", "situations"),
    [
        ("open", ["a member gives nothing that was asked for a committed average"]),
        ("ended", []),
        ("silent", ["a member falls silent that was asked for a committed average"]),
    ],
)
def test_a_commit_of_an_average_that_nobody_made_stopped_its_members_for_the_whole_round(
    line: str, situations: Sequence[str]
) -> None:
    """Its leader answers no request, and its line lives: the member waited for it until the round's time was over."""

    async def scenario(net: SimNet) -> None:
        group = await group_of(net, "tttt")
        rounds = [each.round(group, shares(group)) for each in group]
        leader, put = rounds[0], rounds[0]._control._to_say[2].put_nowait

        def saying(message: Any) -> None:
            if isinstance(message, Commit):
                made_up = replace(message.tiles[0], attempt=1, digest=b"z" * 16)
                message = signed_by(
                    leader._table.identity, leader, Commit(message.round_id, [made_up, *message.tiles[1:]])
                )
                if line == "ended":
                    for stream in list(leader._exchange._serving):
                        stream.abort()
                if line == "silent":
                    asyncio.get_running_loop().call_later(0.01, net.swarm.network.stall, "p0")
            put(message)

        leader._control._to_say[2].put_nowait = saying  # type: ignore[method-assign, assignment]
        leader._exchange._requested = lambda *_: None  # type: ignore[method-assign]
        begin = asyncio.get_running_loop().time()
        with reaches(*situations), pytest.raises(RoundFailed, match="nobody who holds the averages"):
            await asyncio.gather(*(round_.run() for round_ in rounds[:2]), rounds[3].run(), rounds[2].run())
        assert asyncio.get_running_loop().time() - begin < 2 * OPTIONS.silence_s
        assert rounds[2].seen().led_badly
        assert named(group[2]) == {group[0].peer.peer_id}
        net.swarm.network.unstall("p0")
        await asyncio.gather(*(round_.close() for round_ in rounds))
        for each in group:
            each.release()

    on_sim(scenario)
