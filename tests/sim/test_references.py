"""Parameters coded against the last average: when a round may, when it is lossless, and that all keep the same bits."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest
import torch

from shoal import sim
from shoal.averaging import Averager
from shoal.averaging.allreduce.segments import common_reference
from shoal.base.peer import PeerID
from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Differences,
    ErrorFeedback,
    Float16Compression,
    Uniform8BitQuantization,
    for_parameters,
)
from shoal.errors import RoundFailed
from shoal.events import RoundFinished
from shoal.protocol.wire import Contact, Member
from tests.sim.averaging_kit import Trial, same_bits
from tests.sim.optimizer_kit import Run, model

NUMEL = 20_000
CODECS = [Differences(Uniform8BitQuantization()), Differences(ErrorFeedback(BlockwiseQuantization(bits=4)))]


def drift(values: Sequence[list[torch.Tensor]], generator: torch.Generator, size: float) -> torch.Tensor:
    """Every peer takes a step of its own; the mean that they should come to."""
    for [tensor] in values:
        tensor.add_(torch.randn(NUMEL, generator=generator), alpha=size)
    return torch.stack([tensor.double() for [tensor] in values]).mean(0)


async def together(trial: Trial, names: Sequence[str]) -> tuple[list[bytes], int]:
    """One round of these: the references that they have afterwards, and the bytes that the first one sent."""
    averagers: list[Averager] = [trial.swarm.peer(name) for name in names]
    before = averagers[0].core.endpoint.traffic[0]
    await asyncio.gather(*(trial.step(name) for name in names))
    return [averager.vector.reference_name for averager in averagers], averagers[0].core.endpoint.traffic[0] - before


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_small_updates_of_large_parameters_are_kept(codec: Differences) -> None:
    """The first round is lossless; then updates a ten-thousandth as large as the parameters have the codec's error."""

    async def main() -> None:
        trial = Trial(compression=codec)
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(NUMEL, generator=generator)
        values = [[start.clone()] for _ in range(3)]
        names = ["p0", "p1", "p2"]
        for name, tensors in zip(names, values, strict=True):
            await trial.add(name, tensors, target_group_size=3)
        sizes = []
        for number in range(4):
            wanted = drift(values, generator, 1e-4)
            references, sent = await together(trial, names)
            sizes.append(sent)
            assert len(set(references)) == 1
            assert references[0]
            assert same_bits(values)
            error = (values[0][0].double() - wanted).abs().max()
            assert float(error) < (1e-6 if number == 0 else 2e-4)
        # float32 in the first round: about 4 bytes for each element that is not the own, and again for the average.
        assert sizes[0] > 3 * max(sizes[1:])
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=1)


def test_a_newcomer_makes_one_round_lossless() -> None:
    """It has no reference; afterwards it has the one of all."""

    async def main() -> None:
        trial = Trial(compression=CODECS[0])
        generator = torch.Generator().manual_seed(2)
        values = [[torch.randn(NUMEL, generator=generator)] for _ in range(3)]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=None)
        pair, three = ["p0", "p1"], ["p0", "p1", "p2"]
        drift(values[:2], generator, 1e-3)
        await together(trial, pair)
        drift(values[:2], generator, 1e-3)
        _, coded = await together(trial, pair)
        wanted = drift(values, generator, 1e-3)
        references, lossless = await together(trial, three)
        assert lossless > 3 * coded
        assert len(set(references)) == 1
        torch.testing.assert_close(values[2][0].double(), wanted, rtol=0.0, atol=1e-6)
        drift(values, generator, 1e-3)
        _, again = await together(trial, three)
        assert again < 2 * coded
        assert same_bits(values)
        await trial.close()

    sim.run(main, seed=2)


def test_a_newcomer_doubles_the_bytes_of_one_round_in_16_bits() -> None:
    """Nothing is lost in the round without a common reference, and it takes the bytes of float32."""

    async def main() -> None:
        trial = Trial(compression=for_parameters(Float16Compression(), torch.float32))
        generator = torch.Generator().manual_seed(6)
        values = [[torch.full((NUMEL,), 1.0)] for _ in range(3)]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=None)
        names, sizes = ["p0", "p1"], []
        for number in range(6):
            if number == 3:
                names.append("p2")
                values[2][0].copy_(values[0][0])
            for name in names:
                values[int(name[1])][0].add_(torch.randn(NUMEL, generator=generator), alpha=1e-4)
            wanted = torch.stack([values[int(name[1])][0].double() for name in names]).mean(0)
            sizes.append((await together(trial, names))[1])
            assert float((values[0][0].double() - wanted).abs().max()) < 5e-7, "less than a hundredth of the updates"
        assert same_bits(values)
        print(f"bytes sent by one of two, of three from the fourth round on: {sizes}")
        assert sizes[0] / sizes[1] == pytest.approx(2.0, rel=0.05) == sizes[3] / sizes[4]
        assert max(sizes[1:3]) < 1.15 * 2 * NUMEL
        await trial.close()

    sim.run(main, seed=6)


def test_who_missed_a_round_has_an_older_reference() -> None:
    """Of three that had the same one, two average: with all three the next round is lossless again."""

    async def main() -> None:
        trial = Trial(compression=CODECS[0])
        generator = torch.Generator().manual_seed(3)
        values = [[torch.randn(NUMEL, generator=generator)] for _ in range(3)]
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=None)
        three = ["p0", "p1", "p2"]
        await together(trial, three)
        old = trial.swarm.peer("p2").vector.reference_name
        drift(values, generator, 1e-3)
        await together(trial, three[:2])
        assert trial.swarm.peer("p2").vector.reference_name == old
        wanted = drift(values, generator, 1e-3)
        await together(trial, three)
        torch.testing.assert_close(values[2][0].double(), wanted, rtol=0.0, atol=1e-6)
        assert same_bits(values)
        await trial.close()

    sim.run(main, seed=3)


def test_a_round_that_fails_leaves_the_reference_as_it_was() -> None:
    """The next one codes against it."""

    async def main() -> None:
        trial = Trial(compression=CODECS[0])
        generator = torch.Generator().manual_seed(4)
        values = [[torch.randn(NUMEL, generator=generator)] for _ in range(2)]
        for peer in range(2):
            await trial.add(f"p{peer}", values[peer])
        pair = ["p0", "p1"]
        [name, _], _ = await together(trial, pair)
        kept = [
            segment.reference.values.clone()
            for segment in trial.swarm.peer("p0").vector._segments.values()
            if segment.reference
        ]
        steps = [trial.step(each, weight=0.0, allow_retries=False) for each in pair]
        failures = await asyncio.gather(*steps, return_exceptions=True)
        assert all(isinstance(failure, RoundFailed) for failure in failures)
        averagers = [trial.swarm.peer(each) for each in pair]
        assert [averager.vector.reference_name for averager in averagers] == [name, name]
        for segment, before in zip(averagers[0].vector._segments.values(), kept, strict=True):
            assert segment.reference is not None
            assert torch.equal(segment.reference.values, before)
        wanted = drift(values, generator, 1e-4)
        await together(trial, pair)
        assert same_bits(values)
        assert 1e-9 < float((values[0][0].double() - wanted).abs().max()) < 2e-4
        await trial.close()

    sim.run(main, seed=4)


def test_auxiliary_members_need_no_reference() -> None:
    """They sum and encode differences, which takes none; they never have all averages, and say no name."""

    async def main() -> None:
        trial = Trial(compression=CODECS[1])
        generator = torch.Generator().manual_seed(5)
        values = [[torch.randn(NUMEL, generator=generator)] for _ in range(3)]
        untouched = values[2][0].clone()
        for peer in range(3):
            await trial.add(f"p{peer}", values[peer], target_group_size=3, auxiliary=peer == 2)
        for number in range(3):
            wanted = drift(values[:2], generator, 1e-3)
            references, _ = await together(trial, ["p0", "p1", "p2"])
            assert references[0] == references[1] != b""
            assert references[2] == b""
            assert same_bits(values[:2])
            assert float((values[0][0].double() - wanted).abs().max()) < (1e-6 if number == 0 else 2e-3)
        assert torch.equal(values[2][0], untouched)
        await trial.close()
        assert not trial.warnings

    sim.run(main, seed=5)


def test_the_reference_that_all_have() -> None:
    """Of those that contribute: one name for all, or none."""

    def member(reference: bytes, *, contributes: bool = True) -> Member:
        return Member(Contact(PeerID(b"\x01" * 32)), True, None, b"", contributes, reference)

    old, new = b"o" * 16, b"n" * 16
    assert common_reference([member(old), member(old)]) == old
    assert common_reference([member(old), member(new)]) == b""
    assert common_reference([member(old), member(b"")]) == b""
    assert common_reference([member(b""), member(b"")]) == b""
    assert common_reference([member(old), member(b"", contributes=False)]) == old


@functools.cache
def trained(codec: CompressionBase | None) -> tuple[list[torch.Tensor], int]:
    """Two trainers, 30 epochs at lr 1e-5: by how much the parameters moved, and how many rounds averaged them."""
    epochs, rounds = 30, [0]

    async def main() -> list[torch.Tensor]:
        run = Run(target=16, dtype=torch.float32, average_state_every=1, state_compression=codec, lr=1e-5)
        names = ["p0", "p1"]
        for name in names:
            await run.add(name)
            run.swarm.host(name).env.events.subscribe(note)
        await sim.sleep(3.0)
        run.announce_end(epochs)
        await asyncio.gather(
            *(run.swarm.run_on(n, run.swarm.peer(n).train, 4, duration_s=0.3, until=lambda: False) for n in names)
        )
        assert run.agree(names)
        parameters = run.swarm.peer("p0").parameters
        await run.close()
        start = model(torch.float32)
        return [(now - then).detach().double() for now, then in zip(parameters, start, strict=True)]

    def note(event: object) -> None:
        rounds[0] += isinstance(event, RoundFinished) and event.prefix == "run_state"

    return sim.run(main, seed=30), rounds[0]


@pytest.mark.parametrize(
    "codec",
    [pytest.param(Float16Compression(), marks=pytest.mark.long), BFloat16Compression()],
    ids=lambda codec: codec.name,
)
def test_an_optimizer_that_averages_its_state_in_16_bits_takes_small_steps(codec: CompressionBase) -> None:
    """Within 2% of what the same steps add up to without a codec."""
    (exact, rounds), (moved, coded) = trained(None), trained(codec)
    assert rounds > 50 < coded, "both peers average after nearly each epoch"
    for one, other in zip(exact, moved, strict=True):
        assert float(one.abs().mean()) > 5e-5
        print(f"{codec.name}: {float((other - one).norm() / one.norm()):.2%} from the exact sum, {coded} rounds")
        assert float((other - one).norm() / one.norm()) < 0.02
