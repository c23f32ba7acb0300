"""One peer's part in the check of the parameters: it describes its own, and mends them if they differ.

The description is made beside the trainer's next batches. It is good only if the state still has its name afterwards (a
step gives it another one under the lock), and if no weights to evaluate with stood in its place meanwhile. If such are
there, it is tried again until the round comes, which then does without. `check` says what follows from the descriptions
of all.

The last step is followed by no round. So at the end of a run each peer says its description with its progress
(`Progress.parameters`), and waits for those of the others, as it waits for them anyway. They are judged as those of a
round are. Only peers whose words weigh are waited for, and heard.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

import msgspec

from shoal.averaging import StepResult
from shoal.averaging.core import PeerCore
from shoal.base.peer import PeerID
from shoal.base.sometimes import sometimes
from shoal.protocol.wire import Progress, decode, encode
from shoal.run.decide.agreement import checks_of, said_bytes
from shoal.run.decide.check import Check, Checks, Verdict, check_of, is_due, judge
from shoal.run.decide.state_name import StateName
from shoal.run.join.own_state import OwnState
from shoal.run.report.notices import Notices
from shoal.run.view.progress import Farewell
from shoal.run.view.words import Weigh

__all__ = ["ParameterCheck"]

_LOOK_AGAIN_S = 0.1

_COMPARED = 16
"""At the end of a run a peer compares itself with this number of others: with those whose words weigh most."""


@dataclass(frozen=True, slots=True)
class _Ends:
    """The parameters that peers end a run with.

    Attributes:
        name: of their state.
        said: what each other peer has said, also one that has left; None: nothing of this state yet.
        here: the others at this state that have not left.
        give: those of them that give us their state: a client gives it to peers that it has dialed. A client takes
            none as long as it has not heard those that weigh more.
        lacking: the others that are to say it yet, and count.
        mended: those of them that hold something else, and are waited for until they are mended.
        checks: the descriptions, ours among them.
        verdict: what follows from these.
        first: the first descriptions of the same peers: some may have been mended since.
        at_first: what follows from those.
    """

    name: StateName
    said: Mapping[PeerID, bytes | None]
    here: frozenset[PeerID]
    give: frozenset[PeerID]
    lacking: frozenset[PeerID]
    mended: frozenset[PeerID]
    checks: Mapping[PeerID, Check]
    verdict: Verdict
    first: Mapping[PeerID, Check]
    at_first: Verdict


class ParameterCheck:
    """Checks the parameters of one peer. Loop only.

    Args:
        core: this peer.
        own: its state.
        notices: tell the user of differences.
        every: how many epochs there are between two checks; 0 for none. Where parameters are averaged, they differ
            between two averages: there is a check at the end of the run only.
        is_last: whether the run ends with the parameters that are here: then there is a check, too.
        trainer_stands: whether the trainer is at its step.
        described: told when a description is here.
        tell_all: tells the others where we stand; returns once they know it.
    """

    def __init__(
        self,
        core: PeerCore,
        own: OwnState,
        notices: Notices,
        *,
        every: int,
        is_last: Callable[[], bool],
        trainer_stands: Callable[[], bool],
        described: Callable[[], None],
        tell_all: Callable[[], Awaitable[None]],
    ) -> None:
        self._core, self._own, self._notices, self._every = core, own, notices, every
        self._is_last, self._trainer_stands, self._tell = is_last, trainer_stands, described
        self._tell_all = tell_all
        self._awaited: StateName | None = None  # a round at this state waits for the description
        self._checks = Checks()
        self._described = self._known = 0  # changes up to this look are in what we said of a state, and in its verdict
        self._looking: tuple[StateName, asyncio.Task[Check | None]] | None = None
        self._ends: _Ends | None = None
        self._concluded: Mapping[PeerID, Check] = {}  # at the end, from these
        self._first: dict[tuple[StateName, PeerID], Check] = {}  # what each said first of the state at the end
        self._told = set[PeerID]()  # at the end: those that differ, or did
        self._mended: StateName | None = None  # the state that was to be taken over at the end

    @property
    def last(self) -> tuple[int, bytes, bytes] | None:
        """The conclusion of the last check: see `Checks.last`."""
        return self._checks.last

    def begin(self) -> None:
        """Look at the parameters of our state, if it is time to, beside the trainer's next batches."""
        name, averages = self._own.name, self._own.training.averages_parameters
        if self._looking is not None and self._looking[0] == name:
            return
        if (is_due(name.epoch, self._every) and not averages) or (self._every > 0 and self._is_last()):
            self._looking = name, asyncio.get_running_loop().create_task(self._look(name))
            self._looking[1].add_done_callback(lambda _: self._tell())

    @property
    def said(self) -> bytes | None:
        """What this peer says of the parameters that it ends with: see `Progress.parameters`."""
        if not self._every:
            return b""
        if (task := self._done) is None:
            return None
        return b"" if (check := task.result()) is None else encode(check)

    @property
    def _done(self) -> asyncio.Task[Check | None] | None:
        """The look at the parameters of our state, if it is over."""
        if self._looking is None or self._looking[0] != self._own.name:
            return None
        task = self._looking[1]
        return task if task.done() and not task.cancelled() else None

    async def of(self, name: StateName) -> Check | None:
        """The description of our parameters at this state, if it is time for a check."""
        self.begin()
        self._awaited = name
        return await self._looking[1] if self._looking is not None and self._looking[0] == name else None

    async def _look(self, name: StateName) -> Check | None:
        training = self._own.training
        weights = training.weights
        evaluations = weights.evaluations
        if weights.are_in_eval_mode:
            return None
        describe = partial(
            check_of,
            on_host=training.stepper.on_host,
            numerics=training.stepper.numerics,
            at_rest=self._is_last(),
            holds=lambda: not weights.are_changed,
        )
        run, check = self._core.env.executor.run, None
        while check is None:
            while self._is_unsettled(name):
                sometimes("parameters are not those of the state when they are to be checked")
                if name == self._awaited or self._own.name != name:
                    return None
                await asyncio.sleep(_LOOK_AGAIN_S)
            try:
                check = await run(describe, training.optimizer, training.parameters, name.digest)
            except Exception as error:  # noqa: BLE001 (no memory for it: the others compare theirs)
                self._notices.skipped("the check of this peer's parameters was", error)
                return None
            if self._own.name != name:
                return None
        async with self._own.hold() as holds:  # a step renames under it: so they were those of this state all the time
            if not holds or self._own.name != name or weights.evaluations != evaluations:
                return None
            self._described = weights.changes.looks
            changed = weights.changes.since(self._known)
            return msgspec.structs.replace(check, changed=changed, followed=self._checks.differed)

    def _is_unsettled(self, name: StateName) -> bool:
        """Whether the parameters are not what the state of this name stands for, or may not be."""
        weights = self._own.training.weights
        if not self._is_last():
            return weights.are_changed or not weights.changes.are_over(name.epoch)
        if weights.are_changed and self._trainer_stands():
            weights.look(name.epoch, each_steps=False)  # no batch comes any more: this is what the run ends with
        return weights.are_changed

    def unlike(
        self, others: Mapping[PeerID, Progress], left: Mapping[PeerID, Farewell], weigh: Weigh, *, client: bool
    ) -> frozenset[PeerID]:
        """The others at the last state of a run that may hold other parameters; all of them until ours are described.

        Args:
            others: the last words of the others.
            left: those of the peers that have left.
            weigh: their words.
            client: this peer waits for those alone that can be dialed, and where they differ for the words of all.
        """
        name, me = self._own.name, self._core.peer_id
        here = frozenset(peer for peer, word in others.items() if word.digest == name.digest)
        said = {peer: word.parameters for peer, word in left.items() if word.digest == name.digest}
        if not (here or said) or not self._every:
            return frozenset()
        self.begin()
        if (task := self._done) is None:
            return here
        if (own := task.result()) is None:
            return frozenset()
        said.update((peer, word.parameters if peer in here else None) for peer, word in others.items())
        ends = self._ends
        if ends is None or (ends.name, ends.said, ends.here) != (name, said, here):
            weights = weigh([me, *said])
            heavy = sorted((peer for peer in said if weights.get(peer)), key=lambda peer: (-weights[peer], peer))
            checks = {peer: _read(said[peer]) for peer in heavy[:_COMPARED]}
            lacking = {peer for peer in checks if peer in others and said[peer] is None}
            known = {me: own, **{peer: check for peer, check in checks.items() if check is not None}}
            first = {peer: self._first.setdefault((name, peer), check) for peer, check in known.items()}
            verdict, at_first = judge(known, weigh, name.digest), judge(first, weigh, name.digest)
            if verdict is None or at_first is None:
                return frozenset()
            dialed = {peer for peer, word in others.items() if word.contact.addresses}
            if client and not verdict.others:  # where some differ, other clients may know which of them are right
                lacking &= dialed
            give = here & (dialed if client else {*filter(self._core.endpoint.connected, here), *dialed})
            if client and sum(map(weights.__getitem__, lacking)) > sum(weights[peer] for peer in verdict.holders):
                give = frozenset()  # the peer between them may keep back what most of them have said
            mended = here & (verdict.others.keys() & dialed if client else verdict.others.keys())
            ends = self._ends = _Ends(
                name, said, here, give, frozenset(lacking), mended, known, verdict, first, at_first
            )
        return here if me in ends.verdict.others and self._mends(ends) else ends.lacking | ends.mended

    @property
    def lacking(self) -> frozenset[PeerID]:
        """The peers that are to say yet what they end the run with, and count."""
        ends = self._ends
        return ends.lacking if ends is not None and ends.name == self._own.name else frozenset()

    def _mends(self, ends: _Ends) -> bool:
        """Whether ours are to be mended: once, while somebody gives what they should be."""
        return self._mended != ends.name and not ends.give.isdisjoint(ends.verdict.others[self._core.peer_id])

    async def difference_at_end(self, *, late: bool) -> bool:
        """As `difference`, from what the peers at the last state of a run have said: all of them, unless it is late."""
        ends = self._ends
        if ends is None or ends.name != self._own.name or ends.checks == self._concluded:
            return False
        if not self._is_last() or (ends.lacking and not late):
            return False
        self._concluded = ends.checks
        me = self._core.peer_id
        self._checks.concluded(ends.name.epoch, ends.verdict, ends.checks, me)
        mends = me in ends.verdict.others and self._mends(ends)
        if mends:
            self._mended = ends.name
        wrong, at_first = ends.verdict.others, ends.at_first
        if me not in at_first.others and not at_first.others.keys() <= self._told | wrong.keys():  # they were mended
            self._notices.differ(ends.name.epoch, at_first, ends.first, again=False)
        self._told |= {*at_first.others, *wrong}
        return await self._conclude(ends.name, ends.checks, ends.verdict, mends=mends, at_end=True)

    async def difference(self, result: StepResult, name: StateName, weigh: Weigh) -> bool:
        """Whether our parameters differ, and are to be mended: see `OwnState.mend_from`.

        Then our state has been renamed: it is worse than that of the others.
        """
        me, nbytes = self._core.peer_id, said_bytes(result.outcome.members)
        # Made of the values of all: nobody has known it before, as it may have known the id of the round.
        chance = hashlib.sha256(encode(result.outcome.commit)).digest()

        def judged() -> tuple[Mapping[PeerID, Check], Verdict | None]:
            checks = checks_of(result.gathered)
            return checks, judge(checks, weigh, chance)

        checks, verdict = await self._core.env.read(nbytes, judged)
        if verdict is None:
            return False
        mends = self._checks.concluded(name.epoch, verdict, checks, me)
        return await self._conclude(name, checks, verdict, mends=mends)

    async def _conclude(
        self, name: StateName, checks: Mapping[PeerID, Check], verdict: Verdict, *, mends: bool, at_end: bool = False
    ) -> bool:
        """Tell what follows, and name our state anew if it is to be mended: see `difference`."""
        me = self._core.peer_id
        if me in checks:
            self._known = self._described
        if self._checks.count_difference(verdict, always=at_end) and me not in verdict.others:
            self._notices.differ(name.epoch, verdict, checks, again=self._checks.others_again)
        if apart := [peer for peer in checks if peer not in verdict.others and checks[peer].digest != verdict.digest]:
            self._notices.compute_otherwise(name.epoch, apart, verdict, checks, me)
        if mends or (at_end and me in verdict.others):
            self._notices.differs(name.epoch, verdict, me, checks, again=self._checks.again, stays=not mends)
        if not mends:
            return False
        if at_end:  # their users are to know it, too: what is said next is of another state
            await self._tell_all()
        async with self._own.hold() as holds:
            if not holds or self._own.name != name:
                return False  # the next check finds it, too
            self._own.differs(verdict.others[me])
            self._own.training.discard()
        return True

    async def close(self) -> None:
        """Look no more."""
        if self._looking is not None:
            self._looking[1].cancel()
            await asyncio.gather(self._looking[1], return_exceptions=True)


def _read(said: bytes | None) -> Check | None:
    """A peer's description of its parameters; None if it has said none, or nothing of use."""
    try:
        return decode(said, Check) if said else None
    except msgspec.MsgspecError:
        return None
