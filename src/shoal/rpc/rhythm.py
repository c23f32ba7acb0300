"""Which peers have fallen silent, measured by how fast they and the others answer. This is pure bookkeeping.

No peer is watched all the time. A peer that waits for another *looks* at it, a few times a second. If the other has
said nothing for a moment, a look asks it for a sign of life. Any byte from it, on any connection, is one. It is
*silent* when it has given none for `LEAST_S`, and for twice as long as the slowest of the latest answers, its own
and those of the others. Then nobody waits for it. It is neither disconnected nor forgotten, and counts again with its
first byte.

An answer may have to wait behind what we and others send that peer. So the time begins anew whenever its machine has
acknowledged more of the bytes that go there on streams. That goes on until `most_s` at the latest, and does not bring a
silent peer back: the system of a process that stands still takes what comes, too, until its buffers are full.

The time in which a peer is silent is counted in looks: if something keeps this process from looking (a frozen machine,
a training step that holds the interpreter), it also keeps it from hearing, and says nothing about others. Lifeguard's
local health has the same purpose (Dadgar et al. 2018). The limit that follows the answers is an accrual detector's
(Hayashibara et al. 2004), with a quantile in place of a normal distribution: answers of a busy machine have none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes

__all__ = ["LEAST_S", "LOOK_S", "SOON_S", "Rhythm"]

LEAST_S = 1.0
"""A peer that was asked more recently than this is not silent."""

SOON_S = 0.5
"""The same for peers that cost little if they are given up wrongly: members, to the leader of a search or of the last
one."""

LOOK_S = 0.25
"""The time between two looks at a peer. A longer time between them counts as this much silence."""

_QUIET_S = 0.25
"""A peer that was heard within this time is not asked."""

_SLACK = 2.0
"""An answer may take so many times as long as the slowest of the latest ones. A later one counts as an outage."""

_TAKEN_BYTES = 2048
"""If a machine acknowledges so much on streams, its line is busy, and its silence begins anew. The reports of a round
are less."""

_OWN_ANSWERS, _ALL_ANSWERS, _OUTLIERS = 8, 256, 2
_MAX_PEERS = 4096


class _Pulse:
    """The measurements of one peer."""

    __slots__ = (
        "acked",
        "answers",
        "asked",
        "asked_at",
        "heard_at",
        "looked_at",
        "quiet_s",
        "received",
        "silent",
        "waited_s",
    )

    def __init__(self, received: int) -> None:
        self.received, self.heard_at, self.looked_at = received, float("-inf"), float("-inf")
        self.asked = self.silent = False
        self.asked_at = float("-inf")
        self.acked = 0
        self.waited_s = self.quiet_s = 0.0  # since it was asked, and since its machine took something, if that is later
        self.answers: deque[float] = deque(maxlen=_OWN_ANSWERS)


class Rhythm:
    """Remembers how fast peers answer.

    Args:
        ask: asks a peer for a sign of life; returns False if it cannot be asked.
        received: how many bytes have come from a peer over the connections with it now.
        acked: how many bytes of streams a peer's machine has acknowledged, over the connections with it now.
        found: called with each peer that is found silent, and with how long it was waited for, seconds.
        most_s: no peer is waited for longer than this, seconds.
    """

    def __init__(
        self,
        ask: Callable[[PeerID], bool],
        received: Callable[[PeerID], int],
        acked: Callable[[PeerID], int],
        found: Callable[[PeerID, float], None],
        *,
        most_s: float,
    ) -> None:
        self._ask, self._received, self._acked, self._found, self._most_s = ask, received, acked, found, most_s
        self._pulses: dict[PeerID, _Pulse] = {}
        self._answers: deque[float] = deque(maxlen=_ALL_ANSWERS)
        self._silent: set[PeerID] = set()

    def is_silent(self, peer: PeerID, now: float, *, soon: bool = False) -> bool:
        """Look at a peer, and return whether it is silent. To be called again soon.

        Args:
            peer: the peer that is waited for.
            now: local time, seconds.
            soon: giving the peer up wrongly costs little, so it has less time.
        """
        received = self._received(peer)
        pulse = self._pulses.get(peer)
        if pulse is None:
            pulse = self._pulses[peer] = _Pulse(received)
            if len(self._pulses) > _MAX_PEERS:
                self.forget(next(iter(self._pulses)))
        if received != pulse.received:
            self._heard(peer, pulse, received, now)
        elif pulse.silent and now - pulse.looked_at > self._most_s:
            # Nobody has looked for so long that it may be back, and has had no reason to say so.
            pulse.silent = False
            self._silent.discard(peer)
            self._begin(peer, pulse, now)
        elif pulse.asked:
            self._wait(peer, pulse, min(now - pulse.looked_at, LOOK_S), SOON_S if soon else LEAST_S)
        elif now - pulse.heard_at >= _QUIET_S:
            self._begin(peer, pulse, now)
        pulse.looked_at = now
        return pulse.silent

    def silent(self, now: float) -> frozenset[PeerID]:
        """The peers that were found silent and have said nothing since. Looks at each of them."""
        return frozenset(peer for peer in list(self._silent) if self.is_silent(peer, now))

    def forget(self, peer: PeerID) -> None:
        """Forget a peer: all connections with it are gone."""
        self._pulses.pop(peer, None)
        self._silent.discard(peer)

    def _begin(self, peer: PeerID, pulse: _Pulse, now: float) -> None:
        pulse.asked, pulse.acked, pulse.asked_at = self._ask(peer), self._acked(peer), now
        pulse.waited_s = pulse.quiet_s = 0.0

    def _wait(self, peer: PeerID, pulse: _Pulse, step_s: float, least_s: float) -> None:
        """It was asked, and has said nothing since."""
        pulse.waited_s += step_s
        pulse.quiet_s += step_s
        if pulse.silent:
            if pulse.waited_s >= 2 * self._most_s:
                pulse.asked, pulse.waited_s = self._ask(peer), self._most_s  # there may be a way now
            return
        acked = self._acked(peer)
        if acked >= pulse.acked + _TAKEN_BYTES:
            pulse.acked, pulse.quiet_s = acked, 0.0
        pulse.acked = min(pulse.acked, acked)  # less than before: a connection was closed
        if pulse.quiet_s >= max(least_s, self._limit_s(pulse)) or pulse.waited_s >= self._most_s:
            pulse.silent = True
            self._silent.add(peer)
            self._found(peer, pulse.waited_s)

    def _heard(self, peer: PeerID, pulse: _Pulse, received: int, now: float) -> None:
        if received > pulse.received and pulse.asked:
            took_s = pulse.waited_s + min(now - pulse.looked_at, LOOK_S)
            # By the clock, too, as a silent peer is looked at rarely: after a cut of ten seconds the answers of all
            # others seemed to have taken little more than one, and each cut raised the limit.
            by_clock_s = now - pulse.asked_at
            if took_s <= _SLACK * max(LEAST_S, self._limit_s(pulse)) and by_clock_s <= self._most_s:
                pulse.answers.append(took_s)
                self._answers.append(took_s)
        if received > pulse.received:
            if pulse.silent:
                sometimes("a peer that was found silent is heard again")
            pulse.heard_at, pulse.asked, pulse.silent = now, False, False
            self._silent.discard(peer)
        pulse.received = received  # less than before: a connection was closed, which is no word from it

    def _limit_s(self, pulse: _Pulse) -> float:
        all_but_few = sorted(self._answers)[-1 - _OUTLIERS :]
        slowest_s = max([*pulse.answers, *all_but_few[: 1 if len(all_but_few) > _OUTLIERS else 0]], default=0.0)
        return min(_SLACK * slowest_s, self._most_s)
