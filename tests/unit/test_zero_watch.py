"""How soon a rank of ZeRO that is frozen is named. The threads' turns are played here, at their configured times."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not export it

from shoal.errors import RankLost
from shoal.zero.ranks.watch import BEAT_S, Watch, _Pulse

NAMED_WITHIN_S = 5.0
_PHASES = [0.0, 0.1, 0.25, 0.4]


def named_after(turn: str, at: float, beats: float, looks: float, *, frozen: int | None, store: bool) -> float | None:
    """Seconds after `at`, when this rank begins to wait, until something is named; None: within a minute nothing is.

    Args:
        turn: what it waits in.
        at: when.
        beats: when the first of this rank's beats is. Each next one is `BEAT_S` later.
        looks: when its first look is, likewise.
        frozen: the rank that does not beat after `at`.
        store: whether the store answers after `at`.
    """
    pulse, found = _Pulse(0, 3), set[str]()
    times = sorted(
        [(beats + BEAT_S * n, "beat") for n in range(120)] + [(looks + BEAT_S * n, "look") for n in range(120)]
    )
    for time, what in times:
        if time >= at and turn not in pulse.waits:
            pulse.waits[turn] = pulse.looks
        if what == "look":
            found, waits_in = pulse.find_frozen()
        elif store or time < at:
            # Others beat as often as we do: each count is a new one, but for the frozen rank's.
            pulse.beat(lambda rank, now=time: 1 + int(10 * (at if rank == frozen else now)))  # type: ignore[misc]
        if found:
            assert waits_in == turn
            assert found == {f"rank {frozen}"} if store else len(found) == 1
            return time - at
    return None


@pytest.mark.parametrize("beats", _PHASES)
@pytest.mark.parametrize("looks", _PHASES)
@pytest.mark.parametrize("at", [3.01, 3.2, 3.45])
def test_a_frozen_rank_is_named_in_5_s(beats: float, looks: float, at: float) -> None:
    """From when another one waits for it, at the beats that are configured. A store that answers no more is, too."""
    for frozen, store in ((1, True), (None, False)):
        after_s = named_after("a reduce-scatter", at, beats, looks, frozen=frozen, store=store)
        assert after_s is not None
        assert after_s <= NAMED_WITHIN_S
    assert named_after("a reduce-scatter", at, beats, looks, frozen=None, store=True) is None


def test_a_store_that_is_gone_is_told_at_once() -> None:
    """`full_state_dict` of stage 3 tried to connect to it, for twice the group's timeout, and raised torch's error."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2, get_group_store=lambda: client)
    del server
    with pytest.raises(RankLost, match=r"the process that holds it .* is gone"):
        Watch(group)
