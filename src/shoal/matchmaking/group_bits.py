"""Which key a member looks under after a round, so that small groups average the whole swarm. Sans-IO.

With M the target group size, the peers of a swarm of M^d stand on a grid of d digits. A key holds the last d - 1 of
them; its group is the M peers that differ in the remaining one. After a round each member draws a digit that no other
member of its group has, appends it, and the oldest digit is shifted out: whoever meets next has been in different
groups. If all groups are full, every peer has the exact average of all after d rounds. If not, each round still
shrinks the variance, as random groups do (Moshpit SGD, Ryabinin et al. 2021, arXiv:2103.03239).

The digits are a permutation that the round's id gives: all members find the same one, and nobody has to tell.
"""

from __future__ import annotations

from hashlib import sha256

__all__ = ["GroupBits", "next_group_bits"]


def next_group_bits(bits: str, *, round_id: bytes, place: int, size: int, target_group_size: int | None) -> str:
    """The bits of a member's next group key.

    Args:
        bits: those of the key under which the group was formed, a text of `0` and `1`; equal for all members.
        round_id: names the round; equal for all members.
        place: which member this is, from 0, in the order that all members know.
        size: members of the group.
        target_group_size: members of a full group, which is how many values a digit has; it should be a power of two,
            so that all keys are used equally. None, where no size is full: the digit has `size` values.

    Returns:
        As many bits as before, none if there were none. A digit has ceil(log2(target)) bits; of a longer digit than
        there are bits the last ones are kept.
    """
    assert 0 <= place < size
    values = max(2, target_group_size or size)
    width = (values - 1).bit_length()
    digits = sorted(range(values), key=lambda digit: sha256(b"%b/%d" % (round_id, digit)).digest())
    # More members than digits: each digit is had by as many of them, or by one more.
    digit = digits[place % values]
    return (bits + f"{digit:0{width}b}")[-len(bits) :] if bits else ""


class GroupBits:
    """The group bits of one averager, from search to search. What the user sets counts from the next search on.

    Args:
        bits: to begin with.
        target_group_size: members of a full group; None: no size is full.
    """

    def __init__(self, bits: str, *, target_group_size: int | None) -> None:
        self._bits, self._target_group_size = bits, target_group_size
        self._searched = False

    @property
    def bits(self) -> str:
        """Those of the next search; can be set."""
        return self._bits

    @bits.setter
    def bits(self, bits: str) -> None:
        # Nothing was searched under these yet: no round that goes on now has a say in what comes after them.
        self._bits, self._searched = bits, False

    def search(self) -> str:
        """A search begins: its bits."""
        self._searched = True
        return self._bits

    def averaged(self, *, round_id: bytes, place: int, size: int) -> None:
        """It found a group, whose round succeeded; the arguments are those of `next_group_bits`."""
        if self._searched:
            self._bits = next_group_bits(
                self._bits, round_id=round_id, place=place, size=size, target_group_size=self._target_group_size
            )
