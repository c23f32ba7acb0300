"""The clock of this machine beside those of the connected peers, and what the user is told where they differ."""

from __future__ import annotations

import asyncio
import statistics

from shoal.base.clock import Env, SharedClock
from shoal.base.peer import PeerID, site_of
from shoal.events import Warned
from shoal.rpc.connections import Connections
from shoal.rpc.trust import Trust
from shoal.transport.base import Connection

__all__ = ["CLOCKS_DIFFER_S", "Clocks"]

CLOCKS_DIFFER_S = 10.0
"""A clock that is wrong by more than this is worth a warning."""

_ANSWER_S = 10.0
"""So long the peers are waited for that are asked for their times, as the machine's clock has jumped."""


class Clocks:
    """Compares our clock with those of the peers. Loop only.

    Args:
        connections: the open connections.
        trust: whose word counts where times differ.
        env: clock, events.

    Attributes:
        ours: our machine's wall clock, and the network's.
    """

    def __init__(self, connections: Connections, trust: Trust, env: Env) -> None:
        self._open, self._events = connections, env.events
        self.ours = env.clock if isinstance(env.clock, SharedClock) else SharedClock(env.clock, settled=True)
        self.ours.heed(lambda: trust.among(connections.linked))
        self._told_of_one, self._jumps, self._asked_at = False, 0, 0.0

    @property
    def ahead_s(self) -> float:
        """How far our machine's clock is ahead of those of the connected hosts (median), seconds; 0.0 without any."""
        offsets_s = self.ours.told_s()
        return -statistics.median(offsets_s) if offsets_s else 0.0

    def look(self) -> None:
        """Ask the peers for their times if the machine's clock has jumped, and warn if it was set."""
        self.ours.time()  # notices a jump
        now = asyncio.get_running_loop().time()
        if self.ours.jumps != self._jumps:
            self._jumps, self._asked_at = self.ours.jumps, now
            for peer in self._open.linked:
                self._open.ask(peer)
        elif self.ours.in_doubt and now - self._asked_at > _ANSWER_S:
            self.ours.wait_no_more()
        if abs(set_s := self.ours.take_set_s()) > CLOCKS_DIFFER_S:
            message = (
                f"the clock of this machine was set {'forward' if set_s > 0 else 'back'} by {abs(set_s):.0f} s. Shoal "
                "goes on by the network's time: if the clock was right before, set it again"
            )
            self._events.emit(Warned(where="clock", message=message))

    def told(self, connection: Connection, offset_s: float) -> None:
        """A link has measured how far the clock of the peer at this connection is ahead of our own, seconds."""
        self.look()
        before_s, teller = self.ours.ahead_s, connection.peer_id
        changed = self.ours.told(teller, site_of(connection.remote_host), offset_s)
        self.look()
        if changed and abs(self.ours.ahead_s - before_s) > CLOCKS_DIFFER_S:
            off_s = self.ours.ahead_s
            if abs(off_s) <= CLOCKS_DIFFER_S:
                message = "shoal goes by this machine's clock again: it agrees with those of the other peers"
            else:
                message = (
                    f"the clock of this machine is {abs(off_s):.0f} s {'behind' if off_s > 0 else 'ahead of'} that of "
                    f"the network (as {teller.short()} tells it). Shoal goes by the network's: set the clock that is "
                    "wrong"
                )
            self._events.emit(Warned(where="clock", message=message))
        elif abs(self.ours.ahead_s - offset_s) > CLOCKS_DIFFER_S and not self._told_of_one and not self.ours.in_doubt:
            self._told_of_one = True
            self._tell_of(teller, offset_s)

    def _tell_of(self, peer: PeerID, offset_s: float) -> None:
        """The clock of one peer is not the network's."""
        off_s = offset_s - self.ours.ahead_s
        others_s = self.ours.told_s(but=peer)
        agree = sum(abs(each - self.ours.ahead_s) <= CLOCKS_DIFFER_S for each in others_s)
        advice = "set the clock that is wrong"
        if 2 * agree > len(others_s):
            advice = f"that one is wrong, as {agree} of {len(others_s)} other hosts agree with us"
        how = "ahead of" if off_s > 0 else "behind"
        message = f"the clock of {peer.short()} is {abs(off_s):.0f} s {how} the network's: {advice}"
        self._events.emit(Warned(where="clock", message=message, about=(peer,)))

    def abstained(self, peer: PeerID) -> None:
        """A peer has answered that it does not know the time."""
        self.ours.abstained(peer)
        self.look()

    def forget(self, peer: PeerID) -> None:
        """Forget the time of a peer that is no longer connected."""
        self.ours.forget(peer)
