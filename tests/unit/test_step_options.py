"""The options of a step: what peers propose, which set a round takes, and that it is applied exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shoal.base.peer import PeerID
from shoal.errors import ConfigError
from shoal.optim import TrainingState
from shoal.protocol.wire import decode, decode_plain, encode
from shoal.run.decide import agreement
from shoal.run.decide.agreement import Agreement, Contributor, Said
from shoal.run.decide.committed import Committed
from shoal.run.view.words import weigh
from shoal.strategies import LocalSGD
from shoal.strategies.local_updates import LocalTrainingState
from shoal.strategies.outer import LocalSteps
from shoal.train.options import Difference, Options, agreed, apply, differences, misfit, options_of
from tests.cost import cost_of


def groups(*options: dict[str, Any]) -> list[dict[str, Any]]:
    """Parameter groups of AdamW with these options."""
    made = [{"params": [torch.nn.Parameter(torch.zeros(2))], **each} for each in options]
    return torch.optim.AdamW(made).param_groups


def peer(number: int) -> PeerID:
    """Some peer; a lower number is a lower id."""
    return PeerID(bytes([number]) + bytes(31))


def agree(
    gathered: Mapping[PeerID, Any],
    *args: Any,
    committed: Mapping[PeerID, int] | None = None,
    sites: Mapping[PeerID, bytes] | None = None,
    total: float = math.inf,
    mine: Options | None = None,
    last: Options | None = None,
) -> Agreement:
    """The agreement of members that have committed so many samples at these sites; nothing is known of them without."""
    weighed = partial(weigh, committed=committed or {}, sites=sites or {})
    return agreement.agree(gathered, *args, weigh=weighed, total=total, mine=mine, last=last)


def told(options: Options, samples: int = 0) -> Any:
    """As the others get it."""
    return decode_plain(encode(Said(options, samples=samples)))


def test_what_is_proposed_is_all_but_how_a_step_is_computed() -> None:
    """Options of computing and what schedules keep for themselves are each peer's own; objects cannot be told."""
    (group,) = groups({"lr": torch.tensor(0.5), "betas": (np.float32(0.5), 0.75), "fused": False})
    group.update(initial_lr=7.0, note=object(), wide=torch.zeros(3), limit=float("inf"), tag="x", count=np.int64(3))
    found = options_of([group])
    assert found.values == {
        "lr": [0.5],
        "betas": [[0.5, 0.75]],
        "eps": [1e-8],
        "weight_decay": [0.01],
        "amsgrad": [False],
        "maximize": [False],
        "decoupled_weight_decay": [True],
        "limit": [float("inf")],
        "tag": ["x"],
        "count": [3],
    }
    assert Said(found) == msgspec.convert(told(found), Said)


def test_options_of_groups_are_told_apart() -> None:
    """What is the same in all groups is told once."""
    found = options_of(groups({"lr": 0.1}, {"lr": 0.2}))
    assert found.values["lr"] == [0.1, 0.2]
    assert found.values["eps"] == [1e-8]
    assert differences(options_of(groups({"lr": 0.1}, {"lr": 0.3})), found) == [Difference("lr", 1, 0.3, 0.2)]


def test_rounding_is_no_difference_and_the_step_is_taken_with_the_same_bits() -> None:
    """Another build of Python or numpy computes a rate that is a hair off: it counts for the same set."""
    one, hair, other = (options_of(groups({"lr": lr})) for lr in (0.1, 0.1 * (1 + 1e-9), 0.3))
    assert agreed([(other, 1), (hair, 1), (one, 1)]) == hair
    assert not differences(one, hair)
    mine = groups({"lr": 0.1})
    apply(mine, hair)
    assert mine[0]["lr"] == 0.1 * (1 + 1e-9)


def test_most_members_decide_and_the_lowest_peer_where_as_many_have_others() -> None:
    """The same for all members, whatever the order in which they stand; and the same in the next round."""
    one, other = (options_of(groups({"lr": lr})) for lr in (0.1, 0.3))
    gathered = {peer(3): told(one), peer(2): told(other), peer(1): told(one)}
    assert agree(gathered, ()).options == one
    tie = {peer(2): told(one), peer(1): told(other)}
    assert agree(tie, ()).options == agree(dict(reversed(tie.items())), ()).options == other
    assert agree(tie, ()).digest != agree(gathered, ()).digest


def test_in_a_run_of_two_the_lower_peer_id_sets_no_options() -> None:
    """A rate of 100 was taken as that of most peers. Of equal weight the smaller change counts, whoever says it."""
    last, honest, wild = (options_of(groups({"lr": lr})) for lr in (0.1, 0.101, 100.0))
    for liar in (1, 3):
        said = {peer(liar): told(wild), peer(2): told(honest)}
        assert agree(said, (), last=last).options == honest
        assert agree({**said, peer(2): told(last)}, (), last=last).options == last
        assert agree({peer(liar): told(wild), peer(2): told(wild)}, (), last=last).options == wild
    from_nothing = options_of(groups({"lr": 0.0}))
    assert agree({peer(1): told(wild), peer(2): told(from_nothing)}, (), last=from_nothing).options == from_nothing


@pytest.mark.parametrize(
    "wrong", [Options(1, {"lr": ["x"]}), Options(2, {"lr": [0.1]}), Options(1, {"lr": [0.1], "betas": [[0.9]]})]
)
def test_a_tie_is_never_for_options_of_another_kind_than_ones_own(wrong: Options) -> None:
    """A text as the rate came from the lower peer id: the honest peer could not take the step, and lost its samples."""
    mine = options_of(groups({"lr": 0.1}))
    said = {peer(1): told(wrong), peer(2): told(mine)}
    assert agree(said, (), mine=mine).options == mine
    assert agree(said, (), mine=wrong).options == wrong
    assert agree({**said, peer(3): told(wrong)}, (), mine=mine).options == wrong, "most weight decides as before"


def test_the_smaller_change_is_that_of_all_values() -> None:
    """A value of each group counts with its share, a name that comes or goes as a change, whatever its size."""
    last = Options(4, {"lr": [0.1], "betas": [[0.9, 0.99]]})
    one_group = Options(4, {**last.values, "lr": [0.1, 0.1, 0.1, 0.2]})
    all_groups = Options(4, {**last.values, "lr": [0.2]})
    unnamed = Options(4, {"lr": [0.1]})
    endless = Options(4, {**last.values, "lr": [math.inf]})
    order = [last, one_group, all_groups, endless]
    for less, more in itertools.combinations([*order[:3], unnamed], 2):
        assert agreed([(more, 1), (less, 1)], last=last) == less
        assert agreed([(less, 1), (more, 1)], last=last) == less
    assert agreed([(endless, 1), (all_groups, 1)], last=last) == all_groups


@pytest.mark.parametrize("width", [0, 16])
def test_36_bytes_that_say_65536_groups_held_the_loop_of_each_member_for_a_second(width: int) -> None:
    """A value that all groups have was looked at for each group. Now words cost what their bytes do."""
    value: Any = [0.5] * width if width else 0.5
    wild = [Options(1 << 16, {**{f"{name:x}": [value] for name in range(256)}, "0": [lie]}) for lie in range(4)]
    honest = options_of(groups({"lr": 0.1}))
    for weights in ((5, 0), (5, 1), (1, 1)):
        said = [(honest, weights[0]), *((each, weights[1]) for each in wild)]
        cost = cost_of(partial(agreed, said, mine=honest, last=honest))
        assert cost.lines < 50 * len(encode(wild)), weights
        assert agreed(said, mine=honest, last=honest) == honest
    assert cost_of(lambda: misfit(honest, wild[0])).lines < 50


def test_words_of_many_values_are_compared_no_more_often_than_is_soon_done() -> None:
    """A leader may name members that all say 3,000 values, equal to rounding: then their bits count."""
    many = [Options(3000, {"lr": [*[0.5] * 2999, 0.5 + 1e-9 * number]}) for number in range(30)]
    said = [(each, 2 if each is many[7] else 1) for each in many]
    assert agreed(said) == many[7]
    assert cost_of(lambda: agreed(said)).lines < 2 * 30 * 3000
    assert agreed(said[:3]) == many[0], "few of them are"


def test_who_has_no_samples_has_no_say_beside_those_who_have() -> None:
    """Its trainer may be in its first batch, and its rates those from before the schedule was found."""
    one, other = (options_of(groups({"lr": lr})) for lr in (0.1, 0.3))
    gathered = {peer(1): told(other), peer(2): told(other), peer(3): told(one, samples=4)}
    assert agree(gathered, ()).options == one
    assert agree({**gathered, peer(3): told(one)}, ()).options == other


def test_a_member_that_says_more_samples_than_all_gave_had_any_weight_of_word() -> None:
    """It trained one sample a batch, and said 10^18: its word weighed that. All members know how many all gave."""
    one = options_of(groups({"lr": 0.1}))
    gathered = {peer(1): told(one, samples=10**18), peer(2): told(one, samples=28)}
    made = agree(gathered, list(gathered), total=29.0).contributors
    assert [each.samples for each in made] == [14, 14], "the one that lies counts for no more than the other"
    assert [each.samples for each in agree(gathered, list(gathered)).contributors] == [10**18, 28]


def test_four_free_keys_with_4_percent_of_the_samples_set_the_learning_rate() -> None:
    """They were four of seven heads: a rate of 1e4 in one step, and the loss was inf for good."""
    good, bad = (options_of(groups({"lr": lr})) for lr in (0.1, 1e4))
    honest = {peer(number): told(good, samples=96) for number in (5, 6, 7)}
    free = {peer(number): told(bad, samples=10**12) for number in (1, 2, 3, 4)}
    committed = dict.fromkeys(honest, 960) | dict.fromkeys(free, 10)
    assert agree(honest | free, (), committed=committed).options == good
    assert agree(honest | free, (), committed=dict.fromkeys(honest, 960)).options == good
    assert agree(free | {peer(7): honest[peer(7)]}, (), committed={peer(7): 1}).options == good


def test_before_the_first_step_the_keys_of_one_site_have_one_voice() -> None:
    """Nothing is known of anybody. Of as many sites those with more keys weigh more; at one site each key counts."""
    good, bad = (options_of(groups({"lr": lr})) for lr in (0.1, 1e4))
    honest = {peer(number): told(good, samples=4) for number in (5, 6)}
    free = {peer(number): told(bad, samples=4) for number in (1, 2, 3, 4)}
    both, shared = honest | free, {peer(number): b"x" for number in (1, 2, 3, 4)}
    assert agree(both, (), sites=shared | {peer(5): b"y", peer(6): b"z"}).options == good
    assert agree(both, (), sites=shared | {peer(5): b"y", peer(6): b"y"}).options == bad
    assert agree(both, ()).options == bad
    assert agree(both, (), sites=dict.fromkeys(both, b"x")).options == bad
    lab = {peer(number): told(good, samples=4) for number in range(2, 10)}
    sites = dict.fromkeys(lab, b"l") | {peer(1): b"x"}
    assert agree(lab | {peer(1): told(bad, samples=4)}, (), sites=sites).options == good


def test_options_keep_their_form() -> None:
    """A rate that is a tensor stays the same tensor, betas stay a tuple, None and bool are what they are."""
    mine = groups({"lr": torch.tensor(0.5), "betas": (0.9, 0.99)})
    rate = mine[0]["lr"]
    apply(mine, options_of(groups({"lr": 0.25, "betas": (0.8, 0.99), "amsgrad": True})))
    assert mine[0]["lr"] is rate
    assert float(rate) == 0.25
    assert mine[0]["betas"] == (0.8, 0.99)
    assert isinstance(mine[0]["betas"], tuple)
    assert mine[0]["amsgrad"] is True
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1, momentum=0).param_groups
    sgd[0]["trust"] = None
    theirs = options_of(sgd)
    assert theirs.values["trust"] == [None]
    assert not differences(options_of(sgd), theirs)


@pytest.mark.parametrize(
    "bad",
    [
        None,
        7,
        [],
        [[1, {"lr": []}]],
        [[1, {"lr": [float("nan")]}]],
        [[1, {"betas": [[0.5, float("nan")]]}]],
        [[3, {"lr": [0.1, 0.2]}]],
        [[0, {"lr": [0.1]}]],
        [[1 << 20, {"lr": [0.1]}]],
        [[1, {"lr": [{"deep": 1}]}]],
        [[1, {"lr": [[0.1] * 17]}]],
        [[1, {"l" * 200: [0.1]}]],
    ],
)
def test_what_is_not_options_does_not_count(bad: Any) -> None:
    """From the network anything may come."""
    good = options_of(groups({"lr": 0.1}))
    assert agree({peer(1): bad, peer(2): told(good)}, ()).options == good
    assert agree({peer(1): bad}, ()).options is None


def test_options_that_cannot_be_taken_over_are_named() -> None:
    """A text where a number is would break the optimizer in the middle of a step."""
    mine = options_of(groups({"lr": 0.1}))
    assert misfit(mine, mine) is None
    assert misfit(mine, Options(1, {"lr": ["boom"]})) == "lr of 'boom', which is 0.1 here"
    assert misfit(mine, Options(1, {"betas": [[0.1]]})) is not None
    assert misfit(mine, Options(1, {"lr": [None]})) is not None
    assert misfit(mine, Options(2, {"lr": [0.1]})) == "2 parameter groups, and there are 1 here"


def test_more_options_than_can_be_told_are_refused() -> None:
    """What is told to join a round is bounded."""
    with pytest.raises(ConfigError, match="parameter groups take"):
        options_of([groups({"lr": 0.1 + i * 1e-3})[0] for i in range(5000)])


@pytest.mark.parametrize(
    ("masks", "unused"),
    [((b"\x05", b"\x04"), {2}), ((b"\x05", b""), set()), ((b"\x00\x01", b"\xff\xff\x01"), {8}), ((b"\x01",), {0})],
)
def test_a_parameter_is_unused_if_nobody_has_a_gradient_of_it(masks: tuple[bytes, ...], unused: set[int]) -> None:
    """A member without a gradient counts as zero if another one has one."""
    options = options_of(groups({"lr": 0.1}))
    gathered = {peer(i): decode_plain(encode(Said(options, mask))) for i, mask in enumerate(masks)}
    assert agree(gathered, ()).unused == unused


def test_who_made_a_step_is_part_of_it() -> None:
    """In one order for all members, one sample at least, and those whose values are in all of the average.

    Those whose values are in some parts of it are named with so much of their samples; with none, if that is only what
    they have averaged themselves.
    """
    options = options_of(groups({"lr": 0.1}))
    words = {peer(2): Said(options, samples=7, end=9), peer(1): Said(options), peer(3): Said(options, samples=5)}
    gathered: dict[PeerID, Any] = {who: decode_plain(encode(said)) for who, said in words.items()}
    gathered[peer(4)] = "nonsense"
    made = agree(gathered, [peer(1), peer(2), peer(4)])
    assert made.contributors == [Contributor(peer(1), 1), Contributor(peer(2), 7, 9)]
    assert decode(encode(made), Agreement) == made
    assert made.digest != agree(gathered, [peer(1)]).digest
    assert made.digest == agree(dict(reversed(gathered.items())), [peer(2), peer(1)]).digest
    in_part = agree(gathered, [peer(1), peer(2)], {peer(3): Fraction(2, 3), peer(4): Fraction(1)})
    assert in_part.contributors == [*made.contributors, Contributor(peer(3), 3)]
    in_part = agree(gathered, [peer(1), peer(2)], {peer(3): Fraction(0)})
    assert in_part.contributors == [*made.contributors, Contributor(peer(3), 0)]
    committed = Committed().after(agree(gathered, [peer(2)], {peer(3): Fraction(0)}).contributors, 0, options)
    assert Committed.read(committed.export()).options == options
    assert Committed.read({**committed.export(), "options": b"nonsense"}).options is None
    assert committed.samples == {peer(2): 7}  # it is the only one that has weight
    assert committed.gave_last(peer(3))


def test_a_rate_that_is_no_number_is_never_agreed_on() -> None:
    """A member that has it takes that of the others, and is told."""
    good = options_of(groups({"lr": 0.1}))
    mine = groups({"lr": 0.1})
    mine[0]["lr"] = float("nan")
    bad = options_of(mine)
    assert agree({peer(1): told(bad), peer(2): told(bad), peer(3): told(good)}, ()).options == good
    assert agree({peer(1): told(bad)}, ()).options is None
    assert [each.name for each in differences(bad, good)] == ["lr"]
    apply(mine, good)
    assert mine[0]["lr"] == 0.1


@pytest.mark.parametrize("betas", [[0.9, 5.0], [1.0, 1.0], [0.9, float("inf")]])
@pytest.mark.parametrize("as_tensor", [False, True], ids=["", "rate is a tensor"])
def test_options_of_the_right_kind_with_which_no_step_can_be_taken(betas: Any, *, as_tensor: bool) -> None:
    """AdamW raised an error with them, in the trainer of every peer. They are tried first; nothing here changes."""
    parameter, rate = torch.nn.Parameter(torch.ones(3)), 0.1
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(rate) if as_tensor else rate)
    training, mine = TrainingState(optimizer), options_of(optimizer.param_groups)
    wrong = Options(mine.groups, {**mine.values, "betas": [betas]})
    huge = Options(mine.groups, {**mine.values, "lr": [1e300]})
    assert misfit(mine, wrong) is None
    assert training.why_not(wrong)
    assert training.why_not(huge)
    assert training.why_not(Options(mine.groups, {**mine.values, "lr": [0.2]})) is None
    assert options_of(optimizer.param_groups) == mine
    assert torch.equal(parameter, torch.ones(3))
    assert not optimizer.state


def test_a_step_uses_as_many_cores_as_the_member_with_fewest() -> None:
    """Of those that have samples, and whose number matters: then all can, and all round alike."""
    options = options_of([{"lr": 0.1}])
    cores = {peer(1): (8, 4), peer(2): (16, 4), peer(3): (1, 0), peer(4): (0, 4)}
    gathered = {
        each: decode_plain(encode(Said(options, samples=samples, cores=most)))
        for each, (most, samples) in cores.items()
    }
    assert agree(gathered, list(cores)).cores == 8
    without = {each: decode_plain(encode(Said(options, samples=4))) for each in cores}
    assert agree(without, list(cores)).cores == 0
    assert agree(gathered, list(cores)).digest != agree(without, list(cores)).digest


def stepping(kind: str, made: torch.optim.Optimizer) -> TrainingState:
    """What is trained by an optimizer, in each way in which steps are taken."""
    if kind == "merging":
        return LocalSteps(made, None, (), LocalSGD(2).merging)
    return LocalTrainingState(made) if kind == "local updates" else TrainingState(made)


@pytest.mark.parametrize("kind", ["synchronous", "local updates", "merging"])
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("lr", math.nan, "lr of parameter group 1 is nan"),
        ("lr", math.inf, "lr of parameter group 1 is inf"),
        ("lr", -0.5, "lr of parameter group 1 is -0.5"),
        ("lr", 1e30, r"lr of parameter group 1 is 1e\+30"),
        ("lr", torch.tensor(math.nan), "lr of parameter group 1 is nan"),
        ("lr", np.float32("nan"), "lr of parameter group 1 is nan"),
        ("betas", (0.9, math.nan), "betas of parameter group 1 is nan"),
        ("betas", (0.9, 1.5), r"betas of parameter group 1 is 1\.5"),
        ("weight_decay", -0.1, r"weight_decay of parameter group 1 is -0\.1"),
        ("weight_decay", math.inf, "weight_decay of parameter group 1 is inf"),
        ("eps", math.nan, "eps of parameter group 1 is nan"),
    ],
)
def test_a_learning_rate_of_nan_was_refused_in_the_round_only(kind: str, option: str, value: Any, says: str) -> None:
    """With a strategy that merges never: it made all weights NaN, again and again. It is refused at the next step."""
    torch.manual_seed(0)
    trained = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))]
    made = torch.optim.AdamW([{"params": [each]} for each in trained], lr=0.1)
    training, group = stepping(kind, made), made.param_groups[1]
    good = group[option]
    for each in trained:
        each.grad = torch.ones_like(each)
    assert training.accumulate(4)
    samples, before = training.pending.samples, [each.detach().clone() for each in trained]
    group[option] = value
    for _ in range(2):
        with pytest.raises(ConfigError, match=says):
            training.accumulate(4)
    assert training.pending.samples == samples
    assert all(map(torch.equal, before, trained))
    group[option] = good
    assert training.accumulate(4)


def test_options_that_schedules_and_programs_set_are_taken() -> None:
    """A rate that comes to 0 by rounding, one that begins at 0, an option that was infinite from the beginning."""

    class Grows(torch.optim.SGD):
        def __init__(self, params: Any, growth: float = math.inf) -> None:
            super().__init__(params, lr=0.0)
            self.param_groups[0].update(growth=growth, best=math.inf)

    made = Grows([torch.nn.Parameter(torch.ones(2))])
    training, group = TrainingState(made), made.param_groups[0]
    group["params"][0].grad = torch.ones(2)
    for options in ({}, {"lr": 0.1}, {"lr": 0.0}, {"best": -1.0}, {"lr": torch.tensor(0.5)}, {"nesterov": True}):
        group.update(options)
        assert training.accumulate(4)
    training = TrainingState(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    training.optimizer.param_groups[0]["lr"] = -1e-18
    training.parameters[0].grad = torch.ones(2)
    assert training.accumulate(4)
