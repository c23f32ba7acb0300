"""The messages between the demo's supervisor and its children: JSON, one message a line.

======================  =======================  =============================================================
from                    through                  messages
======================  =======================  =============================================================
supervisor to child     argument                 `PeerConfig` or `BaselineConfig`
supervisor to peer      stdin                    `Stop`, `Leave`; the end of stdin means: exit at once
peer to supervisor      stdout                   `Working`, `Ready`, `EpochReached`, `HeldOutLoss`, `RoundDone`,
                                                 `RoundLost`, `PeerGone`, `Downloaded`, `Note`, `Finished`
baseline to supervisor  stdout                   `BaselinePoint`
======================  =======================  =============================================================

Nothing here is part of shoal's network protocol, and nothing here imports torch.
"""

from __future__ import annotations

import msgspec

from shoal.demo.settings import Training

__all__ = [
    "BaselineConfig",
    "BaselinePoint",
    "Command",
    "Downloaded",
    "EpochReached",
    "Finished",
    "HeldOutLoss",
    "Leave",
    "Note",
    "PeerConfig",
    "PeerGone",
    "Ready",
    "Report",
    "RoundDone",
    "RoundLost",
    "Stop",
    "Working",
    "decode_command",
    "decode_report",
    "encode",
]


class PeerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a peer process needs to know.

    Attributes:
        name: the name that people see.
        run_id: beginning of the run's name; the peer adds the digest of its text.
        initial_peers: addresses or invites of peers that are there already; empty for the very first.
        speed: part of the time it computes, 0 to 1; it idles for the rest, to play a slower machine.
        stream_seed: decides which batches it draws; no two peers have the same.
        judge_turn: it measures the held-out loss at epochs where `epoch % judge_every == judge_turn`. All peers hold
            the same weights, so one of them is enough for each epoch.
        judge_every: see `judge_turn`.
        training: the settings that all peers share.
    """

    name: str
    run_id: str
    initial_peers: tuple[str, ...]
    speed: float
    stream_seed: int
    judge_turn: int
    judge_every: int
    training: Training


class BaselineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the single process that is compared with the swarm.

    Attributes:
        epoch_samples: sequences in each epoch, as the swarm had them.
        limit_s: it stops after this time, done or not.
        stream_seed: decides which batches it draws; no peer's.
        training: as for the peers.
    """

    epoch_samples: tuple[int, ...]
    limit_s: float
    stream_seed: int
    training: Training


# ------------------------------------------------------------------------------------------------ supervisor to peer


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of the supervisor's messages to a peer."""


class Stop(Command, frozen=True, kw_only=True):
    """Announce to the swarm that `epoch` is its last one."""

    epoch: int


class Leave(Command, frozen=True, kw_only=True):
    """Leave the swarm in order and exit."""


# ------------------------------------------------------------------------------------------------ child to supervisor


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="type"):
    """Base of a child's messages to the supervisor."""


class Working(Report, frozen=True, kw_only=True):
    """The present work of the peer; sent about twice a second, and when it changes.

    Attributes:
        state: one or two words: "loading torch", "joining", "training", "averaging", "downloading", "waiting".
        epoch: the swarm epoch its weights are at.
        samples: sequences it has computed since it started.
        samples_per_s: the same per second, idle time included, over the last seconds.
        loss: of the last micro-batch, nats; None before the first.
        bytes_sent: payload of averaging rounds sent since it started.
        bytes_received: the same, received.
    """

    state: str
    epoch: int = 0
    samples: int = 0
    samples_per_s: float = 0.0
    loss: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0


class Ready(Report, frozen=True, kw_only=True):
    """The peer has joined the network and can be joined.

    Attributes:
        peer_id: printed form of its identity.
        run_id: full name of the run.
        addresses: where it listens.
        parameters: number of weights of the model.
    """

    peer_id: str
    run_id: str
    addresses: tuple[str, ...]
    parameters: int


class EpochReached(Report, frozen=True, kw_only=True):
    """The peer took the swarm's step into `epoch`.

    Attributes:
        epoch: the epoch its weights are at now.
        samples: sequences of the whole swarm that this step was made of.
        peers: how many peers gave them.
    """

    epoch: int
    samples: int
    peers: int


class HeldOutLoss(Report, frozen=True, kw_only=True):
    """Loss on the held-out text with the weights of `epoch`, nats."""

    epoch: int
    loss: float


class RoundDone(Report, frozen=True, kw_only=True):
    """An averaging round was committed: members, those left out on the way, and how long it took."""

    peers: int
    left_out: int
    duration_s: float


class RoundLost(Report, frozen=True, kw_only=True):
    """An averaging round failed; it is tried again."""

    reason: str


class PeerGone(Report, frozen=True, kw_only=True):
    """The connection to another peer is lost."""

    peer_id: str
    reason: str


class Downloaded(Report, frozen=True, kw_only=True):
    """The state was downloaded from other peers and verified.

    Attributes:
        donors: printed peer ids.
        bytes_received: size of the received state.
        duration_s: from the request to the verified state.
    """

    donors: tuple[str, ...]
    bytes_received: int
    duration_s: float


class Note(Report, frozen=True, kw_only=True):
    """A line for the log of events."""

    text: str


class Finished(Report, frozen=True, kw_only=True):
    """The peer stands at the run's last epoch.

    Attributes:
        epoch: the epoch its weights are at.
        weights_sha256: over the bytes of all parameters in order, hexadecimal.
        loss: on the held-out text, nats.
    """

    epoch: int
    weights_sha256: str
    loss: float


class BaselinePoint(Report, frozen=True, kw_only=True):
    """The single process after `epoch` epochs and `samples` sequences; `loss` on the held-out text, nats."""

    epoch: int
    samples: int
    loss: float


AnyCommand = Stop | Leave
AnyReport = (
    Working
    | Ready
    | EpochReached
    | HeldOutLoss
    | RoundDone
    | RoundLost
    | PeerGone
    | Downloaded
    | Note
    | Finished
    | BaselinePoint
)

_commands = msgspec.json.Decoder(AnyCommand)
_reports = msgspec.json.Decoder(AnyReport)


def encode(message: Command | Report | PeerConfig | BaselineConfig) -> bytes:
    """The message as JSON without a line break in it."""
    return msgspec.json.encode(message)


def decode_command(line: bytes) -> AnyCommand:
    """Read one line of a peer's stdin. Raises `msgspec.MsgspecError` if it is no command."""
    command: AnyCommand = _commands.decode(line)
    return command


def decode_report(line: bytes) -> AnyReport:
    """Read one line of a child's stdout. Raises `msgspec.MsgspecError` if it is no report."""
    report: AnyReport = _reports.decode(line)
    return report
