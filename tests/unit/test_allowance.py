"""How much one host may ask of a peer, and how many connections there are."""

from __future__ import annotations

import heapq

import pytest

from shoal.errors import ConfigError
from shoal.rpc.allowance import Allowance, Allowances, call_cost
from shoal.run.join.fetching import Patience
from shoal.transport.tcp import TcpLimits


def test_who_asks_too_much_is_not_read_for_a_while() -> None:
    """2,000 calls at once are free; after that 500 a second, however many links ask."""
    host, now, served = Allowance(500.0, 0.0), 0.0, 0
    for link in range(10):
        host.add(link, 0.0)
    waiting = [(0.0, link) for link in range(10)]
    while (first := heapq.heappop(waiting))[0] < 10.0:
        now, link = first
        served += 1
        heapq.heappush(waiting, (now + host.spend(link, 1.0, 500.0, now), link))
    assert 2000 + 10 * 500 <= served <= 2000 + 11 * 500
    assert host.spend(0, 100.0, 500.0, now) == pytest.approx(0.2, abs=0.1)
    assert host.spend(0, 10**9, 500.0, now) == 1.0
    assert host.spend(0, 1.0, 500.0, now + 3e6) == 0.0


def test_an_honest_link_keeps_its_share_beside_a_flood() -> None:
    """40 calls a second of one link, while four others of its host call as often as they are read."""
    host, honest, now = Allowance(500.0, 0.0), "honest", 0.0
    for link in (honest, *range(4)):
        host.add(link, 0.0)
    waiting = [(0.0, link) for link in range(4)]
    paused = served = 0
    for call in range(400):
        now = call / 40.0
        while waiting[0][0] <= now:
            at, link = heapq.heappop(waiting)
            served += 1
            heapq.heappush(waiting, (at + max(1e-4, host.spend(link, 1.0, 500.0, at)), link))
        paused += host.spend(honest, 1.0, 500.0, now) > 0.0
    assert paused == 0
    assert served <= 2000 + 11 * 500


def test_ever_new_links_bring_a_host_no_more() -> None:
    """A link that is closed when it is no longer read, and made anew, begins with nothing."""
    host, now, served = Allowance(500.0, 0.0), 0.0, 0
    for number in range(2000):
        host.add(number, now)
        while now < 10.0 and host.spend(number, 1.0, 500.0, now) == 0.0:
            served += 1
        host.remove(number)
        now += 0.005
    assert served <= 2000 + 11 * 500


def test_a_host_gets_its_share_only_while_all_together_ask_too_much() -> None:
    """1,500 calls of a host at once, and 1,000 a second of all: not beside a flood, nor twice from one IPv6 network."""
    allowances = Allowances(500.0, 1000.0)
    for host in ("flood 1", "flood 2", "flood 3", "quiet", "2001:db8::1", "2001:db8::2"):
        allowances.add(host, host, 0.0)
    assert [allowances.spend(f"flood {number}", None, 1999.0, 0.0) for number in (1, 2)] == [0.0, 0.0]
    assert allowances.spend("flood 3", None, 1999.0, 0.0) == 1.0
    assert allowances.spend("quiet", None, 1500.0, 0.0) > 0.0
    assert allowances.spend("quiet", None, 1500.0, 30.0) == 0.0
    assert allowances.spend("2001:db8::1", None, 1500.0, 60.0) == 0.0
    assert allowances.spend("2001:db8::2", None, 1500.0, 60.0) > 0.0


def test_a_long_message_costs_more() -> None:
    """As many calls as it has times 256 bytes, and one."""
    assert call_cost(0) == 1.0
    assert call_cost(256 << 10) == 1025.0


def test_a_host_is_forgotten_when_a_new_one_would_be_no_better_off() -> None:
    """Not before: whoever comes again at once has spent what it has spent."""
    host = Allowance(500.0, 0.0)
    host.add("link", 0.0)
    assert not host.is_unused(100.0)
    host.spend("link", 1.0, 500.0, 100.0)
    host.remove("link")
    assert not host.is_unused(101.0)
    assert host.is_unused(109.0)


@pytest.mark.parametrize(
    ("files", "most", "strangers"), [(64, 38, 9), (256, 153, 38), (1024, 614, 153), (9999, 2048, 256)]
)
def test_connections_leave_files_for_the_program(files: int, most: int, strangers: int) -> None:
    """With those that have proved nothing they are at most three quarters of what may be open."""
    limits = TcpLimits().within(files)
    assert (limits.max_connections, limits.max_unauthenticated) == (most, strangers)
    assert limits.max_connections + limits.max_unauthenticated <= files * 3 // 4


def test_a_peer_with_17_files_slows_the_others_in_silence() -> None:
    """It is refused when it starts, and told how many it needs."""
    with pytest.raises(ConfigError, match=r"may open only 17 files .* needs 64 at least.*ulimit -n 4096"):
        TcpLimits().within(17)


def test_a_withheld_state_costs_twenty_seconds() -> None:
    """In all, whoever withholds it. Ten of them are there again after five minutes, all when a state came."""
    patience = Patience()
    assert patience.left_s(0.0) == 20.0
    patience.waited(12.0, 0.0)
    assert patience.left_s(12.0) == pytest.approx(8.0)
    patience.waited(8.0, 12.0)
    assert patience.left_s(20.0) == 0.0
    assert patience.left_s(300.0) == 0.0
    assert patience.left_s(330.0) == pytest.approx(10.0 + 1 / 3)
    patience.waited(99.0, 330.0)
    patience.rewarded()
    assert patience.left_s(400.0) == 20.0
