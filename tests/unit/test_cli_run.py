"""`shoal run` without a network: its options and file, and that a program runs as Python would run it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.base.extras import install_command
from shoal.cli import main
from shoal.protocol.identity import Identity

PROGRAM = """
import pickle, sys

class Own:
    pass

def work():
    if "raise" in sys.argv:
        raise ValueError("of the program")
    if "interrupt" in sys.argv:
        raise KeyboardInterrupt
    if "exit" in sys.argv:
        sys.exit(7)

pickle.loads(pickle.dumps(Own()))
print(sys.argv[1:], sys.path[0], __name__, __file__, flush=True)
if "read" in sys.argv:
    print(input(), flush=True)
work()
"""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of arguments with which nothing is run."""
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    return err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('peersfile = "x"', "peersfile is no option of `shoal run`: did you mean peers-file?"),
        ("[run]\nport = 1", "run is no option of `shoal run`: there are announce, checkpoint"),
        ('config = "x"', "config is no option"),
        ("m = true", "m is no option"),
        ('port = "1"', "port must be a whole number, got '1'"),
        ("port = 1.5", "port must be a whole number, got 1.5"),
        ("port = true", "port must be a whole number, got True"),
        ("port = 70000", "port is wrong: 70000 is not in the range"),
        ("grace = nan", "grace is wrong: nan is not a finite number"),
        ('verbose = "no"', "verbose must be true or false, got 'no'"),
        ("identity = 1", "identity must be a text in quotes, got 1"),
        ("invite = [1]", "invite must be a text or a list of texts, got [1]"),
        ('invite = "x"', "neither an invite nor an address: 'x'"),
        ('peers_file = "a"\npeers-file = "b"', "peers-file is given twice"),
        ("port = ", "this is no TOML"),
        ("\udcff", "this is no TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    """With the key, and what to write instead; nothing is run."""
    file = tmp_path / "shoal.toml"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    err = refused(capsys, "--config", str(file), __file__)
    assert said in err
    assert str(file) in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], "the program missing.py cannot be read: No such file or directory"),
        (["."], "the program . cannot be read: Is a directory"),
        (["--config", "missing.toml", __file__], "--config missing.toml: No such file or directory"),
        (["--identity", __file__, __file__], "is not a key file"),
        (["--identity", "missing/key", __file__], "missing/key: No such file or directory"),
        (["--peers-file", __file__, __file__], "holds something else than the addresses of peers"),
        (["--checkpoint", "/dev/null/x", __file__], "--checkpoint /dev/null/x: Not a directory"),
        (["--metrics", "/dev/null/m", __file__], "--metrics /dev/null: File exists"),
        (["--invite", "x", __file__], "--invite: neither an invite nor an address: 'x'"),
        (["--host", "a..b", __file__], "--host must be an IP address or a name"),
        (["--announce", "x:y", __file__], "--announce must be HOST or HOST:PORT"),
        (["--lr", "0.1", __file__], "No such option '--lr'"),
        (["--prometheus", "0", __file__], "--prometheus"),
    ],
)
def test_wrong_options_are_refused_before_the_program_runs(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    """Code 2, and what is wrong."""
    err = refused(capsys, *arguments)
    assert said in " ".join(err.split())
    assert "Traceback" not in err


def test_a_key_that_others_can_read_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From the file, relative to that; with what to do."""
    Identity.create(tmp_path / "peer.key")
    (tmp_path / "peer.key").chmod(0o644)
    (tmp_path / "shoal.toml").write_text('identity = "peer.key"')
    assert "chmod 600" in refused(capsys, "--config", str(tmp_path / "shoal.toml"), __file__)


def run(folder: Path, *arguments: str, given: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """`shoal run ...` in this folder."""
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", "run", *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        input=given,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize("way", [["program.py"], ["-m", "program"]])
def test_a_program_runs_as_python_runs_it(tmp_path: Path, way: list[str]) -> None:
    """Arguments, `__main__`, imports from its folder, standard input, exit code."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path, *way, "--lr", "read", "exit", given="a line\n")
    first, read = done.stdout.splitlines()
    file = tmp_path / "program.py"
    assert first == f"{['--lr', 'read', 'exit']} {tmp_path} __main__ {file}"
    assert (read, done.stderr, done.returncode) == ("a line", "", 7)


@pytest.mark.parametrize(
    ("how", "last", "code"), [("raise", "ValueError: of the program", 1), ("interrupt", "KeyboardInterrupt", -2)]
)
def test_errors_are_the_programs_own(tmp_path: Path, how: str, last: str, code: int) -> None:
    """One traceback, without a frame of shoal; the process ends as by Python."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run(tmp_path, "program.py", how)
    python = subprocess.run(
        [sys.executable, "program.py", how], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.stderr, done.stdout, done.returncode) == (python.stderr, python.stdout, python.returncode)
    assert (done.stderr.splitlines()[-1], done.returncode) == (last, code)


def test_a_program_that_is_no_python_says_so_as_python_does(tmp_path: Path) -> None:
    """Its own error alone."""
    (tmp_path / "program.py").write_text("x = (")
    done = run(tmp_path, "program.py")
    assert done.returncode == 1
    assert done.stderr.startswith(f'  File "{tmp_path / "program.py"}", line 1')
    assert done.stderr.splitlines()[-1] == "SyntaxError: '(' was never closed"


def test_an_option_about_checkpoints_needs_a_folder_for_them(tmp_path: Path) -> None:
    """Told in one line, and no traceback; by then it is known that the program names no folder either."""
    (tmp_path / "program.py").write_text(
        "import torch, shoal\n"
        "dht = shoal.DHT(start=True)\n"
        "inner = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)\n"
        "shoal.Optimizer(dht=dht, run_id='run', target_batch_size=8, optimizer=inner)\n"
    )
    done = run(tmp_path, "--save-every", "3", "program.py")
    told = "shoal run: --save-every needs --checkpoint, or a program that gives shoal.Optimizer checkpoint="
    assert (done.stderr.splitlines(), done.returncode) == ([told], 1)


def test_settings_that_had_no_effect_are_told(tmp_path: Path) -> None:
    """For a program without a shoal.DHT; with the place where they were given, and the command line first."""
    (tmp_path / "program.py").write_text("")
    (tmp_path / "shoal.toml").write_text('port = 0\nidentity = "of_file.key"\nsave_every = 3\n')
    done = run(tmp_path, "--config", "shoal.toml", "--identity", "given.key", "program.py")
    assert done.returncode == 0
    told = "the program has made no shoal.DHT: --identity, port in shoal.toml, save-every in shoal.toml had no effect"
    assert done.stderr.splitlines() == [f"{told} (docs: warnings#options-unused)"]
    assert run(tmp_path, "--config", "shoal.toml", "program.py", RANK="1").stderr == "", "of a torchrun group"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given.key", "of_file.key", "program.py", "shoal.toml"]


def test_a_sink_that_cannot_work_is_named_before_the_program_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 24 lines of traceback, after the peer had joined."""
    program = tmp_path / "train.py"
    program.write_text("print('runs')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = refused(capsys, "--prometheus", port, str(program))
        assert said == f"shoal: --prometheus {port}: Address already in use; choose another port\n"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    for option, value, package in (
        ("--tensorboard", str(tmp_path / "logs"), "tensorboard"),
        ("--prometheus", "4444", "prometheus_client"),
    ):
        said = refused(capsys, option, value, str(program))
        assert said == f"shoal: {option} needs {package}, which is not installed: {install_command('metrics')}\n"
