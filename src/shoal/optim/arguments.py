"""Checks of the arguments of `Optimizer`. Each message names the argument and says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.averaging import AveragerSettings, choose_timeouts
from shoal.averaging.timeouts import TIMEOUTS
from shoal.base.checks import flag, own_number, whole
from shoal.compression import CompressionBase
from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_SAMPLES_OF_STEP, Epoch, Samples
from shoal.run.decide.state_name import StateName
from shoal.runtime.arguments import client_argument, codec_argument
from shoal.runtime.dht import DHT
from shoal.strategies import Merging, Strategy

__all__ = [
    "AVERAGING_TIMEOUT_S",
    "averager_settings",
    "check_closure",
    "checked_codecs",
    "checked_tensors",
    "is_auxiliary",
    "keeps_late",
    "local_updates",
    "merging_of",
    "target_of",
    "where_saved",
]

AVERAGING_TIMEOUT_S = 60.0


class Where(NamedTuple):
    """Where a run stood when a state dict was saved.

    Attributes:
        name: of the state.
        scheduled: the count of its schedule.
        fingerprint: what it holds, as a digest.
        shared: epoch and samples of the last state before it that was shared.
        weights: the digest of the model's weights; empty if other values stood in their place.
    """

    name: StateName
    scheduled: Epoch
    fingerprint: str
    shared: tuple[Epoch, Samples]
    weights: str


def where_saved(saved: Any) -> Where | None:
    """What `state_dict()["shoal"]` says."""
    if saved is None:
        return None
    try:
        name = [saved["epoch"], bytes.fromhex(saved["digest"]), saved["samples"]]
        what = [name, saved["scheduled"], saved.get("fingerprint", ""), saved.get("shared", (0, 0))]
        what.append(saved.get("weights", ""))
        return msgspec.convert(what, Where)
    except (LookupError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"state_dict['shoal'] is not what state_dict() gave: {error}") from error


_AVERAGER_OPTIONS = ("bandwidth", "min_group_size", "min_vector_size", "part_size_bytes")
"""Of `DecentralizedAverager`, beside the timeouts. Others would keep the peers of a run apart."""


def averager_settings(
    dht: DHT,
    client_mode: bool | None,
    names: Mapping[str, str],
    options: Mapping[str, Any] | None,
    **given: Any,
) -> AveragerSettings:
    """The settings of the averagers of an `Optimizer`.

    Args:
        dht: this peer.
        client_mode: as given.
        names: the user's names of the timeouts, where they are not those of `DecentralizedAverager`.
        options: `averager_opts`.
        given: other arguments, by the names of `DecentralizedAverager`; None for those that were not given.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"averager_opts must be a dictionary, got {options!r:.40}")
    for option, value in (options or {}).items():
        name = "averaging_expiration" if option == "min_matchmaking_time" else option
        if name not in {*TIMEOUTS, *_AVERAGER_OPTIONS}:
            known = ", ".join(sorted({*TIMEOUTS, *_AVERAGER_OPTIONS}))
            raise ConfigError(
                f"averager_opts[{option!r}] has no counterpart in shoal.Optimizer: leave it out; there are {known}"
            )
        if given.get(name) is not None:
            raise ConfigError(f"{names.get(name, name)} and averager_opts[{option!r}] are one thing: give only one")
        given[name] = value
    timeouts = {name: given.pop(name, None) for name in TIMEOUTS}
    settings = msgspec.structs.replace(
        AveragerSettings(
            client_mode=client_argument(client_mode, only_dials=dht.only_dials, is_client=dht.client_mode)
        ),
        **{name: own_number(value) for name, value in given.items()},
        **choose_timeouts(timeouts, names=names, round_s=AVERAGING_TIMEOUT_S),
    )
    settings.check()
    return settings


def is_auxiliary(chosen: bool, client_mode: bool, batch_size_per_step: int | None) -> bool:
    """Whether this peer has no data; then refuse what does not go with that."""
    if not flag("auxiliary", chosen):
        return False
    if client_mode:
        raise ConfigError("auxiliary=True does not go with client_mode=True: others must be able to dial this peer")
    if batch_size_per_step is not None:
        raise ConfigError(
            "batch_size_per_step has no meaning with auxiliary=True: that peer has no batches; leave it out"
        )
    return True


def keeps_late(late: str | None, *, delay: bool) -> bool:
    """Whether late batches go into the next step."""
    if late not in (None, "drop", "next"):
        raise ConfigError(f"late must be 'drop' or 'next', got {late!r:.80}")
    if delay and late == "drop":
        raise ConfigError(
            "late='drop' does not go with delay_grad_averaging=True, as most batches would be dropped: leave late out"
        )
    return delay or late == "next"


_INSTEAD_OF_GRADIENTS = {
    "late": "no batch is late, as each is stepped from at once",
    "delay_grad_averaging": "give delay_state_averaging",
    "reuse_grad_buffers": "leave it out, and call zero_grad() after each step()",
    "max_grad_norm": "clip the gradients of each batch before step()",
    "grad_compression": "give state_averaging_compression",
    "grad_averager_factory": "give state_averaging_compression",
}


def local_updates(chosen: bool, average_state_every: int, **without: object) -> bool:
    """Whether local updates were chosen; with them, refuse arguments about averaged gradients."""
    if not flag("use_local_updates", chosen):
        return False
    for name, value in without.items():
        if value:
            why = f"with use_local_updates=True, where no gradients are averaged: {_INSTEAD_OF_GRADIENTS[name]}"
            raise ConfigError(f"{name} has no meaning {why}")
    if average_state_every > 1:
        raise ConfigError(
            "average_state_every must be 0 or 1 with use_local_updates=True, where each epoch averages the parameters: "
            f"raise target_batch_size {average_state_every} times to average so rarely"
        )
    return True


_NOT_MERGED = {
    "late": "no batch is late, as each is stepped from at once",
    "delay_grad_averaging": "give StreamingDiLoCo or Decoupled, whose trainers go on while a merge is under way",
    "max_grad_norm": "clip the gradients of each batch before step()",
    "grad_averager_factory": "give grad_compression",
    "use_local_updates": "LocalSGD(every=...) averages parameters, too",
    "offload_optimizer": "each batch would copy all parameters to the CPU and back",
    "average_opt_statistics": "each peer keeps its own statistics",
}


def merging_of(strategy: object, **without: object) -> Merging | None:
    """The way in which the peers of this strategy merge; None if they average gradients.

    Args:
        strategy: as given.
        without: arguments that have no meaning if peers merge.
    """
    if strategy is None:
        return None
    if isinstance(strategy, type) or not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy must be one of shoal.strategies, such as DiLoCo(every=100), got {strategy!r:.80}")
    merging = strategy.merging
    if merging is not None and not isinstance(merging, Merging):
        raise ConfigError(f"strategy: merging must be a shoal.strategies.Merging or None, got {merging!r:.80}")
    for name, value in without.items() if merging is not None else ():
        if value:
            raise ConfigError(f"{name} does not go with a strategy that merges: {_NOT_MERGED[name]}")
    return merging


def target_of(target_batch_size: int | None, merging: Merging | None) -> int:
    """The samples of a step; 1, which means nothing, if peers merge."""
    if merging is None:
        if target_batch_size is None:
            raise ConfigError("target_batch_size is missing: the samples of the whole swarm in one step")
        return whole("target_batch_size", target_batch_size, most=MAX_SAMPLES_OF_STEP)
    if target_batch_size is not None:
        raise ConfigError(
            "target_batch_size has no meaning with a strategy that merges: its `every` says when. Leave it out"
        )
    return 1


def check_closure(closure: object) -> None:
    """Refuse a batch size that was given in its place."""
    if closure is not None and not callable(closure):
        raise ConfigError(
            f"closure must be a function, got {closure!r:.40}: give the samples by name, step(batch_size=...)"
        )


def checked_codecs(**codecs: CompressionBase | None) -> dict[str, CompressionBase | None]:
    """The codecs, by the names of their arguments; refuse what is none."""
    for name, codec in codecs.items():
        codec_argument(name, codec)
    return codecs


def checked_tensors(name: str, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors as a tuple; refuse anything else."""
    if isinstance(tensors, Iterable) and not isinstance(tensors, torch.Tensor):
        listed = tuple(tensors)
        if all(isinstance(each, torch.Tensor) for each in listed):
            return listed
    raise ConfigError(f"{name} must be a list of tensors, got {tensors!r:.80}")
