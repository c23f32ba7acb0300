"""Replays of one peer that does something else than the others in the middle of a run."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.truth.kit import Job, Report, Trainee, Verdict, apart, counted, joined, no_hook, perceptron, together
from benchmarks.truth.peers import Failed, Peers

__all__ = ["REPLAYS"]

SINCE, EPOCHS, CHECK_EVERY = 12, 48, 10
Hook = Callable[[Trainee], None]


def one_of(hook: Hook, peers: int = 2, model: Callable[[], nn.Module] = perceptron) -> list[Report]:
    """The last one of these peers has the hook."""
    hooks = [no_hook] * (peers - 1) + [hook]
    jobs = [Job(index=i, epochs=EPOCHS, hook=each, model=model) for i, each in enumerate(hooks)]
    with Peers() as started:
        return together(started, jobs)


def is_time(trainee: Trainee) -> bool:
    """Whether the epoch has come; true once."""
    if trainee.swarm.local_epoch < SINCE or "done" in trainee.kept:
        return False
    trainee.kept["done"] = True
    return True


# ------------------------------------------------------------------------------------ gradients that differ by design


def equal_all_along(reports: list[Report]) -> Verdict:
    """No epoch differs, nobody downloads, and all is trained."""
    differ, common = apart(reports)
    downloads = sum(max(0, report.downloads - 1) for report in reports)
    held = not differ and common >= 0.95 * EPOCHS and not downloads
    return Verdict(held, f"{counted(differ, common, 'epochs differ')}, {downloads} downloads")


def noisy(gradient: torch.Tensor) -> torch.Tensor:
    """Some noise on it."""
    return gradient + 0.1 * torch.randn_like(gradient)


def add_noise(trainee: Trainee) -> None:
    """Hooks on parameters, as for differential privacy."""
    if is_time(trainee):
        for parameter in trainee.model.parameters():
            parameter.register_hook(noisy)


def noisy_gradients() -> Verdict:
    """Hooks on one peer's parameters add noise to its gradients: they are averaged like others."""
    return equal_all_along(one_of(add_noise))


def dropping() -> nn.Module:
    """With dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 1))


def forget_train(trainee: Trainee) -> None:
    """Its model stays in eval mode, after an evaluation."""
    if is_time(trainee):
        trainee.model.eval()


def other_dropout() -> Verdict:
    """One peer's dropout is in eval mode: its gradients are others, and the steps are the same."""
    return equal_all_along(one_of(forget_train, model=dropping))


# -------------------------------------------------------------------------------------------------- steps that differ


def said_at(reports: list[Report]) -> list[int]:
    """The epochs at which a check found that parameters differ."""
    texts = [text for report in reports for text in report.warnings]
    found = (re.search(r"check of the parameters at epoch (\d+)", text) for text in texts)
    return sorted(int(match[1]) for match in found if match)


def mended(reports: list[Report]) -> Verdict:
    """Found by the next check, said, and equal to the bit from then on."""
    differ, common = apart(reports, since=SINCE)
    told = said_at(reports)
    wrong = [epoch for epoch in reports[0].weights if len({each.weights.get(epoch) for each in reports} - {None}) > 1]
    last = max(wrong, default=0)
    same = len({report.end for report in reports}) == 1
    held = same and bool(told) and told[0] <= SINCE + CHECK_EVERY and last <= SINCE + CHECK_EVERY + 2
    end = "equal" if same else "different"
    return Verdict(
        held, f"{counted(differ, common, 'epochs differ')}, the last {last}; said at {told}; {end} at the end"
    )


def said_again(reports: list[Report]) -> Verdict:
    """What goes on differing is found by each check, and said with what to look for."""
    told = said_at(reports)
    named = sum("the step itself differs on one side" in text for report in reports for text in report.warnings)
    held = bool(told) and told[0] <= SINCE + CHECK_EVERY and bool(named)
    return Verdict(held, f"said at {told}, {named} times with what to look for")


def disturb(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Noise on what the step is taken from."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)


def add_step_noise(trainee: Trainee) -> None:
    """A hook on the step."""
    if is_time(trainee):
        trainee.optimizer.register_step_pre_hook(disturb)


def noisy_steps() -> Verdict:
    """A hook on one peer's optimizer adds noise to each step."""
    return said_again(one_of(add_step_noise))


def scale_by_hand(trainee: Trainee) -> None:
    """Somebody repairs a weight by hand."""
    if is_time(trainee):
        with torch.no_grad():
            next(trainee.model.parameters()).mul_(1.01)


def parameter_by_hand() -> Verdict:
    """One of two peers changes a parameter by hand."""
    return mended(one_of(scale_by_hand))


def replace_data(trainee: Trainee) -> None:
    """As older programs load weights."""
    if is_time(trainee):
        parameter = next(trainee.model.parameters())
        parameter.data = parameter.data * 1.01


def data_replaced() -> Verdict:
    """One of three peers gives a parameter other memory: `p.data = ...`."""
    return mended(one_of(replace_data, 3))


def widen(trainee: Trainee) -> None:
    """`model.double()` in mid-run."""
    if is_time(trainee):
        trainee.model.double()


def dtype_changed() -> Verdict:
    """One peer's model becomes float64 in the middle of the run: refused by name, and the other goes on."""
    jobs = [Job(index=i, epochs=EPOCHS, hook=widen if i else no_hook, loss=in_its_dtype) for i in range(2)]
    with Peers() as peers:
        first, second = joined(peers, jobs)
        try:
            second.result()
            error = ""
        except Failed as failed:
            error = str(failed)
        reached = max(first.result().weights)
    held = "ConfigError" in error and "float64" in error and reached >= EPOCHS - 1
    return Verdict(held, f"{error[:150] or 'not refused'}; the other one reached epoch {reached}")


def in_its_dtype(trainee: Trainee) -> torch.Tensor:
    """The loss of one batch, whatever the model's dtype is."""
    inputs = torch.randn(trainee.job.batch, 16, generator=trainee.draw)
    given = inputs.to(next(trainee.model.parameters()).dtype)
    loss: torch.Tensor = (trainee.model(given).float() - inputs.sum(1, keepdim=True).sin()).square().mean()
    return loss


def replace_parameter(trainee: Trainee) -> None:
    """A layer gets a new parameter, which the optimizer does not know."""
    if is_time(trainee):
        layer = trainee.model[0]  # type: ignore[index]
        layer.weight = nn.Parameter(layer.weight.detach() * 1.01)


def parameter_replaced() -> Verdict:
    """One peer's model gets another parameter, without `model=`: it is told when gradients stay away."""
    told = [report.warned("was replaced") for report in one_of(replace_parameter)]
    return Verdict(told == [0, 1], f"{told} warnings")


# ---------------------------------------------------------------------------------------------------- double counting


def forget_sometimes(trainee: Trainee) -> None:
    """From now on every fourth `zero_grad` is forgotten."""
    if trainee.swarm.local_epoch >= SINCE:
        trainee.swarm.zero_grad = lambda set_to_none=True: (  # type: ignore[method-assign]
            trainee.optimizer.zero_grad(set_to_none) if trainee.batches % 4 else None
        )


def zero_grad_forgotten_later() -> Verdict:
    """After some epochs one peer forgets every fourth `zero_grad`: one warning there, none at the other."""
    reports = one_of(forget_sometimes)
    told = [report.warned("zero_grad") for report in reports]
    differ, common = apart(reports)
    return Verdict(told == [0, 1] and not differ, f"{told} warnings, {counted(differ, common, 'epochs differ')}")


REPLAYS = (
    noisy_gradients,
    other_dropout,
    noisy_steps,
    parameter_by_hand,
    data_replaced,
    dtype_changed,
    parameter_replaced,
    zero_grad_forgotten_later,
)
