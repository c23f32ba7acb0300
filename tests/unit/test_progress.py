"""Where the swarm stands: the order of states, who counts, who is behind, when the run ends."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest

from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Contact, Progress, Standing
from shoal.run.view.progress import Farewell, StateKey, SwarmProgress, SwarmView, settings_difference

ME, ANN, BEN, CAT, DAN = (PeerID(bytes([number]) * 32) for number in (1, 2, 3, 4, 5))
DIGESTS = [bytes([number]) * 32 for number in range(4)]


def said(peer: PeerID, *, client: bool = False, **changes: Any) -> Progress:
    """What a peer says of itself; at epoch 5 with digest 0 unless changed. A client cannot be dialed."""
    values: dict[str, Any] = {
        "epoch": 5,
        "digest": DIGESTS[0],
        "branch_samples": 1000,
        "done": 10,
        "rate": 2.0,
        "time": 100.0,
        "settings": {},
        "end_epoch": None,
    }
    addresses = () if client else (Address("10.0.0.1", 4000, peer),)
    return Progress(Contact(peer, addresses), **(values | changes))


def swarm(ttl_s: float = 20.0, **settings: str) -> SwarmProgress:
    """As `ME` knows it: nobody yet."""
    return SwarmProgress(ME, settings, ttl_s=ttl_s)


def view(known: SwarmProgress, now: float = 0.0, **changes: Any) -> SwarmView:
    """Seen by `ME`."""
    return known.view(said(ME, **changes), now)


# ------------------------------------------------------------------------------------------------------------ StateKey


def test_states_are_ordered_by_samples_then_epoch_then_lower_digest() -> None:
    """All pairs of a grid, against the order as it is written in the documentation."""
    grid = list(itertools.product((0, 1, 2), (0, 7, 10**15), (b"\x00" * 32, b"\x00" * 31 + b"\x01", b"\xff" * 32)))
    in_words = sorted(grid, key=lambda state: (state[0] > 0, state[1], state[0], [-byte for byte in state[2]]))
    assert sorted(grid, key=lambda state: StateKey.of(*state)) == in_words
    assert len({StateKey.of(*state) for state in grid}) == len(grid)


# ----------------------------------------------------------------------------------------------------- together, behind


def test_alone_the_swarm_is_this_peer() -> None:
    """Nobody else: own samples, own rate, nobody to learn from."""
    seen = view(swarm(), done=30, rate=1.5)
    assert seen == SwarmView(
        peers=(ME,),
        together=frozenset({ME}),
        coming=frozenset(),
        done=30,
        rate=1.5,
        epoch=5,
        behind=False,
    )


def test_who_was_in_our_round_is_together_with_us_until_it_names_another_state() -> None:
    """It says what it said before the round: it is coming, and its samples count when it is here."""
    known, mine, before = swarm(), said(ME, digest=DIGESTS[3], epoch=6), StateKey.of(5, 1000, DIGESTS[0])
    known.heard(said(ANN, done=100), 0.0)
    seen = known.view(mine, 0.0, awaited=frozenset({ME, ANN, BEN}), before=before)
    assert (seen.together, seen.coming, seen.done) == (frozenset({ME, ANN}), frozenset({ANN}), 10)
    assert known.view(mine, 0.0).together == {ME}
    known.heard(said(ANN, digest=DIGESTS[3], epoch=6, done=20, time=101.0), 1.0)
    seen = known.view(mine, 1.0, awaited=frozenset({ANN}), before=before)
    assert (seen.together, seen.coming, seen.done) == (frozenset({ME, ANN}), frozenset(), 30)


@pytest.mark.parametrize("other", [{"branch_samples": 1001}, {"digest": b"\x00" * 31 + b"\x01"}, {"epoch": 6}])
def test_who_names_a_state_after_the_round_that_is_not_ours_is_not_on_its_way(other: dict[str, Any]) -> None:
    """Its step was interrupted, or it took another one: it will download, and nobody waits for that."""
    known, before = swarm(), StateKey.of(5, 1000, b"\x01" * 32)
    known.heard(said(ANN, **{"digest": DIGESTS[2]} | other), 0.0)
    mine = said(ME, digest=DIGESTS[3], epoch=7)
    assert known.view(mine, 0.0, awaited=frozenset({ANN}), before=before).together == {ME}


def test_samples_and_rates_of_one_state_add_up() -> None:
    """Those at other states of the same epoch do not count; negative rates are none."""
    known = swarm()
    known.heard(said(ANN, done=100, rate=5.0), 0.0)
    known.heard(said(BEN, done=1000, rate=50.0, digest=DIGESTS[3], branch_samples=1), 0.0)
    known.heard(said(CAT, done=7, rate=-3.0), 0.0)
    seen = view(known)
    assert seen.peers == (ME, ANN, BEN, CAT)
    assert seen.together == {ME, ANN, CAT}
    assert (seen.done, seen.rate) == (117, 7.0)
    assert not seen.behind


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ({"epoch": 4, "branch_samples": 1001, "digest": DIGESTS[3]}, {"epoch": 5}),
        ({"epoch": 6, "digest": DIGESTS[3]}, {"epoch": 5}),
        ({"epoch": 1, "branch_samples": 1, "digest": DIGESTS[3]}, {"epoch": 0, "branch_samples": 10**9}),
        ({"branch_samples": 1001, "digest": DIGESTS[3]}, {"branch_samples": 1000, "digest": DIGESTS[0]}),
        ({"digest": DIGESTS[1]}, {"digest": DIGESTS[2]}),
    ],
)
def test_of_two_states_one_is_behind(better: dict[str, Any], worse: dict[str, Any]) -> None:
    """More samples, else the later epoch, else the lower digest; one without a step is the worst. All find the same."""
    known = swarm()
    known.heard(said(ANN, **better), 0.0)
    seen = view(known, **worse)
    assert (seen.behind, seen.leaders) == (True, (ANN,))
    assert seen.epoch == better.get("epoch", 5)
    assert seen.together == {ME}
    known = swarm()
    known.heard(said(ANN, **worse), 0.0)
    seen = view(known, **better)
    assert (seen.behind, seen.leaders) == (False, ())
    assert seen.epoch == better.get("epoch", 5)


def test_what_contributors_say_comes_before_what_strangers_say() -> None:
    """A better state of theirs is the best one, though others name a later one; if they have none, it is the latest."""
    known, mine = swarm(), said(ME)
    known.heard(said(ANN, epoch=6, digest=DIGESTS[2]), 0.0)
    known.heard(said(BEN, epoch=999, digest=DIGESTS[3]), 0.0)
    seen = known.view(mine, 0.0)
    assert (seen.epoch, seen.leaders, seen.vouched) == (999, (BEN,), False)
    known.contributed({ANN, ME})
    seen = known.view(mine, 0.0)
    assert (seen.epoch, seen.leaders, seen.vouched) == (6, (ANN,), True)
    states = {ANN: StateKey.of(6, 1000, DIGESTS[2]), BEN: StateKey.of(999, 1000, DIGESTS[3])}
    assert known.better(mine, 0.0) == states
    known.heard(said(ANN, epoch=4, time=101.0), 1.0)
    seen = known.view(mine, 1.0)
    assert (seen.epoch, seen.leaders, seen.vouched, seen.behind) == (999, (BEN,), False, True)


def test_samples_of_strangers_are_believed_up_to_those_of_contributors() -> None:
    """Before there is any contributor all are; who is not waited for brings none."""
    known = swarm()
    known.heard(said(ANN, done=20), 0.0)
    known.heard(said(BEN, done=10**12), 0.0)
    known.heard(said(CAT, done=5), 0.0)
    mine = said(ME, done=10)
    assert known.view(mine, 0.0).done == 10**12 + 35
    assert known.view(mine, 0.0, absent={BEN}).done == 35
    known.contributed({ME, ANN})
    assert known.view(mine, 0.0).done == 60
    assert known.view(mine, 0.0, absent={BEN}).done == 35


def test_strangers_are_not_believed_what_they_tell_of_others() -> None:
    """Else one that stands at our state could give contributors any number of samples."""
    known, mine = swarm(), said(ME, done=10)
    known.heard(said(ANN, done=20), 0.0, direct=False)
    known.contributed({ME, ANN, CAT})
    assert not known.relayed(said(BEN), [Standing(ANN, 10**12, 101.0)], 0.0)
    assert known.view(mine, 0.0).done == 30
    assert known.relayed(said(CAT), [Standing(ANN, 25, 101.0)], 0.0)
    assert known.view(mine, 0.0).done == 35


def test_leaders_are_those_at_the_best_state_only() -> None:
    """Better than ours is not enough."""
    known = swarm()
    known.heard(said(CAT, epoch=7, digest=DIGESTS[2]), 0.0)
    known.heard(said(ANN, epoch=6, digest=DIGESTS[1]), 0.0)
    known.heard(said(BEN, epoch=7, digest=DIGESTS[2]), 0.0)
    assert view(known).leaders == (BEN, CAT)
    known.lost(CAT, 0.0)
    known.lost(BEN, 0.0)
    assert view(known).leaders == (ANN,)
    assert view(known, epoch=6, digest=DIGESTS[1]).leaders == (ANN,)  # at our own state now
    assert not view(known, epoch=6, digest=DIGESTS[1]).behind


def test_a_state_that_only_clients_hold_holds_nobody_up() -> None:
    """Nobody can download it: the others go on with theirs, and count the samples that are there for it."""
    known = swarm()
    known.heard(said(ANN, client=True, epoch=6, digest=DIGESTS[1]), 0.0)
    known.heard(said(BEN, done=5), 0.0)
    seen = view(known)
    assert (seen.behind, seen.epoch, set(seen.together)) == (False, 5, {ME, BEN})
    known.heard(said(BEN, epoch=6, digest=DIGESTS[1], time=101.0), 0.0)
    seen = view(known)
    assert (seen.behind, seen.epoch, seen.leaders) == (True, 6, (BEN, ANN))  # who can be dialed comes first


def test_a_state_that_nobody_gives_holds_nobody_up_for_long() -> None:
    """After two tries it does not count for a minute, then for twice as long each time; and at once if it was given."""
    known, now = swarm(ttl_s=1e6), 0.0
    known.heard(said(ANN, epoch=50, digest=DIGESTS[1]), now)
    known.heard(said(BEN), now)
    assert view(known, now).leaders == (ANN,)
    known.note_withheld([ANN], now)
    assert view(known, now).behind
    for aside_s in (60.0, 120.0, 240.0, 480.0, 960.0, 960.0):
        known.note_withheld([ANN], now)
        for passed_s in (0.0, aside_s - 0.1):
            seen = view(known, now + passed_s)
            assert (seen.behind, seen.epoch, set(seen.together)) == (False, 5, {ME, BEN})
        now += aside_s
        assert view(known, now).behind
    known.note_withheld([ANN], now)
    known.note_given([ANN])
    assert view(known, now).leaders == (ANN,)
    known.note_withheld([ANN], now)
    assert view(known, now).behind


def test_a_client_that_went_on_alone_comes_back() -> None:
    """Its own state is better, and nobody else will ever have it; unless it was made together with others."""
    known = swarm()
    known.heard(said(ANN), 0.0)
    mine = said(ME, client=True, epoch=6, digest=DIGESTS[1])
    alone, together = known.view(mine, 0.0, shared=False), known.view(mine, 0.0, shared=True)
    assert (alone.behind, alone.epoch, alone.leaders) == (True, 5, (ANN,))
    assert (together.behind, together.epoch) == (False, 6)
    node = said(ME, epoch=6, digest=DIGESTS[1])
    assert not known.view(node, 0.0, shared=False).behind


def test_samples_of_the_future_do_not_count_here() -> None:
    """A peer one epoch ahead accumulates for another step."""
    known = swarm()
    known.heard(said(ANN, epoch=6, digest=DIGESTS[1], done=500), 0.0)
    seen = view(known, done=3)
    assert seen.done == 3
    assert seen.behind


def test_the_end_of_a_run_that_was_killed_is_not_the_end_of_the_next_one() -> None:
    """Its record still lies in the DHT, and nobody renews it. Of who is alive the word counts, also by the DHT."""
    known = swarm()
    for peer in (ANN, BEN):
        assert known.heard(said(peer, end_epoch=9), 0.0, direct=False)
        assert not known.heard(said(peer, end_epoch=9), 1.0, direct=False)
    assert known.ends == {}
    assert known.heard(said(BEN, end_epoch=9, time=102.0), 2.0, direct=False)
    assert known.ends == {BEN: 9}
    known.lost(BEN, 0.0)
    assert known.ends == {}
    assert known.heard(said(ANN, end_epoch=8, time=103.0), 3.0)
    assert known.heard(said(CAT, time=103.0), 3.0)
    assert known.ends == {ANN: 8, CAT: None}


# ------------------------------------------------------------------------------------------------- who counts, and when


def test_who_left_counts_no_more_whatever_is_read_of_it_later() -> None:
    """Its last words may come after its farewell, and lie in the DHT. It may come again."""
    known = swarm()
    known.heard(said(ANN, time=100.0), 0.0)
    assert known.heard(said(ANN, time=101.0, left=True, end_epoch=3), 1.0)
    assert not known.heard(said(ANN, time=101.0, left=True), 1.5, direct=False)
    assert not known.heard(said(ANN, time=100.9), 2.0)
    seen = view(known, now=2.0)
    assert (seen.peers, known.ends) == ((ME,), {})
    assert known.heard(said(ANN, time=103.0), 3.0)
    assert view(known, now=3.0).peers == (ME, ANN)


def test_a_farewell_says_whether_the_run_was_ended() -> None:
    """At its end, and of one that was known here: else it may be of an earlier run of the same name."""
    known, left = swarm(), dict[PeerID, Farewell]()
    for peer in (ANN, BEN):
        known.heard(said(peer, time=100.0), 0.0)
    known.lost(BEN, 0.5)
    for peer, end in ((ANN, 7), (BEN, 6), (CAT, 6)):
        word = said(peer, epoch=6, time=200.0, left=True, end_epoch=end)
        known.heard(word, 1.0, direct=False)
        left[peer] = Farewell(6, word.digest, ended=peer == BEN)
    assert known.left == left


def test_who_left_before_we_came_is_nobody() -> None:
    """Its farewell is all that is found, whatever its settings were."""
    known = swarm(lr="0.1")
    known.heard(said(ANN, left=True, settings={"lr": "0.2"}), 0.0, direct=False)
    assert (known.mismatch, known.other_settings, known.peers) == (None, 0, ())
    known.heard(said(ANN, settings={"lr": "0.2"}), 0.0, direct=False)
    known.heard(said(ANN, left=True, time=101.0, settings={"lr": "0.2"}), 1.0, direct=False)
    assert (known.mismatch, known.other_settings) == (None, 0)


def test_other_settings_are_believed_of_who_is_alive() -> None:
    """A record that nobody renews is of a run before this one."""
    known = swarm(lr="0.1")
    for _ in range(3):
        known.heard(said(ANN, settings={"lr": "0.2"}), 0.0, direct=False)
    assert (known.mismatch, known.other_settings) == (None, 1)
    known.heard(said(ANN, settings={"lr": "0.2"}, time=102.0), 2.0, direct=False)
    assert known.mismatch is not None


def test_only_what_is_newer_is_news() -> None:
    """By the speaker's own clock: repeats and latecomers through the DHT change nothing."""
    known = swarm()
    assert known.heard(said(ANN, time=100.0, done=1), 0.0)
    assert not known.heard(said(ANN, time=100.0, done=2), 1.0)
    assert not known.heard(said(ANN, time=99.0, done=3), 1.0)
    assert known.heard(said(ANN, time=100.5, done=4), 1.0)
    found = known.progress_of(ANN)
    assert found is not None
    assert found.done == 4
    assert known.progress_of(BEN) is None


def test_what_we_said_ourselves_is_no_news() -> None:
    """Our own record comes back from the DHT."""
    known = swarm()
    assert not known.heard(said(ME, epoch=99), 0.0)
    assert view(known).peers == (ME,)


@pytest.mark.parametrize(
    "changes",
    [{"time": math.nan}, {"time": math.inf}, *({"rate": rate} for rate in (math.nan, math.inf, 1e308, -1e308))],
)
def test_numbers_that_are_none_are_not_heard(changes: dict[str, Any]) -> None:
    """They would block what the peer says later, or spoil the sum."""
    known = swarm()
    assert not known.heard(said(ANN, **changes), 0.0)
    assert known.heard(said(ANN), 0.0)
    assert math.isfinite(view(known).rate)


def test_silence_ends_a_peer() -> None:
    """After `ttl_s` without news; news, not repeats, keep it."""
    known = swarm(ttl_s=20.0)
    known.heard(said(ANN, time=1.0), 100.0)
    known.heard(said(BEN, time=1.0), 110.0)
    known.heard(said(ANN, time=1.0), 119.0)
    assert view(known, now=120.0).peers == (ME, ANN, BEN)
    assert view(known, now=120.1).peers == (ME, BEN)
    assert view(known, now=131.0).peers == (ME,)


def test_a_lost_peer_is_gone_at_once() -> None:
    """With its samples and its better state."""
    known = swarm()
    known.heard(said(ANN, epoch=6, done=50), 0.0)
    assert known.lost(ANN, 0.0)
    assert not known.lost(ANN, 0.0)
    assert not known.lost(BEN, 0.0)
    seen = view(known)
    assert (seen.peers, seen.behind, seen.done) == ((ME,), False, 10)


def test_a_lost_peer_returns_with_news_only() -> None:
    """What it said before it was lost may still lie in the DHT."""
    known = swarm()
    known.heard(said(ANN, time=100.0), 0.0)
    known.lost(ANN, 0.0)
    assert not known.heard(said(ANN, time=100.0), 1.0)
    assert not known.heard(said(ANN, time=99.0), 1.0)
    assert known.heard(said(ANN, time=100.1), 1.0)
    assert view(known, now=1.0).peers == (ME, ANN)


def test_a_killed_peer_does_not_return_by_what_it_wrote_before() -> None:
    """It told the keepers of the count and wrote to the DHT later than it told us, and died then."""
    known = swarm()
    known.heard(said(ANN, time=100.0), 0.0)
    assert known.lost(ANN, 2.0)
    assert not known.heard(said(ANN, time=101.9), 2.1, direct=False)
    assert not known.heard(said(ANN, time=102.4), 2.5, direct=False)  # what was heard at 0.0 was said a little earlier
    assert view(known, now=3.0).peers == (ME,)
    assert known.heard(said(ANN, time=103.0), 3.1, direct=False)  # it lost only its links
    assert view(known, now=4.0).peers == (ME, ANN)


def test_a_peer_that_was_lost_is_back_with_its_first_word() -> None:
    """A link was lost, with a word on its way; what comes over the next link counts at once."""
    known = swarm()
    known.heard(said(ANN, time=100.0), 0.0)
    known.heard(said(ANN, time=95.0), 1.0)  # an old record
    assert known.lost(ANN, 2.0)
    assert known.heard(said(ANN, time=101.9), 2.1)
    assert view(known, now=2.1).peers == (ME, ANN)


def test_an_expired_peer_returns_with_news_only() -> None:
    """As one that was lost."""
    known = swarm(ttl_s=20.0)
    known.heard(said(ANN, time=100.0), 0.0)
    assert view(known, now=21.0).peers == (ME,)
    assert not known.heard(said(ANN, time=100.0), 22.0)
    assert known.heard(said(ANN, time=120.0), 23.0)


def test_a_peer_whose_clock_was_set_back_returns() -> None:
    """An hour back: it counts again once nothing of its old news can be left, not an hour later."""
    known = swarm(ttl_s=20.0)
    known.heard(said(ANN, time=3700.0), 0.0)
    assert not known.heard(said(ANN, time=100.0), 5.0)
    assert view(known, now=20.1).peers == (ME,)
    known.expire(20.1)
    assert not known.heard(said(ANN, time=120.0), 40.0)
    assert known.heard(said(ANN, time=121.0), 40.2)
    assert view(known, now=41.0).peers == (ME, ANN)


def test_the_memory_of_the_lost_is_bounded() -> None:
    """Thousands come and go."""
    known = swarm()
    for number in range(5000):
        peer = PeerID(number.to_bytes(32, "big"))
        known.heard(said(peer), 0.0)
        known.lost(peer, 0.0)
    assert len(known._lost) == 4096


# ------------------------------------------------------------------------------------------------------------- settings


def test_the_first_setting_that_differs_is_named() -> None:
    """In the order of the names; a missing one differs too."""
    assert settings_difference({}, {}) is None
    assert settings_difference({"a": "1", "b": "2"}, {"b": "2", "a": "1"}) is None
    assert settings_difference({"lr": "0.1", "batch": "8"}, {"lr": "0.2", "batch": "9"}) == (
        "batch is 8 here and 9 at another peer of the run"
    )
    assert settings_difference({"lr": "0.1"}, {}) == "lr is 0.1 here and not set at another peer of the run"
    assert settings_difference({}, {"lr": "0.1"}) == "lr is not set here and 0.1 at another peer of the run"
    assert (settings_difference({}, {"frozen tensors": "none"}) or "").endswith("give model= on all peers, or on none")


def test_a_long_setting_is_cut() -> None:
    """A stranger does not fill our log."""
    text = settings_difference({}, {"x" * 10_000: "y" * 10_000})
    assert text is not None
    assert len(text) < 400


def test_peers_with_other_settings_do_not_count() -> None:
    """They are not heard, and the difference can be shown."""
    known = swarm(lr="0.1")
    assert known.mismatch is None
    assert not known.heard(said(ANN, settings={"lr": "0.2"}, epoch=9), 0.0)
    assert known.mismatch == "lr is 0.1 here and 0.2 at another peer of the run"
    assert view(known, settings={"lr": "0.1"}).peers == (ME,)
    assert known.heard(said(BEN, settings={"lr": "0.1"}), 0.0)


# ---------------------------------------------------------------------------------------------------- told by others


def test_what_others_tell_of_a_peer_counts_until_it_says_something_itself() -> None:
    """A keeper tells all who is at its state, with how many samples: newer than what they had heard from these."""
    known, teller = swarm(), said(ANN, epoch=6, digest=DIGESTS[3], branch_samples=1100, time=7.0)
    known.heard(said(BEN), 0.0, direct=False)
    mine = said(ME, epoch=6, digest=DIGESTS[3], branch_samples=1100)
    assert known.relayed(teller, [Standing(BEN, 40, 101.0), Standing(CAT, 5, 101.0), Standing(ME, 9, 200.0)], 0.0)
    again = [Standing(BEN, 30, 101.0), Standing(BEN, 30, math.inf), Standing(CAT, 5, 101.0)]
    assert not known.relayed(teller, again, 0.0)
    seen = known.view(mine, 0.0)
    assert (seen.together, seen.done) == (frozenset({ME, BEN}), 55)
    assert known.standings(mine, 0.0) == [Standing(BEN, 40, 101.0)]
    assert known.view(mine, 3.1).together == {ME}  # by then it has told so itself
    known.relayed(teller, [Standing(BEN, 40, 1e9)], 4.0)
    assert known.view(mine, 4.0).together == {ME, BEN}
    assert known.heard(said(BEN, time=102.0), 4.0)  # nobody is silenced by what others say in its name
    assert known.view(mine, 4.0).together == {ME}


def test_a_client_goes_back_to_no_state_before_the_last_one_that_it_had_with_others() -> None:
    """The only peer that others can dial was restarted at epoch 0: all clients threw away what they had trained."""
    known, mine = swarm(), said(ME, client=True, epoch=7, branch_samples=700, digest=b"7" * 32)
    before, last = StateKey.of(4, 400, DIGESTS[0]), StateKey.of(5, 500, DIGESTS[1])
    known.heard(said(ANN, epoch=4, branch_samples=400), 0.0)
    assert known.view(mine, 0.0, shared=False, floor=before).behind
    assert not known.view(mine, 0.0, shared=False, floor=last).behind
    known.heard(said(ANN, epoch=5, branch_samples=501, digest=DIGESTS[2], time=101.0), 0.0)
    assert known.view(mine, 0.0, shared=False, floor=last).behind
    known.heard(said(ANN, epoch=6, branch_samples=450, digest=DIGESTS[3], time=102.0), 0.0)  # trained on since
    assert known.view(mine, 0.0, shared=False, floor=last).behind


def test_the_state_of_a_client_counts_where_it_can_be_had_and_is_further_in_both() -> None:
    """Two clients at epoch 440 took the epoch 1 of a fresh peer. Who is linked with a client can have its state."""
    known, mine = swarm(), said(ME)
    further: dict[str, Any] = {"epoch": 440, "branch_samples": 9000, "digest": DIGESTS[1]}
    known.heard(said(ANN, client=True, **further), 0.0)
    assert known.clients_before(StateKey.of_peer(mine)) == {ANN}
    assert known.clients_before(StateKey.of_peer(said(ANN, **further))) == ()
    assert not known.view(mine, 0.0).behind
    assert not known.further(StateKey.of_peer(mine))
    giving = frozenset({ANN})
    seen = known.view(mine, 0.0, giving=giving)
    assert (seen.behind, seen.leaders, seen.epoch) == (True, (ANN,), 440)
    assert known.further(StateKey.of_peer(mine), giving) == {ANN: 440}
    assert known.better(mine, 0.0, giving) == {ANN: StateKey.of_peer(said(ANN, **further))}
    known.heard(said(ANN, client=True, time=101.0, **(further | {"epoch": 5})), 0.0)  # more samples in as many epochs
    assert not known.view(mine, 0.0, giving=giving).behind
    assert not known.better(mine, 0.0, giving)
    known.heard(said(ANN, client=True, time=102.0, **further), 0.0)
    known.heard(said(BEN, epoch=441, branch_samples=9001, digest=DIGESTS[2]), 0.0)
    assert known.view(mine, 0.0, giving=giving).leaders == (BEN,)
    client = said(ME, client=True, **further)
    known.lost(BEN, 0.0)
    known.heard(said(CAT), 0.0)
    assert known.view(client, 0.0, shared=False).behind
    assert not known.view(client, 0.0, shared=False, floor=StateKey.of_peer(client)).behind


def test_the_samples_of_a_peer_that_only_others_hear_count() -> None:
    """Its line to us is bad. We were late in each round, as we waited for samples that the others knew of."""
    known, mine = swarm(), said(ME)
    for peer in (ANN, BEN, CAT):
        known.heard(said(peer), 0.0)
    known.contributed({ME, ANN})
    silent = frozenset({CAT})
    assert known.view(mine, 0.0, silent=silent).done == 30
    assert known.relayed(said(ANN), [Standing(BEN, 10, 100.0), Standing(CAT, 7, 101.0)], 0.0)
    seen = known.view(mine, 0.0, silent=silent)
    assert (seen.done, seen.together) == (37, frozenset({ME, ANN, BEN}))  # nobody waits for it
    assert not known.relayed(said(BEN), [Standing(DAN, 7, 101.0)], 0.0)  # of no contributor
    assert known.view(mine, 0.0, silent=silent, absent=[CAT]).done == 30
    assert known.view(said(ME, epoch=6, digest=DIGESTS[3]), 0.0, silent=silent).done == 10  # of another state
    assert known.view(mine, 3.1, silent=silent).done == 30  # that was a while ago
    known.relayed(said(ANN), [Standing(CAT, 7, 102.0)], 4.0)
    assert known.view(mine, 4.0, silent=silent).done == 37
    assert known.relayed(said(ANN), [], 4.0)  # it hears it no more either
    assert known.view(mine, 4.0, silent=silent).done == 30


def test_the_samples_of_unheard_peers_count_for_no_more_than_those_of_contributors() -> None:
    """As all that strangers claim: names are free."""
    known, mine = swarm(), said(ME)
    known.heard(said(ANN), 0.0)
    known.contributed({ME, ANN})
    known.relayed(said(ANN), [Standing(DAN, 10**6, 101.0)], 0.0)
    assert known.view(mine, 0.0).done == 40


def test_a_contributor_told_each_peer_that_all_others_were_somewhere_else() -> None:
    """Each of them was alone then, and went on alone; or it asked the others for a state that they never had."""
    known, mine = swarm(), said(ME)
    known.contributed({ME, ANN, BEN})
    known.heard(said(ANN), 0.0)
    known.heard(said(BEN), 0.0, direct=False)
    assert known.view(mine, 0.0).together == {ME, ANN, BEN}
    liar = said(ANN, epoch=6, digest=DIGESTS[3], branch_samples=1100, time=101.0)
    assert not known.relayed(liar, [Standing(BEN, 0, 1e9)], 0.1)
    assert known.view(mine, 0.1).together == {ME, ANN, BEN}
    better = said(BEN, epoch=9, digest=DIGESTS[2], branch_samples=2000, time=102.0)
    known.heard(better, 0.1, direct=False)
    assert not known.relayed(liar, [Standing(BEN, 0, 2e9)], 0.1)
    assert known.view(mine, 0.1).best == StateKey.of_peer(better)
    known.heard(said(BEN, time=103.0), 0.1, direct=False)
    moved = said(ME, epoch=6, digest=DIGESTS[3], branch_samples=1100)
    known.view(moved, 0.2)
    assert known.relayed(liar, [Standing(BEN, 5, 3e9)], 0.3)
    assert known.view(moved, 0.3).together == {ME, BEN}


@pytest.mark.parametrize("known_before", [True, False])
def test_another_epoch_for_the_state_that_all_have_was_a_better_state(known_before: bool) -> None:
    """A digest is a history: who was at that state knows its epoch and its samples, and of all states before."""
    known, old, mine = swarm(), said(ME), said(ME, epoch=6, digest=DIGESTS[3], branch_samples=1100)
    if known_before:
        known.view(old, 0.0)
        known.view(mine, 0.0)
    known.heard(said(ANN, epoch=9, digest=DIGESTS[3], branch_samples=2000, done=7), 0.1)
    known.heard(said(BEN, epoch=9), 0.1)
    known.view(old, 0.1)
    seen = known.view(mine, 0.1)
    assert not seen.behind
    assert not seen.refused
    assert seen.together == {ME, ANN}
    assert seen.done == 17
    assert StateKey.of_peer(seen.others[ANN]) == StateKey.of_peer(mine)
    assert StateKey.of_peer(seen.others[BEN]) == StateKey.of_peer(old)
    assert not known.further(StateKey.of_peer(mine))
    known.contributed({ANN})
    known.heard(said(CAT), 0.1, direct=False)
    told = said(ANN, epoch=7, digest=DIGESTS[3], branch_samples=2000, time=101.0)
    assert known.relayed(told, [Standing(CAT, 5, 200.0)], 0.2)
    assert StateKey.of_peer(known.view(mine, 0.2).others[CAT]) == StateKey.of_peer(mine)


def test_the_steps_before_a_beginning_are_no_lie() -> None:
    """Its digest does not say how many steps its optimizer has taken."""
    known = swarm()
    view(known, epoch=0, branch_samples=0)
    known.heard(said(ANN, epoch=0, branch_samples=40), 0.0)
    assert view(known, epoch=0, branch_samples=0).behind


def test_one_contributor_told_each_of_a_few_that_all_others_had_done_enough() -> None:
    """Merges began before anybody had a batch. In a larger swarm a peer tells only the keepers: they are believed."""
    known, mine = swarm(), said(ME)
    for peer in (ANN, BEN):
        known.heard(said(peer), 0.0)
    known.contributed({ME, ANN, BEN})
    lie = said(ANN), [Standing(BEN, 10**12, 101.0)]
    known.relayed(*lie, 0.0)
    assert known.view(mine, 0.0).others[BEN].done == 10
    known.heard(said(CAT), 0.0, direct=False)  # that one may be gone, or not hear us
    assert known.relayed(said(ANN), [Standing(CAT, 5, 101.0)], 0.0)
    for number in range(10, 13):
        known.heard(said(PeerID(bytes([number]) * 32)), 0.0)
    assert known.relayed(*lie, 0.0)


def test_a_peer_that_tells_of_others_calls_to_the_next_step() -> None:
    """There is enough by all that it knew then, and its trainer may stand still. One that is elsewhere calls nobody."""
    known, mine, next_one = swarm(), said(ME), said(ME, epoch=6, digest=DIGESTS[3], branch_samples=1100)
    known.heard(said(ANN), 0.0)
    known.heard(said(BEN), 0.0)
    known.view(mine, 0.0)
    known.relayed(said(ANN), [], 0.0)
    assert not known.view(mine, 0.0).calling
    assert known.relayed(said(ANN), [Standing(BEN, 10, 100.0)], 0.0)
    assert not known.relayed(said(ANN), [Standing(BEN, 10, 100.0)], 0.0)  # no news
    assert known.view(mine, 0.0).calling == {ANN}
    assert not known.view(next_one, 0.0).calling
    known.relayed(said(ANN), [], 0.0)
    assert known.view(mine, 0.0).calling == {ANN}
    known.heard(said(ANN, epoch=6, digest=DIGESTS[3], branch_samples=1100, time=101.0), 0.0)
    assert not known.view(mine, 0.0).calling
    assert not known.view(next_one, 0.0).calling


def test_what_others_tell_of_a_peer_again_counts_for_longer() -> None:
    """Keepers say all again every 1.5 s. What was not yet forgotten then was forgotten before the next time."""
    known, teller, mine = swarm(), said(ANN), said(ME)
    known.heard(said(BEN), 0.0, direct=False)
    assert known.relayed(teller, [Standing(BEN, 40, 101.0)], 0.2)
    assert known.view(mine, 0.2).done == 50
    assert not known.relayed(teller, [Standing(BEN, 40, 101.0)], 3.0)
    assert not known.relayed(teller, [Standing(BEN, 10, 100.0)], 4.0)  # an older word
    assert known.view(mine, 5.9).done == 50
    assert known.view(mine, 6.1).done == 20


def test_another_optimizer_is_named_before_the_options_that_it_lacks() -> None:
    """SGD beside Adam said "amsgrad is not set here"."""
    here, there = {"optimizer": "SGD", "momentum": "0"}, {"optimizer": "Adam", "amsgrad": "False"}
    assert settings_difference(here, there) == "optimizer is SGD here and Adam at another peer of the run"


def test_a_state_beyond_the_end_that_a_stranger_offers_ends_the_run() -> None:
    """It was taken over, and everybody was at the end. What a contributor offers counts, and what is not beyond it."""
    known = swarm()
    known.heard(said(ANN), 0.0)
    known.heard(said(BEN, epoch=10**7, digest=DIGESTS[1]), 0.0)
    assert view(known).behind
    known.contributed([ME, ANN])
    assert not view(known, end_epoch=100).behind
    known.contributed([ME, ANN, BEN])
    assert view(known, end_epoch=100).behind
    known.contributed([ME, ANN])
    known.heard(said(BEN, epoch=90, digest=DIGESTS[1], time=101.0), 0.0)
    assert view(known, end_epoch=100).behind


def test_what_is_kept_of_the_last_look_is_what_a_new_look_sees() -> None:
    """To look at a thousand peers anew with each message took milliseconds: so counts are added to what was seen."""
    rng, others, kept = random.Random(1), [ANN, BEN, CAT], 0
    mine = said(ME, epoch=6, digest=DIGESTS[1], branch_samples=1100)
    states = [said(ME), mine, mine, mine, said(ME, epoch=6, digest=DIGESTS[2], branch_samples=rng.choice([1000, 1200]))]
    for run in range(100):
        known, now = swarm(), 0.0
        shared, awaited = bool(run % 4), frozenset(others[: run % 3])
        for _ in range(40):
            now += rng.choice([0.0, 0.1, 1.0])
            peer, state = rng.choice(others), rng.choice(states)
            told = said(
                peer,
                client=rng.random() < 0.1,
                end_epoch=rng.choice([None] * 9 + [6]),
                epoch=state.epoch,
                digest=state.digest,
                branch_samples=state.branch_samples,
                done=rng.randrange(50),
                rate=rng.random(),
                time=100.0 + now + rng.random(),
            )
            match rng.randrange(12):
                case 0:
                    known.lost(peer, now)
                case 1:
                    known.note_withheld([peer], now)
                case 2:
                    known.contributed(rng.sample([ME, *others], rng.randrange(3)))
                case 3:
                    known.relayed(told, [Standing(rng.choice(others), rng.randrange(50), told.time)], now)
                case _:
                    known.heard(told, now, direct=rng.random() < 0.7)
            asked: dict[str, Any] = {
                "shared": shared,
                "awaited": awaited,
                "before": StateKey.of_peer(said(ME)),
                "absent": {ANN} if rng.random() < 0.05 else set(),
                "silent": frozenset({BEN} if rng.random() < 0.05 else ()),
            }
            before = known._seen
            seen, after = known.view(mine, now, **asked), known._seen
            kept += before is after
            known._seen = None
            anew, known._seen = known.view(mine, now, **asked), after
            assert seen.rate == pytest.approx(anew.rate)
            assert dataclasses.replace(seen, rate=anew.rate) == anew
            assert seen.leaders == anew.leaders
    assert 1000 < kept < 3000


def test_a_query_changes_nothing_and_expire_forgets() -> None:
    """`view` forgot peers by itself, so who counted depended on who had asked."""
    known = swarm(ttl_s=20.0)
    known.heard(said(ANN, time=1.0, end_epoch=9), 100.0)
    known.heard(said(BEN, time=1.0), 110.0)
    assert view(known, now=125.0).peers == (ME, BEN)
    assert list(known.peers) == [ANN, BEN]
    known.expire(125.0)
    assert list(known.peers) == [BEN]
    assert known.ends == {BEN: None}
    known.expire(130.0)
    assert list(known.peers) == [BEN]
    known.expire(131.0)
    assert list(known.peers) == []
    assert not known.heard(said(ANN, time=1.0), 132.0), "what it said before it fell silent is no news"


def test_one_place_is_ahead_while_others_are_at_their_first_batch() -> None:
    """It has most of the samples: one peer, or the keys of one place. Who trains nothing is at no batch."""
    for places in ({}, {CAT: b"x", DAN: b"x"}):
        known = swarm()
        known.contributed([ME, ANN, BEN, CAT, DAN], places=places)
        counts = {ANN: 4, BEN: 4, CAT: 9, DAN: 8} if places else {ANN: 4, BEN: 0, CAT: 20, DAN: 4}
        for peer, samples in counts.items():
            known.heard(said(peer, done=samples), 0.0)
        assert view(known, done=4).ahead == (not places), "everybody has named some"
        assert view(known, done=0).ahead
        known.heard(said(BEN, done=4, time=101.0), 0.0)
        assert not view(known, done=0, rate=0.0).ahead
        assert view(known, done=0).ahead
        known.heard(said(ANN, done=40, time=101.0), 0.0)
        known.heard(said(BEN, done=40, time=102.0), 0.0)
        assert not view(known, done=0).ahead, "nobody has most"
