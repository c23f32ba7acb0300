"""The audit of averages can fail: a reducer that counts wrongly is found, under every codec and in every fault plan."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from shoal import sim
from shoal.averaging.allreduce import round_tiles
from shoal.averaging.allreduce.vector import Vector
from shoal.compression import CompressionBase
from shoal.events import Event, GroupFormed
from shoal.layout import Tile
from tests.codecs import CODECS
from tests.sim.audit_kit import Audit
from tests.sim.averaging_kit import Trial
from tests.sim.test_averaging_faults import play

ROUNDS = 3
FOUND = r"the average is|the weights|is counted"

add, begin_sum, mask = Vector.add, Vector.begin_sum, round_tiles._mask


def adds_twice(patch: pytest.MonkeyPatch) -> None:
    """Every contribution is added twice."""

    def twice(self: Vector, tile: Tile, values: torch.Tensor, weight: float) -> None:
        add(self, tile, values, weight)
        add(self, tile, values, weight)

    patch.setattr(Vector, "add", twice)


def adds_nothing(patch: pytest.MonkeyPatch) -> None:
    """Contributions are counted, and not added."""
    patch.setattr(Vector, "add", lambda self, tile, values, weight: None)


def owns_twice(patch: pytest.MonkeyPatch) -> None:
    """The reducer of a tile adds its own values twice."""
    patch.setattr(Vector, "begin_sum", lambda self, tile, weight: begin_sum(self, tile, 2 * weight))


def names_too_few(patch: pytest.MonkeyPatch) -> None:
    """The last one of those that are counted in a tile is not named."""
    patch.setattr(round_tiles, "_mask", lambda members, count: mask(set(sorted(members)[:-1]) or members, count))


def names_too_many(patch: pytest.MonkeyPatch) -> None:
    """All members of the group are named."""
    patch.setattr(round_tiles, "_mask", lambda members, count: mask(set(range(count)), count))


MUTANTS = (adds_twice, adds_nothing, owns_twice, names_too_few)


def quiet_rounds(codec: CompressionBase) -> int:
    """Three average a few times, and nothing happens; returns how many averages were checked."""

    async def main() -> int:
        audit, places = Audit(), {"p0": 0, "p1": 1, "p2": 2}

        def heard(name: str, event: Event) -> None:
            if isinstance(event, GroupFormed):
                audit.bring(event.round_id, trial.swarm.peer(name), 1.0 + places[name])

        trial = Trial(compression=codec, heard=heard)
        values = {name: [torch.zeros(12_000), torch.zeros(3, 5, dtype=torch.float64)] for name in places}

        async def step(name: str) -> None:
            result = await trial.step(name, weight=1.0 + places[name])
            audit.check(trial.swarm.peer(name), result)

        for name in places:
            await trial.add(name, values[name], target_group_size=len(places))
        for number in range(ROUNDS):
            for name, place in places.items():
                for tensor in values[name]:
                    ramp = torch.linspace(-1.0, place, tensor.numel(), dtype=tensor.dtype)
                    tensor.copy_(ramp.view(tensor.shape)).add_(number / 8)
            await asyncio.gather(*map(step, places))
        await trial.close()
        return audit.checked

    return sim.run(main, seed=1)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_what_is_right_passes_under_every_codec_and_a_mutant_does_not(
    codec: CompressionBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much the codec loses. Codecs take turns with the mutants: the next test has all of these."""
    assert quiet_rounds(codec) == 3 * ROUNDS
    mutant = MUTANTS[[each.name for each in CODECS].index(codec.name) % len(MUTANTS)]
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        quiet_rounds(codec)


@pytest.mark.parametrize("mutant", [*MUTANTS, names_too_many], ids=lambda mutant: mutant.__name__)
@pytest.mark.parametrize("number", [0, *(pytest.param(each, marks=pytest.mark.long(full=True)) for each in (1, 2))])
def test_every_mutant_is_found_by_fault_plans(
    mutant: Callable[[pytest.MonkeyPatch], None], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else happens in the plan."""
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=FOUND):
        play(number)
