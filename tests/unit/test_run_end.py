"""When a peer at the announced end of a run may leave."""

from __future__ import annotations

from shoal.optim.run_end import RunEnd
from shoal.peer import PeerID
from shoal.progress import SwarmView

ME, OTHER = PeerID(b"1" * 32), PeerID(b"2" * 32)


def view(*, together: bool, behind: bool = False, alone: bool = False, coming: bool = False) -> SwarmView:
    """What a peer sees of one other."""
    return SwarmView(
        peers=(ME,) if alone else (ME, OTHER),
        together=frozenset({ME, OTHER} if together and not alone else {ME}),
        coming=frozenset({OTHER} if coming else ()),
        samples=0,
        rate=0.0,
        epoch=5,
        behind=behind,
        leaders=(),
        end_epoch=None,
    )


def test_the_earliest_announcement_holds() -> None:
    """A later one is no news."""
    end = RunEnd(10.0)
    assert not end.announce(None)
    assert end.announce(7)
    assert not end.announce(9)
    assert end.announce(5)
    assert end.epoch == 5
    assert not end.reached(4)
    assert end.reached(5)


def test_without_an_end_nobody_is_through() -> None:
    """Whatever was trained."""
    end = RunEnd(10.0)
    assert not end.look(10**6, view(together=True), 0.0)
    assert not end.over(10**6)


def test_at_the_end_with_everybody_it_is_over_at_once() -> None:
    """Also for who is alone. It is told once."""
    for alone in (False, True):
        end = RunEnd(10.0)
        end.announce(5)
        assert not end.look(4, view(together=True, alone=alone), 0.0)
        assert end.look(5, view(together=True, alone=alone), 1.0)
        assert not end.look(5, view(together=True, alone=alone), 1.0)
        assert end.over(5)
        assert not end.over(4)


def test_the_others_are_waited_for_but_not_for_ever() -> None:
    """The time runs from when this peer came to the end."""
    end = RunEnd(10.0)
    end.announce(5)
    end.look(4, view(together=False), 0.0)
    end.look(5, view(together=False), 20.0)
    assert not end.over(5)
    assert not end.look(5, view(together=False), 29.9)
    assert end.look(5, view(together=False), 30.0)


def test_who_is_on_its_way_to_the_last_state_is_waited_for() -> None:
    """The commit may have reached us alone."""
    end = RunEnd(10.0)
    end.announce(5)
    assert not end.look(5, view(together=True, coming=True), 0.0)
    assert end.look(5, view(together=True), 1.0)


def test_a_better_state_is_never_left_behind() -> None:
    """However long it takes; and who takes over another state is looked at again."""
    end = RunEnd(10.0)
    end.announce(5)
    assert not end.look(5, view(together=False, behind=True), 0.0)
    assert not end.look(5, view(together=False, behind=True), 1000.0)
    assert not end.over(5)
    assert not end.over(6)
    assert end.look(6, view(together=True), 1001.0)
