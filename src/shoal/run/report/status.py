"""The status of a run as one of its peers sees it, for a person, a log or a dashboard. Plain values only."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shoal.averaging import StepResult
from shoal.base.peer import PeerID
from shoal.protocol.wire import Progress
from shoal.run.settings import RunSettings
from shoal.run.view.contribution import Contribution
from shoal.run.view.progress import SwarmView

__all__ = ["PeerStatus", "RoundStatus", "Status", "status_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatus:
    """One peer of the run.

    Attributes:
        peer: its id.
        role: `"me"`, `"peer"`, or `"client"`, which only dials.
        epoch: swarm steps in its parameters.
        together: whether it is at this peer's state, or on its way there.
        samples: accumulated for the next step.
        samples_per_s: its speed; 0 before it was measured.
    """

    peer: PeerID
    role: str
    epoch: int
    together: bool
    samples: int
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
    """The last round of gradients that this peer took part in.

    Attributes:
        members: of its group.
        contributors: the members whose gradients are in the average.
        left_out: the members that had gradients and are not in all of it.
        duration_s: from the group to the verdict, seconds.
    """

    members: tuple[PeerID, ...]
    contributors: tuple[PeerID, ...]
    left_out: tuple[PeerID, ...]
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run, as one of its peers sees it now. Its `str` is a line of the main things.

    Attributes:
        run_id: the run.
        epoch: swarm steps in this peer's parameters; if fragments of the model are merged, the merges that all of
            them have had. What follows is then of the fragment whose merge ends the next epoch, but for `swarm_epoch`
            and `finished`.
        swarm_epoch: of the best state that is known.
        phase: what this peer does: collecting, averaging, stepping, behind or ending.
        samples: accumulated for the next step by all peers at this peer's state. If peers merge: how far they are on
            their way to it, each in thousandths, all together.
        target_batch_size: samples of a step. If peers merge: 1000 for each of them.
        eta_s: seconds until there are enough, at the speed of now, or until it is time for a merge; None if no speed is
            known yet.
        peers: all live peers, this one first.
        last_round: None before the first, and after a step that was taken alone.
        contributed: samples of this peer in the steps that led to its state: it falls where that is given up for a
            better one without them. Of what went into some parts of a step, the share of these. With fragments: of the
            one that has fewest.
        dropped: samples of this peer that are in none, and will be in none, with those of batches whose gradients are
            not finite, and of those that came when the run was over; with fragments, of the one with most.
        end_epoch: where the run ends, as far as it is known here; None: nowhere yet.
        finished: whether this peer is at the end, and may leave.
        alone_because: why this peer trains alone though it should not, and what to do: sentences; empty if it does not.
    """

    run_id: str
    epoch: int
    swarm_epoch: int
    phase: str
    samples: int
    target_batch_size: int
    eta_s: float | None
    peers: tuple[PeerStatus, ...]
    last_round: RoundStatus | None
    contributed: int
    dropped: int
    end_epoch: int | None
    finished: bool
    alone_because: tuple[str, ...]

    @property
    def samples_per_s(self) -> float:
        """Speed of all peers together; 0 before it was measured."""
        return sum(peer.samples_per_s for peer in self.peers)

    def __str__(self) -> str:
        """A line for people, such as `epoch 12 of 1000, 2 peers, 3,456 samples/s`."""
        end = "" if self.end_epoch is None else f" of {self.end_epoch}"
        peers = "1 peer" if len(self.peers) == 1 else f"{len(self.peers)} peers"
        return f"epoch {self.epoch}{end}, {peers}, {self.samples_per_s:,.0f} samples/s"

    def as_dict(self) -> dict[str, Any]:
        """All of it in dictionaries, lists, texts and numbers, for JSON."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def status_of(  # noqa: PLR0913 (all but three by name)
    view: SwarmView,
    me: Progress,
    settings: RunSettings,
    *,
    target: int,
    eta_s: float | None,
    phase: str,
    last_round: StepResult | None,
    contribution: Contribution,
    finished: bool,
    alone_because: tuple[str, ...],
) -> Status:
    """The status that belongs to this view, and to `me`, the own progress; for `target` see `Pace`."""
    others = [view.others[peer] for peer in view.peers if peer in view.others]
    return Status(
        run_id=settings.run_id,
        epoch=me.epoch,
        swarm_epoch=view.epoch,
        phase=phase,
        samples=view.done,
        target_batch_size=target,
        eta_s=eta_s,
        peers=tuple(_of_peer(word, view, me) for word in (me, *others)),
        last_round=None if last_round is None else _of_round(last_round),
        contributed=contribution.contributed,
        dropped=contribution.dropped,
        end_epoch=me.end_epoch,
        finished=finished,
        alone_because=alone_because,
    )


def _of_peer(word: Progress, view: SwarmView, me: Progress) -> PeerStatus:
    role = "peer" if word.contact.addresses else "client"
    return PeerStatus(
        peer=word.contact.peer,
        role="me" if word is me else role,
        epoch=word.epoch,
        together=word.contact.peer in view.together,
        samples=word.done,
        samples_per_s=word.rate,
    )


def _of_round(result: StepResult) -> RoundStatus:
    outcome = result.outcome
    return RoundStatus(
        members=tuple(member.contact.peer for member in outcome.members),
        contributors=outcome.contributors,
        left_out=outcome.left_out,
        duration_s=result.duration_s,
    )


def _plain(value: object) -> object:
    if isinstance(value, PeerID):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple | list) else value
