"""`UploadLimit`: the bytes of a whole peer within a limit, small messages first."""

from __future__ import annotations

import random

import pytest

from shoal.errors import ConfigError
from shoal.transport.upload_limit import MIN_BYTES_PER_S, UploadLimit

RATE = 1e6


def test_bulk_data_of_several_connections_keeps_the_limit() -> None:
    """Ten connections that always have more to send: in ten seconds as much goes as is allowed, and no more."""
    limit = UploadLimit(RATE)
    due = dict.fromkeys(range(10), 0.0)
    sent = 0
    while (now := min(due.values())) < 10.0:
        key = min(due, key=lambda each: due[each])
        sent += limit.piece_bytes  # the one for which it has waited
        due[key] = now + limit.reserve(limit.piece_bytes, now, bulk=True)
    assert sent == pytest.approx(10.0 * RATE, rel=0.06)  # each connection has one piece more under way


def test_a_small_message_goes_at_once_and_bulk_data_pays_for_it() -> None:
    """Behind a second of bulk data a small message waits for nothing, and the next piece for as much longer."""
    limit = UploadLimit(RATE)
    for _ in range(20):
        limit.reserve(50_000, 0.0, bulk=True)
    before_s = limit.reserve(0, 0.0, bulk=True)
    assert limit.reserve(10_000, 0.0, bulk=False) == 0.0
    assert limit.reserve(0, 0.0, bulk=True) == pytest.approx(before_s + 0.01)


def test_small_messages_alone_keep_the_limit() -> None:
    """Twice as many as are allowed, for a minute: they wait for each other, at the end by half the time."""
    limit = UploadLimit(RATE)
    waits = [limit.reserve(20_000, number * 0.01, bulk=False) for number in range(6000)]
    assert waits[30] == 0.0
    assert waits[-1] == pytest.approx(60.0, rel=0.02)


def test_what_was_not_asked_for_is_paid_for() -> None:
    """Handshakes and headers count when they are known, and a pause saves nothing up."""
    limit = UploadLimit(RATE)
    limit.charge(500_000, 0.0)
    assert limit.reserve(1, 0.0, bulk=True) == pytest.approx(0.45)
    assert limit.reserve(1_000_000, 100.0, bulk=True) == 0.0
    assert limit.reserve(1, 100.0, bulk=True) == pytest.approx(0.95)


def test_no_plan_of_pieces_exceeds_the_limit() -> None:
    """Random bulk data and small messages: in no ten seconds more goes than the limit, and 2% of it."""
    rng, limit = random.Random(5), UploadLimit(RATE)
    went: list[tuple[float, int]] = []
    now = 0.0
    for _ in range(5000):
        now += rng.expovariate(60.0)
        bulk = rng.random() < 0.5
        size = rng.randrange(1, 50_000 if bulk else 4000)
        went.append((now + limit.reserve(size, now, bulk=bulk), size))
    went.sort()
    for at, _ in went[::50]:
        assert sum(size for then, size in went if at <= then < at + 10.0) <= 1.02 * 10.0 * RATE


@pytest.mark.parametrize("wrong", [0, -1.0, MIN_BYTES_PER_S - 1, float("nan"), True, "1MB"])
def test_a_limit_that_cannot_be_is_named(wrong: float) -> None:
    """The error says upload_limit."""
    with pytest.raises(ConfigError, match="upload_limit must be"):
        UploadLimit(wrong)
