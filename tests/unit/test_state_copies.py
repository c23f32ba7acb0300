"""How often hosts may have the state copied."""

from __future__ import annotations

import pytest

from shoal.state.copies import CopyAccounts


def copies_within(accounts: CopyAccounts, hosts: list[str], seconds: int, took_s: float, share: float = 0.0) -> int:
    """How many copies these hosts get, if they want one after another and download this share of each."""
    now, copies = 0.0, 0
    while now < seconds:
        for host in hosts:
            if accounts.allow(host, now):
                now, copies = now + took_s, copies + 1
                accounts.copied(host, took_s, now)
                accounts.sent(host, took_s, share, now)
        now += 0.01
    return copies


@pytest.mark.parametrize("took_s", [0.2, 1.0, 20.0])
def test_one_host_has_the_state_copied_for_a_tenth_of_the_time(took_s: float) -> None:
    """And five seconds before that, and the copy that overdraws the account."""
    copies = copies_within(CopyAccounts(0.0), ["a"], 1000, took_s)
    assert 100 <= copies * took_s <= 100 + 5 + 2 * took_s


@pytest.mark.parametrize("took_s", [0.2, 1.0, 20.0])
def test_all_hosts_have_the_state_copied_for_a_quarter_of_the_time(took_s: float) -> None:
    """However many they are."""
    copies = copies_within(CopyAccounts(0.0), [f"h{number}" for number in range(50)], 1000, took_s)
    assert 250 <= copies * took_s <= 250 + 10 + 2 * took_s


def test_small_copies_are_not_free() -> None:
    """Two a second and one hundred at first."""
    assert copies_within(CopyAccounts(0.0), ["a"], 1000, 0.0) == pytest.approx(2100, abs=2)


def test_whoever_downloads_is_not_limited() -> None:
    """Half of a download pays for half of the copy."""
    assert copies_within(CopyAccounts(0.0), ["a"], 1000, 1.0, share=1.0) >= 980
    assert copies_within(CopyAccounts(0.0), ["a"], 1000, 1.0, share=0.5) == pytest.approx(210, abs=3)


def test_one_host_does_not_spend_what_others_have() -> None:
    """Its account is overdrawn, theirs are not; and nobody saves up more than five seconds."""
    accounts = CopyAccounts(0.0)
    accounts.sent("a", 100.0, 1.0, 0.0)
    accounts.copied("a", 6.0, 0.0)
    assert not accounts.allow("a", 0.0)
    assert accounts.allow("b", 0.0)
    assert not accounts.allow("a", 9.0)
    assert accounts.allow("a", 11.0)
