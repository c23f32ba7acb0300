"""The messages between the demo's supervisor and its children: JSON, one message a line.

======================  =======================  =============================================================
from                    through                  messages
======================  =======================  =============================================================
supervisor to child     argument                 `PeerConfig` or `BaselineConfig`
supervisor to peer      stdin                    `Stop`, `Leave`; the end of stdin means: exit at once
peer to supervisor      stdout                   `Working`, `Ready`, `HeldOutLoss`, `Finished`, and events of shoal
                                                 (`TOLD`)
baseline to supervisor  stdout                   `BaselinePoint`
======================  =======================  =============================================================

Nothing here is part of shoal's network protocol, and nothing here imports torch.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from shoal import events
from shoal.base.peer import PeerID
from shoal.demo.settings import Training

__all__ = [
    "TOLD",
    "BaselineConfig",
    "BaselinePoint",
    "Command",
    "Finished",
    "HeldOutLoss",
    "Leave",
    "PeerConfig",
    "Ready",
    "Report",
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


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Announce to the swarm that `epoch` is its last one."""

    epoch: int


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leave the swarm in order and exit."""


# ------------------------------------------------------------------------------------------------ child to supervisor


class Working(msgspec.Struct, kw_only=True, tag=True):
    """The present work of the peer; sent about twice a second, and when it changes.

    Attributes:
        state: one or two words: "loading torch", "joining", "training", "averaging", "downloading", "waiting".
        epoch: the swarm epoch its weights are at.
        samples: sequences it has computed since it started.
        samples_per_s: the same per second, idle time included, over the last seconds.
        loss: the loss of the last micro-batch, nats; None before the first.
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


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
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


class HeldOutLoss(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Loss on the held-out text with the weights of `epoch`, nats."""

    epoch: int
    loss: float


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The peer stands at the run's last epoch.

    Attributes:
        epoch: the epoch its weights are at.
        weights_sha256: over the bytes of all parameters in order, hexadecimal.
        loss: on the held-out text, nats.
    """

    epoch: int
    weights_sha256: str
    loss: float


class BaselinePoint(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The single process after `epoch` epochs and `samples` sequences; `loss` on the held-out text, nats."""

    epoch: int
    samples: int
    loss: float


Command = Stop | Leave
Told = (
    events.EpochAdvanced
    | events.RoundFinished
    | events.RoundAborted
    | events.PeerLost
    | events.StateDownloaded
    | events.PeerDropped
    | events.Warned
)
TOLD = get_args(Told)
"""The events of which a peer tells the supervisor."""
Report = Working | Ready | HeldOutLoss | Finished | BaselinePoint | Told


def _decode_peer(kind: type, value: str) -> PeerID:
    assert kind is PeerID
    return PeerID.parse(value)


_encoder = msgspec.json.Encoder(enc_hook=str)  # of all values only peer ids need it
_commands: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_reports: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report, dec_hook=_decode_peer)


def encode(message: Command | Report | PeerConfig | BaselineConfig) -> bytes:
    """The message as JSON without a line break in it."""
    return _encoder.encode(message)


def decode_command(line: bytes) -> Command:
    """Read one line of a peer's stdin. Raises `msgspec.MsgspecError` if it is no command."""
    return _commands.decode(line)


def decode_report(line: bytes) -> Report:
    """Read one line of a child's stdout. Raises `msgspec.MsgspecError` if it is no report."""
    return _reports.decode(line)
