"""Every program that people copy, as printed, on two machines: on one network, and with a router between.

The first one runs without arguments and prints its invite. The second one runs the same program with that invite.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

import shoal
from shoal.cli.new import text_of
from tests.integration.forks import LIBRARIES
from tests.integration.routers import Routers, why_not
from tests.integration.test_pages import HIVEMIND, LOOP, ROOT, checkpoints, program, python_blocks
from tests.integration.workers import Talk, environment
from tests.unit.test_printed_programs import printed

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

BUSY_S = 300.0
SHOAL = [sys.executable, "-m", "shoal.cli"]


@dataclass(frozen=True)
class Program:
    """A program that people copy.

    Attributes:
        code: makes the text of the program, or names its file.
        run_id: the run that its invite names.
        needs: a package that it imports, of an extra.
        first: the command on the first machine, as the pages print it; `train.py` is the program.
        second: that of the second one, with the invite of the first one in place of INVITE.
        averages: it waits for the other peer by itself, and has no `shoal.Optimizer`.
        end: a pattern; what it finds last must be the same on both machines.
    """

    code: Callable[[], str | Path]
    run_id: str
    needs: str = "torch"
    first: str = "python train.py"
    second: str = "python train.py INVITE"
    averages: bool = False
    end: str = ""


COMMANDS: dict[str, tuple[str, ...]] = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "shoal": ("-m", "shoal.cli"),
}


def block(page: str, word: str) -> Callable[[], str]:
    """The one block of a page with this word."""
    return lambda: next(each for each in python_blocks(page) if word in each)


def example(name: str) -> Callable[[], Path]:
    """The file of an example."""
    return lambda: ROOT / "examples" / name


def with_lines_of(page: str, kind: str, word: str) -> str:
    """The program of the loop, with the lines of a page in place of those from `dht =` on."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks: list[str] = re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (lines,) = (each for each in blocks if word in each)
    if kind == "diff":
        lines = "".join(line[1:] for line in lines.splitlines(keepends=True) if not line.startswith("-"))
    code = program(LOOP)
    return code[: code.index("dht = ")] + lines


helper = partial(with_lines_of, "docs/how-to/meet.md", "py", "auxiliary")
MONITOR = example("albert/run_training_monitor.py")

GROUP = "torchrun --standalone --nproc-per-node 2"
TINY = " ".join(f"--{name} {value}" for name, value in {"hidden": 16, "heads": 1, "layers": 1, "embedding": 8}.items())
ALBERT = f"python train.py --data ../data {TINY}"

PROGRAMS = {
    "README": Program(partial(with_lines_of, "README.md", "diff", "shoal.DHT("), "my-run"),
    "loop": Program(partial(program, LOOP), "my-run", end=r"^epoch \d+(?=: loss)"),
    "from hivemind": Program(partial(program, HIVEMIND), "my-run", end=r"^epoch \d+(?=: loss)"),
    "checkpoints": Program(checkpoints, "my-run", end=r"^resumed at epoch \d+"),
    "trainer": Program(
        partial(program, "docs/start/trainer.md"), "my-trainer", needs="accelerate", end=r"^epoch \d+, learning rate"
    ),
    "lightning": Program(
        partial(program, "docs/start/lightning.md"), "my-module", needs="lightning", end=r"^epoch \d+$"
    ),
    "accelerate": Program(
        partial(program, "docs/how-to/accelerate.md"), "my-loop", needs="accelerate", end=r"^epoch \d+$"
    ),
    "shoal run": Program(
        partial(program, LOOP), "my-run", first="shoal run train.py", second="shoal run --invite INVITE train.py"
    ),
    "group": Program(
        partial(program, "docs/start/several-gpus.md"),
        "my-groups",
        first=f"{GROUP} train.py",
        second=f"{GROUP} train.py INVITE",
        end=r"rank 0: epoch \d+(?=, loss)",
    ),
    "group, shoal run": Program(
        partial(program, "docs/start/several-gpus.md"),
        "my-groups",
        first=f"{GROUP} -m shoal.cli run train.py",
        second=f"{GROUP} -m shoal.cli run --invite INVITE train.py",
    ),
    **{
        word: Program(block(f"docs/how-to/{page}.md", f"shoal.{word}("), "", averages=True)
        for page, word in (
            ("averager", "DecentralizedAverager"),
            ("own-steps", "GradientAverager"),
            ("own-steps", "ProgressTracker"),
            ("own-steps", "TrainingAverager"),
        )
    },
    "strategies": Program(block("docs/how-to/strategies.md", "DiLoCo"), "home-run"),
    **{
        f"new {kind}": Program(partial(text_of, kind), "my-run", needs=needs)
        for kind, needs in {"plain": "torch", "trainer": "accelerate", "lightning": "lightning"}.items()
    },
    "plain_loop": Program(example("plain_loop.py"), "plain-loop"),
    "digits_cnn": Program(example("digits_cnn.py"), "digits", needs="sklearn"),
    "lora": Program(example("lora.py"), "lora", needs="peft"),
    "spot_instance": Program(
        example("spot_instance.py"), "spot", first="python train.py one", second="python train.py two INVITE"
    ),
    "albert": Program(
        example("albert/run_trainer.py"),
        "albert",
        needs="pytorch_optimizer",
        first=ALBERT,
        second=f"{ALBERT} --peers INVITE",
    ),
}


def start(net: Routers, place: int | str | None, folder: Path, made: Program, epochs: int, command: str) -> Talk:
    """The program, at this place, in a folder of its own; with 0 epochs it runs to its own end."""
    folder.mkdir()
    code, library = made.code(), {"accelerate": "transformers", "peft": "transformers"}.get(made.needs, made.needs)
    if isinstance(code, str):
        (folder / "train.py").write_text(code, encoding="utf-8")
    tool, *words = command.split()
    at = words.index("train.py")
    early = ["-m", "tests.integration.run_on_two", str(epochs)] if epochs else []
    words[at : at + 1] = [*early, str(code) if isinstance(code, Path) else "train.py"]
    return Talk(
        [sys.executable, *COMMANDS[tool], *words],
        cwd=folder,
        network=net.path(place),
        library=library if library in LIBRARIES else None,
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        PYTHONPATH=path(ROOT),
    )


def path(root: Path) -> str:
    """Where the programs find the example `albert`, and the tests."""
    return ":".join([str(root), environment()["PYTHONPATH"]])


def invite_in(talk: Talk) -> shoal.Invite:
    """The first invite that it prints."""
    while not (found := re.search(r"shoal:\S+", talk.line(BUSY_S))):
        pass
    return shoal.Invite.parse(found[0])


def meet(net: Routers, place: int | str, folder: Path, made: Program, epochs: int) -> tuple[shoal.Invite, shoal.Invite]:
    """Both machines run the program to its end, and train together. Their invites."""
    with start(net, None, folder / "first", made, epochs, made.first) as first:
        invite = invite_in(first)
        with start(net, place, folder / "second", made, epochs, made.second.replace("INVITE", str(invite))) as second:
            its = invite_in(second)
            said = [talk.rest(BUSY_S) for talk in (first, second)]
            errors = [talk.errors() for talk in (first, second)]
            assert [talk.wait() for talk in (first, second)] == [0, 0], errors
    assert not [each for each in errors if "Traceback" in each], errors
    for lines in said:
        assert any("peers together" not in line for line in lines), "it says nothing of what it did"
        assert made.averages or "2 peers together\n" in lines, (said, errors)
    if made.end:
        ends = [re.findall(made.end, "".join(lines), re.MULTILINE)[-1:] for lines in said]
        assert ends[0] == ends[1] != [], said
    return invite, its


def hosts(invite: shoal.Invite) -> list[str]:
    """Of its addresses."""
    return [address.host for address in invite.addresses]


def prepare(folder: Path, made: Program) -> None:
    """Skip what cannot run here, and make the data of the example that needs some."""
    if find_spec(made.needs) is None:
        pytest.skip(f"needs {made.needs}")
    if made.first.startswith(ALBERT):
        texts = sorted(map(str, (ROOT / "docs").glob("*/*.md")))
        command = [sys.executable, "examples/albert/tokenize_text.py", "--output", str(folder / "data")]
        command += ["--length", "23", "--text", *texts]
        subprocess.run(command, cwd=ROOT, env=environment(), timeout=BUSY_S, check=True, capture_output=True)


def run_on_one_network(folder: Path, name: str, *, default_route: bool) -> None:
    """The second one announces its own address, unasked, and invites to itself."""
    made = PROGRAMS[name]
    prepare(folder, made)
    with Routers(0, machines=1, default_route=default_route) as net:
        invite, its = meet(net, "machine0", folder, made, 4)
    assert (hosts(invite), hosts(its)) == (["203.0.113.1"], ["203.0.113.101"])
    assert invite.run_id == its.run_id == made.run_id


def run_behind_a_router(folder: Path, name: str) -> None:
    """The second one is a client, and invites to the peer that it joined itself."""
    made = PROGRAMS[name]
    prepare(folder, made)
    with Routers(1) as net:
        invite, its = meet(net, 0, folder, made, 4)
    assert hosts(invite) == ["203.0.113.1"]
    assert its == invite
    assert its.run_id == made.run_id


BARE = """
import json, logging, sys, shoal
logging.basicConfig(level="INFO", format="%(message)s")
with shoal.DHT(sys.argv[1:], start=True) as dht:
    hosts = [each.host for each in dht.get_visible_maddrs()]
    print(json.dumps([hosts, dht.client_mode, str(dht.invite("r"))]), flush=True)
    sys.stdin.readline()
"""


def bare(net: Routers, place: int | str | None, *invites: str) -> Talk:
    """A peer that says nothing of where it listens."""
    return Talk([*net.command(place), sys.executable, "-c", BARE, *invites])


def test_a_peer_listens_where_it_joins() -> None:
    """It listened on 127.0.0.1, and became a client, whose invite() raised. The first peer still is for its machine."""
    with Routers(1, machines=1) as net:
        with bare(net, None) as alone:
            hosts_, client, invite = json.loads(alone.line())
            assert (hosts_, client) == (["127.0.0.1"], False)
            with bare(net, "machine0", invite) as lost:
                assert lost.wait() == 1
                assert "127.0.0.1 is this machine itself. If that peer runs here" in lost.errors()
        with Talk(
            [*net.command(None), sys.executable, "-m", "shoal.cli", "dht", "--host", "0.0.0.0", "--quiet"]
        ) as entry:
            invite = entry.line().strip()
            with bare(net, "machine0", invite) as near, bare(net, 0, invite) as far:
                hosts_, client, _ = json.loads(near.line())
                assert (hosts_, client) == (["203.0.113.101"], False)
                assert "this peer listens on 203.0.113.101, as it joins a peer on another machine" in near.errors()
                hosts_, client, its = json.loads(far.line())
                assert (hosts_, client) == ([], True)
                assert shoal.Invite.parse(its) == shoal.Invite(shoal.Invite.parse(invite).addresses, "r")
                assert "this peer listens on 192.168.1.5" in far.errors()
                for place, verdict, said in (
                    ("machine0", "ok", "could dial this machine, at 203.0.113.101"),
                    (0, "so-so", "a peer here only dials"),
                ):
                    command = [*net.command(place), *SHOAL, "doctor", invite]
                    done = subprocess.run(
                        command, capture_output=True, text=True, timeout=BUSY_S, env=environment(), check=False
                    )
                    (line,) = (each for each in done.stdout.splitlines() if each[6:].startswith("way back"))
                    assert line.split()[0] == verdict, done.stdout
                    assert said in line


def test_readme_runs_unchanged_on_a_second_machine_behind_a_router(tmp_path: Path) -> None:
    """By default it listened for its own machine only; so the program ended where it printed its invite."""
    run_behind_a_router(tmp_path, "README")


WAYS: dict[str, Callable[[Path, str], None]] = {
    "one network": partial(run_on_one_network, default_route=False),
    "one network, a route": partial(run_on_one_network, default_route=True),
    "router": run_behind_a_router,
}
"""On one network the machines have a way to the outside, or none. Behind a router the second one is a client."""


@pytest.mark.long
@pytest.mark.one_in(len(WAYS))
@pytest.mark.timeout(2 * BUSY_S)
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_the_program_runs_unchanged_on_a_second_machine(tmp_path: Path, name: str, way: str) -> None:
    """Every commit runs each program on one of the networks."""
    WAYS[way](tmp_path, name)


def test_every_printed_program_is_among_them() -> None:
    """Each block of a page, example and template that makes a peer; a block may stand in a program with others."""
    makes: list[Callable[[], str | Path]] = [*(made.code for made in PROGRAMS.values()), helper, MONITOR]
    ours = [each() for each in makes]
    texts = [each if isinstance(each, str) else each.read_text(encoding="utf-8") for each in ours]
    missing = [place for place, code in printed() if "shoal.DHT(" in code and not any(code in text for text in texts)]
    assert missing == []


@pytest.mark.long
@pytest.mark.timeout(2 * BUSY_S)
def test_two_helpers_let_clients_train_together(tmp_path: Path) -> None:
    """The third way to meet, word for word: two homes behind routers, two machines that all can reach."""
    helps, trains = replace(PROGRAMS["loop"], code=helper), PROGRAMS["loop"]
    with Routers(2, machines=1) as net, start(net, None, tmp_path / "a", helps, 0, helps.first) as one:
        invite = invite_in(one)
        with start(net, "machine0", tmp_path / "b", helps, 0, f"python train.py {invite}") as two:
            joins = f"python train.py {invite} {invite_in(two)}"
            with Talk([*SHOAL, "status", str(invite)], network=net.path(0)) as looks:
                assert "run 'my-run': 2 peers at epoch 0" in looks.rest()[-1], looks.errors()
            with (
                start(net, 0, tmp_path / "c", trains, 4, joins) as first,
                start(net, 1, tmp_path / "d", trains, 4, joins) as second,
            ):
                said = [talk.rest(BUSY_S) for talk in (first, second, one, two)]
                errors = [talk.errors() for talk in (first, second, one, two)]
                assert [talk.wait() for talk in (first, second, one, two)] == [0, 0, 0, 0], errors
    assert not [each for each in errors if "Traceback" in each], errors
    # Not always 4: a first step that one of them took alone comes on top.
    ends = [re.findall(r"^epoch \d+(?=: loss)", lines[-2]) for lines in said[:2]]
    assert len(ends[0]) == 1, said
    assert ends[0] == ends[1], said
    assert all(int(lines[-1].split()[0]) >= 2 for lines in said[:2]), said
    assert all("could not connect to this one" in each for each in errors[:2])


@pytest.mark.long
@pytest.mark.timeout(2 * BUSY_S)
def test_a_monitor_watches_trainers_on_two_other_machines(tmp_path: Path) -> None:
    """As the page of examples/albert prints it: trainers join by the monitor's invite. One is behind a router."""
    trains = PROGRAMS["albert"]
    prepare(tmp_path, trains)
    with (
        Routers(1, machines=1) as net,
        start(net, None, tmp_path / "a", replace(trains, code=MONITOR), 0, f"{ALBERT} --patience 2") as monitor,
    ):
        joins = trains.second.replace("INVITE", str(invite_in(monitor)))
        with (
            start(net, "machine0", tmp_path / "b", trains, 12, joins) as first,
            start(net, 0, tmp_path / "c", trains, 12, joins) as second,
        ):
            said = [talk.rest(BUSY_S) for talk in (first, second, monitor)]
            errors = [talk.errors() for talk in (first, second, monitor)]
            assert [talk.wait() for talk in (first, second, monitor)] == [0, 0, 0], errors
    assert not [each for each in errors if "Traceback" in each], errors
    assert all(lines[-1] == "2 peers together\n" for lines in said[:2]), said
    assert any("peers 2, " in line for line in said[2]), said
    assert said[2][-1].startswith("no trainers for 2 s"), said
