"""Which peers keep the rounds of this one waiting, or lead them to nothing (decisions 0053 and 0054).

A peer judges by what it has seen itself: nothing that others say counts, else a liar could have an honest peer shut
out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from shoal.averaging.allreduce.interface import Outcome
from shoal.averaging.allreduce.witness import Seen
from shoal.averaging.matchmaking.events import Precedence
from shoal.averaging.strangers import NO_STRANGERS, Strangers
from shoal.base.bounded import put_last
from shoal.base.ledger import Ledger
from shoal.base.peer import PeerID

__all__ = ["Conduct"]

_MOST_LATE = 64
"""The most members of which is remembered who led when they were late."""

_MOST_HELPERS = 64
"""The most auxiliary peers that are remembered as no strangers."""


class Conduct:
    """Remembers how peers behave in rounds, and on which of them nobody counts for a while.

    Args:
        window_s: a pause lasts for 4 of them at first, and for 64 at most (`Ledger`).
        warn: called with what the user is told, and the peer that it names.

    Attributes:
        idle: the members that keep rounds waiting and give nothing, or do not end their streams. While their pause
            lasts they lead no group of this peer, and it waits for nothing of theirs.
        bad_leaders: the peers that lead groups, and bring their rounds to no end, or far too late. While their pause
            lasts they lead no group of this peer; they may be members.
        bad_lines: the members whose values or averages do not come here, and come to others. While their pause lasts
            this peer does not wait for them.
    """

    def __init__(self, window_s: float, warn: Callable[..., None]) -> None:
        pauses = 4 * window_s, 64 * window_s
        self.idle, self.bad_lines = Ledger[PeerID](*pauses), Ledger[PeerID](*pauses)
        # The others can do without it in this role: half of a window is too much to lose for the first time, too.
        self.bad_leaders = Ledger[PeerID](*pauses, costly_s=window_s / 2)
        self._window_s, self._warn = window_s, warn
        # Of the last round: those that were late, those that had not ended their streams, and who was a stranger.
        self._late, self._kept, self._strangers = frozenset[PeerID](), frozenset[PeerID](), NO_STRANGERS
        # Who led the last rounds in which these were late, and how many of them.
        self._late_under: dict[PeerID, tuple[PeerID | None, int]] = {}
        self._helpers: dict[PeerID, None] = {}  # that have reduced for us, and have no values with which to prove it

    def precedence(self, strangers: Strangers, now: float) -> Precedence:
        """The order of the others in a search (`now`: the loop's time, seconds)."""
        idle, bad = self.idle.pausing(now), self.bad_leaders.pausing(now)
        if strangers.are_spent(now) and not self.bad_leaders.unforgiven.issuperset(strangers.known):
            bad = self.bad_leaders.unforgiven
        return Precedence(
            known=strangers.known,
            shunned=idle | bad,
            spared=idle,
            proved=self._helpers if strangers.budget.is_spent(now) else None,
        )

    def brief_s(self, members: Collection[PeerID], strangers: Strangers, now: float) -> dict[PeerID, float]:
        """The members of a round that are waited for only briefly, see `Brief`."""
        idle = self.idle.pausing(now).intersection(members)
        strange = strangers.among(members).difference(self._helpers)
        patience_s = strangers.patience_s(now)
        if len(idle) + 2 > len(members):
            idle = frozenset()  # nobody else is left
        return {**dict.fromkeys(strange, patience_s), **dict.fromkeys(idle, 0.0)}

    def searched(
        self, idled: Iterable[PeerID], turned_away: Iterable[PeerID], now: float, strangers: Strangers = NO_STRANGERS
    ) -> None:
        """A search is over.

        Args:
            idled: took this peer, and began no group in all the time that there was.
            turned_away: did not take this peer, though there was a place.
            now: seconds.
            strangers: who is a stranger, and what may be lost.
        """
        for peer in idled:
            strangers.pay(peer, self._window_s / 2, now)
            self._led_badly(peer, self._window_s, now)
        for peer in sorted(turned_away):
            self._led_badly(peer, 0.0, now)

    def played(
        self,
        seen: Seen,
        leader: PeerID,
        outcome: Outcome | None,
        began: float,
        now: float,
        strangers: Strangers = NO_STRANGERS,
        *,
        leads: bool = False,
        unfair: bool = False,
    ) -> None:
        """A round is over.

        Args:
            seen: what this peer saw in it.
            leader: of the round.
            outcome: None if it failed here.
            began: seconds.
            now: seconds.
            strangers: who is a stranger, and what may be lost.
            leads: whether that is this peer.
            unfair: the leader has planned it so that it is slow: nobody else is to blame for what came late.
        """
        cost_s = now - began
        self._late, self._strangers = frozenset(), strangers
        if unfair:
            self.led_badly(leader, cost_s, now, strangers)
            return
        self._pay(seen, strangers, now)
        gave = reduced = frozenset[PeerID]()
        if outcome is not None:
            gave = outcome.gave
            # One without values of its own gives the averages of its tiles.
            reduced = seen.reduced - self.idle.pausing(now)
        late, unheard = seen.late | (seen.unheard - gave), (seen.unheard & gave) - seen.late
        self._late = late
        for peer in (gave | reduced) - late - self._kept:
            self.idle.forgive(peer, now)
        for peer in gave - unheard - seen.bad_lines:
            self.bad_lines.forgive(peer, now)
        self._note_helpers(reduced - gave - late - seen.unheard, late, strangers, cost_s, now)
        self._note_idle(late, cost_s, now, None if leads else leader)
        for peer in sorted(unheard):
            if times := self.bad_lines.failed(peer, now, cost_s):
                self._warn(
                    f"what {peer.short()} gave in {times} rounds came to others in time, and not to this peer, which "
                    "does not wait for it in the next ones. Check the line between the two: it may lose large packets "
                    "(try a smaller MTU), or be far slower than other lines",
                    peer,
                )
        if seen.led_badly:
            strangers.pay(leader, cost_s - seen.lost_s, now)
            self._led_badly(leader, cost_s, now)
        elif outcome is not None:
            self.bad_leaders.forgive(leader, now)

    def ended(self, kept: frozenset[PeerID], cost_s: float, now: float) -> None:
        """The next round begins: nobody waits any more for the streams of the last one.

        Args:
            kept: the members that had not ended theirs in the time that there was.
            cost_s: how long the next round, or the search for its group, has waited for that. Nobody is to blame if it
                did not.
            now: seconds.
        """
        idle = self.idle.pausing(now)
        to_blame = kept - idle - self._late if cost_s > 0 else frozenset[PeerID]()
        self._kept = to_blame | (kept & idle)  # what they give to the next round does not make up for that
        if to_blame:
            self._strangers.pay(min(self._strangers.among(to_blame) or to_blame), cost_s, now)
            self._note_idle(to_blame, cost_s, now)

    def _note_idle(self, late: Collection[PeerID], cost_s: float, now: float, led_by: PeerID | None = None) -> None:
        """These kept a round waiting. The second time under one leader does not count: is the leader to blame for it?

        It may have told them nothing, or too late. Next another one leads, if the others find that, too
        (`LeaderMemory`). Under two leaders, or a third time, it is their own fault. So it is at once if no leader is
        named.
        """
        unforgiven = self.idle.unforgiven
        for peer in sorted(late):
            before, times = self._late_under.get(peer, (None, 0)) if peer in unforgiven else (None, 0)
            times = times + 1 if led_by == before else 1
            put_last(self._late_under, peer, (led_by, times), _MOST_LATE)
            excused = led_by not in (None, peer) and times == 2
            if times := self.idle.failed(peer, now, cost_s, weight=float(not excused)):
                self._warn(
                    f"{peer.short()} kept {times} rounds waiting, and gave nothing to them, or too late, or took "
                    "nothing, or did not end its streams after them: the next ones go on without it. Check its line "
                    "(`shoal doctor INVITE` there), and whether its process hangs",
                    peer,
                )

    def _note_helpers(
        self, helped: Collection[PeerID], late: Collection[PeerID], strangers: Strangers, cost_s: float, now: float
    ) -> None:
        """These have reduced for us. One that is late is a stranger again, and what it has cost is paid as such."""
        for peer in helped:
            put_last(self._helpers, peer, None, _MOST_HELPERS)
        for peer in self._helpers.keys() & late:
            del self._helpers[peer]
            strangers.budget.pay(cost_s, now)

    def _pay(self, seen: Seen, strangers: Strangers, now: float) -> None:
        """Pay for what the round has waited for strangers."""
        if seen.waited_s > 0:
            strangers.budget.pay(seen.waited_s, now)
        if strangers.others is not None:
            strangers.others.pay(seen.lost_s, now)
        if (strange := strangers.among(seen.hurried)) and strangers.budget.is_spent(now):
            one = min(strange)
            self._warn(
                f"a round waited for {one.short()}, which has given nothing to this run yet: rounds do not wait for "
                "such peers for a while. Honest newcomers get in within about a minute",
                one,
            )

    def led_badly(self, leader: PeerID, cost_s: float, now: float, strangers: Strangers) -> None:
        """What this leader has planned cost so much time, and was slow or of no use.

        The pause of a leader that is no stranger is enough: if the budget paid, it would lack for honest slow members.
        """
        if strangers.among((leader,)):
            strangers.budget.pay(cost_s, now)
        self._led_badly(leader, cost_s, now)

    def was_lied_to(self, leader: PeerID, now: float) -> None:
        """This leader has signed two different commits of one round: nobody does that by chance."""
        self.bad_leaders.condemn(leader, now)
        self._warn(
            f"{leader.short()} has lied: it led a round of averaging, and told its members different verdicts, as its "
            "signatures prove. It leads no group here for a long time. If it is no peer of yours, leave it out; if it "
            "is yours, stop it and look who uses its key",
            leader,
        )

    def _led_badly(self, leader: PeerID, cost_s: float, now: float) -> None:
        if times := self.bad_leaders.failed(leader, now, cost_s):
            groups = "a group" if times == 1 else f"{times} groups"
            self._warn(
                f"{leader.short()} led {groups} badly: it brought them to no average, or far too late, divided the "
                "work so that it takes far longer than it need (give all peers the same min_vector_size), left peers "
                "out that are there, or called them gone. It leads none of the next ones here. See in its log why; if "
                "it is no peer of yours, leave it out",
                leader,
            )
