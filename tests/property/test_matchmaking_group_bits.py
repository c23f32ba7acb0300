"""Group bits: members part evenly, and a full grid has the exact average when every digit was averaged over."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from shoal.averaging.matchmaking.group_bits import next_group_bits


@given(
    st.text("01", max_size=12),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 64),
    st.none() | st.integers(2, 64),
)
def test_members_part_evenly(bits: str, round_id: bytes, size: int, target: int | None) -> None:
    """As many bits as before; nobody shares a digit before all are taken, and then all are shared evenly."""
    after = [
        next_group_bits(bits, round_id=round_id, place=place, size=size, target_group_size=target)
        for place in range(size)
    ]
    assert {len(each) for each in after} == {len(bits)}
    width = ((target or size) - 1).bit_length() or 1
    if len(bits) >= width:
        counts = Counter(after)
        assert max(counts.values()) == -(-size // max(2, target or size))
        assert max(counts.values()) - min(counts.values()) <= 1
        assert {each[: len(bits) - width] for each in after} == {bits[width:]}


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32), st.integers(0, 3))
def test_full_grid_has_the_exact_average_in_as_many_rounds_as_it_has_digits(
    width: int, digits: int, seed: int, more: int
) -> None:
    """M^d peers, any M to a key of d - 1 digits at first, in any order: exact after d rounds, in fractions.

    They may also have averaged before: what counts is where they stand.
    """
    rng, m = random.Random(seed), 1 << width
    count = m**digits
    values = [Fraction(rng.randrange(1000)) for _ in range(count)]
    mean = sum(values) / count
    bits = [f"{number // m:0{width * (digits - 1)}b}" if digits > 1 else "" for number in range(count)]
    for number in range(digits + more):
        groups: dict[str, list[int]] = {}
        for peer in rng.sample(range(count), count):
            groups.setdefault(bits[peer], []).append(peer)
        for key, members in groups.items():
            assert len(members) == m
            average = sum((values[peer] for peer in members), Fraction(0)) / m
            round_id = rng.randbytes(16)
            for place, peer in enumerate(members):
                values[peer] = average
                bits[peer] = next_group_bits(key, round_id=round_id, place=place, size=m, target_group_size=m)
        assert (number + 1 < digits) or set(values) == {mean}
