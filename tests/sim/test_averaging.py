"""Averagers on simulated hosts: the average, groups, modes, weights, failures."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.averaging import Averager
from shoal.base.peer import PeerID
from shoal.compression import CompressionBase
from shoal.errors import ClosedError, ConfigError, LocalError, RoundFailed, SchemaMismatch
from shoal.events import Event, GroupFormed, PeerDropped, RoundAborted
from shoal.transport.base import Transport
from tests.codecs import CODECS
from tests.sim.averaging_kit import SETTINGS, Trial, same_bits
from tests.sim.rpc_kit import CountingTransport


def _values(peer: int, *, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(peer)
    return [
        torch.randn(37, 101, generator=generator, dtype=torch.float64).to(dtype),
        torch.randn(5, generator=generator, dtype=torch.float64).to(dtype),
        torch.tensor(float(peer), dtype=dtype),
        torch.zeros(0, 4, dtype=dtype),
    ]


def _mean(values: list[list[torch.Tensor]], weights: list[float]) -> list[torch.Tensor]:
    total = sum(weights)
    return [
        sum((w * v[i].double() for v, w in zip(values, weights, strict=True)), torch.zeros(())) / total
        for i in range(len(values[0]))
    ]


async def _all_step(trial: Trial, names: list[str], **options: Any) -> list[Any]:
    return await asyncio.gather(*(trial.step(name, **options) for name in names), return_exceptions=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("peers", [2, 3, 5])
def test_the_average_is_the_weighted_mean(peers: int, dtype: torch.dtype) -> None:
    """Every member ends with the same bits, within rounding of the float64 reference."""

    async def main() -> None:
        trial = Trial()
        values = [_values(peer, dtype=dtype) for peer in range(peers)]
        before = [[tensor.clone() for tensor in tensors] for tensors in values]
        weights = [1.0 + 2.0 * peer for peer in range(peers)]
        for peer in range(peers):
            await trial.add(f"p{peer}", values[peer], target_group_size=peers)
        steps = (trial.step(f"p{peer}", weight=weights[peer], gather={"peer": peer}) for peer in range(peers))
        results = await asyncio.gather(*steps)
        expected = _mean(before, weights)
        assert same_bits(values)
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        for got, want in zip(values[0], expected, strict=True):
            torch.testing.assert_close(got.double(), want.expand(got.shape), rtol=tolerance, atol=tolerance)
        for result in results:
            assert sorted(entry["peer"] for entry in result.gathered.values()) == list(range(peers))
            assert result.outcome.weight == sum(weights)
            assert not result.outcome.left_out
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=peers)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_lossy_averages_are_within_the_codecs_error_and_bit_identical(codec: CompressionBase) -> None:
    """Each contribution has the codec's error, and so has the average, once more; the bits are everybody's."""

    async def main() -> None:
        trial = Trial(compression=codec)
        values = [_values(peer) for peer in range(4)]
        everything = torch.cat([tensor.reshape(-1) for tensors in values for tensor in tensors])
        error = max(codec.max_error(everything), codec.max_error(everything.abs()), 1e-6)
        expected = _mean([[tensor.clone() for tensor in tensors] for tensors in values], [1.0] * 4)
        for peer in range(4):
            await trial.add(f"p{peer}", values[peer], target_group_size=4)
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(4)))
        assert same_bits(values)
        for got, want in zip(values[0], expected, strict=True):
            torch.testing.assert_close(got.double(), want.expand(got.shape), rtol=0.0, atol=2.1 * error)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=1)


def test_clients_average_and_reduce_nothing() -> None:
    """Peers that only dial contribute and receive; nodes do the reducing."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.full((3000,), float(peer))] for peer in range(4)]
        await trial.add("p0", values[0], target_group_size=4)
        await trial.add("p1", values[1], target_group_size=4)
        await trial.add("c2", values[2], client_mode=True, target_group_size=4)
        await trial.add("c3", values[3], client_mode=True, target_group_size=4)
        results = await asyncio.gather(*(trial.step(name) for name in ("p0", "p1", "c2", "c3")))
        assert same_bits(values)
        assert float(values[0][0][0]) == 1.5
        reduces = {m.contact.peer: m.reduces for m in results[0].outcome.members}
        assert [reduces[trial.swarm.identity(name).peer_id] for name in ("p0", "p1", "c2", "c3")] == [
            True,
            True,
            False,
            False,
        ]
        await trial.close()

    sim.run(main, seed=2)


def test_all_weights_zero() -> None:
    """With nothing to average the round fails, by name, and nothing becomes NaN."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.full((3000,), float(peer))] for peer in range(3)]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=3)
        results = await _all_step(trial, ["p0", "p1", "p2"], weight=0.0, allow_retries=False)
        assert all(isinstance(result, RoundFailed) and "weight" in result.reason for result in results), results
        assert [float(tensors[0].sum()) for tensors in values] == [0.0, 3000.0, 6000.0]
        await trial.close()

    sim.run(main, seed=3)


def test_nan_from_one_peer() -> None:
    """A peer with NaN counts with weight 0: the others average without it, and it gets their average."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.full((3000,), float(peer))] for peer in range(3)]
        values[2][0][17] = float("nan")
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=3)
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(3)))
        assert same_bits(values)
        assert set(values[0][0].tolist()) == {0.5}
        await trial.close()

    sim.run(main, seed=4)


def test_float64_precision() -> None:
    """float64 is summed in float64: 1 + 1e-12 and 1 + 3e-12 average to 1 + 2e-12."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.tensor([1 + 1e-12], dtype=torch.float64)], [torch.tensor([1 + 3e-12], dtype=torch.float64)]]
        for peer in range(2):
            await trial.add(f"p{peer}", values[peer], target_group_size=2)
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(2)))
        assert abs(float(values[0][0][0]) - (1 + 2e-12)) < 1e-15
        await trial.close()

    sim.run(main, seed=5)


def test_alpha_moves_tile_of_the_way() -> None:
    """With averaging_alpha 0.25 a tensor moves a quarter of the way to the average."""

    async def main() -> None:
        trial = Trial()
        values = [[torch.zeros(10)], [torch.full((10,), 4.0)]]
        for peer in range(2):
            await trial.add(f"p{peer}", values[peer], target_group_size=2, averaging_alpha=0.25)
        await asyncio.gather(*(trial.step(f"p{peer}") for peer in range(2)))
        assert float(values[0][0][0]) == 0.5
        assert float(values[1][0][0]) == 3.5
        await trial.close()

    sim.run(main, seed=6)


def test_tensors_that_differ_are_refused_by_name() -> None:
    """Both peers learn which tensor differs, and how."""

    async def main() -> None:
        trial = Trial()
        await trial.add("p0", [torch.zeros(3), torch.zeros(7, 2)])
        await trial.add("p1", [torch.zeros(3), torch.zeros(7, 3)])
        results = await _all_step(trial, ["p0", "p1"], timeout_s=8.0)
        assert any(isinstance(result, SchemaMismatch) for result in results), results
        assert any("tensor 1 has shape [7, " in str(result) for result in results), results
        await trial.close()

    sim.run(main, seed=7)


def test_nobody_else_is_a_failed_round_with_a_reason() -> None:
    """Alone, a step ends with RoundFailed at its deadline and says that nobody was there."""

    async def main() -> None:
        trial = Trial()
        averager = await trial.add("p0", [torch.zeros(3)])
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(RoundFailed):
            await trial.step("p0", timeout_s=12.0)
        assert 5.0 <= loop.time() - began <= 18.0
        with pytest.raises(ConfigError, match="weight"):
            await trial.step("p0", weight=float("nan"))
        nested: list[object] = []
        for _ in range(5000):
            nested = [nested]
        for gather in (object(), nested, msgspec.msgpack.Ext(5, b"x")):
            with pytest.raises(ConfigError, match="gather"):
                await trial.step("p0", gather=gather)
        first = asyncio.ensure_future(trial.step("p0", timeout_s=3.0))
        await asyncio.wait([first], timeout=0.1)
        with pytest.raises(LocalError, match="running already"):
            await trial.step("p0")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert isinstance(averager, Averager)
        await trial.close()

    sim.run(main, seed=8)


def test_lock_is_never_held_while_waiting() -> None:
    """While a step looks for a group and averages over a slow network, the tensors can be locked at once."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=200_000)
        values = [[torch.full((30_000,), float(peer))] for peer in range(3)]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=3)
        lock = trial.swarm.peer("p0").lock
        steps = asyncio.gather(*(trial.step(f"p{peer}") for peer in range(3)))
        looks = 0
        while not steps.done():
            assert not lock.holder, "held while the loop waits"
            looks += 1
            await asyncio.wait([steps], timeout=0.01)
        await steps
        assert looks > 10
        await trial.close()

    sim.run(main, seed=9)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_crash_in_mid_round_leaves_the_others_with_one_average(victim: int, after_s: float) -> None:
    """Any member dies, at any time: the survivors agree, or nothing was touched; and the next group forms."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=500_000)
        names = [f"p{peer}" for peer in range(4)]
        values = [[torch.full((40_000,), float(peer))] for peer in range(4)]
        for name, tensors in zip(names, values, strict=True):
            await trial.add(name, tensors, target_group_size=4)
        await asyncio.gather(*(trial.step(name) for name in names))
        for peer, tensors in enumerate(values):
            tensors[0].fill_(float(peer))
        steps = {name: asyncio.ensure_future(trial.step(name, timeout_s=60.0, allow_retries=False)) for name in names}
        await asyncio.wait(list(steps.values()), timeout=after_s)
        trial.swarm.crash(names[victim])
        await asyncio.wait(list(steps.values()))
        alive = [peer for peer in range(4) if peer != victim]
        done = [peer for peer in alive if steps[names[peer]].exception() is None]
        assert same_bits([values[peer] for peer in done]) if done else True
        for peer in set(alive) - set(done):
            assert isinstance(steps[names[peer]].exception(), RoundFailed)
            assert set(values[peer][0].tolist()) == {float(peer)}
        if not steps[names[victim]].cancelled():
            steps[names[victim]].exception()
        await asyncio.gather(*(trial.step(names[peer], timeout_s=60.0) for peer in alive))
        assert not trial.warnings, trial.warnings
        await trial.close()

    sim.run(main, seed=victim * 100 + int(after_s * 100))


@pytest.mark.parametrize("victim", ["coordinator", "member"])
def test_a_failed_round_names_its_id_and_who_is_to_blame(victim: str) -> None:
    """One of two dies in mid-round: the error and the event of the other one say which round, and who."""

    async def main() -> None:
        trial = Trial(bandwidth_bytes_s=500_000)
        events: dict[str, list[Event]] = {"p0": [], "p1": []}
        for peer, name in enumerate(events):
            await trial.add(name, [torch.full((40_000,), float(peer))], target_group_size=2)
            trial.swarm.host(name).env.events.subscribe(events[name].append)
        steps = {name: asyncio.ensure_future(trial.step(name, timeout_s=60.0, allow_retries=False)) for name in events}
        while not all(any(isinstance(event, GroupFormed) for event in heard) for heard in events.values()):
            await sim.sleep(0.01)
        [formed] = [event for event in events["p0"] if isinstance(event, GroupFormed)]
        by_id = {trial.swarm.host(name).peer_id: name for name in events}
        dead = (
            by_id[formed.coordinator]
            if victim == "coordinator"
            else next(n for n in events if n != by_id[formed.coordinator])
        )
        [left] = set(events) - {dead}
        trial.swarm.crash(dead)
        await asyncio.wait(list(steps.values()))
        error = steps[left].exception()
        assert isinstance(error, RoundFailed)
        blamed = (trial.swarm.host(dead).peer_id,)
        assert (error.round_id, error.peers) == (formed.round_id, blamed)
        [aborted] = [event for event in events[left] if isinstance(event, RoundAborted)]
        assert (aborted.round_id, aborted.peers, aborted.reason) == (formed.round_id, blamed, error.reason)
        assert {event.peer for event in events[left] if isinstance(event, PeerDropped)} == set(blamed)
        assert isinstance(steps[dead].exception(), ClosedError)
        await trial.close()

    sim.run(main, seed=13)


@pytest.mark.parametrize("bits", ["", "0"])
def test_whom_a_peer_met_it_need_not_dial_for_the_next_group(bits: str) -> None:
    """Any of them may lead. With group bits it will meet others, and no connection is made that nobody may ever use."""

    async def main() -> None:
        counted: list[CountingTransport] = []

        def counting(host: sim.SimHost) -> Transport:
            counted.append(CountingTransport(host.transport))
            return counted[-1]

        trial = Trial(transport_of=counting)
        names = [f"p{peer}" for peer in range(4)]
        for name in names:
            await trial.add(name, [torch.zeros(100)], target_group_size=4, group_bits=bits)
        dials = []
        for number in range(6):
            steps = []
            for name in names[number % 4 :] + names[: number % 4]:
                trial.swarm.peer(name).group_bits = bits
                steps.append(asyncio.ensure_future(trial.step(name)))
                await sim.sleep(0.05)
            await asyncio.gather(*steps)
            await sim.sleep(1.0)
            dials.append(sum(len(each.dials) for each in counted))
        assert (dials[1] == dials[-1]) == (not bits)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=17)


@pytest.mark.parametrize("after_s", [0.05, 0.07, 0.1])
@pytest.mark.parametrize("away_s", [8.0, 40.0])
def test_a_left_out_member_learns_the_average_until_the_next_round(after_s: float, away_s: float) -> None:
    """It stood still when the others committed, and comes back long after: they still have what it misses."""

    async def main() -> None:
        trial = Trial()
        names = [f"p{peer}" for peer in range(4)]
        values = [[torch.full((40_000,), float(peer))] for peer in range(4)]
        for name, tensors in zip(names, values, strict=True):
            await trial.add(name, tensors, target_group_size=4)
        await asyncio.gather(*(trial.step(name) for name in names))
        for peer, [tensor] in enumerate(values):
            tensor.fill_(float(peer))
        steps = [asyncio.ensure_future(trial.step(name, timeout_s=60.0, allow_retries=False)) for name in names]
        await asyncio.wait(steps, timeout=after_s)
        trial.swarm.stall("p3")
        await asyncio.wait(steps[:3])
        await sim.sleep(away_s)
        trial.swarm.unstall("p3")
        await asyncio.wait(steps, timeout=10.0)
        rounds = {step.result().round_id for step in steps}
        assert len(rounds) == 1
        assert same_bits(values)
        assert not trial.warnings, trial.warnings
        await trial.close()

    sim.run(main, seed=11)


def test_a_silent_member_is_left_out() -> None:
    """A member that stops in mid-round is left out within the stall limits; the others agree on an average."""

    async def main() -> None:
        trial = Trial(settings=SETTINGS)
        names = [f"p{peer}" for peer in range(4)]
        values = [[torch.full((40_000,), float(peer))] for peer in range(4)]
        for name, tensors in zip(names, values, strict=True):
            await trial.add(name, tensors, target_group_size=4)
        await asyncio.gather(*(trial.step(name) for name in names))
        loop = asyncio.get_running_loop()
        steps = [asyncio.ensure_future(trial.step(name, timeout_s=60.0, allow_retries=False)) for name in names]
        await asyncio.wait(steps, timeout=0.02)
        trial.swarm.stall("p3")
        began = loop.time()
        await asyncio.wait(steps[:3])
        assert loop.time() - began < 15.0
        done = [peer for peer in range(3) if steps[peer].exception() is None]
        if done:
            assert same_bits([values[peer] for peer in done])
        trial.swarm.unstall("p3")
        await asyncio.wait(steps, timeout=60)
        steps[3].exception()
        await trial.close()

    sim.run(main, seed=11)


def test_the_members_that_own_something_are_the_same_in_every_round() -> None:
    """Of 128 peers 56 owned a value each, others in each round: two round trips for new connections, every time."""

    async def main() -> None:
        trial = Trial()
        names = [f"p{number}" for number in range(6)]
        for number, name in enumerate(names):
            await trial.add(name, [torch.full((3,), float(number))], target_group_size=len(names))
        reducers: set[frozenset[PeerID]] = set()
        for _ in range(4):
            results = await asyncio.gather(*(trial.step(name, timeout_s=30.0) for name in names))
            peers = [member.contact.peer for member in results[0].outcome.members]
            assert len(peers) == len(names)
            reducers.add(frozenset(peer for peer, size in zip(peers, results[0].shares, strict=True) if size))
        assert [len(each) for each in reducers] == [3]
        await trial.close()

    sim.run(main, seed=5)
