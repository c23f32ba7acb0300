"""Real processes: a member is killed, stopped or turns bad, in any role, at any moment; the others know, and agree.

The moments come from inside of the victim (see `fault_script`). How long the others needed is printed, not judged: what
is judged is that nobody waits for the end of a round's time.
"""

from __future__ import annotations

import json
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import shoal
from tests.corruption import KINDS
from tests.integration.fault_script import MEMBERS, MOMENTS, ROLES, Case
from tests.integration.workers import LONG_S, Worker, Workers, open_workers

SHAPES = [[1_000_000], [3, 7]]
SOON_S = 45.0
"""Far below the 100 s that the step may take: no time limit but those for silence can have ended it."""

NOTHING = Case("decider", "never", "kill", 0)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """Processes for this file."""
    with open_workers("tests.integration.fault_script") as found:
        yield found


def case_of(number: int) -> Case:
    """The case of this number: all roles and moments come up."""
    rng = random.Random(f"case/{number}")
    role, moment = rng.choice(ROLES), rng.choice(MOMENTS)
    if role == "sender" and moment == "reducing":  # it reduces nothing
        moment = "sending"
    after = rng.randrange(20) if moment in ("sending", "reducing") else 0
    return Case(role, moment, rng.choice(("kill", "kill", "stop", rng.choice(KINDS))), after)


class Trial:
    """One case, played by processes."""

    def __init__(self, meeting: shoal.DHT, workers: list[Worker]) -> None:
        addresses = [str(address) for address in meeting.get_visible_maddrs()]
        for rank, worker in enumerate(workers):
            worker.start("fail", initial_peers=addresses, rank=rank, shapes=SHAPES)
        for worker in workers:
            worker.expect("joined")
        self.workers = workers
        self.said: dict[int, Any] = {}
        self.struck_s: float | None = None
        self.victim: int | None = None

    def play(self, case: Case) -> None:
        """Until all members have said how their step ended; but for one that was killed."""
        for worker in self.workers:
            worker.tell(case)
        for rank, worker in enumerate(self.workers):
            kind, value = "", None
            while kind not in ("struck", "round", "failed"):
                kind, value = json.loads(worker.line(SOON_S))
            assert kind != "failed", value
            if kind == "struck":
                self.struck_s, self.victim = value, rank
            else:
                self.said[rank] = value
        self.known_s = max(found["at"] for found in self.said.values())
        if self.victim is not None and case.what == "kill":
            assert self.workers[self.victim].wait() == -signal.SIGKILL
        elif self.victim is not None:
            self.workers[self.victim].signal(signal.SIGCONT)
            self.said[self.victim] = self.workers[self.victim].expect("round", LONG_S)

    def check(self, case: Case) -> None:
        """Who succeeded in one round holds the same bits; who failed is untouched, and says why."""
        hashes: dict[str, set[str]] = defaultdict(set)
        for found in self.said.values():
            if found["ok"]:
                hashes[found["round"]].add(found["hash"])
            else:
                assert found["untouched"], f"{case}: touched by a round that failed: {self.said}"
                assert found["reason"], f"{case}: failed without a reason"
        assert all(len(different) == 1 for different in hashes.values()), f"{case}: {self.said}"

    def end(self) -> None:
        """Let them go."""
        alive = [worker for rank, worker in enumerate(self.workers) if rank in self.said]
        for worker in alive:
            worker.tell("go on")
            worker.tell(None)
        for worker in alive:
            worker.finish()


def play(workers: Workers, case: Case) -> str:
    """Play one case; returns how it went, in a line."""
    with shoal.DHT(start=True) as meeting:
        trial = Trial(meeting, workers.take(MEMBERS))
        trial.play(case)
        trial.end()
    trial.check(case)
    good = sum(found["ok"] for found in trial.said.values())
    reasons = sorted({found["reason"] for found in trial.said.values() if not found["ok"]})
    if case.moment == "never":
        return f"undisturbed: {good} succeeded"
    assert trial.struck_s is not None, f"{case}: the moment did not come"
    return f"{case}: known after {trial.known_s - trial.struck_s:.2f} s; {good} succeeded; {reasons}"


@pytest.mark.parametrize(
    "case",
    [
        Case("decider", "before commit", "kill", 0),
        Case("reducer", "reducing", "kill", 5),
        Case("sender", "sending", "garbage", 3),
    ],
    ids=str,
)
def test_the_others_know_and_agree(workers: Workers, case: Case) -> None:
    """The worst moment of the decider, a reducer in the middle, and a sender that turns bad."""
    print(play(workers, case))


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
def test_the_others_know_and_agree_whatever_happens(
    workers: Workers, soak: Callable[[int, int], int], numbers: Callable[[int], Sequence[int]]
) -> None:
    """Killed, stopped or bad; in any role; at any moment."""
    print(play(workers, NOTHING))
    for number in numbers(soak(20, 100)):
        try:
            print(number, play(workers, case_of(number)), flush=True)
        except BaseException as error:
            error.add_note(f"again: python -m pytest -m long --plan {number} tests/integration/{Path(__file__).name}")
            raise
