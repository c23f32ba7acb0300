"""How many dials are under way, and where: pure bookkeeping, and the dials in line."""

from __future__ import annotations

import asyncio

import pytest

from shoal import sim
from shoal.base.peer import Address, PeerID, site_of
from shoal.errors import PeerTimeout, PeerUnreachable
from shoal.rpc.dial_limits import (
    ADDRESSES_TRIED,
    FAILURES,
    FAILURES_WHERE_PROVED,
    FIRST_PAUSE_S,
    MOST_DIALS,
    MOST_PER_SITE,
    MOST_PER_UNPROVED_SITE,
    MOST_UNPROVED,
    BoundedDials,
    DialLimits,
    NotDialed,
)


def address(host: str, port: int = 4000, peer: int = 1) -> Address:
    """Where a peer is said to listen."""
    return Address(host, port, PeerID(bytes([peer]) * 32))


@pytest.mark.parametrize(
    ("host", "site"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("::ffff:203.0.113.7", "203.0.113.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("a.b.example.org", "example.org"),
        ("B.Example.org.", "example.org"),
        ("localhost", "localhost"),
    ],
)
def test_a_site_is_what_one_owner_has(host: str, site: str) -> None:
    """Else one could make up a new host for each message, all of them at one door."""
    assert site_of(host) == site


def test_few_dials_go_where_nobody_has_proved_an_identity() -> None:
    """To one such site, and to all of them; where somebody has, there may be more."""
    limits = DialLimits()
    assert [limits.begin(["a"]) for _ in range(MOST_PER_UNPROVED_SITE + 1)] == [True] * MOST_PER_UNPROVED_SITE + [False]
    others = [limits.begin([f"b{number}"]) for number in range(MOST_UNPROVED)]
    assert others.count(True) == MOST_UNPROVED - MOST_PER_UNPROVED_SITE
    limits.prove("c")
    assert [limits.begin(["c"]) for _ in range(MOST_PER_SITE + 1)] == [True] * MOST_PER_SITE + [False]
    for number in range(MOST_DIALS):
        limits.prove(f"d{number}")
    assert [limits.begin([f"d{number}"]) for number in range(MOST_DIALS)].count(True) == MOST_DIALS - (
        MOST_UNPROVED + MOST_PER_SITE
    )
    limits.end(["a"], 1)
    assert limits.begin(["a"])


def test_a_site_where_dials_fail_is_left_alone_for_longer_and_longer() -> None:
    """A third party that a message names is knocked at a few times, then rarely. A success ends that."""
    limits, now = DialLimits(), 100.0
    for _ in range(FAILURES):
        assert limits.choose([address("a")], now)
        limits.failed(["a"], now, now)
    assert not limits.choose([address("a")], now)
    assert limits.left_alone_s("a", now) == FIRST_PAUSE_S
    now += FIRST_PAUSE_S
    assert limits.choose([address("a")], now)
    limits.failed(["a"], now, now)
    assert limits.left_alone_s("a", now) == 2 * FIRST_PAUSE_S
    for _ in range(9):
        now += limits.left_alone_s("a", now)
        limits.failed(["a"], now, now)
    assert limits.left_alone_s("a", now) == 960.0, "somebody else may listen there by now"
    limits.prove("a")
    assert limits.choose([address("a")], now)


def test_dials_that_fail_together_are_one_failure_more() -> None:
    """A busy machine had 64 dials to a host under way, and all came too late: it dialed nobody there for 16 minutes."""
    limits = DialLimits()
    limits.prove("a")
    for _ in range(MOST_PER_SITE):
        limits.failed(["a"], 95.0, 100.0)
    assert limits.left_alone_s("a", 100.0) == FIRST_PAUSE_S


def test_a_proved_site_at_which_all_dials_fail_is_proved_no_more() -> None:
    """Its address may be another one's by now."""
    limits = DialLimits()
    limits.prove("a")
    for number in range(FAILURES_WHERE_PROVED):
        assert limits.is_proved("a"), number
        limits.failed(["a"], 0.0, 0.0)
    assert not limits.is_proved("a")
    assert not limits.choose([address("a")], 1.0)


def test_a_peer_is_dialed_at_few_sites_that_are_not_proved() -> None:
    """However many addresses a message gives it."""
    limits, named = DialLimits(), [address(f"10.0.0.{number}") for number in range(8)]
    limits.prove("10.0.0.7")
    chosen = limits.choose(named, 0.0)
    assert chosen == [*named[:ADDRESSES_TRIED], named[7]]


class Nobody:
    """A transport whose dials lead to nothing, once they are let go."""

    def __init__(self) -> None:
        self.under_way = self.most = self.dialed = 0
        self.let_go = asyncio.Event()

    async def dial(self, peer: PeerID, addresses: list[Address], *, timeout_s: float) -> None:
        """As `Transport.dial`."""
        self.dialed += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            async with asyncio.timeout(timeout_s):
                await self.let_go.wait()
        except TimeoutError:
            raise PeerTimeout("no connection", peer) from None
        finally:
            self.under_way -= 1
        raise PeerUnreachable("nobody", peer)


@pytest.mark.parametrize("hosts", [1, 250])
def test_a_begin_with_a_thousand_made_up_members_opens_few_sockets(hosts: int) -> None:
    """It opened 1,022 at once; at a single third party 4 are open at a time, and then it is left alone."""

    async def main() -> None:
        transport = Nobody()
        dials = BoundedDials(transport)  # type: ignore[arg-type]
        named = [address(f"203.0.113.{number % hosts}", 1 + number) for number in range(1000)]
        tasks = [asyncio.ensure_future(dials.dial(each.peer_id, [each], timeout_s=5.0)) for each in named]
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(error) for error in errors} <= {PeerTimeout, NotDialed}
        assert transport.most == (MOST_PER_UNPROVED_SITE if hosts == 1 else MOST_UNPROVED)
        assert transport.dialed <= (FAILURES if hosts == 1 else 2 * MOST_UNPROVED)
        assert transport.under_way == 0
        assert asyncio.get_running_loop().time() <= 5.1
        if hosts == 1:
            with pytest.raises(PeerUnreachable, match=r"nobody has proved an identity at 203\.0\.113\.0"):
                await dials.dial(named[0].peer_id, named[:1], timeout_s=5.0)

    sim.run(main, seed=1)
