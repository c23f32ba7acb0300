"""The rules of forming a group, one by one: what the machine says to what it hears."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shoal.averaging.matchmaking.config import SETTLE_S, MatchmakingConfig
from shoal.averaging.matchmaking.declarations import Memory
from shoal.averaging.matchmaking.events import (
    Action,
    Answer,
    Answered,
    AskToLead,
    Cancel,
    Declaration,
    Declare,
    Declared,
    DeclareFailed,
    DirectoryFailed,
    DirectoryRead,
    Enter,
    Event,
    Fail,
    JoinEnded,
    JoinRequested,
    LeaderLost,
    LeaveLeader,
    Mismatched,
    Nudge,
    Nudged,
    PeerLost,
    Precedence,
    ReadDirectory,
    SearchPhase,
    Start,
    Tick,
    Withdraw,
)
from shoal.averaging.matchmaking.followers import Followers
from shoal.averaging.matchmaking.leaders import LeaderMemory
from shoal.base.peer import PeerID
from shoal.protocol.wire import Begin, Contact, JoinAccepted, JoinRedirected, JoinRefused, Member
from tests.property.matchmaking_world import BEGIN, Setup, contact_of, peer_id

WALL_S = 1_000_000.0
WINDOW_S = 5.0
MINE = WALL_S + WINDOW_S
ME = 50
"""Our number: peers with lower ones are earlier at the same expiration."""
READ_S = 0.01


class Play:
    """A machine that has begun at time 0, on a directory that answers after `READ_S` when time is let pass."""

    def __init__(
        self,
        *,
        expected: Callable[[], frozenset[PeerID] | None] | None = None,
        memory: Memory | None = None,
        setup: Setup | None = None,
        silent: Callable[[PeerID, bool], bool] | None = None,
        contact: Callable[[PeerID], Contact] = Contact,
        shunned: frozenset[PeerID] = frozenset(),
    ) -> None:
        self.silent: set[PeerID] = set()
        self.now = 0.0
        self.others: tuple[Declaration, ...] = ()
        self.read_at: float | None = None
        self.declaring = False
        self.memory = memory or Memory()
        self.machine = (setup or Setup()).machine(
            ME,
            self.memory,
            now=0.0,
            wall_offset_s=WALL_S,
            expected=expected,
            is_silent=silent or (lambda peer, soon: peer in self.silent),
            contact_of=contact,
            precedence=Precedence(shunned=shunned),
        )
        self.first = self._note(self.machine.start(0.0))

    def _note(self, said: list[Action]) -> list[Action]:
        if ReadDirectory() in said:
            self.read_at = self.now + READ_S
        self.declaring |= any(isinstance(action, Declare) for action in said)
        return said

    def hear(self, event: Event, *, at: float | None = None) -> list[Action]:
        """What the machine says to this."""
        self.now = self.now if at is None else at
        if isinstance(event, DirectoryRead | DirectoryFailed):
            self.read_at = None
        if isinstance(event, Declared | DeclareFailed):
            self.declaring = False
        return self._note(self.machine.handle(event, self.now))

    def read(self, *others: Declaration, at: float | None = None) -> list[Action]:
        """The directory says this, and that we are there: in answer to our declaration, or to a read."""
        found = (*others, Declaration(contact_of(ME), MINE))
        return self.hear(Declared(found) if self.declaring else DirectoryRead(found), at=at)

    def settle(self, *others: Declaration) -> list[Action]:
        """Declared; nothing is on its way any more."""
        self.others = others
        return self.read(*others, at=self.now + 0.01)

    def joins(self, number: int, *, at: float | None = None, **kwargs: Any) -> list[Action]:
        """A later peer asks us."""
        return self.hear(join(number, **kwargs), at=at)

    def wait(self, until: float) -> list[Action]:
        """Let time pass, with an answer to every read; all that the machine says, up to Start or Fail."""
        said: list[Action] = []
        while not any(isinstance(action, Start | Fail) for action in said):
            due = self.machine.deadline()
            if self.read_at is not None and self.read_at <= min(until, due if due is not None else until):
                said += self.read(*self.others, at=self.read_at)
            elif due is not None and due <= until:
                said += self.hear(Tick(), at=max(due, self.now))
            else:
                self.now = until
                break
        return said


def kinds(said: list[Action]) -> list[type]:
    """What kinds of action, and of answers, these are."""
    return [type(action.answer if isinstance(action, Answer) else action) for action in said]


def answers(said: list[Action]) -> list[object]:
    """The messages to peers that asked us."""
    return [action.answer for action in said if isinstance(action, Answer)]


def declared(number: int, expiration: float = MINE) -> Declaration:
    """A declaration in the directory."""
    return Declaration(contact_of(number), expiration)


def join(
    number: int, expiration: float = MINE, *, reduces: bool = True, contributes: bool = True, client: bool = False
) -> JoinRequested:
    """A peer asks us."""
    contact = Contact(peer_id(number)) if client else contact_of(number)
    return JoinRequested(contact, expiration, reduces and not client, contributes)


def following(number: int = 1, *, ahead_s: float = 0.0, **options: Any) -> Play:
    """A machine that follows this peer, which has declared itself so much earlier."""
    play = Play(**options)
    play.settle(declared(number, MINE - ahead_s))
    play.hear(Answered(peer_id(number), JoinAccepted()))
    assert play.machine.phase is SearchPhase.FOLLOWING
    return play


# ---------------------------------------------------------------------------------------------------- declare and look


def test_declares_and_is_told_at_once_who_is_there() -> None:
    """To declare is to look: nothing is read before that is answered, and not at once after it."""
    play = Play()
    assert play.first == [Declare(MINE)]
    assert play.hear(Tick(), at=1.0) == []
    assert play.read(declared(60), at=1.01) == [Nudge(contact_of(60), MINE)]
    assert ReadDirectory() in play.wait(1.1)


def test_follower_keeps_its_declaration_until_the_group_begins() -> None:
    """A peer that asks it is sent to its leader, and if the leader is lost it stands there already."""
    play = Play()
    play.read(declared(1))
    assert play.hear(Answered(peer_id(1), JoinAccepted())) == []
    play.hear(LeaderLost(peer_id(1), "silent"), at=0.1)
    assert play.machine.phase is SearchPhase.LOOKING
    play.read(declared(2), at=0.11)
    play.hear(Answered(peer_id(2), JoinAccepted()))
    assert play.hear(Answered(peer_id(2), BEGIN)) == [Enter(BEGIN), Withdraw()]


def test_asks_the_earliest_declared_peer_before_itself() -> None:
    """Order is expiration, then peer id; later peers are left alone."""
    play = Play()
    said = play.read(declared(3), declared(2, MINE - 1), declared(7, MINE - 1), declared(60), declared(1, MINE + 1))
    assert said == [AskToLead(contact_of(2), MINE)]
    assert play.machine.phase is SearchPhase.ASKING


# Groups of two: eight peers before us are four full groups, which is a crowd.
CROWD = Setup(window_s=WINDOW_S, target_group_size=2)


def before(count: int) -> list[Declaration]:
    """So many peers that are declared before us, the earliest first."""
    return [declared(number, MINE - 1 + number / 100) for number in range(1, count + 1)]


@pytest.mark.parametrize(("count", "asked"), [(1, 1), (7, 1), (9, 9), (11, 11)])
def test_crowd_parts_by_its_order(count: int, asked: int) -> None:
    """With fewer than four full groups before us we ask the earliest, else the last of them that leads by its place."""
    play = Play(setup=CROWD)
    assert AskToLead(contact_of(asked), MINE) in play.read(*before(count), at=0.01)


def test_leader_in_a_crowd_waits_for_followers_and_then_asks_the_one_before_it() -> None:
    """The ninth and tenth are a group: the ninth leads. If nobody comes, it is not so for the others."""
    play = Play(setup=CROWD)
    said = play.settle(*before(8))
    assert not any(isinstance(action, AskToLead) for action in said)
    full = Play(setup=CROWD)
    full.settle(*before(8))
    assert full.joins(60)[-2:] == [Start((peer_id(60),)), Withdraw()]
    asks = [action for action in play.wait(2.0) if isinstance(action, AskToLead)]
    assert asks == [AskToLead(contact_of(8), MINE)]


def test_client_in_a_crowd_never_waits_for_followers() -> None:
    """It asks the last of the leaders, or the last one of all where the groups before it would be full."""
    setup = dataclasses.replace(CROWD, leads=False)
    assert AskToLead(contact_of(9), MINE) in Play(setup=setup).read(*before(9), at=0.01)
    assert AskToLead(contact_of(8), MINE) in Play(setup=setup).read(*before(8), at=0.01)


def test_first_look_may_find_a_leader_but_never_proves_absence() -> None:
    """A group is not started on what was said to our own declaration: who came meanwhile may be missing there."""
    play = Play()
    play.joins(60)
    assert play.wait(2.0) == []
    assert Start not in kinds(play.read(at=2.0))
    said = play.wait(3.0)
    assert kinds(said)[0] is ReadDirectory
    assert Start in kinds(said)


def test_looks_again_ever_more_rarely_while_alone() -> None:
    """A lonely peer does not burden the directory."""
    play = Play(setup=Setup(window_s=60.0))
    play.hear(Declared())
    reads = []
    while (due := play.machine.deadline()) is not None and due < 20.0:
        if ReadDirectory() in play.hear(Tick(), at=due):
            reads.append(due)
            play.hear(DirectoryRead(()))
    pauses = [round(after - before, 3) for before, after in itertools.pairwise(reads)]
    assert pauses[:4] == [0.1, 0.2, 0.4, 0.8]
    assert set(pauses[4:]) == {1.0}


def test_failed_read_is_repeated_and_said_in_the_end() -> None:
    """A directory that does not answer is asked again, ever more rarely, and is the reason that is given."""
    play = Play()
    play.hear(Declared(), at=0.01)
    said, tries = [], 0
    while play.machine.phase is SearchPhase.LOOKING:
        due = play.machine.deadline()
        assert due is not None
        if play.read_at is not None and play.read_at < due:
            said = play.hear(DirectoryFailed("no route"), at=play.read_at)
            tries += 1
        else:
            said = play.hear(Tick(), at=due)
    assert 5 < tries < 12
    fail = said[-1]
    assert isinstance(fail, Fail)
    assert "could not read who is looking: no route" in fail.reason


def test_failed_declaration_is_repeated() -> None:
    """A peer that could not declare itself tries again within the window."""
    play = Play()
    assert play.hear(DeclareFailed("no route"), at=0.1) == [ReadDirectory()]
    assert Declare(MINE) in play.wait(1.0)


def test_expired_declaration_counts_for_a_while_because_clocks_differ() -> None:
    """A peer whose clock is 2 s behind is asked; one that expired long ago is not."""
    assert Play().read(declared(1, WALL_S - 2.0)) == [AskToLead(contact_of(1), MINE)]
    assert AskToLead(contact_of(1), MINE) not in Play().read(declared(1, WALL_S - 4.0))


@pytest.mark.parametrize("expiration", [math.nan, math.inf, -math.inf])
def test_senseless_declarations_are_ignored(expiration: float) -> None:
    """What is no time cannot lead."""
    assert not any(isinstance(action, AskToLead | Nudge) for action in Play().read(declared(1, expiration)))


# --------------------------------------------------------------------------------------------------------- being asked


def test_accepts_a_later_peer() -> None:
    """The earlier one leads."""
    play = Play()
    assert play.joins(60) == [Answer(peer_id(60), JoinAccepted())]
    assert play.machine.followers == (peer_id(60),)


def test_refuses_an_earlier_peer_and_asks_it_instead() -> None:
    """A peer that asks the wrong way round is met nevertheless."""
    play = Play()
    said = play.joins(3)
    assert kinds(said) == [JoinRefused, AskToLead]
    assert said[0] == Answer(peer_id(3), JoinRefused("later", "you are earlier: lead me"))
    assert said[1] == AskToLead(contact_of(3), MINE)


def test_a_peer_that_is_shunned_does_not_lead_and_may_follow() -> None:
    """Neither by the directory, nor by its own word, nor by that of others; nor as the leader of the last group."""
    memory = Memory(leaders=LeaderMemory(last=contact_of(3)))
    play = Play(shunned=frozenset({peer_id(3)}), memory=memory, expected=lambda: frozenset({peer_id(3), peer_id(60)}))
    assert AskToLead not in kinds(play.first)
    mine = MINE - WINDOW_S / 5  # a head start
    assert AskToLead(contact_of(4), mine) in play.settle(declared(3, mine), declared(4, mine))
    assert AskToLead not in kinds(play.hear(Answered(peer_id(4), JoinRedirected(contact_of(3)))))
    assert kinds(play.joins(3, expiration=mine)) == [JoinRefused]
    assert play.joins(3, expiration=MINE) == [Answer(peer_id(3), JoinAccepted())]


def begun_with(*numbers: int) -> Begin:
    """A group of these members, which the first one leads."""
    return Begin(
        bytes(16), [Member(contact_of(number), True, None, b"") for number in numbers], 0, [1] * len(numbers), 1
    )


def begins(play: Play, *numbers: int, there: Sequence[int] | None = None) -> None:
    """The first of these leads a group of them, and these take part in its round in time: all if nothing is said."""
    play.hear(Answered(peer_id(numbers[0]), begun_with(*numbers)))
    play.memory.leaders.played(peer_id(numbers[0]), frozenset(map(peer_id, numbers if there is None else there)))


def test_takes_the_lead_for_a_peer_that_reaches_us_and_not_our_leader() -> None:
    """Else one bad line between a leader and another peer shuts that peer out of all groups."""
    memory, head_start_s = Memory(), WINDOW_S / 10
    for _ in range(2):
        assert not memory.leaders.missed(peer_id(1))
        play = following(1, memory=memory)
        play.joins(60)
        play.joins(61)
        begins(play, 1, ME, 61)
    assert list(memory.leaders.stranded) == [peer_id(60)]
    memory.leaders.last, memory.declared = contact_of(1), -math.inf  # it was a while ago
    play = Play(memory=memory, expected=lambda: frozenset({peer_id(1), peer_id(60)}))
    assert play.first == [Declare(MINE - 2 * head_start_s)]
    play.joins(60)
    assert Start((peer_id(60), peer_id(1))) in play.joins(1)
    memory.leaders.played(None, frozenset(map(peer_id, (1, 60, ME))))
    assert not memory.leaders.missed(peer_id(1))


def test_a_peer_that_wants_to_lead_and_follows_nobody_made_others_shun_an_honest_leader() -> None:
    """It nudged the followers, as it was the earliest; they took that for a wish to join their leader."""
    memory = Memory()
    for _ in range(3):
        play = following(2, memory=memory)
        assert answers(play.joins(1)) == [JoinRedirected(contact_of(2))]
        begins(play, 2, ME)
    assert not memory.leaders.stranded


def test_a_leader_that_most_others_stay_with_is_followed_at_once() -> None:
    """One follower alone left the others for the peer that was missing: two groups, and half of the steps in vain."""
    memory = stranded_by(1, 60)
    memory.leaders.there = 4
    play = Play(memory=memory, expected=lambda: frozenset({peer_id(1), peer_id(60), peer_id(61)}))
    play.settle(declared(1, MINE - WINDOW_S / 2))
    play.joins(60)
    said = play.wait(2.0)
    assert AskToLead in kinds(said)
    assert not any(isinstance(action, Start) for action in said)


def test_a_peer_that_is_declined_comes_after_the_one_that_declines_it() -> None:
    """Each waited for the other to follow it, up to the end of the window."""
    play = Play(expected=lambda: frozenset({peer_id(60)}))
    said = [*play.settle(declared(60)), *play.wait(0.3)]
    assert Nudge(contact_of(60), MINE) in said
    said = play.hear(Nudged(peer_id(60), JoinRefused("declined", "")))
    assert any(isinstance(action, Declare) and action.expiration > declared(60).expiration for action in said)
    assert AskToLead in kinds(said)


def stranded_by(leader: int, missing: int, **options: Any) -> Memory:
    """The memory of a peer that has followed this leader twice, to groups without another one that asked it."""
    memory = Memory(**options)
    for _ in range(2):
        play = following(leader, memory=memory)
        play.joins(missing)
        begins(play, leader, ME)
    memory.leaders.last, memory.declared = contact_of(leader), -math.inf  # it was a while ago
    return memory


@pytest.mark.parametrize("comes", [True, False])
def test_a_leader_is_avoided_only_if_the_missing_peer_comes_where_another_one_leads(*, comes: bool) -> None:
    """A peer that only said that it would come had honest leaders blamed, one after another."""
    memory = stranded_by(1, 60)
    play = Play(memory=memory, expected=lambda: frozenset({peer_id(1), peer_id(60), peer_id(61)}))
    play.settle(declared(1), declared(60), declared(61))
    play.joins(61)
    if comes:
        play.joins(60)
    started = [action for action in play.wait(WINDOW_S) if isinstance(action, Start)]
    assert peer_id(61) in started[0].followers
    assert memory.leaders.played(None, started[0].followers) == (peer_id(1) if comes else None)
    assert not memory.leaders.stranded


def test_a_leader_that_is_avoided_is_followed_where_all_others_follow_it() -> None:
    """Peers that avoid different leaders were in different groups, and the samples of the smaller one were lost."""
    memory = Memory(leaders=LeaderMemory(avoided={peer_id(1): 100.0}))
    play = Play(memory=memory, expected=lambda: frozenset({peer_id(1), peer_id(2)}))
    mine = MINE - WINDOW_S / 5  # a head start
    assert AskToLead not in kinds(play.settle(declared(1, mine)))
    assert AskToLead(contact_of(2), mine) in play.read(declared(1, mine), declared(2, mine))
    assert AskToLead(contact_of(1), mine) in play.hear(Answered(peer_id(2), JoinRedirected(contact_of(1))))


def test_a_leader_that_is_avoided_does_not_take_our_followers() -> None:
    """They came to us, as they avoid it, too."""
    memory = Memory(leaders=LeaderMemory(avoided={peer_id(1): 100.0}))
    play = Play(memory=memory, expected=lambda: frozenset({peer_id(1), peer_id(60), peer_id(61)}))
    play.settle(declared(1, MINE - WINDOW_S / 5))
    play.joins(60)
    assert AskToLead not in kinds(play.wait(2.0))
    assert Start((peer_id(60), peer_id(61))) in [*play.joins(61), *play.wait(3.0)]


def test_a_leader_does_not_wait_for_a_peer_that_does_not_follow_it() -> None:
    """Its other followers waited, too, and blamed it for that: an honest leader."""
    play = Play(shunned=frozenset({peer_id(3)}))
    assert answers(play.joins(3, expiration=MINE - WINDOW_S)) == [JoinRefused("declined", "I do not follow you")]
    play = Play(expected=lambda: frozenset({peer_id(60), peer_id(61)}))
    said = [*play.settle(declared(60), declared(61)), *play.joins(60), *play.wait(0.3)]
    assert Nudge(contact_of(61), MINE) in said
    assert Start((peer_id(60),)) in play.hear(Nudged(peer_id(61), JoinRefused("declined", "")))


def test_does_not_ask_a_peer_that_is_silent_already() -> None:
    """It asks the next one at once: else each search would be over before it came to that."""
    play = Play()
    play.silent = {peer_id(1)}
    assert AskToLead(contact_of(2), MINE) in play.settle(declared(1), declared(2))


def test_a_leader_that_does_not_begin_is_not_followed_again() -> None:
    """Neither if it declares itself anew, nor if others name it; but one that refuses us at once is."""
    play = Play()
    play.settle(declared(3))
    play.hear(Answered(peer_id(3), JoinAccepted()), at=0.1)
    play.hear(Answered(peer_id(3), JoinRefused("too-few", "the window ended")), at=WINDOW_S / 2 + 0.2)
    assert play.memory.leaders.idled == [peer_id(3)]
    play.others = (declared(3, MINE + 1),)
    assert AskToLead not in kinds(play.wait(WINDOW_S - 0.1))
    play = Play()
    play.settle(declared(3))
    play.hear(Answered(peer_id(3), JoinAccepted()), at=0.1)
    play.hear(Answered(peer_id(3), JoinRefused("not-looking", "it left")), at=0.2)
    assert play.memory.leaders.idled == []


def test_accepts_a_client_whatever_its_expiration() -> None:
    """A client cannot lead, so its place in the order does not matter."""
    assert Play().joins(3, expiration=WALL_S, client=True) == [Answer(peer_id(3), JoinAccepted())]


def test_accepts_while_it_asks_itself_and_redirects_once_it_follows() -> None:
    """Nobody waits for a leader that waits for another; followers are handed on."""
    play = Play()
    play.read(declared(1))
    assert play.joins(60) == [Answer(peer_id(60), JoinAccepted())]
    said = play.hear(Answered(peer_id(1), JoinAccepted()))
    assert said == [Answer(peer_id(60), JoinRedirected(contact_of(1)))]
    assert play.machine.followers == ()
    assert play.joins(61) == [Answer(peer_id(61), JoinRedirected(contact_of(1)))]


def test_does_not_start_while_it_asks() -> None:
    """The answer decides first: else it would be in two groups."""
    play = Play(setup=Setup(target_group_size=2, window_s=WINDOW_S))
    play.read(declared(1))
    assert play.joins(60) == [Answer(peer_id(60), JoinAccepted())]
    assert play.wait(WINDOW_S + 1) == []
    assert play.hear(LeaderLost(peer_id(1), "silent"))[0] == Start((peer_id(60),))


def test_refuses_when_full() -> None:
    """No group exceeds its target, also while the leader asks another."""
    play = Play(setup=Setup(target_group_size=2))
    play.read(declared(1))
    play.joins(60)
    assert play.joins(61) == [Answer(peer_id(61), JoinRefused("full", "the group has its 2 members"))]


def test_auxiliary_peers_alone_are_a_group_when_nobody_is_missing() -> None:
    """At once, as others are; the round fails on each of them (decision 0007), instead of searches without an end."""
    play = Play(setup=Setup(target_group_size=3, window_s=WINDOW_S, contributes=False))
    play.settle()
    assert play.joins(60, contributes=False) == [Answer(peer_id(60), JoinAccepted())]
    assert Start((peer_id(60),)) in play.wait(WINDOW_S / 2)


def test_one_with_values_takes_the_place_of_an_auxiliary_peer() -> None:
    """While there are auxiliary peers only, a group that has its members waits until nobody is missing."""
    play = Play(setup=Setup(target_group_size=3, window_s=WINDOW_S, contributes=False))
    play.settle()
    assert play.joins(60, contributes=False) == [Answer(peer_id(60), JoinAccepted())]
    assert play.joins(61, contributes=False)[0] == Answer(peer_id(61), JoinAccepted())
    assert play.joins(62, contributes=False)[0] == Answer(
        peer_id(62), JoinRefused("full", "the group has its 3 members")
    )
    assert play.joins(63)[:3] == [
        Answer(peer_id(61), JoinRefused("full", "the group has its 3 members")),
        Answer(peer_id(63), JoinAccepted()),
        Start((peer_id(60), peer_id(63))),
    ]


def test_a_stranger_gives_way_to_a_peer_that_is_known() -> None:
    """The last one that came; and a stranger takes nobody's place."""
    config = MatchmakingConfig(target_group_size=4)
    known = Precedence(known=(peer_id(ME), peer_id(60), peer_id(63)))
    followers = Followers(Member(contact_of(ME), True, None, b""), config, known)
    followers.update({peer_id(number): join(number) for number in (61, 62, 60)})
    assert followers.gives_way(join(63)) == peer_id(62)
    assert followers.gives_way(join(64)) is None


def test_one_with_values_makes_auxiliary_peers_a_group() -> None:
    """As soon as it is full."""
    play = Play(setup=Setup(target_group_size=3, window_s=WINDOW_S, contributes=False))
    play.settle()
    play.joins(60, contributes=False)
    assert play.joins(61)[:2] == [Answer(peer_id(61), JoinAccepted()), Start((peer_id(60), peer_id(61)))]


def test_refuses_after_the_end() -> None:
    """A search that is over takes nobody."""
    play = Play()
    play.hear(Cancel())
    assert play.joins(60) == [Answer(peer_id(60), JoinRefused("not-looking", "not looking for a group now"))]


def test_joining_again_counts_once() -> None:
    """A follower that opens a new stream is still one follower."""
    play = Play()
    play.joins(60)
    play.hear(JoinEnded(peer_id(60)))
    play.joins(60)
    assert play.machine.followers == (peer_id(60),)


def test_leader_that_declared_anew_and_asks_is_accepted() -> None:
    """A peer that asks us with a later key leads us no more, even if its word has not come yet."""
    play = following(1)
    said = play.joins(1, expiration=MINE + 1)
    assert said[:2] == [LeaveLeader(peer_id(1)), Answer(peer_id(1), JoinAccepted())]
    assert play.machine.followers == (peer_id(1),)


def test_nudge_of_the_own_leader_changes_nothing() -> None:
    """Its nudge and our Join have crossed on the way."""
    play = following(1)
    assert play.joins(1, expiration=MINE) == [Answer(peer_id(1), JoinRefused("later", "I follow you"))]
    assert play.machine.phase is SearchPhase.FOLLOWING


# ------------------------------------------------------------------------------------------------- asking and following


def test_refused_asks_the_next_one() -> None:
    """Peers are asked in order until one accepts."""
    play = Play()
    play.read(declared(1), declared(2))
    assert play.hear(Answered(peer_id(1), JoinRefused("started", ""))) == [AskToLead(contact_of(2), MINE)]
    assert AskToLead not in {type(action) for action in play.hear(Answered(peer_id(2), JoinRefused("not-looking", "")))}


def test_refused_peer_is_asked_again_when_it_declares_anew() -> None:
    """A refusal belongs to one declaration."""
    play = Play()
    play.read(declared(1, MINE - 2))
    play.hear(Answered(peer_id(1), JoinRefused("not-looking", "")))
    assert not any(isinstance(action, AskToLead) for action in play.read(declared(1, MINE - 2)))
    assert play.read(declared(1, MINE - 1)) == [AskToLead(contact_of(1), MINE)]


@pytest.mark.parametrize("wall_s", [WALL_S, WALL_S + 3600.0, WALL_S - 3600.0])
def test_each_search_declares_later_than_the_one_before(wall_s: float) -> None:
    """Two retries of a step end at the same moment; who was refused between the two would never ask again.

    A clock that was set by an hour costs no order that could stand for an hour.
    """
    memory = Memory()
    ends = 2.0
    declared = []
    for begins, offset in ((0.0, WALL_S), (0.5, WALL_S), (1.0, wall_s)):
        machine = Setup(deadline_s=ends - begins).machine(ME, memory, now=begins, wall_offset_s=offset)
        declared += [action.expiration for action in machine.start(begins) if isinstance(action, Declare)]
    assert declared[0] == WALL_S + ends
    assert declared[0] < declared[1] < declared[0] + 0.1
    assert declared[2] == wall_s + ends if wall_s != WALL_S else declared[1] < declared[2] < declared[0] + 0.1


def test_full_leader_is_asked_again_soon() -> None:
    """It may lose a follower, or follow somebody with more room."""
    play = Play()
    play.settle(declared(1))
    play.hear(Answered(peer_id(1), JoinRefused("full", "")))
    said = play.wait(play.now + 0.3)
    assert AskToLead(contact_of(1), MINE) in said


def test_follower_of_a_leader_without_a_place_does_not_send_us_back_to_it() -> None:
    """Else we would go to and fro between the two, as fast as messages travel."""
    play = Play()
    play.settle(declared(1), declared(2))
    assert play.hear(Answered(peer_id(1), JoinRefused("full", ""))) == [AskToLead(contact_of(2), MINE)]
    said = play.hear(Answered(peer_id(2), JoinRedirected(contact_of(1))))
    assert AskToLead not in kinds(said + play.wait(play.now + SETTLE_S))
    assert AskToLead in kinds(play.wait(play.now + 0.3))


@pytest.mark.parametrize("lost", [LeaderLost(peer_id(1), "silent"), PeerLost(peer_id(1))])
def test_lost_leader_is_replaced_at_once(lost: Event) -> None:
    """A follower whose leader dies looks again, in its old place, and asks the next."""
    play = following(1)
    play.memory.lose(peer_id(1), MINE)
    said = play.hear(lost, at=0.12)
    assert ReadDirectory() in said
    assert play.machine.phase is SearchPhase.LOOKING
    said = play.read(declared(1), declared(2), at=0.15)
    assert said == [AskToLead(contact_of(2), MINE)]


def test_redirected_asks_that_one() -> None:
    """A follower's leader is asked instead, also if we were accepted before."""
    play = Play()
    play.read(declared(2))
    assert play.hear(Answered(peer_id(2), JoinRedirected(contact_of(1)))) == [AskToLead(contact_of(1), MINE)]
    play.hear(Answered(peer_id(1), JoinAccepted()))
    assert play.hear(Answered(peer_id(1), JoinRedirected(contact_of(0)))) == [AskToLead(contact_of(0), MINE)]


@pytest.mark.parametrize("over", [False, True], ids=["lost a moment ago", "lost long ago"])
def test_a_leader_that_was_lost_long_ago_was_followed_by_nobody_who_did_not_read_its_declaration(over: bool) -> None:
    """Others send us to it. What it had declared when it was lost is over, so it has declared itself anew."""
    play = Play()
    play.memory.lose(peer_id(1), WALL_S + (-1.0 if over else WINDOW_S))
    play.read(declared(2))
    said = play.hear(Answered(peer_id(2), JoinRedirected(contact_of(1))))
    assert (said == [AskToLead(contact_of(1), MINE)]) is over


@pytest.mark.parametrize("to", [ME, 2, 60])
def test_senseless_redirection_is_not_followed(to: int) -> None:
    """Not to ourselves, not in a circle, not to our own follower; the peer is asked again a little later."""
    play = Play()
    play.settle(declared(2))
    play.joins(60)
    said = play.hear(Answered(peer_id(2), JoinRedirected(contact_of(to))))
    assert AskToLead not in kinds(said)
    assert play.machine.phase is SearchPhase.LOOKING
    assert AskToLead(contact_of(2), MINE) in play.wait(play.now + 0.5)


def test_chain_of_redirections_is_bounded() -> None:
    """Peers that send each other's followers around do not keep us busy for ever."""
    play = Play()
    play.settle(declared(2))
    hops = 0
    asked = contact_of(2)
    for number in range(10, 40):
        said = play.hear(Answered(asked.peer, JoinRedirected(contact_of(number))))
        if not any(isinstance(action, AskToLead) for action in said):
            break
        asked = contact_of(number)
        hops += 1
    assert 3 <= hops <= 8


def test_redirection_to_a_lost_peer_is_not_followed() -> None:
    """We know that it is dead; the peer that sent us will see it soon."""
    play = Play(memory=Memory(lost={peer_id(1): MINE}))
    play.settle(declared(2))
    said = play.hear(Answered(peer_id(2), JoinRedirected(contact_of(1))))
    assert AskToLead not in kinds(said)


def test_a_leader_that_is_silent_is_left_at_the_next_look() -> None:
    """Followed or asked; so is one that is looked at, and answers, not left."""
    play = following(1)
    looks_at = play.machine.deadline()
    assert looks_at is not None
    assert looks_at < 1.0
    assert play.hear(Tick(), at=looks_at) == []
    play.silent.add(peer_id(1))
    assert play.hear(Tick(), at=2 * looks_at)[0] == LeaveLeader(peer_id(1))
    assert play.machine.phase is SearchPhase.LOOKING
    assert play.machine.leader is None


@pytest.mark.parametrize(("peers", "looked_at"), [(32, 30), (33, 0)])
def test_followers_look_at_each_other_while_they_wait_for_the_leader(peers: int, looked_at: int) -> None:
    """Their leader and another peer may fall silent at once: the next leader would wait for the one after the other."""
    looks: list[tuple[PeerID, bool]] = []
    expected = frozenset({peer_id(1), peer_id(ME), *map(peer_id, range(100, 98 + peers))})

    def silent(peer: PeerID, soon: bool) -> bool:
        looks.append((peer, soon))
        return False

    play = following(1, expected=lambda: expected, silent=silent)
    looks.clear()
    play.hear(Tick(), at=play.machine.deadline())
    assert looks.pop() == (peer_id(1), False)
    assert len(looks) == looked_at
    assert {*looks} <= {(peer, True) for peer in expected - {peer_id(1), peer_id(ME)}}


def test_of_many_expected_peers_only_a_leader_looks_at_all() -> None:
    """To look at a peer is to ask it, or to dial it: each of a thousand that search dialed all others."""
    looks: list[PeerID] = []

    def silent(peer: PeerID, _: bool) -> bool:
        looks.append(peer)
        return False

    play = Play(expected=lambda: frozenset(map(peer_id, range(100, 140))), silent=silent)
    play.settle()
    play.wait(1.0)
    assert not looks
    play.joins(100)
    assert {*looks} >= {*map(peer_id, range(101, 140))}


def test_the_time_that_others_are_waited_for_begins_anew_with_each_that_comes() -> None:
    """Of a thousand peers 122 had come when half a second of the search was over, and they began without the others."""
    everybody, plays = frozenset(map(peer_id, range(60, 90))), list[Play]()

    def expected() -> frozenset[PeerID]:
        return frozenset() if plays and plays[0].now > plays[0].machine.joined_at + 0.5 else everybody

    plays.append(play := Play(expected=expected))
    play.settle()
    assert play.machine.joined_at == 0.0
    for number in range(60, 80):
        play.joins(number, at=0.01 * (number - 58))
    assert play.machine.joined_at == 0.21
    assert Start not in kinds(play.wait(0.6))
    play.joins(80)
    play.joins(80)
    assert Start not in kinds(play.wait(1.0))
    assert Start(tuple(map(peer_id, range(60, 81)))) in play.wait(1.5)


def test_an_expected_peer_that_is_silent_is_not_waited_for() -> None:
    """The group starts at the next look with those that have joined; not before."""
    play = Play(expected=lambda: frozenset({peer_id(60), peer_id(61)}))
    play.settle()
    play.joins(60)
    assert Start((peer_id(60),)) not in play.wait(1.0)
    play.silent.add(peer_id(61))
    assert Start((peer_id(60),)) in play.wait(1.2)


def test_a_follower_that_falls_silent_while_others_are_waited_for_is_waited_for_in_the_round() -> None:
    """It is sent away: the round would notice its silence a second later."""
    play = Play(expected=lambda: frozenset({peer_id(60), peer_id(61), peer_id(62)}))
    play.settle()
    play.joins(60)
    play.joins(61)
    play.silent.add(peer_id(61))
    assert Answer(
        peer_id(61), JoinRefused("not-looking", "it gave no sign of life while the group formed")
    ) in play.wait(1.0)
    assert Start((peer_id(60), peer_id(62))) in play.joins(62)


def test_who_was_lost_before_the_search_and_is_expected_is_waited_for() -> None:
    """It is here again: who expects it has heard it since. Lost in this search it is not waited for."""
    memory = Memory()
    memory.lose(peer_id(61), math.inf)
    play = Play(expected=lambda: frozenset({peer_id(60), peer_id(61)}), memory=memory)
    play.settle()
    play.joins(60)
    assert Start((peer_id(60),)) not in play.wait(1.0)
    assert Start((peer_id(60),)) in play.hear(PeerLost(peer_id(61)))


def test_silent_leader_is_left_after_the_window() -> None:
    """A follower waits for Begin to the end of its window and a grace, not longer, whatever else its leader says."""
    play = following(1)
    said = play.hear(Tick(), at=WINDOW_S + 3.0)
    assert said[0] == LeaveLeader(peer_id(1))
    fail = said[-1]
    assert isinstance(fail, Fail)
    assert "did not begin in time" in fail.reason
    assert fail.peers == (peer_id(1),)


def test_a_leader_has_a_request_timeout_after_the_window_to_begin() -> None:
    """Its window may end a little later than ours, and its word is on its way."""
    play = following(1, setup=Setup(request_timeout_s=3.0))
    assert not any(isinstance(action, LeaveLeader) for action in play.wait(WINDOW_S + 2.9))
    assert LeaveLeader(peer_id(1)) in play.wait(WINDOW_S + 3.1)


def test_begin_ends_the_search() -> None:
    """Begin is taken from the leader that is followed."""
    play = following(1)
    assert play.hear(Answered(peer_id(1), BEGIN)) == [Enter(BEGIN), Withdraw()]
    assert play.machine.phase is SearchPhase.OVER
    assert play.machine.deadline() is None


def test_begin_without_having_been_accepted_is_not_taken() -> None:
    """A peer that begins out of turn is left."""
    play = Play()
    play.read(declared(1))
    assert LeaveLeader(peer_id(1)) in play.hear(Answered(peer_id(1), BEGIN))
    assert play.machine.phase is SearchPhase.LOOKING


@pytest.mark.parametrize(
    "event",
    [
        Answered(peer_id(9), JoinAccepted()),
        Answered(peer_id(9), JoinRefused("full", "")),
        LeaderLost(peer_id(9), ""),
        Answered(peer_id(9), BEGIN),
        Answered(peer_id(9), JoinRedirected(contact_of(3))),
    ],
)
def test_answers_of_others_are_ignored(event: Event) -> None:
    """Only the one that is asked can answer."""
    play = Play()
    play.read(declared(1))
    assert play.hear(event) == []
    assert play.machine.leader == peer_id(1)


def test_follower_cannot_become_our_leader() -> None:
    """A peer that we ask, and that joins us meanwhile, leads us no more, whatever it still says: no circle of two."""
    play = Play()
    play.read(declared(1))
    said = play.joins(1, expiration=MINE + 1)
    assert said[:2] == [LeaveLeader(peer_id(1)), Answer(peer_id(1), JoinAccepted())]
    play.hear(Answered(peer_id(1), JoinAccepted()))
    assert play.machine.phase is SearchPhase.LOOKING
    assert play.machine.followers == (peer_id(1),)


def test_a_client_that_we_ask_and_that_joins_us_does_not_lead_us() -> None:
    """Its key says nothing; it follows us, so it cannot be our leader as well."""
    play = Play()
    play.read(declared(1))
    assert play.joins(1, expiration=WALL_S, client=True)[0] == LeaveLeader(peer_id(1))
    play.hear(Answered(peer_id(1), JoinAccepted()))
    assert play.machine.followers == (peer_id(1),)


@pytest.mark.parametrize(("least", "blamed"), [(2, True), (3, False)])
def test_a_leader_with_too_few_peers_is_blamed_if_we_know_of_enough(least: int, blamed: bool) -> None:
    """It was shunned for an honest word: two that waited for a third one would never be in one group again."""
    play = Play(setup=Setup(min_group_size=least, deadline_s=60.0))
    play.settle(declared(3))
    play.hear(Answered(peer_id(3), JoinAccepted()), at=0.1)
    play.hear(Answered(peer_id(3), JoinRefused("too-few", "")), at=WINDOW_S)
    assert play.memory.leaders.idled == ([peer_id(3)] if blamed else [])
    play.others = (declared(3, MINE + 1),)
    assert (AskToLead in kinds(play.wait(2 * WINDOW_S))) is not blamed


def test_a_peer_that_asks_us_is_asked_although_it_followed_another_before() -> None:
    """Both said "you lead me" to each other, and neither asked again, until the next window."""
    play = Play()
    play.settle(declared(60))
    play.hear(Nudged(peer_id(60), JoinRedirected(contact_of(70))))  # what it had declared is of no use then
    play.hear(Answered(peer_id(70), JoinRefused("not-looking", "")))
    play.machine._window.expiration = MINE + WINDOW_S  # a window later
    said = play.joins(60, expiration=MINE)
    assert answers(said) == [JoinRefused("later", "you are earlier: lead me")]
    play.read(at=play.now)
    assert play.machine.leader == peer_id(60)


# ------------------------------------------------------------------------------------------------------------ starting


def test_starts_when_full() -> None:
    """At the target there is nothing to wait for, not even for our own declaration."""
    play = Play(setup=Setup(target_group_size=3))
    play.joins(60)
    assert play.joins(61) == [Answer(peer_id(61), JoinAccepted()), Start((peer_id(60), peer_id(61))), Withdraw()]


def test_starts_after_a_read_begun_after_the_quiet_time() -> None:
    """Not upon what was read, or began to be read, before the last join had been quiet for long enough."""
    play = Play(memory=Memory(companions=frozenset({peer_id(60), peer_id(ME)})))
    play.settle()
    play.wait(1.0)
    assert play.joins(60, at=1.0) == [Answer(peer_id(60), JoinAccepted()), ReadDirectory()]
    assert play.read(at=1.01) == []
    assert play.machine.deadline() == pytest.approx(1.05)
    assert play.hear(Tick(), at=1.05) == [ReadDirectory()]
    assert play.read(at=1.06) == [Start((peer_id(60),)), Withdraw()]


def test_does_not_start_before_its_own_declaration_is_stored() -> None:
    """A peer that declares at the same time must be able to find us, or we it."""
    play = Play(memory=Memory(companions=frozenset({peer_id(60)})))
    play.joins(3, expiration=MINE - 1, at=0.01)
    play.joins(60, at=0.01)
    play.hear(Answered(peer_id(3), JoinRefused("started", "")), at=1.0)
    play.hear(DirectoryRead(()), at=1.01)
    assert play.wait(1.5) == []
    play.read(at=1.5)
    assert Start in kinds(play.wait(1.7))


def test_join_during_the_read_asks_for_another() -> None:
    """The read must have begun after the last join."""
    play = Play(memory=Memory(companions=frozenset({peer_id(60), peer_id(61)})))
    play.settle()
    play.wait(1.0)
    play.joins(60, at=1.0)
    play.joins(61, at=1.0)
    play.wait(1.052)
    assert play.read_at == pytest.approx(1.06)
    play.hear(JoinEnded(peer_id(61)), at=1.055)
    play.joins(61, at=1.056)
    assert Start not in kinds(play.wait(1.10))
    assert Start in kinds(play.wait(1.12))


def test_waits_for_a_declarer_that_has_not_joined() -> None:
    """A peer in the directory is on its way; when it has joined or withdrawn, the group starts."""
    play = Play(memory=Memory(companions=frozenset({peer_id(60), peer_id(61)})))
    play.settle(declared(62))
    play.joins(60, at=1.0)
    play.joins(61, at=1.0)
    assert Start not in kinds(play.wait(2.0))
    play.others = ()
    assert Start in kinds(play.wait(3.1))


@pytest.mark.parametrize("gone", [PeerLost(peer_id(62)), Nudged(peer_id(62), None), Mismatched(peer_id(62), "differs")])
def test_does_not_wait_for_a_declarer_that_cannot_come(gone: Event) -> None:
    """A lost link, a nudge without answer, another schema: what was read suffices then."""
    play = Play(memory=Memory(companions=frozenset({peer_id(60)})))
    assert Nudge(contact_of(62), MINE) in play.settle(declared(62))
    play.joins(60, at=1.0)
    assert Start not in kinds(play.wait(1.3))
    if isinstance(gone, PeerLost):
        play.memory.lose(peer_id(62), MINE)
    assert play.hear(gone) == [Start((peer_id(60),)), Withdraw()]


def test_patience_with_a_declarer_that_lives_and_does_not_come_is_bounded() -> None:
    """A peer that answers but never joins does not hold up the others to the end of the window."""
    play = Play(setup=Setup(window_s=60.0, request_timeout_s=3.0), memory=Memory(companions=frozenset({peer_id(60)})))
    play.settle(declared(62, MINE + 60))
    play.joins(60, expiration=MINE + 60, at=1.0)
    play.hear(Nudged(peer_id(62), JoinRefused("later", "")))
    assert Start not in kinds(play.wait(3.0))
    assert Start in kinds(play.wait(4.5))


def test_quiet_time_is_long_while_a_companion_is_missing() -> None:
    """A member of the last group is likely to come; a lost one is not."""
    play = Play(memory=Memory(companions=frozenset({peer_id(60), peer_id(61)})))
    play.settle()
    play.joins(60, at=1.0)
    assert Start not in kinds(play.wait(1.4))
    play.memory.lose(peer_id(61), MINE)
    assert Start in kinds(play.hear(PeerLost(peer_id(61))) + play.wait(1.42))


@pytest.mark.parametrize(("gap_s", "quiet_s"), [(0.001, 0.065), (0.03, 0.24), (1.0, 0.5)])
def test_quiet_time_follows_the_gaps_between_joins(gap_s: float, quiet_s: float) -> None:
    """In a first group, peers that come with longer gaps are waited for longer, up to a limit."""
    play = Play(setup=Setup(window_s=60.0))
    play.settle()
    for number in range(60, 66):
        play.joins(number, expiration=MINE + 60, at=play.now + gap_s)
    last = play.now
    assert Start not in kinds(play.wait(last + quiet_s))
    assert Start in kinds(play.wait(last + quiet_s + 0.05))


def test_expected_peers_start_the_group_at_once_when_all_have_joined() -> None:
    """Nothing is read and nothing waited for."""
    expected = frozenset({peer_id(ME), peer_id(60), peer_id(61)})
    play = Play(expected=lambda: expected)
    play.settle()
    play.joins(60, at=1.0)
    assert play.joins(61, at=1.001)[1:] == [Start((peer_id(60), peer_id(61))), Withdraw()]


def asked(said: list[Action]) -> list[PeerID]:
    """The peers that these actions ask to lead."""
    return [action.contact.peer for action in said if isinstance(action, AskToLead)]


def hidden(*numbers: int) -> Play:
    """One that expects these, and finds nobody in the directory."""
    peers = {peer_id(number): contact_of(number) for number in numbers}
    play = Play(expected=lambda: frozenset(peers), contact=lambda peer: peers[peer])
    play.settle()
    return play


def test_an_expected_peer_that_the_directory_hides_is_asked() -> None:
    """After the longest quiet time, then twice a second: each in turn, so that none can keep us from the others."""
    play = hidden(40, 60, 61)
    assert asked(play.wait(0.49)) == []
    assert asked(play.wait(0.7)) == [peer_id(60)]
    play.hear(Answered(peer_id(60), JoinRefused("not-looking", "")))
    assert asked(play.wait(1.1)) == []
    assert asked(play.wait(1.2)) == [peer_id(61)]
    play.hear(LeaderLost(peer_id(61), "no answer"))
    assert asked(play.wait(1.8)) == [peer_id(40)]
    play.hear(Answered(peer_id(40), JoinRefused("not-looking", "")))
    assert asked(play.wait(2.4)) == [peer_id(60)]
    assert play.hear(Answered(peer_id(60), JoinRedirected(contact_of(40)))) == [AskToLead(contact_of(40), MINE)]


def test_nobody_is_asked_while_the_directory_shows_an_expected_peer_or_one_has_come() -> None:
    """A later declarer will come, and a follower has found us: nothing is hidden."""
    play = hidden(60, 61)
    play.others = (declared(60, MINE + 1),)
    assert asked(play.wait(2.0)) == []
    play = hidden(60, 61)
    play.joins(60)
    assert asked(play.wait(2.0)) == []


def test_a_hidden_peer_without_an_address_is_not_asked() -> None:
    """A client leads nobody."""
    play = Play(expected=lambda: frozenset({peer_id(60)}))
    play.settle()
    assert asked(play.wait(2.0)) == []


def test_expected_peers_are_waited_for_to_the_end_of_the_window() -> None:
    """The usual rule does not start the group without them."""
    expected = frozenset({peer_id(60), peer_id(61)})
    play = Play(expected=lambda: expected)
    play.settle()
    play.joins(60, at=1.0)
    assert Start not in kinds(play.wait(WINDOW_S - 0.001))
    assert play.hear(Tick(), at=WINDOW_S) == [Start((peer_id(60),)), Withdraw()]


def test_lost_peers_are_expected_no_more() -> None:
    """When the last one that is missing dies, the group starts."""
    expected = frozenset({peer_id(60), peer_id(61)})
    play = Play(expected=lambda: expected)
    play.settle()
    play.joins(60, at=1.0)
    play.memory.lose(peer_id(61), MINE)
    assert play.hear(PeerLost(peer_id(61)), at=1.1) == [Start((peer_id(60),)), Withdraw()]


def test_change_of_mind_about_who_is_expected_is_noticed() -> None:
    """`expected` is asked again and again, also when nothing else happens."""
    answers = [frozenset({peer_id(60), peer_id(61)})]
    play = Play(expected=lambda: answers[-1])
    play.settle()
    play.joins(60, at=1.0)
    answers.append(frozenset({peer_id(60)}))
    assert Start((peer_id(60),)) in play.wait(1.2)


def test_window_end_starts_with_who_is_there() -> None:
    """Enough is enough when the window ends."""
    play = Play(setup=Setup(window_s=WINDOW_S, request_timeout_s=WINDOW_S))
    play.settle(declared(70, MINE + 60))
    play.joins(60, at=1.0)
    assert Start not in kinds(play.wait(1.5))
    play.others = (declared(70, MINE + 60), declared(71, MINE + 60))
    assert Start not in kinds(play.wait(4.99))
    assert play.hear(Tick(), at=WINDOW_S) == [Start((peer_id(60),)), Withdraw()]


def test_follower_that_left_is_not_in_the_group() -> None:
    """A closed stream, a Leave and a lost link count alike."""
    play = Play()
    play.settle()
    for number in (60, 61, 62):
        play.joins(number, at=1.0)
    play.hear(JoinEnded(peer_id(60)))
    play.hear(PeerLost(peer_id(61)))
    assert Start((peer_id(62),)) in play.hear(Tick(), at=WINDOW_S)


def test_group_without_reducer_does_not_start() -> None:
    """All clients or bandwidth 0: said clearly, at the end of the window."""
    play = Play(setup=Setup(reduces=False, window_s=WINDOW_S))
    play.settle()
    play.joins(60, reduces=False, at=1.0)
    play.joins(61, client=True, at=1.0)
    said = play.wait(WINDOW_S)
    assert [answer.code for answer in answers(said) if isinstance(answer, JoinRefused)] == ["no-reducer", "no-reducer"]
    fail = said[-1]
    assert isinstance(fail, Fail)
    assert fail.reason.startswith("nobody in the group can reduce")


def test_full_group_without_reducer_fails_at_once() -> None:
    """Nobody else can come in to mend it."""
    play = Play(setup=Setup(target_group_size=2, reduces=False))
    assert isinstance(play.joins(60, reduces=False)[-1], Fail)


def test_group_with_a_reducer_among_followers_starts() -> None:
    """The leader itself need not reduce."""
    play = Play(setup=Setup(target_group_size=2, reduces=False))
    assert Start((peer_id(60),)) in play.joins(60)


def test_group_of_one_is_possible_if_allowed() -> None:
    """With min_group_size 1 a peer that is alone starts alone, after looking."""
    play = Play(setup=Setup(min_group_size=1, window_s=WINDOW_S))
    play.settle()
    assert Start(()) in play.wait(1.0)


# -------------------------------------------------------------------------------------------------------------- ending


def test_window_end_with_too_few_declares_anew() -> None:
    """Followers are sent away first: a key changes only while nobody follows."""
    play = Play(setup=Setup(min_group_size=3, window_s=WINDOW_S, deadline_s=20.0))
    play.settle()
    play.joins(60, at=1.0)
    play.wait(4.999)
    said = play.hear(Tick(), at=WINDOW_S)
    assert said[0] == Answer(peer_id(60), JoinRefused("too-few", "the window ended with 2 of at least 3 peers"))
    assert Declare(MINE + WINDOW_S) in said
    assert play.machine.followers == ()
    assert play.machine.key == (False, MINE + WINDOW_S, peer_id(ME))


def test_last_window_ends_with_the_deadline() -> None:
    """No window goes beyond it."""
    play = Play(setup=Setup(window_s=WINDOW_S, deadline_s=7.0))
    play.settle()
    assert Declare(WALL_S + 7.0) in play.wait(WINDOW_S)
    assert isinstance(play.wait(7.0)[-1], Fail)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([], "no group within 7.0 s: the peer that was asked to lead gave no answer"),
        (
            [Answered(peer_id(1), JoinAccepted())],
            "no group within 7.0 s: the peer that was asked to lead did not begin",
        ),
    ],
)
def test_deadline_ends_a_search_that_found_a_leader(answers: list[Event], reason: str) -> None:
    """Whatever the leader promised: there is no time left for a round. It is told that we are gone."""
    play = Play(setup=Setup(window_s=6.0, deadline_s=7.0))
    play.settle()
    play.wait(6.5)
    play.read(declared(1))
    assert play.machine.leader == peer_id(1)
    for answer in answers:
        play.hear(answer)
    assert play.machine.over_at == 7.0
    said = play.hear(Tick(), at=7.0)
    assert said[0] == LeaveLeader(peer_id(1))
    assert Fail(reason, (peer_id(1),)) in said


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([], "no group within 5.0 s: nobody else is looking for one"),
        ([join(60)], "no group within 5.0 s: the window ended with 2 of at least 3 peers"),
        (
            [join(3), Answered(peer_id(3), JoinRefused("started", "the group has started"))],
            "no group within 5.0 s: refused by the peer that was asked to lead: the group has started",
        ),
        (
            [join(3), LeaderLost(peer_id(3), "no answer within 3 s")],
            "no group within 5.0 s: the peer that was to lead is gone: no answer within 3 s",
        ),
    ],
)
def test_failure_says_why(events: list[Event], reason: str) -> None:
    """Nobody there, too few, refused by whom: the caller can tell."""
    play = Play(setup=Setup(min_group_size=3, window_s=WINDOW_S))
    play.settle()
    for event in events:
        play.hear(event)
    fail = play.wait(WINDOW_S)[-1]
    assert isinstance(fail, Fail)
    assert fail.reason == reason
    assert fail.peers == ((peer_id(3),) if "peer that was" in reason else ())


@pytest.mark.parametrize(
    "event",
    [Mismatched(peer_id(60), "tensor 3 differs"), Answered(peer_id(1), JoinRefused("schema", "tensor 3 differs"))],
)
def test_only_other_schemas_is_a_mismatch_by_name(event: Mismatched | Answered) -> None:
    """Said when the first window ends, however long the deadline is."""
    play = Play(setup=Setup(window_s=WINDOW_S, deadline_s=300.0))
    play.settle(*[declared(1)] * isinstance(event, Answered))
    play.hear(event)
    fail = play.wait(WINDOW_S)[-1]
    assert fail == Fail("tensor 3 differs", (event.peer,), mismatch=True)


def test_other_schemas_beside_equal_ones_are_no_mismatch() -> None:
    """A peer that met one of its kind failed for another reason."""
    play = Play(setup=Setup(min_group_size=3, window_s=WINDOW_S))
    play.settle()
    play.joins(60)
    play.hear(Mismatched(peer_id(61), "tensor 3 differs"))
    fail = play.wait(WINDOW_S)[-1]
    assert isinstance(fail, Fail)
    assert not fail.mismatch


def test_cancel_tells_everybody() -> None:
    """Followers are refused, the leader is left, the declaration withdrawn, and nothing comes after."""
    play = Play()
    play.settle()
    play.joins(60)
    said = play.hear(Cancel())
    assert kinds(said) == [JoinRefused, Withdraw]
    assert play.hear(Tick(), at=10.0) == []
    play = following(1)
    assert play.hear(Cancel()) == [LeaveLeader(peer_id(1)), Withdraw()]


# -------------------------------------------------------------------------------------------------------------- clients


def client() -> Setup:
    """How a client forms groups."""
    return Setup(leads=False, reduces=False, window_s=WINDOW_S)


def test_client_never_declares_and_asks_the_earliest_of_all() -> None:
    """Its own place in the order is the last."""
    play = Play(setup=client())
    assert play.first == [ReadDirectory()]
    said = play.hear(DirectoryRead((declared(70, MINE + 9), declared(60, MINE + 5))))
    assert said == [AskToLead(contact_of(60), MINE)]


def test_client_leads_nobody() -> None:
    """A peer that asks it is refused."""
    play = Play(setup=client())
    assert kinds(play.joins(60))[0] is JoinRefused
    assert play.machine.followers == ()


# --------------------------------------------------------------------------------------------------------------- nudges


def test_next_later_declarer_is_nudged_at_once_and_the_others_a_little_later() -> None:
    """The next one may lead those that belong to us; most others are on their way."""
    play = Play()
    said = play.settle(declared(60), declared(61), declared(62))
    assert [action for action in said if isinstance(action, Nudge)] == [Nudge(contact_of(60), MINE)]
    said = play.wait(play.now + 0.08)
    assert [action for action in said if isinstance(action, Nudge)] == [
        Nudge(contact_of(61), MINE),
        Nudge(contact_of(62), MINE),
    ]


def test_nudges_are_few_at_a_time_and_never_repeated() -> None:
    """Sixty declarers are not all asked at once."""
    play = Play(setup=Setup(window_s=60.0))
    others = [declared(number, MINE + 60) for number in range(60, 90)]
    play.settle(*others)
    assert kinds(play.wait(play.now + 0.2)).count(Nudge) == 3  # and the one that was nudged at once
    again = play.hear(Nudged(peer_id(60), JoinRefused("later", "")))
    assert [action for action in again if isinstance(action, Nudge)] == [Nudge(contact_of(64), WALL_S + 60.0)]


def test_nudged_peer_that_follows_another_leads_to_that_one() -> None:
    """Two leaders that do not see each other in the directory meet through a follower."""
    play = Play()
    play.settle(declared(60))
    said = play.hear(Nudged(peer_id(60), JoinRedirected(contact_of(70))))
    assert said == [AskToLead(contact_of(70), MINE)]


def test_lost_peer_is_heard_again() -> None:
    """A peer that asks us is alive, even if it was taken for dead."""
    play = Play(memory=Memory(lost={peer_id(60): MINE + 100}))
    play.joins(60)
    assert play.memory.lost == {}


def test_memory_of_declarations_is_bounded() -> None:
    """Keys are free: neither the directory, nor peers that ask us, fill the memory."""
    play = Play()
    play.settle(*(declared(number) for number in range(60, 5000)))
    known = play.machine._known
    for number in range(60, 5000):
        known.hear(declared(number), 0.0)
        known.spend(peer_id(number), 0.0)
    assert [len(each) for each in (known._listed, known._heard, known._spent)] == [1024, 1024, 4096]


def test_memory_of_lost_peers_is_bounded() -> None:
    """A crowd that comes and goes does not fill the memory."""
    memory = Memory()
    for number in range(5000):
        memory.lose(peer_id(number), 1.0)
    assert len(memory.lost) <= 1024
