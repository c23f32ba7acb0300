"""What holds for every test: one thread per process, hypothesis from fixed seeds, Ctrl+C, and the size of long tests.

Tests marked `long` are left out by default. `pytest -m long --soak=sample` (the default size) runs them at a size for
every commit, `--soak=full` at their own; how many that is, each test says itself, through the `soak` fixture. Those
marked `long(full=True)` run with `--soak=full` only: others of their kind are in the sample.
"""

from __future__ import annotations

import faulthandler
import gc
import operator
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.situations import Situations

# Before torch is imported, here or in a child process: many peers share few cores, and sums keep one order.
os.environ["OMP_NUM_THREADS"] = "1"

# No deadlines and no complaint about slowness: how long an example takes says more about the machine than the code.
settings.register_profile(
    "default", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("long", settings.get_profile("default"), derandomize=False, max_examples=5_000)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--soak`, `--shard`, `--plan` and `--situations`."""
    parser.addoption(
        "--soak", choices=("sample", "full"), default="sample", help="size of the tests marked long (-m long)"
    )
    parser.addoption("--shard", default="1/1", help="I/N: every Nth of the numbered plans, from the Ith on")
    parser.addoption("--plan", type=int, help="only the numbered plan of this number")
    parser.addoption(
        "--situations",
        choices=("count", "note", "require"),
        default="count",
        help="rare situations in simulations: keep the counts; or add those kept, and fail if one was not reached",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the hypothesis profile (`--hypothesis-profile` comes later and wins); see to it that Ctrl+C works."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell sets it for what it runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(Situations(config.getoption("--situations")))
    settings.load_profile("long" if config.getoption("--soak") == "full" else "default")


def pytest_report_header() -> str:
    """Say what a failure may depend on."""
    return f"PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', 'random')}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A run of the long tests alone reads no file that has none: three of four, which each worker would import."""
    if config.getoption("markexpr") == "long" and collection_path.match("test_*.py"):
        return "mark.long" not in collection_path.read_text() or None
    return None


def _place(item: pytest.Function, parametrize: pytest.Mark) -> int:
    """The place of this item's values among those of one `parametrize`."""
    names, listed = parametrize.args
    names = [each.strip() for each in names.split(",")] if isinstance(names, str) else names
    ours = [item.callspec.params[name] for name in names]
    for place, each in enumerate(listed):
        values = each.values if isinstance(each, type(pytest.param(0))) else each if len(names) > 1 else (each,)
        if all(map(operator.is_, values, ours)):
            return place
    raise pytest.UsageError(f"{item.nodeid} is marked one_in: give its parametrize lists")


def _is_in_sample(item: pytest.Item) -> bool:
    """Whether every commit plays this case of a test that is marked `one_in(count)`.

    That is so if the places of its values, each in its own list, add up to a multiple of `count`. Each value is in such
    a case if another list has at least `count` values.
    """
    mark = item.get_closest_marker("one_in")
    if mark is None:
        return True
    assert isinstance(item, pytest.Function)
    return sum(_place(item, each) for each in item.iter_markers("parametrize")) % int(mark.args[0]) == 0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--soak` does, and mark everything in tests/integration as such.

    Several workers (`-n 2`) start the processes of two tests of tests/integration at a time: one of ranks, which are
    forked from a process of their own, and one of the others. A file of short tests belongs to one worker: to hand out
    5,000 tests one by one took a minute.
    """
    for item in items:
        if not _is_in_sample(item):
            item.add_marker(pytest.mark.long(full=True))
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"workers (-n 2) give this test other names, with other addresses: {named[0]}")
    if config.getoption("--soak") == "sample":
        full = {item for item in items if any(mark.kwargs.get("full") for mark in item.iter_markers("long"))}
        config.hook.pytest_deselected(items=list(full))
        items[:] = [item for item in items if item not in full]
    integration, sim = Path(__file__).parent / "integration", Path(__file__).parent / "sim"
    for item in items:
        group = None if item.get_closest_marker("long") else f"{item.path.parent.name}/{item.path.stem}"
        if sim in item.path.parents:
            # The loop of a simulation takes the exception of a signal for one of a callback, and goes on for ever.
            item.add_marker(pytest.mark.timeout(method="thread"))
        if integration in item.path.parents:
            item.add_marker(pytest.mark.integration)
            group = "ranks" if hasattr(getattr(item, "module", None), "Ranks") else "peers"
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


def pytest_collection_finish() -> None:
    """Tests that call `gc.collect` need not look through all modules: with torch imported that takes half a second.

    Of simulations, nearly a tenth of the time went into collections. What they leave is small, and goes a bit later.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.fixture(autouse=True)
def _no_dump_of_long_tests(request: pytest.FixtureRequest) -> None:
    """`faulthandler_timeout` shows where a test hangs before its limit ends it; those marked `long` take their time."""
    if request.node.get_closest_marker("long") is not None:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """`soak(sample, full)` is how many plans, seeds or rounds a long test runs under the chosen `--soak`."""
    full_size = request.config.getoption("--soak") == "full"
    return lambda sample, full: full if full_size else sample


@pytest.fixture
def numbers(request: pytest.FixtureRequest) -> Callable[[int], Sequence[int]]:
    """`numbers(count)` are those of the plans 0 to count - 1 that this run plays, by `--shard` and `--plan`."""
    plan, shard = request.config.getoption("--plan"), str(request.config.getoption("--shard"))
    number, _, of = shard.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise pytest.UsageError(f"--shard must be I/N with I from 1 to N, got {shard!r}")
    return lambda count: range(int(number) - 1, count, int(of)) if plan is None else [plan]
