"""The fragments of the model that a run has on one peer: what is merged by itself has a participant and a state.

Where gradients are averaged there is one fragment, the whole model, and its state is that of the run. Where there are
several, each has its own chain of states: a peer that misses a merge of one fragment takes part in those of the others.
A checkpoint holds all of them together, and so does a state dict.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.errors import StateUnavailable
from shoal.protocol.wire import MAX_SAMPLES, decode_plain, encode
from shoal.run.decide.state_name import StateName
from shoal.run.join.shared_state import name_of
from shoal.run.participant import Participant
from shoal.state.wire import SharedState
from shoal.train.options import OUTER
from shoal.train.training_state import PreparedState, TrainingState, fingerprint_of

__all__ = [
    "Loaded",
    "export",
    "fingerprint",
    "load_saved",
    "name_of_all",
    "places",
    "prepare",
    "prepare_saved",
    "saved_fragments",
    "take_over",
]


class Loaded(NamedTuple):
    """The state of one fragment, as it was read: looked at whole, and ready to be taken over."""

    name: StateName
    prepared: PreparedState


def name_of_all(names: Sequence[StateName]) -> StateName:
    """One name for the states of all fragments; that of the state if there is one. The epoch is the lowest one."""
    if len(names) == 1:
        return names[0]
    digest = hashlib.sha256(b"shoal fragments" + b"".join(name.digest for name in names)).digest()
    return StateName(min(name.epoch for name in names), digest, min(sum(each.samples for each in names), MAX_SAMPLES))


def export(participants: Sequence[Participant]) -> SharedState:
    """The states of all fragments as one (under the lock): what a checkpoint holds."""
    states = [each.own.export() for each in participants]
    if len(states) == 1:
        return states[0]
    fragments = [
        {
            "state": msgspec.to_builtins(state.metadata["state"]),  # checkpoints are JSON, which has no bytes
            "training": state.metadata["training"],
            "tensors": len(state.tensors),
        }
        for state in states
    ]
    name = name_of_all([each.state for each in participants])
    tensors: list[torch.Tensor] = []
    infinite: list[int] = []
    firsts = list(accumulate((len(state.tensors) for state in states), initial=0))

    def called(position: int) -> str:
        number = bisect_right(firsts, position) - 1
        return states[number].called(position - firsts[number])

    for state in states:
        infinite += [len(tensors) + place for place in state.may_be_infinite]
        tensors += state.tensors
    metadata = {"state": list(name), "training": {"fragments": fragments}}
    return SharedState(metadata=metadata, tensors=tensors, may_be_infinite=infinite, called=called)


def places(trainings: Sequence[TrainingState]) -> list[torch.Tensor]:
    """For each tensor of `export` the tensor of the model that it belongs to; itself where it belongs to none."""
    found: list[torch.Tensor] = []
    for training in trainings:
        known, (_, tensors) = training.places(), training.export()
        found += [*known, *tensors[len(known) :]]
    return found


def prepare(
    trainings: Sequence[TrainingState], name: StateName, values: Any, tensors: Sequence[torch.Tensor]
) -> list[Loaded]:
    """Look at a state that `export` gave; nothing is changed.

    Args:
        trainings: of the fragments here.
        name: of the state.
        values: its `training`.
        tensors: as given.

    Raises:
        StateUnavailable: it does not fit here.
    """
    saved = values.get("fragments") if isinstance(values, Mapping) else None
    if (count := len(saved) if isinstance(saved, list) else 1) != len(trainings):
        raise StateUnavailable(f"it is a state of a model in {count} fragments, and here it is in {len(trainings)}")
    if count == 1:
        return [Loaded(name, trainings[0].prepare(values, tensors))]
    try:
        fragments = msgspec.convert(saved, list[_Fragment])
    except msgspec.ValidationError as error:
        raise StateUnavailable(f"it is no state of {count} fragments: {error}") from error
    if sum(fragment.tensors for fragment in fragments) != len(tensors):
        raise StateUnavailable(f"it has {len(tensors)} tensors, and its fragments have others")
    loaded, begin = [], 0
    for training, fragment in zip(trainings, fragments, strict=True):
        end = begin + fragment.tensors
        prepared = training.prepare(fragment.training, tensors[begin:end])
        loaded.append(Loaded(name_of({"state": fragment.state}), prepared))
        begin = end
    return loaded


class _Fragment(msgspec.Struct):
    """One fragment in the plain values of a state of several."""

    state: Any
    training: Any
    tensors: int


def fingerprint(training: TrainingState) -> str:
    """A digest of what all fragments hold, in hexadecimal."""
    return fingerprint_of(training.fragments).hex()


def take_over(training: TrainingState, loaded: Sequence[Loaded]) -> list[StateName]:
    """Take over a state that was prepared (under the lock): see `TrainingState.take_over`.

    Returns:
        The name of each fragment's state.
    """
    for fragment, each in zip(training.fragments, loaded, strict=True):
        fragment.take_over(each.prepared)
    training.taken_over()
    return [each.name for each in loaded]


def saved_fragments(participants: Sequence[Participant]) -> dict[str, Any]:
    """A copy of what `export` gives, for a state dict: tensors only (under the lock)."""
    state = export(participants)
    values = torch.frombuffer(bytearray(encode(state.metadata["training"])), dtype=torch.uint8)
    tensors = [tensor.detach().clone() for tensor in state.tensors]
    return {"outer": _outer_of(participants), "values": values, "tensors": tensors}


def _outer_of(participants: Sequence[Participant]) -> str:
    """The outer optimizer with the options that it was made with."""
    return participants[0].settings.fingerprint[OUTER]


def prepare_saved(participants: Sequence[Participant], name: StateName, saved: Any) -> list[Loaded]:
    """Look at what `saved_fragments` gave, as `prepare` does; nothing is changed.

    Raises:
        StateUnavailable: it does not fit here.
    """
    ours = _outer_of(participants)
    try:
        if (theirs := saved.get("outer", ours)) != ours:
            raise StateUnavailable(f"its outer optimizer is {theirs!s:.240}, and here it is {ours}")
        values = decode_plain(bytes(saved["values"].numpy()))
        return prepare([each.training for each in participants], name, values, saved["tensors"])
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StateUnavailable(f"it is not what state_dict() gave: {error}") from error


def load_saved(training: TrainingState, loaded: Sequence[Loaded]) -> list[StateName | None]:
    """Take over what was prepared, if anything was (under the lock).

    Else the anchor of each fragment becomes what the parameters are: a plain optimizer's state was loaded.

    Returns:
        The name of each fragment's state; None for one that was not saved.
    """
    if loaded:
        return [*take_over(training, loaded)]
    training.begin_anew()
    return [None for _ in training.fragments]
