"""The command that an error names for an extra: it installs this shoal, and asks no index for it."""

from __future__ import annotations

import json
import re
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.base.extras import install_command

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        ({"dir_info": {"editable": True}, "url": "file:///home/me/my%20shoal"}, "-e '/home/me/my shoal[demo]'"),
        (
            {"archive_info": {}, "url": "file:///tmp/shoal-1.0-py3-none-any.whl"},
            "'shoal[demo] @ file:///tmp/shoal-1.0-py3-none-any.whl'",
        ),
        (
            {"vcs_info": {"vcs": "git", "commit_id": "1f"}, "url": "https://example.org/shoal"},
            "'shoal[demo] @ git+https://example.org/shoal'",
        ),
        (None, "'shoal[demo]'"),
    ],
)
def test_shoal_is_installed_again_from_where_it_came(
    origin: object, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its folder, its wheel or its repository; from an index only if it came from one."""
    found = SimpleNamespace(read_text=lambda _name: json.dumps(origin) if origin else None)
    monkeypatch.setattr(Distribution, "from_name", lambda _name: found)
    assert install_command("demo") == f"pip install {command}"


def test_sources_that_were_not_installed_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH leads to them."""

    def missing(_name: str) -> Distribution:
        raise PackageNotFoundError

    monkeypatch.setattr(Distribution, "from_name", missing)
    assert install_command("demo") == "pip install -e '.[demo]' in the folder of shoal"


def test_no_other_place_says_how_shoal_is_installed() -> None:
    """Five errors named an index that has no shoal."""
    says = [path.name for path in (ROOT / "src").rglob("*.py") if re.search(r"install[^\n]*shoal\[", path.read_text())]
    assert says == ["extras.py"]
