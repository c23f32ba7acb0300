"""The fork rule, exhaustively: a pure model with the real keys, the real `SwarmProgress`, and rules that must fail."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from shoal.base.peer import Address, PeerID
from shoal.protocol.wire import Contact, Progress
from shoal.run.view.progress import NO_STATE, StateKey, SwarmProgress
from tests.model import fork_model
from tests.model.fork_model import MIX, RULE, Broken, Rule, Search, State, View

_IDS = [PeerID(bytes([peer + 1]) * 32) for peer in range(3)]


def _progress(peer: int, state: State, client: int | None) -> Progress:
    addresses = () if peer == client else (Address("10.0.0.1", 4000, _IDS[peer]),)
    return Progress(Contact(_IDS[peer], addresses), state.epoch, state.digest, state.samples, 0, 1.0, 1.0, {})


def swarm_leaders(
    rule: Rule, me: int, own: State, view: View, *, client: int | None = None, lends: bool = False
) -> tuple[int, ...]:
    """As the optimizer decides it: through `SwarmProgress`."""
    known = SwarmProgress(_IDS[me], {}, ttl_s=20.0)
    for peer, state in enumerate(view):
        if state is not None:
            assert known.heard(_progress(peer, state, client), 1.0)
    shared = not own.history or own.history[1] != (me,)  # its last round was not its own
    mine = _progress(me, own, client)
    giving = frozenset({_IDS[client]} if lends and client is not None and client != me else ())
    floor = StateKey.of_peer(mine) if lends and not shared else NO_STATE
    seen = known.view(mine, 1.0, shared=shared, giving=giving, floor=floor)
    return tuple(_IDS.index(peer) for peer in seen.leaders) if seen.behind else ()


def _backwards(parent: State, members: tuple[int, ...], kind: str) -> bytes:
    """Other digests, so that ties fall the other way."""
    return bytes(255 - byte for byte in fork_model.name(parent, members, kind))


def test_the_rule_holds_for_two_epochs() -> None:
    """Every order of rounds, lost verdicts, stale news and adoptions ends at one state, and no key goes down."""
    assert Search(epochs=2).run() > 40_000


@pytest.mark.parametrize("name", [fork_model.name, _backwards])
def test_the_rule_holds_when_states_are_averaged(name: Callable[[State, tuple[int, ...], str], bytes]) -> None:
    """With averaging of states after a step, which some of its members miss; whichever way ties fall."""
    assert Search(replace(RULE, name=name), epochs=1, mixes=True).run() > 10_000


def test_the_progress_of_a_swarm_follows_the_rule() -> None:
    """The same search with the code that decides in a run: the same worlds."""
    real = Search(replace(RULE, leaders=swarm_leaders), epochs=1, mixes=True).run()
    assert real == Search(epochs=1, mixes=True).run()


def test_the_rule_holds_with_a_client() -> None:
    """A state that only a client has holds nobody up, and a client that went on alone comes back."""
    rule = replace(RULE, leaders=partial(swarm_leaders, client=2))
    assert Search(rule, epochs=2, client=2).run() > 10_000


def test_losing_a_peer_from_view_leads_nowhere_new() -> None:
    """Whatever can follow a loss can follow if the peer was never heard of: so other searches leave losses out."""
    assert Search(epochs=1, losses=True).run() == Search(epochs=1).run() > 1_000


# ------------------------------------------------------------------------------------------------- rules that must fail


def _broken(rule: Rule, match: str) -> None:
    with pytest.raises(Broken, match=match):
        Search(rule, epochs=2).run()


def test_a_key_without_the_digest_never_unites() -> None:
    """Two states with as many samples at one epoch: nobody moves."""
    _broken(replace(RULE, key=lambda state: (state.epoch, state.samples)), "they are not at one state")


def test_a_key_of_the_epoch_alone_never_unites() -> None:
    """More samples must win."""
    _broken(replace(RULE, key=lambda state: state.epoch), "they are not at one state")


def test_adopting_whatever_differs_goes_in_circles() -> None:
    """Two peers that take each other's state swap for ever."""

    def anyone(rule: Rule, me: int, own: State, view: View) -> tuple[int, ...]:
        return tuple(peer for peer, state in enumerate(view) if state is not None and state is not own)

    _broken(replace(RULE, leaders=anyone), "no better than its own")


def test_adopting_on_a_tie_goes_in_circles() -> None:
    """At least as good is not good enough, if the digest does not decide."""

    def as_good(rule: Rule, me: int, own: State, view: View) -> tuple[int, ...]:
        return tuple(
            peer
            for peer, state in enumerate(view)
            if state is not None and state is not own and rule.key(state) >= rule.key(own)
        )

    _broken(replace(RULE, key=lambda state: (state.epoch, state.samples), leaders=as_good), "no better than its own")


def test_a_tie_that_each_decides_for_its_neighbour_goes_in_circles() -> None:
    """An order that depends on who looks is no order."""

    def neighbour(rule: Rule, me: int, own: State, view: View) -> tuple[int, ...]:
        mine = (own.epoch, own.samples)
        better = [
            (state.epoch, state.samples, peer == (me + 1) % 3, peer)
            for peer, state in enumerate(view)
            if state is not None and state is not own and (state.epoch, state.samples) >= mine
        ]
        return (max(better)[3],) if better else ()

    _broken(replace(RULE, leaders=neighbour), "no better than its own|went down")


def test_a_digest_without_the_members_names_two_states() -> None:
    """Rounds of different members at one state must not get one name."""

    def name(parent: State, members: tuple[int, ...], kind: str) -> bytes:
        return hashlib.sha256(kind.encode() + parent.digest).digest()

    _broken(replace(RULE, name=name), "one digest for two states")


def test_a_digest_that_forgets_what_was_before_names_two_states() -> None:
    """The same members in two rounds, one after the other, must not get one name."""

    def name(parent: State, members: tuple[int, ...], kind: str) -> bytes:
        return hashlib.sha256(f"{members}{kind}".encode()).digest()

    _broken(replace(RULE, name=name), "one digest for two states")


def test_a_name_from_the_news_and_a_state_from_the_donor_do_not_fit() -> None:
    """The donor may have moved on since it was heard: what comes with the state is its name."""

    def mislabelled(own: State, seen: State, present: State) -> State:
        return State.of(seen.epoch, seen.samples, seen.digest, present.history)

    _broken(replace(RULE, adopted=mislabelled), "one digest for two states")


def test_the_rule_holds_with_a_client_that_lends() -> None:
    """A client that went on alone and came further than the others gives them its state, and all unite."""
    rule = replace(RULE, leaders=partial(swarm_leaders, client=2, lends=True))
    assert Search(rule, epochs=2, client=2, lends=True).run() > 10_000


def test_counting_on_with_own_samples_names_two_states() -> None:
    """The samples that went into a state belong to the state, and are taken over with it."""

    def own_count(own: State, seen: State, present: State) -> State:
        return State.of(present.epoch, own.samples, present.digest, present.history)

    _broken(replace(RULE, adopted=own_count), "one digest for two states|no better than its own")


def test_waiting_for_the_state_of_a_client_never_unites() -> None:
    """A client that went on alone has the best state, and nobody can have it: it must not count."""
    rule = replace(RULE, leaders=swarm_leaders)  # does not know that it is one
    with pytest.raises(Broken, match="they are not at one state"):
        Search(rule, epochs=1, client=2).run()


class _FreeMix(Search):
    """Averaging of states adds no sample."""

    def _after_round(self, parent: State, members: tuple[int, ...], kind: str) -> State | None:
        after = super()._after_round(parent, members, kind)
        if after is None or kind != MIX:
            return after
        return State.of(after.epoch, parent.samples, after.digest, after.history)


def test_an_averaged_state_must_be_the_better_one() -> None:
    """Without the sample that it adds, those who averaged would fall back behind their own state."""
    with pytest.raises(Broken, match="went down"):
        _FreeMix(epochs=1, mixes=True).run()
