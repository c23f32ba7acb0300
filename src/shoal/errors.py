"""Every exception that shoal raises on purpose.

::

    ShoalError
    ├── ConfigError            an argument, file or setting is wrong: the message names it (also a ValueError)
    ├── LocalError             this process misused an object
    │   ├── ClosedError        the object, or one that it depends on, was shut down
    │   └── SimulationError    a simulation cannot go on: deadlock, a limit, something that takes real time
    ├── PeerError              another peer, or the way to it, is at fault (carries .peer_id)
    │   ├── PeerUnreachable    no connection could be made, or it was lost
    │   ├── PeerTimeout        the peer did not answer in time (also a TimeoutError)
    │   ├── PeerProtocolError  the peer sent something that the protocol does not allow
    │   └── PeerRefused        the peer answered, and said no (version, identity, limits, wrong run)
    ├── RoundFailed            an averaging round ended without a result; no tensor was touched
    │   └── SchemaMismatch     the peers' tensors differ; names the first that does
    ├── StateUnavailable       no donor gave a complete, verified state; nothing was applied
    │   └── NoMemoryForState   this machine has no memory for it: no donor is at fault
    └── RankLost               a process of our own torch.distributed group is gone (carries .ranks)

The party at fault decides the type: a `PeerError` costs that peer its place but never ends the process; the caller must
mend a `ConfigError` or a `LocalError`. `assert` is kept for shoal's own invariants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.base.peer import PeerID

__all__ = [
    "ClosedError",
    "ConfigError",
    "LocalError",
    "NoMemoryForState",
    "NobodyContributes",
    "PeerError",
    "PeerProtocolError",
    "PeerRefused",
    "PeerTimeout",
    "PeerUnreachable",
    "RankLost",
    "RoundFailed",
    "SchemaMismatch",
    "ShoalError",
    "SimulationError",
    "StateUnavailable",
    "is_out_of_memory",
]


class ShoalError(Exception):
    """Base of every exception that shoal raises on purpose."""


class ConfigError(ShoalError, ValueError):
    """An argument, a file or a setting is wrong; the message names it and says what to do."""


class LocalError(ShoalError):
    """This process used an object in a way it does not allow."""


class ClosedError(LocalError):
    """The object, or one that it depends on, was shut down."""


class SimulationError(LocalError):
    """A simulation (`shoal.sim`) cannot go on: a deadlock, a limit, or something that would take real time."""


class PeerError(ShoalError):
    """Another peer, or the way to it, is at fault.

    Args:
        message: what happened, in words for a log.
        peer_id: the peer at fault; None before the other side has proved who it is.
    """

    def __init__(self, message: str, peer_id: PeerID | None = None) -> None:
        super().__init__(f"{message} (peer {peer_id.short()})" if peer_id is not None else message)
        self.message = message
        self.peer_id = peer_id


class PeerUnreachable(PeerError):
    """No connection to the peer could be made, or its connection was lost.

    Args:
        message: see `PeerError`.
        peer_id: see `PeerError`.
        nobody_listens: the machine at each address of the peer answered at once that no program listens there.
    """

    def __init__(self, message: str, peer_id: PeerID | None = None, *, nobody_listens: bool = False) -> None:
        super().__init__(message, peer_id)
        self.nobody_listens = nobody_listens


class PeerTimeout(PeerError, TimeoutError):
    """The peer is connected, as far as is known, but did not answer in time."""


class PeerProtocolError(PeerError):
    """The peer sent bytes that the protocol does not allow. Its connection is dropped."""


class PeerRefused(PeerError):
    """The peer answered and said no: another protocol version, another identity, a limit, another run.

    Args:
        message: see `PeerError`.
        peer_id: see `PeerError`.
        code: the reason, for programs: `refused`, or the value of `wire.Failure.code` (`busy`, `unknown`, `bad`,
            `internal`). If a handler raises this with `busy`, the other side is told `busy`.
    """

    def __init__(self, message: str, peer_id: PeerID | None = None, *, code: str = "refused") -> None:
        super().__init__(message, peer_id)
        self.code = code


class RoundFailed(ShoalError):
    """An averaging round ended without a result. The averaged tensors are as they were before it.

    Args:
        reason: what happened, one phrase.
        peers: the peers that caused it, if any are known.
        round_id: the id of the round, if there was a group.
    """

    def __init__(self, reason: str, peers: Sequence[PeerID] = (), *, round_id: bytes | None = None) -> None:
        blamed = f" (peers {', '.join(peer.short() for peer in peers)})" if peers else ""
        super().__init__(f"{reason}{blamed}")
        self.reason = reason
        self.peers, self.round_id = tuple(peers), round_id


class SchemaMismatch(RoundFailed):
    """The peers' tensors, codecs or run settings differ; `reason` names the first difference."""


class NobodyContributes(RoundFailed):
    """All peers that looked for a group are auxiliary: there is nothing to average. The step is not tried again."""


class StateUnavailable(ShoalError):
    """No donor gave a complete and verified state before the deadline. Nothing was applied."""


class NoMemoryForState(StateUnavailable):
    """This machine has no memory for the state that was offered. No donor is at fault."""


class RankLost(ShoalError):
    """A collective of the `torch.distributed` group failed: a process is gone, or silent for the group's timeout.

    Args:
        message: what happened, and which process is to blame.
        ranks: the ranks of the processes that are gone, as far as is known.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this machine, or its device, had no memory for what was to be done. Torch says so in several ways."""
    if isinstance(error, MemoryError):
        return True
    text = f"{error}".lower()
    signs = ("out of memory", "allocate memory", "not enough memory", "alloc_failed")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
