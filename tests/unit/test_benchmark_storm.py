"""The figures of `benchmarks.storm`, from facts that are made up here."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.storm.judge import Fault, Lives, Stood, both, figures, main_line, stood, wrong_suspicions

PLACES = {"a": 0, "b": 1, "c": 2}


def told(at: float, epoch: int, by: str, *, digest: str = "x", samples: int = 10) -> dict[str, Any]:
    """What a trainer says of a step."""
    return {"at": at, "epoch": epoch, "digest": digest, "samples": samples, "by": list(by), "loss": 1.0}


def test_the_main_line_is_what_most_tell_of() -> None:
    """A step that one takes alone while it is cut off does not count, though it was told of first."""
    said = [told(0.5, 1, "c", digest="alone"), told(1.0, 1, "ab"), told(1.1, 1, "ab"), {"at": 2.0, "warned": "?"}]
    (epoch,) = main_line(said, PLACES)
    assert (epoch.at, epoch.by) == (1.0, frozenset({0, 1}))


def test_figures_of_a_stop() -> None:
    """One of three is stopped for 4 s, and contributes 1 s after it woke."""
    lives = Lives(3)
    for place in range(3):
        lives.begin(place, 0.0)
    lives.end(2, 2.5)
    lives.begin(2, 6.5)
    said = [told(at, int(at), "ab" if 2.5 < at < 7.5 else "abc") for at in (1.0, 2.0, 5.0, 6.0, 7.0, 7.5, 8.0, 9.0)]
    line = main_line([{**each, "epoch": number} for number, each in enumerate(said)], PLACES)
    found = figures(line, lives, [Fault(2.5, "stop", 2, 6.5)], 0.0, 10.0)
    assert found.rate == pytest.approx(70 / (8 + 8 + 4))  # from the first step to the last
    assert found.participation == pytest.approx((3 + 3 + 2 + 2 + 2 + 3 + 3 + 3) / (3 + 3 + 2 + 2 + 3 + 3 + 3 + 3))
    assert found.gaps[-1] == 3.0
    assert found.back == {"stop": [1.0]}
    assert found.never == 0


def test_who_never_contributes_again_is_counted() -> None:
    """Unless another fault strikes it first."""
    lives = Lives(3)
    line = main_line([told(1.0, 1, "abc"), told(20.0, 2, "ab")], PLACES)
    assert figures(line, lives, [Fault(2.0, "cut", 2, 3.0)], 0.0, 21.0).never == 1
    struck_again = [Fault(2.0, "cut", 2, 3.0), Fault(4.0, "cut", 2, None)]
    assert figures(line, lives, struck_again, 0.0, 21.0).never == 0


def test_a_wrong_suspicion_is_of_one_that_was_live_for_a_while_by_one_that_was() -> None:
    """A peer that is down, just came back, or suspects others because it was down itself, is not counted."""
    lives = Lives(3)
    for place in range(3):
        lives.begin(place, 0.0)
    lives.end(2, 10.0)
    lives.begin(2, 20.0)

    def found(at: float, by: int, whom: str, *, decides: bool = False) -> dict[str, Any]:
        return {"peer": f"{by}.0", "at": at, "silent": whom, "decides": decides}

    said = [found(5.0, 0, "b"), found(5.0, 0, "c", decides=True), found(12.0, 0, "c"), found(20.5, 0, "c")]
    said += [found(20.5, 2, "a"), found(99.0, 0, "b"), found(5.0, 0, "stranger")]
    assert wrong_suspicions(said, PLACES, lives, 0.0, 50.0) == (1, 1)


def test_a_dead_peer_whose_place_a_restarted_one_took_over_is_rightly_found_silent() -> None:
    """A peer that comes back from a cut line finds those silent that died meanwhile."""
    lives = Lives(3)
    lives.begin(0, 0.0)
    lives.begin(1, 0.0)
    lives.end(1, 10.0)
    lives.begin(1, 12.0)
    places = {**PLACES, "b again": 1}
    ready = [{"peer": "1.0", "at": 0.0, "ready": "b"}, {"peer": "1.1", "at": 12.0, "ready": "b again"}]
    found = [{"peer": "0.0", "at": 20.0, "silent": silent, "decides": True} for silent in ("b", "b again")]
    assert wrong_suspicions(ready + found, places, lives, 0.0, 50.0) == (0, 1)


def test_a_sample_counts_in_each_part_of_a_model_for_its_share() -> None:
    """Two parts, each merged three times with 10 samples of each of two trainers."""
    lives = Lives(2)
    lives.begin(0, 0.0)
    lives.begin(1, 0.0)
    said = [
        {**told(at + late, number, "ab", samples=20), "part": part}
        for number, at in enumerate((1.0, 2.0, 3.0))
        for part, late in (("run", 0.0), ("run/1", 0.5))
    ]
    found = figures(main_line(said, PLACES), lives, [], 0.0, 4.0)
    assert found.rate == pytest.approx(2 * 20 / 4)
    assert found.gaps == [0.5] * 6 + [1.0]


def test_who_stood_still_in_step_is_compared_with_its_own_merges() -> None:
    """Neither what a newcomer waits for its state counts, nor a call during which the trainer was stopped."""
    lives = Lives(2)
    for place in range(2):
        lives.begin(place, 0.0)
    lives.end(1, 5.0)
    lives.begin(1, 8.0)
    said = [
        {"peer": "0.0", "at": 1.0, "stood_s": 0.9, "joins": True},
        {"peer": "0.0", "at": 2.0, "stood_s": 0.3, "joins": False},
        {"peer": "0.0", "at": 3.0, "merged_s": 0.4},
        {"peer": "1.0", "at": 4.0, "stood_s": 0.2, "joins": False},
        {"peer": "1.0", "at": 8.5, "stood_s": 3.5, "joins": False},
        {"peer": "1.0", "at": 20.0, "stood_s": 9.0, "joins": False},
    ]
    assert stood(said, lives, 0.0, 10.0) == [Stood(0.3, 0.4), Stood(0.2, 0.0)]


def test_two_calms_are_looked_at_as_one() -> None:
    """Rate and participation are means, so a slow minute before the storm does not make the storm look fast."""
    lives = Lives(3)
    for place in range(3):
        lives.begin(place, 0.0)
    line = main_line([told(at, int(at), "abc") for at in (1.0, 2.0, 3.0, 11.0, 13.0, 15.0)], PLACES)
    before, after = figures(line, lives, [], 0.0, 4.0), figures(line, lives, [], 10.0, 16.0)
    found = both(before, after)
    assert (before.rate, after.rate) == pytest.approx((20 / 6, 20 / 12))
    assert found.rate == pytest.approx(2.5)
    assert (found.epochs, found.participation, found.gaps[-1]) == (6, 1.0, 2.0)
