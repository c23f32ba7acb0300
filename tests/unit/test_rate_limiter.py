"""What each asker may have: a burst, then a rate."""

from __future__ import annotations

import hashlib

from shoal.base.peer import PeerID
from shoal.rpc.rate_limiter import RateLimiter


def peer(number: int) -> PeerID:
    """A made-up peer."""
    return PeerID(hashlib.sha256(b"peer %d" % number).digest())


A, B = peer(1), peer(2)


def test_rate_limiter_allows_a_burst_then_the_rate() -> None:
    """Tokens come back with time, up to the burst; other peers have their own."""
    limiter = RateLimiter(10.0, 20.0)
    assert limiter.allows(A, 20, 0.0)
    assert not limiter.allows(A, 1, 0.0)
    assert limiter.allows(B, 20, 0.0)
    assert limiter.allows(A, 5, 0.5)
    assert not limiter.allows(A, 1, 0.5)
    assert limiter.allows(A, 20, 1000.0)
    assert not limiter.allows(A, 1, 1000.0)


def test_debt_is_paid_back_before_more_is_allowed() -> None:
    """What was used beyond the tokens there were counts, too."""
    limiter = RateLimiter(10.0, 20.0)
    limiter.charge(A, 50, 0.0)
    assert not limiter.allows(A, 1, 3.0)
    assert limiter.allows(A, 1, 3.2)


def test_rate_limiter_remembers_a_bounded_number_of_peers() -> None:
    """The one heard from longest ago is forgotten."""
    limiter = RateLimiter(1.0, 1.0, max_askers=2)
    assert all(limiter.allows(peer(number), 1, 0.0) for number in range(100))
    assert len(limiter) == 2
    assert not limiter.allows(peer(99), 1, 0.0)
