"""Groups form, in one piece and soon: whole peers on a simulated network, nothing going wrong."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable

import pytest

from shoal.averaging.matchmaking import Group
from shoal.errors import ClosedError, LocalError, SchemaMismatch
from shoal.events import GroupFormed
from shoal.protocol.wire import Abort, Report
from shoal.sim import run, sleep
from tests.sim.matchmaking_kit import (
    KEY,
    LATENCY_S,
    NUMEL,
    Fleet,
    Mate,
    failure,
    groups_of,
    outcomes,
    released,
)


def names(count: int, prefix: str = "p") -> list[str]:
    """Names of this many peers."""
    return [f"{prefix}{number}" for number in range(count)]


def check_agreement(ends: dict[str, Group | BaseException], fleet: Fleet) -> None:
    """Members of one group hold the same Begin and the right control streams."""
    groups = {name: end for name, end in ends.items() if isinstance(end, Group)}
    for name, group in groups.items():
        mate = fleet.mates[name]
        assert group.peers[group.my_index] == mate.peer
        leader = group.peers[group.coordinator]
        others = set(group.peers) - {mate.peer}
        assert set(group.controls) == (others if group.leads else {leader})
        for other in groups.values():
            if other.round_id == group.round_id:
                for attribute in ("members", "shares", "tile_bytes", "coordinator"):
                    assert getattr(group, attribute) == getattr(other, attribute)
        assert sum(group.shares) == NUMEL
        assert {member.gathered.decode() for member in group.members} == {fleet.name_of(peer) for peer in group.peers}


async def form_all(
    fleet: Fleet, mates: list[Mate], *, spread_s: float = 0.0, rng: random.Random | None = None
) -> tuple[list[set[str]], float]:
    """All call within `spread_s`; the groups, and how long after the last call the last one had it."""
    loop = asyncio.get_running_loop()
    rng = rng or random.Random(fleet.swarm.seed)
    delays = [rng.uniform(0.0, spread_s) for _ in mates]
    began = loop.time()
    tasks = {mate.name: fleet.call(mate, after_s=after_s) for mate, after_s in zip(mates, delays, strict=True)}
    ends = await outcomes(tasks)
    took_s = loop.time() - began - max(delays)
    check_agreement(ends, fleet)
    released(ends)
    return groups_of(ends), took_s


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dht", [False, True])
@pytest.mark.parametrize("spread_s", [0.0, 0.2])
@pytest.mark.parametrize("count", [2, 4, 8, pytest.param(16, marks=pytest.mark.long)])
def test_time_to_form(count: int, spread_s: float, dht: bool) -> None:
    """All who call end in one group; printed: virtual time after the last call, first and later rounds.

    In the DHT of so few nodes all hear of a declaration within one round trip. In the dictionary it takes three, more
    or less, and shows one moment in the middle of them: of peers that call in the same instant each sees some of the
    others only, and asks several until all have found the first.
    """
    first: dict[bool, list[float]] = {True: [], False: []}
    later: dict[bool, list[float]] = {True: [], False: []}

    async def main(target: int | None) -> None:
        fleet = Fleet.launch(dht=dht, jitter_s=LATENCY_S if dht else 0.0)
        mates = await fleet.add(*names(count), target_group_size=target)
        rng = random.Random(fleet.swarm.seed)
        for number in range(4):
            groups, took_s = await form_all(fleet, mates, spread_s=spread_s, rng=rng)
            assert groups == [set(names(count))]
            (later if number else first)[target is not None].append(took_s)
            await sleep(0.1)
        await fleet.close()

    for target in (count, None):
        for seed in range(1 if count == 8 else 3):
            run(main(target), seed=seed)
    for known, word in ((True, "known"), (False, "open")):
        first_ms, later_ms = (1e3 * statistics.median(took[known]) for took in (first, later))
        print(
            f"{count:2} peers, {'DHT' if dht else 'dictionary'}, calls within {1e3 * spread_s:3.0f} ms, "
            f"target {word:5}: first {first_ms:3.0f} ms, later {later_ms:3.0f} ms"
        )
    assert statistics.median(later[True]) < 0.15


def test_sixty_four_peers_form_one_group() -> None:
    """The largest group that is tried, all at once, cold links."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(64), target_group_size=64)
        groups, took_s = await form_all(fleet, mates, spread_s=0.2)
        assert groups == [set(names(64))]
        print(f"64 peers: {1e3 * took_s:.0f} ms after the last call")
        await fleet.close()

    run(main(), seed=1)


@pytest.mark.long
def test_hundred_rounds_of_sixteen() -> None:
    """At least 99 of 100 rounds give one group of all 16."""

    async def main() -> int:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(16), target_group_size=16)
        rng = random.Random(7)
        full = 0
        for _ in range(100):
            groups, _ = await form_all(fleet, mates, spread_s=0.2, rng=rng)
            full += groups == [set(names(16))]
            await sleep(0.05)
        await fleet.close()
        return full

    assert run(main(), seed=7) >= 99


def test_four_groups_of_four() -> None:
    """A target smaller than the number of peers gives several groups, each full."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(16), target_group_size=4)
        for _ in range(5):
            groups, took_s = await form_all(fleet, mates, spread_s=0.2)
            assert sorted(len(group) for group in groups) == [4, 4, 4, 4]
            assert took_s < 1.0
            await sleep(0.05)
        await fleet.close()

    for seed in range(3):
        run(main(), seed=seed)


def test_group_starts_soon_without_a_target() -> None:
    """When all who look have joined, nothing is waited for: not the window, not a fixed time."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(5), window_s=60.0)
        groups, took_s = await form_all(fleet, mates)
        assert groups == [set(names(5))]
        assert took_s < 0.5
        await fleet.close()

    run(main(), seed=2)


def test_the_leader_of_a_large_group_reduces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a connection with each member already. Of a small group it reduces its share."""

    async def main(size: int) -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(size))
        ends = await outcomes({mate.name: fleet.call(mate) for mate in mates})
        check_agreement(ends, fleet)
        for group in ends.values():
            assert isinstance(group, Group)
            assert [place for place, elements in enumerate(group.shares) if not elements] == [group.coordinator] * (
                size > 3
            )
        await fleet.close()

    monkeypatch.setattr("shoal.averaging.matchmaking.matchmaker.MANY", 3)
    for size in (3, 4):
        run(main(size), seed=size)


def test_late_directory_does_not_split_the_group() -> None:
    """Entries that are found only 300 ms later make several leaders; they find each other and merge."""

    async def main() -> None:
        fleet = Fleet.launch(visible_after_s=0.3)
        mates = await fleet.add(*names(8), target_group_size=8)
        groups, _ = await form_all(fleet, mates)
        assert groups == [set(names(8))]
        await fleet.close()

    for seed in range(5):
        run(main(), seed=seed)


def test_wrong_clocks_do_no_harm() -> None:
    """With wall clocks that differ by up to 4 s all still meet, in windows of 5 s."""

    async def main() -> None:
        fleet = Fleet.launch(clock_skew_s=2.0)
        mates = await fleet.add(*names(8), target_group_size=8)
        for _ in range(3):
            groups, took_s = await form_all(fleet, mates, spread_s=0.1)
            assert groups == [set(names(8))]
            assert took_s < 1.0
            await sleep(0.1)
        await fleet.close()

    for seed in range(5):
        run(main(), seed=seed)


def test_clients_only_follow() -> None:
    """Clients declare nothing, reduce nothing and decide nothing, and are full members otherwise."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(2), target_group_size=5)
        clients = await fleet.add(*names(3, "client"), target_group_size=5, client_mode=True)
        ends = await outcomes({mate.name: fleet.call(mate) for mate in [*clients, *mates]})
        check_agreement(ends, fleet)
        (group,) = groups_of(ends)
        assert len(group) == 5
        some = next(end for end in ends.values() if isinstance(end, Group))
        for member, elements in zip(some.members, some.shares, strict=True):
            is_client = member.gathered.startswith(b"client")
            assert member.reduces != is_client
            assert (elements == 0) == is_client
        assert some.members[some.coordinator].gathered.startswith(b"p")
        released(ends)
        await fleet.close()

    run(main(), seed=3)


def test_only_clients_form_no_group() -> None:
    """They would need a peer that can be dialed; said after the window."""

    async def main() -> None:
        fleet = Fleet.launch()
        clients = await fleet.add(*names(2), client_mode=True)
        ends = await outcomes({mate.name: fleet.call(mate, window_s=1.0) for mate in clients})
        assert "nobody else is looking for one" in str(failure(ends["p0"]))
        await fleet.close()

    run(main(), seed=3)


def test_group_without_bandwidth_is_refused_clearly() -> None:
    """If nobody can reduce, that is what is said, to the leader and to those who asked it."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(2), target_group_size=2)
        ends = await outcomes({mate.name: fleet.call(mate, bandwidth=0.0, window_s=2.0) for mate in mates})
        assert all("nobody in the group can reduce" in str(failure(end)) for end in ends.values())
        await fleet.close()

    run(main(), seed=3)


def test_expected_peers_are_waited_for_and_then_nothing() -> None:
    """With `expected` the group waits for the last one, however late, and starts with its join."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4))
        everybody = frozenset(mate.peer for mate in mates)
        loop = asyncio.get_running_loop()
        tasks = {
            mate.name: fleet.call(mate, after_s=after_s, expected=lambda: everybody)
            for mate, after_s in zip(mates, [0.0, 0.02, 0.05, 2.0], strict=True)
        }
        began = loop.time()
        ends = await outcomes(tasks)
        assert groups_of(ends) == [set(names(4))]
        assert 2.0 < loop.time() - began < 2.0 + 0.08
        released(ends)
        await fleet.close()

    run(main(), seed=4)


def test_expected_peer_that_never_comes_costs_the_window_not_the_group() -> None:
    """At the end of the window the group starts without it."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3))
        everybody = frozenset(mate.peer for mate in mates)
        loop = asyncio.get_running_loop()
        began = loop.time()
        ends = await outcomes(
            {mate.name: fleet.call(mate, expected=lambda: everybody, window_s=2.0) for mate in mates[:2]}
        )
        assert groups_of(ends) == [{"p0", "p1"}]
        assert 1.9 < loop.time() - began < 2.2
        released(ends)
        await fleet.close()

    run(main(), seed=4)


def test_different_keys_do_not_meet() -> None:
    """Peers that look under different bits form different groups."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4), target_group_size=2)
        ends = await outcomes(
            {mate.name: fleet.call(mate, group_key=f"{KEY}{index % 2}") for index, mate in enumerate(mates)}
        )
        assert groups_of(ends) == [{"p0", "p2"}, {"p1", "p3"}]
        released(ends)
        await fleet.close()

    run(main(), seed=5)


# ----------------------------------------------------------------------------------------------------------- mismatches


def test_other_schema_is_refused_by_name() -> None:
    """Both sides get `SchemaMismatch` with the sentence that names the first tensor that differs."""

    async def main() -> None:
        fleet = Fleet.launch()
        await fleet.add("p0")
        await fleet.add("p1", schema=b"other", compare_schema=lambda *_: "tensor 0 'weight' differs")
        ends = await outcomes({mate.name: fleet.call(mate, window_s=1.0) for mate in fleet.mates.values()})
        for end in ends.values():
            assert isinstance(end, SchemaMismatch)
            assert "tensor 0 'weight'" in end.reason
            assert len(end.peers) == 1
        await fleet.close()

    for seed in range(4):
        run(main(), seed=seed)


def test_other_schema_does_not_disturb_the_others() -> None:
    """Those that fit form their group without waiting for the one that does not."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3))
        (odd,) = await fleet.add("odd", schema=b"other", compare_schema=lambda *_: "tensor 0 'weight' differs")
        loop = asyncio.get_running_loop()
        began = loop.time()
        task = fleet.call(odd, window_s=1.0)
        ends = await outcomes({mate.name: fleet.call(mate) for mate in mates})
        assert groups_of(ends) == [set(names(3))]
        assert loop.time() - began < 0.6
        released(ends)
        assert isinstance((await outcomes({"odd": task}))["odd"], SchemaMismatch)
        await fleet.close()

    for seed in range(4):
        run(main(), seed=seed)


def test_other_settings_are_refused_by_name_and_values() -> None:
    """The setting is named with both values."""

    async def main() -> None:
        fleet = Fleet.launch()
        await fleet.add("p0", settings={"target_batch_size": "64", "codec": "none"})
        await fleet.add("p1", settings={"target_batch_size": "32", "codec": "none"})
        ends = await outcomes({mate.name: fleet.call(mate, window_s=1.0) for mate in fleet.mates.values()})
        for end in ends.values():
            assert isinstance(end, SchemaMismatch)
            for word in ("target_batch_size", "'64'", "'32'", fleet.mates["p0"].peer.short()):
                assert word in end.reason
        await fleet.close()

    run(main(), seed=6)


# ------------------------------------------------------------------------------------------------------------- handover


def test_control_streams_are_handed_over_whole() -> None:
    """What a member sends right after Begin is the first thing that the coordinator reads, and the other way round."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3), target_group_size=3)

        async def round_of(mate: Mate) -> set[str]:
            group = await mate.form()
            seen = set()
            if group.leads:
                for peer, control in group.controls.items():
                    received = await control.recv()
                    assert received is not None
                    assert isinstance(received[0], Report)
                    seen.add(f"report {fleet.name_of(peer)} {received[0].lost}")
                    await control.send(Abort(group.round_id, "enough"))
            else:
                (control,) = group.controls.values()
                await control.send(Report(lost=[group.my_index]))
                received = await control.recv()
                assert received is not None
                assert isinstance(received[0], Abort)
                seen.add("abort")
            group.release()
            return seen

        for _ in range(3):
            seen = await asyncio.gather(*(fleet.swarm.spawn(mate.name, round_of(mate)) for mate in mates))
            assert sorted(map(len, seen)) == [1, 1, 2]
        await fleet.close()

    run(main(), seed=8)


def test_declaration_is_withdrawn_a_moment_after_the_search_unless_a_new_one_replaces_it() -> None:
    """What nobody waits for comes after what others wait for, and is left undone where it is of no use."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(2), target_group_size=2)
        for _ in range(3):
            released(await outcomes({mate.name: fleet.call(mate) for mate in mates}))
            assert set(fleet.directory.entries[KEY]) == {mate.peer for mate in mates}
        assert set(fleet.directory.writes.values()) == {3}
        await sleep(0.2)
        assert not fleet.directory.entries[KEY]
        assert set(fleet.directory.writes.values()) == {4}
        await fleet.close()

    run(main(), seed=3)


def test_released_streams_are_used_again() -> None:
    """After an orderly release a peer asks its next leader over the connection it has: no new dials in later rounds."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(4), target_group_size=4)
        dials = []
        for mate in mates:
            original = mate.endpoint._transport.dial

            def dial(*args: object, original: Callable[..., object] = original, **kwargs: object) -> object:
                dials.append(args)
                return original(*args, **kwargs)

            mate.endpoint._transport.dial = dial  # type: ignore[method-assign, assignment]
        counts = []
        for _ in range(12):
            before = len(dials)
            # Not in step with the leader's reads: a nudge that crosses the last `Join` is cut off by the start.
            ends = await outcomes({mate.name: fleet.call(mate, after_s=0.045 * i) for i, mate in enumerate(mates)})
            released(ends)
            await sleep(0.2)
            counts.append(len(dials) - before)
        assert counts[0] > 0
        assert sum(counts[2:]) == 0, counts
        await fleet.close()

    run(main(), seed=9)


def test_groups_tell_the_bus() -> None:
    """Each member emits `GroupFormed` with the group's peers."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(3), target_group_size=3)
        ends = await outcomes({mate.name: fleet.call(mate) for mate in mates})
        for mate in mates:
            group = ends[mate.name]
            assert isinstance(group, Group)
            (event,) = [event for event in mate.events if isinstance(event, GroupFormed)]
            assert event.round_id == group.round_id
            assert event.peers == group.peers
            assert 0.0 < event.waited_s < 1.0
        released(ends)
        await fleet.close()

    run(main(), seed=10)


def test_same_seed_same_groups() -> None:
    """Chance comes from the seed alone."""

    async def main() -> tuple[str, list[bytes]]:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(6), target_group_size=3)
        ends = await outcomes({mate.name: fleet.call(mate) for mate in mates})
        rounds = [end.round_id for end in ends.values() if isinstance(end, Group)]
        released(ends)
        await fleet.close()
        return fleet.swarm.network.trace_digest(), rounds

    assert run(main(), seed=11) == run(main(), seed=11)
    assert run(main(), seed=11) != run(main(), seed=12)


# --------------------------------------------------------------------------------------------------------------- misuse


def test_one_search_at_a_time() -> None:
    """A second `form_group` while one runs is the caller's mistake; the first goes on."""

    async def main() -> None:
        fleet = Fleet.launch()
        mates = await fleet.add(*names(2), target_group_size=2)
        first = fleet.call(mates[0])
        await sleep(0.01)
        with pytest.raises(LocalError, match="one group at a time"):
            await mates[0].form()
        ends = await outcomes({"p0": first, "p1": fleet.call(mates[1])})
        assert groups_of(ends) == [{"p0", "p1"}]
        released(ends)
        await fleet.close()

    run(main(), seed=12)


def test_closed_matchmaker_says_so() -> None:
    """A search that runs when the matchmaker is closed ends with `ClosedError`; so does the next."""

    async def main() -> None:
        fleet = Fleet.launch()
        (mate,) = await fleet.add("p0")
        task = fleet.call(mate)
        await sleep(0.1)
        await mate.matchmaker.close()
        assert isinstance((await outcomes({"p0": task}))["p0"], ClosedError)
        with pytest.raises(ClosedError):
            await mate.form()
        assert fleet.directory.entries[KEY] == {}
        await fleet.close()

    run(main())
