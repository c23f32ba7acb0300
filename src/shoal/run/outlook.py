"""The swarm as one peer sees it from its own state: what is known of the others, and whether a better state counts.

Others may claim a better state that nobody gives. `claimed` is the swarm as they say it is. In `view` this peer is
behind only as long as its trainer is to stand still for that state (see `fetching`). In both it is not behind while the
peers at its state make their own step (see `forerunners`). Both change nothing; `look` takes in what is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shoal.averaging.core import PeerCore
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Contact, Progress
from shoal.run.decide.forerunners import Forerunners
from shoal.run.decide.run_end import RunEnd
from shoal.run.join.fetching import Fetching
from shoal.run.join.own_state import OwnState
from shoal.run.settings import RunSettings
from shoal.run.view.attendance import Attendance
from shoal.run.view.companions import Companions
from shoal.run.view.contribution import RateMeter
from shoal.run.view.progress import NO_STATE, StateKey, SwarmProgress, SwarmView
from shoal.run.view.witness import Witness
from shoal.strategies.pace import Pace
from shoal.strategies.strategy import Terms

__all__ = ["Outlook"]

STUCK_S = 60.0
"""Others that have not come further for this time cannot go on without the client that has the better state."""


@dataclass(slots=True, kw_only=True)
class Outlook:
    """The outlook of one peer, from these parts of it. Loop only.

    Attributes:
        core: this peer.
        settings: of the run.
        terms: what the strategy asks of the run.
        pace: how far this peer is on its way to the next step.
        own: its state.
        speed: how fast it trains.
        end: where the run ends.
        known: the words of the others.
        companions: the peers of its last step.
        attendance: of the others in its rounds.
        fetching: of a better state.
        witness: of how far the run can have come.
        forerunners: who went on from its state without it.
        loop: of all this; its time may be asked from any thread.
    """

    core: PeerCore
    settings: RunSettings
    terms: Terms
    pace: Pace
    own: OwnState
    speed: RateMeter
    end: RunEnd
    known: SwarmProgress
    companions: Companions
    attendance: Attendance
    fetching: Fetching
    witness: Witness
    forerunners: Forerunners
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _worse: tuple[StateKey, float] = (NO_STATE, 0.0)  # the best state that a client can have, and since when
    _given_up: bytes | None = None  # the digest of the state that this client is about to go back from

    @property
    def contact(self) -> Contact:
        """This peer, as others may dial it for this run.

        A client names no address, though its DHT may listen: it leads no group, and gives no state.
        """
        contact = self.core.endpoint.contact
        return Contact(contact.peer) if self.settings.averager.client_mode else contact

    @property
    def is_client(self) -> bool:
        """Whether nobody can dial this peer for this run."""
        return self.settings.averager.client_mode or not self.core.endpoint.contact.addresses

    @property
    def at_end(self) -> bool:
        """Whether this peer's state is at the announced end of the run."""
        return self.end.reached(self.own.name.epoch)

    def place(self) -> Progress:
        """This peer's own place in the swarm, as a word without a time. Any thread may ask."""
        name, training = self.own.name, self.own.training
        return Progress(
            contact=self.contact,
            epoch=name.epoch,
            digest=name.digest,
            branch_samples=name.samples,
            done=self.pace.done(training.pending.samples, training.batches, self.loop.time(), name.epoch),
            rate=self.speed.rate,
            time=0.0,
            settings=dict(self.settings.fingerprint),
            end_epoch=self.end.epoch,
        )

    def look(self) -> SwarmView:
        """Take in what is known by now: who contributed, who is gone, who is at our state; returns `claimed`."""
        now = self.loop.time()
        self._note_contributors()
        self.known.expire(now)
        seen = self._seen(now)
        self.forerunners.observe(seen, own=self.own.name.key, committed=self.own.committed, now=now)
        claimed = self._claimed(seen, now)
        self._note_shared(claimed)
        return claimed

    def claimed(self) -> SwarmView:
        """The swarm as the others say, also where this peer goes on with a state that is not the best one."""
        now = self.loop.time()
        return self._claimed(self._seen(now), now)

    def _seen(self, now: float) -> SwarmView:
        mends = self.own.mend_from
        return self.known.view(
            self.place(),
            now,
            shared=self.own.shared,
            floor=self.floor,
            giving=self.giving,
            mends=self._connected(mends) if mends else mends,
            awaited=self.companions.awaited,
            before=self.companions.before,
            absent=self.attendance.absent(self.known.peers, now),
            silent=self.core.endpoint.silent,
        )

    def _claimed(self, seen: SwarmView, now: float) -> SwarmView:
        if not seen.behind or self.at_end:  # at the end no step of ours comes any more
            return seen
        own = self.own.name.key
        steps_first = self.forerunners.steps_first(
            seen,
            own=own,
            committed=self.own.committed,
            held=self.own.training.pending.held,
            target=self.pace.target(seen) if self.pace.counts_samples else None,
            hears=self.core.endpoint.connected,
            idle=self.attendance.idle(now),
            epoch_s=self.companions.patience_s,
            now=now,
        )
        if not steps_first:
            return seen
        return replace(seen, behind=False, vouched=False, best=own, epoch=own.epoch, steps_first=True)

    @property
    def giving(self) -> frozenset[PeerID]:
        """The clients that give their states to this peer: those that have dialed it. A client dials no client."""
        clients = self.known.clients_before(self.own.name.key)
        return self._connected(clients) if clients else frozenset()

    def _connected(self, peers: Iterable[PeerID]) -> frozenset[PeerID]:
        """Those of these peers that can give a state to this one though they may be clients."""
        return frozenset() if self.is_client else frozenset(filter(self.core.endpoint.connected, peers))

    @property
    def floor(self) -> StateKey:
        """This client goes back to no state that is before this one.

        It is its own if there is a peer that it has dialed, which can take it, until `go_back`; else the last one that
        it had with others.
        """
        own = self.own
        if own.shared or self._given_up == own.name.digest:
            return own.floor
        words = map(self.known.progress_of, self.core.endpoint.peers)
        return own.name.key if any(word is not None and word.contact.addresses for word in words) else own.floor

    def _note_shared(self, claimed: SwarmView) -> None:
        """Another peer that can be dialed says that it has our state: perhaps it has taken it from here."""
        others = (claimed.others[peer] for peer in claimed.together - claimed.coming if peer in claimed.others)
        if not self.own.shared and any(word.contact.addresses for word in others):
            self.own.is_shared()

    def go_back(self, claimed: SwarmView) -> StateKey | None:
        """The worse state of others to which this client goes back, once; None otherwise.

        Nobody can have the state that it is at. If the best one that can be had has been the same for `STUCK_S`, its
        holders cannot go on without this peer either, as a quorum takes them all. It does not go back to a state that
        nobody has trained: peers that have begun anew are to be started from a checkpoint.
        """
        own, now, others, refused = self.own, self.loop.time(), claimed.others, claimed.refused
        here = (others[peer] for peer in claimed.together if peer in others and peer not in refused)
        # In a large swarm not all are looked at whenever something is heard.
        if not self.is_client or any(word.contact.addresses for word in here) or self.at_end:
            self._worse = NO_STATE, now
            return None
        offered = (word for peer, word in others.items() if word.contact.addresses and peer not in refused)
        best = max(map(StateKey.of_peer, offered), default=NO_STATE)
        may_take = not own.shared and not best.is_before(self.floor)  # it needs to give nothing up
        if not best.trained or best >= own.name.key or may_take:
            best = NO_STATE
        if best != self._worse[0]:
            self._worse = best, now
        if best is NO_STATE or now - self._worse[1] < STUCK_S:
            return None
        sometimes("a client goes back to a state that others can have")
        own.go_back_to(best)
        self._given_up = own.name.digest
        return best

    def view(self) -> SwarmView:
        """The swarm as it is known here now; `behind` only as long as this peer stands still for a better state."""
        return self.view_of(self.claimed())

    def view_of(self, claimed: SwarmView) -> SwarmView:
        """The view that belongs to what the others claim."""
        goes_on = claimed.behind and not self.fetching.waits(claimed, self.loop.time())
        return replace(claimed, behind=False) if goes_on else claimed

    @property
    def trains_on(self) -> bool:
        """Whether a better state is fetched while the trainer goes on, as nobody waits for anybody.

        An auxiliary peer has no batches to go on with.
        """
        return self.terms.waits_for_nobody and self.own.name.epoch > 0 and not self.settings.auxiliary

    def alone(self, view: SwarmView) -> bool:
        """Whether nobody is at our state but this peer, and peers that rounds do not wait for. A quorum never is."""
        if self.terms.quorum > 1 and not self.others_left:
            return False
        others = view.together - {self.core.peer_id}
        return others == self.attendance.unawaited(others, self.loop.time())

    @property
    def others_left(self) -> bool:
        """Whether the others have ended the run, and left: no quorum comes any more."""
        end, known = self.end.epoch, self.known
        if end is None or known.peers:
            return False
        # Farewells of an earlier run of this name lie in the DHT for a while: those writers were never here.
        return any(left.ended and left.epoch >= end for left in known.left.values())

    def state_replaced(self) -> None:
        """This peer's state is another one now, and not by a step that it took with others, or alone."""
        own = self.own
        self.witness.took_over(own.name.epoch, own.name.samples, gave=own.committed.gave, weights=own.committed.weights)
        self._note_contributors()

    def _note_contributors(self) -> None:
        """The contributors to the last steps of our state count: they are believed, and rounds wait for them."""
        known, me, committed = self.known, self.core.peer_id, self.own.committed
        peers = committed.samples
        if self.pace.counts_samples:
            known.contributed(peers, believed=committed.believed, places=committed.record.places)
        else:  # they say how far they are on their way
            known.contributed(peers)
        alone = not any(known.progress_of(peer) is not None for peer in peers if peer != me)
        self.attendance.contributed(peers, alone=alone)
