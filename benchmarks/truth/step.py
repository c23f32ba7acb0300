"""Replays of "every peer takes the same step"."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.truth.kit import (
    Job,
    Report,
    Trainee,
    Verdict,
    Warnings,
    apart,
    changed,
    counted,
    digest,
    join,
    joined,
    pass_gate,
    status,
    together,
    train,
)
from benchmarks.truth.peers import Failed, Line, Peers

__all__ = ["REPLAYS"]

# ------------------------------------------------------------------------------------------- learning rates that differ


class Regression(nn.Module):
    """What a Trainer wants of a model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        return {"loss": (self.layers(x) - labels).square().mean()}


def hf_trainer(line: Line, job: Job, warmup_steps: int = 0) -> Report:
    """The Trainer of transformers, with its default schedule, and shoal's optimizer given to it."""
    import logging

    from transformers import Trainer, TrainerCallback, TrainingArguments

    trainee = Trainee(changed(job, model=Regression), line)
    logging.getLogger("shoal").addHandler(Warnings(trainee.report.warnings))
    generator = torch.Generator().manual_seed(job.index)
    inputs = torch.randn(4096, 16, generator=generator)
    data = [{"x": each, "labels": each.sum().sin()[None]} for each in inputs]

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainee.saw()
            time.sleep(job.pace_s)
            if trainee.swarm.finished:
                control.should_training_stop = True

    with shoal.DHT(job.entries, start=True) as dht, tempfile.TemporaryDirectory() as folder:
        dht.events.subscribe(trainee.note)
        line.say("address", str(dht.get_visible_maddrs()[0]))
        trainee.swarm = join(trainee, dht)
        trainee.swarm.announce_end(job.epochs)
        pass_gate(line, job)
        args = TrainingArguments(
            output_dir=folder,
            max_steps=1500,
            warmup_steps=warmup_steps,
            per_device_train_batch_size=job.batch,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            logging_strategy="no",
            dataloader_pin_memory=False,
        )
        Trainer(
            model=trainee.model,
            args=args,
            train_dataset=data,
            optimizers=(trainee.swarm, None),
            callbacks=[Watch()],
        ).train()
        trainee.report.end = digest(list(trainee.model.state_dict().values()))
    return trainee.report


def warmed_up(line: Line, job: Job) -> Report:
    """The same with a warm-up, which begins at a rate of 0."""
    return hf_trainer(line, job, warmup_steps=100)


def equal_rates(reports: list[Report], *, named: bool = True) -> Verdict:
    """No epoch differs, all were taken together, and the user was told of the rates."""
    differ, common = apart(reports)
    told = any(report.warned("lr", "learning rates?", "rates?", "schedule") for report in reports)
    moved = len(set(reports[0].weights.values())) > common // 2
    held = not differ and common >= 0.95 * max(map(len, (each.weights for each in reports))) and moved
    measured = counted(differ, common, "epochs differ") + ("" if moved else ", nothing is trained")
    return Verdict(held and (told or not named), measured + (", a warning names it" if told else ", no warning"))


def trainer_schedule() -> Verdict:
    """Two Trainers of transformers with their default schedule."""
    with Peers() as peers:
        return equal_rates(
            together(peers, [Job(index=i, pace_s=(0.004, 0.01)[i]) for i in range(2)], hf_trainer), named=False
        )


def trainer_warm_up() -> Verdict:
    """The same with a warm-up from 0."""
    with Peers() as peers:
        return equal_rates(
            together(peers, [Job(index=i, pace_s=(0.004, 0.01)[i]) for i in range(2)], warmed_up), named=False
        )


def own_schedule(trainee: Trainee) -> None:
    """A loop that was written before shoal: its `scheduler.step()` was left in."""
    if "schedule" not in trainee.kept:
        trainee.kept["schedule"] = torch.optim.lr_scheduler.ExponentialLR(trainee.optimizer, 0.999)
    trainee.kept["schedule"].step()


def leftover_scheduler() -> Verdict:
    """One peer's loop still has a `scheduler.step()` of its own."""
    with Peers() as peers:
        return equal_rates(together(peers, [Job(index=0), Job(index=1, hook=own_schedule)]))


def by_hand(trainee: Trainee) -> None:
    """Somebody tries another rate."""
    if trainee.swarm.local_epoch >= 20:
        trainee.swarm.param_groups[0]["lr"] = 0.003


def rate_by_hand() -> Verdict:
    """One peer sets its rate by hand at epoch 20."""
    with Peers() as peers:
        return equal_rates(together(peers, [Job(index=0), Job(index=1, hook=by_hand)]))


def slowly(optimizer: torch.optim.Optimizer) -> Any:
    """A schedule."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.999**epoch)


def quickly(optimizer: torch.optim.Optimizer) -> Any:
    """One of the same class, with another function."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.97**epoch)


def two_lambdas() -> Verdict:
    """Two LambdaLRs with other functions."""
    with Peers() as peers:
        return equal_rates(together(peers, [Job(index=0, scheduler=slowly), Job(index=1, scheduler=quickly)]))


# ----------------------------------------------------------------------------------------- what is beside the gradients


def adapter(base: int) -> nn.Module:
    """A frozen base with something small that is trained."""
    torch.manual_seed(base)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(0)
    model.append(nn.Linear(8, 1))
    return model


def one_base() -> nn.Module:
    """The base that was meant."""
    return adapter(1)


def another_base() -> nn.Module:
    """Another."""
    return adapter(2)


def frozen_base() -> Verdict:
    """Only an adapter is trained, over frozen weights that differ; `model=` is given."""
    jobs = [
        Job(index=i, model=make, give_model=True, epochs=30, options={"matchmaking_time": 3.0})
        for i, make in enumerate((one_base, another_base))
    ]
    errors = list[str]()
    with Peers() as peers:
        try:
            first, second = joined(peers, jobs)
            reports = [second.result(), first.result()]
        except Failed as error:
            reports, errors = [], [str(error)]
    both = max((sum(count > 1 for count in each.steps.values()) for each in reports), default=0)
    texts = [*errors, *(each for report in reports for each in report.warnings)]
    told = any(word in text for text in texts for word in ("frozen", "0.weight", "base"))
    return Verdict(not both and told, f"{both} epochs together, {'named' if told else 'not named'}: {texts[:1]}")


def normalised() -> nn.Module:
    """With running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1))


def running_statistics() -> Verdict:
    """Batch-norm statistics as `extra_tensors` at the end of a run."""
    names = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    jobs = [Job(index=i, epochs=25, model=normalised, extra=names, pace_s=(0.004, 0.01)[i]) for i in (0, 1)]
    with Peers() as peers:
        first, second = together(peers, jobs)
    return Verdict(first.end == second.end, f"{'equal' if first.end == second.end else 'different'} at the end")


def half_used() -> nn.Module:
    """A model whose second part the loss does not use."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 1), nn.Identity())
    model[1].register_parameter("spare", nn.Parameter(torch.ones(4)))
    return model


def keep_spare(trainee: Trainee) -> None:
    """The parameter that has no gradient, as it is now."""
    trainee.report.values["spare"] = trainee.model.get_parameter("1.spare").tolist()


def without_gradient() -> Verdict:
    """A parameter that never has a gradient, under weight decay: torch leaves it as it is."""
    with Peers() as peers:
        reports = together(peers, [Job(index=i, epochs=20, model=half_used, hook=keep_spare) for i in range(2)])
    found = [report.values["spare"][0] for report in reports]
    return Verdict(found == [1.0, 1.0], f"1.0 became {found[0]:.4f}")


def loses_gradients(trainee: Trainee) -> None:
    """A loop that clears the gradients before every other step: a batch without any counts nothing."""
    trainee.report.values["batches"] = trainee.report.values.get("batches", 0) + 1
    if trainee.report.values["batches"] % 2:
        for parameter in trainee.model.parameters():
            parameter.grad = None


def warned_once(reports: list[Report], *words: str) -> tuple[bool, str]:
    """Each peer has one warning with one of these words."""
    counts = [each.warned(*words) for each in reports]
    return counts == [1] * len(counts), f"{counts} warnings"


def no_gradients() -> Verdict:
    """`step()` without any gradient, in every other batch: one warning."""
    with Peers() as peers:
        reports = together(peers, [Job(index=i, epochs=10, hook=loses_gradients) for i in range(2)])
    return Verdict(*warned_once(reports, "gradients?"))


def no_zero_grad() -> Verdict:
    """A forgotten `zero_grad`: one warning; none in a loop that has it."""
    with Peers() as peers:
        reports = together(peers, [Job(index=0, epochs=20, zero=False), Job(index=1, epochs=20)])
    held, measured = warned_once(reports[:1], "zero_grad")
    quiet = not reports[1].warned("zero_grad")
    return Verdict(held and quiet, f"{measured}, {'none' if quiet else 'a false alarm'} in the other's loop")


def reload(trainee: Trainee) -> None:
    """Load what was saved just now."""
    if trainee.swarm.local_epoch == 5 and "before" not in trainee.report.values:
        saved = trainee.swarm.state_dict()
        trainee.report.values["before"] = saved["shoal"]["digest"]
        trainee.swarm.load_state_dict(saved)
        trainee.report.values["after"] = trainee.swarm.state_dict()["shoal"]["digest"]


def load_own_state() -> Verdict:
    """`load_state_dict(state_dict())` of an unchanged state."""
    with Peers() as peers:
        (report,) = together(peers, [Job(epochs=10, hook=reload)])
    kept = report.values["before"] == report.values["after"]
    return Verdict(kept, "the name is kept" if kept else "another name")


# -------------------------------------------------------------------------------------------------- tampered parameters


FLIPPED_AT, MENDED_BY = 12, 60


def flip(trainee: Trainee) -> None:
    """A bit of a weight flips once."""
    if trainee.swarm.local_epoch == FLIPPED_AT and "flipped" not in trainee.kept:
        trainee.kept["flipped"] = True
        with torch.no_grad():
            next(trainee.model.parameters()).view(torch.int32)[0, 0] ^= 1 << 22


def bit_flip() -> Verdict:
    """A bit of one peer's weights flips in mid-run: found, said, mended; and what `shoal status` says at the end."""
    epochs = FLIPPED_AT + MENDED_BY
    jobs = [Job(index=i, epochs=epochs, target=96, wait=True, hook=flip if i == 1 else keep_nothing) for i in range(3)]
    with Peers() as peers:
        started = joined(peers, jobs)
        entry = dict(started[0].said)["address"]
        for each in started:
            each.wait("finished")
        names = {peer["state_digest"] for peer in status(entry)["peers"]}
        for each in started:
            each.tell("leave")
        reports = [each.result() for each in started]
    differ, common = apart(reports, since=FLIPPED_AT)
    wrong_for = max((e for e in reports[0].weights if len({r.weights.get(e) for r in reports}) > 1), default=0)
    same = len({report.end for report in reports}) == 1
    told = any(r.warned("differ", "differs", "weights", "parameters?") for r in reports)
    honest = (len(names) == 1) == same
    last = max(0, wrong_for - FLIPPED_AT)
    measured = f"{differ} of {common} epochs differ, the last {last} after it; {'said' if told else 'not said'}"
    lie = "" if honest else "; status says they are identical, and they are not"
    return Verdict(same and told and honest, f"{measured}; {'equal' if same else 'different'} at the end{lie}")


def keep_nothing(_: Trainee) -> None:
    """Does nothing."""


def broad() -> nn.Module:
    """So many weights that the check samples few of them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 4096), nn.Tanh(), nn.Linear(4096, 1))


def train_plainly(line: Line, job: Job) -> Report:
    """As if this machine had no vector instructions: another arithmetic."""
    os.environ["ATEN_CPU_CAPABILITY"] = "default"
    report = train(line, job)
    report.values["capability"] = torch.backends.cpu.get_cpu_capability()
    return report


def two_builds() -> Verdict:
    """Two of four peers compute without vector instructions; a bit of a weight flips on one of these."""
    epochs, check_every = FLIPPED_AT + 24, 10
    jobs = [
        Job(index=i, epochs=epochs, target=96, wait=True, model=broad, hook=flip if i == 3 else keep_nothing)
        for i in range(4)
    ]
    with Peers() as peers:
        started = joined(peers, jobs, [train, train, train_plainly, train_plainly])
        entry = dict(started[0].said)["address"]
        for each in started:
            each.wait("finished")
        said = status(entry)["parameters"]
        for each in started:
            each.tell("leave")
        reports = [each.result() for each in started]
    plain = [report for report in reports if report.values.get("capability") == "DEFAULT"]
    others = [report for report in reports if report not in plain]
    common = set.intersection(*(set(report.weights) for report in plain))
    wrong = [epoch for epoch in common if len({report.weights[epoch] for report in plain}) > 1]
    told = sum(report.warned("the check of the parameters") for report in reports)
    same = all(len({report.end for report in kind}) == 1 for kind in (plain, others))
    last = max(wrong, default=FLIPPED_AT)
    end = "equal" if same else "different"
    held = len(plain) == 2 and same and bool(told) and last <= FLIPPED_AT + check_every and "rounding" in str(said)
    measured = f"{len(wrong)} of {len(common)} epochs differ, the last {last - FLIPPED_AT} after it; {told} warnings"
    return Verdict(held, f"{measured}; {end} within each build at the end; status: {said}")


# --------------------------------------------------------------------------------------------------- nobody is expelled


def in_step(reports: list[Report], epochs: int, since: int = 0) -> tuple[float, int, int]:
    """The least share of epochs whose step a peer took itself, downloads of all, and steps that somebody took alone."""
    taken = [sum(epoch > since for epoch in report.steps) for report in reports]
    alone = sum(count == 1 for report in reports for epoch, count in report.steps.items() if epoch > since)
    return min(taken) / (epochs - since), sum(report.downloads for report in reports), alone


def expels_nobody(jobs: list[Job], epochs: int, since: int = 2) -> Verdict:
    """Every peer took at least 95% of the steps itself, nobody one alone, nobody downloaded."""
    with Peers() as peers:
        reports = together(peers, jobs)
    # The last step of those who came late and the first one, before all are there, do not count.
    downloads = [max(0, report.downloads - 1) for report in reports]
    share, _, alone = in_step(reports, epochs, since)
    measured = f"the least takes part in {share:.0%}, {sum(downloads)} downloads after the first, {alone} steps alone"
    return Verdict(share >= 0.95 and not sum(downloads) and not alone, measured)


def unequal_paces() -> Verdict:
    """Three peers with batches of 0.02, 0.02 and 0.5 s, states averaged every 4 epochs."""
    paces = (0.02, 0.02, 0.5)
    options = {"average_state_every": 4}
    jobs = [
        Job(index=i, epochs=40, target=1024, batch=16, pace_s=pace_s, options=options) for i, pace_s in enumerate(paces)
    ]
    return expels_nobody(jobs, 40)


def wide() -> nn.Module:
    """4 million values."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 1))


def large_states_every(epochs: int) -> Verdict:
    """Two equal peers with large states, averaged every so many epochs."""
    options = {"average_state_every": epochs}
    jobs = [Job(index=i, epochs=40, target=4, batch=4, pace_s=0.02, model=wide, options=options) for i in range(2)]
    return expels_nobody(jobs, 40)


def large_states() -> Verdict:
    """Two equal peers with large states, averaged every 4 epochs."""
    return large_states_every(4)


def large_states_always() -> Verdict:
    """The same, averaged every epoch."""
    return large_states_every(1)


def sixteen_at_once() -> Verdict:
    """16 processes that are started together, with epochs of about one second."""
    jobs = [Job(index=i, epochs=15, target=1024, batch=16, pace_s=0.2) for i in range(16)]
    with Peers() as peers:
        reports = together(peers, jobs)
    share, downloads, alone = in_step(reports, 15, since=3)
    in_a_row = max(report.downloads for report in reports)
    measured = (
        f"the least takes part in {share:.0%} from the third epoch on, {downloads} downloads, at most {in_a_row} by one"
    )
    return Verdict(share >= 0.95 and in_a_row <= 1, f"{measured}, {alone} steps alone")


REPLAYS = (
    trainer_schedule,
    trainer_warm_up,
    leftover_scheduler,
    rate_by_hand,
    two_lambdas,
    frozen_base,
    running_statistics,
    without_gradient,
    no_gradients,
    no_zero_grad,
    load_own_state,
    bit_flip,
    two_builds,
    unequal_paces,
    large_states,
    large_states_always,
    sixteen_at_once,
)
