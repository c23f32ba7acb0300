"""Nobody writes into another room's objects: what changes an object is a method of it, with a name.

The check reads source alone, so it knows an object by the attribute that is assigned: one that some class of shoal
declares, and none of the room that assigns it. A room is a folder of `src/shoal`; `zero` is one room with all its
folders, and in `run` each file is one. A property that can be set is a method.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shoal"

EXCEPTIONS = {
    ("rpc/endpoint.py", "bulk"): "the Protocol of connections says that their user sets it",
    ("rpc/serving.py", "bulk"): "the same",
}

_OF_LIBRARIES = {"__class__", "data", "grad", "param_groups"}
"""Python and torch have these. `integrations` sets attributes of the libraries that it serves: it is left out."""


def _room(module: Path) -> str:
    if module.parts[0] == "zero":
        return "zero"
    folder = module.parent.as_posix()
    return module.as_posix() if folder == "." or folder.startswith("run") else folder


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Assign() | ast.Delete():
            waiting = list(node.targets)
        case ast.AugAssign() | ast.AnnAssign():
            waiting = [node.target]
        case _:
            return
    while waiting:
        match waiting.pop():
            case ast.Tuple(elts=several) | ast.List(elts=several):
                waiting += several
            case ast.Starred(value=one):
                waiting.append(one)
            case one:
                yield one


def _is_frozen(found: ast.ClassDef) -> bool:
    """Whether its attributes are never assigned: a tuple, a value, a message."""
    decorators = [keyword for each in found.decorator_list if isinstance(each, ast.Call) for keyword in each.keywords]
    frozen = any(keyword.arg == "frozen" for keyword in (*decorators, *found.keywords))
    return frozen or any(ast.unparse(base) in ("NamedTuple", "Message", "Protocol") for base in found.bases)


def _makes(call: ast.expr | None) -> bool:
    """Whether this expression makes an object: a call of a class, or of a function of it that makes one."""
    if not isinstance(call, ast.Call):
        return False
    names = ast.unparse(call.func).split(".")
    return any(name.lstrip("_")[:1].isupper() for name in names) or names[0] == "cls"


class _Module:
    """The attributes that the classes of a module declare, and those that it assigns of other objects."""

    def __init__(self, tree: ast.Module) -> None:
        self.declares, self.setters = set[str](), set[str]()
        self.writes: list[tuple[int, str, str]] = []  # line, attribute, and the whole
        self._read(tree, set(), frozen=False)

    def _read(self, node: ast.AST, made: set[str], *, frozen: bool) -> None:
        """Read a statement, and those within: in a function that has `made` these objects, or in a `frozen` class."""
        match node:
            case ast.ClassDef(body=body):
                frozen = _is_frozen(node)
                for target in () if frozen else (target for each in body for target in _targets(each)):
                    self.declares.add(ast.unparse(target))
            case (
                ast.FunctionDef(name=name, decorator_list=decorators)
                | ast.AsyncFunctionDef(name=name, decorator_list=decorators)
            ):
                made = set(made)
                if f"{name}.setter" in map(ast.unparse, decorators):
                    self.setters.add(name)
        for target in _targets(node):
            match target:
                case ast.Name(id=name) if _makes(getattr(node, "value", None)):
                    made.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                    self.declares.update([name] if not frozen else [])
                case ast.Attribute(value=ast.Name(id=name)) if name in made:
                    pass
                case ast.Attribute(attr=name, lineno=line):
                    self.writes.append((line, name, ast.unparse(target)))
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.stmt | ast.excepthandler | ast.match_case):
                self._read(each, made, frozen=frozen)


def _found(sources: dict[Path, str]) -> dict[tuple[str, str], str]:
    """The writes into objects of other rooms: module and attribute, and the line with what is assigned there."""
    modules = {path: _Module(ast.parse(source)) for path, source in sources.items()}
    declared = defaultdict[str, set[str]](set)
    for path, module in modules.items():
        for name in module.declares:
            declared[name].add(_room(path))
    known = _OF_LIBRARIES.union(*(module.setters for module in modules.values()))
    return {
        (path.as_posix(), attribute): f"{path}:{line}: {whole} = …"
        for path, module in modules.items()
        for line, attribute, whole in module.writes
        if attribute not in known and attribute in declared and _room(path) not in declared[attribute]
    }


def test_nobody_writes_into_the_objects_of_another_room() -> None:
    """Whoever reads a class finds all that changes it."""
    modules = (path.relative_to(SOURCE) for path in SOURCE.rglob("*.py"))
    found = _found({path: (SOURCE / path).read_text("utf-8") for path in modules if path.parts[0] != "integrations"})
    new = [where for key, where in found.items() if key not in EXCEPTIONS]
    assert not new, "give the object a method that says what happens:\n" + "\n".join(sorted(new))
    assert found.keys() == EXCEPTIONS.keys(), "an exception that is needed no more"


@pytest.mark.parametrize(
    ("writer", "line", "told"),
    [
        ("other/b.py", "self.a.count = 1", True),
        ("other/b.py", "a.count += 1", True),
        ("other/b.py", "x, a.count = 1, 2", True),
        ("other/b.py", "a = A(); a.count = 1", False),
        ("other/b.py", "self.count = 1", False),
        ("other/b.py", "a.limit = 1", False),
        ("room/b.py", "a.count = 1", False),
        ("run/b.py", "a.told = 1", True),
    ],
)
def test_a_write_is_found(writer: str, line: str, *, told: bool) -> None:
    """Through any chain of attributes; not into an object that was just made, nor of the same room."""
    sources = {
        "room/a.py": "class A:\n    def __init__(self):\n        self.count = 0\n",
        "run/a.py": "class R:\n    told: int = 0\nclass V(NamedTuple):\n    limit: int\n",
        writer: f"class B:\n    def go(self, a):\n        {line}\n",
    }
    assert bool(_found({Path(path): source for path, source in sources.items()})) is told
