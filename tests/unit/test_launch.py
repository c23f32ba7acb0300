"""`shoal.runtime.launch`: what the constructors are given by `shoal run`, and what stays the program's own."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

import shoal
from shoal.runtime import launch as launching
from shoal.runtime.launch import Launch, Setting, launch, launched


class Thing:
    """A class as `shoal.DHT` is one."""

    @launched("DHT")
    def __init__(self, initial_peers: Any = None, *, identity_path: str | None = None, **options: int) -> None:
        if identity_path == "unreadable":
            raise shoal.ConfigError(identity_path)
        self.given = (initial_peers, identity_path, options)
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive


@pytest.fixture
def current() -> Iterator[Launch]:
    """Settings for such a thing."""
    yield launch(
        [Setting("DHT", "initial_peers", ["you"], "--invite"), Setting("DHT", "identity_path", "me", "a file")]
    )
    launching._launch = None


def test_what_the_program_leaves_out_is_given(current: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """An empty list of peers is left out, too; other arguments arrive as they are."""
    made: list[Any] = []
    current.when_made(lambda owner, new: made.append((owner, new)))
    first = Thing([], one=1)
    assert first.given == (["you"], "me", {"one": 1})
    assert made == [("DHT", first)]
    assert list(current.made["DHT"]) == [first]
    assert current.unused() == []
    assert not caplog.records


def test_what_the_program_gives_stays_and_is_told(current: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """By position or name; the warning names both."""
    assert Thing(["mine"]).given == (["mine"], "me", {})
    (told,) = caplog.messages
    assert told == (
        "--invite has no effect: the program itself gives shoal.DHT initial_peers=['mine']. Leave one of the two out "
        "(docs: warnings#option-without-effect)"
    )


def test_a_second_one_is_given_nothing_while_the_first_lives(current: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """Two peers with one identity would disturb each other. One after the other is as it was."""
    first = Thing()
    assert Thing().given == (None, None, {})
    assert "only the first one gets the settings" in caplog.text
    first.alive = False
    caplog.clear()
    assert Thing().given == (["you"], "me", {})
    assert not caplog.records


def test_one_that_could_not_be_made_leaves_the_settings_to_the_next(current: Launch) -> None:
    """A program may try again."""
    with pytest.raises(shoal.ConfigError):
        Thing(identity_path="unreadable")
    assert [each.origin for each in current.unused()] == ["--invite", "a file"]
    assert Thing().given == (["you"], "me", {})


def test_a_setting_that_needs_another_ends_the_program() -> None:
    """With one line that names both; not where the program gives the other one itself."""
    launch([Setting("DHT", "identity_path", "me", "--identity-path", needs="initial_peers")])
    try:
        with pytest.raises(SystemExit, match="--identity-path needs --initial_peers, or a program that gives"):
            Thing()
        assert Thing(["you"]).given == (["you"], "me", {})
    finally:
        launching._launch = None


def test_wrong_arguments_raise_as_always(current: Launch) -> None:
    """The error of Python names the constructor."""
    with pytest.raises(TypeError, match=r"Thing.__init__\(\) takes from 1 to 2 positional arguments"):
        Thing(1, 2)  # type: ignore[call-arg, arg-type]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_is_given_nothing(current: Launch) -> None:
    """It would have the identity of its parent."""
    if not (child := os.fork()):
        os._exit(0 if Thing().given == (None, None, {}) and not current.is_here else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_shoal_run_nothing_happens() -> None:
    """And the signatures are those of the classes."""
    assert Thing().given == (None, None, {})
    for kind, argument in ((shoal.DHT, "initial_peers"), (shoal.Optimizer, "checkpoint")):
        assert argument in inspect.signature(kind).parameters


def test_what_is_given_is_told_at_info(current: Launch, caplog: pytest.LogCaptureFixture) -> None:
    """With its origin."""
    with caplog.at_level(logging.INFO, "shoal.run"):
        Thing()
    assert caplog.messages == [
        "shoal.DHT: initial_peers=['you'], by --invite",
        "shoal.DHT: identity_path='me', by a file",
    ]


@pytest.mark.parametrize(
    ("own", "asked", "given"),
    [
        (None, "/tcp/4000", "/tcp/4000"),
        ("/ip4/0.0.0.0/tcp/0", "/tcp/4000", "/ip4/0.0.0.0/tcp/4000"),
        (["/ip6/::/tcp/0"], "/tcp/4000", "/ip6/::/tcp/4000"),
        ("/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/tcp/0", "/ip4/127.0.0.1/tcp/0"),
    ],
)
def test_a_program_that_listens_anywhere_gets_the_place_of_shoal_run(own: Any, asked: str, given: str) -> None:
    """The programs of the docs do; what an option does not say, their place says."""
    assert Setting("DHT", "host_maddrs", asked, "--port").instead_of(own) == given


@pytest.mark.parametrize("own", ["/ip4/0.0.0.0/tcp/5000", "/ip4/10.0.0.1/tcp/0", ["/ip4/127.0.0.1/tcp/0"], 5])
def test_a_program_that_names_its_place_keeps_it(own: Any) -> None:
    """Then the option has no effect, and is told so."""
    assert Setting("DHT", "host_maddrs", "/tcp/4000", "--port").instead_of(own) is None
