"""Who follows a peer that has gone on from our state, and who makes its own step first."""

from __future__ import annotations

from collections.abc import Collection
from copy import deepcopy
from dataclasses import replace

from shoal.base.peer import PeerID
from shoal.protocol.wire import Contact, Progress
from shoal.run.decide.agreement import Contributor
from shoal.run.decide.committed import Committed
from shoal.run.decide.forerunners import Forerunners
from shoal.run.view.progress import StateKey, SwarmView

PEERS = [PeerID(bytes([number]) * 32) for number in range(1, 7)]
ME, SECOND, THIRD, FIRST, STRANGER, OTHER_STRANGER = PEERS
OURS, THEIRS = StateKey.of(10, 640, b"a" * 32), StateKey.of(11, 656, b"b" * 32)
GIVES, EPOCH_S = 16, 2.0


def committed(gave: Collection[PeerID]) -> Committed:
    """Three steps to which each of these gave as much."""
    step = [Contributor(peer, GIVES, None, bytes(3) + peer.to_bytes()[:1], 3) for peer in gave]
    return Committed([step] * 3)


def word(peer: PeerID, key: StateKey, samples: int = 0) -> Progress:
    """The word of a peer that is at this state, and says that it has so many samples."""
    digest = bytes(255 - each for each in key.inverted_digest)
    return Progress(Contact(peer), key.epoch, digest, key.samples, samples, 8.0, 0.0, {})


class Scene:
    """Four contributors were at our state; then somebody went ahead."""

    def __init__(self, contributors: Collection[PeerID] = PEERS[:4]) -> None:
        self.forerunners, self.committed = Forerunners(ME), committed(contributors)
        self.deaf: set[PeerID] = set()
        self.idle = frozenset[PeerID]()
        self.target: int | None = 1
        self.see(dict.fromkeys(PEERS, OURS))

    def see(
        self,
        at: dict[PeerID, StateKey],
        *,
        own: StateKey = OURS,
        held: int = GIVES,
        now: float = 0.0,
        claims: int = 0,
    ) -> bool:
        """Whether this peer stays, where the others are at these states, after a look at them."""
        view = self.view(at, own, claims)
        self.forerunners.observe(view, own=own, committed=self.committed, now=now)
        return self.stays(view, own=own, held=held, now=now)

    def view(self, at: dict[PeerID, StateKey], own: StateKey = OURS, claims: int = 0) -> SwarmView:
        """The swarm where the others are at these states, and claim to have so many samples."""
        others = {peer: word(peer, key, claims) for peer, key in at.items() if peer != ME}
        best = max(own, *at.values())
        here = frozenset({ME, *(peer for peer in others if at[peer] == own)})
        return SwarmView(tuple(at), here, frozenset(), 0, 0.0, best.epoch, best != own, best=best, others=others)

    def stays(self, view: SwarmView, *, own: StateKey = OURS, held: int = GIVES, now: float = 0.0) -> bool:
        """Whether this peer stays, by what was seen so far."""
        return self.forerunners.steps_first(
            view,
            own=own,
            committed=self.committed,
            held=held,
            target=self.target,
            hears=lambda peer: peer not in self.deaf,
            idle=self.idle,
            epoch_s=EPOCH_S,
            now=now,
        )


HERE = dict.fromkeys(PEERS[:3], OURS)


def test_most_peers_at_a_state_make_their_own_step_before_they_follow_one_that_stepped_alone() -> None:
    """All of them followed, gave up what they had trained, and came late to its next step, for ever."""
    assert Scene().see({**HERE, FIRST: THEIRS})


def test_they_follow_when_their_round_failed_or_twice_an_epoch_has_passed() -> None:
    """A round that failed before anybody was ahead says nothing."""
    scene, ahead = Scene(), {**HERE, FIRST: THEIRS}
    scene.forerunners.round_failed()
    assert scene.see(ahead, now=5.0)
    assert scene.see(ahead, now=5.0 + 2 * EPOCH_S - 0.1)
    assert not scene.see(ahead, now=5.0 + 2 * EPOCH_S)
    scene = Scene()
    assert scene.see(ahead)
    scene.forerunners.round_failed()
    assert not scene.see(ahead)


def test_a_peer_that_most_left_behind_or_that_has_nothing_follows_at_once() -> None:
    """So does one of two, and one whose own step would not be the better state."""
    assert not Scene().see({ME: OURS, SECOND: THEIRS, THIRD: THEIRS, FIRST: THEIRS}, held=1000)
    assert not Scene().see({ME: OURS, SECOND: OURS, THIRD: THEIRS, FIRST: THEIRS}, held=1000)
    assert not Scene((ME, FIRST)).see({ME: OURS, FIRST: THEIRS}, held=1000)
    assert not Scene().see({**HERE, FIRST: THEIRS}, held=0)
    assert not Scene().see({**HERE, FIRST: StateKey.of(11, 640 + 3 * GIVES, b"b" * 32)})


def test_one_of_two_gave_up_each_step_for_a_peer_that_no_round_brings_it_together_with() -> None:
    """That one stepped alone, a moment earlier each time. While nobody counts on it, a small lead is not followed."""
    step = StateKey.of(11, 640 + GIVES, b"b" * 32)
    for contributors in ((ME, FIRST), (FIRST,)):
        scene = Scene(contributors)
        scene.forerunners.round_failed()
        assert not scene.see({ME: OURS, FIRST: step})
        scene.idle = frozenset({FIRST})
        assert scene.see({ME: OURS, FIRST: step})
        assert not scene.see({ME: OURS, FIRST: step, SECOND: step})
        assert not scene.see({ME: OURS, FIRST: StateKey.of(12, 640 + 2 * GIVES + 1, b"b" * 32)})
        assert not scene.see({ME: OURS, FIRST: step}, now=2 * EPOCH_S)


def test_thousandths_of_a_way_are_no_samples() -> None:
    """Peers that merge say how far they are: that was taken for samples, up to twice what they give."""
    scene, ahead = Scene(), {**HERE, FIRST: StateKey.of(11, 640 + 3 * GIVES, b"b" * 32)}
    assert scene.see(ahead, claims=2 * GIVES)
    scene.target = None
    assert not scene.see(ahead, claims=2 * GIVES)


def test_strangers_and_peers_that_are_not_connected_hold_nobody_back() -> None:
    """A new key costs nothing, whatever it claims to have."""
    ahead = {ME: OURS, SECOND: THEIRS, FIRST: THEIRS, STRANGER: OURS, OTHER_STRANGER: OURS}
    assert not Scene().see(ahead, claims=2**40)
    scene = Scene()
    scene.deaf = {SECOND, THIRD}
    assert not scene.see({**HERE, FIRST: THEIRS})


def test_other_branches_and_averages_of_states_are_followed_at_once() -> None:
    """Else two branches of one size, each of which is ahead after its own steps, would not come together."""
    apart = StateKey.of(12, 700, b"c" * 32)
    scene = Scene()
    assert not scene.see({**HERE, FIRST: THEIRS}, own=apart._replace(samples=650))  # nobody was here
    assert not Scene().see({**HERE, FIRST: StateKey.of(10, 641, b"b" * 32)})


def test_a_peer_that_does_not_come_to_a_better_state_is_not_followed_for_less_than_a_step() -> None:
    """It never hears of ours, or does not care. Whenever it was ahead, between two steps, all gave up what they had."""
    scene, ours = Scene(), [StateKey.of(10 + number, 640 + 48 * number, b"a%d" % number * 16) for number in range(4)]
    alone = [StateKey.of(11 + number, 656 + 16 * number, b"b%d" % number * 16) for number in range(12)]

    def at(own: int, first: int) -> dict[PeerID, StateKey]:
        return {**dict.fromkeys(PEERS[:3], ours[own]), FIRST: alone[first]}

    scene.see(dict.fromkeys(PEERS, ours[0]), own=ours[0])
    assert scene.see(at(0, 1), own=ours[0])
    scene.see(at(1, 1), own=ours[1])
    assert scene.see(at(1, 4), own=ours[1]), "48 samples were overtaken by 80, where 96 are near"
    assert not scene.see(at(1, 5), own=ours[1]), "by 96"
    scene.see({**at(1, 1), FIRST: ours[1]}, own=ours[1])
    assert scene.see(at(2, 7), own=ours[2], held=0), "it had come to ours, and has left it again"
    assert not scene.see(at(3, 9), own=ours[3]), "it was ahead after two steps of ours"


def test_a_step_takes_the_samples_that_it_waits_for() -> None:
    """Three peers that have 36 of 48 samples followed one that made 48 alone, as less than 48 were known of theirs."""
    scene, lead = Scene(), 4 * GIVES
    scene.target = lead
    ahead = {**HERE, FIRST: StateKey.of(11, 640 + lead, b"b" * 32)}
    assert scene.see(ahead)
    assert not scene.see({**HERE, FIRST: StateKey.of(12, 640 + lead + 1, b"c" * 32)})
    scene.target = None
    assert not scene.see(ahead)
    scene.target, scene.deaf = lead, {SECOND, THIRD}
    scene.committed = committed([ME])
    assert not scene.see(ahead, held=3 * GIVES), "one peer alone may never have as many"


def test_of_two_states_with_as_many_samples_that_of_most_peers_is_not_left() -> None:
    """Of equal states the digest decides: half of the steps of most peers were given up for those of one."""
    scene, ours = Scene(), StateKey.of(11, 688, b"z" * 32)
    scene.see({**dict.fromkeys(PEERS[:3], ours), FIRST: OURS}, own=ours)
    equal = StateKey.of(11, 688, b"b" * 32)
    assert equal > ours
    assert scene.see({**dict.fromkeys(PEERS[:3], ours), FIRST: equal}, own=ours)


def test_of_two_halves_that_step_apart_each_follows_the_better_one() -> None:
    """After steps of its own each half has all weight at its state: neither would ever follow."""
    scene, own = Scene(), StateKey.of(11, 672, b"h" * 32)
    apart = {ME: own, SECOND: own, THIRD: OURS, FIRST: OURS}
    scene.see(apart, own=own)
    scene.committed = committed([ME, SECOND])
    better = StateKey.of(12, 690, b"o" * 32)
    assert not scene.see({**apart, THIRD: better, FIRST: better}, own=own)


def test_samples_that_are_known_count_in_place_of_those_of_the_last_steps() -> None:
    """But of nobody more than is believed of it."""
    ahead = {**HERE, FIRST: StateKey.of(11, 640 + 3 * GIVES, b"b" * 32)}
    assert Scene().see(ahead, claims=GIVES + 1)
    scene, far = Scene(), {**HERE, FIRST: StateKey.of(11, 640 + 6 * GIVES, b"b" * 32)}
    assert not scene.see(far, claims=2**40)
    scene.committed = replace(scene.committed)
    assert max(scene.committed.believed.values()) == 2 * GIVES


def test_a_question_changes_nothing() -> None:
    """It began the time for which this peer stays, and what it had seen last stood beside the view, for others."""
    scene, view = Scene(), Scene().view({**HERE, FIRST: THEIRS})
    before = deepcopy(vars(scene.forerunners))
    assert scene.stays(view, now=5.0)
    assert vars(scene.forerunners) == before
    assert not scene.stays(view, own=THEIRS), "nobody was seen at that state yet"
