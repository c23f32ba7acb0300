"""What follows from the checks of all members: who holds the state, who does not, and whose parameters these take."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import msgspec
import pytest

from shoal.base.peer import PeerID
from shoal.run.decide.check import Check, judge
from shoal.run.view.words import weigh
from shoal.train.value_mark import Changed

FAR = 2.0


def peer(number: int) -> PeerID:
    """The lowest one is 0."""
    return PeerID(bytes([number]) * 32)


def alike(peers: Collection[PeerID]) -> Mapping[PeerID, int]:
    """Nothing is known of anybody."""
    return weigh(peers, committed={}, sites={})


def check(arithmetic: str, parameters: str, value: float = 1.0) -> Check:
    """Of these parameters; their samples are near if the values are equal."""
    return Check(arithmetic.encode(), parameters.encode().ljust(16), struct.pack("<4f", *[value] * 4))


def judged(*checks: Check) -> tuple[set[int], dict[int, set[int]], bool]:
    """The holders, who differs and from whom it takes parameters, and whether that was a tie."""
    verdict = judge({peer(number): each for number, each in enumerate(checks)}, alike)
    assert verdict is not None
    others = {member.to_bytes()[0]: {each.to_bytes()[0] for each in kept} for member, kept in verdict.others.items()}
    return {each.to_bytes()[0] for each in verdict.holders}, others, verdict.is_tie


Y, X, X1, X2 = check("Y", "y"), check("X", "x"), check("X", "x1"), check("X", "x2")


@pytest.mark.parametrize(
    ("checks", "holders", "others", "tie"),
    [
        ((Y, Y, X1, X2), {0, 1}, {3: {2}}, True),
        ((X2, Y, X1, Y), {1, 3}, {2: {0}}, True),
        ((Y, X1, X2), {0}, {2: {1}}, True),
        ((X1, Y, X2), {0}, {2: {0}}, True),
        ((X, X, check("Y", "y1"), check("Y", "y2")), {0, 1}, {3: {2}}, True),
        ((Y, Y, Y, X1, X2, X2), {0, 1, 2}, {3: {4, 5}}, False),
        ((Y, Y, Y, X1, X1, X2, X2), {0, 1, 2}, {5: {3, 4}, 6: {3, 4}}, True),
    ],
)
def test_equal_arithmetic_is_compared_to_the_bit_among_others_than_the_holders(
    checks: Sequence[Check], holders: set[int], others: dict[int, set[int]], tie: bool
) -> None:
    """Two peers of one build differed, and passed, as the two of another build were the state."""
    assert judged(*checks) == (holders, others, tie)


@pytest.mark.parametrize("far", ["one", "most", "all"])
def test_peers_of_another_arithmetic_that_are_far_take_what_is_near(far: str) -> None:
    """From their own kind if one of it is near; if none is, from the holders of the state."""
    wrong = check("X", "x1", FAR)
    if far == "one":
        assert judged(Y, Y, wrong, X2) == ({0, 1}, {2: {3}}, True)
    elif far == "most":
        assert judged(Y, Y, Y, wrong, wrong, X2) == ({0, 1, 2}, {3: {5}, 4: {5}}, True)
    else:
        assert judged(Y, Y, Y, wrong, check("X", "x2", FAR)) == ({0, 1, 2}, {3: {0, 1, 2}, 4: {0, 1, 2}}, False)


def test_free_keys_with_few_samples_win_the_check_of_the_parameters() -> None:
    """Four of seven heads held parameters of their own: the honest ones downloaded those."""
    good, bad = check("X", "x"), check("X", "filled", 7.0)
    checks = {peer(number): bad if number < 4 else good for number in range(7)}
    committed = {peer(number): 10 if number < 4 else 960 for number in range(7)}
    verdict = judge(checks, partial(weigh, committed=committed, sites={}))
    assert verdict is not None
    assert verdict.holders == {peer(4), peer(5), peer(6)}
    assert set(verdict.others) == {peer(number) for number in range(4)}
    assert set(verdict.others.values()) == {verdict.holders}
    new = {each: count for each, count in committed.items() if count > 10}
    assert judge(checks, partial(weigh, committed=new, sites={})) == verdict


NOT, WRITTEN, VALUES = Changed


def known(parameters: str, changed: Changed = NOT, *, followed: bool = False) -> Check:
    """Of one arithmetic, with what its peer knows of these parameters."""
    return msgspec.structs.replace(check("X", parameters), changed=changed, followed=followed)


@pytest.mark.parametrize(
    ("checks", "holder", "tie"),
    [
        ((known("a", VALUES), known("b")), 1, False),
        ((known("a", VALUES), known("b", WRITTEN)), 1, False),
        ((known("a"), known("b", WRITTEN)), 0, False),
        ((known("a", VALUES), known("b", VALUES)), None, True),
        ((known("a", followed=True), known("b")), 1, True),
        ((known("a"), known("b", followed=True)), 0, True),
        ((known("a", followed=True), known("b", VALUES)), 0, False),
        ((known("a", VALUES), known("a", VALUES), known("b")), 0, False),  # most have changed theirs alike
        ((known("a", VALUES), known("b"), known("b")), 1, False),
        ((known("a", VALUES), known("a"), known("b"), known("b", WRITTEN)), None, True),  # their steps made either
    ],
)
def test_the_weights_that_one_of_two_had_changed_were_kept(
    checks: Sequence[Check], holder: int | None, *, tie: bool
) -> None:
    """Which are right is known where one side has changed its own; else the side that followed follows again."""
    given = {peer(number): each for number, each in enumerate(checks)}
    seen = set[bytes]()
    for number in range(20):
        verdict = judge(given, alike, bytes([number]))
        assert verdict is not None
        assert verdict.is_tie == tie
        assert holder is None or peer(holder) in verdict.holders
        seen.add(verdict.digest)
    assert len(seen) == (2 if holder is None else 1)  # chance decides the rest, another way each time


@pytest.mark.parametrize(("weight", "holders"), [(50, {1}), (1, {1}), (0, {0, 3})])
def test_a_heavier_peer_kept_weights_that_it_had_changed(weight: int, holders: set[int]) -> None:
    """It had made some steps alone. A key that gave nothing says nothing, and of two that gave none decides alone."""
    checks = {peer(0): known("a", VALUES), peer(1): known("b"), peer(2): known("c"), peer(3): known("a")}
    verdict = judge(checks, partial(weigh, committed={peer(0): 100, peer(1): weight}, sites={}))
    assert verdict is not None
    assert verdict.holders == {peer(each) for each in holders}


def test_what_differs_to_the_bit_is_found_wherever_it_is() -> None:
    """Every way to spread four peers over two builds, and to give one of them another bit."""
    for builds, odd in itertools.product(itertools.product("XY", repeat=4), range(4)):
        checks = [check(build, build + "'" * (number == odd)) for number, build in enumerate(builds)]
        holders, others, _ = judged(*checks)
        alone = builds.count(builds[odd]) == 1
        assert not others if alone else len(others) == 1
        for member, kept in others.items():
            assert {builds[each] for each in kept} == {builds[member]}
        assert holders


def test_equal_parameters_differ_from_nothing() -> None:
    """One arithmetic or several, equal to the bit or to rounding."""
    assert judged(Y, Y, Y) == ({0, 1, 2}, {}, False)
    assert judged(Y, check("X", "y"), Y) == ({0, 1, 2}, {}, False)
    assert judged(Y, X, X, Y, check("Z", "z")) == ({0, 3}, {}, False)
    assert judge({}, alike) is None


def test_samples_of_equal_parameters_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check went through the samples of all members, a thousand values each, although their digests are equal."""
    monkeypatch.setattr(Check, "is_near", lambda *_: pytest.fail("the samples were compared"))
    assert judged(Y, Y, check("Y", "y1")) == ({0, 1}, {2: {0, 1}}, False)
