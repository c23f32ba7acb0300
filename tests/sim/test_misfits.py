"""States that cannot be taken over: what they cost, and what the trainer is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal import sim
from shoal.errors import StateUnavailable
from shoal.events import StateDownloaded
from shoal.run.join.shared_state import Misfits
from tests.sim.optimizer_kit import Run


def test_a_misfit_costs_two_downloads_and_names_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer to a run with LAMB stayed at epoch 0, and downloaded at every step: 1.7 GB in 15 seconds."""

    async def main() -> None:
        run, loop, downloaded = Run(target=16), asyncio.get_running_loop(), list[int]()
        names = ["p0", "p1", "late"]
        for name in names[:2]:
            await run.add(name)

        def train(name: str) -> Any:
            trainer = run.swarm.peer(name)
            return run.swarm.run_on(name, trainer.train, 4, duration_s=0.5, until=lambda: loop.time() > 60)

        running = [asyncio.create_task(train(name)) for name in names[:2]]
        await sim.sleep(10.0)
        late = await run.add("late")

        def misfit(values: Any, tensors: Any) -> Any:
            raise StateUnavailable("the state does not fit here: statistic 'exp_avg' is missing")

        monkeypatch.setattr(late.participant.training, "prepare", misfit)
        late.participant.core.env.events.subscribe(
            lambda event: downloaded.append(event.bytes_received) if isinstance(event, StateDownloaded) else None
        )
        await asyncio.gather(*running, train("late"))
        assert len(downloaded) == 2
        assert "statistic 'exp_avg' is missing" in late.failed_downloads[-1]
        assert len(late.failed_downloads) < 8
        assert run.agree(names[:2])
        await run.close()

    sim.run(main, seed=31)


def test_an_option_that_does_not_fit_is_seen_before_anything_is_downloaded() -> None:
    """It stands in the manifest."""

    def other(parameters: list[torch.Tensor], _: float) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(parameters, lr=0.05, amsgrad=True)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)

    async def main() -> None:
        run = Run(target=8)
        first = await run.add("p0")
        for _ in range(6):
            await run.swarm.run_on("p0", first.take_batch, 4)
        run._make = other
        late = (await run.add("late")).participant
        await sim.sleep(3.0)
        with pytest.raises(StateUnavailable, match="option 'amsgrad' is False there and True here"):
            await run.swarm.run_on("late", late.turn.download, 5.0)
        assert not late.takeover.downloads
        await run.close()

    sim.run(main, seed=32)


def test_another_kind_of_state_is_tried_again() -> None:
    """Other numbers are the same kind; other names, dtypes or shapes are another."""
    misfits, values, tensors = Misfits(), {"a": [1, {"v": 0.5}], "on": True}, [torch.zeros(3)]
    for _ in range(2):
        assert misfits.why_not(values, tensors) is None
        misfits.add(values, tensors, "no")
    assert misfits.why_not({"a": [2, {"v": 7}], "on": True}, tensors) == "no (it was downloaded 2 times)"
    for other in ({**values, "on": False}, {**values, "b": 1}, {"a": [1, {"v": "x"}], "on": True}):
        assert misfits.why_not(other, tensors) is None
    assert misfits.why_not(values, [torch.zeros(4)]) is None
    assert misfits.why_not(values, [torch.zeros(3, dtype=torch.float64)]) is None
