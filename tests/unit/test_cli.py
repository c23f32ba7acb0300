"""The command line without a network: help, options, keys, how errors end, what `status` shows."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import shoal.demo
from shoal.base.extras import install_command
from shoal.base.peer import Address, Invite, PeerID
from shoal.cli import main
from shoal.cli.status import summary_of, table_of
from shoal.errors import PeerUnreachable
from shoal.protocol.identity import Identity
from shoal.protocol.wire import Contact, Progress
from shoal.run.watching import RunStatus
from shoal.strategies import Merging

PLAN = ["plan", "--params", "1e9", "--peers", "4"]
HEAVY = {"asyncio", "cryptography", "msgspec", "numpy", "rich", "torch"}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_help_imports_nothing_that_takes_time() -> None:
    """`--help` of each command answers without torch, and without what the network needs."""
    commands = ["dht", "new", "run", "demo", "status", "doctor", "plan", "key", "key new", "debug", "debug dump", ""]
    code = """
import sys, shoal.cli
for command in sys.argv[1:]:
    try:
        shoal.cli.main([*command.split(), "--help"])
    except SystemExit as ended:
        assert not ended.code
sys.stderr.write(" ".join(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *commands],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shown = [line for line in done.stdout.splitlines() if line.startswith("Usage: ")]
    for line, command in zip(shown, commands, strict=True):
        assert line.startswith(f"Usage: shoal {command}".rstrip())
    loaded = set(done.stderr.split())
    assert "shoal.cli.app" in loaded
    assert not HEAVY & loaded


def test_help_names_the_subcommands_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with a line that is not cut off."""
    code, out, _ = run(capsys, "--help")
    assert code == 0
    listed = out.split("Commands:\n")[1].splitlines()
    assert [line.split()[0] for line in listed] == [
        "debug",
        "demo",
        "dht",
        "doctor",
        "key",
        "new",
        "plan",
        "run",
        "status",
    ]
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """As the package says."""
    assert run(capsys, "--version") == (0, f"shoal, version {shoal.__version__}\n", "")


def test_key_new_and_show(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The file is for its owner alone, both commands print its peer id, and it is never overwritten."""
    path = tmp_path / "peer.key"
    code, made, _ = run(capsys, "key", "new", str(path))
    assert code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(Identity.load(path).peer_id) == made.strip()
    assert run(capsys, "key", "show", str(path)) == (0, made, "")
    before = path.read_bytes()
    code, out, err = run(capsys, "key", "new", str(path))
    assert (code, out) == (2, "")
    assert "exists" in err
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        (0o644, None, "chmod 600"),
        (0o600, "nonsense", "not a key file"),
        (0o644, "nonsense", "not a key file"),
        (None, None, "key new"),
    ],
)
def test_key_that_cannot_be_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: int | None, text: str | None, said: str
) -> None:
    """Readable for others, no key, not there: one line, code 2."""
    path = tmp_path / "peer.key"
    if mode is not None:
        Identity.create(path)
        if text is not None:
            path.write_text(text)
        path.chmod(mode)
    code, out, err = run(capsys, "key", "show", str(path))
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "nonsense"),
        (["dht", "--port", "70000"], "--port"),
        (["dht", "--host", "a/b"], "--host must be an IP address or a name, got 'a/b'"),
        (["dht", "--host", "\udcff"], "--host must be an IP address or a name"),
        (["dht", "--host", "a..b"], "--host must be an IP address or a name"),
        (["dht", "--announce", "host:port"], "--announce"),
        (["dht", "--announce", ""], "--announce"),
        (["dht", "--announce", "a b:4000"], "--announce must be an IP address or a name"),
        (["doctor", "--host", "\udcff"], "--host must be an IP address or a name"),
        (["status", "--timeout", "nan", "x"], "--timeout"),
        (["key", "new", "k" * 300], "File name too long"),
        (["dht", "--announce", "1.2.3.4.5"], "--announce must be an IP address or a name"),
        (["dht", "--join", "nonsense"], "--join: neither an invite nor an address"),
        (["dht", "--run", "r" * 241], "--run must be a text of 1 to 240 characters"),
        (["dht", "--run", ""], "--run must be a text of 1 to 240 characters"),
        (["dht", "--run", "\udcff"], "--run has a character that UTF-8 cannot write"),
        (["status", "--run", "", "/ip4/127.0.0.1/tcp/1"], "--run must be a text of 1 to 240 characters"),
        (["doctor", "--run", "r" * 241], "--run must be a text of 1 to 240 characters"),
        (["status", 'see "shoal:abc"'], "stands before 'shoal:'"),
        (["dht", "--join", "shoal:nonsense"], "invite"),
        (["status"], "INVITE"),
        (["status", "shoal:nonsense"], "invite"),
        (["status", "/ip4/127.0.0.1/tcp/1"], "/p2p/PEERID"),
        (["status", f"/ip4/127.0.0.1/tcp/1/p2p/{PeerID(bytes(32))}"], "--run"),
        (["status", "nonsense", "--run", "x"], "neither an invite nor an address"),
        (["demo", "--peers", "1"], "peers=1"),
        (["demo", "--seconds", "0"], "seconds=0"),
        (["plan", "--peers", "4"], "--params"),
        (["plan", "--params", "many", "--peers", "4"], "--params"),
        (["plan", "--params", "7.5.0B", "--peers", "4"], "such as 7B, 350M or 7.5e9"),
        ([*PLAN, "--memory", "24"], "'24' would be 24 bytes: write 24GB, or 24GiB"),
        ([*PLAN, "--memory", "24 B"], "write 24GB"),
        (["plan", "--params", "0", "--peers", "4"], "--params"),
        (["plan", "--params", "nan", "--peers", "4"], "--params"),
        (["plan", "--params", "1e9", "--peers", "0"], "--peers"),
        (["plan", "--params", "1e9", "--peers", "4", "--stage", "4"], "--stage"),
        ([*PLAN, "--memory", "0"], "--memory"),
        ([*PLAN, "--memory", "-3GB"], "--memory"),
        ([*PLAN, "--memory", "24 apples"], "--memory"),
        ([*PLAN, "--memory", "2.4.0GB"], "--memory"),
        ([*PLAN, "--memory", "1e400"], "--memory"),
        ([*PLAN, "--batch", "4"], "--batch is for activations: give both --batch and --sequence"),
        ([*PLAN, "--sequence", "4"], "--sequence is for activations"),
        ([*PLAN, "--batch", "4", "--flash"], "--batch is for activations"),
        ([*PLAN, "--no-dropout"], "--no-dropout is for activations"),
        ([*PLAN, "--batch", "0", "--sequence", "8"], "--batch"),
        ([*PLAN, "--batch", "1", "--sequence", "8", "--hidden", "128", "--heads", "3"], "heads must divide hidden"),
        ([*PLAN, "--batch", "1", "--sequence", "8", "--hidden", "448"], "heads must be given for hidden 448"),
    ],
)
def test_wrong_options_end_with_code_2(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """And say which."""
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_plan_prints_the_numbers_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    """7.5 billion parameters on 64 ranks: all stages, or one; also where the terminal is narrow."""
    code, out, _ = run(capsys, "plan", "--params", "7.5e9", "--peers", "64")
    assert code == 0
    lines = [line for line in out.splitlines()[1:] if "shoal.zero" not in line]
    assert {re.split(" {2,}", line)[-2] for line in lines} == {"120 GB", "31.4 GB", "16.6 GB", "1.9 GB"}
    for number in ("7.5B", "7.5 b", "7500M", "0.0075T", "7_500_000k", "7_500_000_000"):
        assert run(capsys, "plan", "--params", number, "--peers", "64")[1] == out
    code, out, _ = run(capsys, "plan", "--params", "7_500_000_000", "--peers", "64", "--stage", "3")
    assert code == 0
    assert "1.9 GB" in out
    assert "31.4 GB" not in out


def test_plan_counts_activations(capsys: pytest.CaptureFixture[str]) -> None:
    """In columns of their own, with checkpoints and without; and it says of what shape they are."""
    shape = ["--batch", "1", "--sequence", "2048"]
    code, out, _ = run(capsys, *PLAN, *shape)
    head, first, *_, last = out.splitlines()
    assert code == 0
    assert head.split() == [
        "stage",
        "engine",
        "params",
        "gradients",
        "optimizer",
        "activations",
        "memory",
        "checkpointed",
        "sent",
    ]
    assert re.split(" {2,}", first)[-4:] == ["9.1 GB", "25.1 GB", "16.7 GB", "3.0 GB"]
    assert last == "Activations: 18 layers, hidden 2176, 17 heads, batch 1, sequence 2048."
    more = ["--flash", "--no-dropout", "--layers", "2", "--hidden", "64", "--heads", "2", "--vocabulary", "10"]
    code, out, _ = run(capsys, *PLAN, "--stage", "0", *shape, *more)
    assert out.splitlines()[-1] == "Activations: 2 layers, hidden 64, 2 heads, batch 1, sequence 2048."
    assert " 9.0 MB " in out  # 2 x 32 sbh + 4 sbh + 4 sbv


@pytest.mark.parametrize("size", ["24GB", "24 gb", "24e9", "24_000_000_000", "24000MB", "0.024T", "22.3517417908GiB"])
def test_plan_names_the_stage_that_fits(capsys: pytest.CaptureFixture[str], size: str) -> None:
    """Sizes are read as people write them; the first row that fits is the one to use."""
    told = ["plan", "--params", "7.5e9", "--peers", "8", "--memory", size]
    code, out, _ = run(capsys, *told, "--batch", "1", "--sequence", "2048")
    assert code == 0
    *rows, advice, _ = out.splitlines()
    assert [row.split()[:3] for row in rows if row.split()[2] == "yes"] == [
        ["2", "yes", "yes"],
        *[["3", "yes", "yes"]] * 2,
    ]
    assert advice == (
        "Use stage 2 with activation checkpoints and offload to the CPU or to disk: 16.6 GB of 24.0 GB. "
        "Of those that fit it sends least."
    )
    code, out, _ = run(capsys, *told)
    assert out.endswith("Activations come on top: to count them, give --batch and --sequence.\n")


def test_plan_says_what_it_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    """More ranks, and how many; or something smaller."""
    told = ["plan", "--params", "7.5e9", "--peers", "8", "--batch", "1", "--sequence", "2048", "--ema", "--memory"]
    least = "stage 3 with activation checkpoints and offload to the CPU or to disk takes least, 5.4 GB"
    out = run(capsys, *told, "4GB")[1]
    assert f"Nothing fits 4.0 GB: {least}, which is 1.4 GB too much. 13 peers would be enough.\n" in out
    out = run(capsys, *told, "1GiB")[1]
    assert f"Nothing fits 1.1 GB: {least}, which is 4.3 GB too much. More peers would not do" in out
    out = run(capsys, "plan", "--params", "7.5e9", "--peers", "8", "--memory", "24GB", "--stage", "1")[1]
    assert "Without --stage there is one that fits: stage 2 with offload to the CPU or to disk.\n" in out


def test_plan_counts_replicas_and_averages(capsys: pytest.CaptureFixture[str]) -> None:
    """Averages only where there is a column for them."""
    ema = ["plan", "--params", "8e9", "--peers", "8", "--replicas", "2", "--ema"]
    code, out, _ = run(capsys, *ema, "--memory", "40GB")
    assert code == 0
    assert re.split(" {2,}", out.splitlines()[1])[:7] == ["1", "no", "no", "16.0 GB", "24.0 GB", "24.0 GB", "8.0 GB"]
    assert run(capsys, *ema)[0] == 2
    code, _, err = run(capsys, *PLAN, "--replicas", "3")
    assert (code, err) == (2, "shoal: replicas must divide the ranks: 4 ranks cannot form 3 replicas\n")


def test_the_page_shows_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Each example of docs/how-to/plan.md, word for word."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "plan.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\$ shoal (plan .*)\n((?:.*\n)*?)```$", page, re.MULTILINE)
    assert len(shown) == 2
    for command, printed in shown:
        lines = run(capsys, *command.split())[1].splitlines()
        assert [line.rstrip() for line in lines] == printed.splitlines()


def test_invite_without_a_run_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is dialed before that."""
    invite = Invite((Address("127.0.0.1", 9, PeerID(b"p" * 32)),))
    code, _, err = run(capsys, "status", str(invite))
    assert (code, err) == (2, "shoal: this invite names no run: give its name by --run\n")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PeerUnreachable("nobody\nanswered"), 1, "shoal: nobody answered\n"),
        (shoal.ConfigError("wrong"), 2, "shoal: wrong\n"),
        (KeyboardInterrupt(), 130, "\n"),
    ],
)
def test_errors_end_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, said: str
) -> None:
    """Whatever subcommand raises them."""

    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(shoal.demo, "run_demo", fail)
    assert run(capsys, "demo", "--no-report") == (code, "", said)


def test_demo_without_matplotlib_makes_no_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a wheel alone it ended with code 2, and named no way; a picture that is asked for is still refused."""
    given: list[Any] = []
    monkeypatch.setattr(shoal.demo, "run_demo", given.append)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    _, _, said = run(capsys, "demo", "--headless")
    assert given == [shoal.demo.DemoOptions(headless=True, report=None)]
    assert said == f"no picture is made: it needs matplotlib ({install_command('demo')})\n"
    run(capsys, "demo", "--report", str(tmp_path))
    assert given[1].report == tmp_path


def test_demo_is_given_the_options(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of them arrive, the defaults are the demo's own, and its exit code is ours."""
    given: list[Any] = []

    def run_demo(options: object) -> int:
        given.append(options)
        return 7

    monkeypatch.setattr(shoal.demo, "run_demo", run_demo)
    record, report = tmp_path / "run.json", tmp_path / "report"
    told = ["--headless", "--seconds", "9.5", "--seed", "3", "--peers", "5", "--json", str(record)]
    assert run(capsys, "demo", *told, "--report", str(report))[0] == 7
    assert run(capsys, "demo")[0] == 7
    assert run(capsys, "demo", "--no-report")[0] == 7
    options = shoal.demo.DemoOptions
    assert given == [
        options(headless=True, seconds=9.5, seed=3, peers=5, json=record, report=report),
        options(),
        options(report=None),
    ]


@pytest.mark.parametrize(
    ("redirect", "said"),
    [
        (">&-", "standard output is closed: send it to a file or to /dev/null"),
        (">/dev/full", "cannot write the output: No space left on device"),
    ],
)
@pytest.mark.parametrize("command", ["--version", "plan --params 7e9 --peers 4", "dht"])
def test_output_that_cannot_be_written_ends_with_one_line(command: str, redirect: str, said: str) -> None:
    """Code 1 and no traceback, also of a peer that is in the network already."""
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m shoal.cli {command} {redirect}', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"shoal: {said}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["--version", "plan --params 7e9 --peers 4"])
def test_a_reader_that_has_gone_ends_the_command_in_silence(command: str) -> None:
    """Code 1, as for `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", *command.split()],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=100,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def progress(name: bytes, **changes: Any) -> Progress:
    """What the peer of this name says."""
    peer = PeerID(name * 32)
    said: dict[str, Any] = {
        "contact": Contact(peer, (Address("10.0.0.1", 4000, peer),)),
        "epoch": 12,
        "digest": b"d" * 32,
        "branch_samples": 3000,
        "done": 60,
        "rate": 30.0,
        "time": 1.0,
        "settings": {"target_batch_size": "256"},
    }
    return Progress(**{**said, **changes})


def shown(found: RunStatus) -> str:
    """What a user sees, without colours."""
    console = Console(width=100, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(table_of(found))
        console.print(summary_of(found), markup=False, soft_wrap=True)
    return captured.get()


def test_status_shows_peers_and_totals() -> None:
    """Shares of the samples, who is elsewhere, who only dials, who is silent."""
    fast, slow = progress(b"a", rate=60.0, end_epoch=1), progress(b"b", done=20, rate=30.0, end_epoch=40)
    client = progress(b"c", rate=float("nan"), contact=Contact(PeerID(b"c" * 32)), end_epoch=40)
    late = progress(b"d", epoch=11, digest=b"e" * 32, rate=10.0)
    found = RunStatus("albert", (fast, slow, client, late), frozenset({str(fast.contact.peer), str(late.contact.peer)}))
    lines = [line.rstrip() for line in shown(found).splitlines()]
    assert lines[0].split() == ["peer", "epoch", "state", "samples", "samples/s", "share", "address"]
    assert lines[1].split() == [fast.contact.peer.short(), "12", "64646464", "60", "60.0", "60%", "10.0.0.1:4000"]
    assert lines[2].endswith("30%  10.0.0.1:4000 (silent)")
    assert lines[3].endswith("0%  none: it only dials")
    assert lines[4].split()[1:] == ["11", "65656565", "60", "10.0", "10%", "10.0.0.1:4000"]
    assert " ".join(lines[5:]).strip() == (
        "run 'albert': 4 peers at epoch 12, 1 of them at another state; 140 of 256 samples for the next step, "
        "100.0 samples/s; ends at epoch 40"
    )


@pytest.mark.parametrize(
    ("every", "ways", "sums_up"),
    [
        (25, ["40.0%", "120.0%"], "80.0% of the way to the next merge"),
        ("30s", ["-", "120.0%"], "a merge every 30 s"),
        ("0.5s", ["-", "120.0%"], "a merge every 0.5 s"),
        ("168h", ["-", "120.0%"], "a merge every 604800 s"),
    ],
)
def test_status_of_a_run_that_merges_calls_no_thousandths_samples(
    every: int | str, ways: list[str], sums_up: str
) -> None:
    """Of merges that are due at a time a peer says only that one is due: before, it has trained a batch, or none."""
    settings = {"strategy": Merging(every=every).text}
    peers = [progress(name, done=n, settings=settings) for name, n in ((b"a", 400), (b"b", 1200))]
    first, second = shown(RunStatus("run", tuple(peers), frozenset())).splitlines()[1:3]
    assert [line.split()[3] for line in (first, second)] == ways
    assert f"epoch 12; {sums_up}, 60.0 samples/s" in shown(RunStatus("run", tuple(peers), frozenset()))


def test_status_calls_identical_what_is_identical() -> None:
    """By the check of the parameters, and not by the name of the state alone."""
    first, second = bytes(16), b"x" * 16
    one = progress(b"a", check=(10, first, first))
    rounded = progress(b"b", check=(10, second, first))
    other = progress(b"c", check=(10, second, second))
    before = progress(b"d", check=(5, second, second))
    old = progress(b"e")

    def said(*peers: Progress) -> str:
        return shown(RunStatus("run", peers, frozenset()))

    assert "parameters" not in said(old)
    assert "parameters: identical at epoch 10 on 2 of 3" in said(one, one, old)
    assert "parameters: identical but for rounding at epoch 10 on 2 of 3" in said(one, rounded, before)
    assert "parameters: 1 of 3 differ" in said(one, one, other)
    assert "64646464!" in said(one, one, other)
    assert "!" not in said(one, rounded, before)


def test_status_as_json_is_complete_and_valid() -> None:
    """Numbers that JSON does not know are not in it."""
    peer = progress(b"a", rate=float("inf"), settings={"target_batch_size": "many"})
    found = json.loads(json.dumps(RunStatus("run", (peer,), frozenset()).to_dict(), allow_nan=False))
    assert found == {
        "run_id": "run",
        "epoch": 12,
        "samples": 60,
        "target_batch_size": None,
        "samples_per_s": 0.0,
        "end_epoch": None,
        "settings": {"target_batch_size": "many"},
        "parameters": None,
        "peers": [
            {
                "peer_id": str(peer.contact.peer),
                "epoch": 12,
                "state_digest": "64" * 32,
                "differs": False,
                "branch_samples": 3000,
                "samples": 60,
                "samples_per_s": 0.0,
                "share": 0.0,
                "alone": False,
                "addresses": [str(address) for address in peer.contact.addresses],
                "answers": False,
            }
        ],
    }
