"""Whether all that the members say of themselves fits into one message."""

from __future__ import annotations

import pytest

from shoal.averaging.matchmaking.joins import BEGIN_OVERHEAD_BYTES, member_bytes
from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import MAX_GROUP_SIZE, Begin, Contact, Member, encode
from shoal.rpc import Limits

LIMIT = Limits().header_bytes


def member(number: int, gathered: int, host: str) -> Member:
    """One that can be dialed at as many addresses as there may be."""
    peer = PeerID(number.to_bytes(32, "big"))
    addresses = tuple(Address(host, 60_000, peer) for _ in range(8))
    return Member(Contact(peer, addresses), True, 1.5, b"\xc0" * gathered, True, b"r" * 16)


@pytest.mark.parametrize("host", ["10.0.0.1", ".".join(["a" * 62] * 4)])
@pytest.mark.parametrize("gathered", [1, 1000, 1700, 2900, 60_000])
def test_a_begin_of_all_for_whom_there_is_room_fits_into_one_message(gathered: int, host: str) -> None:
    """Long addresses count as what they are; and room is not refused before it is nearly used up."""
    every = (member(number, gathered, host) for number in range(MAX_GROUP_SIZE))
    members, room = list[Member](), LIMIT - BEGIN_OVERHEAD_BYTES
    while (one := next(every, None)) is not None and (room := room - member_bytes(one)) >= 0:
        members.append(one)
    nbytes = len(encode(Begin(b"x" * 16, members, 0, [1 << 60] * len(members), 1 << 23)))
    assert nbytes <= LIMIT
    assert len(members) == MAX_GROUP_SIZE or nbytes > LIMIT - nbytes / len(members) - 8192
