"""The command that installs shoal with one of its extras, from where this shoal came."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError
from urllib.parse import urlsplit
from urllib.request import url2pathname

__all__ = ["install_command"]


def install_command(extra: str) -> str:
    """The command that installs shoal with this extra, for people.

    A checkout or a wheel is named by its place: an index may have no shoal, or that of somebody else. See PEP 610.
    """
    try:
        origin = json.loads(Distribution.from_name("shoal").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # it is imported from its sources, and was not installed
        return f"pip install -e '.[{extra}]' in the folder of shoal"
    if "url" not in origin:
        return f"pip install 'shoal[{extra}]'"
    if "dir_info" in origin:
        return f"pip install -e '{url2pathname(urlsplit(origin['url']).path)}[{extra}]'"
    kind = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f"pip install 'shoal[{extra}] @ {kind}{origin['url']}'"
