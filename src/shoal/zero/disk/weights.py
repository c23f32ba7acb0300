"""Weights in files, of which each rank reads only the rows that it keeps.

They are in a safetensors file, in a folder as Hugging Face's `save_pretrained` writes it (one file or several, with
`model.safetensors.index.json`), or in a checkpoint of `shoal.zero.save` or of a run.
"""

from __future__ import annotations

import json
import os

from shoal.errors import ConfigError
from shoal.state.disk.folder import MODEL, is_state
from shoal.state.disk.tensor_file import TensorFile
from shoal.zero.disk.foreign import of_files
from shoal.zero.disk.saved import Saved, location, named

__all__ = ["weights_in"]

_PARTS = "model.safetensors.index.json"


def weights_in(path: str | os.PathLike[str]) -> Saved:
    """The weights in a file or folder. Raises `ConfigError` if there are none, or a file is damaged."""
    place = location(path, "weights")
    if place.is_file():
        files = [place]
    elif (place / _PARTS).is_file():
        try:
            parts = set(json.loads((place / _PARTS).read_text())["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{place / _PARTS} is damaged: {error}") from error
        files = [place / each for each in sorted(parts)]
    elif (place / MODEL).is_file():
        files = [place / MODEL]
    elif is_state(place):
        return Saved.at(place)
    else:
        raise ConfigError(
            f"weights must be a safetensors file, a folder with {MODEL} or {_PARTS}, or a folder that "
            f"shoal.zero.save() wrote, and {place} is none of them"
        )
    try:
        with named(place):
            return Saved(place, of_files([TensorFile(each) for each in files]))
    except OSError as error:
        raise ConfigError(f"{place} cannot be read: {error}") from error
