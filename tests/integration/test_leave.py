"""SIGTERM in real processes: the program leaves in order, ends with its code, and nobody waits for it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shoal
from shoal.errors import ConfigError
from shoal.events import Event, GroupFormed, PeerLost, RoundFinished
from tests.integration.leaver import NUMEL
from tests.integration.workers import Talk


class Leaver(Talk):
    """One such program."""

    def __init__(self, how: str, meeting: shoal.DHT) -> None:
        address = str(meeting.get_visible_maddrs()[0])
        super().__init__([sys.executable, "-m", "tests.integration.leaver", how, address])

    def expect(self, kind: str) -> Any:
        """What it says of this kind next."""
        while (said := json.loads(self.line()))[0] != kind:
            pass
        return said[1]


class Heard:
    """The events of a peer, and waiting for one."""

    def __init__(self, dht: shoal.DHT) -> None:
        self.events: list[Event] = []
        self._news = threading.Condition()
        dht.events.subscribe(self._add)

    def _add(self, event: Event) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for(self, kind: type[Event]) -> Event:
        """The first event of this kind."""
        with self._news:
            assert self._news.wait_for(lambda: any(isinstance(event, kind) for event in self.events), 60)
            return next(event for event in self.events if isinstance(event, kind))


@contextlib.contextmanager
def held_in_the_round(averager: shoal.DecentralizedAverager) -> Iterator[None]:
    """A group is formed, and then this member's tensors are held: it gives no values, and the round does not end."""
    holding = contextlib.ExitStack()

    def hold(event: Event) -> None:
        if isinstance(event, GroupFormed):
            holding.enter_context(averager.get_tensors())

    remove = averager.dht.events.subscribe(hold)
    try:
        yield
    finally:
        remove()
        holding.close()


@pytest.fixture
def meeting() -> Iterator[shoal.DHT]:
    """The peer that stays."""
    with shoal.DHT(start=True) as dht:
        yield dht


@pytest.mark.parametrize("how", ["search", "compute", "again"])
def test_sigterm_leaves_at_once_and_ends_with_143(meeting: shoal.DHT, how: str) -> None:
    """In the middle of a search, and while the main thread computes: the other peer is told that it left."""
    heard = Heard(meeting)
    with Leaver(how, meeting) as leaver:
        leaver.expect("ready")
        leaver.signal(signal.SIGTERM)
        lost = heard.wait_for(PeerLost)
        assert isinstance(lost, PeerLost)
        assert lost.reason == "the peer left"
        assert leaver.expect("restored") is True
        assert leaver.wait() == 143, leaver.errors()
        assert "Traceback" not in leaver.errors()


def test_a_main_thread_that_sleeps_through_the_signal_is_woken(meeting: shoal.DHT) -> None:
    """Python runs a handler when the main thread executes Python again: here that would be a minute later."""
    heard = Heard(meeting)
    with Leaver("asleep", meeting) as leaver:
        leaver.expect("ready")
        leaver.write("")
        assert isinstance(heard.wait_for(PeerLost), PeerLost)
        assert leaver.expect("restored") is True
        assert leaver.wait() == 143, leaver.errors()


def test_the_signal_of_a_forked_child_is_its_own(meeting: shoal.DHT) -> None:
    """As when a DataLoader ends its workers: the child dies of it, and the program goes on."""
    with Leaver("fork", meeting) as leaver:
        assert leaver.expect("child") == signal.SIGTERM
        assert leaver.expect("requested") is False
        assert leaver.expect("end") == [2.0, False]
        assert leaver.wait() == 0, leaver.errors()


@pytest.mark.long
def test_a_round_in_progress_is_finished_and_the_next_one_is_not_begun(meeting: shoal.DHT) -> None:
    """SIGTERM as the group is formed: both hold the average, then the program ends, and the other goes on alone."""
    heard = Heard(meeting)
    tensor = torch.zeros(NUMEL)
    with (
        shoal.DecentralizedAverager([tensor], meeting, start=True, prefix="leave", part_size_bytes=1 << 16) as averager,
        Leaver("round", meeting) as leaver,
    ):
        leaver.expect("ready")
        step = averager.step(timeout=60, wait=False)
        leaver.expect("GroupFormed")
        leaver.signal(signal.SIGTERM)
        leaver.expect("RoundFinished")
        step.result(60)
        assert float(tensor.min()) == float(tensor.max()) == 1.0
        assert leaver.wait() == 143, leaver.errors()
        heard.wait_for(PeerLost)
        others = [event for event in heard.events if isinstance(event, RoundFinished) and event.left_out]
        assert others == []
        # The next group does not wait for it: nobody else is there, so there is none.
        with pytest.raises(shoal.RoundFailed):
            averager.step(timeout=5, allow_retries=False)


def test_a_round_that_does_not_end_within_the_grace_is_given_up(meeting: shoal.DHT) -> None:
    """The other member gives no values: after `grace_s` the program leaves all the same, in order."""
    heard = Heard(meeting)
    with (
        shoal.DecentralizedAverager([torch.zeros(100)], meeting, start=True, prefix="leave") as averager,
        Leaver("impatient", meeting) as leaver,
    ):
        leaver.expect("ready")
        with held_in_the_round(averager):
            step = averager.step(timeout=60, wait=False, allow_retries=False)
            leaver.expect("GroupFormed")
            leaver.signal(signal.SIGTERM)
            assert leaver.expect("restored") is True
            assert leaver.wait() == 143, leaver.errors()
            lost = heard.wait_for(PeerLost)
            assert isinstance(lost, PeerLost)
            assert lost.reason == "the peer left"
        assert isinstance(step.exception(60), shoal.RoundFailed)


@pytest.mark.long
def test_a_trainer_that_leaves_holds_nobody_up(meeting: shoal.DHT) -> None:
    """Two train one run; one is told to end: it ends with 143, and the other goes on, alone in the end."""
    with Leaver("train", meeting) as one, Leaver("train", meeting) as other:
        for leaver in (one, other):
            while leaver.expect("epoch") < 3:
                pass
        one.signal(signal.SIGTERM)
        assert one.expect("restored") is True
        assert one.wait() == 143, one.errors()
        assert "Traceback" not in one.errors()
        reached = other.expect("epoch")
        while other.expect("epoch") < reached + 20:
            pass
        other.signal(signal.SIGTERM)
        assert other.wait() == 143, other.errors()


def test_a_program_may_end_itself(meeting: shoal.DHT) -> None:
    """exit_code=None: the step ends with ClosedError, the network is left, and the program goes on to its own end."""
    with Leaver("polite", meeting) as leaver:
        leaver.expect("ready")
        leaver.signal(signal.SIGTERM)
        assert leaver.expect("step") == "ClosedError"
        leaver.expect("done")
        assert leaver.expect("end") == [2.0, True]
        assert leaver.wait() == 0, leaver.errors()


def test_the_second_sigterm_ends_at_once(meeting: shoal.DHT) -> None:
    """Here in the middle of a round that cannot end: the other member's tensors are held, so it gives no values."""
    with (
        shoal.DecentralizedAverager([torch.zeros(NUMEL)], meeting, start=True, prefix="leave") as averager,
        Leaver("round", meeting) as leaver,
    ):
        leaver.expect("ready")
        with held_in_the_round(averager):
            step = averager.step(timeout=60, wait=False)
            leaver.expect("GroupFormed")
            leaver.signal(signal.SIGTERM)
            leaver.expect("requested")
            leaver.signal(signal.SIGTERM)
            assert leaver.wait() == -signal.SIGTERM  # 143 would be the orderly end
        step.cancel()


def test_after_the_block_the_signal_is_what_it_was(meeting: shoal.DHT) -> None:
    """The default: the process is killed by it."""
    with Leaver("outside", meeting) as leaver:
        assert leaver.expect("restored") is True
        leaver.expect("ready")
        leaver.signal(signal.SIGTERM)
        assert leaver.wait() == -signal.SIGTERM


def test_another_thread_is_refused(meeting: shoal.DHT) -> None:
    """Python handles signals in the main thread only: the error says so."""
    with Leaver("nowhere", meeting) as leaver:
        assert "main thread" in leaver.expect("refused")


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [((), {}, "shoal.DHT"), (("x",), {}, "shoal.DHT"), ((None,), {"grace_s": -1}, "shoal.DHT")],
)
def test_wrong_arguments_are_named(arguments: Any, options: Any, named: str) -> None:
    """At the call, not at the signal."""
    with pytest.raises(ConfigError, match=named):
        shoal.leave_on_sigterm(*arguments, **options)


def test_wrong_numbers_are_named(meeting: shoal.DHT) -> None:
    """Both of them."""
    with pytest.raises(ConfigError, match="grace_s"):
        shoal.leave_on_sigterm(meeting, grace_s=-1)
    with pytest.raises(ConfigError, match="exit_code"):
        shoal.leave_on_sigterm(meeting, exit_code="143")  # type: ignore[arg-type]


DROPS = """
import asyncio, contextlib, sys
import shoal

def main():
    dht = shoal.DHT([sys.argv[1]], start=True)

    async def takes_long():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 0.5)

    dht.at_shutdown(takes_long)
    print("joined", flush=True)
    sys.stdin.readline()

main()
"""


def test_a_program_that_lets_its_dht_go_and_ends_left_without_a_word() -> None:
    """`main()` returns, and its DHT is collected: nobody waited until it had left."""
    with shoal.DHT(start=True) as meeting:
        heard = Heard(meeting)
        with Talk([sys.executable, "-c", DROPS, str(meeting.invite())]) as talk:
            assert talk.line() == "joined\n"
            talk.write("")
            assert (talk.rest(), talk.wait(), talk.errors()) == ([], 0, "")
        event = heard.wait_for(PeerLost)
        assert isinstance(event, PeerLost)
        assert event.reason == "the peer left"
