"""The state of a torch optimizer, as plain values and tensors, and how another peer's optimizer takes it over.

Three things travel: the options of the parameter groups, the statistics (`optimizer.state`), and the numbers that an
optimizer keeps as attributes of its own and writes into its `state_dict()` under their names (Ranger21 and StableSPAM
count their steps so). Optimizers of other libraries keep counts in the groups, from their first step on, and matrices,
lists or queues among the statistics. So nothing is expected by name:

- options that say how a step is computed, that a schedule keeps for itself, or that are objects, stay the receiver's;
- an option that both have must be of one kind: a number takes theirs, a text or a switch must be equal already;
- an option that only the donor has came with its steps, and is taken; one that only the receiver has goes, if it came
  with its steps;
- the statistics become the donor's, with their dtypes; they go where torch would put them;
- the numbers become the donor's, if both have the same ones.

`check` needs no values: it looks at what is offered before anything is downloaded. `prepare` looks at all of it, takes
one step from it with copies (see `shoal.train.trial`), and changes nothing. `switch` cannot fail.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import product
from typing import Any, NamedTuple

import torch

from shoal.base.names import known_as
from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_SAMPLES_TAKEN, encode
from shoal.state.wire import StateTensorSpec
from shoal.train.options import LEFT_OUT, Options, apply, options_of
from shoal.train.trial import draws_random_numbers, first_statistics, needs, try_step

__all__ = ["AnyTensor", "Exported", "OptimizerState", "Prepared", "is_number", "read_exported"]

_MAX_COUNT = 1 << 53
"""No count or other whole number is larger: up to here every one is a float, too."""

_MAX_RATE = 1e6
_FRACTIONS = frozenset({"betas", "momentum"})
_ALWAYS_TAKEN = frozenset({"lr", "betas", "momentum", "weight_decay", "eps"})
"""Options that are looked at also where the optimizer's constructor does not name them, as it wraps another one."""

_ROUNDED = 1e-6
_MAX_DEPTH = 6
_MOST_VALUES, _VALUES_EACH = 1 << 20, 64
"""The values in a state from the network: so many, and so many more for each parameter."""

_ON_HOST = frozenset({"step"})
"""Statistics that torch leaves on the host, unless a step is captured or fused."""

_REPLACED = frozenset({"param_groups", "state"})
_NOT_ITS_OWN = frozenset({"param_groups", "state", "defaults", "step"})
_CHANCE = "torch's random numbers"
_HOST = torch.device("cpu")

AnyTensor = torch.Tensor | StateTensorSpec


class Prepared(NamedTuple):
    """The options and statistics that an optimizer holds after `switch`.

    Attributes:
        options: of each group, without its parameters.
        states: its statistics, by parameter, or by a name of its own; then those of each optimizer that it wraps.
        attributes: that it gets beside these, and those of each optimizer that it wraps.
    """

    options: list[dict[str, Any]]
    states: list[dict[Any, Any]]
    attributes: Sequence[dict[str, Any]]


class Exported(NamedTuple):
    """What `OptimizerState.export` gave, read back.

    Attributes:
        sizes: the number of parameters in each group.
        options: of each group.
        states: of the optimizer, and of those that it wraps: the statistics of parameters, by number, and others.
        numbers: attributes of each of these optimizers; empty if there are none.
    """

    sizes: list[Any]
    options: list[dict[Any, Any]]
    states: list[tuple[dict[int, dict[Any, Any]], dict[Any, Any]]]
    numbers: list[dict[Any, Any]]


def read_exported(values: Any, tensors: Sequence[AnyTensor], first: int, count: int) -> Exported:
    """Read what `OptimizerState.export` gave.

    Args:
        values: what it returned.
        tensors: all of the state, or what they look like.
        first: the optimizer's begin here.
        count: the number of its parameters.

    Raises:
        ValueError: it is not in its form; says what.
    """
    reader = _Reader(tensors, first, _MOST_VALUES + _VALUES_EACH * count)
    try:
        groups = values["groups"]
        sizes = [size for size, _ in groups]
        options = [_named(reader.read(each)) for _, each in groups]
        states = [_read_state(reader, count, *state) for state in values["states"]]
        numbers = [_named(reader.read(each)) for each in values.get("numbers", [])]
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"its optimizer's values are not in their form: {error}") from error
    reader.finish()
    return Exported(sizes, options, states, numbers)


def _read_state(reader: _Reader, count: int, *state: Any) -> tuple[dict[int, dict[Any, Any]], dict[Any, Any]]:
    found = dict[int, dict[Any, Any]]()
    *kept, others = state
    for number, entry in _entries(*kept):
        if type(number) is not int or not 0 <= number < count:
            raise ValueError(f"it has statistics of parameter {number!r:.20}")
        found[number] = _named(reader.read(entry))
    return found, {_name(reader.read(key)): reader.read(entry) for key, entry in others}


class OptimizerState:
    """The options and statistics of one optimizer.

    Args:
        optimizer: whose.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._own_options = optimizer, set[str]()
        self.made_with = [frozenset(group) for group in optimizer.param_groups]
        taken = (_ALWAYS_TAKEN | inspect.signature(type(optimizer)).parameters.keys()) - LEFT_OUT
        self._first = [{name: _numbers_in(group[name]) for name in taken & group.keys()} for group in self._groups]
        self._sound = [dict[str, Any]() for _ in self._groups]  # values that were found good
        self._held = [{k: v for k, v in vars(each).items() if k in _REPLACED} for each in self._optimizers]
        self._counted = [_numbers_of(each) for each in self._optimizers]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @property
    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizer, and those that it wraps (Lookahead), which have its groups."""
        found = [self._optimizer]
        for each in found:
            inner = [value for value in vars(each).values() if isinstance(value, torch.optim.Optimizer)]
            found += [value for value in inner if not any(value is other for other in found)]
        return found

    @property
    def _states(self) -> list[dict[Any, Any]]:
        """Its statistics, and those of the optimizers that it wraps."""
        found: list[dict[Any, Any]] = []
        for each in self._optimizers:
            if not any(each.state is other for other in found):
                found.append(each.state)
        return found

    @property
    def _numbers(self) -> list[dict[str, Any]]:
        """The numbers that travel of its attributes, and of those of the optimizers that it wraps."""
        return self._numbers_in([vars(each) for each in self._optimizers])

    def _numbers_in(self, attributes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{name: each[name] for name in names} for each, names in zip(attributes, self._counted, strict=False)]

    @property
    def steps_taken(self) -> int:
        """The number of steps that the optimizer has taken, by its statistics or its groups."""
        entries = [entry for entry in self._optimizer.state.values() if isinstance(entry, dict)]
        counts = [entry["step"] for entry in (*entries, *self._groups) if "step" in entry]
        steps = max((float(each) for each in counts if is_number(each)), default=0.0)
        if 0 < steps < MAX_SAMPLES_TAKEN:
            return int(steps)
        return int(bool(self._optimizer.state) and not (counts and steps == 0))  # statistics may be there before it

    @property
    def needs(self) -> str | None:
        """The need that its step names, see `trial.needs`; None if it has stepped."""
        return needs(self._optimizer, self._states)

    def check_travels(self) -> None:
        """Look whether other peers could take over what the optimizer keeps; before its first step that is tried.

        One that wraps others is not tried: no twin can be made of it.

        Raises:
            ConfigError: it keeps something that cannot travel; names it.
        """
        if len(self._states) > 1:
            return
        if any(self._states):
            self.export([])
            return
        for number, statistics in first_statistics(self._optimizer):
            _take_out(_sorted(statistics), [], f"statistic of parameter {known_as(self._parameters[number], number)}")

    # ------------------------------------------------------------------------------------------------------- take out

    def outside(self) -> dict[str, object]:
        """Marks of what `export` leaves behind: attributes of the optimizer's own, and the chance that it draws on.

        One that changes in a step is a state of which newcomers know nothing.
        """
        marks: dict[str, object] = {_CHANCE: bytes(torch.get_rng_state().numpy())}
        for each, counted in zip(self._optimizers, self._counted, strict=False):
            for name, value in vars(each).items():
                own = name not in _NOT_ITS_OWN | counted and name[:11] != "_optimizer_"
                if own and not isinstance(value, torch.optim.Optimizer):
                    marks[f"attribute {name!r} of {type(each).__name__}"] = _mark(value)
        return marks

    def depends_on_more(self, before: Mapping[str, object]) -> str | None:
        """What a step has changed of what `outside` names, in a sentence; None if nothing.

        `before` is its result before the step.
        """
        after, unknown = self.outside(), ""
        changed = [name for name, mark in after.items() if name in before and before[name] != mark]
        if _CHANCE in changed:  # another thread may have drawn
            draws, unknown = draws_random_numbers(self._optimizer)
            if not draws:
                changed.remove(_CHANCE)
        if changed:
            return (
                f"the optimizer's steps depend on more than its state ({', '.join(changed)}): newcomers do not get "
                "it, and peers may take different steps from equal gradients; use another optimizer"
            )
        return unknown and (
            f"{_CHANCE} were drawn on during a step of the optimizer, by it or by another thread: a step on a copy, "
            f"which would tell, failed ({unknown}). If its steps draw on them, peers take different steps from equal "
            "gradients; use another optimizer then"
        )

    def export(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        """Plain values; tensors are appended to `tensors`, by reference, and the values say where.

        Raises:
            ConfigError: the optimizer keeps something that cannot travel; names it.
        """
        return self._values(self._optimizer.param_groups, self._states, self._numbers, tensors)

    def _values(
        self,
        groups: Sequence[dict[str, Any]],
        states: Sequence[dict[Any, Any]],
        numbers: Sequence[dict[str, Any]],
        tensors: list[torch.Tensor],
    ) -> dict[str, Any]:
        values: dict[str, Any] = {
            "groups": [[len(each["params"]), _take_out(_travelling(each), tensors, "option")] for each in groups],
            "states": [self._export(state, tensors) for state in states],
        }
        if any(numbers):  # most optimizers have none, and their peers may be of an older version
            values["numbers"] = [_take_out(each, [], "attribute") for each in numbers]
        return values

    def _export(self, kept: Mapping[Any, Any], tensors: list[torch.Tensor]) -> list[Any]:
        """Its forms; the number of the form of each parameter's statistics, from 1 on; and statistics by other names.

        Most parameters have statistics of one form: the same names, and the same values but for the tensors.
        """
        # In one order on all peers: whose states are equal must offer equal bytes.
        forms: dict[bytes, tuple[int, Any]] = {}
        of_each = [0] * len(self._parameters)
        for number, parameter in enumerate(self._parameters):
            if entry := kept.get(parameter):
                form = _take_out(_sorted(entry), tensors, f"statistic of parameter {known_as(parameter, number)}")
                of_each[number], _ = forms.setdefault(encode(form), (len(forms) + 1, form))
        own = {key: entry for key, entry in kept.items() if not isinstance(key, torch.Tensor)}
        others = [
            [_take_out(key, [], "name of a statistic"), _take_out(entry, tensors, f"statistic {key!r:.40}")]
            for key, entry in _sorted(own).items()
        ]
        return [[form for _, form in forms.values()], of_each if forms else [], others]

    def called(self, number: int) -> str:
        """The tensor of this number that `export` takes out, for people."""
        tensors: list[torch.Tensor] = []
        self.export(tensors)
        place = tensors[number].data_ptr()
        for kept, (index, parameter) in product(self._states, enumerate(self._parameters)):
            entry = kept.get(parameter)
            for name, value in entry.items() if isinstance(entry, Mapping) else ():
                if isinstance(value, torch.Tensor) and value.data_ptr() == place:
                    return f"statistic {name!r:.40} of parameter {known_as(parameter, index)}"
        return f"tensor {number} of the optimizer"

    # --------------------------------------------------------------------------------------------------------- put in

    def check(self, values: Any, tensors: Sequence[AnyTensor], first: int) -> Prepared:
        """Look at what `export` of another peer gave, or at the kinds of its tensors; nothing is moved or changed.

        Args:
            values: what it returned.
            tensors: all of the state, or what they look like.
            first: the optimizer's begin here.

        Raises:
            ValueError: it does not fit; says what.
        """
        parameters = self._parameters
        sizes, offered, kept, numbers = read_exported(values, tensors, first, len(parameters))
        states = [
            {**{parameters[number]: entry for number, entry in of_each.items()}, **others} for of_each, others in kept
        ]
        numbers = numbers or [{} for _ in self._counted]
        own = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != own:
            raise ValueError(f"its parameter groups have {sizes!s:.80} parameters, and {own!s:.80} here")
        if len(states) != len(self._states):
            raise ValueError(
                f"it is of {len(states)} optimizers, one in the other, and there are {len(self._states)} here"
            )
        self._check_numbers(numbers)
        return Prepared(self._merge(offered), states, numbers)

    def _check_numbers(self, offered: Sequence[Mapping[Any, Any]]) -> None:
        if [each.keys() for each in offered] != self._counted:
            theirs, own = (sorted(map(str, set().union(*each))) for each in (offered, self._counted))
            raise ValueError(f"its optimizer counts {theirs!s:.80}, and {own!s:.80} here")
        for each in offered:
            for name, value in each.items():
                if not _is_plain_number(value) or not math.isfinite(value):
                    raise ValueError(f"attribute {name!r:.40} is {value!r:.40} there")

    def prepare(self, values: Any, tensors: Sequence[torch.Tensor], first: int) -> Prepared:
        """As `check`, with everything where it belongs, and tried. Tensors are kept, not copied, where they can be.

        Raises:
            ValueError: it does not fit, or no step can be taken from it; says what.
        """
        prepared = self.check(values, tensors, first)
        for group, options in zip(self._optimizer.param_groups, prepared.options, strict=True):
            for name, value in options.items():
                if group["params"] and value is not group.get(name):  # a group may have none, and is never stepped then
                    options[name] = _moved(value, group["params"][0].device)
            on_host = _ON_HOST if not (group.get("capturable") or group.get("fused")) else ()
            for state, parameter in product(prepared.states, group["params"]):
                if entry := state.get(parameter):
                    state[parameter] = {
                        name: _moved(value, _HOST if name in on_host else parameter.device)
                        for name, value in entry.items()
                    }
        self._try(prepared)
        return prepared

    def prepare_loaded(self, state_dict: dict[str, Any]) -> Prepared:
        """Look at a state dict of the optimizer; nothing is changed.

        Torch puts one in place before it has looked at all of it, and never looks whether a step can be taken from it.
        So the optimizer loads it, and what it held is put back.

        Raises:
            ValueError: it does not fit, no step can be taken from it, or it cannot be given to other peers; says what.
        """
        optimizers = self._optimizers
        own, groups = [dict(vars(each)) for each in optimizers], self._optimizer.param_groups
        try:
            self._optimizer.load_state_dict(state_dict)
            states = [dict(state) for state in self._states]
            loaded = next((each.param_groups for each in optimizers if each.param_groups is not groups), groups)
            attributes = [{k: v for k, v in vars(each).items() if k not in _REPLACED} for each in optimizers]
        except Exception as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{why}") from error
        finally:
            for each, before in zip(optimizers, own, strict=True):
                vars(each).update(before)
        for index, (theirs, needed) in enumerate(zip(loaded, self.made_with, strict=True)):
            if missing := sorted(needed - theirs.keys() - LEFT_OUT):
                raise ValueError(f"it is of another optimizer: parameter group {index} has no {missing[0]!r}")
        # Torch keeps statistics of a number that no parameter has, and writes them into each later checkpoint.
        if strays := [key for state in states for key in state if isinstance(key, int)]:
            count = len(self._parameters)
            raise ValueError(f"it has statistics of parameter {strays[0]}, and the optimizer has {count} parameters")
        self._merge(loaded)
        options = [{name: value for name, value in group.items() if name != "params"} for group in loaded]
        self._check_finite(states)
        prepared = Prepared(options, states, attributes)
        self._try(prepared)
        self._values(loaded, states, self._numbers_in(attributes), [])  # refuses what other peers could not take over
        return prepared

    def _check_finite(self, states: Sequence[Mapping[Any, Any]]) -> None:
        """Look at all statistics, as the step that is tried is one of the smallest parameters. A download has done so.

        Raises:
            ValueError: one is not finite, and the optimizer's own is.
        """
        for kept, mine in zip(states, self._states, strict=True):
            for number, parameter in enumerate(self._parameters):
                entry, own = kept.get(parameter), mine.get(parameter) or {}
                for name, value in entry.items() if isinstance(entry, Mapping) else ():
                    if not (_is_finite(value) or (name in own and not _is_finite(own[name]))):
                        called = known_as(parameter, number)
                        raise ValueError(f"statistic {name!r:.40} of parameter {called} is not finite")

    def _merge(self, offered: Sequence[Mapping[Any, Any]]) -> list[dict[str, Any]]:
        """The options of each group once it takes these over. Raises `ValueError` if it cannot."""
        pairs = zip(self._optimizer.param_groups, offered, self.made_with, strict=True)
        unset = frozenset(name for name, value in self._optimizer.defaults.items() if value is None)
        return [_merged(mine, theirs, made_with, unset) for mine, theirs, made_with in pairs]

    def _try(self, prepared: Prepared) -> None:
        if len(prepared.states) == 1:  # of one that wraps others no twin can be made
            numbers = {name: prepared.attributes[0][name] for name in self._counted[0]}
            try_step(self._optimizer, prepared.options, prepared.states[0], numbers)

    def own_options(self, names: Iterable[str]) -> None:
        """The options of these names are this peer's own from now on, whatever the others have."""
        self._own_options.update(names)

    def options(self) -> Options:
        """The options that the groups hold, but for those that are this peer's own."""
        return options_of(self._groups, self._own_options)

    def apply(self, options: Options) -> None:
        """Let the groups hold these, but for those that are this peer's own."""
        apply(self._groups, options, self._own_options)

    def check_options(self) -> None:
        """Raise `ConfigError` if the program has set an option to a value that makes steps of no use.

        Those are looked at that the optimizer is made with. Others are counts of its own.
        """
        for number, (group, first, sound) in enumerate(zip(self._groups, self._first, self._sound, strict=False)):
            for name, was in first.items():
                now = group.get(name)
                if now is sound.get(name, sound) and not isinstance(now, torch.Tensor | list):
                    continue  # as the last time
                for mine, value in zip(was, _numbers_in(now), strict=False):
                    rounded = -_ROUNDED * mine <= value <= 0  # schedules come to 0 so
                    if not rounded and _out_of_bounds(name, mine, value) is not None:
                        raise ConfigError(
                            f"{name} of parameter group {number} is {value:g} (it was {mine:g} when the optimizer was "
                            "made): no step is taken with that. Set another one, or mend the schedule"
                        )
                sound[name] = now

    def why_not(self, options: Options) -> str | None:
        """The reason why no step can be taken with options of others that are no `misfit`; None if none is seen.

        Some are of the right kind, and no step can be taken with them: AdamW raises an error with betas of 5.
        """
        groups = [{name: copy.deepcopy(group[name]) for name in group.keys() - {"params"}} for group in self._groups]
        try:
            apply(groups, options, self._own_options)
            if len(self._states) == 1:  # see `_try`
                try_step(self._optimizer, groups, self._optimizer.state, {})
        except Exception as error:  # noqa: BLE001 (a rate that is a tensor cannot hold every number, for example)
            return f"such that no step can be taken here ({str(error) or type(error).__name__})"
        return None

    def switch(self, prepared: Prepared) -> None:
        """Hold this from now on. Groups and statistics stay the objects that they are.

        Torch replaces them. But objects that hold them (`swarm.param_groups`, a schedule of the user's own) would go on
        reading and setting the ones before, without effect.
        """
        for each, attributes, held in zip(self._optimizers, prepared.attributes, self._held, strict=False):
            vars(each).update(attributes)
            vars(each).update(held)  # also if the user has loaded a state into the optimizer itself
        for group, options in zip(self._optimizer.param_groups, prepared.options, strict=True):
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            for name, value in options.items():
                mine = group.get(name)
                if isinstance(mine, torch.Tensor) and mine is not value and is_number(mine) and is_number(value):
                    mine.fill_(float(value))  # a captured graph reads it
                else:
                    group[name] = value
        for state, becomes in zip(self._states, prepared.states, strict=True):
            state.clear()
            state.update(becomes)


# ------------------------------------------------------------------------------------------------------ plain and back


def _take_out(value: Any, tensors: list[torch.Tensor], what: str, depth: int = 0) -> Any:
    """Move tensors to the end of `tensors`; dictionaries become lists of pairs, so that any key survives.

    Raises:
        ConfigError: `_Reader` would not take it.
    """
    if depth > _MAX_DEPTH:
        raise ConfigError(
            f"the optimizer's {what} is nested too deeply to be given to other peers: at most {_MAX_DEPTH}"
        )
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return {"n": _order(value)}
    if isinstance(value, Mapping) and all(_plain(key) is not _OBJECT for key in value):
        return {"d": [[key, _take_out(item, tensors, f"{what} {key!r:.40}", depth + 1)] for key, item in value.items()]}
    if isinstance(value, list | tuple | deque):
        kind = "q" if isinstance(value, deque) else "l" if isinstance(value, list) else "u"
        items = [_take_out(item, tensors, what, depth + 1) for item in value]
        return {kind: [value.maxlen, *items] if isinstance(value, deque) else items}
    if (plain := _plain(value)) is not _OBJECT:
        if isinstance(plain, int) and abs(plain) > _MAX_COUNT:
            raise ConfigError(
                f"the optimizer keeps the number {plain:.3g} ({what}), and others take whole numbers up to 2^53 only"
            )
        return {"v": plain}
    raise ConfigError(
        f"the optimizer keeps a {type(value).__name__} ({what}), which cannot be given to other peers: no newcomer can "
        "take over its state; use another optimizer"
    )


_OBJECT = object()


def _mark(value: object, depth: int = 0) -> object:
    """Differs once the value has changed, as far as can be seen. Switches do not count: they say that it is ready."""
    if isinstance(value, torch.Tensor):
        return id(value), value._version  # noqa: SLF001 (how autograd notices changes in place, since torch 0.4)
    if isinstance(value, torch.optim.Optimizer) and depth < _MAX_DEPTH:
        own = {name: item for name, item in vars(value).items() if name not in _NOT_ITS_OWN}
        return _mark({name: item for name, item in own.items() if name[:11] != "_optimizer_"}, depth + 1)
    saves = getattr(value, "state_dict", None)  # as SPAM's object that decays a rate has; a model is none of its own
    if callable(saves) and not isinstance(value, type | torch.nn.Module) and depth < _MAX_DEPTH:
        return _mark(saves(), depth + 1)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return [(id(key), _mark(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque) and depth < _MAX_DEPTH:
        return [_mark(item, depth + 1) for item in value]
    return value if _is_plain_number(value) or isinstance(value, str) else None


def _numbers_of(optimizer: torch.optim.Optimizer) -> frozenset[str]:
    """The names of the attributes that travel: its own `state_dict` has them, so `load_state_dict` can set them."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return frozenset()
    saved = optimizer.state_dict()
    return frozenset(name for name, value in vars(optimizer).items() if name in saved and _is_plain_number(value))


def _is_plain_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _order(tensor: torch.Tensor) -> list[int]:
    """The dimensions from the outermost to the innermost in memory; none if they lie in their order.

    A matrix that lies by columns is multiplied in another order than one that lies by rows, and rounded otherwise.
    """
    if tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=lambda dim: tensor.stride()[dim], reverse=True)
    return order if tensor.permute(order).is_contiguous() else []


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)  # schedulers of numpy's functions leave numbers of its own kinds
    item = getattr(value, "item", None)
    return _plain(item()) if callable(item) and getattr(value, "shape", None) == () else _OBJECT


def _sorted(values: Mapping[Any, Any]) -> dict[Any, Any]:
    return dict(sorted(values.items(), key=lambda item: str(item[0])))


def _travelling(group: Mapping[str, Any]) -> dict[str, Any]:
    return _sorted({name: value for name, value in group.items() if name not in LEFT_OUT and _travels(value)})


def _travels(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_travels, value))
    return isinstance(value, torch.Tensor) or _plain(value) is not _OBJECT


def _entries(entries: Any, of_each: Any = None) -> Iterator[tuple[Any, Any]]:
    """The number of each parameter that has statistics, and the form of these.

    Checkpoints of before 2026-11-28 have such pairs themselves.
    """
    if of_each is None:
        yield from entries
        return
    for number, form in enumerate(of_each):
        if type(form) is not int or not 0 <= form <= len(entries):
            raise ValueError(f"statistics of parameter {number} are of form {form!r:.20}")
        if form:
            yield number, entries[form - 1]


class _Reader:
    """Reads values back. Each tensor belongs to one of them, and none is left over.

    A value names the next tensor, by the order of its dimensions, or any tensor, in checkpoints of before 2026-11-28.

    Args:
        tensors: all of the state.
        first: the optimizer's begin here.
        most: it reads no more values; one form that many parameters name has many.
    """

    def __init__(self, tensors: Sequence[AnyTensor], first: int, most: int) -> None:
        self._tensors, self._next = tensors, first
        self._left = bytearray(b"\1") * (len(tensors) - first)
        self._first, self._more = first, most

    def read(self, value: Any, depth: int = 0) -> Any:
        """The value that `_take_out` was given."""
        self._more -= 1
        if depth > _MAX_DEPTH or self._more < 0:
            raise ValueError(f"its optimizer's values are {'nested too deeply' if depth > _MAX_DEPTH else 'too many'}")
        ((kind, item),) = value.items()
        if kind == "v":
            if isinstance(item, int) and abs(item) > _MAX_COUNT:
                raise ValueError(f"it holds the number {item}")
            if item is None or isinstance(item, bool | int | float | str):
                return item
        elif kind == "n":
            self._next += 1
            return self._tensor(self._next - 1, *item)
        elif kind == "t":
            return self._tensor(*item)
        elif kind == "d":
            return {_name(key): self.read(each, depth + 1) for key, each in item}
        elif kind in ("l", "u"):
            items = [self.read(each, depth + 1) for each in item]
            return items if kind == "l" else tuple(items)
        elif kind == "q" and (item[0] is None or (type(item[0]) is int and item[0] >= 0)):
            return deque((self.read(each, depth + 1) for each in item[1:]), item[0])
        raise ValueError(f"a value of the kind {kind!r:.20} holds {item!r:.40}")

    def _tensor(self, place: int, *order: int) -> AnyTensor:
        known = type(place) is int and self._first <= place < len(self._tensors)
        if not known or not self._left[place - self._first]:
            raise ValueError(f"it names tensor {place!r:.20}, which is not there, or another one's")
        self._left[place - self._first] = 0
        tensor = self._tensors[place]
        if order and sorted(order) != list(range(len(tensor.shape))):
            raise ValueError(f"tensor {place} lies in the order {order!s:.40}")
        if not order or isinstance(tensor, StateTensorSpec):
            return tensor
        back = sorted(range(len(order)), key=lambda dim: order[dim])
        return tensor.permute(order).contiguous().permute(back)

    def finish(self) -> None:
        """All was read."""
        if (left := self._left.find(1)) >= 0:
            raise ValueError(f"tensor {self._first + left} is no statistic")


def _name(key: Any) -> Any:
    if key is not None and not isinstance(key, bool | int | float | str):
        raise ValueError(f"a name is {key!r:.40}")
    return key


def _named(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} stands where values have names")
    return value


# ------------------------------------------------------------------------------------------------------------- options


def _merged(
    mine: Mapping[str, Any], theirs: Mapping[Any, Any], made_with: frozenset[str], unset: frozenset[str]
) -> dict[str, Any]:
    """The options of a group that takes over another one's; those in `unset` are None at first, and may be anything."""
    merged = {name: value for name, value in mine.items() if name != "params"}
    for name in [name for name, value in merged.items() if name not in made_with and name not in LEFT_OUT]:
        if name not in theirs and is_number(merged[name]):
            del merged[name]  # came with the receiver's own steps
    for name, value in theirs.items():
        if name in LEFT_OUT:
            continue
        if not isinstance(name, str):
            raise ValueError(f"an option is called {name!r:.40}")
        here = merged.get(name) if name not in unset else None
        if (why := _misfit(name, here, value)) is not None:
            raise ValueError(f"option {name!r:.40} {why}")
        merged[name] = float(value) if isinstance(value, torch.Tensor) and isinstance(here, float) else value
        if isinstance(here, list | tuple) and isinstance(value, list | tuple):
            merged[name] = type(here)(value) if type(here) in (list, tuple) else tuple(value)
    return merged


def _misfit(name: str, mine: Any, theirs: Any) -> str | None:
    """The reason why an option cannot take this value; None if it can. `mine` is None where there is none."""
    if mine is not None and (here := _kind(mine)) != (there := _kind(theirs)):
        return f"is {there} there and {here} here ({_shown(theirs)}, {_shown(mine)})"
    if isinstance(theirs, list | tuple):
        own = mine if mine is not None else [None] * len(theirs)
        if len(own) != len(theirs):
            return f"has {len(theirs)} values there and {len(own)} here"
        return next((why for pair in zip(own, theirs, strict=True) if (why := _misfit(name, *pair))), None)
    if isinstance(theirs, bool | str):
        return None if mine is None or mine == theirs else f"is {_shown(theirs)} there and {_shown(mine)} here"
    if isinstance(theirs, torch.Tensor) and not is_number(theirs):
        return None
    return _out_of_bounds(name, mine, float(theirs)) if isinstance(theirs, int | float | torch.Tensor) else None


def _numbers_in(option: Any) -> list[float]:
    """The numbers of an option that is one, or a list of such; else none."""
    values = option if isinstance(option, list | tuple) else (option,)
    plain = [each.item() if isinstance(each, torch.Tensor) and is_number(each) else _plain(each) for each in values]
    return [float(each) for each in plain if isinstance(each, int | float) and not isinstance(each, bool)]


def _out_of_bounds(name: str, mine: Any, number: float) -> str | None:
    if mine is not None and float(mine) == number:
        return None
    if not math.isfinite(number) or abs(number) > torch.finfo(torch.float32).max:
        return f"is {number} there"
    if mine is not None and float(mine) >= 0 and number < 0:
        return f"is {number} there, and not negative here"
    if number > (1.0 if name in _FRACTIONS else _MAX_RATE if name == "lr" else math.inf):
        return f"is {number:g} there"
    return None


def is_number(value: object) -> bool:
    """Whether it is a number, or a tensor of one."""
    if isinstance(value, torch.Tensor | StateTensorSpec):
        return math.prod(value.shape) == 1
    return _is_plain_number(value)


def _kind(value: object) -> str:
    if is_number(value):
        return "a number"
    if isinstance(value, torch.Tensor | StateTensorSpec):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return "a list"
    return {bool: "a switch", str: "a text", type(None): "nothing"}.get(type(value), "an object")


def _shown(value: object) -> str:
    return "a tensor" if isinstance(value, torch.Tensor | StateTensorSpec) else f"{value!r:.40}"


# ------------------------------------------------------------------------------------------------------------- tensors


def _is_finite(value: Any) -> bool:
    """Whether all tensors in it are. Single numbers count as finite: some optimizers begin with an infinite best."""
    if isinstance(value, torch.Tensor):
        looked_at = value.is_floating_point() and value.itemsize > 1 and value.numel() > 1
        return not looked_at or bool(torch.isfinite(value).all())
    if isinstance(value, Mapping):
        value = value.values()
    return all(map(_is_finite, value)) if isinstance(value, list | tuple | deque | ValuesView) else True


def _moved(value: Any, device: torch.device) -> Any:
    """With all tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    if isinstance(value, deque):
        return deque((_moved(each, device) for each in value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)([_moved(each, device) for each in value])
    return value
