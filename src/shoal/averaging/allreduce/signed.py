"""What members of a round sign, so that what they say to one can be shown to another.

The coordinator signs its commit. If it reduces, it can give one member other averages of its tiles, and the commit that
fits them: each member sees nothing wrong. So members tell each other their commits once the round is over
(`CommitDigest`), and two different commits that the coordinator has signed prove its lie.

A reducer signs its reports of averages that it has made. If it gives one member another average than the others, that
member gets another commit than it expects. The coordinator shows it what the reducer has signed (`Shown`): so the
member knows which of the two lies.

In a group of two nobody signs, as there is nobody to compare with.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from msgspec.structs import replace

from shoal.averaging.allreduce.commit import Order
from shoal.base.peer import PeerID
from shoal.errors import PeerProtocolError
from shoal.protocol.identity import Identity, verify
from shoal.protocol.wire import Commit, CommitDigest, Report, Shown, encode

__all__ = ["SignedWords"]

_COMMIT, _REPORT = b"commit", b"report"


class SignedWords:
    """What one member of a round signs, and takes for signed.

    Args:
        identity: the member's.
        begun: the digest of the round's `Begin`, 32 bytes. It is signed, too: what somebody has signed in another round
            proves nothing here, even if its leader gives both rounds one id.
        members: the group.
        coordinator: its index.

    Attributes:
        proved: whether the coordinator has signed two commits of this round.
    """

    def __init__(self, identity: Identity, begun: bytes, members: Sequence[PeerID], coordinator: int) -> None:
        self._identity, self._begun, self._members, self._coordinator = identity, begun, members, coordinator
        self._in_use, self._leads = len(members) > 2, identity.peer_id == members[coordinator]
        self._signed: Commit | None = None
        self._told: CommitDigest | None = None
        self.proved = False

    # ------------------------------------------------------------------------------------------------------- reports

    def signed_report(self, report: Report) -> Report:
        """A report of averages that this member has made."""
        if not self._in_use:
            return report
        return replace(report, signature=self._identity.sign(_REPORT, self._begun + _digest(report.held)))

    def has_signed(self, member: int, report: Report) -> bool:
        """Return whether this member has signed this report; in a group of two no report is signed."""
        return not self._in_use or self._is_signed(member, _REPORT, _digest(report.held), report.signature)

    # ------------------------------------------------------------------------------------------------------- commits

    def signed(self, message: Order) -> Order:
        """What the coordinator says, as it sends it to everybody."""
        if not self._in_use or not isinstance(message, Commit):
            return message
        if self._signed is None:
            signature = self._identity.sign(_COMMIT, self._begun + _digest(message.unsigned))
            self._signed = replace(message, signature=signature)
        return self._signed

    def takes(self, message: Order) -> bool:
        """Return whether what must be signed in this message is signed, whoever tells it."""
        match message:
            case Shown(member, report):
                return self.has_signed(member, report)
            case Commit() if self._in_use and not self._leads:
                return self._is_signed(self._coordinator, _COMMIT, _digest(message.unsigned), message.signature)
        return True

    def told(self, commit: Commit) -> CommitDigest | None:
        """What the others are told of the commit that this member has taken; None in a group of two."""
        if self._told is None and self._in_use:
            self._told = CommitDigest(_digest(commit.unsigned), commit.signature)
        return self._told

    def prove_a_lie(self, commit: Commit, other: CommitDigest, teller: PeerID) -> bool:
        """Return whether another member got another commit than the one that this member has taken.

        Raises:
            PeerProtocolError: it says so, and the coordinator has not signed that.
        """
        if (mine := self.told(commit)) is not None and other.digest == mine.digest:
            return False
        if not self.proved and not self._is_signed(self._coordinator, _COMMIT, other.digest, other.signature):
            raise PeerProtocolError("a commit that its coordinator has not signed", teller)
        self.proved = True
        return True

    def _is_signed(self, member: int, context: bytes, digest: bytes, signature: bytes) -> bool:
        return verify(self._members[member], context, self._begun + digest, signature)


def _digest(said: object) -> bytes:
    return blake3(encode(said)).digest()
