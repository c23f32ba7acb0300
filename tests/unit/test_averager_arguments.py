"""The averager's documented interface: its arguments, what does not fit together, and the page that lists them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.averaging import AveragerSettings, StepRequest, choose_timeouts
from shoal.averaging.timeouts import TIMEOUTS
from shoal.compression import CompressionInfo, Float16Compression, NoCompression, TensorDescriptor
from shoal.errors import ConfigError
from shoal.protocol.wire import decode_plain
from shoal.runtime.arguments import choose_codecs, client_argument
from shoal.runtime.control import StepControl

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "averaging.md").read_text(encoding="utf-8")
WORDS = {"": inspect.Parameter.empty, "None": None, "True": True, "False": False, "''": "", "1 MiB": 1 << 20}


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without its head."""
    text = PAGE[PAGE.index(f"\n## {heading}\n") :]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table
    lines = table[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_the_page_lists_every_argument_with_its_default() -> None:
    """In the constructor's order; `NoCompression()` and what follows a colon say what None means."""
    found = {row[0].strip("`"): row[1].strip("| ") for row in rows("Constructor")}
    parameters = inspect.signature(shoal.DecentralizedAverager).parameters
    assert set(found) == set(parameters)
    for name, cell in found.items():
        said, default = cell.partition(":")[0].strip("`"), parameters[name].default
        if name == "averaging_expiration":
            assert (said, default) == ("15", None)  # None, so that giving both of its names can be told
        elif said == "NoCompression()" or name == "min_matchmaking_time":
            assert default is None
        else:
            assert (WORDS[said] if said in WORDS else float(said)) == default, name


def test_the_page_lists_every_argument_of_step() -> None:
    """As in the method's own order."""
    listed = re.search(r"`step\(([a-z_, ]+)\)`", PAGE)
    assert listed
    parameters = list(inspect.signature(shoal.DecentralizedAverager.step).parameters)
    assert listed[1].split(", ") == parameters[1:]
    given = dict(re.findall(r"^\| … `(\w+)=(\w+)`", PAGE, re.MULTILINE))
    defaults = inspect.signature(shoal.DecentralizedAverager.step).parameters
    assert {name: WORDS[value] for name, value in given.items()} | {"gather": None, "wait": True} == {
        name: defaults[name].default for name in parameters[1:]
    }


def test_the_page_lists_the_methods_and_those_of_a_step() -> None:
    """Every public name of the two classes stands on the page."""
    own = {name for name in dir(shoal.DecentralizedAverager) if not name.startswith("_")}
    steering = {name for name in vars(StepControl) if not name.startswith("_")}
    assert {name for name in own | steering if f"`{name}" not in PAGE} == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request_timeout_s": 3.0, "window_s": 2.0}, "lower request_timeout or raise averaging_exp"),
        ({"min_group_size": 5, "target_group_size": 4}, "min_group_size=5 must be at most target_group_size=4"),
        ({"silence_s": 9.0, "reducer_silence_s": 9.0}, "sender_timeout=9 must be less than reducer_timeout=9"),
        ({"silence_s": 9.0, "allreduce_timeout_s": 8.0}, "less than allreduce_timeout=8: lower sender_timeout"),
        ({"silence_s": 0.5}, "sender_timeout must be at least 1 second"),
        ({"allreduce_timeout_s": 1.0}, "allreduce_timeout must be more than 1 second, got 1.0"),
        ({"averaging_alpha": 0.0}, "averaging_alpha must be above 0"),
        ({"averaging_alpha": 1.5}, "averaging_alpha must be above 0 and at most 1, got 1.5"),
        ({"averaging_alpha": "1"}, "averaging_alpha must be"),
        ({"part_size_bytes": 1}, "part_size_bytes must be"),
        ({"part_size_bytes": 2.0**20}, "part_size_bytes must be a whole number"),
        ({"group_bits": "012"}, "initial_group_bits must be a text of 0 and 1"),
        ({"group_bits": 1}, "initial_group_bits must be a text of 0 and 1"),
        ({"group_bits": "0" * 65}, "at most 64"),
        ({"bandwidth": -1.0}, "bandwidth must be None"),
        ({"bandwidth": float("inf")}, "bandwidth must be None"),
        ({"min_vector_size": -1}, "min_vector_size must be"),
        ({"min_group_size": 0}, "min_group_size must be"),
        ({"min_group_size": True}, "min_group_size must be"),
        ({"target_group_size": 1025}, "target_group_size must be None"),
        ({"target_group_size": 1, "min_group_size": 1}, "target_group_size must be None (no limit), or a whole number"),
        ({"window_s": 1801.0}, "averaging_expiration must be at most 1800 seconds, got 1801.0"),
        ({"allreduce_timeout_s": float("inf")}, "allreduce_timeout must be a number of seconds"),
        ({"declare_state_period_s": 0}, "declare_state_period must be"),
        ({"declare_state_period_s": 1801.0}, "declare_state_period must be at most 1800 seconds, got 1801.0"),
        ({"next_chunk_timeout_s": float("nan")}, "next_chunk_timeout must be"),
        ({"next_chunk_timeout_s": 1.9}, "next_chunk_timeout must be at least 2 seconds, got 1.9"),
        ({"auxiliary": 1}, "auxiliary must be True or False"),
        ({"auxiliary": True, "client_mode": True}, "set client_mode=False"),
        ({"auxiliary": True, "bandwidth": 0.0}, "auxiliary=True with bandwidth=0"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_change(changes: dict[str, Any], message: str) -> None:
    """Every value and every relation between two."""
    AveragerSettings().check()
    with pytest.raises(ConfigError) as caught:
        msgspec.structs.replace(AveragerSettings(), **changes).check()
    assert message in str(caught.value)


SOME = st.none() | st.sampled_from([1, 1.5, 2, 3, 6, 15, 60, 120, 1799]) | st.floats(0.001, 4000)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(TIMEOUTS, SOME)))
def test_timeouts_follow_from_those_that_were_given(limits: dict[str, float | None]) -> None:
    """What was given stays, and all fit each other; or an error names only what was given, by the user's names."""
    names = {name: f"users_{name}" for name in TIMEOUTS}
    try:
        chosen = choose_timeouts(limits, names=names)
    except ConfigError as error:
        named = set(re.findall(r"users_(\w+)", str(error)))
        assert named
        assert named <= {name for name, value in limits.items() if value is not None}
        return
    msgspec.structs.replace(AveragerSettings(), **chosen).check()
    for name, value in limits.items():
        assert value is None or chosen[TIMEOUTS[name]] == value


@pytest.mark.parametrize(
    ("limits", "follow"),
    [
        ({}, {"averaging_expiration": 15, "request_timeout": 3, "sender_timeout": 5, "allreduce_timeout": 120}),
        ({"averaging_expiration": 2}, {"request_timeout": 1}),
        ({"averaging_expiration": 0.2}, {"request_timeout": 0.1}),
        ({"request_timeout": 20}, {"averaging_expiration": 40}),
        ({"allreduce_timeout": 6}, {"sender_timeout": 2}),
        ({"allreduce_timeout": 2}, {"sender_timeout": 1}),
        ({"reducer_timeout": 6}, {"sender_timeout": 3}),
        ({"next_chunk_timeout": 200}, {"sender_timeout": 200, "allreduce_timeout": 800}),
        ({"next_chunk_timeout": 200, "allreduce_timeout": 60}, {"sender_timeout": 20}),
        ({"next_chunk_timeout": 2}, {"sender_timeout": 2, "allreduce_timeout": 120}),
    ],
)
def test_averaging_timeout_5_fails_with_an_error_that_names_sender_timeout(
    limits: dict[str, float], follow: dict[str, float]
) -> None:
    """Not any more: the others follow from what was given."""
    chosen = choose_timeouts(limits)
    assert {name: chosen[TIMEOUTS[name]] for name in follow} == follow


def test_tensor_infos_decide_the_codec() -> None:
    """They are handed to the codec's `choose` in place of what the tensor itself says."""
    tensors = [torch.zeros(3), torch.zeros(2, 2)]

    class ByKey(NoCompression):
        def choose(self, info: CompressionInfo) -> NoCompression | Float16Compression:
            return Float16Compression() if info.key == "big" else NoCompression()

    infos = [CompressionInfo.from_tensor(tensors[0], key="small"), CompressionInfo.from_tensor(tensors[1], key="big")]
    assert [codec.name for codec in choose_codecs(tensors, ByKey(), infos)] == ["none", "float16"]
    assert [codec.name for codec in choose_codecs(tensors, ByKey(), None)] == ["none", "none"]


@pytest.mark.parametrize(
    ("infos", "message"),
    [
        ([], "tensor_infos has 0 entries for 1 averaged tensors: give one for each"),
        (["a"], "tensor_infos[0] must be a CompressionInfo, got str"),
        ([CompressionInfo("a", TensorDescriptor((4,), torch.float32))], "tensor_infos[0] describes (4,)"),
    ],
)
def test_tensor_infos_of_other_tensors_are_refused(infos: list[Any], message: str) -> None:
    """Number, type, shape and dtype."""
    with pytest.raises(ConfigError) as caught:
        choose_codecs([torch.zeros(3)], NoCompression(), infos)
    assert message in str(caught.value)


def test_numpy_scalars_are_refused_in_gather() -> None:
    """Not any more: numbers of numpy and torch are sent as Python's own, and a weight may be one, too."""
    gather, weight = {"loss": np.float32(0.5), "steps": [np.int64(3), torch.tensor(2)]}, np.float32(2)
    request = StepRequest(gather=gather, weight=weight)  # type: ignore[arg-type]
    assert decode_plain(request.gathered) == {"loss": 0.5, "steps": [3, 2]}
    assert type(request.weight) is float
    with pytest.raises(ConfigError, match=r"gather cannot be sent: a ndarray is no plain value \(use numbers"):
        StepRequest(gather=np.zeros(3))


@pytest.mark.parametrize("weight", [-1.0, 1e-10, 1e13, float("nan"), float("inf"), "1", True, None])
def test_a_weight_that_is_none_is_refused(weight: Any) -> None:
    """At once, and also when it is changed later; the old one stays."""
    with pytest.raises(ConfigError, match="weight must be 0, or a number from 1e-09 to 1e\\+12, got"):
        StepRequest(weight=weight)
    request = StepRequest(weight=2)
    with pytest.raises(ConfigError, match="weight must be 0, or a number from 1e-09 to 1e\\+12, got"):
        request.weight = weight
    assert request.weight == 2.0


@pytest.mark.parametrize("when", [float("nan"), "now", True])
def test_a_time_that_is_none_is_refused(when: Any) -> None:
    """As above."""
    with pytest.raises(ConfigError, match="scheduled_time must be a time in seconds"):
        StepRequest(scheduled_time=when)


def test_a_peer_that_nobody_reaches_now_makes_averagers_that_are_clients_for_ever() -> None:
    """What is made meanwhile takes part as soon as the way is open; only who asked for a client has one for ever."""
    assert client_argument(None, only_dials=True, is_client=True)
    assert not client_argument(None, only_dials=False, is_client=True)
    assert client_argument(True, only_dials=False, is_client=False)
    with pytest.raises(ConfigError, match="client_mode=False"):
        client_argument(False, only_dials=False, is_client=True)
