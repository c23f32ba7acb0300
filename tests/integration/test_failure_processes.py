"""Real processes: members are killed, stopped, slow or turn bad, in any role, at any moment; the others know and agree.

The moments come from inside of the victims (see `fault_script`). The same processes average undisturbed first: the
formulas of `docs/why/protocol.md`, section 8, say from that how soon the others must know. Where many processes share
few cores, computing takes several times as long from one round to the next: the time of the undisturbed round is taken
`UNEVEN` times. Limits of silence are timers, and need no such margin. Of 100 cases on a machine with three times as
many processes at work as cores, 99 kept to the formulas without it.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import shoal
from tests.corruption import KINDS
from tests.integration.fault_script import MEMBERS, MOMENTS, ROLES, SETTINGS, SLOW_BYTES_S, Case
from tests.integration.workers import LONG_S, Worker, Workers, open_workers
from tests.sim.fault_kit import TimeLimits

SHAPES = [[1_000_000], [3, 7]]
SOON_S = 60.0
"""Far below the 100 s that the step may take: no word for so long is a hang."""

UNEVEN = 4.0
LIMITS = TimeLimits(SETTINGS)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Processes for this file."""
    with open_workers("tests.integration.fault_script") as found:
        yield found


def cases_of(number: int) -> list[Case]:
    """What happens under this number: one fault, in every fourth two at once. All roles and moments come up."""
    rng = random.Random(f"case/{number}")
    if number % 4 < 3:
        return [_draw(rng, rng.choice(ROLES), MOMENTS)]
    # A group of three could not be the one that is searched for: the second would never strike.
    return [_draw(rng, role, MOMENTS[1:]) for role in rng.sample(ROLES, 2)]


def _draw(rng: random.Random, role: str, moments: Sequence[str]) -> Case:
    moment = rng.choice(moments)
    if role == "sender" and moment == "reducing":  # it reduces nothing
        moment = "sending"
    after = rng.randrange(20) if moment in ("sending", "reducing") else 0
    return Case(role, moment, rng.choice(("kill", "kill", "stop", "slow", rng.choice(KINDS))), after)


def limit_s(case: Case, normal_s: float) -> float:
    """How soon the others know after this, where a round takes `normal_s`."""
    if case.what == "kill":
        return LIMITS.after_kill_s(normal_s)
    # In a search the others wait for its answers too; then the round begins.
    search_s = 4 * SETTINGS.request_timeout_s if case.moment == "searching" else 0.0
    if case.what == "slow":
        return search_s + LIMITS.after_slowing_s(normal_s) + LIMITS.words_s(SLOW_BYTES_S)
    return search_s + LIMITS.after_silence_s(normal_s)


class Played(NamedTuple):
    """How it went.

    Attributes:
        cases: what happened, as far as it did: a moment may not come after an earlier fault.
        normal_s: what the round before took, in which nothing happened; with the search where that is disturbed.
        known_s: from the last fault until all others knew.
        good: how many members succeeded in the end.
        reasons: of those that failed.
    """

    cases: list[Case]
    normal_s: float
    known_s: float
    good: int
    reasons: list[str]

    def limit_s(self, uneven: float = 1.0) -> float:
        """The others know within this. Several faults add up: the formulas are for one."""
        return sum(limit_s(case, uneven * self.normal_s) for case in self.cases)

    def __str__(self) -> str:
        cases = " and ".join(f"{case.role} {case.moment}+{case.after} {case.what}" for case in self.cases)
        return (
            f"{cases}: known after {self.known_s:.2f} s, a round takes {self.normal_s:.2f}, the limit is "
            f"{self.limit_s():.2f}; {self.good} succeeded; {self.reasons}"
        )


class Trial:
    """Processes that average, and what they say."""

    def __init__(self, meeting: shoal.DHT, workers: list[Worker]) -> None:
        addresses = [str(address) for address in meeting.get_visible_maddrs()]
        for rank, worker in enumerate(workers):
            worker.start("fail", initial_peers=addresses, rank=rank, shapes=SHAPES)
        ids = [worker.expect("joined")[0] for worker in workers]
        self.workers, self.sender = workers, ids[-1]
        self.said: dict[int, Any] = {}
        self.struck: dict[int, tuple[Case, float]] = {}

    def play(self, cases: Sequence[Case]) -> None:
        """One round, until all members have said how their step ended; but for those that were killed."""
        self.said.clear()
        for worker in self.workers:
            worker.tell({"cases": cases, "sender": self.sender})
        for rank, worker in enumerate(self.workers):
            kind, value = json.loads(worker.line(SOON_S))
            while kind not in ("struck", "round", "failed"):
                kind, value = json.loads(worker.line(SOON_S))
            assert kind != "failed", value
            if kind == "struck":
                role, at = value
                self.struck[rank] = next(case for case in cases if case.role == role), at
            else:
                self.said[rank] = value

    def seconds(self, since: str) -> float:
        """From when the first member had the group (`formed`), or the last one called (`called`), until all knew."""
        began = [found[since] for found in self.said.values()]
        return float(self.known - (max(began) if since == "called" else min(began)))

    @property
    def known(self) -> float:
        """When all who could say it knew the outcome."""
        return float(max(found["known"] for found in self.said.values()))

    def wait_for_victims(self) -> None:
        """The others know: those that live may go on, and say how it ended for them."""
        for rank, (case, _) in self.struck.items():
            if case.what == "kill":
                assert self.workers[rank].wait() == -signal.SIGKILL
            else:
                self.workers[rank].signal(signal.SIGCONT)
                self.said[rank] = self.workers[rank].expect("round", LONG_S)

    def check(self) -> None:
        """Peers that succeeded in a round hold the same bits; those that failed are untouched, and say why."""
        hashes: dict[str, set[str]] = defaultdict(set)
        for found in self.said.values():
            if found["ok"]:
                hashes[found["round"]].add(found["hash"])
            else:
                assert found["untouched"], f"touched by a round that failed: {self.said}"
                assert found["reason"], "failed without a reason"
        assert all(len(different) == 1 for different in hashes.values()), self.said

    def go_on(self, *, over: bool = False) -> None:
        """All have ended their steps: the next round, or the end."""
        alive = [worker for rank, worker in enumerate(self.workers) if rank in self.said]
        for worker in alive:
            worker.tell("go on")
            if over:
                worker.tell(None)
        for worker in alive if over else ():
            worker.finish()


def play(workers: Workers, cases: Sequence[Case]) -> Played:
    """A round in which nothing happens, and one in which these things do."""
    with shoal.DHT(start=True) as meeting:
        trial = Trial(meeting, workers.take(MEMBERS))
        trial.play([])
        searching = any(case.moment == "searching" for case in cases)
        normal_s = trial.seconds("called" if searching else "formed")
        assert all(found["ok"] for found in trial.said.values()), trial.said
        trial.go_on()
        trial.play(cases)
        assert trial.struck, f"{cases}: the moment did not come"
        known_s = trial.known - max(at for _, at in trial.struck.values())
        trial.wait_for_victims()
        trial.go_on(over=True)
    trial.check()
    return Played(
        cases=[case for case, _ in trial.struck.values()],
        normal_s=normal_s,
        known_s=known_s,
        good=sum(found["ok"] for found in trial.said.values()),
        reasons=sorted({found["reason"] for found in trial.said.values() if not found["ok"]}),
    )


def judge(played: Played) -> None:
    """The others knew in time."""
    limit_s = played.limit_s(UNEVEN)
    assert played.known_s <= limit_s, f"{played}; with the margin {limit_s:.2f}"


@pytest.mark.parametrize(
    "cases",
    [
        [Case("coordinator", "before commit", "kill", 0)],
        [Case("reducer", "reducing", "kill", 5)],
        [Case("sender", "sending", "garbage", 3)],
        pytest.param([Case("reducer", "sending", "slow", 2)], marks=pytest.mark.long),
        [Case("reducer", "reducing", "kill", 5), Case("sender", "sending", "stop", 5)],
    ],
    ids=lambda cases: " and ".join(f"{case.role} {case.what}" for case in cases),
)
def test_the_others_know_and_agree(workers: Workers, cases: list[Case]) -> None:
    """The worst moment of the coordinator, a reducer in the middle, one that turns bad, a slow one, and two at once."""
    played = play(workers, cases)
    print(played)
    judge(played)


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_the_others_know_and_agree_whatever_happens(
    workers: Workers, soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """Killed, stopped, slow or bad; one or two; in any role; at any moment."""
    found: dict[str, list[Played]] = defaultdict(list)
    for number in numbers(soak(4, 100)):
        try:
            played = play(workers, cases_of(number))
            print(number, played, flush=True)
            judge(played)
        except BaseException as error:
            error.add_note(f"again: python -m pytest -m long --plan {number} tests/integration/{Path(__file__).name}")
            raise
        found[" and ".join(sorted(kind_of(case) for case in played.cases))].append(played)
    for what, plays in sorted(found.items()):
        known, longest = [each.known_s for each in plays], max(plays, key=lambda each: each.known_s)
        print(
            f"{what}: {len(plays)} times, known after {statistics.median(known):.2f} s (median), at most "
            f"{longest.known_s:.2f}, where the limit is {longest.limit_s():.2f}; "
            f"{sum(each.known_s <= each.limit_s() for each in plays)} times within it"
        )


def kind_of(case: Case) -> str:
    """Which line of the summary it belongs to."""
    return case.what if case.what in ("kill", "stop", "slow") else "bad"
