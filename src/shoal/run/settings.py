"""The settings by which a peer takes part in a run, and those that must be equal on all peers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import torch

from shoal.averaging import AveragerSettings
from shoal.compression import CompressionBase
from shoal.errors import ConfigError
from shoal.run.pace import MergePace, Pace, SamplesPace
from shoal.strategies import Merging
from shoal.train.model import TrainedModel
from shoal.train.options import HOW
from shoal.train.training_state import TrainingState
from shoal.version import __version__

__all__ = ["RunSettings", "checked_settings", "fragment_settings", "run_settings"]

_SCHEDULED = frozenset({"lr", "betas", "momentum"})
"""Schedules change these in the groups, and a peer that resumes has others: the optimizer's first values count."""

_MAX_GROUPS = 16
_MAX_SETTINGS, _MAX_NAME, _MAX_TEXT = 16, 64, 120
"""What a program may add. All settings travel with each word of progress, and a difference is told in a line."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one peer of a run.

    Attributes:
        run_id: names the run; all its peers give the same.
        target_batch_size: samples of the whole swarm in one step; without meaning if peers merge.
        averager: of gradients and of states.
        use_local_updates: peers step on their own gradients, and an epoch averages their parameters.
        auxiliary: this peer has no samples: its trainer waits for the steps of the others.
        average_state_every: epochs between two averagings of the states; 0 for never.
        check_every: epochs between two checks of the parameters themselves; 0 for never.
        publish_period_s: how often progress is written to the DHT when nothing changes.
        tell_period_s: the shortest time between two messages of progress to the other peers.
        ttl_s: a peer that says nothing for this long is no longer counted.
        end_patience_s: how long a peer at the announced end of the run waits for the others that it knows.
        state_patience_s: how long a newcomer waits for the state of a run that is further, before it begins its own.
        require_state: never train from a state that nobody else has; None: not while the run goes on to which others
            have invited this peer.
        delay_grad_averaging: the trainer goes on while gradients are averaged.
        delay_state_averaging: the trainer goes on while states are averaged.
        catch_up_bytes: the most that a peer which is behind keeps of the steps that the others take meanwhile.
        fingerprint: named values that must be equal on all peers of the run.
        merging: the way in which peers merge; None: they average gradients.
        fragment: the number of the fragment of the model that is merged.
    """

    run_id: str
    target_batch_size: int
    averager: AveragerSettings
    use_local_updates: bool = False
    auxiliary: bool = False
    average_state_every: int = 0
    check_every: int = 10
    publish_period_s: float = 2.0
    tell_period_s: float = 0.05
    ttl_s: float = 20.0
    end_patience_s: float = 15.0
    state_patience_s: float = 600.0
    require_state: bool | None = None
    delay_grad_averaging: bool = False
    delay_state_averaging: bool = True
    catch_up_bytes: int = 4 << 30
    fingerprint: Mapping[str, str] = {}
    merging: Merging | None = None
    fragment: int = 0

    def pace(self, first: Pace | None = None) -> Pace:
        """What tells when there is enough for a step. `first` is that of the model's first fragment, of another one."""
        if self.merging is None:
            return SamplesPace(self.target_batch_size)
        return MergePace(self.merging, self.fragment, first if isinstance(first, MergePace) else None)


def fragment_settings(settings: RunSettings, merging: Merging, number: int) -> RunSettings:
    """The settings of a fragment of the model, which is merged by itself: in a run of its own, beside the others.

    The first fragment compares the settings one by one. The others compare a digest of them, as they travel with each
    word.

    Args:
        settings: of the run.
        merging: the way in which peers merge.
        number: of the fragment.
    """
    name = settings.run_id if number == 0 else f"{settings.run_id}/{number}"
    least = max(settings.averager.min_group_size, merging.quorum or 0)
    compared: Mapping[str, str] = settings.fingerprint
    if number:
        listed = msgspec.json.encode(sorted(settings.fingerprint.items()))
        compared = {"settings of the first fragment": hashlib.sha256(listed).hexdigest()[:16]}
    return msgspec.structs.replace(
        settings,
        run_id=name,
        target_batch_size=1,
        averager=msgspec.structs.replace(settings.averager, min_group_size=least),
        delay_grad_averaging=merging.overlap != 0,
        merging=merging,
        fragment=number,
        fingerprint={**compared, "fragment": f"{number}"},
    )


def run_settings(
    training: TrainingState,
    target_batch_size: int,
    average_state_every: int,
    *,
    local_updates: Collection[str] | None = None,
    merging: Merging | None = None,
    outer: torch.optim.Optimizer | None = None,
    model: TrainedModel | None = None,
    given: Mapping[str, str] | None = None,
    **codecs: CompressionBase | None,
) -> dict[str, str]:
    """The settings that must be equal on all peers, by name, so that a difference is told before training.

    Args:
        training: what is trained.
        target_batch_size: of the swarm.
        average_state_every: epochs.
        local_updates: the statistics that are averaged, too, if parameters are averaged and not gradients; else None.
        model: that is trained, if it was given.
        merging: the way in which peers merge, if they do.
        outer: the outer optimizer of the first fragment then.
        given: more of them, of the program's own; `checked_settings` has checked them.
        codecs: by the names of their arguments.

    Raises:
        ConfigError: one that is given has the name of one of ours.
    """
    optimizer = training.optimizer
    ours = {
        **(
            {"target_batch_size": str(target_batch_size)}
            if merging is None
            else {"strategy": merging.text, "outer optimizer": _described(outer)}
        ),
        "tensors": training.summary(),
        "optimizer": type(optimizer).__name__,
        "scheduler": type(training.scheduler).__name__ if training.scheduler is not None else "none",
        "learning rate": _text(optimizer.defaults.get("lr", "none")),
        **{name: _text(value) for name, value in _options(optimizer.defaults).items() if name != "lr"},
        **_groups(optimizer),
        **(model.settings() if model is not None else {}),
        "average_state_every": str(average_state_every),
        "use_local_updates": str(local_updates is not None),
        **({"average_opt_statistics": ", ".join(local_updates)} if local_updates else {}),
        "gradients": training.averaged_as,
        "max_grad_norm": "none" if training.max_grad_norm is None else _text(training.max_grad_norm),
        **{name: codec.name if codec is not None else "none" for name, codec in codecs.items()},
        "shoal version": ".".join(__version__.split(".")[:2]),
    }
    if taken := sorted(ours.keys() & (given or {}).keys()):
        raise ConfigError(f"settings: {taken[0]!r} is a setting of shoal's own: give yours another name")
    return {**ours, **(given or {})}


def _described(optimizer: torch.optim.Optimizer | None) -> str:
    """An optimizer and the options that it was made with."""
    options = {} if optimizer is None else _options(optimizer.defaults)
    return f"{type(optimizer).__name__} {', '.join(f'{name} {_text(options[name])}' for name in sorted(options))}"[:240]


def checked_settings(settings: object) -> dict[str, str]:
    """The argument `settings` of `Optimizer`: a few names with short texts; none for None.

    Raises:
        ConfigError: it is anything else.
    """
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings must be texts by name, such as {{'tokenizer': HASH}}, got {settings!r:.80}")
    if len(settings) > _MAX_SETTINGS:
        raise ConfigError(f"settings has {len(settings)} entries, the most is {_MAX_SETTINGS}: give a hash of all")
    for name, value in settings.items():
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise ConfigError(f"settings: a name must be a text of 1 to {_MAX_NAME} characters, got {name!r:.80}")
        if not isinstance(value, str) or len(value) > _MAX_TEXT:
            raise ConfigError(
                f"settings: {name} must be a text of at most {_MAX_TEXT} characters, got {value!r:.80}: give str() of "
                "a number, and a hash of what is longer"
            )
    return dict(settings)


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The options in which parameter groups differ from the optimizer's defaults."""
    several = len(optimizer.param_groups) > 1
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        own = {
            name: group[name]
            for name, value in _options(optimizer.defaults).items()
            if name not in _SCHEDULED and name in group and _text(group[name]) != _text(value)
        }
        if several and "lr" in group:
            own["lr"] = group.get("initial_lr", group["lr"])
        if own:
            found[f"parameter group {index}"] = ", ".join(f"{name} {_text(own[name])}" for name in sorted(own))
    if len(found) > _MAX_GROUPS:
        return {"parameter groups": hashlib.sha256(repr(found).encode()).hexdigest()[:8]}
    return found


def _options(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in HOW and value is not None}


def _text(value: object) -> str:
    """Equal for equal numbers, whether they are of Python, numpy or torch."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, bool | str):
        return str(value)
    try:
        return f"{float(value):g}"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return type(value).__name__
