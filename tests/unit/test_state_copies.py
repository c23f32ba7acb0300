"""How often hosts may have the state copied."""

from __future__ import annotations

import pytest

from shoal.state.wire.snapshot import CopyLimit


def copies_within(limit: CopyLimit, hosts: list[str], seconds: int, took_s: float, share: float = 0.0) -> int:
    """How many copies these hosts get, if they want one after another and download this share of each."""
    now, copies = 0.0, 0
    while now < seconds:
        for host in hosts:
            if limit.allows(host, now):
                now, copies = now + took_s, copies + 1
                limit.copied(host, took_s, now)
                limit.sent(host, took_s, share, now)
        now += 0.01
    return copies


@pytest.mark.parametrize("took_s", [0.2, 1.0, 20.0])
def test_one_host_has_the_state_copied_for_a_tenth_of_the_time(took_s: float) -> None:
    """And five seconds before that, and the copy that overdraws the account."""
    copies = copies_within(CopyLimit(), ["a"], 1000, took_s)
    assert 100 <= copies * took_s <= 100 + 5 + 2 * took_s


@pytest.mark.parametrize("took_s", [0.2, 1.0, 20.0])
def test_all_hosts_have_the_state_copied_for_a_quarter_of_the_time(took_s: float) -> None:
    """However many they are."""
    copies = copies_within(CopyLimit(), [f"h{number}" for number in range(5)], 1000, took_s)
    assert 250 <= copies * took_s <= 250 + 10 + 2 * took_s


def test_small_copies_are_not_free() -> None:
    """Two a second and one hundred at first."""
    assert copies_within(CopyLimit(), ["a"], 1000, 0.0) == pytest.approx(2100, abs=2)


def test_whoever_downloads_is_not_limited() -> None:
    """Half of a download pays for half of the copy."""
    assert copies_within(CopyLimit(), ["a"], 1000, 1.0, share=1.0) >= 980
    assert copies_within(CopyLimit(), ["a"], 1000, 1.0, share=0.5) == pytest.approx(210, abs=3)


def test_one_host_does_not_spend_what_others_have() -> None:
    """Its account is overdrawn, theirs are not; and nobody saves up more than five seconds."""
    limit = CopyLimit()
    limit.sent("a", 100.0, 1.0, 0.0)
    limit.copied("a", 6.0, 0.0)
    assert not limit.allows("a", 0.0)
    assert limit.allows("b", 0.0)
    assert not limit.allows("a", 9.0)
    assert limit.allows("a", 11.0)
