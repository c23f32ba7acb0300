"""Files that are replaced as a whole: a reader sees the old file or the new one, even after a kill."""

from __future__ import annotations

from pathlib import Path

__all__ = ["replace_file"]


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to a new file, and give it the name of the old one.

    Raises:
        OSError: the file cannot be written; the old one stands.
    """
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
