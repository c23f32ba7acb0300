"""When a peer at the announced end of a run may leave."""

from __future__ import annotations

import pytest

from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Contact, Progress, encode
from shoal.run.decide.agreement import Contributor
from shoal.run.decide.committed import Committed
from shoal.run.decide.run_end import RunEnd
from shoal.run.view.progress import SwarmView

ME, OTHER = PeerID(b"1" * 32), PeerID(b"2" * 32)


def view(
    *, together: bool, behind: bool = False, alone: bool = False, coming: bool = False, client: bool = False
) -> SwarmView:
    """What a peer sees of one other."""
    contact = Contact(OTHER, () if client else (Address("10.0.0.1", 1, OTHER),))
    word = Progress(contact, 5, bytes(32), 0, 0, 0.0, 0.0, {})
    return SwarmView(
        others={} if alone else {OTHER: word},
        peers=(ME,) if alone else (ME, OTHER),
        together=frozenset({ME, OTHER} if together and not alone else {ME}),
        coming=frozenset({OTHER} if coming else ()),
        done=0,
        rate=0.0,
        epoch=5,
        behind=behind,
    )


def announce(end: RunEnd, epoch: int) -> None:
    """This peer says so, and nobody else is there."""
    end.say(epoch, 0)
    end.settle(0, Committed(), dict)


ANN, BEN, CAT = (PeerID(bytes([number]) * 32) for number in (3, 4, 5))
ALL = (ME, ANN, BEN, CAT)
Words = dict[PeerID, int | None]


def steps(*words: Words, first: int = 4, samples: dict[PeerID, int] | None = None) -> Committed:
    """Steps from this epoch on, in each of which these have said that."""
    committed = Committed()
    for epoch, word in enumerate(words, first):
        made = [Contributor(peer, (samples or {}).get(peer, 10), end) for peer, end in sorted(word.items())]
        committed = committed.after(made, epoch)
    return committed


def settled(epoch: int, committed: Committed, said: int | None = None, words: Words | None = None) -> int | None:
    """Where the run ends for a peer at this state, that says this and hears these words."""
    end = RunEnd(ME, 10.0)
    end.say(said, epoch)
    end.settle(epoch, committed, lambda: words or {})
    return end.epoch


def test_one_message_ends_no_run() -> None:
    """Not of a stranger with any number of keys, not of one contributor, not where it says a wrong number."""
    strangers: Words = {PeerID(bytes([number]) * 32): 6 for number in range(10, 200)}
    silent: Words = dict.fromkeys(ALL)
    assert settled(5, steps(silent), None, strangers) is None
    assert settled(5, steps(silent | {CAT: 6})) is None
    assert settled(5, steps({ME: 100, ANN: 100, BEN: 100, CAT: 6}), 100, strangers) == 100
    assert settled(5, steps(silent | {ANN: 6}, samples={ANN: 10**12})) is None, "it says that it has most samples"
    assert settled(5, Committed(), 100, strangers) == 100, "a peer that knows no contributor: its own word"
    assert settled(0, Committed(), None, strangers) is None, "a run that has not begun"


def test_a_run_ends_at_the_median_of_what_its_contributors_say() -> None:
    """Weighted by what they did in the last steps; silence says never; half is not enough."""
    assert settled(5, steps({ME: 100, ANN: 50, BEN: 70, CAT: 200})) == 100
    assert settled(5, steps({ME: 100, ANN: 50, BEN: None, CAT: None})) is None
    assert settled(5, steps({ME: 10, ANN: 20})) == 20
    assert settled(5, steps({ME: 10, ANN: 20, BEN: None}, samples={ME: 300, BEN: 300})) == 20
    assert settled(5, steps({ME: None}), 10) == 10, "alone: its own word, at once"
    assert settled(5, steps({ANN: 7}), 10) == 7, "another one alone: it was in none of the steps"


def test_two_peers_at_one_state_differ_about_the_end() -> None:
    """The one that was stopped has caught up by a download, and weighed by what it had seen itself: it waited for ever.

    What counts belongs to the state: what each hears from the others, and when, changes nothing. Of two peers neither
    decides alone, whatever it gave.
    """
    committed = steps({ANN: None}, {ANN: None}, {ANN: 20, ME: 22})
    newcomer = Committed.read(committed.export())
    assert settled(7, committed, 20, {ANN: 22}) == settled(7, newcomer, 22, {ANN: 21}) == 22
    assert newcomer.samples == committed.samples


def test_who_is_gone_has_still_said_what_it_said() -> None:
    """While its samples count: who is last at the end is not alone with its word."""
    assert settled(9, steps(dict.fromkeys(ALL, 9))) == 9
    assert settled(9, steps(dict.fromkeys(ALL, 9), {ME: 9, ANN: None})) == 9
    others: Words = {ME: None, ANN: None}
    assert settled(30, steps(dict.fromkeys(ALL, 40), *[others] * 10)) is None


def test_a_word_can_be_lifted() -> None:
    """Also one that settled it, before the end; at the end a peer can go on."""
    nine: Words = dict.fromkeys(ALL, 9)
    assert settled(5, steps(nine)) == 9
    assert settled(6, steps(nine, {ME: None, ANN: 9, BEN: None, CAT: 20})) is None
    end = RunEnd(ME, 10.0)
    end.say(9, 5)
    end.settle(9, steps(nine), dict)
    assert end.reached(9)
    end.say(20, 9)
    end.settle(9, steps(nine), dict)
    assert end.epoch == 20
    end.say(None, 9)
    end.settle(9, steps(nine), dict)
    assert end.epoch is None
    end.settle(10, steps(nine, {ME: None}, first=8), dict)
    assert end.reached(10), "the others went home"


def test_an_end_in_the_past_is_none() -> None:
    """When it is said. A program that is started again beyond its own end has nothing to do."""
    assert settled(11, steps(dict.fromkeys(ALL, 9), first=10)) is None
    assert settled(10, steps(dict.fromkeys(ALL, 9), first=9)) == 9, "said right before the step beyond"
    assert settled(12, Committed(), 10) == 10
    early: Words = {ME: 6, ANN: 8}
    assert settled(8, steps(*[early] * 4)) == 8, "one that wanted it over before wants it over now"
    assert settled(8, steps({ME: 7, ANN: 8}, {ME: 6, ANN: 8}, first=6)) == 8, "by a fragment's next merge before"
    assert settled(8, steps({ME: None, ANN: 8}, {ME: 6, ANN: 8}, first=6)) is None


def test_a_fragment_past_the_end_waits_for_the_last_merge_of_the_others() -> None:
    """Then it names its next merge. Where all are past the end, the word is as it was said."""
    end = RunEnd(ME, 10.0)
    assert end.word(3, 3) is None
    end.say(9, 3)
    assert [end.word(epoch, 3) for epoch in (3, 8, 9, 12)] == [9, 9, None, None]
    assert [end.word(epoch, epoch) for epoch in (9, 10)] == [9, 9]
    assert [end.word(12, model_epoch) for model_epoch in (7, 8, 9, 10)] == [None, 13, 13, 9]


def test_a_peer_that_knows_no_steps_goes_by_what_most_others_say() -> None:
    """It has come to its state by a checkpoint."""
    assert settled(9, Committed(), None, {ANN: 9, BEN: 9, CAT: None}) == 9
    assert settled(9, Committed(), None, {ANN: 9, BEN: None}) is None


@pytest.mark.parametrize("exported", [None, 7, b"", b"\xc1", encode([[["short", 1, 2]]]), encode([[]] * 11)])
def test_steps_that_cannot_be_read_are_none(exported: object) -> None:
    """They come from a donor."""
    assert Committed.read({"steps": exported, "left": exported}) == Committed()


def test_without_an_end_nobody_is_through() -> None:
    """Whatever was trained."""
    end = RunEnd(ME, 10.0)
    assert not end.observe(10**6, view(together=True), 0.0)
    assert not end.over(10**6)


def test_at_the_end_with_everybody_it_is_over_at_once() -> None:
    """Also for who is alone. It is told once."""
    for alone in (False, True):
        end = RunEnd(ME, 10.0)
        announce(end, 5)
        assert not end.observe(4, view(together=True, alone=alone), 0.0)
        assert end.observe(5, view(together=True, alone=alone), 1.0)
        assert not end.observe(5, view(together=True, alone=alone), 1.0)
        assert end.over(5)
        assert not end.over(4)


def test_the_others_are_waited_for_but_not_for_ever() -> None:
    """The time runs from when this peer came to the end."""
    end = RunEnd(ME, 10.0)
    announce(end, 5)
    end.observe(4, view(together=False), 0.0)
    end.observe(5, view(together=False), 20.0)
    assert not end.over(5)
    assert not end.observe(5, view(together=False), 29.9)
    assert end.observe(5, view(together=False), 30.0)


def test_clients_wait_for_peers_that_can_be_dialed_and_not_for_each_other() -> None:
    """Each waited for the other one until its patience was over, as the last peer that both knew had left."""
    for me, other in ((True, True), (True, False), (False, True)):
        end = RunEnd(ME, 10.0)
        announce(end, 5)
        over = end.observe(5, view(together=False, client=other), 0.0, average_due=True, client=me)
        assert over == (me and other)


def test_who_is_on_its_way_to_the_last_state_is_waited_for() -> None:
    """The commit may have reached us alone."""
    end = RunEnd(ME, 10.0)
    announce(end, 5)
    assert not end.observe(5, view(together=True, coming=True), 0.0)
    assert end.observe(5, view(together=True), 1.0)


def test_an_average_that_others_make_of_the_last_state_is_waited_for() -> None:
    """Until they tell of it, or are gone, and not for ever."""
    end = RunEnd(ME, 10.0)
    announce(end, 5)
    assert not end.observe(5, view(together=True), 0.0, average_due=True)
    assert end.observe(5, view(together=True), 1.0)
    for last, now in ((view(together=True, alone=True), 1.0), (view(together=True), 10.0)):
        end = RunEnd(ME, 10.0)
        announce(end, 5)
        assert not end.observe(5, view(together=True), 0.0, average_due=True)
        assert end.observe(5, last, now, average_due=True)


def test_a_better_state_is_never_left_behind() -> None:
    """However long it takes; and who takes over another state is looked at again."""
    end = RunEnd(ME, 10.0)
    announce(end, 5)
    assert not end.observe(5, view(together=False, behind=True), 0.0)
    assert not end.observe(5, view(together=False, behind=True), 1000.0)
    assert not end.over(5)
    assert not end.over(6)
    assert end.observe(6, view(together=True), 1001.0)
