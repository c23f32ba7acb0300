"""For the build of the package: the README as an index shows it, where relative links lead nowhere."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCE = "Source"
"""The entry of `project.urls` that the links of the README are relative to."""


def with_whole_links(text: str, source: str) -> str:
    """The text of the README with links and pictures that lead to this repository from anywhere."""
    return re.sub(
        r"(!?)(\[[^\]]*\]\()(?!https?:|#)([^)]+\))",
        lambda found: f"{found[1]}{found[2]}{source}/{'raw' if found[1] else 'blob'}/main/{found[3]}",
        text,
    )


class Readme(MetadataHookInterface):
    """Gives the package its description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = with_whole_links(text, metadata["urls"][SOURCE])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
