"""Checks of the arguments of `Optimizer`. Each message names the argument and says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.averaging import AveragerSettings, choose_timeouts
from shoal.averaging.timeouts import TIMEOUTS
from shoal.base.checks import flag, own_number, seconds, whole
from shoal.compression import CompressionBase
from shoal.errors import ConfigError
from shoal.hivemind.arguments import OptimizerOptions
from shoal.runtime.arguments import client_argument, codec_argument
from shoal.runtime.dht import DHT
from shoal.train.training_state import TrainingState

__all__ = ["Tuning", "check_averages", "check_closure", "checked_tensors", "is_auxiliary", "tuning_of"]

AVERAGING_TIMEOUT_S = 60.0
_LOAD_STATE_TIMEOUT_S, _SHUTDOWN_TIMEOUT_S = 600.0, 5.0


_AVERAGER_OPTIONS = ("bandwidth", "min_group_size", "min_vector_size", "part_size_bytes")
"""Of `DecentralizedAverager`, beside the timeouts. Others would keep the peers of a run apart."""


class Tuning(NamedTuple):
    """The arguments that tune a run, checked: see `OptimizerOptions`. Times are in seconds.

    Attributes:
        averager: the settings of the averagers.
        averaging_timeout: the longest wait of one call of `step` for the others.
        load_state_timeout: the longest download of a state.
        shutdown_timeout: the longest time that `shutdown` takes.
        catch_up_bytes: the most memory for the steps of the others.
        average_state_every: epochs between two averages of the states; 0 for never.
        state_compression: the codec of that average.
        check_parameters_every: epochs between two checks of the parameters; 0 for never.
        reuse_grad_buffers: whether `step` clears the gradients.
    """

    averager: AveragerSettings
    averaging_timeout: float
    load_state_timeout: float
    shutdown_timeout: float
    catch_up_bytes: int
    average_state_every: int
    state_compression: CompressionBase | None
    check_parameters_every: int
    reuse_grad_buffers: bool


def tuning_of(dht: DHT, options: OptimizerOptions) -> Tuning:
    """These arguments, with their defaults for those that were not given.

    Raises:
        ConfigError: one is wrong; it is named.
    """
    compression = options.get("state_averaging_compression")
    codec_argument("state_averaging_compression", compression)
    return Tuning(
        _averager_settings(dht, options),
        averaging_timeout=seconds("averaging_timeout", options.get("averaging_timeout"), AVERAGING_TIMEOUT_S),
        load_state_timeout=seconds("load_state_timeout", options.get("load_state_timeout"), _LOAD_STATE_TIMEOUT_S),
        shutdown_timeout=seconds("shutdown_timeout", options.get("shutdown_timeout"), _SHUTDOWN_TIMEOUT_S),
        catch_up_bytes=whole("catch_up_bytes", options.get("catch_up_bytes", 4 << 30)),
        average_state_every=whole("average_state_every", options.get("average_state_every", 0), least=0),
        state_compression=compression,
        check_parameters_every=whole("check_parameters_every", options.get("check_parameters_every", 10), least=0),
        reuse_grad_buffers=flag("reuse_grad_buffers", options.get("reuse_grad_buffers", False)),
    )


def _averager_settings(dht: DHT, options: OptimizerOptions) -> AveragerSettings:
    whole_round = options.get("allreduce_timeout")
    names = {
        "averaging_expiration": "matchmaking_time",
        "allreduce_timeout": "averaging_timeout" if whole_round is None else "allreduce_timeout",
    }
    given: dict[str, Any] = {
        "averaging_expiration": options.get("matchmaking_time"),
        "allreduce_timeout": options.get("averaging_timeout") if whole_round is None else whole_round,
        "sender_timeout": options.get("sender_timeout"),
        "next_chunk_timeout": options.get("next_chunk_timeout"),
        "bandwidth": options.get("bandwidth"),
    }
    more = options.get("averager_opts")
    if more is not None and not isinstance(more, Mapping):
        raise ConfigError(f"averager_opts must be a dictionary, got {more!r:.40}")
    for option, value in (more or {}).items():
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
    client = client_argument(options.get("client_mode"), only_dials=dht.only_dials, is_client=dht.client_mode)
    settings = msgspec.structs.replace(
        AveragerSettings(client_mode=client),
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


def check_averages(training: TrainingState, average_state_every: int) -> None:
    """Refuse averages of the states beside those of each epoch."""
    if training.averages_parameters and average_state_every > 1:
        raise ConfigError(
            "average_state_every must be 0 or 1 with use_local_updates=True, or strategy=LocalUpdates(...), where each "
            f"epoch averages the parameters: raise target_batch_size {average_state_every} times to average so rarely"
        )


def check_closure(closure: object) -> None:
    """Refuse a batch size that was given in its place."""
    if closure is not None and not callable(closure):
        raise ConfigError(
            f"closure must be a function, got {closure!r:.40}: give the samples by name, step(batch_size=...)"
        )


def checked_tensors(name: str, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors as a tuple; refuse anything else."""
    if isinstance(tensors, Iterable) and not isinstance(tensors, torch.Tensor):
        listed = tuple(tensors)
        if all(isinstance(each, torch.Tensor) for each in listed):
            return listed
    raise ConfigError(f"{name} must be a list of tensors, got {tensors!r:.80}")
