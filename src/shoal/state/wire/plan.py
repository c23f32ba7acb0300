"""The chunks of a state that are still missing, the donors that have or send them. Pure logic: no loop, no network.

A chunk is missing, then in flight from one donor, its owner, then verified; a donor that gives up returns its chunks to
missing. Near the end a second donor may be asked for a chunk whose owner is slow: it *doubles* it.

Invariants: a chunk in flight has one owner and at most one other donor that doubles it; a verified chunk is never asked
for again, except when the plan moves to a manifest with another hash for it. The plan does not care how many donors
send at the same time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from shoal.state.wire.manifest import Manifest

__all__ = ["ChunkPlan"]

D = TypeVar("D", bound=Hashable)


class ChunkPlan(Generic[D]):
    """The plan of one download.

    Args:
        manifest: the snapshot that is fetched; `move_to` sets another. Donors are any hashable values.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._missing = dict.fromkeys(range(len(manifest.hashes)))  # a set that keeps its order
        self._in_flight: dict[int, D] = {}
        self._doubled: dict[int, D] = {}
        self._verified: dict[int, D] = {}
        self._holdings: dict[D, frozenset[int]] = {}

    @property
    def complete(self) -> bool:
        """True once every chunk is verified."""
        return len(self._verified) == len(self.manifest.hashes)

    @property
    def missing(self) -> int:
        """Number of chunks that nobody sends."""
        return len(self._missing)

    @property
    def verified(self) -> int:
        """Number of verified chunks."""
        return len(self._verified)

    @property
    def contributors(self) -> tuple[D, ...]:
        """The donors that sent the verified chunks, each once, in the order of the chunks."""
        return tuple(dict.fromkeys(donor for _, donor in sorted(self._verified.items(), key=lambda item: item[0])))

    def move_to(self, manifest: Manifest) -> bool:
        """Fetch this snapshot from now on; nothing may be in flight.

        Chunks whose hash is the same are kept. Returns False if the layout differs, so that nothing could be kept and
        buffers for the old one are of no use.
        """
        assert not self._in_flight, "move_to() while chunks are in flight"
        same = self.manifest.same_layout(manifest)
        old = self.manifest.hashes if same else ()
        kept = {chunk: d for chunk, d in self._verified.items() if same and old[chunk] == manifest.hashes[chunk]}
        self.manifest = manifest
        self._verified = kept
        self._missing = dict.fromkeys(chunk for chunk in range(len(manifest.hashes)) if chunk not in kept)
        self._holdings.clear()
        return same

    def offer(self, donor: D, manifest: Manifest) -> int:
        """A donor has this snapshot; returns how many of our chunks it can send."""
        ours = self.manifest
        if not ours.same_layout(manifest):
            return 0
        equal = (i for i, (a, b) in enumerate(zip(ours.hashes, manifest.hashes, strict=True)) if a == b)
        self._holdings[donor] = frozenset(equal)
        return len(self._holdings[donor])

    def take(self, donor: D, limit: int | None = None) -> list[int]:
        """Missing chunks that this donor is to send now, in order, at most `limit`; they are in flight from now on."""
        holds = self._holdings.get(donor, frozenset())
        taken = list(islice((chunk for chunk in self._missing if chunk in holds), limit))
        for chunk in taken:
            del self._missing[chunk]
            self._in_flight[chunk] = donor
        return taken

    def doubtful(self, donor: D) -> Iterator[tuple[int, D]]:
        """Chunks in flight from another donor alone that this one has too: (chunk, owner)."""
        holds = self._holdings.get(donor, frozenset())
        for chunk, owner in self._in_flight.items():
            if owner != donor and chunk in holds and chunk not in self._doubled:
                yield chunk, owner

    def double(self, donor: D, chunk: int) -> None:
        """This donor sends a chunk too that is in flight from another one."""
        assert self._in_flight.get(chunk, donor) != donor, "double() of a chunk that is in flight from nobody else"
        assert chunk not in self._doubled, "double() of a chunk that is doubled"
        self._doubled[chunk] = donor

    def owner(self, chunk: int) -> D | None:
        """The donor from which a chunk is in flight; None if it is missing or verified."""
        return self._in_flight.get(chunk)

    def is_verified(self, chunk: int) -> bool:
        """Return whether a chunk is there."""
        return chunk in self._verified

    def verify(self, chunk: int, donor: D) -> None:
        """A chunk in flight has arrived from this donor, its owner or its doubler, and its hash is right."""
        senders = (self._in_flight.pop(chunk), self._doubled.pop(chunk, None))
        assert donor in senders, "verify() of a chunk from somebody else"
        self._verified[chunk] = donor

    def release(self, donor: D) -> None:
        """A donor sends nothing more: chunks in flight from it alone are missing again, and it holds nothing."""
        self._holdings.pop(donor, None)
        self._doubled = {chunk: sender for chunk, sender in self._doubled.items() if sender != donor}
        back = [chunk for chunk, sender in self._in_flight.items() if sender == donor]
        for chunk in back:
            if chunk in self._doubled:
                self._in_flight[chunk] = self._doubled.pop(chunk)
            else:
                del self._in_flight[chunk]
        back = [chunk for chunk in back if chunk not in self._in_flight]
        if back:
            self._missing = dict.fromkeys(sorted([*self._missing, *back]))
