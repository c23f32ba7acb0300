"""`python -m benchmarks.truth`: what it prints, and when it fails."""

from __future__ import annotations

import pytest

from benchmarks.hardships import costs, places, stops, words
from benchmarks.truth import __main__ as truth
from benchmarks.truth.kit import Report, Verdict, apart
from benchmarks.truth.playing import play


def holds() -> Verdict:
    """It holds."""
    return Verdict(held=True, measured="0 of 9")


def breaks() -> Verdict:
    """It breaks."""
    return Verdict(held=False, measured="9 of 9")


def raises() -> Verdict:
    """It cannot be played."""
    raise OSError("no more processes")


def test_exit_code_is_1_if_any_broke(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each line says held or broke and what was measured; a replay that raises has not held."""
    monkeypatch.setattr(truth, "REPLAYS", {each.__name__: each for each in (holds, breaks, raises)})
    monkeypatch.setattr("sys.argv", ["truth"])
    assert truth.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["held", "holds"], ["broke", "breaks"], ["broke", "raises"]]
    assert "9 of 9" in lines[1]
    assert "OSError: no more processes" in lines[2]
    assert lines[3] == "broke: breaks, raises"
    monkeypatch.setattr("sys.argv", ["truth", "--only", "holds"])
    assert truth.main() == 0


def test_a_replay_that_needs_nftables_has_not_broken_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not run, and the exit code is that of the others."""
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "nft" else f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    replays = {each.__name__: each for each in (places.unreachable, places.two_nats, holds)}
    monkeypatch.setattr("sys.argv", ["hardships"])
    assert play(replays, prog="hardships", doc=None) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["not run: unreachable: needs nftables", "not run: two_nats: needs nftables"]
    assert lines[2].startswith("held")
    assert lines[3:] == ["not run: unreachable, two_nats", "all others hold"]


def test_epochs_are_compared_that_all_have_seen() -> None:
    """A peer that came late has seen fewer."""
    first, second = Report(weights={1: "a", 2: "b", 3: "c"}), Report(weights={2: "b", 3: "x", 4: "y"})
    assert apart([first, second]) == (1, 2)
    assert apart([first, second], since=3) == (0, 0)


def test_warnings_are_found_by_whole_words() -> None:
    """`lr` is not found in `already`."""
    report = Report(warnings=["it is there already", "the LR is another one"])
    assert report.warned("lr") == 1


def test_every_hardship_says_what_it_replays() -> None:
    """In its first line, as `--list` prints it; no two have one name."""
    replays = [each for part in (stops, words, costs, places) for each in part.REPLAYS]
    assert len({each.__name__ for each in replays}) == len(replays)
    assert all((each.__doc__ or "").strip() for each in replays)
