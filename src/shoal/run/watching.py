"""A run as its peers tell it in the DHT: `read_run`, for programs that watch a run and take no part in it.

The peers of a run publish where they stand (`shoal.protocol.wire.Progress`, in the DHT under `RUN_ID_progress`).
Whoever reads that is no peer of the run, and nobody waits for it. Each peer is asked for a sign of life. One that gives
none and has not renewed its entry for some seconds is left out: it is gone. An entry is given as its peer wrote it;
unreadable entries are left out.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from shoal.averaging.core import PeerCore
from shoal.dht import DhtNode, ValueWithExpiration
from shoal.errors import ConfigError, PeerError
from shoal.protocol.wire import DhtPing, Progress, decode
from shoal.run.view.progress import StateKey
from shoal.runtime.dht import DHT

__all__ = ["RunStatus", "read_run"]

_ANSWER_S = 2.0
_RENEWED_S = 3.0
"""An entry that is older was not renewed: peers renew their entries every two seconds."""

_MOST = 1e18
"""The highest rate that counts, samples a second, so that sums stay finite."""


@dataclass(frozen=True)
class RunStatus:
    """A run as its peers describe it.

    Attributes:
        run_id: the run's name.
        peers: the entry of each peer, the best state first: its `epoch`, `contact`, how much it has
            `done` of the next step.
        answering: the ids of the peers that gave a sign of life.
    """

    run_id: str
    peers: tuple[Progress, ...]
    answering: frozenset[str]

    @property
    def best(self) -> Progress:
        """A peer at the best state, to which the others catch up."""
        return self.peers[0]

    @cached_property
    def together(self) -> tuple[Progress, ...]:
        """The peers at the best state."""
        return tuple(peer for peer in self.peers if peer.digest == self.best.digest)

    def differs(self, peer: Progress) -> bool:
        """Whether a peer is at the best state by name, but had other parameters at the last check."""
        here = peer.digest == self.best.digest
        return here and peer.check is not None and peer.check[2] != self._checked_states[peer.check[0]]

    @cached_property
    def _checked_states(self) -> dict[int, bytes]:
        """The digest of parameters that most peers at the best state found, at the check of each epoch."""
        found = Counter((peer.check[0], peer.check[2]) for peer in self.together if peer.check is not None)
        # Of equally many the first digest: what is last in this order stays.
        return dict(sorted(found, key=lambda each: (found[each], [-byte for byte in each[1]])))

    @property
    def checked(self) -> str | None:
        """The result of the last check of the parameters by the peers at the best state; None if there was none."""
        checks = [peer.check for peer in self.together if peer.check is not None]
        if not checks:
            return None
        epoch = max(check[0] for check in checks)
        newest = [check for check in checks if check[0] == epoch]
        others = sum(map(self.differs, self.together))
        if others:
            return f"{others} of {len(checks)} differ"
        equal = len({check[1] for check in newest}) == 1
        what = "identical" if equal else "identical but for rounding"
        return f"{what} at epoch {epoch} on {len(newest)} of {len(self.together)}"

    @property
    def samples(self) -> int:
        """The samples accumulated for the next step; if peers merge, how far they are on their way, in thousandths."""
        return sum(peer.done for peer in self.together)

    @staticmethod
    def rate(peer: Progress) -> float:
        """The speed of one peer, samples per second."""
        return min(max(0.0, peer.rate), _MOST) if math.isfinite(peer.rate) else 0.0

    @cached_property
    def samples_per_s(self) -> float:
        """The speed of all peers together, samples per second."""
        return sum(map(self.rate, self.peers))

    @property
    def target_batch_size(self) -> int | None:
        """The samples of one step; None if the peers do not say."""
        text = self.best.settings.get("target_batch_size", "")
        return int(text) if text.isdecimal() and len(text) < 16 else None

    @property
    def end_epoch(self) -> int | None:
        """The epoch by which the run ends, as more than half of the peers at its best state announce it."""
        said = sorted(math.inf if peer.end_epoch is None else peer.end_epoch for peer in self.together)
        middle = said[len(said) // 2] if said else math.inf
        return None if middle == math.inf else int(middle)

    def share(self, peer: Progress) -> float:
        """The part of all samples that comes from this peer, 0 to 1."""
        return self.rate(peer) / self.samples_per_s if self.samples_per_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The whole status, for JSON."""
        return {
            "run_id": self.run_id,
            "epoch": self.best.epoch,
            "samples": self.samples,
            "target_batch_size": self.target_batch_size,
            "samples_per_s": self.samples_per_s,
            "end_epoch": self.end_epoch,
            "settings": dict(self.best.settings),
            "parameters": self.checked,
            "peers": [
                {
                    "peer_id": str(peer.contact.peer),
                    "epoch": peer.epoch,
                    "state_digest": peer.digest.hex(),
                    "differs": self.differs(peer),
                    "branch_samples": peer.branch_samples,
                    "samples": peer.done,
                    "samples_per_s": self.rate(peer),
                    "share": self.share(peer),
                    "alone": peer.alone,
                    "addresses": [str(address) for address in peer.contact.addresses],
                    "answers": str(peer.contact.peer) in self.answering,
                }
                for peer in self.peers
            ],
        }


def read_run(dht: DHT, run_id: str, *, lost: frozenset[str] = frozenset()) -> RunStatus | None:
    """Read where the peers of a run stand, without being one of them. Takes some seconds if one of them has died.

    Args:
        dht: this peer, started.
        run_id: names the run.
        lost: ids of peers whose link was lost a moment ago, so that they are not waited for.

    Returns:
        None if nobody trains the run.

    Raises:
        ClosedError: the DHT was shut down.
    """
    peers = _read(dht, run_id)
    answering = dht.loop_thread.run(_answering(dht.core(), peers), 2 * _ANSWER_S)
    silent = {str(peer.contact.peer): peer.time for peer in peers if str(peer.contact.peer) not in answering}
    if silent.keys() - lost:
        dht.loop_thread.run(asyncio.sleep(_RENEWED_S), 2 * _RENEWED_S)
        peers = _read(dht, run_id)
    peers = [peer for peer in peers if peer.time > silent.get(str(peer.contact.peer), -math.inf)]
    return RunStatus(run_id, tuple(peers), frozenset(answering)) if peers else None


def _read(dht: DHT, run_id: str) -> list[Progress]:
    def get(_: DHT, node: DhtNode) -> Coroutine[Any, Any, ValueWithExpiration | None]:
        return node.get(f"{run_id}_progress", latest=True, of_peers=True)

    record = dht.run_coroutine(get)
    return _decode(record.value if record is not None else None)


def _decode(entries: object) -> list[Progress]:
    """The readable entries, the best state first."""
    peers = []
    for subkey, entry in entries.items() if isinstance(entries, Mapping) else ():
        try:
            progress = decode(entry.value, Progress)
        except (msgspec.MsgspecError, TypeError, ConfigError):
            continue
        if progress.contact.peer == subkey and not progress.left:
            peers.append(progress)

    def rank(peer: Progress) -> tuple[StateKey, float, str]:
        return StateKey.of(peer.epoch, peer.branch_samples, peer.digest), RunStatus.rate(peer), str(peer.contact.peer)

    return sorted(peers, key=rank, reverse=True)


async def _answering(core: PeerCore, peers: Sequence[Progress]) -> list[str]:
    """The ids of the peers that answer a ping."""

    async def ping(peer: Progress) -> bool:
        if peer.contact.peer == core.peer_id:
            return True
        try:
            await core.endpoint.call(peer.contact, DhtPing(), timeout_s=_ANSWER_S)
        except PeerError:
            return False
        return True

    answers = await asyncio.gather(*map(ping, peers))
    return [str(peer.contact.peer) for peer, answered in zip(peers, answers, strict=True) if answered]
