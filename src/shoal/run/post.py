"""How one peer of a run calls the others: one call at a time to each, with the places of all fragments that are due.

The fragments of a model have chains of their own, and the same peers. `ProgressGossip` decides for each fragment when a
peer is to be told of it. Fragments that are due at the same time, or come due while a call is under way, share a call.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from shoal.averaging.core import PeerCore
from shoal.base.bounded import put_last
from shoal.base.clock import own_clock
from shoal.base.ledger import Ledger
from shoal.base.peer import PeerID
from shoal.errors import ClosedError, PeerError
from shoal.events import PeerDropped
from shoal.protocol.wire import (
    ChainsTold,
    Place,
    Progress,
    Standing,
    TellChains,
    TellProgress,
)

__all__ = ["CALL_TIMEOUT_S", "Correspondent", "Post"]

_DEAF_S = 30.0
"""A peer that could not be told is no keeper for this time."""

_MOST_DEAF = 4096

CALL_TIMEOUT_S = 3.0
"""The longest time for a `TellProgress`."""

_MOST_WORDS = 2048
"""Words about others in one call, of all its fragments together. More would not fit into a frame, and take too long."""


class Correspondent(Protocol):
    """The gossip of one fragment, as the post knows it."""

    @property
    def run_id(self) -> str:
        """The name of the fragment's run."""

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings that must be equal in it."""

    def what_we_know(self, most: int | None = None) -> tuple[Progress, list[Standing]]:
        """This peer's progress, and what it passes on: so many words at most."""

    def hear_directly(self, progress: Progress, others: Sequence[Standing]) -> None:
        """A peer says this, or answers so."""

    def could_not_tell(self, error: BaseException) -> None:
        """A call has failed for a reason of our own."""

    def lost_keeper(self) -> None:
        """A peer could not be told: it keeps no count."""


class Post:
    """Calls the peers of a run. Loop only.

    Args:
        core: this peer.

    Attributes:
        met: peers that were told directly that we are here, or told us so.
        deaf: peers that could not be told.
        why_deaf: the reason for each.
        telling: the call to each peer that is under way.
    """

    def __init__(self, core: PeerCore) -> None:
        self._core = core
        self._chains: dict[int, Correspondent] = {}
        self.met: set[PeerID] = set()
        self.deaf = Ledger[PeerID](_DEAF_S, _DEAF_S, free=0)
        self.why_deaf: dict[PeerID, str] = {}
        self.telling: dict[PeerID, asyncio.Task[None]] = {}
        self._due: dict[PeerID, set[int]] = {}  # the fragments that each peer is to be told of by the next call
        self._said: dict[PeerID, list[int]] = {}  # those that it is told of by the one that is under way
        self._word_at = -math.inf
        self._run_id = ""
        self._undo: Callable[[], None] = lambda: None

    def add(self, number: int, chain: Correspondent) -> None:
        """A fragment of this number has this gossip."""
        self._chains[number] = chain

    def start(self, run_id: str) -> None:
        """Begin to answer calls about several fragments.

        Args:
            run_id: of the first one.
        """
        self._run_id = run_id
        self._undo = self._core.endpoint.serve(TellChains, self._told, scope=run_id)

    async def remove(self, number: int) -> None:
        """Tell nobody of this fragment any more; after the last one, stop answering and calling. Safe to call twice."""
        self._chains.pop(number, None)
        if self._chains:
            return
        self._undo()
        self._undo = lambda: None
        telling = list(self.telling.values())
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)

    def next_time(self) -> float:
        """The time of our next word: by our own wall clock, by which our words are ordered; it never goes back."""
        self._word_at = max(math.nextafter(self._word_at, math.inf), own_clock(self._core.env.clock).time())
        return self._word_at

    def note_reason(self, peer: PeerID, reason: str) -> None:
        """A peer could not be called, for this reason."""
        put_last(self.why_deaf, peer, reason, _MOST_DEAF)

    # ------------------------------------------------------------------------------------------------------- telling

    def call(self, peer: PeerID, number: int) -> None:
        """Tell a peer of this fragment by a call: it answers where it stands itself."""
        if peer in self.telling or self._core.endpoint.reachable(peer):
            self.begin(peer, number)

    def begin(self, peer: PeerID, number: int) -> None:
        """The same, though nothing may be known of where the peer listens."""
        self._due.setdefault(peer, set()).add(number)
        if peer not in self.telling and self._chains:
            self._begin(peer)

    def begin_once(self, peer: PeerID, number: int) -> None:
        """The same, unless the call that tells it is under way."""
        if number not in self._said.get(peer, ()):
            self.begin(peer, number)

    async def tell(self, peer: PeerID, number: int) -> None:
        """Tell a peer as this fragment leaves; returns when the peer has been told, or could not be.

        It goes beside a call that is under way: a peer that stands still answers none, and hears this when it wakes.
        """
        try:
            await self._tell_of(peer, [number])
        except Exception as error:  # noqa: BLE001 (no memory for it: it leaves all the same)
            self._failed(error)

    def _begin(self, peer: PeerID) -> None:
        task = self.telling[peer] = asyncio.get_running_loop().create_task(self._tell(peer))
        task.add_done_callback(partial(self._over, peer))

    def _over(self, peer: PeerID, task: asyncio.Task[None]) -> None:
        self.telling.pop(peer, None)
        self._said.pop(peer, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
        if peer in self._due and self._chains and not task.cancelled():
            self._begin(peer)

    def _failed(self, error: BaseException) -> None:
        for chain in self._chains.values() if not isinstance(error, ClosedError) else ():
            chain.could_not_tell(error)

    async def _tell(self, peer: PeerID) -> None:
        told = self._said[peer] = sorted(number for number in self._due.pop(peer) if number in self._chains)
        if told:
            await self._tell_of(peer, told)

    async def _tell_of(self, peer: PeerID, told: Sequence[int]) -> None:
        try:
            if len(told) == 1:
                chain = self._chains[told[0]]
                request = TellProgress(chain.run_id, *chain.what_we_know())
                answer = await self._core.endpoint.call(peer, request, timeout_s=CALL_TIMEOUT_S)
                words = [(chain, answer.progress, answer.others)]
            else:
                progress, places = self._word(told)
                asked = TellChains(self._run_id, progress, places)
                answers = await self._core.endpoint.call(peer, asked, timeout_s=CALL_TIMEOUT_S)
                words = self._read(answers)
        except PeerError as error:
            self.deaf.failed(peer, asyncio.get_running_loop().time())
            self.note_reason(peer, error.message)
            for each in self._chains.values():
                each.lost_keeper()
            return
        self.deaf.forgive(peer)
        self.why_deaf.pop(peer, None)
        for chain, progress, others in words:
            if progress.contact.peer != peer:
                reason = "answers in another peer's name"
                self._core.env.events.emit(PeerDropped(peer=peer, where="progress", reason=reason))
                return
            chain.hear_directly(progress, others)

    # ------------------------------------------------------------------------------------------------------- hearing

    def _told(self, peer: PeerID, request: TellChains) -> ChainsTold:
        if request.progress.contact.peer != peer:
            raise PeerError("progress in another peer's name", peer)
        if sum(len(place.others) for place in request.places) > _MOST_WORDS:
            raise PeerError(f"more than {_MOST_WORDS} words about others in one call", peer)
        for chain, progress, others in self._read(request):
            chain.hear_directly(progress, others)
        asked = dict.fromkeys(place.fragment for place in request.places if place.fragment in self._chains)
        return ChainsTold(*self._word([*(asked or self._chains)]))

    def _word(self, numbers: Sequence[int]) -> tuple[Progress, list[Place]]:
        """Our word of these fragments."""
        most = _MOST_WORDS // max(1, len(numbers))
        found = {number: self._chains[number].what_we_know(most) for number in numbers}
        places = [
            Place(
                fragment=number,
                epoch=said.epoch,
                digest=said.digest,
                branch_samples=said.branch_samples,
                done=said.done,
                end_epoch=said.end_epoch,
                left=said.left,
                parameters=said.parameters,
                others=others,
            )
            for number, (said, others) in found.items()
        ]
        *_, (last, _) = found.values()  # the newest one
        return last, places

    def _read(self, word: TellChains | ChainsTold) -> list[tuple[Correspondent, Progress, list[Standing]]]:
        """The word of a peer of each fragment that is known here."""
        progress, found = word.progress, []
        # Each fragment compares settings of its own: see `fragment_settings`.
        ours = any(chain.settings == progress.settings for chain in self._chains.values())
        for place in word.places:
            if (chain := self._chains.get(place.fragment)) is not None:
                said = replace(
                    progress,
                    epoch=place.epoch,
                    digest=place.digest,
                    branch_samples=place.branch_samples,
                    done=place.done,
                    settings=dict(chain.settings) if ours else progress.settings,
                    end_epoch=place.end_epoch,
                    left=place.left,
                    parameters=place.parameters,
                    check=None,
                )
                found.append((chain, said, place.others))
        return found
