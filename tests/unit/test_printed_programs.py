"""Each program that the project prints can be started again after its run has ended.

A run that is over is over from the first look: `while not swarm.finished:` makes no pass then, and nothing that only a
pass binds is there after it.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT / "src" / "shoal" / "cli" / "templates"
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While


def printed() -> Iterator[tuple[str, str]]:
    """Each program, with the place where it stands."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^( *)```py(?:thon)?\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 2
            yield f"{page.relative_to(ROOT)}:{line}", dedent(block[2]).replace(", ...)", ")")
    for script in [*sorted((ROOT / "examples").rglob("*.py")), *sorted(TEMPLATES.glob("*.py.txt"))]:
        yield f"{script.relative_to(ROOT)}", script.read_text(encoding="utf-8")


def unbound_after_loops(program: str) -> list[str]:
    """The names that a program reads after a loop, and that only a pass of the loop binds."""
    tree = ast.parse(program)
    scopes = [each for each in ast.walk(tree) if isinstance(each, Scope)]
    return [name for scope in scopes for name in _unbound(scope)]


def _unbound(scope: Scope) -> Iterator[str]:
    nodes = list(_within(scope.body))
    bound = [(name, node) for node in nodes for name in _binds(node)]
    arguments = [] if isinstance(scope, ast.Module) else ast.walk(scope.args)
    given = {each.arg for each in arguments if isinstance(each, ast.arg)}
    for loop in (each for each in nodes if isinstance(each, Loop) and not _makes_a_pass(each)):
        inside = set(map(id, _within([*loop.body, *([] if isinstance(loop, ast.While) else [loop.target])])))
        before = {name for name, node in bound if _place(node) < _place(loop)} | given
        passes = {name for name, node in bound if id(node) in inside} - before
        after = [each for each in nodes if _place(each) > (loop.end_lineno or 0, loop.end_col_offset or 0)]
        for node in sorted((each for each in after if isinstance(each, ast.Name)), key=_place):
            again = any(name == node.id and id(each) not in inside and each in after for name, each in bound)
            if isinstance(node.ctx, ast.Load) and node.id in passes and not again:
                yield f"line {node.lineno}: {node.id}"


def _makes_a_pass(loop: Loop) -> bool:
    """`for number in range(20)`: it always does."""
    return isinstance(loop, ast.For) and bool(re.fullmatch(r"range\([1-9]\d*\)", ast.unparse(loop.iter)))


def _within(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """These and all in them that runs in the same scope, when they do."""
    for node in nodes:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _within(list(ast.iter_child_nodes(node)))


def _binds(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(each.asname or each.name).split(".")[0] for each in node.names]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else []


def _place(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


PRINTED = dict(printed())
WAYS = {
    ("sys.argv[1:]", "/ip4/0.0.0.0/tcp/0"),
    ("sys.argv[1:]", "/ip4/0.0.0.0/tcp/4000"),  # of a helper, which others name
    ("invites", "/ip4/0.0.0.0/tcp/0"),  # after the name of its folder
    ("args.peers", "/ip4/{args.host}/tcp/{args.port}"),  # 0.0.0.0 and 0 if nothing else is given
}


def test_there_are_programs() -> None:
    """With a loop that may make no pass, on the pages, in the examples and in the templates."""
    loops = [place for place, program in PRINTED.items() if ".finished" in program]
    assert {place.split(":")[0].split("/")[0] for place in loops} >= {"docs", "examples", "src"}


@pytest.mark.parametrize("place", PRINTED)
def test_a_printed_program_can_be_started_after_the_end_of_its_run(place: str) -> None:
    """It ended with NameError, before `dht.shutdown()`: its last line printed the loss of a pass that was not made."""
    assert unbound_after_loops(PRINTED[place]) == []


def test_programs_join_whoever_they_are_given_and_listen_for_other_machines() -> None:
    """In one way, whatever else they do: tests/integration/test_two_machines.py runs them on two machines."""
    found = 0
    for place, program in PRINTED.items():
        for node in ast.walk(ast.parse(program)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "shoal.DHT"):
                continue
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            if given["host_maddrs"] == "place":
                (given["host_maddrs"],) = re.findall(r"^ +place = (.*?)(?:  #.*)?$", program, re.MULTILINE)
            joins = given.pop("initial_peers"), given.pop("host_maddrs").strip("'\"f")
            assert joins in WAYS, place
            assert given.items() - {
                ("identity_path", "f'{folder}/peer.key'"),
                ("peers_file", "f'{folder}/peers.txt'"),
            } == {("start", "True")}, place
            found += 1
    assert found > 20


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("while not s.finished:\n    loss = f()\nprint(loss)", ["line 3: loss"]),
        ("while not s.finished:\n    loss = f()\nprint(f'{loss:.3f}')", ["line 3: loss"]),
        ("for x in data:\n    loss = f(x)\nprint(x, loss)", ["line 3: x", "line 3: loss"]),
        ("loss = None\nwhile not s.finished:\n    loss = f()\nprint(loss)", []),
        ("while not s.finished:\n    loss = f()\n    print(loss)\nprint(1)", []),
        ("while not s.finished:\n    loss = f()\nloss = 1\nprint(loss)", []),
        ("for number in range(20):\n    loss = f()\nprint(number, loss)", []),
        ("for number in range(n):\n    loss = f()\nprint(number)", ["line 3: number"]),
        ("def main(loss):\n    while not s.finished:\n        loss = f()\n    print(loss)", []),
        ("def main():\n    while not s.finished:\n        loss = f()\n    print(loss)", ["line 4: loss"]),
    ],
)
def test_the_look_at_a_program_finds_it(program: str, found: list[str]) -> None:
    """What is read after a loop, at the top and in functions; what was bound before is no mistake."""
    assert unbound_after_loops(program) == found


MOST_BATCHES = 13_000
"""A batch of a toy model takes about 2.5 ms of a processor with all that shoal does: these take half a minute."""

NOT_TOYS = ("examples/albert/run_trainer.py",)  # it trains for as long as its options say


def trains(program: str) -> bool:
    """Whether it has batches, in a loop that goes on until the run is over, or in a Trainer."""
    return "shoal.DHT(" in program and ("Trainer(" in program or (".finished" in program and ".backward(" in program))


def batches_alone(program: str) -> float:
    """The number of batches that a program computes as it is printed, if it is alone in its run."""
    tree, known = ast.parse(program), dict[str, ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            known |= {target.id: value for target, value in pairs if isinstance(target, ast.Name)}

    def number(node: ast.AST) -> float:
        node = known[node.id] if isinstance(node, ast.Name) else node
        # The last one of `int(os.environ.get("EPOCHS", "300"))`.
        return float([each.value for each in ast.walk(node) if isinstance(each, ast.Constant)][-1])  # type: ignore[arg-type]

    given: dict[str, float] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).split(".")[-1]
        asked = {each.arg: each.value for each in call.keywords if each.arg is not None}
        if name in ("announce_end", "Synchronous") and call.args:
            asked[name] = call.args[0]
        if name == "DiLoCo":
            asked = {"between_merges": asked["every"]}
        for argument, value in asked.items():
            if argument in NUMBERS:
                what = NUMBERS[argument]
                given[what] = min(number(value), given.get(what, math.inf))  # batches to test with are larger
    return given["steps"] * (given["every"] if "every" in given else given["target"] / given["batch"])


NUMBERS = {
    "announce_end": "steps",
    "max_steps": "steps",
    "Synchronous": "target",
    "target_batch_size": "target",
    "between_merges": "every",
    "batch_size_per_step": "batch",
    "per_device_train_batch_size": "batch",
    "batch_size": "batch",
}


@pytest.mark.parametrize("place", [place for place, program in PRINTED.items() if trains(program)])
def test_a_program_as_it_is_printed_ends_within_a_minute(place: str) -> None:
    """The first one that people run took two, on a machine that was busy: by its batches, and the threads of each."""
    program = PRINTED[place]
    assert "torch.set_num_threads(1)" in program or place in NOT_TOYS
    assert place in NOT_TOYS or batches_alone(program) <= MOST_BATCHES
