"""The clock of this machine beside those of the connected peers, and what the user is told where they differ."""

from __future__ import annotations

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
        self._open, self._trust, self._events = connections, trust, env.events
        self.ours = env.clock if isinstance(env.clock, SharedClock) else SharedClock(env.clock, settled=True)
        self._told_of_one, self._jumps = False, 0

    @property
    def ahead_s(self) -> float:
        """How far our machine's clock is ahead of the connected peers' clocks (median), seconds; 0.0 without peers."""
        offsets_s = [self.ours.offset_s(peer) or 0.0 for peer in self._open.linked]
        return -statistics.median(offsets_s) if offsets_s else 0.0

    def look(self) -> None:
        """Warn if the machine's clock was set, and ask the peers for their times if it has jumped."""
        if abs(set_s := self.ours.take_set_s()) > CLOCKS_DIFFER_S:
            message = (
                f"the clock of this machine was set {'forward' if set_s > 0 else 'back'} by {abs(set_s):.0f} s. Shoal "
                "goes on by the network's time: if the clock was right before, set it again"
            )
            self._events.emit(Warned(where="clock", message=message))
        if self.ours.jumps != self._jumps:
            self._jumps = self.ours.jumps
            for peer in self._open.linked:
                self._open.ask(peer)

    def told(self, connection: Connection, offset_s: float) -> None:
        """A link has measured how far the clock of the peer at this connection is ahead of our own, seconds."""
        self.look()
        before_s, teller = self.ours.ahead_s, connection.peer_id
        changed = self.ours.told(
            teller,
            site_of(connection.remote_host),
            offset_s,
            trusted=lambda: self._trust.among(self._open.linked),
        )
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
        how, off_s = ("ahead of", offset_s) if offset_s > 0 else ("behind", -offset_s)
        told = [self.ours.offset_s(other) for other in self._open.linked if other != peer]
        others = [each for each in told if each is not None]
        agree = sum(abs(each - self.ours.ahead_s) <= CLOCKS_DIFFER_S for each in others)
        advice = "set the clock that is wrong"
        if 2 * agree > len(others):
            advice = f"that one is wrong, as {agree} of {len(others)} others agree with ours"
        message = f"the clock of {peer.short()} is {off_s:.0f} s {how} ours: {advice}"
        self._events.emit(Warned(where="clock", message=message, about=(peer,)))

    def forget(self, peer: PeerID) -> None:
        """Forget the time of a peer that is no longer connected."""
        self.ours.forget(peer)
