"""The settings by which a peer takes part in a run, and those that must be equal on all peers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec
import torch

from shoal.averaging import AveragerSettings
from shoal.compression import CompressionBase
from shoal.errors import ConfigError
from shoal.strategies.strategy import Strategy, answer_of, text_of_strategy
from shoal.train.model import TrainedModel
from shoal.train.options import given_options, text_of
from shoal.train.training_state import TrainingState
from shoal.version import __version__

__all__ = ["RunSettings", "checked_settings", "fragment_settings", "run_settings"]

_SCHEDULED = frozenset({"lr", "betas", "momentum"})
"""Schedules change these in the groups, and a peer that resumes has others: the optimizer's first values count."""

_MAX_GROUPS = 16
_MAX_SETTINGS, _MAX_NAME, _MAX_TEXT = 16, 64, 120
"""What a program may add. All settings travel with each word of progress, and a difference is told in a line."""

_MAX_COMPARED = 256
"""Characters of what a strategy compares: an outer optimizer has many options. Peers take no more than 512."""


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one peer of a run.

    Attributes:
        run_id: names the run; all its peers give the same.
        strategy: when peers meet, what they give, and how they take the result.
        averager: of gradients and of states.
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
        catch_up_bytes: the most that a peer which is behind keeps of the steps that the others take meanwhile.
        fingerprint: named values that must be equal on all peers of the run.
        fragment: the number of the fragment of the model that this is about.
        fragments: of the model, each of which is averaged by itself.
    """

    run_id: str
    strategy: Strategy
    averager: AveragerSettings
    auxiliary: bool = False
    average_state_every: int = 0
    check_every: int = 10
    publish_period_s: float = 2.0
    tell_period_s: float = 0.05
    ttl_s: float = 20.0
    end_patience_s: float = 15.0
    state_patience_s: float = 600.0
    require_state: bool | None = None
    catch_up_bytes: int = 4 << 30
    fingerprint: Mapping[str, str] = {}
    fragment: int = 0
    fragments: int = 1


def fragment_settings(settings: RunSettings, number: int, fragments: int) -> RunSettings:
    """The settings of a fragment of the model, which is averaged by itself: in a run of its own, beside the others.

    The first fragment compares the settings one by one. The others compare a digest of them, as they travel with each
    word.

    Args:
        settings: of the run.
        number: of the fragment.
        fragments: how many there are.
    """
    name = settings.run_id if number == 0 else f"{settings.run_id}/{number}"
    least = max(settings.averager.min_group_size, settings.strategy.terms.quorum)
    compared: Mapping[str, str] = settings.fingerprint
    if number:
        listed = msgspec.json.encode(sorted(settings.fingerprint.items()))
        compared = {"settings of the first fragment": hashlib.sha256(listed).hexdigest()[:16]}
    return msgspec.structs.replace(
        settings,
        run_id=name,
        averager=msgspec.structs.replace(settings.averager, min_group_size=least),
        fragment=number,
        fragments=fragments,
        fingerprint={**compared, "fragment": f"{number}"},
    )


def run_settings(
    training: TrainingState,
    strategy: Strategy,
    average_state_every: int,
    *,
    model: TrainedModel | None = None,
    given: Mapping[str, str] | None = None,
    **codecs: CompressionBase | None,
) -> dict[str, str]:
    """The settings that must be equal on all peers, by name, so that a difference is told before training.

    Args:
        training: what is trained.
        strategy: in which way.
        average_state_every: epochs.
        model: that is trained, if it was given.
        given: more of them, of the program's own; `checked_settings` has checked them.
        codecs: by the names of their arguments.

    Raises:
        ConfigError: one that is given has the name of one of ours; or what the strategy compares are no short texts.
    """
    optimizer = training.optimizer
    compared = answer_of(strategy, "compared()", strategy.compared(training), Mapping)
    of_strategy = f"compared() of {text_of_strategy(strategy)}"
    _check_texts(of_strategy, compared, _MAX_COMPARED)
    ours = {
        "tensors": training.tensors.summary(),
        "optimizer": type(optimizer).__name__,
        "scheduler": type(training.schedule.scheduler).__name__ if training.schedule.scheduler is not None else "none",
        "learning rate": text_of(optimizer.defaults.get("lr", "none")),
        **{name: text_of(value) for name, value in given_options(optimizer.defaults).items() if name != "lr"},
        **_groups(optimizer),
        **(model.settings() if model is not None else {}),
        "average_state_every": str(average_state_every),
        "use_local_updates": str(training.averages_parameters),
        **({"average_opt_statistics": ", ".join(statistics)} if (statistics := training.averaged_statistics) else {}),
        "gradients": training.averaged_as,
        "max_grad_norm": "none" if training.max_grad_norm is None else text_of(training.max_grad_norm),
        **{name: codec.name if codec is not None else "none" for name, codec in codecs.items()},
        "shoal version": ".".join(__version__.split(".")[:2]),
    }
    for source, texts in ((of_strategy, compared), ("settings", given or {})):
        if taken := sorted(ours.keys() & texts.keys()):
            raise ConfigError(f"{source}: {taken[0]!r} is a setting of shoal's own: give yours another name")
        ours |= texts
    return {**compared, **ours}  # a difference of strategies is told first


def checked_settings(settings: object) -> dict[str, str]:
    """The argument `settings` of `Optimizer`: a few names with short texts; none for None.

    Raises:
        ConfigError: it is anything else.
    """
    if settings is None:
        return {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings must be texts by name, such as {{'tokenizer': HASH}}, got {settings!r:.80}")
    _check_texts("settings", settings, _MAX_TEXT)
    return dict(settings)


def _check_texts(source: str, texts: Mapping[object, object], most: int) -> None:
    """Raise `ConfigError`, which names the source, unless these are a few names with short texts."""
    if len(texts) > _MAX_SETTINGS:
        raise ConfigError(f"{source} has {len(texts)} entries, the most is {_MAX_SETTINGS}: give a hash of all")
    for name, value in texts.items():
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME:
            raise ConfigError(f"{source}: a name must be a text of 1 to {_MAX_NAME} characters, got {name!r:.80}")
        if not isinstance(value, str) or len(value) > most:
            raise ConfigError(
                f"{source}: {name} must be a text of at most {most} characters, got {value!r:.80}: give str() of "
                "a number, and a hash of what is longer"
            )


def _groups(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The options in which parameter groups differ from the optimizer's defaults."""
    several = len(optimizer.param_groups) > 1
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        own = {
            name: group[name]
            for name, value in given_options(optimizer.defaults).items()
            if name not in _SCHEDULED and name in group and text_of(group[name]) != text_of(value)
        }
        if several and "lr" in group:
            own["lr"] = group.get("initial_lr", group["lr"])
        if own:
            found[f"parameter group {index}"] = ", ".join(f"{name} {text_of(own[name])}" for name in sorted(own))
    if len(found) > _MAX_GROUPS:
        return {"parameter groups": hashlib.sha256(repr(found).encode()).hexdigest()[:8]}
    return found
