"""The key under which a member looks after a round, so that small groups average the whole swarm. Sans-IO.

With M the target group size, the peers of a swarm of M^d stand on a grid of d digits. A key holds the last d - 1 of
them; its group is the M peers that differ in the remaining one. After a round each member draws a digit that no other
member of its group has, appends it, and the oldest digit is shifted out: peers that meet next have been in different
groups. If all groups are full, every peer has the exact average of all after d rounds. If not, each round still shrinks
the variance, as random groups do (Moshpit SGD, Ryabinin et al. 2021, arXiv:2103.03239).

The digits are a permutation that the round's id gives: all members compute the same one, and no message is needed.

A peer that finds nobody under its key draws another one. After each search without success it draws from fewer keys. So
peers that are left under different keys, however few they are, all come to the same key.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

__all__ = ["GroupBits", "group_bits_after_a_miss", "next_group_bits"]


def next_group_bits(bits: str, *, round_id: bytes, place: int, size: int, target_group_size: int | None) -> str:
    """The bits of a member's next group key.

    Args:
        bits: those of the key under which the group was formed, a text of `0` and `1`; equal for all members.
        round_id: names the round; equal for all members.
        place: which member this is, from 0, in the order that all members know.
        size: members of the group.
        target_group_size: members of a full group, which is how many values a digit has; it should be a power of two,
            so that all keys are used equally. None if no size is full: the digit then has `size` values.

    Returns:
        As many bits as before, none if there were none. A digit has ceil(log2(target)) bits; if it has more bits than
        there were, its last ones are kept.
    """
    assert 0 <= place < size
    values = max(2, target_group_size or size)
    width = (values - 1).bit_length()
    digits = sorted(range(values), key=lambda digit: sha256(b"%b/%d" % (round_id, digit)).digest())
    # With more members than digits several members share a digit; the shares differ by one member at most.
    digit = digits[place % values]
    return (bits + f"{digit:0{width}b}")[-len(bits) :] if bits else ""


def group_bits_after_a_miss(bits: str, *, misses: int, target_group_size: int | None, rng: random.Random) -> str:
    """The bits of the next group key of a peer that has found nobody under the last one.

    Its digits are drawn at random, but the first `misses` of them are 0: peers that are alone come to fewer and fewer
    keys, and after as many misses as there are digits, all of them come to the same key.

    Args:
        bits: those of the last key, a text of `0` and `1`.
        misses: searches in a row in which nobody was found, this one counted.
        target_group_size: as in `next_group_bits`; None: a digit has two values.
        rng: source of chance.

    Returns:
        As many bits as before, none if there were none.
    """
    values = max(2, target_group_size or 2)
    width = (values - 1).bit_length()
    count = -(-len(bits) // width)
    digits = [0 if number < misses else rng.randrange(values) for number in range(count)]
    return "".join(f"{digit:0{width}b}" for digit in digits)[-len(bits) :] if bits else ""


class GroupBits:
    """The group bits of one averager, from search to search. Bits that the user sets count from the next search on.

    Args:
        bits: the first bits.
        target_group_size: members of a full group; None: no size is full.
        rng: source of chance.
    """

    def __init__(self, bits: str, *, target_group_size: int | None, rng: random.Random) -> None:
        self._bits, self._target_group_size, self._rng = bits, target_group_size, rng
        self._searched = False
        self._misses = 0

    @property
    def bits(self) -> str:
        """The bits of the next search; can be set."""
        return self._bits

    @bits.setter
    def bits(self, bits: str) -> None:
        # No search has used these bits yet, so a round or search that goes on now must not replace them when it ends.
        self._bits, self._searched, self._misses = bits, False, 0

    def search(self) -> str:
        """Begin a search; returns its bits."""
        self._searched = True
        return self._bits

    def missed(self) -> None:
        """The search found no group."""
        if self._searched:
            self._misses += 1
            self._bits = group_bits_after_a_miss(
                self._bits, misses=self._misses, target_group_size=self._target_group_size, rng=self._rng
            )

    def averaged(self, *, round_id: bytes, place: int, size: int) -> None:
        """The search found a group whose round succeeded; the arguments are those of `next_group_bits`."""
        if self._searched:
            self._misses = 0
            self._bits = next_group_bits(
                self._bits, round_id=round_id, place=place, size=size, target_group_size=self._target_group_size
            )
