"""The contribution of a peer: how many of its samples went into the swarm's steps. Pure bookkeeping."""

from __future__ import annotations

from shoal.events import duration

__all__ = ["Contribution"]

_LOST = 5


class Contribution:
    """Counts a peer's samples, and finds out that none of them count.

    Attributes:
        contributed: samples that went into a step.
        dropped: samples that were computed and went into none: their state was over before they came.
    """

    def __init__(self) -> None:
        self.contributed = self.dropped = 0
        self._since: tuple[int, int, int, float] | None = None  # epoch, contributed, batches, time
        self._batches = self._lost = 0  # states that ended with batches of ours in vain, since then
        self._told = False

    def counted(self, samples: int) -> None:
        """So many of this peer's samples went into a step."""
        self.contributed += samples

    def look(self, epoch: int, *, processed: int, batches: int, held: int, now: float) -> str | None:
        """The state has changed. Returns a warning for the user, once, if none of this peer's samples count.

        Args:
            epoch: of the state.
            processed: samples that were computed so far.
            batches: in so many batches.
            held: samples that are accumulated for the next step.
            now: seconds.
        """
        self.dropped = max(0, processed - self.contributed - held)
        new, self._batches = batches - self._batches, batches
        if self._since is None or self._since[1] != self.contributed:
            self._since, self._lost = (epoch, self.contributed, batches, now), 0
        elif new:
            self._lost += 1  # once for epochs that went by together: a peer that was stopped missed them, and no more
        if self._told or self._lost < _LOST:
            return None
        first, _, before, since = self._since
        epochs, done = epoch - first, batches - before
        self._told = True
        batch_s, epoch_s = (now - since) / done, (now - since) / epochs
        numbers = f"a batch takes it {duration(batch_s)}, and an epoch of the swarm {duration(epoch_s)}"
        if batch_s < epoch_s / 2:
            why = (
                f"{numbers}, so its batches are short enough, and the rounds go on without it. `shoal debug dump PID` "
                "shows why; `shoal doctor INVITE` checks its line, its descriptors and its memory. If another peer has "
                "the same identity (identity_path), only one of the two can take part"
            )
        else:
            why = (
                f"{numbers}, so its state is over before the batch is done. Give this peer smaller batches, or raise "
                "target_batch_size on all, so that an epoch lasts longer"
            )
        return f"none of the samples that this peer computed in the last {epochs} epochs count: {why}"
