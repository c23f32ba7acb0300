"""The rows of a batch, as far as its tensors tell them.

Where rows and samples may be two things, the words of why that is so come in place of a number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from shoal.base.nested import within
from shoal.train.batch_layout import alike, looked

__all__ = ["rows_in", "rows_of_call"]

_FLAT = ("position_ids", "cu_seq_lens_q", "cu_seqlens", "seq_idx")
"""Who gives one row and one of these has laid several sequences end to end."""


def rows_of_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | str:
    """The rows of what a model was given; or why they are not known."""
    return rows_in({**dict(enumerate(args)), **kwargs})


def rows_in(batch: Any, *, collated: bool = False) -> int | str:
    """The samples of a batch: the rows that its tensors have in common; or why they are not known.

    Args:
        batch: a tensor, or tensors in mappings, lists, tuples and dataclasses.
        collated: whether its lists hold the fields of samples, as torch's `default_collate` makes them. Otherwise a
            list of tensors of one sort may as well hold one tensor for each sample.
    """
    return looked(_rows_in, batch, collated=collated)


def _rows_in(batch: Any, *, collated: bool) -> int | str:
    counts = list(_counts(batch, collated=collated))
    whole = [count for count in counts if isinstance(count, int)]
    if len(set(whole)) > 1 and (labels := _labels(batch)) is not None and whole.count(labels) > 1:
        return labels  # one for each sample: other tensors may have parts of samples in their rows
    if len(set(whole)) > 1:
        sizes = ", ".join(map(str, sorted(set(whole))))
        return f"the tensors that the model was given have different numbers of rows ({sizes})"
    if not whole:
        return next((count for count in counts if isinstance(count, str)), "the model was given no tensor with rows")
    if whole[0] == 1 and any(name in each for each in _mappings(batch) for name in _FLAT):
        return "the model was given one row, in which several sequences may lie end to end"
    return whole[0]


def _counts(given: Any, *, collated: bool) -> Iterator[int | str]:
    if isinstance(given, torch.Tensor):
        if given.ndim:
            yield given.size(0)
    elif isinstance(given, PackedSequence):
        yield int(given.batch_sizes[0])
    elif isinstance(given, list | tuple) and given and all(isinstance(each, Mapping) for each in given):
        yield len(given)
    elif isinstance(given, list | tuple) and not collated and not hasattr(given, "_fields") and alike(given):
        yield "the model was given a list of tensors, which may be one for each sample"
    else:
        for each in within(given):
            yield from _counts(each, collated=collated)


def _labels(batch: Any) -> int | None:
    for each in _mappings(batch):
        if isinstance(labels := each.get("labels"), torch.Tensor) and labels.ndim:
            return labels.size(0)
    return None


def _mappings(batch: Any) -> Iterator[Mapping[Any, Any]]:
    if isinstance(batch, Mapping):
        yield batch
        yield from (each for each in batch.values() if isinstance(each, Mapping))
