"""The programs of the pages in docs/start and docs/how-to, as readers run them: two peers on one machine."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.integration.workers import Talk

ROOT = Path(__file__).parents[2]

PROGRESS = re.compile(r"epoch \d+ of").match

BEGIN = """
print("here", flush=True)
input()
while len(swarm.status().peers) < 2:
    time.sleep(0.01)
"""

PEER = """
import os, runpy, sys
os.chdir({folder!r})
sys.argv[1:] = input().split()
runpy.run_path({program!r}, run_name="__main__")
"""


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


LOOP = "docs/start/plain-loop.md"
HIVEMIND = "docs/start/from-hivemind.md"


def program(page: str) -> str:
    """The program of a page."""
    (code,) = python_blocks(page)
    return code


def checkpoints() -> str:
    """The program of the loop, which then saves and loads, and leaves, as other pages print it."""
    loop, leaves = program(LOOP), "dht.shutdown()  # shoal\n"
    assert loop.endswith(leaves)
    pages = [f"docs/how-to/{name}.md" for name in ("checkpoints", "torch-checkpoints", "end-a-run")]
    return "\n".join([loop.removesuffix(leaves), *(block for page in pages for block in python_blocks(page))])


def peer(folder: Path, code: str, *options: str, fresh: bool = False, library: str | None = None) -> Talk:
    """A process that runs this in a folder of its own, once it has got its arguments in a line."""
    folder.mkdir()
    (folder / "peer.py").write_text(code, encoding="utf-8")
    started = PEER.format(folder=str(folder), program=str(folder / "peer.py"))
    return Talk([sys.executable, *options, "-c", started], fresh=fresh, library=library, OMP_NUM_THREADS="1")


def last_lines_of_two(folder: Path, code: str) -> list[str]:
    """Two peers run the program, which prints its invite first; their last lines. Warnings are errors."""
    with peer(folder / "first", code, "-W", "error") as first:
        first.write("")
        invite = first.line().strip()
        with peer(folder / "second", code, "-W", "error") as second:
            second.write(invite)
            second.line()  # its invite
            said = [talk.rest()[-1] for talk in (first, second)]
            assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    return said


@pytest.mark.parametrize(
    ("code", "last"),
    [
        (program(LOOP), "epoch 8: loss"),
        pytest.param(program(HIVEMIND), "epoch 8: loss", marks=pytest.mark.long),
        pytest.param(checkpoints(), "resumed at epoch 8", marks=pytest.mark.long),
    ],
    ids=["plain loop", "from hivemind", "checkpoints"],
)
def test_two_peers_run_the_program_of_a_page(tmp_path: Path, code: str, last: str) -> None:
    """With fewer, smaller epochs, which begin when both are there: both end by themselves at one epoch."""
    for printed, shorter in (
        ("swarm.announce_end(40)", f"{BEGIN}swarm.announce_end(8)"),
        ("target_batch_size=4096", "target_batch_size=512"),
    ):
        assert code.count(printed) == 1
        code = code.replace(printed, shorter)
    with (
        peer(tmp_path / "second", code, "-W", "error") as second,
        peer(tmp_path / "first", code, "-W", "error", fresh=code == program(LOOP)) as first,
    ):
        first.write("")
        second.write(first.line().strip())
        second.line()  # its invite
        for talk in (first, second):
            while talk.line() != "here\n":  # who is connected may come before
                pass
        for talk in (first, second):
            talk.write("begin")
        said = [talk.rest() for talk in (first, second)]
        assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    ends = [[line for line in lines if " is gone" not in line][-1] for lines in said]  # the other one may be told of
    assert all(end.startswith(last) for end in ends), said
    for lines in said:
        assert any(line.startswith("epoch 8: loss") for line in lines), lines  # checkpoints.md goes on from there
        assert re.match(r"epoch \d+ of 8, 2 peers, [\d,]+ samples/s, loss \d", next(filter(PROGRESS, lines))), lines


@pytest.mark.long
def test_two_trainers_run_the_program_of_the_page(tmp_path: Path) -> None:
    """As it stands there; they begin when both are there. The schedule ends with the run, and so do both Trainers."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    code = program("docs/start/trainer.md")
    assert code.count("trainer.train(") == 1
    code = code.replace("trainer.train(", "print('here', flush=True)\ninput()\ntrainer.train(")
    with (
        peer(tmp_path / "second", code, library="transformers") as second,
        peer(tmp_path / "first", code, library="transformers") as first,
    ):
        first.write("")
        second.write(first.line().strip())
        second.line()  # its invite
        for talk in (first, second):
            while talk.line() != "here\n":
                pass
        for talk in (first, second):
            talk.write("begin")
        said = [talk.rest() for talk in (first, second)]
        assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    for lines in said:
        assert lines[-1] == "epoch 100, learning rate 0.0e+00\n"
        assert any("swarm_epoch" in line for line in lines)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_group_of_two_and_a_process_run_the_program_of_the_page(tmp_path: Path) -> None:
    """As it stands there, with fewer epochs: `torchrun` with two ranks, and one with a single rank, train together."""
    code = program("docs/start/several-gpus.md")
    assert code.count("swarm.announce_end(100)") == 1
    code = code.replace("swarm.announce_end(100)", "swarm.announce_end(4)\nwait_for_another()")
    wait = """
def wait_for_another():
    while swarm.peer is not None and len(swarm.peer.status().peers) < 2:
        threading.Event().wait(0.01)
"""
    (tmp_path / "peer.py").write_text("import threading\n" + code.replace("\nswarm.announce", wait + "swarm.announce"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    first = Talk([*command, "2", str(tmp_path / "peer.py")], OMP_NUM_THREADS="1")
    with first, Talk([*command, "1", str(tmp_path / "peer.py"), first.line().strip()], OMP_NUM_THREADS="1") as second:
        said = [talk.rest() for talk in (first, second)]
        assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    # Two ranks write to one pipe: their last lines may share one.
    ends = [re.findall(r"rank \d: epoch \d+(?=, loss)", "".join(lines)) for lines in said]
    assert [sorted(each) for each in ends] == [["rank 0: epoch 4", "rank 1: epoch 4"], ["rank 0: epoch 4"]]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("library", "page", "end", "begins"),
    [
        ("lightning", "docs/start/lightning.md", "max_steps=200", "trainer.fit("),
        ("accelerate", "docs/how-to/accelerate.md", "announce_end(100)", "swarm.announce_end("),
    ],
)
def test_two_peers_run_the_program_of_a_library(tmp_path: Path, library: str, page: str, end: str, begins: str) -> None:
    """As it stands there, with fewer steps, which begin when both are there: both end by themselves at one epoch."""
    pytest.importorskip(library)
    code = program(page)
    assert code.count(end) == code.count(f"\n{begins}") == 1
    code = code.replace(f"\n{begins}", f"\nprint('here', flush=True)\ninput()\n{begins}")
    code = code.replace(end, re.sub(r"\d+", "10", end))
    known = {"accelerate": "transformers"}.get(library, library)
    with (
        peer(tmp_path / "second", code, library=known) as second,
        peer(tmp_path / "first", code, library=known) as first,
    ):
        first.write("")
        second.write(first.line().strip())
        second.line()  # its invite
        for talk in (first, second):
            while talk.line() != "here\n":
                pass
        for talk in (first, second):
            talk.write("begin")
        said = [talk.rest() for talk in (first, second)]
        assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
    assert [lines[-1] for lines in said] == ["epoch 10\n"] * 2
