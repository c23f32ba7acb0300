"""The parts of a run on one peer. Each part of the model that is merged by itself has its participant and its state.

Where gradients are averaged there is one part, and its state is that of the run. Where there are several, each has its
own chain of states: a peer that misses a merge of one part takes part in those of the others. What a checkpoint holds
is all of them together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from shoal.errors import StateUnavailable
from shoal.optim.outer import LocalSteps
from shoal.optim.participant import Participant
from shoal.optim.shared_state import name_of
from shoal.optim.state_name import StateName
from shoal.optim.training_state import PreparedState, TrainingState
from shoal.state import SharedState
from shoal.wire import MAX_SAMPLES, decode_plain, encode

__all__ = [
    "Loaded",
    "export",
    "fingerprint",
    "load_parts",
    "name_of_all",
    "parts_of",
    "places",
    "prepare",
    "prepare_parts",
    "saved_parts",
    "take_over",
]


class Loaded(NamedTuple):
    """The state of one part, as it was read: looked at whole, and ready to be taken over.

    Attributes:
        name: of the state; None if it was saved without the names of its parts.
        prepared: what it holds.
    """

    name: StateName | None
    prepared: PreparedState


def parts_of(training: TrainingState) -> Sequence[TrainingState]:
    """The states of the parts that this training is of."""
    return training.parts if isinstance(training, LocalSteps) else (training,)


def name_of_all(names: Sequence[StateName]) -> StateName:
    """One name for the states of all parts; that of the state if there is one part. The epoch is the lowest one."""
    if len(names) == 1:
        return names[0]
    digest = hashlib.sha256(b"shoal parts" + b"".join(name.digest for name in names)).digest()
    return StateName(min(name.epoch for name in names), digest, min(sum(each.samples for each in names), MAX_SAMPLES))


def export(participants: Sequence[Participant]) -> SharedState:
    """The states of all parts as one (under the lock): what a checkpoint holds."""
    states = [each.own.export() for each in participants]
    if len(states) == 1:
        return states[0]
    parts = [
        {"state": state.metadata["state"], "training": state.metadata["training"], "tensors": len(state.tensors)}
        for state in states
    ]
    tensors = [tensor for state in states for tensor in state.tensors]
    metadata = {"state": list(name_of_all([each.state for each in participants])), "training": {"parts": parts}}
    # Only the first part has extra tensors.
    return SharedState(metadata=metadata, tensors=tensors, may_be_infinite=states[0].may_be_infinite)


def places(trainings: Sequence[TrainingState]) -> list[torch.Tensor]:
    """For each tensor of `export` the tensor of the model that it belongs to; itself where it belongs to none."""
    found: list[torch.Tensor] = []
    for training in trainings:
        known, (_, tensors) = training.places(), training.export()
        found += [*known, *tensors[len(known) :]]
    return found


def prepare(trainings: Sequence[TrainingState], values: Any, tensors: Sequence[torch.Tensor]) -> list[Loaded]:
    """Look at a state that `export` gave; nothing is changed.

    Raises:
        StateUnavailable: it does not fit here.
    """
    if len(trainings) == 1:
        return [Loaded(None, trainings[0].prepare(values, tensors))]
    try:
        parts = msgspec.convert(values["parts"], list[_Part])
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise StateUnavailable(f"it is no state of {len(trainings)} parts: {error}") from error
    if len(parts) != len(trainings) or sum(part.tensors for part in parts) != len(tensors):
        raise StateUnavailable(f"it is a state of {len(parts)} parts, and there are {len(trainings)} here")
    loaded, begin = [], 0
    for training, part in zip(trainings, parts, strict=True):
        name = name_of({"state": part.state})
        loaded.append(Loaded(name, training.prepare(part.training, tensors[begin : begin + part.tensors])))
        begin += part.tensors
    return loaded


class _Part(msgspec.Struct):
    """One part in the plain values of a state of several."""

    state: Any
    training: Any
    tensors: int


def fingerprint(training: TrainingState) -> str:
    """A digest of what all parts hold, in hexadecimal."""
    parts = [part.fingerprint() for part in parts_of(training)]
    return parts[0].hex() if len(parts) == 1 else hashlib.sha256(b"".join(parts)).hexdigest()


def saved_parts(participants: Sequence[Participant]) -> dict[str, Any]:
    """A copy of the states of all parts, for a state dict: tensors only (under the lock)."""
    parts = []
    for each in participants:
        state = each.own.export()
        about = torch.frombuffer(bytearray(encode([list(each.state), state.metadata["training"]])), dtype=torch.uint8)
        parts.append({"about": about, "tensors": [tensor.detach().clone() for tensor in state.tensors]})
    return {"parts": parts}


def prepare_parts(training: TrainingState, saved: Any) -> list[Loaded]:
    """Look at what `saved_parts` gave; nothing is changed. Empty if it gave nothing, or if nothing is merged here.

    Raises:
        StateUnavailable: it does not fit here.
    """
    if not isinstance(training, LocalSteps) or saved is None:
        return []
    loaded = []
    try:
        for part, each in zip(training.parts, saved["parts"], strict=True):
            state, values = decode_plain(bytes(each["about"].numpy()))
            loaded.append(Loaded(name_of({"state": state}), part.prepare(values, each["tensors"])))
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise StateUnavailable(f"it is not what state_dict() gave, or of other parts: {error}") from error
    return loaded


def load_parts(training: TrainingState, loaded: Sequence[Loaded]) -> list[StateName | None]:
    """Take over what was prepared (under the lock).

    Without it the anchor of each part becomes what the parameters are: a plain optimizer's state was loaded.

    Returns:
        The name of each state, None for one that was not saved; none if nothing is merged here.
    """
    if not isinstance(training, LocalSteps):
        return []
    if not loaded:
        training.begin_anew()
        return [None for _ in training.parts]
    take_over(training, loaded)
    return [each.name for each in loaded]


def take_over(training: TrainingState, loaded: Sequence[Loaded]) -> None:
    """Take over a state that was prepared (under the lock): see `TrainingState.take_over`."""
    for part, each in zip(parts_of(training), loaded, strict=True):
        part.take_over(each.prepared)
    if isinstance(training, LocalSteps):
        training.go_back()
        training.follow_schedule()
