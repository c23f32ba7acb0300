"""Replays of "any optimizer's state travels", and of states that must not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.truth.kit import Job, Report, Trainee, Verdict, apart, joined, no_hook, perceptron, train
from benchmarks.truth.peers import LIMIT_S, Failed, Peer, Peers

__all__ = ["REPLAYS"]

Make = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
HELLO, FURTHER = 6, 3

# --------------------------------------------------------------------------------------------- optimizers, as they come


def lamb(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer."""
    from pytorch_optimizer import Lamb

    return Lamb(parameters, lr=1e-2)


def lion(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer."""
    from pytorch_optimizer import Lion

    return Lion(parameters, lr=1e-3)


def adopt(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer."""
    from pytorch_optimizer import ADOPT

    return ADOPT(parameters, lr=1e-2)


def soap(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer."""
    from pytorch_optimizer import SOAP

    return SOAP(parameters, lr=1e-2)


def schedule_free(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer."""
    from pytorch_optimizer import ScheduleFreeAdamW

    return ScheduleFreeAdamW(parameters, lr=1e-2)


def prodigy(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer: it finds its rate itself, and keeps what it has found in the groups."""
    from pytorch_optimizer import Prodigy

    return Prodigy(parameters)


def dadapt(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer; like Prodigy."""
    from pytorch_optimizer import DAdaptAdam

    return DAdaptAdam(parameters)


def madgrad(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer: it keeps a count beside the statistics of parameters."""
    from pytorch_optimizer import MADGRAD

    return MADGRAD(parameters, lr=1e-2)


def lookahead(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of pytorch_optimizer, around AdamW of torch."""
    from pytorch_optimizer import Lookahead

    return Lookahead(adamw(parameters), k=3)


def hf_adafactor(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of transformers."""
    from transformers.optimization import Adafactor

    return Adafactor(parameters)


def torch_adafactor(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of torch."""
    return torch.optim.Adafactor(parameters)


def adamw_8bit(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of bitsandbytes, with statistics of 8 bits also for small tensors."""
    from bitsandbytes.optim.adamw import AdamW8bit

    return AdamW8bit(parameters, lr=1e-2, min_8bit_size=256)


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of torch."""
    return torch.optim.AdamW(parameters, lr=1e-2)


def capturable(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """AdamW with `capturable=True`, as on a GPU: here it is taken away for each step, since a CPU refuses it."""
    made = adamw(parameters)
    set_capturable(made, True)
    made.register_step_pre_hook(lambda optimizer, *_: set_capturable(optimizer, False))
    made.register_step_post_hook(lambda optimizer, *_: set_capturable(optimizer, True))
    return made


def set_capturable(optimizer: torch.optim.Optimizer, value: bool) -> None:
    """In all groups."""
    for group in optimizer.param_groups:
        group["capturable"] = value


def wide_statistics(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """Of transformers: its statistics are float32 whatever the parameters are."""
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-2, relative_step=False, scale_parameter=False, beta1=0.9)


def bfloat16_model() -> nn.Module:
    """Parameters of 16 bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)).to(torch.bfloat16)


def schedule_in_groups(trainee: Trainee) -> None:
    """A schedule that is made before the run writes `initial_lr` into the groups."""
    torch.optim.lr_scheduler.LambdaLR(trainee.optimizer, lambda _: 1.0)


def keep_statistics(trainee: Trainee) -> None:
    """Which dtypes the statistics have now."""
    state = trainee.optimizer.state_dict().get("state", {})
    kept = [each for each in state.values() if isinstance(each, dict)]  # some have a count beside those of parameters
    found = {f"{name} {value.dtype}" for each in kept for name, value in each.items() if torch.is_tensor(value)}
    trainee.report.values["dtypes"] = sorted(found)


def evaluate(trainee: Trainee) -> None:
    """An evaluation in the middle, as a loop with ScheduleFree has them."""
    keep_statistics(trainee)
    trainee.swarm.eval()
    trainee.swarm.train()


def leave(*peers: Peer) -> list[Report]:
    """End the run now."""
    for each in peers:
        each.tell("leave")
    return [each.result() for each in peers]


def takes_part(
    optimizer: Make,
    model: Callable[[], nn.Module] = perceptron,
    begin: Callable[[Trainee], None] = no_hook,
    hook: Callable[[Trainee], None] | None = None,
    donor: Make | None = None,
) -> Verdict:
    """A newcomer comes at epoch 6: three epochs after its first own step it is equal to the bit, statistics too."""
    jobs: dict[str, Any] = {"model": model, "target": 32, "pace_s": 0.05, "epochs": 10**6}
    with Peers() as peers:
        old = peers.start(train, job=Job(index=0, optimizer=donor or optimizer, hook=hook or keep_statistics, **jobs))
        entry = old.wait("address")
        old.until_epoch(HELLO)
        job = Job(index=1, entries=(entry,), optimizer=optimizer, hook=keep_statistics, begin=begin, **jobs)
        new = peers.start(train, job=job)
        new.wait("address")
        with contextlib.suppress(TimeoutError):
            new.until_steps(2 * FURTHER, 12.0)
        reports = leave(new, old)
    newcomer = reports[0]
    own = sorted(epoch for epoch, count in newcomer.steps.items() if count > 1)
    if len(own) < FURTHER:
        told = f": {newcomer.warnings[0][:150]}" if newcomer.warnings else ""
        return Verdict(held=False, measured=f"{newcomer.downloads} downloads, {len(own)} steps with the others{told}")
    differ, common = apart(reports, since=own[0])
    statistics, _ = apart(reports, "statistics", since=own[0])
    dtypes = reports[0].values["dtypes"] == reports[1].values["dtypes"]
    held = not differ and not statistics and newcomer.downloads <= 2 and dtypes
    measured = (
        f"{newcomer.downloads} downloads; in {common} epochs weights differ in {differ}, statistics in {statistics}"
    )
    return Verdict(held, measured + ("" if dtypes else f"; dtypes {reports[0].values['dtypes']}"))


def newcomer_lamb() -> Verdict:
    """A newcomer in a run with Lamb of pytorch_optimizer."""
    return takes_part(lamb)


def newcomer_lion() -> Verdict:
    """A newcomer in a run with Lion of pytorch_optimizer."""
    return takes_part(lion)


def newcomer_adopt() -> Verdict:
    """A newcomer in a run with ADOPT of pytorch_optimizer."""
    return takes_part(adopt)


def newcomer_soap() -> Verdict:
    """A newcomer in a run with SOAP of pytorch_optimizer."""
    return takes_part(soap)


def newcomer_schedule_free() -> Verdict:
    """A newcomer in a run with ScheduleFreeAdamW of pytorch_optimizer."""
    return takes_part(schedule_free)


def schedule_free_evaluates() -> Verdict:
    """ScheduleFreeAdamW, where one peer evaluates after each batch by `eval` and `train`, and a newcomer comes."""
    return takes_part(schedule_free, hook=evaluate)


def newcomer_prodigy() -> Verdict:
    """A newcomer in a run with Prodigy of pytorch_optimizer."""
    return takes_part(prodigy)


def newcomer_dadapt() -> Verdict:
    """A newcomer in a run with DAdaptAdam of pytorch_optimizer."""
    return takes_part(dadapt)


def newcomer_madgrad() -> Verdict:
    """A newcomer in a run with MADGRAD of pytorch_optimizer."""
    return takes_part(madgrad)


def newcomer_lookahead() -> Verdict:
    """A newcomer in a run with Lookahead of pytorch_optimizer around AdamW."""
    return takes_part(lookahead)


def newcomer_hf_adafactor() -> Verdict:
    """A newcomer in a run with Adafactor of transformers."""
    return takes_part(hf_adafactor)


def newcomer_torch_adafactor() -> Verdict:
    """A newcomer in a run with Adafactor of torch."""
    return takes_part(torch_adafactor)


def newcomer_initial_lr() -> Verdict:
    """A newcomer whose AdamW has `initial_lr` in its groups already, as a schedule leaves it."""
    return takes_part(adamw, begin=schedule_in_groups)


def newcomer_capturable() -> Verdict:
    """A newcomer on a CPU, where the donor's AdamW has `capturable=True`."""
    return takes_part(adamw, donor=capturable)


def newcomer_8bit() -> Verdict:
    """A newcomer in a run with AdamW8bit of bitsandbytes."""
    return takes_part(adamw_8bit)


def newcomer_bfloat16() -> Verdict:
    """A newcomer with bfloat16 parameters, whose optimizer keeps float32 statistics."""
    return takes_part(wide_statistics, model=bfloat16_model)


# ------------------------------------------------------------------------------------------------------- hostile donors


def claim(trainee: Trainee, epoch: int, samples: int, rate: object = None) -> None:
    """Claim a state that is further than all others, as a checkpoint would, or else by shoal's own insides.

    Before the others hear of it, `rate` is what all learning rates are.
    """
    collaboration: Any = trainee.swarm.collaboration
    tell = collaboration.tell_loaded

    async def tell_loaded() -> None:
        for group in trainee.optimizer.param_groups if rate is not None else ():
            group["lr"] = rate
        await tell()

    collaboration.tell_loaded = tell_loaded
    trainee.kept["claimed"] = True
    own = trainee.swarm.state_dict()
    own["shoal"] |= {"epoch": epoch, "samples": samples, "scheduled": 0}
    try:
        trainee.swarm.load_state_dict(own)
    except shoal.ShoalError:  # it is refused already here
        collaboration.state = collaboration.state._replace(epoch=epoch, samples=samples)
        trainee.swarm.dht.loop_thread.run(tell_loaded(), 5.0)


def claims_further(trainee: Trainee) -> None:
    """A rate of "boom" under a better name."""
    if trainee.swarm.local_epoch >= HELLO and not trainee.kept:
        claim(trainee, 1000, 10**6, "boom")


def claims_the_end(trainee: Trainee) -> None:
    """A name at the bounds."""
    if trainee.swarm.local_epoch >= HELLO and not trainee.kept:
        claim(trainee, 10**7, 2**62)


def go_on(hook: Callable[[Trainee], None]) -> Verdict:
    """Two honest peers, and one that offers a poisoned state at epoch 6: the two go on, equal to the bit."""
    epochs = 40
    honest = [Job(index=i, epochs=epochs, target=48, pace_s=0.03) for i in range(2)]
    hostile = Job(index=2, epochs=2 * 10**6, target=48, pace_s=0.03, hook=hook)
    with Peers() as peers:
        started = joined(peers, [*honest, hostile])
        found = list[Report]()
        ends = list[str]()
        end = time.monotonic() + LIMIT_S
        for each in started[:2]:
            try:
                found.append(each.result(max(1.0, end - time.monotonic())))
            except Failed as error:
                ends.append(str(error)[:120])
        reached = [max(value[0] for name, value in each.said if name == "epoch") for each in started[:2]]
    if ends:
        return Verdict(held=False, measured=f"epochs {reached} of {epochs}; {ends[0]}")
    differ, common = apart(found)
    jumped = max(reached) > epochs
    held = not differ and not jumped and common > epochs - 5 and found[0].end == found[1].end
    return Verdict(held, f"epochs {reached} of {epochs}, {differ} of {common} differ")


def hostile_rate() -> Verdict:
    """A donor's state has `lr="boom"`."""
    return go_on(claims_further)


def poisoned_name() -> Verdict:
    """A donor names epoch 10^7 and 2^62 samples."""
    return go_on(claims_the_end)


REPLAYS: tuple[Callable[[], Verdict], ...] = (
    newcomer_lamb,
    newcomer_lion,
    newcomer_adopt,
    newcomer_soap,
    newcomer_schedule_free,
    schedule_free_evaluates,
    newcomer_prodigy,
    newcomer_dadapt,
    newcomer_madgrad,
    newcomer_lookahead,
    newcomer_hf_adafactor,
    newcomer_torch_adafactor,
    newcomer_initial_lr,
    newcomer_capturable,
    newcomer_8bit,
    newcomer_bfloat16,
    hostile_rate,
    poisoned_name,
)
