"""The examples, as their readers run them: two peers on one machine."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.workers import Talk

EXAMPLES = Path(__file__).parents[2] / "examples"

JOINING = """
import runpy, sys
import shoal.data, shoal.integrations.evaluation, {needs}  # take seconds: the other one must not be through before
print("ready", flush=True)
sys.argv[1:] = [input()]
runpy.run_path({example!r}, run_name="__main__")
"""


def last_lines_of_two(example: str, needs: str, **variables: Any) -> list[str]:
    """Two peers run an example, the second by the invite of the first; their last lines."""
    program = str(EXAMPLES / example)
    joining = JOINING.format(example=program, needs=needs)
    library = "transformers" if "transformers" in needs else None
    with Talk([sys.executable, "-c", joining], library=library, **variables) as second:
        assert second.line() == "ready\n"
        with Talk([sys.executable, program], library=library, **variables) as first:
            second.write(first.line().strip())
            said = [talk.rest() for talk in (first, second)]
            assert [talk.wait() for talk in (first, second)] == [0, 0], [talk.errors() for talk in (first, second)]
            assert "Traceback" not in first.errors() + second.errors()
    return [lines[-1] for lines in said]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_digits(tmp_path: Path) -> None:
    """Two peers learn them, and have one accuracy at the end, as their batch norm has one state."""
    pytest.importorskip("sklearn")
    one, two = last_lines_of_two("digits_cnn.py", "sklearn.datasets", EPOCHS="60")
    assert one == two
    assert (found := re.fullmatch(r"accuracy (\d\.\d+) at epoch 60\n", one))
    assert float(found[1]) > 0.8


@pytest.mark.long
@pytest.mark.timeout(400)
def test_lora(tmp_path: Path) -> None:
    """Two peers train the adapters alone, to the same loss; peft can load them."""
    pytest.importorskip("peft")
    one, two = last_lines_of_two("lora.py", "peft, transformers", EPOCHS="20", SAVE=str(tmp_path))
    assert one == two
    assert (found := re.fullmatch(r"loss (\d\.\d+) at epoch 20, with 4,096 of [\d,]+ parameters trained\n", one))
    assert float(found[1]) < 5.4
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.long
def test_spot_instance(tmp_path: Path) -> None:
    """The notice ends it in order; it goes on from its checkpoint, as the same peer."""
    program = [sys.executable, "-W", "error", str(EXAMPLES / "spot_instance.py"), str(tmp_path / "one")]
    with Talk(program) as first:
        invite = first.line()
        assert first.line() == "begins at epoch 0\n"
        first.line()
        first.line()  # some seconds later
        first.signal(signal.SIGTERM)
        first.rest()
        assert (first.wait(), first.errors()) == (143, "")
    saved = max((tmp_path / "one" / "checkpoints").glob("epoch-*"))
    epoch = int(saved.name.split("-")[1])
    assert epoch > 0
    with Talk(program, EPOCHS=str(epoch + 10)) as again:
        assert again.line() != invite  # of another port; the peer is the same
        assert again.line() == f"begins at epoch {epoch}\n"
        assert again.rest()[-1] == f"the run has ended at epoch {epoch + 10}\n"
        assert again.wait() == 0
