"""The bits of the next group's key."""

from __future__ import annotations

import random

import pytest

from shoal.averaging.matchmaking.group_bits import GroupBits, group_bits_after_a_miss, next_group_bits

ROUND = bytes(range(16))


def drawn(bits: str, size: int, target: int | None, round_id: bytes = ROUND) -> list[str]:
    """The next bits of each member of a group."""
    return [
        next_group_bits(bits, round_id=round_id, place=place, size=size, target_group_size=target)
        for place in range(size)
    ]


def test_no_bits_stay_no_bits() -> None:
    """One group for all: there is no other key to go to."""
    assert drawn("", 4, 4) == [""] * 4


def test_each_member_draws_another_digit_and_the_oldest_is_shifted_out() -> None:
    """Four members, two digits of two bits: the new digit is the last one, the last one becomes the first."""
    after = drawn("0111", 4, 4)
    assert sorted(after) == ["1100", "1101", "1110", "1111"]
    assert sorted(drawn("011", 4, 4)) == ["100", "101", "110", "111"]


def test_digits_depend_on_the_round() -> None:
    """Another round, another permutation; the same round, the same one for whoever computes it."""
    rounds = [drawn("000", 8, 8, bytes([number]) * 16) for number in range(20)]
    assert len({tuple(each) for each in rounds}) > 15
    assert rounds[3] == drawn("000", 8, 8, bytes([3]) * 16)


def test_every_place_gets_every_digit_in_time() -> None:
    """No place is bound to a digit: over many rounds the digits are drawn about equally often."""
    counts = {f"{digit:02b}": 0 for digit in range(4)}
    for number in range(400):
        bits = next_group_bits("00", round_id=number.to_bytes(16), place=1, size=4, target_group_size=4)
        counts[bits] += 1
    assert min(counts.values()) > 70


def test_members_of_a_group_that_is_not_full_draw_different_digits_of_all() -> None:
    """A group of two of at most eight: any two of the eight keys."""
    seen = set()
    for number in range(100):
        pair = drawn("000", 2, 8, number.to_bytes(16))
        assert pair[0] != pair[1]
        seen.update(pair)
    assert len(seen) == 8


def test_digit_longer_than_the_bits_keeps_its_end() -> None:
    """One bit for groups of four: two members go to each of the two keys."""
    assert sorted(drawn("0", 4, 4)) == ["0", "0", "1", "1"]


@pytest.mark.parametrize(("target", "keys"), [(3, 3), (6, 6), (256, 256)])
def test_a_digit_has_as_many_values_as_a_group_has_members(target: int, keys: int) -> None:
    """Also where that is no power of two: other keys are not used, so that all groups can be full."""
    assert len(set(drawn("0" * 8, target, target))) == keys


def test_without_a_target_the_group_decides() -> None:
    """The digit is as long as the group needs."""
    assert sorted(drawn("000", 2, None)) == ["000", "001"]
    assert len(set(drawn("000", 5, None))) == 5
    assert len(set(drawn("000", 1, None))) == 1


def test_what_the_user_sets_is_what_is_searched_next() -> None:
    """Set while a round goes on, also to what it was before: the round draws nothing. The one after it does again."""
    for bits in ("1111", "0000"):
        mine = GroupBits("0000", target_group_size=2, rng=random.Random(1))
        assert mine.search() == "0000"
        mine.bits = bits
        mine.averaged(round_id=ROUND, place=0, size=2)
        mine.missed()
        assert mine.search() == bits
        mine.averaged(round_id=ROUND, place=0, size=2)
        assert mine.bits == next_group_bits(bits, round_id=ROUND, place=0, size=2, target_group_size=2)


def test_peers_that_find_nobody_come_to_one_key() -> None:
    """After each search in vain one digit more is 0, the others are any: two of four digits, and so on."""
    rng = random.Random(2)
    for misses in range(1, 6):
        drawn = {group_bits_after_a_miss("11011011", misses=misses, target_group_size=4, rng=rng) for _ in range(2000)}
        zeros = "00" * min(misses, 4)
        assert len(drawn) == 4 ** (4 - len(zeros) // 2)
        assert all(len(bits) == 8 and bits.startswith(zeros) for bits in drawn)
    assert group_bits_after_a_miss("", misses=1, target_group_size=4, rng=rng) == ""
    assert group_bits_after_a_miss("1", misses=1, target_group_size=32, rng=rng) == "0"


def test_only_keys_of_full_groups_are_drawn_after_a_miss() -> None:
    """As after a round: with groups of three no digit is 3."""
    rng = random.Random(3)
    drawn = {group_bits_after_a_miss("0000", misses=1, target_group_size=3, rng=rng) for _ in range(200)}
    assert drawn == {"0000", "0001", "0010"}


def test_misses_are_counted_until_a_round_succeeds() -> None:
    """Then all digits are drawn by the round again, and the next miss is the first."""
    mine = GroupBits("1111", target_group_size=2, rng=random.Random(4))
    for misses in range(1, 5):
        mine.search()
        mine.missed()
        assert mine.bits.startswith("0" * misses)
    mine.search()
    mine.averaged(round_id=ROUND, place=0, size=2)
    assert mine.bits in ("0000", "0001")
    drawn = set()
    for _ in range(50):
        mine.bits = "1111"
        mine.search()
        mine.missed()
        drawn.add(mine.bits)
    assert drawn == {f"0{number:03b}" for number in range(8)}
