"""examples/albert, as its users run it: the tokenizer, two trainers and the monitor, each a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.workers import Talk, environment

for needed in ("transformers", "accelerate", "tokenizers", "pytorch_optimizer"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
EPOCHS, TARGET = 30, 64
BUSY_S = 300.0
"""Four processes import transformers, 10 s of computing each: that takes long on a machine that is busy."""

TINY = {"hidden": 16, "heads": 1, "layers": 1, "embedding": 8, "warmup": 3}

READY = """
import runpy, sys
import examples.albert.training, transformers.trainer  # takes seconds; all are to begin at one time
print("ready", flush=True)
input()
runpy.run_module(sys.argv.pop(1), run_name="__main__")
"""

ELSEWHERE = """
import runpy, sys
from pathlib import Path
sys.path[:] = [each for each in sys.path if Path(each).resolve() != Path(sys.argv[1])]
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a program where Python does not look into the root of the project."""


def command(program: str, **options: object) -> list[str]:
    """One of the example's programs with these options; it begins when it is given a line."""
    given = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    return [sys.executable, "-W", "error", "-c", READY, f"examples.albert.{program}", *given]


def rows(folder: Path) -> list[dict[str, float]]:
    """The lines of its metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.long
@pytest.mark.timeout(BUSY_S)
@pytest.mark.parametrize("program", ["run_trainer", "run_training_monitor", "tokenize_text"])
def test_a_program_is_run_by_its_path(tmp_path: Path, program: str) -> None:
    """Only `-m examples.albert.run_trainer` worked: "No module named 'examples'" from any other folder."""
    path = ROOT / "examples" / "albert" / f"{program}.py"
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(ROOT), str(path), "--help"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=BUSY_S,
        check=False,
    )
    assert (done.returncode, done.stdout[:6]) == (0, "usage:"), done.stderr


@pytest.mark.long
@pytest.mark.timeout(4 * BUSY_S)
def test_two_trainers_and_a_monitor_end_with_the_same_weights(tmp_path: Path) -> None:
    """From texts to a model. The monitor takes no part in any step, sees all trainers, and keeps the last state."""
    data = tmp_path / "data"
    texts = sorted(map(str, (ROOT / "docs").glob("*/*.md")))
    tokenize = [sys.executable, "-m", "examples.albert.tokenize_text", "--output", str(data), "--length", "23"]
    subprocess.run([*tokenize, "--text", *texts], env=environment(), timeout=BUSY_S, check=True, capture_output=True)
    assert {name: list(each.shape[1:]) for name, each in load_file(data / "tokens.safetensors").items()} == {
        "train": [2, 10],
        "held_out": [2, 10],
    }

    watched, folders = tmp_path / "monitor", [tmp_path / name for name in ("one", "two")]
    settings = {"data": data, "epochs": EPOCHS, "target_batch_size": TARGET, **TINY}
    watch = command("run_training_monitor", output=watched, save_every=10, held_out=16, **settings)
    with Talk(watch, library="transformers") as monitor:
        assert monitor.line(BUSY_S) == "ready\n"
        monitor.write("")
        settings["peers"] = monitor.line().strip()
        trains = [command("run_trainer", output=folder, batch_size=8, **settings) for folder in folders]
        with Talk(trains[0], library="transformers") as one, Talk(trains[1], library="transformers") as two:
            assert [each.line(BUSY_S) for each in (one, two)] == ["ready\n"] * 2
            for each in (one, two):
                each.write("")
            ends = [each.rest(BUSY_S)[-1] for each in (one, two)]
            assert [each.wait() for each in (one, two)] == [0, 0], [each.errors() for each in (one, two)]
        assert ends[0].startswith(f"epoch {EPOCHS}, parameters ")
        assert ends[0] == ends[1]
        seen = monitor.rest(BUSY_S)
        assert monitor.wait() == 0, monitor.errors()

    weights = [load_file(folder / "final" / "model.safetensors") for folder in folders]
    last = max((watched / "checkpoints").glob("epoch-*"))
    kept = load_file(last / "model.safetensors")
    assert len(kept.keys() & weights[0].keys()) >= 20
    if last.name.startswith(f"epoch-{EPOCHS:08}-"):
        assert seen[-1].startswith(f"epoch {EPOCHS}: ")
        assert all(torch.equal(kept[name], value) for name, value in weights[0].items() if name in kept)
    else:  # these epochs are so short that the run may end while it evaluates an earlier one
        epoch = int(last.name.split("-")[1])
        assert epoch > 0
        assert seen[-1].endswith(f"the last checkpoint is of epoch {epoch}\n")
    assert max(row["peers"] for row in rows(watched)) == 2
    assert rows(watched)[-1]["held_out_loss"] > 0
    given = [rows(folder)[-1]["contributed"] for folder in folders]
    assert min(given) > 0
    assert sum(given) >= EPOCHS * TARGET // 2  # of epochs that come fast not all are told
