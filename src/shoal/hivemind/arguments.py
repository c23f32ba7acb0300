"""The arguments that programs written for hivemind 1.1.12, and for shoal before it had strategies, give by name.

`STRATEGY_ARGUMENTS` is the table: each of these arguments of `shoal.Optimizer` is a field of a strategy, and
`strategy_of` makes the strategy from them. By one rule it refuses one that has no field to go to, and one that says
another value than the given strategy has. The other arguments tune the run, or change nothing here and are accepted
with any value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, TypedDict

from shoal.base.checks import flag
from shoal.compression import CompressionBase, NoCompression
from shoal.errors import ConfigError
from shoal.hivemind.power_sgd import low_rank_options
from shoal.runtime.arguments import codec_argument
from shoal.runtime.dht_options import check_options, is_false, is_nothing
from shoal.strategies import LocalUpdates, Pace, Strategy, Synchronous, Terms
from shoal.strategies.strategy import answer_of, text_of_strategy

__all__ = [
    "STRATEGY_ARGUMENTS",
    "OptimizerOptions",
    "StateAveragerOptions",
    "TrackerOptions",
    "check_optimizer_options",
    "check_state_averager_options",
    "check_tracker_options",
    "strategy_of",
    "takes",
]


class OptimizerOptions(TypedDict, total=False):
    """Further arguments of `shoal.Optimizer`, all by name. Most programs need none of them.

    Fields of the strategy, by the names that hivemind has, or that shoal had: docs/reference/migrating.md has the
    table. One that says another value than the given strategy has is refused; a field that is None says nothing.

    - `target_batch_size`, `late`, `max_grad_norm`: of `Synchronous`; the first one also of `LocalUpdates`.
    - `delay_grad_averaging=True`: `Synchronous(late="overlap")`.
    - `grad_averager_factory`: `Synchronous(low_rank=…, min_compression_ratio=…)`.
    - `grad_compression`: `compression` of the strategy.
    - `offload_optimizer`: `Synchronous(offload=True)`.
    - `use_local_updates=True`: `strategy=LocalUpdates(…)`; `average_opt_statistics` are its `statistics`, and
      `delay_state_averaging=False` is its `waits=True`.

    The run:

    - `matchmaking_time`: longest search for a group, seconds; None: 15. It ends when all live peers of the run are
      there.
    - `averaging_timeout`: longest time that one call of `step` waits for the others, seconds; None: 60. It then returns
      without a step, and the next call goes on.
    - `allreduce_timeout`: longest round once the group is formed, seconds; None: as `averaging_timeout`.
    - `sender_timeout`: seconds of silence after which a peer is left out of a round; None: 5, or less in short rounds.
    - `next_chunk_timeout`: seconds in which the next chunk of a state must come; None: 5.
    - `load_state_timeout`: longest state download, seconds; None: 600. A newcomer waits so long for the state of a run
      that is further, if its donors die or refuse: see `require_state`.
    - `shutdown_timeout`: seconds that `shutdown` may take; None: 5.
    - `bandwidth`: of this peer, bytes per second; a peer with more reduces more.
    - `client_mode`: this peer only dials; None takes it from `dht`.
    - `averager_opts`: more options of `DecentralizedAverager` for the rounds: `request_timeout`, `reducer_timeout`,
      `part_size_bytes`, `min_vector_size`, `min_group_size`.
    - `catch_up_bytes`: the most memory for the steps that the others take while this peer downloads a state; 4 GiB.
    - `average_state_every`: epochs between two averagings of parameters and `extra_tensors`; 0, the default, for never:
      all peers take the same steps, so their parameters need none.
    - `state_averaging_compression`: codec for averaging parameters; it codes what changed since the last average, so
      that small updates are kept. None for none.
    - `check_parameters_every`: epochs between two checks that all peers at one state hold the same parameters; 0 for
      never; 10. Each takes 0.6 s of one core for 1 GiB, beside the training. There is one more after the last step of
      the run, on all cores. A peer that holds others downloads.
    - `reuse_grad_buffers`: let `step` clear `.grad`, so that the loop need not call `zero_grad()`. Then give a
      `GradScaler` to `step`, or use a `shoal.GradScaler`: where torch's own leaves a step out, it clears nothing,
      which is a warning.

    Taken, and not used: `delay_optimizer_step`, `tracker_opts`, `performance_ema_alpha`; without `use_local_updates`
    `delay_state_averaging`, as training goes on while states are averaged; and `load_state_compression`, of which any
    codec but `NoCompression` is a warning: a newcomer has to hold the same bits as the others.
    """

    target_batch_size: int | None
    late: str | None
    max_grad_norm: float | None
    delay_grad_averaging: bool
    grad_averager_factory: object
    grad_compression: CompressionBase | None
    offload_optimizer: bool | None
    use_local_updates: bool
    average_opt_statistics: Sequence[str]
    matchmaking_time: float | None
    averaging_timeout: float | None
    allreduce_timeout: float | None
    sender_timeout: float | None
    next_chunk_timeout: float | None
    load_state_timeout: float | None
    shutdown_timeout: float | None
    bandwidth: float | None
    client_mode: bool | None
    averager_opts: Mapping[str, Any] | None
    catch_up_bytes: int
    average_state_every: int
    delay_state_averaging: bool
    state_averaging_compression: CompressionBase | None
    check_parameters_every: int
    reuse_grad_buffers: bool
    delay_optimizer_step: bool | None
    tracker_opts: Mapping[str, object] | None
    performance_ema_alpha: float
    load_state_compression: CompressionBase | None


class StateAveragerOptions(TypedDict, total=False):
    """Arguments of hivemind's `TrainingStateAverager` and of its `step`."""

    custom_gradients: bool
    reuse_tensors: bool | None
    delay_optimizer_step: bool
    performance_ema_alpha: float
    status_loglevel: int


class TrackerOptions(TypedDict, total=False):
    """Arguments of hivemind's `ProgressTracker`."""

    min_refresh_period: float
    max_refresh_period: float
    default_refresh_period: float
    expected_drift_peers: float
    expected_drift_rate: float
    performance_ema_alpha: float
    metadata_expiration: float
    status_loglevel: int
    private_key: object
    daemon: bool


Fields = Mapping[str, Any]
"""Fields of a strategy, by name."""


class _Row(NamedTuple):
    """What an argument is in a strategy.

    Attributes:
        fields: what a value of it makes of the fields, as they are; none if it says nothing.
        instead: what to do where the strategy has no such field; None: there the argument does not matter.
        ignored_by: a strategy to which it does not matter either.
    """

    fields: Callable[[Any, Fields], Fields]
    instead: str | None = None
    ignored_by: type | None = None


def _field(name: str, value: Any, _own: Fields) -> Fields:
    return {} if value is None else {name: value}


def _codec(value: Any, own: Fields) -> Fields:
    codec_argument("grad_compression", value)
    return _field("compression", value, own)


def _overlap(value: object, own: Fields) -> Fields:
    if flag("delay_grad_averaging", value):
        return {"late": "overlap"}
    return {"late": "drop"} if own.get("late") == "overlap" else {}


def _low_rank(factory: object, _own: Fields) -> Fields:
    options = low_rank_options(factory)
    if options is None:
        return {} if factory is None else {"low_rank": None}
    return {"low_rank": options["rank"], "min_compression_ratio": options["min_compression_ratio"]}


def _offload(value: object, _own: Fields) -> Fields:
    return {} if value is None else {"offload": flag("offload_optimizer", value)}


def _statistics(names: object, _own: Fields) -> Fields:
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(each, str) for each in names):
        raise ConfigError(f"average_opt_statistics must be a list of names such as 'exp_avg_sq', got {names!r:.80}")
    return {"statistics": tuple(sorted(names))}


def _waits(value: object, _own: Fields) -> Fields:
    return {"waits": not flag("delay_state_averaging", value)}


STRATEGY_ARGUMENTS: Mapping[str, _Row] = {
    "target_batch_size": _Row(
        partial(_field, "target_batch_size"), "the strategy itself says when peers meet: leave target_batch_size out"
    ),
    "late": _Row(partial(_field, "late"), "no batch is late where each is stepped from at once"),
    "delay_grad_averaging": _Row(
        _overlap,
        "give delay_state_averaging with use_local_updates, or take StreamingDiLoCo or Decoupled, whose trainers go on "
        "while a merge is under way",
    ),
    "max_grad_norm": _Row(partial(_field, "max_grad_norm"), "clip the gradients of each batch before step()"),
    "grad_averager_factory": _Row(
        _low_rank, "give a codec: state_averaging_compression with use_local_updates, else grad_compression"
    ),
    "grad_compression": _Row(
        _codec,
        "give state_averaging_compression where parameters are averaged; else the strategy's terms name the codec",
    ),
    "offload_optimizer": _Row(
        _offload, "where each batch is stepped from, it would copy all parameters to the CPU and back"
    ),
    "average_opt_statistics": _Row(_statistics, "each peer keeps its own statistics", Synchronous),
    "delay_state_averaging": _Row(_waits),
}
"""The arguments that are fields of a strategy."""


def strategy_of(strategy: object, options: Mapping[str, Any]) -> Strategy:
    """The strategy that is meant: the given one, or the one that these arguments ask for.

    Args:
        strategy: as given; None: `Synchronous`, or with `use_local_updates` `LocalUpdates`.
        options: arguments by name; those that are none of a strategy are left alone.

    Raises:
        ConfigError: an argument is wrong or missing, or says another value than the strategy has (None says nothing),
            or than another argument, or the strategy has nothing of its kind; it is named.
    """
    local = flag("use_local_updates", options.get("use_local_updates", False))
    if strategy is None:
        chosen: Strategy = LocalUpdates() if local else Synchronous()
        said = f"use_local_updates={local}"
    elif isinstance(strategy, type) or not isinstance(strategy, Strategy):
        raise ConfigError(f"strategy must be one of shoal.strategies, such as DiLoCo(every=100), got {strategy!r:.80}")
    else:
        chosen, said = strategy, text_of_strategy(strategy)
        if "use_local_updates" in options and local is not isinstance(strategy, LocalUpdates):
            raise ConfigError(f"use_local_updates={local} and {said} are two strategies: give only one")
    made = _with(chosen, said, options, is_given=strategy is not None)
    answer_of(made, "terms", made.terms, Terms)
    answer_of(made, "pace()", made.pace(), Pace)  # or it says what is missing for that
    return made


_ITS_OWN = "give it to the strategy itself, whose arguments only its class knows"


def _with(chosen: Strategy, said: str, options: Mapping[str, Any], *, is_given: bool) -> Strategy:
    """A strategy with what these arguments say; those of one that `is_given` count, unless they are None."""
    own, by, found = _fields_of(chosen), dict[str, str](), dict[str, Any]()
    if is_given:
        by = {field: f"{field}={value!r:.40} of {said}" for field, value in own.items() if value is not None}
    for name, row in STRATEGY_ARGUMENTS.items():
        if name not in options:
            continue
        given = f"{name}={options[name]!r:.40}"
        for field, value in row.fields(options[name], own).items():
            if field not in own:
                if row.instead and value and value != NoCompression() and type(chosen) is not row.ignored_by:
                    advice = row.instead if _is_made_of_fields(chosen) else _ITS_OWN
                    raise ConfigError(f"{name} does not go with {said}: {advice}")
                continue
            if own[field] != value:
                if field in by:
                    raise ConfigError(f"{given} does not go with {by[field]}: leave {name} out")
                if not takes(chosen, field):
                    raise ConfigError(f"{name} does not go with {said}: {_ITS_OWN}")
                found[field] = own[field] = value
            if value != "next":  # which delay_grad_averaging makes "overlap"
                by.setdefault(field, given)
    return replace(chosen, **found) if found else chosen  # type: ignore[type-var]


def takes(strategy: Strategy, field: str) -> bool:
    """Whether an argument of `Optimizer` can set this field of a strategy."""
    return field in _fields_of(strategy) and _is_made_of_fields(strategy)


def _fields_of(strategy: Strategy) -> dict[str, Any]:
    """The arguments of a strategy, with their values."""
    if not is_dataclass(strategy):
        return {}
    return {each.name: getattr(strategy, each.name) for each in fields(strategy) if each.init}


def _is_made_of_fields(strategy: Strategy) -> bool:
    """Whether `dataclasses.replace` can make another one: not of a class with an `__init__` of its own."""
    return is_dataclass(strategy) and _fields_of(strategy).keys() <= signature(type(strategy)).parameters.keys()


_STATE_AVERAGER: dict[str, tuple[Callable[[object], bool], str]] = {
    "custom_gradients": (is_false, "the optimizer steps from .grad"),
}

_TRACKER: dict[str, tuple[Callable[[object], bool], str]] = {
    "private_key": (is_nothing, "a peer signs with its own key: give the DHT an identity_path"),
}


def check_optimizer_options(options: Mapping[str, object]) -> None:
    """Raise for options that `Optimizer` does not have.

    Raises:
        TypeError: hivemind has no such argument either.
    """
    check_options("Optimizer", OptimizerOptions.__annotations__, options, {})


def check_state_averager_options(options: Mapping[str, object]) -> None:
    """The same for options of `TrainingStateAverager`.

    Raises:
        ConfigError: an option asks for something that does not exist here; the message says what to use instead.
    """
    check_options("TrainingStateAverager", StateAveragerOptions.__annotations__, options, _STATE_AVERAGER)


def check_tracker_options(options: Mapping[str, object]) -> None:
    """The same for options of `ProgressTracker`.

    Raises:
        ConfigError: as of `check_state_averager_options`.
    """
    check_options("ProgressTracker", TrackerOptions.__annotations__, options, _TRACKER)
