"""The package as users see it: a handful of names, and nothing heavy before it is used."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shoal

PUBLIC = {
    "Address",
    "ConfigError",
    "DHT",
    "DecentralizedAverager",
    "GradScaler",
    "GradientAverager",
    "Invite",
    "Optimizer",
    "PeerID",
    "PowerSGDGradientAverager",
    "ProgressTracker",
    "RoundFailed",
    "SchemaMismatch",
    "ShoalError",
    "StateUnavailable",
    "TrainingAverager",
    "TrainingStateAverager",
    "__version__",
    "compression",
    "data",
    "get_dht_time",
    "leave_on_sigterm",
    "read_run",
    "sim",
    "strategies",
    "zero",
}
HEAVY = {"asyncio", "cryptography", "msgspec", "numpy", "torch"}


def modules_after(code: str) -> set[str]:
    """Run `code` in a new interpreter and return the names of all modules that are loaded at its end."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    return set(json.loads(done.stdout))


def type_checking_imports() -> dict[str, str]:
    """The names that type checkers see in the package, each with the module that it is imported from."""
    tree = ast.parse(Path(shoal.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.name: str(node.module) for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def test_import_loads_nothing_heavy() -> None:
    """`import shoal` loads neither torch nor any other package that takes time."""
    loaded = modules_after("import shoal")
    assert "shoal" in loaded
    assert not HEAVY & loaded


def test_names_and_errors_do_without_torch() -> None:
    """Addresses, invites and exceptions can be used without loading torch."""
    loaded = modules_after("import shoal\nshoal.PeerID, shoal.Address, shoal.Invite, shoal.ShoalError")
    assert "shoal.base.peer" in loaded
    assert "torch" not in loaded


def test_a_peer_without_tensors_does_without_torch() -> None:
    """`shoal dht` and `shoal status` are there two seconds earlier, and with 200 MB less."""
    loaded = modules_after("import shoal\nwith shoal.DHT(start=True): shoal.read_run")
    assert "shoal.averaging.core" in loaded
    assert "torch" not in loaded


def test_the_first_round_of_averaging_imported_dynamo() -> None:
    """1.5 s of CPU in each peer's first `step`: sixteen peers of one machine had their first group after 16 s."""
    loaded = modules_after(
        "import shoal, torch\n"
        "with shoal.DHT(start=True) as dht:\n"
        "    with shoal.DecentralizedAverager([torch.ones(2)], dht, start=True, prefix='p') as averager:\n"
        "        try: averager.step(timeout=0.1)\n"
        "        except shoal.RoundFailed: pass"
    )
    assert "shoal.averaging.matchmaking" in loaded
    assert "torch._dynamo" not in loaded


def test_public_names_are_these_and_no_others() -> None:
    """What is public is decided, not grown: a new name is added here too."""
    assert set(shoal.__all__) == PUBLIC
    assert len(shoal.__all__) == len(PUBLIC)
    assert set(dir(shoal)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_loads(name: str) -> None:
    """Each public name leads to the object that its home module has under that name."""
    value = getattr(shoal, name)
    home = type_checking_imports().get(name)
    if home is None:
        assert name == "__version__"
    elif home == "shoal":
        assert value is sys.modules[f"shoal.{name}"]
    else:
        assert value is getattr(sys.modules[home], name)


def test_type_checkers_see_what_users_get() -> None:
    """The names imported for type checkers are the public ones."""
    assert set(type_checking_imports()) == PUBLIC - {"__version__"}


def test_no_module_stands_in_the_place_of_a_public_name() -> None:
    """An import of the module would put it there: `shoal.zero.shard` was a module then, which cannot be called."""
    root = Path(shoal.__file__).parent
    taken = []
    for door in sorted(root.rglob("__init__.py")):
        package = importlib.import_module(".".join(("shoal", *door.parent.relative_to(root).parts)))
        modules = {each.stem for each in door.parent.glob("*.py")} | {each.name for each in door.parent.iterdir()}
        public = modules & set(getattr(package, "__all__", ()))
        taken += [f"{door.parent.name}.{name}" for name in public if not isinstance(getattr(package, name), ModuleType)]
    assert taken == []


def test_unknown_name_is_an_attribute_error_that_names_it() -> None:
    """A misspelt name fails as it does in any module."""
    with pytest.raises(AttributeError, match="'Optimiser'"):
        _ = shoal.Optimiser  # type: ignore[attr-defined]


def test_an_index_can_follow_the_links_of_the_readme() -> None:
    """Its relative links and 3 pictures led nowhere there."""
    root, names = Path(__file__).parents[2], dict[str, Any]()
    build = (root / "hatch_build.py").read_text(encoding="utf-8")  # it imports hatchling, which is not here
    exec(build[build.index("def with_whole_links") : build.index("class Readme")], {"re": re}, names)
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    text = names["with_whole_links"]((root / "README.md").read_text(encoding="utf-8"), urls["Source"])
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20
    assert [each for each in targets if not each.startswith(("https://", "#"))] == []
    assert f"{urls['Source']}/raw/main/docs/img/report.png" in targets
    assert f"{urls['Source']}/blob/main/docs/why/performance.md#a-storm" in targets


def test_the_lowest_torch_is_that_of_all_tests() -> None:
    """It was said to be 2.6, with which all stages of ZeRO died: no test ran on it."""
    root = Path(__file__).parents[2]
    needs = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (lowest,) = (each.removeprefix("torch>=") for each in needs if each.startswith("torch"))
    pinned = (root / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (tested,) = (each.removeprefix("torch==") for each in pinned if each.startswith("torch=="))
    assert tested.startswith(f"{lowest}.")
