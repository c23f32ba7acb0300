"""The programs that `shoal new` writes, as their readers run them: two peers, the second by the line of the first."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.new import KINDS
from tests.integration.workers import Talk

JOINING = """
import runpy, sys
import torch  # all these take seconds: the other one must not be through before this one has begun
import shoal.data, shoal.integrations.evaluation, {needs}
if hasattr({needs}, "Trainer"):
    {needs}.Trainer  # transformers imports it late
print("ready", flush=True)
sys.argv = input().split()
runpy.run_path(sys.argv[0], run_name="__main__")
"""


STEPS = {"plain": 100, "trainer": 20, "lightning": 60}
NEEDS = {"plain": "torch", "trainer": "transformers", "lightning": "lightning"}


def write(path: Path, kind: str) -> str:
    """Write the program, with fewer steps; its text as it was."""
    with pytest.raises(SystemExit) as ended:
        main(["new", "--kind", kind, str(path)])
    assert not ended.value.code
    text = path.read_text(encoding="utf-8")
    short, changes = re.subn(r"^STEPS(.*?) = \d+", rf"STEPS\1 = {STEPS[kind]}", text, flags=re.MULTILINE)
    assert changes == 1
    path.write_text(short, encoding="utf-8")
    return text


@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_peers_run_the_program(tmp_path: Path, kind: str) -> None:
    """The first one says how the second one joins. Both end at the same step, with the same loss, which has fallen."""
    pytest.importorskip(NEEDS[kind])
    program = tmp_path / "train.py"
    write(program, kind)
    strict = ["-W", "error"] if kind == "plain" else []
    library = {"trainer": "transformers", "lightning": "lightning"}.get(kind)
    with Talk([sys.executable, *strict, "-c", JOINING.format(needs=NEEDS[kind])], library=library) as second:
        assert second.line() == "ready\n"
        with Talk([sys.executable, *strict, str(program)], library=library) as first:
            command = shlex.split(first.line().removeprefix("another peer joins with: "))
            assert command[:2] == ["python", str(program)]
            second.write(" ".join(command[1:]))
            said = [talk.rest() for talk in (first, second)]
            assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
            assert "Traceback" not in first.errors() + second.errors()
    ends = [
        re.fullmatch(rf"(?:.*\r)?the run has ended at step {STEPS[kind]}: held-out loss (\d\.\d+)\n", lines[-1])
        for lines in said
    ]
    assert all(ends), said
    (one, two) = (end for end in ends if end is not None)
    assert one[1] == two[1]
    assert float(one[1]) < 5  # 5.5 at the beginning


def test_a_file_that_exists_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And so does everything else where nothing can be written, or where the program would import itself."""
    program = tmp_path / "train.py"
    program.write_text("mine")
    for path, said in (
        (program, "exists, and stays as it is"),
        (tmp_path / "none" / "x.py", "cannot be written"),
        (tmp_path / "lightning.py", "would hide the module lightning"),
        (tmp_path / "random.py", "would hide the module random"),
        (tmp_path / "msgspec.py", "would hide the module msgspec"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["new", str(path)])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    assert program.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_is_well_formed(tmp_path: Path, kind: str) -> None:
    """As the house's own code: it is what people begin with."""
    write(tmp_path / "train.py", kind)
    text = (tmp_path / "train.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 85
    for check in (["check", "--select", "E,F,I,B,UP"], ["format", "--check"]):
        done = subprocess.run(
            [str(Path(sys.executable).with_name("ruff")), *check, "--line-length", "120", str(tmp_path / "train.py")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
