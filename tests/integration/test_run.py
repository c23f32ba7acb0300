"""`shoal run` with peers: they join, go on from checkpoints, and end in order whatever ends them."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

import shoal
from shoal.events import PeerLost
from shoal.protocol.identity import Identity
from tests.integration.test_leave import Heard
from tests.integration.workers import Talk

PROGRAM = str(Path(__file__).with_name("run_program.py"))
RUN = [sys.executable, "-W", "error", "-m", "shoal.cli", "run"]


def number(talk: Talk, says: str, least: int = 0) -> int:
    """The epoch in the next line that says this, of one that is late enough."""
    while not (found := re.fullmatch(rf"{says} (\d+)\n", talk.line())) or int(found[1]) < least:
        pass
    return int(found[1])


def saved(folder: Path) -> list[int]:
    """The epochs of the checkpoints in a folder."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("epoch-*"))


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_second_joins_and_both_leave_in_order(tmp_path: Path) -> None:
    """By a file and by options: identity, peers, checkpoints, metrics. SIGTERM saves; the next start goes on there."""
    (tmp_path / "shoal.toml").write_text(
        'identity = "peer.key"\npeers_file = "peers"\ncheckpoint = "saved"\n'
        'save-every = 100000\nmetrics = "metrics.jsonl"\n'
    )
    first = [*RUN, "--config", str(tmp_path / "shoal.toml"), "--verbose", PROGRAM]
    with Talk(first) as one:
        invite = one.line().strip()
        assert number(one, "begins at") == 0
        number(one, "at")
        with Talk([*RUN, "--invite", invite, "--checkpoint", str(tmp_path / "other"), PROGRAM]) as two:
            assert shoal.Invite.parse(two.line()).run_id == "run"
            last = number(two, "at", 10)
            number(one, "at", last)
            one.signal(signal.SIGTERM)
            one.rest()
            assert one.wait() == 143
            assert "Traceback" not in one.errors()
            (end,) = saved(tmp_path / "saved")
            number(two, "at", end + 10)  # it goes on alone
            assert "ERROR" not in two.errors()
            two.signal(signal.SIGINT)
            two.rest()
            assert two.wait() == -signal.SIGINT
            assert two.errors().count("Traceback") == 1
    peer = Identity.load(tmp_path / "peer.key").peer_id
    assert shoal.Invite.parse(invite).addresses[0].peer_id == peer
    assert end >= last
    assert saved(tmp_path / "other")[-1] > end
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(line["peers"] for line in lines) == 2
    with Talk(first) as one:
        one.line()
        assert number(one, "begins at") == end


@pytest.mark.parametrize(
    "how", ["raise", "fork", *(pytest.param(each, marks=pytest.mark.long) for each in ("thread", "quiet", "handler"))]
)
def test_a_program_that_ends_in_its_own_way(tmp_path: Path, how: str) -> None:
    """It raises, forks, trains in another thread, or handles SIGTERM itself. The others are told."""
    with (
        shoal.DHT(start=True) as meeting,
        Talk(
            [
                *RUN,
                "--invite",
                str(meeting.invite()),
                "--checkpoint",
                str(tmp_path),
                "--save-every",
                "100000",
                PROGRAM,
                how,
            ],
            fresh=how in ("raise", "thread"),  # also when the interpreter takes its modules apart
        ) as talk,
    ):
        heard = Heard(meeting)
        talk.line()
        assert number(talk, "begins at") == 0
        if how == "fork":
            assert talk.line() == "child 0\n"
        number(talk, "at", 10)
        assert saved(tmp_path) == []
        if how != "raise":
            talk.signal(signal.SIGTERM)
        said = talk.rest()
        code = talk.wait()
        event = heard.wait_for(PeerLost)
        assert isinstance(event, PeerLost)
        # A process that ends may close its connections before the other side has read its word.
        assert event.reason == "the peer left" or event.reason.startswith("connection lost"), event.reason
        errors = talk.errors().splitlines()
    if how == "raise":
        assert (code, errors[0], errors[-1]) == (
            1,
            "Traceback (most recent call last):",
            "RuntimeError: of the program",
        )
        assert saved(tmp_path) == [30]
    elif how in ("quiet", "handler"):
        assert (code, errors) == (0, [])
        assert said[-1].startswith("ends at")
        if how == "handler":
            assert said[-1] == f"ends at {saved(tmp_path)[0]}\n"
    else:
        assert code == 143
        assert how == "thread" or (len(saved(tmp_path)) == 1 and errors == []), errors


def test_an_invite_that_leads_to_nobody_ends_the_program_as_without(tmp_path: Path) -> None:
    """The program's traceback, and the reason; code 1."""
    nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.ephemeral().peer_id}"
    with Talk([*RUN, "--invite", nobody, PROGRAM]) as talk:
        talk.rest()
        assert talk.wait() == 1
        assert talk.errors().splitlines()[-1].startswith("shoal.errors.PeerUnreachable: ")
