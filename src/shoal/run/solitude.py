"""Whether a peer trains alone, or has ended the run apart from the others, and why, as far as it can tell.

A peer is alone while it is connected with nobody else of its run, or takes steps alone (a client: looks for a group)
and is connected only with peers at other states. One that was given peers, or knows of others, is not meant to be: it
says so once, when that has lasted for `PATIENCE_S`. Peers that start together often take a first step each before they
have found one another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from shoal.base.peer import PeerID
from shoal.events import SteppedAlone
from shoal.rpc.clocks import CLOCKS_DIFFER_S
from shoal.run.decide.state_name import StateName
from shoal.run.gossip import ProgressGossip
from shoal.run.outlook import Outlook
from shoal.run.report.notices import Notices
from shoal.run.view.progress import StateKey
from shoal.transport.sockets import is_loopback

__all__ = ["PATIENCE_S", "Circumstances", "Solitude"]

PATIENCE_S = 20.0
"""A peer that trains alone says so when that has lasted for this time."""

_LOOK_S = 1.0
_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """The facts that a peer knows when it finds itself alone.

    Attributes:
        run_id: the run that it trains.
        unreached: others of the run that are known, and why it is not connected with them.
        elsewhere: how many others of the run are connected with, at other states.
        given_peers: whether it was told of others when it began.
        connected: whether it is connected with anybody at all.
        client: whether it only dials.
        begun_anew: of a client: its epoch and that of the others, if their state is worse than the one that it keeps.
        only_here: whether it listens for its own machine only, though its initial peers are elsewhere.
        clock_ahead_s: how far its clock is ahead of those of the others that it is connected with.
        invited_to: the runs that its invites name.
        mismatch: how the settings of others of the run differ; None if none do.
    """

    run_id: str
    unreached: Mapping[PeerID, str]
    elsewhere: int
    given_peers: bool
    connected: bool
    client: bool
    begun_anew: tuple[int, int] | None
    only_here: bool
    clock_ahead_s: float
    invited_to: Collection[str]
    mismatch: str | None

    @property
    def expected(self) -> bool:
        """Whether others should be there."""
        return self.given_peers or bool(self.unreached) or self.mismatch is not None

    def reasons(self) -> list[str]:
        """Sentences, each with what to do; never empty."""
        found = []
        if self.invited_to and self.run_id not in self.invited_to:
            names = ", ".join(map(repr, sorted(self.invited_to)))
            found.append(f"its invite is for run {names}: train that one, or ask for another invite")
        if abs(self.clock_ahead_s) > CLOCKS_DIFFER_S:
            how = "ahead of" if self.clock_ahead_s > 0 else "behind"
            found.append(f"the clock here is {abs(self.clock_ahead_s):.0f} s {how} those of the others: set it")
        if self.given_peers and not self.connected:
            found.append("none of its initial peers answers: check whether they run, and whether they can be reached")
        if self.begun_anew is not None:
            own, others = self.begun_anew
            found.append(
                f"the peers that can be dialed are at epoch {others} only, and have not taken the state of this "
                f"client, which is at epoch {own}: look whether their training stands still; else end them, and start "
                "one from a checkpoint of this run, or from this peer's state_dict()"
            )
        if self.unreached:
            found.append(self._of_the_unreached())
        if self.only_here:
            found.append(
                "it listens for its own machine only, and its initial peers are elsewhere: give the DHT "
                "host_maddrs='/ip4/0.0.0.0/tcp/PORT'"
            )
        if self.mismatch is not None:
            found.append(f"other peers train it with other settings: {self.mismatch}")
        return found or [self._of_nobody()]

    def _of_the_unreached(self) -> str:
        named = [f"{peer.short()} ({why})" for peer, why in sorted(self.unreached.items())[:_SHOWN]]
        more = f" and {len(self.unreached) - _SHOWN} more" if len(self.unreached) > _SHOWN else ""
        text = f"other peers of the run are there, but it is connected with none: {', '.join(named)}{more}"
        if self.client:
            text += (
                ". This peer only dials, so it needs peers that it can dial: open a port at one of the others, or let "
                "two machines that all can reach help, each with a shoal.Optimizer(auxiliary=True): two, as everybody "
                "would depend on a single one"
            )
        return text

    def _of_nobody(self) -> str:
        if self.elsewhere:
            who = (
                "1 other peer of the run is" if self.elsewhere == 1 else f"{self.elsewhere} other peers of the run are"
            )
            return f"{who} at other states"
        return (
            "no other peer of the run is known. If others train, check that the run's name is the same there, that "
            "they can reach this peer at the address that it announces, that its initial peers are up, and that all "
            "clocks are right: `shoal doctor INVITE` checks most of that"
        )


class Solitude:
    """Looks whether a peer is alone, and whether the others have ended the run without it, and says it.

    Args:
        outlook: of this peer.
        gossip: tells the others its progress.
        notices: say it.
        missing: returns how many peers a merge lacks, though this one is ready for it, and how many it takes.
        searches: whether it has the samples for a step, and looks for the others to average with.
        first: that of the model's first fragment, if this is of another one.
        has_folder: whether the program has a folder of checkpoints: there it looks for the state of those who have
            ended without this peer, before that is told.

    Attributes:
        notices: of the first fragment: how the run ended is told once for the model.
        told: whether it was said, and no step was taken with others since.
        met: whether others of the run were here at any time.
        looked_at: the state at the end of the run with which it was looked how the others have ended.
        ended_without: the peers that had ended at another state than this fragment, and left; the epoch of each.
        ended_alone: whether the last steps of this fragment were made alone, and nobody has said how it ended.
        untold: of the first fragment: tells that the others have ended, or may have, without this peer, or that a
            quorum is lacking; None if that is not so, or was told.
    """

    def __init__(
        self,
        outlook: Outlook,
        gossip: ProgressGossip,
        notices: Notices,
        *,
        searches: Callable[[], bool],
        missing: Callable[[], tuple[int, int]],
        first: Solitude | None = None,
        has_folder: bool = False,
    ) -> None:
        self._core, self._known, self._own = outlook.core, outlook.known, outlook.own
        self._outlook, self._gossip = outlook, gossip
        self.notices: Notices = notices if first is None else first.notices
        self._run_id, self._searches, self._missing = outlook.settings.run_id, searches, missing
        self._epoch: int | None = None  # of the last step, if it was taken alone
        self._together: int | None = None  # of the last state that this peer had with others
        self._others = frozenset[PeerID]()  # who were known then
        self.met = False
        self.told = self._told_anew = self._sought_end = False
        self._first, self._has_folder = first or self, has_folder
        self.model: list[Solitude] = [] if first is None else first.model
        """Those of all fragments of the model, the first one first."""
        self.model.append(self)
        self.looked_at: StateName | None = None
        self.ended_without: Mapping[PeerID, int] = {}
        self.ended_alone = False
        self.untold: Callable[[], None] | None = None

    async def watch(self) -> None:
        """Look every now and then, for as long as the peer trains."""
        loop = asyncio.get_running_loop()
        since = searches_since = complete_at = loop.time()
        while True:
            await asyncio.sleep(_LOOK_S)
            if not self._searches():
                searches_since = loop.time()
            missing, quorum = self._missing()
            if not missing:
                complete_at = loop.time()
            self._lacks(missing if loop.time() - complete_at >= PATIENCE_S else 0, quorum)
            self.notices.stragglers(self._here() if loop.time() - searches_since >= PATIENCE_S else ())
            self.met = self.met or any(True for _ in self._connected())
            if self._in_company():
                since = loop.time()
            elif loop.time() - since >= PATIENCE_S:
                self._tell()

    def _lacks(self, missing: int, quorum: int) -> None:
        """A merge lacks these many peers. It is told, once it was looked in the folder whether the run has ended.

        Those who end a run tell nobody whom they have given up: a peer that stood still for long waits for a quorum.
        """
        if any(True for _ in self._connected()):
            self._sought_end = False
        elif missing and self._has_folder and not self._sought_end:
            self._sought_end, self.untold = True, partial(self.notices.lacks, missing, quorum)
        if self.untold is None:
            self.notices.lacks(missing, quorum)

    def _in_company(self) -> bool:
        # A client takes no step alone beside others: it stands still.
        stands_still = self._outlook.is_client and self._searches()
        return bool(self._here()) if self._epoch is not None or stands_still else any(True for _ in self._connected())

    def _connected(self) -> Iterator[PeerID]:
        return filter(self._core.endpoint.connected, self._known.peers)

    def _here(self) -> list[PeerID]:
        words, here = {peer: self._known.progress_of(peer) for peer in self._connected()}, self._own.name.digest
        return [peer for peer, word in words.items() if word is not None and word.digest == here]

    def stepped(self, epoch: int, others: Collection[PeerID]) -> None:
        """A step was taken, with these others: they were here then, though they may have left before it was taken."""
        if others:
            self.told = self._told_anew = False
            self._were_here(epoch, others)
            return
        self._epoch = epoch
        known = len(self._known.peers)
        self._core.env.events.emit(SteppedAlone(run_id=self._run_id, epoch=epoch, others=known))

    def averaged_alone(self, epoch: int) -> None:
        """Nobody was left for the last average of the states, at this epoch."""
        self._epoch = epoch

    def took_over(self, epoch: int) -> None:
        """The state of others, of this epoch, was taken over."""
        self._were_here(epoch, self._known.peers)

    def _were_here(self, epoch: int, others: Collection[PeerID]) -> None:
        self._epoch, self._together, self._others, self.met = None, epoch, frozenset(others), True

    def ended(self) -> None:
        """This fragment is at the end of the run, and waits for nobody: look how the others have ended, once.

        A peer that stood still meanwhile ends at another state than they. So does one that came when they were about to
        leave. Others may have stood still with it, so perhaps it has made no step alone. Those who leave in order say
        at which state they are; of those who are lost nobody knows. What others do later is nothing to tell.
        """
        name, left = self._own.name, self._known.left
        if self.looked_at == name:
            return
        self.looked_at = name
        lineage = self._own.lineage
        # A state that is worse than one before it was renamed, as a check found that its parameters are wrong.
        better = {held.digest for held in lineage.held if held.samples > name.samples}
        led_here = {name.digest, *lineage.history} - better
        apart = {peer: word.epoch for peer, word in left.items() if word.digest not in led_here}
        self.ended_without = {peer: epoch for peer, epoch in apart.items() if left[peer].ended}
        # Those who are here come to this state, or have come: steps that this peer made alone are theirs, too. Those
        # who left with no later state than this peer had with them have ended nothing.
        together, gone = self.together, self._others.difference(self._connected())
        lost = any(peer not in left or apart.get(peer, 0) > together for peer in gone)
        met_nobody = self._together is None and not self._here()
        self.ended_alone = self._epoch is not None and (lost or met_nobody)
        if all(each.has_ended for each in self.model):
            self._first.tell_end()

    @property
    def together(self) -> int:
        """The epoch of the last state that this peer had with others; 0 if it had none."""
        return self._together or 0

    @property
    def has_ended(self) -> bool:
        """Whether it was looked how the others have ended."""
        return self.looked_at == self._own.name and self._outlook.at_end

    def tell_end(self) -> None:
        """The run is over for all of the model: tell if the others ended it without this peer. Of the first fragment.

        A short run may end before anything else would be told.
        """
        without = {peer: epoch for each in self.model for peer, epoch in each.ended_without.items()}
        alone, end, self.untold = [each.together for each in self.model if each.ended_alone], self._own.name.epoch, None
        if without:
            self.untold = partial(self.notices.ended_without, without, end)
        elif alone and any(each.met for each in self.model):
            self.untold = partial(self.notices.ended_alone, min(alone), end)
        elif alone:
            self._tell()  # unless that was told
        if not self._has_folder:
            self.looked_for_end(found=False)

    def looked_for_end(self, *, found: bool) -> None:
        """The program has looked for the state at which the others have ended; unless it was `found`, tell."""
        tell, self.untold = self.untold, None
        if tell is not None and not found:
            tell()

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why this peer is alone, and what to do; empty unless it has said that it is."""
        return tuple(self._circumstances().reasons()) if self.told else ()

    def _tell(self) -> None:
        if self._core.endpoint.has_twin:  # that is why, and it was said
            return
        found = self._circumstances()
        begun_anew = found.begun_anew is not None  # perhaps since it was told that this client is alone
        if found.expected and (not self.told or begun_anew > self._told_anew):
            self.told, self._told_anew = True, begun_anew or self._told_anew
            self.notices.alone(self._epoch, found.reasons())

    def _circumstances(self) -> Circumstances:
        core, endpoint = self._core, self._core.endpoint
        words = [word for word in map(self._known.progress_of, self._connected()) if word is not None]
        floor = self._outlook.floor
        best = max((StateKey.of_peer(word) for word in words if word.contact.addresses), default=floor)
        anew = self._outlook.is_client and best.is_before(floor)
        listens_at = endpoint.listens_at
        return Circumstances(
            run_id=self._run_id,
            unreached=self._gossip.unreached(),
            elsewhere=sum(map(endpoint.connected, self._known.peers)),
            given_peers=bool(core.node.initial_peers),
            connected=bool(endpoint.peers),
            client=self._outlook.is_client,
            begun_anew=(self._own.name.epoch, best.epoch) if anew else None,
            only_here=bool(listens_at) and is_loopback(listens_at[0].host) and not core.begins_here,
            clock_ahead_s=endpoint.clock_ahead_s,
            invited_to=core.invited_to,
            mismatch=self._known.mismatch,
        )
