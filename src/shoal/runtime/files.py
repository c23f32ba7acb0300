"""Files that are replaced as a whole: a reader, even after a kill, sees the old file or the new one."""

from __future__ import annotations

from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` beside the file, and rename that to it.

    Raises:
        OSError: it cannot be written; the old file stands.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
