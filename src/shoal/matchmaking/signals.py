"""The rules, events and actions of the group machine. Pure values.

Two times are used. `now` is the loop's time (monotonic): for windows, pauses and settling. An *expiration* is
wall-clock time: it is sent to other peers, and together with the peer id it gives the order in which peers lead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.peer import PeerID
from shoal.rpc.rhythm import LOOK_S
from shoal.wire import Contact

__all__ = [
    "MAX_GROUP_SIZE",
    "Accept",
    "Action",
    "Ask",
    "AskAccepted",
    "AskLost",
    "AskRedirected",
    "AskRefused",
    "BeginReceived",
    "Cancel",
    "Declaration",
    "Declare",
    "DeclareFailed",
    "Declared",
    "DirectoryFailed",
    "DirectoryRead",
    "Event",
    "Fail",
    "JoinAsked",
    "JoinGone",
    "Key",
    "Memory",
    "Mismatched",
    "Nudge",
    "Nudged",
    "PeerGone",
    "ReadDirectory",
    "Redirect",
    "Refuse",
    "Rules",
    "Start",
    "StopAsking",
    "Tick",
    "Withdraw",
]

MAX_GROUP_SIZE = 256
"""No group is larger, whatever `target_size` says: this bounds the `Begin` message."""

Key = tuple[float, PeerID]
"""(expiration, peer id): the earlier of two peers leads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules by which one peer forms groups.

    Attributes:
        target_size: a group of this many starts at once; None: no size is full (but for `MAX_GROUP_SIZE`).
        min_size: a smaller group never starts.
        window_s: how long one declaration stands; at its end the group starts or the peer declares again.
        deadline_s: seconds from the start after which the search is over, even in the middle of something; None: one
            window only, plus the time that a leader that was found needs to answer and to begin.
        one_window: no second window begins, even if there is a deadline.
        settle_s: shortest quiet time after a join before a group that is not full may start.
        settle_max_s: longest such quiet time that is chosen from observed gaps.
        patience_s: a leader stops waiting for a peer that stands in the directory for longer than this without joining.
        reduces: whether this peer can reduce a slice.
        contributes: whether it has values; False for an auxiliary peer. A group needs one that has.
        leads: whether this peer can lead; False for a client, which never declares.
        grace_s: a declaration counts as live until this long after its expiration, since clocks differ.
        follow_grace_s: how long past its own window a follower waits for its leader's `Begin`.
        look_s: how often a peer that is waited for is checked for silence.
    """

    target_size: int | None = None
    min_size: int = 2
    window_s: float = 5.0
    deadline_s: float | None = None
    one_window: bool = False
    settle_s: float = 0.05
    settle_max_s: float = 0.5
    patience_s: float = 3.0
    reduces: bool = True
    contributes: bool = True
    leads: bool = True
    grace_s: float = 3.0
    follow_grace_s: float = 3.0
    look_s: float = LOOK_S

    @property
    def full_size(self) -> int:
        """The number of members at which a group is full."""
        return min(self.target_size or MAX_GROUP_SIZE, MAX_GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class Declaration:
    """A peer's entry in the directory: it looks for a group until `expiration` (wall clock, seconds)."""

    contact: Contact
    expiration: float

    @property
    def peer(self) -> PeerID:
        """The peer that declared."""
        return self.contact.peer

    @property
    def key(self) -> Key:
        """The declarer's place in the order of leaders."""
        return self.expiration, self.contact.peer


@dataclass(slots=True)
class Memory:
    """The memory of a peer from one search to the next. Bounded.

    Attributes:
        lost: peers whose link was lost; their declarations with expirations up to the value are dead.
        companions: the members of the last group under the same key, which are likely to come again.
        read_s: how long the last read of the directory took: a measure of how far away the others are.
        declared: the latest expiration that we declared ourselves with.
        leader: the leader of the last group that waited for all expected peers; None if there is none.
        led: whether that was this peer.
    """

    lost: dict[PeerID, float] = field(default_factory=dict)
    companions: frozenset[PeerID] = frozenset()
    read_s: float = 0.0
    declared: float = -math.inf
    leader: Contact | None = None
    led: bool = False

    _MAX_LOST = 1024

    def lose(self, peer: PeerID, expiration: float) -> None:
        """Declarations of this peer up to `expiration` are dead."""
        self.lost[peer] = max(expiration, self.lost.pop(peer, -math.inf))
        if len(self.lost) > self._MAX_LOST:
            del self.lost[next(iter(self.lost))]


# -------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Declared:
    """The declaration is stored; `declarations` are those that stood at that time."""

    declarations: tuple[Declaration, ...] = ()


@dataclass(frozen=True, slots=True)
class DeclareFailed:
    """The declaration could not be stored."""

    error: str


@dataclass(frozen=True, slots=True)
class DirectoryRead:
    """The read that was asked for last is done: the current declarations, perhaps with our own."""

    declarations: tuple[Declaration, ...]


@dataclass(frozen=True, slots=True)
class DirectoryFailed:
    """The read that was asked for last gave nothing."""

    error: str


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """A peer with our schema and settings asks us to lead it. A peer without addresses (a client) can never lead."""

    contact: Contact
    expiration: float
    reduces: bool
    contributes: bool = True


@dataclass(frozen=True, slots=True)
class JoinGone:
    """A peer that we accepted left, or its stream is lost."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class Mismatched:
    """A peer whose schema or settings differ asked us; it was refused. `text` names the first difference."""

    peer: PeerID
    text: str


@dataclass(frozen=True, slots=True)
class AskAccepted:
    """The peer that we asked leads us."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class AskRefused:
    """The peer that we asked, or that led us, said no."""

    peer: PeerID
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class AskRedirected:
    """The peer that we asked, or that led us, follows `leader`."""

    peer: PeerID
    leader: Contact


@dataclass(frozen=True, slots=True)
class AskLost:
    """The peer that we asked, or that led us, cannot be reached, broke the protocol, or said nothing in time."""

    peer: PeerID
    reason: str


@dataclass(frozen=True, slots=True)
class BeginReceived:
    """Our leader started the group."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class Nudged:
    """The result of a nudge: the code of the refusal, `redirected` (to `leader`, which the peer follows), or `lost`."""

    peer: PeerID
    code: str
    text: str = ""
    leader: Contact | None = None


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The link to this peer is lost; `Memory.lost` holds it already."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `deadline()` is reached, or the result of `expected()` may have changed."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop looking."""


Event = (
    Declared
    | DeclareFailed
    | DirectoryRead
    | DirectoryFailed
    | JoinAsked
    | JoinGone
    | Mismatched
    | AskAccepted
    | AskRefused
    | AskRedirected
    | AskLost
    | BeginReceived
    | Nudged
    | PeerGone
    | Tick
    | Cancel
)

# ------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Declare:
    """Store our declaration in the directory, and see who is there; answered by `Declared` or `DeclareFailed`."""

    expiration: float


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Take our declaration out of the directory. Not answered."""


@dataclass(frozen=True, slots=True)
class ReadDirectory:
    """Begin to read the directory now; answered by `DirectoryRead` or `DirectoryFailed`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Open a `Join` stream to this peer, with our `expiration`; answered by an `Ask…` event in bounded time."""

    contact: Contact
    expiration: float


@dataclass(frozen=True, slots=True)
class StopAsking:
    """Leave the peer that we asked or follow. No more events about it may come."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class Nudge:
    """Open a `Join` stream to a *later* peer, which refuses it but learns of us; answered by `Nudged`."""

    contact: Contact
    expiration: float


@dataclass(frozen=True, slots=True)
class Accept:
    """Tell the asker that it is in."""

    peer: PeerID


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the asker, or a peer accepted before, that it is not in."""

    peer: PeerID
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Redirect:
    """Tell the asker, or a peer accepted before, to ask our leader."""

    peer: PeerID
    leader: Contact


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the group of ourselves and these followers. The machine is done."""

    followers: tuple[PeerID, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """There is no group: the reason, and the peers that caused it. The machine is done."""

    reason: str
    peers: tuple[PeerID, ...] = ()
    mismatch: bool = False


Action = Declare | Withdraw | ReadDirectory | Ask | StopAsking | Nudge | Accept | Refuse | Redirect | Start | Fail
