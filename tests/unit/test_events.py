"""The bus: every subscriber, in order, whatever the others do."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import threading

import msgspec
import pytest

from shoal import events
from shoal.base.peer import PeerID
from shoal.events import Event, EventBus, PeerConnected, Warned

PEER = PeerID(b"e" * 32)


def test_events_reach_all_subscribers_in_order() -> None:
    """At once, in the order of subscription."""
    bus, heard = EventBus(), list[tuple[int, Event]]()
    for number in range(3):
        bus.subscribe(lambda event, number=number: heard.append((number, event)))  # type: ignore[misc]
    first, second = Warned(where="here", message="a"), PeerConnected(peer=PEER)
    bus.emit(first)
    bus.emit(second)
    assert heard == [(number, event) for event in (first, second) for number in range(3)]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00031, "0.31 ms"),
        (0.0032, "3.2 ms"),
        (0.04, "40 ms"),
        (0.25, "250 ms"),
        (1.5, "1.5 s"),
        (599.0, "599.0 s"),
        (600.0, "10 min"),
    ],
)
def test_a_duration_is_never_nothing(seconds: float, text: str) -> None:
    """Epochs of milliseconds took "0.0 s"."""
    assert events.duration(seconds) == text


def test_who_unsubscribes_hears_no_more() -> None:
    """Also twice, and from within a subscriber: the others still hear the event that is being told."""
    bus, heard = EventBus(), list[str]()

    def once(event: Event) -> None:
        heard.append("once")
        end_once()

    end_once = bus.subscribe(once)
    end_other = bus.subscribe(lambda event: heard.append("other"))
    for _ in range(2):
        bus.emit(Warned(where="", message=""))
    end_other()
    end_other()
    bus.emit(Warned(where="", message=""))
    assert heard == ["once", "other", "other"]


def test_a_subscriber_that_fails_is_logged_and_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the emitter nor the other subscribers notice."""
    bus, heard = EventBus(), list[Event]()

    def broken(event: Event) -> None:
        raise ValueError("no")

    bus.subscribe(broken)
    bus.subscribe(heard.append)
    with caplog.at_level(logging.ERROR, logger="shoal.events"):
        for _ in range(2):
            bus.emit(Warned(where="", message=""))
    assert len(heard) == 2
    assert [record.message for record in caplog.records] == ["a subscriber failed on Warned"] * 2


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()], ids=repr)
def test_a_subscriber_that_raises_what_ends_programs_ends_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """SystemExit in a subscriber ended shoal's loop: "the DHT was shut down"."""
    bus, heard = EventBus(), list[Event]()

    def ending(event: Event) -> None:
        raise error

    bus.subscribe(ending)
    bus.subscribe(heard.append)
    with caplog.at_level(logging.ERROR, logger="shoal.events"):
        bus.emit(Warned(where="", message=""))
    assert len(heard) == 1
    assert [record.message for record in caplog.records] == ["a subscriber failed on Warned"]


@pytest.mark.parametrize("error", [RuntimeError("no disk"), SystemExit(3)], ids=repr)
def test_an_error_in_a_handler_of_the_log_ended_training(
    error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error of a user's handler, and the loop was over. Subscribers hear the event, and stderr has the error."""
    bus, heard = events.EventBus(), list[Event]()
    bus.subscribe(heard.append)
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: (_ for _ in ()).throw(error)  # type: ignore[method-assign]
    logger = logging.getLogger("shoal.events")
    logger.addHandler(handler)
    try:
        bus.emit(Warned(where="here", message="a"))
    finally:
        logger.removeHandler(handler)
    assert [type(each) for each in heard] == [Warned]
    assert type(error).__name__ in capsys.readouterr().err


def test_an_interrupt_in_a_subscriber_is_the_main_threads(caplog: pytest.LogCaptureFixture) -> None:
    """There it is Ctrl+C, and goes on; in another thread it is handed to the main thread, and the others are told."""
    bus, heard = EventBus(), list[Event]()

    def interrupted(event: Event) -> None:
        raise KeyboardInterrupt

    bus.subscribe(interrupted)
    bus.subscribe(heard.append)
    with pytest.raises(KeyboardInterrupt):
        bus.emit(Warned(where="", message=""))
    assert not heard
    emitter, said = threading.Thread(target=bus.emit, args=(Warned(where="", message=""),)), threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: said.set())
    try:
        emitter.start()
        emitter.join(10.0)
        assert said.wait(10.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(heard) == 1


def test_a_warning_is_logged_once_and_other_events_are_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    """What is said again and again, with each step, is in the log once, until something else is said of that place."""
    bus = EventBus()
    with caplog.at_level(logging.WARNING, logger="shoal.events"):
        for message in ("no donor", "no donor", "no disk", "no donor"):
            bus.emit(Warned(where="state", message=message))
            bus.emit(PeerConnected(peer=PEER))
            bus.emit(Warned(where="elsewhere", message="as before"))
    assert [record.message for record in caplog.records] == [
        "state: no donor",
        "elsewhere: as before",
        "state: no disk",
        "state: no donor",
    ]


def test_the_log_at_info_has_a_line_for_what_a_user_cares_about(caplog: pytest.LogCaptureFixture) -> None:
    """Joined, connected, epoch, state, who is gone and why, the end; no bytes, and nothing that a terminal obeys."""
    bus, digest = EventBus(), bytes(range(32))
    with caplog.at_level(logging.INFO, logger="shoal.events"):
        bus.emit(events.Joined(peers=0, addresses=("127.0.0.1:4000",), only_here=True))
        bus.emit(events.Joined(peers=2, addresses=(), only_here=False))
        bus.emit(PeerConnected(peer=PEER))
        bus.emit(events.StateDownloaded(prefix="r", donors=(PEER,), bytes_received=3_200_000, duration_s=1.25))
        bus.emit(events.GroupFormed(prefix="r", round_id=digest, peers=(PEER,), coordinator=PEER, waited_s=0.1))
        bus.emit(events.EpochAdvanced(run_id="r", epoch=5, samples=1024, peers=3, digest=digest))
        bus.emit(events.PeerLost(peer=PEER, reason="silent\x1b[2J"))
        bus.emit(events.RoundAborted(prefix="r", round_id=None, reason="no group", peers=(PEER,)))
        bus.emit(events.RunEnded(run_id="r", epoch=9))
    name = PEER.short()
    remedy = "host_maddrs='/ip4/0.0.0.0/tcp/PORT' lets others in, if it has a network"
    assert [record.message for record in caplog.records] == [
        f"began a network; others reach this peer at 127.0.0.1:4000: only from this machine; {remedy}",
        "joined the network, 2 other nodes known; this peer only dials",
        f"connected with {name}",
        "the state of 'r' was downloaded from 1 peer: 3.2 MB in 1.2 s",
        "run 'r': epoch 5, 1024 samples of 3 peers",
        f"{name} is gone: silent?[2J",
        f"a round of 'r' failed, nothing was changed: no group ({name})",
        "run 'r' has ended, with epoch 9",
    ]


def test_the_log_for_debugging_shows_names_in_place_of_bytes(caplog: pytest.LogCaptureFixture) -> None:
    """A line of name=value for what has no words of its own."""
    bus = EventBus()
    with caplog.at_level(logging.DEBUG, logger="shoal.events"):
        bus.emit(events.GroupFormed(prefix="r", round_id=bytes(16), peers=(PEER,), coordinator=PEER, waited_s=0.5))
    name = PEER.short()
    (record,) = caplog.records
    assert record.message == f"GroupFormed prefix=r round_id=00000000 peers=[{name}] coordinator={name} waited_s=0.5"


def test_every_event_is_named_and_frozen() -> None:
    """What is exported is what there is, and none can be changed by who hears it first."""
    kinds = {name: kind for name, kind in vars(events).items() if isinstance(kind, type) and issubclass(kind, Event)}
    assert set(kinds) == set(events.__all__) - {"EventBus", "duration", "print_log"}
    assert all(kind.__struct_config__.frozen for kind in kinds.values())
    with pytest.raises(AttributeError):
        Warned(where="", message="").where = "x"  # type: ignore[misc]
    assert msgspec.structs.asdict(PeerConnected(peer=PEER)) == {"peer": PEER}


def test_verbose_shows_the_log_where_the_program_has_not_said_where_it_goes() -> None:
    """Once, also if it is asked for twice; a program that logs keeps its own handlers and level."""
    code = (
        "from shoal.events import *; print_log(); print_log(); bus = EventBus();"
        "bus.emit(RunEnded(run_id='r', epoch=9)); bus.emit(StateServed(prefix='r', peer=__import__('shoal').PeerID("
        "bytes(32)), bytes_sent=1000000))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert [line[9:] for line in done.stderr.splitlines()] == [
        "run 'r' has ended, with epoch 9",
        "aaaaaaaa took 1.0 MB of the state of 'r'",
    ]


def test_the_log_names_a_fragment_as_one() -> None:
    """A fragment of a model is merged in a run of its own, and was called "run 'home/3'"."""
    advanced = events.EpochAdvanced(run_id="home/3", epoch=1, samples=16, peers=2, digest=b"", fragment=3)
    assert advanced.line() == "run 'home', fragment 3: epoch 1, 16 samples of 2 peers"
    ended = events.RunEnded(run_id="home/3", epoch=1, fragment=3)
    assert ended.line() == "run 'home', fragment 3 has ended, with epoch 1"
    assert events.RunEnded(run_id="home/3", epoch=1).line() == "run 'home/3' has ended, with epoch 1"


def test_warnings_about_one_peer_after_another_are_bundled(caplog: pytest.LogCaptureFixture) -> None:
    """Keys are free: each fresh one brought a line, about one for each second, without a limit."""
    bus, heard = EventBus(), list[Event]()
    bus.subscribe(heard.append)
    with caplog.at_level(logging.WARNING, "shoal.events"):
        for number in range(1, 1001):
            one, other = PeerID(number.to_bytes(2, "big") * 16), PeerID(number.to_bytes(2, "little") * 16)
            bus.emit(Warned(where="optimizer", message=f"{one.short()} kept {number} rounds waiting", about=(one,)))
            more = f"{one.short()}, {other.short()} and {number} more did not come: their reason {number}"
            bus.emit(Warned(where="optimizer", message=more, about=(one, other)))
            bus.emit(Warned(where="disk", message=f"epoch {number} could not be saved"))
    assert len(heard) == 3000
    lines = [record.getMessage() for record in caplog.records]
    kept = [line for line in lines if "kept" in line]
    assert len(kept) == len([line for line in lines if "did not come" in line]) == 4 + 7
    assert kept[3].endswith("kept 4 rounds waiting")
    assert kept[4].endswith("kept 8 rounds waiting (and 3 others like it)")
    assert kept[-1].endswith("kept 512 rounds waiting (and 255 others like it)")
    assert len([line for line in lines if "saved" in line]) == 1000  # not about peers
