"""The state of a run as newcomers download it: the trained tensors, and the name of the state among the metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import msgspec

from shoal.base.bounded import bound
from shoal.base.names import known_as
from shoal.compression import dtype_name
from shoal.errors import ConfigError, StateUnavailable
from shoal.protocol.wire import LAST_EPOCH_TAKEN, MAX_SAMPLES_TAKEN, Digest, encode
from shoal.run.decide.committed import Committed
from shoal.run.decide.state_name import StateName
from shoal.run.view.progress import StateKey
from shoal.state.wire import Manifest, SharedState, StateAway
from shoal.train.optimizer_state import AnyTensor
from shoal.train.training_state import TrainingState

__all__ = ["Misfits", "before_of", "committed_of", "history_of", "is_average", "name_of", "share", "why_not_ours"]

_DOWNLOADS, _REMEMBERED = 2, 64


def share(
    training: TrainingState,
    name: StateName,
    committed: Committed,
    *,
    before: bytes = b"",
    history: Sequence[bytes] = (),
    average: bool = False,
) -> SharedState:
    """The state that a donor gives, with the tensors by reference: hold their lock while it is read.

    No codec: the newcomer goes on under this name, which says that it holds the same bits.

    Args:
        training: parameters, optimizer, schedule.
        name: of the state that they are.
        committed: the last steps that led to it.
        before: the digest of the state before the last of them; empty if it is not known.
        history: the digests of the states that led to it, as far as they are known, the last one last.
        average: whether it is an average of states, and not what a step has led to.

    Raises:
        ConfigError: the parameters are not those to train with, by the optimizer's own doing.
        StateAway: they are not, by the user's doing.
    """
    if training.weights.are_hidden:
        raise ConfigError("the optimizer is in eval mode by its own eval(): call eval() of the shoal.Optimizer instead")
    if training.weights.are_changed_unusually:
        raise StateAway(
            "other values stand in the place of the trained parameters than the last step has left there (averaged "
            "ones, for an evaluation?): put those back first, and change them only within the optimizer's step"
        )
    values, tensors = training.export()
    return SharedState(
        metadata={
            "state": list(name),
            "before": before,
            "history": list(history),
            **committed.export(),
            "average": average,
            "training": values,
        },
        tensors=tensors,
        epoch=name.epoch,
        may_be_infinite=_extra(training),
        holds=training.weights.agree_with,
        called=training.called,
    )


def name_of(metadata: Any) -> StateName:
    """The name of a state of a run.

    Raises:
        StateUnavailable: it has none, or one so near the bounds that nobody could go on from it.
    """
    try:
        name = msgspec.convert(metadata["state"], StateName)
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise StateUnavailable(f"its state has no name: {error}") from error
    if name.epoch > LAST_EPOCH_TAKEN or name.samples > MAX_SAMPLES_TAKEN:
        raise StateUnavailable(f"its state, of epoch {name.epoch} and {name.samples} samples, is beyond any run")
    return name


def committed_of(metadata: Any) -> Committed:
    """The last steps that led to a state, as its donor says."""
    return Committed.read(metadata)


def before_of(metadata: Any) -> bytes:
    """The digest of the state before the last step, as its donor says; empty if that is not known."""
    before = metadata.get("before")
    return before if isinstance(before, bytes) else b""


def history_of(metadata: Any) -> list[bytes]:
    """The digests of the states that led to a state, the last one last, as its donor says; none if it says none."""
    try:
        return msgspec.convert(metadata.get("history", []), list[Digest])
    except msgspec.ValidationError:
        return []


def is_average(metadata: Any) -> bool:
    """Whether a state is an average of states, as its donor says."""
    return metadata.get("average") is True


def why_not_ours(
    training: TrainingState,
    manifest: Manifest,
    mine: StateKey | None,
    misfits: Misfits | None = None,
    is_false: Callable[[StateKey], bool] = lambda key: False,
) -> str | None:
    """The reason why an offered state cannot be ours; None if it can. It may have more optimizer's tensors, or none.

    Infinities are for extra tensors (masks): a state with others went wrong, and so would training from it.

    Args:
        training: the state that is trained here.
        manifest: of the offered state.
        mine: a state that is no better than this is not wanted.
        misfits: a state that was downloaded in vain is not wanted either.
        is_false: whether the name of a state is none, as this peer has been at that state and knows it better.
    """
    try:
        theirs = name_of(manifest.metadata)
    except StateUnavailable as error:
        return str(error)
    if theirs.epoch > training.last_epoch_taken:
        return f"its state, of epoch {theirs.epoch}, is beyond any run with this strategy"
    if manifest.epoch != theirs.epoch:
        return f"its state is of epoch {theirs.epoch}, and offered as one of epoch {manifest.epoch}"
    if is_false(theirs.key):
        return "it says that a state at which this peer was before has other samples, or another epoch"
    if mine is not None and mine >= theirs.key:
        return "its copy is of a state that is no better than ours: it will have a newer one"
    offered = manifest.tensors
    for index, tensor in enumerate(training.tensors.all):
        if index >= len(offered) or (offered[index].shape, offered[index].dtype) != (tensor.shape, tensor.dtype):
            return f"tensor {known_as(tensor, index)} of its state is not {tuple(tensor.shape)} {tensor.dtype} as ours"
    if wrong := set(manifest.infinite).difference(_extra(training)):
        name = dict(enumerate(map(known_as, training.tensors.all, count()))).get(min(wrong), min(wrong))
        return f"tensor {name} of its state, which is trained, holds infinities"
    values = manifest.metadata.get("training")
    return training.check(values, offered) or (misfits.why_not(values, offered) if misfits is not None else None)


def _extra(training: TrainingState) -> range:
    """The places of the extra tensors in a state."""
    return range(len(training.parameters), len(training.tensors.all))


class Misfits:
    """The states that were downloaded and did not fit: one of the same kind is not downloaded a third time.

    Most misfits are seen in the manifest, before anything is downloaded. The rest shows when a step is tried. A single
    donor's state may be broken, so a kind has two downloads. States are of one kind if they differ in numbers only: the
    next epoch's is.
    """

    def __init__(self) -> None:
        self._failed: dict[bytes, tuple[int, str]] = {}

    def add(self, values: Any, tensors: Sequence[AnyTensor], why: str) -> None:
        """A downloaded state did not fit."""
        kind = _kind(values, tensors)
        times, _ = self._failed.pop(kind, (0, ""))
        self._failed[kind] = times + 1, why
        bound(self._failed, _REMEMBERED)

    def why_not(self, values: Any, tensors: Sequence[AnyTensor]) -> str | None:
        """The reason why a state like this is not downloaded again; None if it may be."""
        times, why = self._failed.get(_kind(values, tensors), (0, "")) if self._failed else (0, "")
        return f"{why} (it was downloaded {times} times)" if times >= _DOWNLOADS else None


def _kind(values: Any, tensors: Sequence[AnyTensor]) -> bytes:
    forms = [[list(tensor.shape), dtype_name(tensor.dtype)] for tensor in tensors]
    return hashlib.sha256(encode([_without_numbers(values), forms])).digest()


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return [[_without_numbers(key), _without_numbers(item)] for key, item in value.items()]
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    return 0 if isinstance(value, int | float) and not isinstance(value, bool) else value
