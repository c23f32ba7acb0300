"""`shoal.Optimizer(offload_optimizer=True)` in an ordinary loop: what it trains is what it trains without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal


def train(dht: shoal.DHT, *, run_id: str, offload: bool, scaled: bool = False, **options: Any) -> list[torch.Tensor]:
    """Parameters after six steps of one peer, with a schedule that is made over the `shoal.Optimizer`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "lr": 0.02},
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    with shoal.Optimizer(
        dht=dht,
        run_id=run_id,
        target_batch_size=8,
        batch_size_per_step=4,
        params=groups,
        optimizer=partial(torch.optim.AdamW, lr=0.05),
        model=model,
        offload_optimizer=offload,
        **options,
    ) as swarm:
        schedule = torch.optim.lr_scheduler.LambdaLR(swarm, lambda epoch: 0.9**epoch)
        swarm.announce_end(6)
        number = 0
        while not swarm.finished:
            generator = torch.Generator().manual_seed(number)
            loss = model(torch.randn(4, 3, generator=generator)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(swarm)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(swarm)
            scaler.update()
            swarm.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters()), "of the model, not of copies"
            number += 1
        assert schedule.get_last_lr() == [group["lr"] for group in swarm.param_groups]
        saved = swarm.state_dict()
        assert float(saved["state"][0]["step"]) == 6
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"scaled": True}, {"late": "next", "max_grad_norm": 0.1}], ids=str)
def test_an_offloaded_loop_trains_what_it_trains_without(options: dict[str, Any]) -> None:
    """To the bit: groups, a schedule, a scaler and clipping. `tests/sim/test_late.py` has the modes that delay."""
    with shoal.DHT(start=True) as dht:
        plain = train(dht, run_id="plain", offload=False, **options)
        ours = train(dht, run_id="ours", offload=True, **options)
    assert all(map(torch.equal, ours, plain))


def test_checkpoints_are_those_of_any_peer(tmp_path: Path) -> None:
    """A run that was saved without offload goes on with it, and the other way round."""
    with shoal.DHT(start=True) as dht:
        for offload in (False, True, False):
            model = torch.nn.Linear(3, 1)
            with shoal.Optimizer(
                dht=dht,
                run_id="saved",
                target_batch_size=4,
                batch_size_per_step=4,
                params=model.parameters(),
                optimizer=partial(torch.optim.Adam, lr=0.1),
                checkpoint=tmp_path,
                save_every=1,
                offload_optimizer=offload,
            ) as swarm:
                before = swarm.local_epoch
                while swarm.local_epoch < before + 2:
                    swarm.zero_grad()
                    model(torch.ones(4, 3)).square().mean().backward()
                    swarm.step()
                last = [parameter.detach().clone() for parameter in model.parameters()]
                saved = swarm.save(tmp_path)
    assert before == 4
    again = torch.nn.Linear(3, 1)
    with (
        shoal.DHT(start=True) as dht,
        shoal.Optimizer(
            dht=dht,
            run_id="saved",
            target_batch_size=4,
            params=again.parameters(),
            optimizer=partial(torch.optim.Adam, lr=0.1),
            checkpoint=saved,
            save_every=0,
            offload_optimizer=True,
        ) as swarm,
    ):
        assert swarm.local_epoch == 6
    assert all(map(torch.equal, again.parameters(), last))
