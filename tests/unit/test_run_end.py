"""When a peer at the announced end of a run may leave."""

from __future__ import annotations

from shoal.optim.committed import Committed
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
    )


def announce(end: RunEnd, epoch: int) -> None:
    """This peer says so, and nobody else is there."""
    end.say(epoch)
    end.settle(0, {}, Committed())


def settled(
    epoch: int, said: int | None, words: dict[PeerID, int | None], *rounds: dict[PeerID, int], given: int | None = None
) -> int | None:
    """Where the run ends for a peer that has been in these rounds, said this, and hears these words."""
    end, committed = RunEnd(ME, 10.0), Committed()
    for each in rounds:
        committed.add(each)
    end.say(said)
    end.given(given)
    end.settle(epoch, words, committed)
    return end.epoch


ANN, BEN, CAT = (PeerID(bytes([number]) * 32) for number in (3, 4, 5))
EQUAL = {ME: 10, ANN: 10, BEN: 10, CAT: 10}


def test_one_message_ends_no_run() -> None:
    """Not of a stranger with any number of keys, not of one contributor, not where it says a wrong number."""
    strangers: dict[PeerID, int | None] = {PeerID(bytes([number]) * 32): 1 for number in range(10, 200)}
    assert settled(5, None, strangers | {ANN: None}, EQUAL) is None
    assert settled(0, None, strangers, EQUAL) is None
    assert settled(5, 100, strangers | {ANN: 100, BEN: 100, CAT: 6}, EQUAL) == 100
    assert settled(5, None, {ANN: 6}, EQUAL) is None
    assert settled(5, None, {ANN: 6}, EQUAL | {ANN: 10**12}) is None, "it says that it has most samples"
    assert settled(5, 100, strangers) == 100, "a newcomer knows no contributor: its own word"
    assert settled(0, None, strangers) is None, "a run that has not begun"


def test_a_run_ends_at_the_median_of_what_its_contributors_say() -> None:
    """Weighted by what they did in the last rounds; silence says never; half is not enough."""
    assert settled(5, 100, {ANN: 50, BEN: 70, CAT: 200}, EQUAL) == 100
    assert settled(5, 100, {ANN: 50, BEN: None, CAT: None}, EQUAL) is None
    assert settled(5, 10, {ANN: 20}, {ME: 10, ANN: 10}) == 20
    assert settled(5, 10, {ANN: 20, BEN: None}, {ME: 300, ANN: 10, BEN: 300}) == 20
    assert settled(5, 10, {}, {ME: 10}) == 10, "alone"
    assert settled(5, 10, {ANN: None}, *({ANN: 10, ME: 10} for _ in range(20))) is None


def test_who_is_gone_has_still_said_what_it_said() -> None:
    """While its samples count: who is last at the end is not alone with its word."""
    end, committed = RunEnd(ME, 10.0), Committed()
    committed.add(EQUAL)
    end.settle(5, {ANN: 9, BEN: 9, CAT: 9}, committed)
    end.settle(9, {}, committed)
    assert end.reached(9)


def test_a_word_can_be_lifted() -> None:
    """Also one that settled it."""
    end, committed = RunEnd(ME, 10.0), Committed()
    committed.add(EQUAL)
    end.settle(5, {ANN: 9, BEN: 9, CAT: 9}, committed)
    assert end.epoch == 9
    end.settle(6, {ANN: 9, BEN: None, CAT: 20}, committed)
    assert end.epoch is None
    assert end.say(20)
    assert not end.say(20)
    end.settle(6, {}, committed)
    assert end.epoch == 20
    assert end.say(None)
    end.settle(6, {}, committed)
    assert end.epoch is None


def test_an_end_in_the_past_is_none() -> None:
    """Of others. A program that is started again beyond its own end has nothing to do."""
    assert settled(10, None, {ANN: 9, BEN: 9, CAT: 9}, EQUAL) is None
    assert settled(9, None, {ANN: 9, BEN: 9, CAT: 9}, EQUAL) == 9
    assert settled(12, 10, {}) == 10


def test_a_newcomer_takes_the_end_from_its_donor() -> None:
    """It has been in no round, and may come to the end by the download alone. Or by steps: then most say so."""
    assert settled(9, None, {}, given=9) == 9
    assert settled(9, None, {}, given=8) is None
    assert settled(9, None, {ANN: 9, BEN: 9, CAT: None}) == 9
    assert settled(9, None, {ANN: 9, BEN: None}) is None


def test_without_an_end_nobody_is_through() -> None:
    """Whatever was trained."""
    end = RunEnd(ME, 10.0)
    assert not end.look(10**6, view(together=True), 0.0)
    assert not end.over(10**6)


def test_at_the_end_with_everybody_it_is_over_at_once() -> None:
    """Also for who is alone. It is told once."""
    for alone in (False, True):
        end = RunEnd(ME, 10.0)
        announce(end, 5)
        assert not end.look(4, view(together=True, alone=alone), 0.0)
        assert end.look(5, view(together=True, alone=alone), 1.0)
        assert not end.look(5, view(together=True, alone=alone), 1.0)
        assert end.over(5)
        assert not end.over(4)


def test_the_others_are_waited_for_but_not_for_ever() -> None:
    """The time runs from when this peer came to the end."""
    end = RunEnd(ME, 10.0)
    announce(end, 5)
    end.look(4, view(together=False), 0.0)
    end.look(5, view(together=False), 20.0)
    assert not end.over(5)
    assert not end.look(5, view(together=False), 29.9)
    assert end.look(5, view(together=False), 30.0)


def test_who_is_on_its_way_to_the_last_state_is_waited_for() -> None:
    """The commit may have reached us alone."""
    end = RunEnd(ME, 10.0)
    announce(end, 5)
    assert not end.look(5, view(together=True, coming=True), 0.0)
    assert end.look(5, view(together=True), 1.0)


def test_a_better_state_is_never_left_behind() -> None:
    """However long it takes; and who takes over another state is looked at again."""
    end = RunEnd(ME, 10.0)
    announce(end, 5)
    assert not end.look(5, view(together=False, behind=True), 0.0)
    assert not end.look(5, view(together=False, behind=True), 1000.0)
    assert not end.over(5)
    assert not end.over(6)
    assert end.look(6, view(together=True), 1001.0)
