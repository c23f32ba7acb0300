"""Ranks go on together or not at all: an error on one is raised on all, so no rank waits for one that gave up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from shoal.errors import ConfigError, RankLost
from shoal.zero.watch import Watch

__all__ = ["Agreement"]


class Agreement:
    """Agreement among the ranks of one process group.

    Args:
        group: the ranks.
        watch: the watch of the same ranks.
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._group, self._watch = group, watch

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """If a rank raises in this block, all raise at its end: that rank its own error, the others `ConfigError`."""
        problem: Exception | None = None
        try:
            yield
        except RankLost:
            raise
        except Exception as error:  # noqa: BLE001 (raised again below)
            problem = error
        texts = self.gather("" if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is not None:
            raise problem
        if wrong := [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]:
            raise ConfigError("another rank cannot go on: " + "; ".join(wrong))

    def alike(self, description: str, what: str) -> None:
        """Raise `ConfigError` on all ranks unless all describe the same.

        Args:
            description: lines; those that differ are named.
            what: the thing that must be the same on all ranks.
        """
        first, *others = self.gather(description)
        for rank, other in enumerate(others, 1):
            if first != other:
                raise ConfigError(
                    f"rank {rank} gave something else than rank 0: {_difference(first, other)}; all ranks must give "
                    f"the same {what}"
                )

    def gather(self, text: str) -> list[str]:
        """The text of each rank."""
        said = [""] * self._group.size()
        with self._watch.named(self._watch.turn("to agree")):
            dist.all_gather_object(said, text, group=self._group)
        return said


def _difference(first: str, second: str) -> str:
    """The first lines that differ."""
    for here, there in zip(first.split("\n"), second.split("\n"), strict=False):
        if here != there:
            return f"{there!r} instead of {here!r}"
    return "one has more than the other"
