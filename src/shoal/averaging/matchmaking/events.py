"""The language of the group machine: its phases, the events that it takes, the actions that it gives. Pure values.

Two times are used. `now` is the loop's time (monotonic): for windows, pauses and quiet times. An *expiration* is
wall-clock time: it is sent to other peers, and together with the peer id it gives the order in which peers lead.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from types import MappingProxyType

import msgspec

from shoal.base.peer import PeerID
from shoal.protocol.wire import Begin, Contact, JoinAccepted, JoinRedirected, JoinRefused

Key = tuple[bool, float, PeerID]
"""(whether it is a stranger, expiration, peer id): the earlier of two peers leads."""


class Precedence(msgspec.Struct, frozen=True):
    """What a peer that searches makes of the others: in which order they lead, and which of them own tiles.

    Attributes:
        known: the peers that others follow before all *strangers*, whatever these declare. All members of a group must
            name the same ones. Empty: nobody is a stranger.
        shunned: the peers that do not lead us.
        spared: in our groups these own no tiles, unless nobody else can.
        proved: of strangers only these own tiles; None: all do.
    """

    known: Collection[PeerID] = ()
    shunned: Collection[PeerID] = ()
    spared: Collection[PeerID] = ()
    proved: Collection[PeerID] | None = None

    def is_strange(self, peer: PeerID) -> bool:
        """Whether a peer is not among those that are known, if any are."""
        return bool(self.known) and peer not in self.known

    def key(self, peer: PeerID, expiration: float) -> Key:
        """The place of a peer in the order, if it has declared itself until then."""
        return self.is_strange(peer), expiration, peer

    def spares(self, peer: PeerID) -> bool:
        """Whether a peer that joins us is to own no tiles."""
        unproved = self.proved is not None and peer not in self.proved
        return peer in self.spared or (unproved and self.is_strange(peer))


class SearchPhase(enum.Enum):
    """The state of a search."""

    LOOKING = enum.auto()
    """Follows and asks nobody; leads the peers that ask it."""
    ASKING = enum.auto()
    """Has asked another peer to lead; still leads the peers that ask it, but does not start."""
    FOLLOWING = enum.auto()
    """Waits for its leader's `Begin`."""
    OVER = enum.auto()
    """Started, begun, failed or cancelled."""


class Declaration(msgspec.Struct, frozen=True):
    """A peer's entry in the directory: it looks for a group until `expiration` (wall clock, seconds)."""

    contact: Contact
    expiration: float

    @property
    def peer(self) -> PeerID:
        """The peer that declared."""
        return self.contact.peer


# -------------------------------------------------------------------------------------------------------------- events


class Declared(msgspec.Struct, frozen=True):
    """The declaration is stored; `declarations` are those that stood at that time."""

    declarations: tuple[Declaration, ...] = ()


class DeclareFailed(msgspec.Struct, frozen=True):
    """The declaration could not be stored."""

    error: str


class DirectoryRead(msgspec.Struct, frozen=True):
    """The read that was asked for last is done: the current declarations, perhaps with our own."""

    declarations: tuple[Declaration, ...]


class DirectoryFailed(msgspec.Struct, frozen=True):
    """The read that was asked for last gave nothing."""

    error: str


class JoinRequested(msgspec.Struct, frozen=True):
    """A peer with our schema and settings asks us to lead it. A peer without addresses (a client) can never lead."""

    contact: Contact
    expiration: float
    reduces: bool
    contributes: bool = True


class JoinEnded(msgspec.Struct, frozen=True):
    """A peer that asked us has left, or its stream is lost."""

    peer: PeerID


class Mismatched(msgspec.Struct, frozen=True):
    """A peer whose schema or settings differ asked us; it was refused. `text` names the first difference."""

    peer: PeerID
    text: str


class Answered(msgspec.Struct, frozen=True):
    """A message from the peer that we asked to lead, or that leads us. A `Begin` is checked already."""

    peer: PeerID
    answer: JoinAccepted | JoinRefused | JoinRedirected | Begin


class LeaderLost(msgspec.Struct, frozen=True):
    """The peer that we asked, or that led us, cannot be reached, broke the protocol, or said nothing in time."""

    peer: PeerID
    reason: str


class Nudged(msgspec.Struct, frozen=True):
    """A nudge was answered; None: it got no valid answer in time."""

    peer: PeerID
    answer: JoinRefused | JoinRedirected | None


class PeerLost(msgspec.Struct, frozen=True):
    """The link to this peer is lost; `Memory.lost` holds it already."""

    peer: PeerID


class Tick(msgspec.Struct, frozen=True):
    """Time has passed: `deadline()` is reached, or the result of `expected()` may have changed."""


class Cancel(msgspec.Struct, frozen=True):
    """Stop looking."""


DirectoryEvent = Declared | DeclareFailed | DirectoryRead | DirectoryFailed
Event = (
    DirectoryEvent | JoinRequested | JoinEnded | Mismatched | Answered | LeaderLost | Nudged | PeerLost | Tick | Cancel
)

# ------------------------------------------------------------------------------------------------------------- actions


class Declare(msgspec.Struct, frozen=True):
    """Store our declaration in the directory, and see who is there; answered by `Declared` or `DeclareFailed`."""

    expiration: float


class Withdraw(msgspec.Struct, frozen=True):
    """Take our declaration out of the directory. Not answered."""


class ReadDirectory(msgspec.Struct, frozen=True):
    """Begin to read the directory now; answered by `DirectoryRead` or `DirectoryFailed`."""


class AskToLead(msgspec.Struct, frozen=True):
    """Send a `Join` with our `expiration` to this peer; answered by `Answered` or `LeaderLost` in bounded time."""

    contact: Contact
    expiration: float


class LeaveLeader(msgspec.Struct, frozen=True):
    """Leave the peer that we asked or follow. No more events about it may come."""

    peer: PeerID


class Nudge(msgspec.Struct, frozen=True):
    """Send a `Join` to a *later* peer, which refuses it but learns of us; answered by `Nudged`."""

    contact: Contact
    expiration: float


class Answer(msgspec.Struct, frozen=True):
    """Send this to a peer that has asked us. Whatever follows `JoinAccepted` ends its membership."""

    peer: PeerID
    answer: JoinAccepted | JoinRefused | JoinRedirected


class Start(msgspec.Struct, frozen=True):
    """Begin the group of ourselves and these followers. The machine is done."""

    followers: tuple[PeerID, ...]


class Enter(msgspec.Struct, frozen=True):
    """Be a member of the group that our leader began. The machine is done."""

    begin: Begin


class Fail(msgspec.Struct, frozen=True):
    """There is no group: the reason, and the peers that caused it. The machine is done."""

    reason: str
    peers: tuple[PeerID, ...] = ()
    mismatch: bool = False


Action = Declare | Withdraw | ReadDirectory | AskToLead | LeaveLeader | Nudge | Answer | Start | Enter | Fail

# --------------------------------------------------------------------------------------------------------- transitions

Transition = tuple[SearchPhase, str, SearchPhase]
"""The phase, the cause, and the phase that follows. A cause is the name of an event; of the message in an `Answered`;
or `decision`: what the machine decides in LOOKING after each event, and at the start of the search."""

_LOOKING, _ASKING, _FOLLOWING, _OVER = SearchPhase
TRANSITIONS: Mapping[Transition, str] = MappingProxyType(
    {
        (_LOOKING, "start", _ASKING): "the leader of the last group is expected again",
        (_LOOKING, "decision", _ASKING): "an earlier peer is known, or the directory hides all that are expected",
        (_LOOKING, "decision", _OVER): "the group starts, or the last window has ended",
        (_LOOKING, "Nudged", _ASKING): "the nudged peer follows a leader that was not known",
        (_LOOKING, "Cancel", _OVER): "the caller gives up",
        (_ASKING, "JoinAccepted", _FOLLOWING): "its own followers are sent to the new leader",
        (_ASKING, "JoinRefused", _LOOKING): "the code says when that peer may be asked again",
        (_ASKING, "JoinRedirected", _ASKING): "asks the peer that was named",
        (_ASKING, "JoinRedirected", _LOOKING): "in a circle, too often, or to a peer of no use",
        (_ASKING, "Begin", _LOOKING): "before it was accepted",
        (_ASKING, "JoinRequested", _LOOKING): "from the asked peer, which has declared itself anew",
        (_ASKING, "LeaderLost", _LOOKING): "no answer, or one that breaks the protocol",
        (_ASKING, "PeerLost", _LOOKING): "the link to the asked peer is lost",
        (_ASKING, "Tick", _LOOKING): "the asked peer is silent",
        (_ASKING, "Tick", _OVER): "the deadline",
        (_ASKING, "Cancel", _OVER): "the caller gives up",
        (_FOLLOWING, "Begin", _OVER): "enters the group",
        (_FOLLOWING, "JoinRefused", _LOOKING): "the leader gave up, or sent it away",
        (_FOLLOWING, "JoinRedirected", _ASKING): "asks the peer that was named",
        (_FOLLOWING, "JoinRedirected", _LOOKING): "in a circle, too often, or to a peer of no use",
        (_FOLLOWING, "JoinRequested", _LOOKING): "from its leader, which has declared itself anew",
        (_FOLLOWING, "LeaderLost", _LOOKING): "the stream is lost, or breaks the protocol",
        (_FOLLOWING, "PeerLost", _LOOKING): "the link to the leader is lost",
        (_FOLLOWING, "Tick", _LOOKING): "the leader is silent, or did not begin in time",
        (_FOLLOWING, "Tick", _OVER): "the deadline",
        (_FOLLOWING, "Cancel", _OVER): "the caller gives up",
    }
)
"""Every change of phase, and when it happens. Where a pair of phase and cause is not named, the phase stays. The
machine refuses any other change."""
