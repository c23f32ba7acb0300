"""The peers of a run tell each other where they stand: through the DHT, and directly.

The DHT reaches everybody, also newcomers, and is slow; the direct way is for the end of an epoch, when every
millisecond counts (`docs/why/decisions/0027-counts-that-matter.md`). In a swarm of more than a few a peer that meets
another one calls it, which makes a link; after that they send each other notes, which get no answer.
`SwarmProgress` remembers everything that is heard.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from shoal.averaging.core import PeerCore
from shoal.base.bounded import bound, put_last
from shoal.base.peer import PEER_ID_BYTES, PeerID
from shoal.base.tasks import Changes, in_turns
from shoal.dht.storage import PEER_ENTRY_BYTES
from shoal.errors import ClosedError, ConfigError, PeerError, ShoalError
from shoal.events import PeerDropped, Warned
from shoal.protocol.wire import (
    Contact,
    Progress,
    ProgressTold,
    Standing,
    TellProgress,
    Trainers,
    WhoTrains,
    decode,
    encode,
)
from shoal.rpc import LOOK_S
from shoal.run.post import CALL_TIMEOUT_S, Post
from shoal.run.settings import RunSettings
from shoal.run.view.progress import FEW, NO_STATE, StateKey, SwarmProgress, SwarmView
from shoal.run.view.tellers import KEEPERS, Countdown, Order, Relay, look_s, silence_s, write_s
from shoal.strategies.merge_pace import NEAR_WAY

__all__ = ["ProgressGossip"]

_ALL = 64
"""The most peers that are told directly that we are here, and that we leave. A link shows at once when one dies."""

_HEARD_AT_ONCE = 128
"""Records of peers that are read in one turn of the loop: the DHT may have 4,096."""

_LEAVE_S = 1.0
_SILENCE_S = 1.0

_LATE_S = 0.5
"""Notes that cross a step are of the state before it. One that comes later is of a peer that has missed it."""

_LATE_AGAIN_S = 30.0
"""Where others did not know that there is enough, they are told at once for this time."""

_ASKED_ANEW = 16
"""A peer that has downloaded a state calls this number of others: they answer whether they have left it since."""

_SEEK_S = 5.0
"""Nobody steps alone before it has looked for the others for this time, or found out that there are none."""

_ASKED_AT_FIRST, _FIRST_ANSWER_S = 64, 1.5
"""Records of a run that is over lie in the DHT for a while. This number of their writers is asked, for this time."""

_LEAST_ANSWER_S = 0.1
"""Once one of them has answered, the others have at least this time: a stopped one keeps no newcomer waiting."""

_FOUND_S, _FOUND_PART = 5.0, 1 / 16
"""The DHT is read rarely once it has shown nobody new for this time, or less than this part of the swarm. It is read
soon where others know such a part that is not known here."""

_READ_BY_MERGERS = 4
"""Peers that merge read the DHT this many times as rarely. A newcomer calls those that it finds, so they know it."""

_LIVES = 1.5
"""A record lives for this number of periods of writing and reading."""

_READ_BYTES_PER_S = 64 << 10
"""At most so much is read from the DHT, whoever fills it. The words of a thousand peers stay below that."""

_LOOKS_AT_OTHER_SETTINGS = 5
"""Records of peers with other settings are renewed within 4 of them if the peers live."""


class _Duty(NamedTuple):
    """The duties of the peers at a state: the keepers of our part, the part, and the keepers of the other parts.

    They hold for this state, this swarm and these contributors until this time. Then the peers that can keep are chosen
    again, in the same order.
    """

    digest: bytes
    together: frozenset[PeerID]
    contributors: Collection[PeerID]
    until: float
    order: Order
    keepers: list[PeerID]
    colleagues: list[PeerID]


class ProgressGossip:
    """Tells and hears the progress of one run. Loop only.

    Args:
        core: this peer.
        settings: of the run.
        known: where it is noted what others said.
        news: told when something was heard that changes the picture, or it is time to look again.
        next_word: returns where this peer stands now, newer than all that it has told.
        is_due: says whether there is enough for the next merge, by all that is known now; asked where peers merge.
        post: calls others, for all fragments of the model; None: for this one alone.

    Attributes:
        run_id: the name of the run.
        settings: the settings that must be equal in it.
        enough: as this peer `saw` it last.
        target: the same.
        rate: the same.
        looked: set when the run's progress has been read from the DHT, and this peer knows which of its
            writers live.
    """

    def __init__(
        self,
        core: PeerCore,
        settings: RunSettings,
        known: SwarmProgress,
        news: Changes,
        *,
        next_word: Callable[[], Progress],
        is_due: Callable[[], bool] = lambda: False,
        post: Post | None = None,
    ) -> None:
        self._core, self._known = core, known
        self.run_id, self.settings = settings.run_id, settings.fingerprint
        self._fragment, self._post = settings.fragment, post or Post(core)
        self._post.add(self._fragment, self)
        self._news, self._next_word, self._is_due = news, next_word, is_due
        self._publish_period_s, self._tell_period_s = settings.publish_period_s, settings.tell_period_s
        self._ttl_s = settings.ttl_s
        self._merges = settings.strategy.terms.meets_rarely
        # The fragments of a model have the same peers. Where there are many, each says so more rarely.
        self._fragment_count = settings.fragments
        self._read_rarely = self._fragment_count * (_READ_BY_MERGERS if self._merges else 1)
        self.looked = asyncio.Event()
        self.enough = False
        self._to_write = Changes()  # of our progress, that are to be in the DHT soon
        self.target, self.rate, self._countdown = 1, 0.0, Countdown(merges=self._merges)
        self._duty = _Duty(b"", frozenset(), (), 0.0, Order(b"", []), [], [])
        self._told_at, self._enough_since = float("-inf"), float("inf")
        self._late_until = float("-inf")  # until then some of the others are expected not to know it
        self._told_place: tuple[object, ...] = ()
        self._told_peers: tuple[PeerID, ...] = ()
        self._waking: asyncio.TimerHandle | None = None
        self._called, self._tell_again_at = b"", 0.0  # at which state all were told that there is enough, and when next
        self._read_bytes = 0  # by the last look
        self._found_at = self._asked_at = float("-inf")  # the last time that the DHT showed somebody new; and of `ask`
        self._doubts = Changes()  # of what we know: somebody may be there who is not known here
        self._complete = b""  # the state of which we know that there is enough, and that everybody is here
        self._relay = Relay()
        self._at = self._before = NO_STATE  # our state, and the one before
        self._renamed_at = float("-inf")
        self._lost: dict[PeerID, None] = {}  # peers whose links were lost: called as soon as there is one again
        self._corrected: dict[PeerID, StateKey] = {}  # peers at worse states, and the one of ours that each was told of
        self._unreadable: dict[bytes, bool] = {}  # the writers of records that cannot be read
        self._troubles: set[str] = set()  # the kinds of errors that were told, and are not over
        self._undo: list[Callable[[], None]] = []

    def start(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Begin to answer; returns what its owner is to run until `close`. Each can be run again if it failed."""
        endpoint = self._core.endpoint
        self._undo = [
            endpoint.serve(TellProgress, self._told, scope=self.run_id),
            endpoint.take_notes(TellProgress, self._noted, scope=self.run_id),
            endpoint.serve(WhoTrains, self._introduce, scope=self.run_id),
            endpoint.on_lost(self._peer_lost),
        ]
        if not self._fragment:
            self._post.start(self.run_id)
        if self._merges:  # others that start now may not have written yet, and later it is looked for them rarely
            self._found_at = asyncio.get_running_loop().time()
        self._set_lifetime()
        return [self._publish_loop, self._look_loop]

    async def leave(self) -> None:
        """Tell everybody that we take part no more, as our next word says: directly, and in the DHT."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(self._publish(), self.tell_all())

    async def tell_all(self) -> None:
        """Tell others where we stand, up to `_ALL`; returns once they know it, or after `_LEAVE_S`."""
        others = [peer for peer in self._known.peers if self._core.endpoint.reachable(peer)]
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await asyncio.gather(*(self._post.tell(peer, self._fragment) for peer in others[:_ALL]))

    async def close(self) -> None:
        """Stop answering and telling. Safe to call twice."""
        for undo in self._undo:
            undo()
        self._undo = []
        if self._waking is not None:
            self._waking.cancel()
        await self._post.remove(self._fragment)

    def contact(self, peer: PeerID) -> Contact:
        """Return the contact of a peer of the run."""
        progress = self._known.progress_of(peer)
        return progress.contact if progress is not None else self._core.endpoint.contact_of(peer)

    def unreached(self) -> dict[PeerID, str]:
        """The known peers of the run that are not connected with this peer, and the reason for each."""
        missing = [peer for peer in self._known.peers if not self._core.endpoint.connected(peer)]
        silent = "no answer yet"
        return {
            peer: self._post.why_deaf.get(peer, silent) if self.contact(peer).addresses else "it only dials"
            for peer in missing
        }

    # ------------------------------------------------------------------------------------------------------- hearing

    def _told(self, peer: PeerID, request: TellProgress) -> ProgressTold:
        # Not a coroutine: what a peer said last must be heard before it is lost.
        self._take(peer, request)
        return ProgressTold(*self.what_we_know())

    def _noted(self, peer: PeerID, note: TellProgress) -> None:
        self._take(peer, note)
        at_least = self._before if asyncio.get_running_loop().time() < self._renamed_at + _LATE_S else self._at
        if StateKey.of_peer(note.progress) < at_least and self._corrected.get(peer) != self._at:
            self._corrected[peer] = self._at
            self._core.endpoint.tell([peer], TellProgress(self.run_id, self._next_word()))

    def _take(self, peer: PeerID, told: TellProgress) -> None:
        if told.progress.contact.peer != peer:
            raise PeerError("progress in another peer's name", peer)
        self.hear_directly(told.progress, told.others)

    def what_we_know(self, most: int | None = None) -> tuple[Progress, list[Standing]]:
        """This peer's progress; and what it has heard of the others, once there is enough: so many words at most."""
        mine, now = self._next_word(), asyncio.get_running_loop().time()
        return mine, self._known.standings(mine, now, most=most) if self.enough else []

    def hear_directly(self, progress: Progress, others: Sequence[Standing]) -> None:
        """A peer tells where it stands, and what it has heard of others; or it answers with that when it is told."""
        if self._core.endpoint.connected(progress.contact.peer):  # else it was lost since it said so
            self._post.met.add(progress.contact.peer)
            self._hear(progress)
            if self._is_worth_a_read(self._known.lacks(others)):
                self._doubts.notify()
            now = asyncio.get_running_loop().time()
            if progress.digest != self._complete and self._known.relayed(progress, others, now):
                self._news.notify()

    def _hear(self, progress: Progress, *, direct: bool = True) -> None:
        if self._core.endpoint.is_mute(progress.contact.peer):  # its record in the DHT may be of either
            return
        before = self._known.progress_of(progress.contact.peer)
        self._core.endpoint.learn(progress.contact)
        if (contact := self._core.endpoint.dialable(progress.contact)) is not progress.contact:
            progress = replace(progress, contact=contact)
        heard = self._known.heard(progress, asyncio.get_running_loop().time(), direct=direct)
        if heard and not (before is not None and self._only_comes_on(before, progress)):
            self._news.notify()

    def _only_comes_on(self, before: Progress, now: Progress) -> bool:
        """Whether a peer that merges is on its way, and no merge is due, or is due no more, by its word."""
        if not self._merges or _place(before)[:-1] != _place(now)[:-1]:
            return False
        return now.done < NEAR_WAY or (len(self._known.peers) <= FEW and self._is_due() == self.enough)

    def _peer_lost(self, peer: PeerID, reason: str) -> None:
        self._post.met.discard(peer)
        self._corrected.pop(peer, None)
        if self._known.lost(peer, asyncio.get_running_loop().time()):
            put_last(self._lost, peer, None, _ALL)
            self._news.notify()

    # ------------------------------------------------------------------------------------------------ through the DHT

    @property
    def _key(self) -> str:
        return f"{self.run_id}_progress"

    def announce_state(self, view: SwarmView, *, expected: bool) -> None:
        """Our state has another name: write it to the DHT, and tell it, at once.

        Args:
            view: the swarm as it is known here now.
            expected: it is by a step that the others take, too.
        """
        mine = self._next_word()
        self._before, self._at = self._at, StateKey.of_peer(mine)
        self._renamed_at = asyncio.get_running_loop().time()
        few = len(view.peers) - 1 <= FEW
        # The other fragments have many steps, of which those that are connected are told directly.
        soon = few and (not self._fragment or bool(self.unreached()))
        if soon or not expected:
            self._to_write.notify()
        if not expected:
            self._doubts.notify()  # others may have come while this peer stood still, and do not know it either
            # A peer that was cut off has found the others silent: they have no reason to say anything to it, and do not
            # count here until they do.
            for peer in [peer for peer in self._known.peers if peer not in view.peers][:_ASKED_ANEW]:
                self._call(peer)
        if few or not expected:
            self.announce(view)
        elif self._core.peer_id in self._duties(view, mine.digest, self._renamed_at).keepers:
            # A peer that came just after the round began now waits, at the state before, for others to come.
            here = [peer for peer, said in view.others.items() if StateKey.of_peer(said) == self._before]
            self._note([peer for peer in here if peer not in view.together][:_ALL], mine, [])

    def announce(self, view: SwarmView, *, written: bool = False) -> None:
        """Tell others at once where we stand: all of them, up to `_ALL`. `written`: in the DHT, too."""
        if written:
            self._to_write.notify()
        if len(view.peers) - 1 <= FEW:
            self._told_place = ()  # also where our word has only more in it than our place
            self.tell(view, now=True)
            return
        others = list(view.peers[1:])
        self._core.env.rng.shuffle(others)
        for peer in others[:_ASKED_ANEW]:
            self._call(peer)
        self._note(others[_ASKED_ANEW:_ALL], self._next_word(), [])

    def ask(self, peers: Collection[PeerID]) -> None:
        """Call these once a second until they have said what we lack. The few are told, and asked so, anyway.

        A client cannot call a client: what that one has said is in the DHT, under its own signature.
        """
        now = asyncio.get_running_loop().time()
        if not peers or now < self._asked_at + _SILENCE_S:
            return
        self._asked_at = now
        if not all(map(self._core.endpoint.reachable, peers)):
            self._doubts.notify()
        for peer in peers if len(self._known.peers) > FEW else ():
            self._call(peer)

    async def _publish_loop(self) -> None:
        """Write our progress to the DHT: soon after a change of our state, else now and then, not all at one time."""
        while True:
            written = self._to_write.count
            await self._publish()
            if len(self._known.peers) <= FEW:  # they write at each step, and short epochs are not worth a write each
                await asyncio.sleep(self._tell_period_s)
            await self._to_write.after(written, self._about(self._write_s()))

    def _write_s(self) -> float:
        return self._fragment_count * write_s(len(self._known.peers), self._publish_period_s)

    def _look_s(self) -> float:
        return self._read_rarely * look_s(len(self._known.peers))

    async def _publish(self) -> None:
        core, mine = self._core, self._next_word()
        with self._warning_once("its progress could not be written to the DHT: newcomers may not find this peer"):
            expiration, told = core.env.clock.time() + self._known.ttl_s, encode(mine)
            try:
                decode(told, Progress)
            except msgspec.ValidationError as error:
                raise ConfigError(f"every other peer would refuse it: {error}") from error
            await core.node.store(self._key, told, expiration, core.peer_id)

    @contextmanager
    def _warning_once(self, what: str) -> Iterator[None]:
        """An error within is a warning, once until it is over; what is done within is tried again later."""
        try:
            yield
        except ClosedError:
            pass  # this peer leaves
        except ShoalError as error:
            self._warn_of(what, error)
        else:
            self._troubles.discard(what)

    def _warn_of(self, what: str, error: BaseException) -> None:
        if what not in self._troubles:
            self._troubles.add(what)
            message = f"{what} ({type(error).__name__}: {error}). It is tried again; if it stays so, run `shoal doctor`"
            self._core.env.events.emit(Warned(where="optimizer", message=message))

    async def _look_loop(self) -> None:
        """Read everybody's progress from the DHT: often as long as that shows somebody new, or there are few.

        And soon when this peer may have missed others that came: half a second after the last look at the earliest.
        """
        for looks in itertools.count(1):
            doubts = self._doubts.count
            found = await self._look()
            if looks == 1:
                await self._ask_who_lives(found)
            await self._find_hidden(found)
            if not self._known.other_settings or self._known.mismatch or looks == _LOOKS_AT_OTHER_SETTINGS:
                self.looked.set()
            self._news.notify()
            self._set_lifetime()
            least_s = look_s(len(self._known.peers)) / 10
            found_lately = asyncio.get_running_loop().time() < self._found_at + _FOUND_S
            if found_lately or not self.looked.is_set():
                pause_s = max(self._publish_period_s / 2, least_s)
            elif len(self._known.peers) <= FEW:
                pause_s = self._read_rarely * self._publish_period_s / 2
            else:
                pause_s = self._about(self._look_s())
            least_s = max(min(pause_s, least_s), self._read_bytes / _READ_BYTES_PER_S)
            await asyncio.sleep(least_s)
            await self._doubts.after(doubts, max(0.0, pause_s - least_s))

    def _set_lifetime(self) -> None:
        """Words count until they should have been said again, and records are kept for as long."""
        self._known.set_ttl(max(self._ttl_s, _LIVES * (self._write_s() + self._look_s())))

    def _about(self, period_s: float) -> float:
        return period_s * (0.75 + 0.5 * self._core.env.rng.random())

    async def _look(self) -> dict[PeerID, float]:
        """Read the records of the run; returns when each peer that has not left wrote its own, by its own clock."""
        written, found_new = {}, 0
        with self._warning_once("the progress of the others could not be read from the DHT"):
            found = await self._core.node.get(self._key, latest=True, of_peers=True)
            entries = found.value if found is not None and isinstance(found.value, dict) else {}
            self._read_bytes = sum(_size_of(entry.value) for entry in entries.values())
            async for subkey, entry in in_turns(entries.items(), _HEARD_AT_ONCE):
                with self._dropped_if_bad(subkey):
                    progress = decode(entry.value, Progress)
                    if progress.contact.peer == subkey != self._core.peer_id:
                        known = self._known.progress_of(progress.contact.peer) is not None
                        self._hear(progress, direct=False)
                        found_new += not known and self._known.progress_of(progress.contact.peer) is not None
                        if not progress.left:
                            written[progress.contact.peer] = progress.time
        if self._is_worth_a_read(found_new):
            self._found_at = asyncio.get_running_loop().time()
        return written

    def _is_worth_a_read(self, peers: int) -> bool:
        """Whether these new peers are a reason to read the DHT soon: in a large swarm somebody comes all the time."""
        return peers > 0 and peers >= _FOUND_PART * len(self._known.peers)

    @contextmanager
    def _dropped_if_bad(self, subkey: object) -> Iterator[None]:
        """A record that cannot be read costs its writer alone; it is told once."""
        try:
            yield
        except (msgspec.MsgspecError, TypeError, ConfigError) as error:
            if isinstance(subkey, bytes) and len(subkey) == PEER_ID_BYTES and subkey not in self._unreadable:
                self._unreadable[subkey] = True
                bound(self._unreadable, _ALL)
                reason = f"its progress in the DHT cannot be read: {error}"
                self._core.env.events.emit(PeerDropped(peer=PeerID(subkey), where="progress", reason=reason))

    async def _ask_who_lives(self, written: Mapping[PeerID, float]) -> None:
        """Tell the peers that have written that we are here, as their run may be over.

        A peer that gives no answer does not count until it renews its record. If nobody at all is there, peers that
        cannot be dialed do not count either: live ones dial us as soon as they read that we are here.
        """
        loop, endpoint = asyncio.get_running_loop(), self._core.endpoint
        until = loop.time() + _FIRST_ANSWER_S
        writers = [peer for peer in written if peer != self._core.peer_id]
        # Records are free: those that we know to be there come first, however many others have written.
        first = [peer for peer in writers if endpoint.connected(peer)]
        first = [*dict.fromkeys((*first, *self._initial_peers()))]
        rest = [peer for peer in writers if peer not in first and endpoint.reachable(peer)]
        self._core.env.rng.shuffle(rest)
        to_ask = first + rest
        for peer in to_ask[:_ASKED_AT_FIRST]:
            self._post.begin_once(peer, self._fragment)
        if asked := {self._post.telling[peer] for peer in to_ask if peer in self._post.telling}:
            await self._first_answers(asked)
        quiet = to_ask[:_ASKED_AT_FIRST]
        deaf = self._post.deaf.unforgiven
        unsure = any(peer in self._post.telling or peer not in deaf for peer in writers)
        if unsure and not any(map(endpoint.connected, writers)):
            await asyncio.sleep(until - loop.time())
            await self._look()
            quiet = writers
        for peer in quiet:
            if peer in written and not endpoint.connected(peer):
                self._known.silent(peer, said_before=math.nextafter(written[peer], math.inf))

    def _initial_peers(self) -> list[PeerID]:
        """The peers that we were given: perhaps they train the run, though nobody in the DHT says so.

        Twenty keys that are nearest to that of the run's progress can hide it from whoever reads it there.
        """
        contacts, now = self._core.node.initial_peers, asyncio.get_running_loop().time()
        for contact in contacts:
            self._core.endpoint.learn(contact)
        return [contact.peer for contact in contacts[:_ASKED_ANEW] if self._post.deaf.until(contact.peer) <= now]

    async def _find_hidden(self, written: Collection[PeerID]) -> None:
        """After a look: has the DHT hidden a peer that we were given, or one that another peer told of?

        The first is called if nobody is known. A peer that knows more than the DHT shows is asked for others.
        """
        hidden = [peer for peer in self._initial_peers() if peer not in written]
        if not self._known.peers:
            for peer in hidden:
                self._call(peer)
        asked = next(
            (peer for peer in (*hidden, *self._known.take_tellers()) if self._known.progress_of(peer) is not None), None
        )
        if asked is None:
            return
        try:
            known = await self._core.endpoint.call(asked, WhoTrains(self.run_id), timeout_s=CALL_TIMEOUT_S)
        except PeerError as error:
            # Told if this peer stays alone; another one is asked at the next look.
            self._post.note_reason(asked, error.message)
            return
        for contact in known.contacts[:_ASKED_ANEW]:
            if contact.peer != self._core.peer_id and self._known.progress_of(contact.peer) is None:
                self._core.endpoint.learn(contact)
                self._call(contact.peer)

    def _introduce(self, _: PeerID, request: WhoTrains) -> Trainers:
        contacts = [self.contact(peer) for peer in self._known.peers]
        reachable = [contact for contact in contacts if contact.addresses]
        return Trainers(self._core.env.rng.sample(reachable, min(_ASKED_ANEW, len(reachable))))

    async def _first_answers(self, asked: set[asyncio.Task[None]]) -> None:
        """Wait for all, but not for long; once somebody has answered, for twice as long as that took at most."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        until = began + _FIRST_ANSWER_S
        while asked and loop.time() < until:
            _, asked = await asyncio.wait(asked, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if self._post.met:
                until = min(until, began + max(_LEAST_ANSWER_S, 2 * (loop.time() - began)))

    async def seek(self) -> None:
        """Look for the others now, as none is known here: after a start, a sleep, or the loss of all links."""
        with suppress(TimeoutError), self._warning_once("lost peers could not be looked for"):
            async with asyncio.timeout(_SEEK_S):
                await self._core.node.find_lost()
                await self._look()

    # ------------------------------------------------------------------------------------------------------- directly

    def saw(self, *, enough: bool, target: int, rate: float) -> None:
        """This peer has looked at the swarm.

        Args:
            enough: whether there is enough for the next step, as far as it is known here.
            target: how much is enough.
            rate: how much more all peers together have a second later.
        """
        self.enough, self.target, self.rate = enough, target, rate

    def tell(self, view: SwarmView, *, now: bool = False) -> None:
        """Tell the peers of the run directly where we stand, if it is time to: all if they are few, else the keepers.

        The few are told of each change; if peers merge, of their counts only near the next merge. At most one message
        is on its way to each, and a slow one holds up nobody. Changes within `tell_period_s` of the last message wait
        for its end, unless `now`, or others may wait for our count. Where nothing has changed it is told once a second;
        of the fragments of a model, all of them together.
        """
        at = asyncio.get_running_loop().time()
        # Another fragment of the model, or the DHT, may have found them: they may be on the other side of a fork here.
        for peer in [peer for peer in self._lost if self._core.endpoint.connected(peer)]:
            del self._lost[peer]
            self._call(peer)
        if len(view.peers) - 1 > FEW:
            self._tell_keepers(view, at)
            return
        mine = view.mine  # a new word is made when it is told
        assert mine is not None
        place, told = self._place(mine), self._told_place
        near = self._countdown.observe(mine, view, self.target, self.rate, at)
        if self._merges and not (near and self._countdown.matters):
            place, told = place[:-1], told[:-1]
        late = self._others_are_late(at)
        silence_s = self._fragment_count * _SILENCE_S
        if place == told and view.peers == self._told_peers and at < self._told_at + silence_s and not late:
            return
        at_once = now or (near and self._countdown.presses)
        if not at_once and at < self._told_at + self._tell_period_s:
            self.look_again(self._told_at + self._tell_period_s)
            return
        self._told_at, self._told_place, self._told_peers = at, self._place(mine), view.peers
        self._countdown.told()
        for peer in view.peers[1:]:
            self._call(peer)

    def _place(self, mine: Progress) -> tuple[object, ...]:
        """Our place. If peers merge, how far they go beyond the end of their ways is told with something else."""
        place = _place(mine)
        return (*place[:-1], True) if self._merges and self.enough else place

    def _others_are_late(self, now: float) -> bool:
        """Whether to tell the others that there is enough: one that does not hear all of us may learn it from us only.

        Most know it themselves, so it is told after a moment; at once for a while after that was of use.
        """
        self._enough_since = min(self._enough_since, now) if self.enough else math.inf
        if not self._told_at < self._enough_since < math.inf:
            return False
        due = self._enough_since + (LOOK_S if now >= self._late_until else 0.0)
        if now < due:
            self.look_again(due)
            return False
        if due > self._enough_since:
            self._late_until = due + _LATE_AGAIN_S
        return True

    def _tell_keepers(self, view: SwarmView, now: float) -> None:
        mine = self._next_word()
        self._meet(view)
        near = self._countdown.observe(mine, view, self.target, self.rate, now)
        duty = self._duty = self._duties(view, mine.digest, now)
        self._complete = mine.digest if self.enough and not view.coming else b""
        place, soon = (*_place(mine), *duty.keepers), self._told_at + self._tell_period_s
        matters = near and not self.enough and place != self._told_place and self._countdown.matters
        if now >= self._told_at + self._fragment_count * silence_s(len(view.peers)) or (matters and now >= soon):
            self._told_at, self._told_place = now, place
            self._countdown.told()
            self._note(duty.keepers, mine, [])
        elif matters:
            self.look_again(soon)
        if self._core.peer_id in duty.keepers:
            self._keep(view, mine, now, near=near)
        elif not self.enough and self._countdown.is_late(now):
            for keeper in duty.keepers:
                self._core.endpoint.is_silent(keeper)
            self.look_again(now + LOOK_S)

    def _keep(self, view: SwarmView, mine: Progress, now: float, *, near: bool) -> None:
        """As a keeper: say what we were told, to all of our part when there is enough, else to the other keepers."""
        duty = self._duty
        if self.enough:
            # Said again after a quarter of a second, and then each second: a note may be lost, and others wait for the
            # peer that it was for.
            first = self._called != mine.digest
            if first or now >= self._tell_again_at:
                self._called = mine.digest
                self._tell_again_at = now + (LOOK_S if first else _SILENCE_S)
                words = self._known.standings(mine, now)
                if first:
                    self._relay = Relay()  # so all is said twice
                else:
                    words = self._relay.news(words, view.done, now)
                self._note([*duty.order.parts[0], *duty.colleagues], mine, words)
            self.look_again(self._tell_again_at)
            return
        self._called = b""  # somebody may have left, with the samples: when there are enough again, it is said at once
        if duty.colleagues and near and view.done != self._relay.done:
            # The nearer the end, the sooner.
            soon = self._relay.at + min(max(self._tell_period_s / 2, self._countdown.left_s / 2), _SILENCE_S)
            if now < soon:
                self.look_again(soon)
                return
            words = self._known.standings(mine, now, told=False)
            self._note(duty.colleagues, mine, self._relay.news(words, view.done, now))

    def _meet(self, view: SwarmView) -> None:
        """Call each peer that we know of once, the next ones in the order of their names: so a link stands.

        One that was silent, and is not any more, is called again: it may have missed steps, or we may.
        """
        if view.peers == self._told_peers:
            return
        before, me = set(self._told_peers), self._core.peer_id
        self._told_peers = view.peers
        others = view.peers[1:]  # in this order
        first = bisect(others, me)
        for peer in (others[first:] + others[:first])[:_ALL]:
            if peer not in self._post.met or peer not in before:
                self._post.met.add(peer)
                if self._core.endpoint.reachable(peer):
                    self._post.begin_once(peer, self._fragment)

    def _duties(self, view: SwarmView, digest: bytes, now: float) -> _Duty:
        """Return the keepers of this state's count: contributors, if there are, as the others believe only these."""
        duty, contributors = self._duty, self._known.contributors
        same = view.together is duty.together and digest == duty.digest
        if same and contributors is duty.contributors and now < duty.until:
            return duty
        me = self._core.peer_id
        order = duty.order if same else Order(digest, [me, *(view.together - {me})])

        def able(peer: PeerID) -> bool:
            return self._can_keep(peer, now)

        def known(peer: PeerID) -> bool:
            return peer in contributors and able(peer)

        first = order.first(known)
        if len(first) == KEEPERS:
            own, *rest = order.keepers(known)
            own = own or first
        elif len(order.first(able)) == KEEPERS:
            own, *rest = order.keepers(able)
            # A lone contributor keeps it, too: what others pass on is believed by nobody.
            own = list(dict.fromkeys([*first, *(own or order.first(able))]))[:KEEPERS]
        else:
            others = set(filter(able, view.peers[1:])) or set(view.peers[1:])
            own, rest = Order(digest, others.intersection(order.parts[0]) or others).first(lambda peer: True), []
        return _Duty(digest, view.together, contributors, now + _SILENCE_S, order, own, [*chain.from_iterable(rest)])

    def _note(self, peers: Iterable[PeerID], mine: Progress, others: list[Standing]) -> None:
        """Send these a note; a peer without a link is called."""
        peers = [peer for peer in peers if peer != self._core.peer_id]
        told = set(self._core.endpoint.tell(peers, TellProgress(self.run_id, mine, others)))
        for peer in peers:
            if peer not in told:
                self._call(peer)

    def _call(self, peer: PeerID) -> None:
        """Tell a peer by a call: it answers where it stands itself."""
        self._post.call(peer, self._fragment)

    def look_again(self, at: float) -> None:
        """Look at the picture again at this time (local time, seconds), or before."""
        loop = asyncio.get_running_loop()
        if self._waking is None or not loop.time() < self._waking.when() <= at:
            if self._waking is not None:
                self._waking.cancel()
            self._waking = loop.call_at(at, self._news.notify)

    def _can_keep(self, peer: PeerID, now: float) -> bool:
        contact = self._core.endpoint.contact if peer == self._core.peer_id else self.contact(peer)
        return bool(contact.addresses) and self._post.deaf.until(peer) <= now

    def could_not_tell(self, error: BaseException) -> None:
        """A call has failed for a reason of our own."""
        self._warn_of("peers could not be told where this one stands", error)

    def lost_keeper(self) -> None:
        """A peer could not be told: it keeps no count, and others are chosen."""
        self._duty = self._duty._replace(until=0.0)


def _place(progress: Progress) -> tuple[object, ...]:
    """The part that others act on: all but the time, and the rate, which changes all the time and is for looking at.

    The field `done` comes last.
    """
    said = progress.end_epoch, progress.left, progress.parameters
    return progress.digest, progress.branch_samples, *said, progress.done


def _size_of(entry: object) -> int:
    """The bytes of an entry that was read: words are bytes, and anything else may be as large as an entry can be."""
    return len(entry) if isinstance(entry, bytes) else PEER_ENTRY_BYTES
