"""Replays of "the numbers on the wire", and of what an averager's own `get_current_state` gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.truth.kit import Job, Trainee, Verdict, together
from benchmarks.truth.peers import Line, Peers
from shoal.compression import (
    BFloat16Compression,
    BlockwiseQuantization,
    CompressionBase,
    Float16Compression,
    Quantile8BitQuantization,
    Uniform8BitQuantization,
)

__all__ = ["REPLAYS"]

ROUNDS = 30
LOST_AT_MOST = 0.02


def averaged(
    line: Line, entry: str, codec: CompressionBase, tensors: list[torch.Tensor], rounds: int, grows: float
) -> list[torch.Tensor]:
    """Average `rounds` times, each time after `grows` was added to all; gives what the tensors have become."""
    with shoal.DHT([entry] if entry else [], start=True) as dht:
        line.say("address", str(dht.get_visible_maddrs()[0]))
        averager = shoal.DecentralizedAverager(tensors, dht, start=True, prefix="numbers", compression=codec)
        for _ in range(rounds):
            with averager.get_tensors() as held, torch.no_grad():
                for tensor in held:
                    tensor += grows
            averager.step(timeout=30)
        line.say("averaged", [tensor.detach().clone().numpy() for tensor in tensors])
        line.wait("leave")
    return tensors


def two_averagers(
    codec: CompressionBase, both: list[list[torch.Tensor]], rounds: int = 1, grows: float = 0.0
) -> list[list[torch.Tensor]]:
    """What two peers hold after averaging."""
    with Peers() as peers:
        options = {"codec": codec, "rounds": rounds, "grows": grows}
        first = peers.start(averaged, entry="", tensors=both[0], **options)
        second = peers.start(averaged, entry=first.wait("address"), tensors=both[1], **options)
        found = [[torch.as_tensor(each) for each in peer.wait("averaged")] for peer in (first, second)]
        for peer in (first, second):
            peer.tell("leave")
    return found


def sixteen_bits(codec: CompressionBase) -> Verdict:
    """30 rounds of a model's parameter, before each of which all peers add 1e-4 to its ones."""
    found = two_averagers(codec, [[nn.Parameter(torch.ones(1000))] for _ in range(2)], ROUNDS, 1e-4)
    moved = [float(tensor.double().mean()) - 1 for (tensor,) in found]
    lost = max(abs(each / (ROUNDS * 1e-4) - 1) for each in moved)
    return Verdict(lost <= LOST_AT_MOST, f"1.0 became {1 + moved[0]:.5f} (exactly: 1.00300), {lost:.1%} is lost")


def float16_rounds() -> Verdict:
    """30 rounds of 1e-4 onto 1.0 with Float16Compression."""
    return sixteen_bits(Float16Compression())


def bfloat16_rounds() -> Verdict:
    """30 rounds of 1e-4 onto 1.0 with BFloat16Compression."""
    return sixteen_bits(BFloat16Compression())


def ones() -> nn.Module:
    """All weights are 1."""
    model = nn.Linear(64, 1, bias=False)
    nn.init.ones_(model.weight)
    return model


def plain_sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """At a small rate."""
    return torch.optim.SGD(parameters, lr=1e-5)


def slope_of_one(trainee: Trainee) -> torch.Tensor:
    """A loss whose gradient is 1 everywhere."""
    loss: torch.Tensor = trainee.model.weight.sum()  # type: ignore[operator]
    return loss


def keep_weight(trainee: Trainee) -> None:
    """What the weights are now."""
    trainee.report.values[str(trainee.swarm.local_epoch)] = float(trainee.model.weight.double().mean())  # type: ignore[operator]


def float16_states() -> Verdict:
    """`Optimizer(state_averaging_compression=Float16Compression())`, 30 epochs of SGD at 1e-5 from 1.0."""
    options = {"state_averaging_compression": Float16Compression(), "average_state_every": 1}
    jobs = [
        Job(
            index=i,
            epochs=ROUNDS + 3,
            target=16,
            pace_s=0.02,
            model=ones,
            optimizer=plain_sgd,
            loss=slope_of_one,
            hook=keep_weight,
            options=options,
        )
        for i in range(2)
    ]
    with Peers() as peers:
        reports = together(peers, jobs)
    moved = [1 - report.values[str(ROUNDS)] for report in reports]
    lost = max(abs(each / (ROUNDS * 1e-5) - 1) for each in moved)
    return Verdict(lost <= LOST_AT_MOST, f"1.0 became {1 - moved[0]:.6f} (exactly: 0.999700), {lost:.1%} is lost")


def scales(codec: CompressionBase, bar: float) -> Verdict:
    """Small values beside large ones: the error relative to the small ones' own standard deviation."""
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1000, generator=draw) * size for size in (5.0, 0.01, 28.0)]
    exact, both = tensors[1].double(), [[each.clone() for each in tensors] for _ in range(2)]
    found = two_averagers(codec, both)
    errors = [float((each[1].double() - exact).square().mean().sqrt() / 0.01) for each in found]
    return Verdict(max(errors) <= 1.1 * bar, f"error {max(errors):.1%} of 0.01 beside 5 and 28 (bar {1.1 * bar:.1%})")


def uniform_scales() -> Verdict:
    """0.01 beside 5 and 28 with Uniform8BitQuantization."""
    return scales(Uniform8BitQuantization(), 0.02)


def quantile_scales() -> Verdict:
    """0.01 beside 5 and 28 with Quantile8BitQuantization."""
    return scales(Quantile8BitQuantization(), 0.03)


def blockwise_scales() -> Verdict:
    """0.01 beside 5 and 28 with BlockwiseQuantization."""
    return scales(BlockwiseQuantization(), 0.02)


# ---------------------------------------------------------------------------------------------- an averager's own state


class Gives(shoal.DecentralizedAverager):
    """Gives one, two or three values, as hivemind's users write it."""

    values = 3

    def get_current_state(self) -> Any:
        """Metadata and tensors."""
        tensors = [torch.full((3,), 7.0), torch.zeros(2)]
        return ({"epoch": 5}, tensors, None)[: self.values]


def donor(line: Line, values: int) -> None:
    """Shares a state."""
    with shoal.DHT(start=True) as dht:
        averager = Gives([torch.zeros(3)], dht, start=False, prefix="state")
        averager.values = values
        averager.run_in_background()
        line.say("address", str(dht.get_visible_maddrs()[0]))
        line.wait("leave")


def newcomer(_: Line, entry: str) -> Any:
    """Loads it."""
    with shoal.DHT([entry], start=True) as dht:
        averager = shoal.DecentralizedAverager([torch.zeros(3)], dht, start=True, prefix="state")
        loaded = averager.load_state_from_peers(timeout=10)
    return None if loaded is None else {"metadata": loaded[0], "tensors": [each.tolist() for each in loaded[1]]}


def current_state() -> Verdict:
    """`get_current_state` that returns metadata alone, with tensors, or with tensors and their descriptions."""
    all_of_it = {"metadata": {"epoch": 5}, "tensors": [[7.0] * 3, [0.0] * 2]}
    good = list[int]()
    for values, wanted in {1: {**all_of_it, "tensors": []}, 2: all_of_it, 3: all_of_it}.items():
        with Peers() as peers:
            address = peers.start(donor, values=values).wait("address")
            if peers.start(newcomer, entry=address).result() == wanted:
                good.append(values)
    return Verdict(len(good) == 3, f"loaded with {good} of [1, 2, 3] values")


REPLAYS: tuple[Callable[[], Verdict], ...] = (
    float16_rounds,
    bfloat16_rounds,
    float16_states,
    uniform_scales,
    quantile_scales,
    blockwise_scales,
    current_state,
)
