"""A state on disk: one kind of folder for the checkpoints of a run and of `shoal.zero`.

`folder` has the format, and finds any range of any tensor in it; `tensor_file` has one file of it; `old` reads the
folders of earlier versions. The names, the number and the age of checkpoints are their owners' matter (`run.disk`,
`zero.checkpoint`).
"""

from shoal.state.disk.folder import (
    FORMAT,
    INDEX,
    MODEL,
    SavedState,
    SavedTile,
    finish,
    index_of,
    is_state,
    part_of,
    read_index,
    read_state,
    seal,
    write_index,
)
from shoal.state.disk.old import Index
from shoal.state.disk.tensor_file import Damaged, Draft, Kind, Missing, TensorFile, flush

__all__ = [
    "FORMAT",
    "INDEX",
    "MODEL",
    "Damaged",
    "Draft",
    "Index",
    "Kind",
    "Missing",
    "SavedState",
    "SavedTile",
    "TensorFile",
    "finish",
    "flush",
    "index_of",
    "is_state",
    "part_of",
    "read_index",
    "read_state",
    "seal",
    "write_index",
]
