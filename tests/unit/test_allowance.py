"""How much one host may ask of a peer, and how many connections there are."""

from __future__ import annotations

import pytest

from shoal.optim.patience import Patience
from shoal.rpc.allowance import Allowance, call_cost
from shoal.transport.tcp import TcpLimits


def test_who_asks_too_much_is_not_read_for_a_while() -> None:
    """2,000 calls at once are free; after that 500 a second, however many links ask."""
    host, now, served = Allowance(500.0, 0.0), 0.0, 0
    while now < 10.0:
        served += 1
        now += host.spend(1.0, 500.0, now)
    assert 2000 + 10 * 500 <= served <= 2000 + 11 * 500
    assert host.spend(100.0, 500.0, now) == pytest.approx(0.2, abs=0.1)
    assert host.spend(10**9, 500.0, now) == 1.0
    assert host.spend(1.0, 500.0, now + 3e6) == 0.0


def test_a_long_message_costs_more() -> None:
    """As many calls as it has times 256 bytes, and one."""
    assert call_cost(0) == 1.0
    assert call_cost(256 << 10) == 1025.0


def test_a_host_is_forgotten_when_a_new_one_would_be_no_better_off() -> None:
    """Not before: whoever comes again at once has spent what it has spent."""
    host = Allowance(500.0, 0.0)
    host.links = 1
    assert not host.is_over(100.0)
    host.links = 0
    host.spend(1.0, 500.0, 100.0)
    assert not host.is_over(101.0)
    assert host.is_over(109.0)


@pytest.mark.parametrize(
    ("files", "most", "strangers"), [(64, 38, 9), (256, 153, 38), (1024, 614, 153), (9999, 2048, 256)]
)
def test_connections_leave_files_for_the_program(files: int, most: int, strangers: int) -> None:
    """With those that have proved nothing they are at most three quarters of what may be open."""
    limits = TcpLimits().within(files)
    assert (limits.max_connections, limits.max_unauthenticated) == (most, strangers)
    assert limits.max_connections + limits.max_unauthenticated <= files * 3 // 4


def test_a_withheld_state_costs_twenty_seconds() -> None:
    """In all, whoever withholds it. Ten of them are there again after five minutes, all when a state came."""
    patience = Patience()
    assert patience.left_s(0.0) == 20.0
    patience.waited(12.0)
    assert patience.left_s(12.0) == pytest.approx(8.4)
    patience.waited(8.4)
    assert patience.left_s(20.0) == 0.0
    assert patience.left_s(300.0) == 0.0
    assert patience.left_s(330.0) == pytest.approx(10.6)
    patience.waited(99.0)
    patience.rewarded()
    assert patience.left_s(400.0) == 20.0
