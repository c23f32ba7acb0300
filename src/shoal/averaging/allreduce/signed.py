"""The coordinator's signature on its commit: two different commits of one round that it has signed prove its lie.

A coordinator that reduces can give one member other averages of its tiles, and the commit that fits them. Each member
sees nothing wrong. So members tell each other their commits once the round is over (`CommitDigest`). Who only says that
it got another one proves nothing; the coordinator's signature does. In a group of two nobody signs, as there is nobody
to compare with.
"""

from __future__ import annotations

from blake3 import blake3
from msgspec.structs import replace

from shoal.averaging.allreduce.commit import Order
from shoal.base.peer import PeerID
from shoal.errors import PeerProtocolError
from shoal.protocol.identity import Identity, verify
from shoal.protocol.wire import Commit, CommitDigest, encode

__all__ = ["SignedCommits"]

_CONTEXT = b"commit"


class SignedCommits:
    """What one member of a round signs, and takes for signed.

    Args:
        identity: the member's.
        round_id: the id of the round. It is signed, too: what a coordinator has committed in another round proves
            nothing here.
        coordinator: decides the round.
        members: how many there are.

    Attributes:
        proved: whether the coordinator has signed two commits of this round.
    """

    def __init__(self, identity: Identity, round_id: bytes, coordinator: PeerID, members: int) -> None:
        self._identity, self._round_id, self._coordinator = identity, round_id, coordinator
        self._in_use, self._leads = members > 2, identity.peer_id == coordinator
        self._signed: Commit | None = None
        self._told: CommitDigest | None = None
        self.proved = False

    def signed(self, message: Order) -> Order:
        """What the coordinator says, as it sends it to everybody."""
        if not self._in_use or not isinstance(message, Commit):
            return message
        if self._signed is None:
            signature = self._identity.sign(_CONTEXT, self._round_id + _digest(message))
            self._signed = replace(message, signature=signature)
        return self._signed

    def takes(self, message: Order) -> bool:
        """Return whether it is no commit, or one that the coordinator has signed, whoever tells it."""
        if not self._in_use or self._leads or not isinstance(message, Commit):
            return True
        return self._is_signed(_digest(message), message.signature)

    def told(self, commit: Commit) -> CommitDigest | None:
        """What the others are told of the commit that this member has taken; None in a group of two."""
        if self._told is None and self._in_use:
            self._told = CommitDigest(_digest(commit), commit.signature)
        return self._told

    def prove_a_lie(self, commit: Commit, other: CommitDigest, teller: PeerID) -> bool:
        """Return whether another member got another commit than the one that this member has taken.

        Raises:
            PeerProtocolError: it says so, and the coordinator has not signed that.
        """
        if (mine := self.told(commit)) is not None and other.digest == mine.digest:
            return False
        if not self.proved and not self._is_signed(other.digest, other.signature):
            raise PeerProtocolError("a commit that its coordinator has not signed", teller)
        self.proved = True
        return True

    def _is_signed(self, digest: bytes, signature: bytes) -> bool:
        return verify(self._coordinator, _CONTEXT, self._round_id + digest, signature)


def _digest(commit: Commit) -> bytes:
    return blake3(encode(commit.unsigned)).digest()
