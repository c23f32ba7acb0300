"""The programs of the pages in docs/start and docs/how-to, as readers run them on one machine.

Here is that of the loop, of which each line counts, and each warning is an error. `test_two_machines.py` runs them all.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

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


def peer(folder: Path, code: str, *options: str, fresh: bool = False) -> Talk:
    """A process that runs this in a folder of its own, once it has got its arguments in a line."""
    folder.mkdir()
    (folder / "peer.py").write_text(code, encoding="utf-8")
    started = PEER.format(folder=str(folder), program=str(folder / "peer.py"))
    return Talk([sys.executable, *options, "-c", started], fresh=fresh, OMP_NUM_THREADS="1")


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


def test_two_peers_run_the_program_of_the_loop(tmp_path: Path) -> None:
    """With fewer, smaller epochs, which begin when both are there: both end by themselves at one epoch."""
    code = program(LOOP)
    for printed, shorter in (
        ("swarm.announce_end(40)", f"{BEGIN}swarm.announce_end(8)"),
        ("target_batch_size=4096", "target_batch_size=512"),
    ):
        assert code.count(printed) == 1
        code = code.replace(printed, shorter)
    with (
        peer(tmp_path / "second", code, "-W", "error") as second,
        peer(tmp_path / "first", code, "-W", "error", fresh=True) as first,
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
    assert all(end.startswith("epoch 8: loss") for end in ends), said
    for lines in said:
        assert re.match(r"epoch \d+ of 8, 2 peers, [\d,]+ samples/s, loss \d", next(filter(PROGRESS, lines))), lines
