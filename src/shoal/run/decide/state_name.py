"""The name of a state: which swarm steps and averagings went into the parameters, by a digest of their history.

Each name follows from the one before it, so equal digests are equal histories. Peers meet under a key that holds the
digest; of two names the one with the larger `key` is the better state
(`docs/why/decisions/0001-commit-and-fork-rules.md`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from shoal.averaging import StepResult
from shoal.errors import LocalError
from shoal.protocol.wire import MAX_EPOCH, MAX_SAMPLES, Digest, Epoch, Samples, encode
from shoal.run.view.progress import StateKey

__all__ = ["UNDECIDED", "StateName"]

UNDECIDED = 254
"""The rank of a beginning whose peer does not know the others yet. That of a peer without data is behind it."""


class StateName(NamedTuple):
    """The name of what the parameters of a peer are: swapped as one value whenever they change.

    Every name that is made of one within the bounds is within the bounds: samples are counted up to the bound, and
    there is no step beyond the last epoch.

    Attributes:
        epoch: swarm steps that went into them.
        digest: SHA-256, names their history.
        samples: that went into them; and one for each averaging of states, so that the averaged state is the better
            one, and for each optimizer step that was taken before the run.
    """

    epoch: Epoch
    digest: Digest
    samples: Samples

    @classmethod
    def genesis(cls, fingerprint: bytes, steps: int = 0, *, model: bytes = b"", rank: int = 0) -> StateName:
        """Before any step of the swarm.

        Args:
            fingerprint: of all parameters, and of what the optimizer keeps.
            steps: that the optimizer has taken before: a peer that resumes has a better state than one that begins.
            model: the fingerprint of the model of which these parameters are a fragment; empty if they are all of it.
                It comes first in the digest: so among peers that begin with different weights one has the better state
                of each fragment, and no model is put together of the first weights of several.
            rank: of this beginning among those with other weights: see `rank_among`.
        """
        digest = hashlib.sha256(b"shoal genesis" + fingerprint).digest()
        if model:
            digest = hashlib.sha256(b"shoal genesis of model" + model).digest()[:16] + digest[:16]
        return cls(0, digest, min(steps, MAX_SAMPLES)).ranked(rank)

    def ranked(self, rank: int) -> StateName:
        """This beginning with another rank. It is the first byte of the digest: the lower one is the better state."""
        return self._replace(digest=bytes([rank]) + self.digest[1:])

    def rank_among(self, others: Iterable[Digest]) -> int:
        """The rank of this beginning beside others: so the weights win that were there first, not any peer's.

        Args:
            others: the digests of the beginnings that are there. Those that are undecided came when this one did.

        Returns:
            That of the same weights if they are there, else one behind all others.
        """
        known = [(digest[0], digest[1:] == self.digest[1:]) for digest in others if digest[0] < UNDECIDED]
        last = 1 + max((rank for rank, _ in known), default=-1)
        return min((rank for rank, same in known if same), default=min(last, UNDECIDED - 1))

    @classmethod
    def of_auxiliary(cls, fingerprint: bytes) -> StateName:
        """The beginning of a peer without data: worse than that of any trainer, so that nobody takes it over."""
        return cls(0, b"\xff" * 16 + hashlib.sha256(b"shoal auxiliary" + fingerprint).digest()[:16], 0)

    def after_loading(self, fingerprint: bytes) -> StateName:
        """After a checkpoint was loaded that was saved under this name; `fingerprint` is of the parameters now."""
        digest = hashlib.sha256(b"shoal resumed" + self.digest + fingerprint).digest()
        loaded = self._replace(digest=digest)
        return loaded if self.epoch else loaded.ranked(self.digest[0])

    def after_round(self, result: StepResult, agreement: bytes) -> StateName:
        """After a swarm step from the average of a round; `agreement` is the digest of how it is taken."""
        return self._after_step(_history(result) + agreement, int(result.outcome.weight))

    def after_step_alone(self, chance: bytes, peer: bytes, samples: int) -> StateName:
        """After a step that a peer took alone; 16 random bytes tell it from every other."""
        return self._after_step(chance + peer, samples)

    def _after_step(self, what: bytes, samples: int) -> StateName:
        digest = hashlib.sha256(b"shoal step" + self.digest + what).digest()
        return StateName(self._next_epoch, digest, min(self.samples + samples, MAX_SAMPLES))

    @property
    def _next_epoch(self) -> int:
        if self.epoch >= MAX_EPOCH:
            raise LocalError(f"the run has taken {MAX_EPOCH} steps of the swarm: no state after that has a name")
        return self.epoch + 1

    def after_averaging(self, result: StepResult) -> StateName:
        """After the states were averaged in a round."""
        digest = hashlib.sha256(b"shoal state" + self.digest + _history(result)).digest()
        return StateName(self.epoch, digest, min(self.samples + 1, MAX_SAMPLES))

    def after_last_average_alone(self, chance: bytes, peer: bytes) -> StateName:
        """After the end of the run, where nobody is left to average the states with; 16 random bytes name it."""
        digest = hashlib.sha256(b"shoal state" + self.digest + chance + peer).digest()
        return StateName(self.epoch, digest, min(self.samples + 1, MAX_SAMPLES))

    def after_interruption(self, chance: bytes, peer: bytes, *, step: bool) -> StateName:
        """After a swarm step, or an averaging of states, that was not taken to its end; 16 random bytes name it.

        Better than the state before, and worse than the one that it should have become.
        """
        digest = hashlib.sha256(b"shoal interrupted" + self.digest + chance + peer).digest()
        return StateName(self._next_epoch if step else self.epoch, digest, self.samples)

    def after_difference(self, chance: bytes, peer: bytes) -> StateName:
        """The name of parameters that others do not have under this name, or that a step which raised has left.

        Worse than the state of this name.
        """
        digest = hashlib.sha256(b"shoal differs" + self.digest + chance + peer).digest()
        differs = StateName(self.epoch, digest, max(0, self.samples - 1))
        return differs if self.epoch else differs.ranked(UNDECIDED - 1)

    @property
    def key(self) -> StateKey:
        """Orders states: the larger one is the better state."""
        return StateKey.of(self.epoch, self.samples, self.digest)

    @property
    def group_tag(self) -> str:
        """Keeps peers at other states out of the group."""
        return f"@{self.epoch}-{self.digest.hex()[:16]}"


def _history(result: StepResult) -> bytes:
    """The addition of a round to the history of a state: its id, and all of its verdict."""
    return result.round_id + hashlib.sha256(encode(result.outcome.commit)).digest()
