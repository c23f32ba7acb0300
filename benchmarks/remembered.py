"""Many simulated peers in one process: what all of them read from equal bytes is read, checked and kept once.

In a swarm of n peers each one reads the words, records and contacts of all n, and draws the same conclusions from the
same verdict. In one process that is n² of each, in time and memory, where a peer of its own has n. So within this
context the results of these pure functions are remembered: signatures of records, words of progress, addresses, the
members of a group, and the step that follows from a round. What is sent, and when, stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import msgspec
import pytest

from shoal.averaging import Averager, directory
from shoal.base.peer import Address, PeerID
from shoal.protocol.identity import verify
from shoal.protocol.wire import Member, decode, decode_plain
from shoal.run.decide.agreement import Agreement, Contributor, agree
from shoal.run.decide.committed import Committed

__all__ = ["remembered"]

_LONG_BYTES = 1024
"""Shorter messages are rarely equal, and quickly read."""


class _Agreed:
    """`agree`, for members whose words are the same objects, as `_plain` gives them."""

    def __init__(self) -> None:
        self._last: dict[tuple[object, ...], tuple[object, Agreement]] = {}

    def __call__(
        self,
        gathered: Mapping[PeerID, Any],
        contributors: Collection[PeerID],
        in_part: Mapping[PeerID, Fraction],
        *,
        weigh: partial[Mapping[PeerID, int]],
    ) -> Agreement:
        """See `agree`. Members of one round know the same hosts; those at one state the same steps."""
        weights = weigh.keywords["committed"]
        words = tuple(map(id, gathered.values()))
        key = (tuple(gathered), words, tuple(contributors), tuple(in_part.items()), id(weights))
        if key not in self._last:
            while len(self._last) >= 8:
                del self._last[next(iter(self._last))]
            # Kept with the words: so their ids stay theirs.
            self._last[key] = (gathered, weights), agree(gathered, contributors, in_part, weigh=weigh)
        return self._last[key][1]


class _After:
    """`Committed.after`, for peers at one state whose earlier steps are the same objects."""

    def __init__(self) -> None:
        self._after = Committed.after
        self._last: dict[tuple[object, ...], tuple[object, Committed]] = {}

    def of(self, before: Committed, contributors: Sequence[Contributor], epoch: int) -> Committed:
        """See `Committed.after`."""
        key = (tuple(map(id, before.steps)), id(contributors), epoch)
        if key not in self._last:
            while len(self._last) >= 8:
                del self._last[next(iter(self._last))]
            self._last[key] = (before, contributors), self._after(before, contributors, epoch)
        return self._last[key][1]


@contextmanager
def remembered() -> Iterator[None]:
    """Within this context equal bytes are read once in this process."""
    words: Callable[..., Any] = lru_cache(maxsize=1 << 15)(decode)
    long: Callable[..., Any] = lru_cache(maxsize=16)(decode)
    plain: Callable[[bytes], Any] = lru_cache(maxsize=1 << 12)(decode_plain)
    steps = lru_cache(maxsize=64)(Committed.read)
    parsed = lru_cache(maxsize=1 << 12)(directory._addresses)  # noqa: SLF001 (what each peer reads of all others)
    agreed, after = _Agreed(), _After()

    def on_stream(data: bytes | bytearray | memoryview, kind: Any) -> Any:
        return long(bytes(data), kind) if len(data) > _LONG_BYTES else decode(data, kind)

    def word(data: Any, kind: Any) -> Any:
        return words(bytes(data), kind)

    def after_step(before: Committed, contributors: Sequence[Contributor], epoch: int) -> Committed:
        return after.of(before, contributors, epoch)  # a function, so that it becomes a method

    def unpack(_: Averager, member: Member) -> Any:
        try:
            return plain(member.gathered)
        except msgspec.MsgspecError:
            return None

    def addresses(texts: Sequence[str], peer: PeerID) -> tuple[Address, ...]:
        return parsed(tuple(texts), peer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "_addresses", addresses)
        patch.setattr("shoal.dht.validation.verify", lru_cache(maxsize=1 << 16)(verify))
        patch.setattr("shoal.rpc.stream.decode", on_stream)
        patch.setattr("shoal.run.gossip.decode", word)
        patch.setattr(Averager, "_unpack", unpack)
        patch.setattr("shoal.run.swarm_step.agree", agreed)
        patch.setattr(Committed, "after", after_step)
        patch.setattr(Committed, "read", steps)
        yield
