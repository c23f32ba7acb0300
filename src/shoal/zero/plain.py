"""A checkpoint of plain torch in one file: the state dictionaries of a model before sharding, and of its optimizer."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.errors import ConfigError
from shoal.zero.parameters import Order, Piece, flat
from shoal.zero.saved import Range, exact, typed

__all__ = ["Whole"]

_UNREADABLE = (
    OSError,
    RuntimeError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    KeyError,
    TypeError,
    AttributeError,
)


class Whole:
    """A checkpoint of plain torch in one file, as `Saved` gives those in pieces.

    Args:
        path: the path of the file: a dictionary of ``model`` and ``optimizer``, their state dictionaries.
        groups: names of the trained parameters in each of the optimizer's groups: plain torch numbers them.
        listed: the same with those that are frozen: as the optimizer was given them, there or here.
        orders: in which order whoever asks counts the values of a parameter.

    Raises:
        ConfigError: it is no checkpoint, or its optimizer has other groups.
    """

    def __init__(
        self,
        path: Path,
        groups: Sequence[Sequence[str]],
        listed: Sequence[Sequence[str]],
        orders: Mapping[str, Order],
    ) -> None:
        self._path, self._orders = path, orders
        try:
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            if not isinstance(found, dict):
                raise TypeError(f"it holds a {type(found).__name__}")
            self._weights: dict[str, Any] = found["model"]
            state, entries = found["optimizer"]["state"], found["optimizer"]["param_groups"]
            numbers = [group["params"] for group in entries]
            extra = found.get("extra", {})
            self.identity = _identity(path)
        except _UNREADABLE as error:
            raise ConfigError(f"{path} is no whole checkpoint, of a model and its optimizer: {error}") from error
        sizes = [len(each) for each in numbers]
        fitting = [each for each in (groups, listed) if [len(group) for group in each] == sizes]
        if not fitting:
            raise ConfigError(f"the optimizer in {path} has other groups: give shard() those that it was saved with")
        in_order = [name for group in fitting[0] for name in group]
        by_number = dict(zip((each for group in numbers for each in group), in_order, strict=True))
        self._state = {by_number[key]: entry for key, entry in state.items() if key in by_number}
        names = [name for group in groups for name in group]
        # A single value that is not a value of the parameter; of a scalar it cannot be told by its shape.
        self._counters = {"step"} | {
            key
            for name, entry in self._state.items()
            for key, value in entry.items()
            if name in self._weights and self._weights[name].ndim and not torch.as_tensor(value).ndim
        }
        # Tied parameters come under each of their names: one is trained, the others are its aliases.
        trained = {self._storage(name) for name in names if name in self._weights}
        self.index: dict[str, Any] = {
            "parameters": {name: {"shape": list(self._weights[name].shape)} for name in names if name in self._weights},
            "others": [
                name
                for name, value in self._weights.items()
                if name not in names and self._storage(name) not in trained and torch.is_tensor(value)
            ],
            "groups": [
                {"parameters": list(group), "settings": {key: each for key, each in entry.items() if key != "params"}}
                for group, entry in zip(groups, entries, strict=True)
            ],
            "optimizer": None,
            "common": {key: typed(value) for key, value in state.items() if isinstance(key, str)},
            "numbers": {
                key: type(value).__name__
                for entry in self._state.values()
                for key, value in entry.items()
                if isinstance(value, bool | int | float)
            },
            "extra": extra,
        }

    def _storage(self, name: str) -> object:
        value = self._weights[name]
        return (value.untyped_storage().data_ptr(), value.storage_offset()) if torch.is_tensor(value) else name

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Does nothing: all values are in memory already."""
        yield

    def other(self, name: str) -> torch.Tensor:
        """A frozen parameter or a buffer."""
        tensor: torch.Tensor = self._weights[name]
        return tensor

    def values(self, wanted: Piece | Range) -> torch.Tensor:
        """The parameter's values of a range."""
        tensor: torch.Tensor = self._weights[wanted.name]
        return flat(tensor, self._orders.get(wanted.name))[wanted.start : wanted.stop]

    def statistics(self, wanted: Piece | Range) -> dict[str, torch.Tensor]:
        """The optimizer's of a range."""
        found, shape = {}, self._weights[wanted.name].shape
        for key, value in self._state.get(wanted.name, {}).items():
            tensor = value if isinstance(value, torch.Tensor) else exact(value)
            if not tensor.ndim and (shape or key in self._counters):
                found[key] = tensor.clone()  # each piece counts its own steps, in place
            elif tensor.shape == shape:
                found[key] = flat(tensor, self._orders.get(wanted.name))[wanted.start : wanted.stop]
            else:
                raise ConfigError(
                    f"the optimizer in {self._path} keeps {key!r} of {wanted.name} with shape {tuple(tensor.shape)}, "
                    f"and the parameter has {tuple(shape)}: it was built of other parameters, or in another order"
                )
        return found


def _identity(path: Path) -> str:
    """The checksums of all entries in a file that `torch.save` wrote."""
    with zipfile.ZipFile(path) as archive:
        entries = [(each.file_size, each.CRC) for each in archive.infolist()]
    return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]
