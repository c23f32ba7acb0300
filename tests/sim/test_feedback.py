"""Error feedback in whole rounds: whoever averages or stands still, what was counted and what is kept add up."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from shoal import sim
from shoal.averaging.allreduce.interface import has_member
from shoal.compression import BlockwiseQuantization, CompressionBase, ErrorFeedback, TopKCompression
from shoal.errors import RoundFailed
from shoal.protocol.wire import Commit
from tests.sim.averaging_kit import Trial as Averagers
from tests.sim.averaging_kit import same_bits
from tests.sim.round_kit import RoundPeer, gather_group
from tests.sim.rpc_kit import SimNet, on_sim, together
from tests.sim.test_auxiliary import Trial
from tests.unit.test_vector import segment_of

NUMEL = 20_000
CODECS = [ErrorFeedback(TopKCompression(0.1, bits=2)), ErrorFeedback(BlockwiseQuantization(bits=2))]


def kept(member: RoundPeer) -> torch.Tensor:
    """What a member has yet to send."""
    residual = segment_of(member.vector).residual
    assert residual is not None
    return residual.kept.to(torch.float64, copy=True)


def counted(trial: Trial, commit: Commit) -> torch.Tensor:
    """What the members contributed that the verdict names, times their weights."""
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for tile, held in zip(trial.rounds[0].tiling.tiles, commit.tiles, strict=True):
        for i, (weight, values) in enumerate(zip(trial.weights, trial.values, strict=True)):
            if has_member(held.contributors, i):
                total[tile.start : tile.stop] += weight * values[tile.start : tile.stop].double()
    return total


def averaged(trial: Trial, commit: Commit, member: RoundPeer) -> torch.Tensor:
    """The averages of a round, times their weights."""
    weighted = segment_of(member.vector).result.double()
    for tile, held in zip(trial.rounds[0].tiling.tiles, commit.tiles, strict=True):
        weighted[tile.start : tile.stop] *= held.weight
    return weighted


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("word", ["tt", "tta", "atca", "acc", "tcttc"])
def test_rounds_with_all_kinds_of_members_lose_nothing(word: str, codec: CompressionBase) -> None:
    """Trainers, clients, auxiliary members, other reducers each time: averages plus residuals are the contributions."""

    async def scenario(net: SimNet) -> None:
        trial = await Trial.make(net, word, numel=NUMEL, codec=codec)
        rng = random.Random(word)
        contributed, given = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
        for number in range(4):
            await gather_group(trial.members)
            cuts = [rng.random() if kind != "c" else 0.0 for kind in word]
            shares = [int(NUMEL * cut / sum(cuts)) for cut in cuts]
            shares[next(i for i, kind in enumerate(word) if kind != "c")] += NUMEL - sum(shares)
            trial.weights = [0.0 if kind == "a" else rng.choice([0.0, 1.0, 30.0]) for kind in word]
            trial.weights[word.index("c" if "c" in word else "t")] = 2.0
            trial.rounds = []
            for member, weight, values in zip(trial.members, trial.weights, trial.values, strict=True):
                if not member.auxiliary:
                    member.vector.tensors[0].copy_(values)
                trial.rounds.append(
                    member.round(trial.members, shares, weight=weight, round_id=bytes([number]) * 16, tile_bytes=1024)
                )
            [outcome, *_] = await asyncio.gather(*(round_.run() for round_ in trial.rounds))
            contributed += counted(trial, outcome.commit)
            given += averaged(trial, outcome.commit, next(m for m in trial.members if not m.auxiliary))
            await asyncio.gather(*(round_.close() for round_ in trial.rounds))
            for member in trial.members:
                member.release()
        missing = sum((kept(member) for member in trial.members), torch.zeros(()))
        assert float(missing.abs().max()) > 0.01
        torch.testing.assert_close(given + missing, contributed, rtol=0.0, atol=1e-3)

    on_sim(scenario)


def test_a_member_that_stands_still_for_a_while_keeps_what_was_not_counted() -> None:
    """It is left out of some tiles, or replaced as their reducer; when it learns the verdict, nothing is missing."""
    replaced = partly = late = 0

    async def scenario(net: SimNet, seed: int) -> None:
        nonlocal replaced, partly, late
        rng = random.Random(seed)
        trial = await Trial.make(net, "tttt", seed=seed, numel=NUMEL, codec=CODECS[seed % 2])
        for member in trial.members:  # as after earlier rounds
            kept_before = segment_of(member.vector).residual
            assert kept_before is not None
            kept_before.kept.normal_(generator=torch.Generator().manual_seed(seed))
        before = sum((kept(member) for member in trial.members), torch.zeros(()))
        await trial.begin(tile_bytes=1024)
        running = [net.swarm.spawn(*each) for each in zip(trial.names, [r.run() for r in trial.rounds], strict=True)]
        still = rng.randrange(1, 4)
        await sim.sleep(rng.uniform(0.0, 0.8))
        net.swarm.stall(trial.names[still], rng.uniform(2.0, 8.0))
        results = await together(*running)
        await together(*(round_.close() for round_ in trial.rounds))
        commit = results[0].commit
        if isinstance(results[still], RoundFailed):  # it cannot learn the verdict: as if it had
            tiling = trial.rounds[0].tiling
            for tile, reducer, held in zip(tiling.tiles, tiling.owners, commit.tiles, strict=True):
                here = reducer == still and held.attempt == 0
                if here or has_member(held.contributors, still):
                    trial.members[still].vector.settle(tile, averaged_here=here)
        else:
            late += bool(results[still].left_out)
        replaced += any(held.attempt > 0 for held in commit.tiles)
        partly += len({bytes(held.contributors) for held in commit.tiles}) > 1
        missing = sum((kept(member) for member in trial.members), torch.zeros(()))
        whole = before + counted(trial, commit)
        torch.testing.assert_close(averaged(trial, commit, trial.members[0]) + missing, whole, rtol=0.0, atol=1e-4)

    for seed in range(12):
        on_sim(lambda net, seed=seed: scenario(net, seed), bandwidth_bytes_s=10_000.0)  # type: ignore[misc]
    assert min(replaced, partly, late) >= 3, "hardly anything happened: the test shows nothing"


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_averagers_move_small_gradients_in_the_end(codec: CompressionBase) -> None:
    """The mean over rounds is right where a single round sends nothing."""

    async def main() -> None:
        trial = Averagers(compression=codec)
        generator = torch.Generator().manual_seed(5)
        gradients = [torch.randn(4000, generator=generator) for _ in range(3)]
        values = [[gradient.clone()] for gradient in gradients]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=3)
        total, rounds = torch.zeros(4000), 40
        for _ in range(rounds):
            for tensors, gradient in zip(values, gradients, strict=True):
                tensors[0].copy_(gradient)
            await asyncio.gather(*(trial.step(f"p{peer}", weight=1.0 + peer) for peer in range(3)))
            assert same_bits(values)
            total += values[0][0]
        weighted = sum((gradient * (1.0 + peer) for peer, gradient in enumerate(gradients)), torch.zeros(()))
        wanted = weighted / 6
        once = (values[0][0] - wanted).norm()
        assert float((total / rounds - wanted).norm()) < 0.4 * float(once)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=3)
