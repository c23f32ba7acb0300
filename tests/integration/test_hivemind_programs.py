"""What programs written for hivemind do with a DHT and averagers, on real sockets in one process."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.averaging import AveragingMode
from shoal.dht import SchemaValidator
from shoal.errors import ClosedError, NobodyContributes
from shoal.events import Warned
from tests.integration.test_runtime import averager, two_peers
from tests.integration.workers import LONG_S, until


def soon() -> float:
    """An expiration."""
    return shoal.get_dht_time() + 60


def test_get_current_state_that_returns_two_values() -> None:
    """Not any more a ValueError of the donor and None for the newcomer: the infos may be left out."""

    class Mine(shoal.DecentralizedAverager):
        def get_current_state(self) -> Any:
            return {"epoch": np.int64(7)}, (torch.full((3,), 2.0), torch.arange(4))

    with two_peers() as (first, second), Mine([torch.ones(3)], first, start=True, prefix="p"):
        metadata, tensors = until(lambda: averager(second, torch.zeros(3)).load_state_from_peers(timeout=10))
    assert metadata == {"epoch": 7}
    assert [tensor.tolist() for tensor in tensors] == [[2, 2, 2], [0, 1, 2, 3]]


def test_get_current_state_that_returns_one_value() -> None:
    """Only the metadata."""

    class Mine(shoal.DecentralizedAverager):
        def get_current_state(self) -> Any:
            return ("metadata",)

    with two_peers() as (first, second), Mine([torch.ones(3)], first, start=True, prefix="p"):
        found = until(lambda: averager(second, torch.zeros(3)).load_state_from_peers(timeout=10))
    assert found == ("metadata", [])


@pytest.mark.parametrize("state", [(), (None, [], None, 1), {"epoch": 7}, (None, [torch.ones(1)], [])])
def test_get_current_state_that_returns_something_else_is_a_warning(state: Any) -> None:
    """The donor's user is told what to return; the newcomer gets none."""

    class Mine(shoal.DecentralizedAverager):
        def get_current_state(self) -> Any:
            return state

    said: list[str] = []
    with two_peers() as (first, second), Mine([torch.ones(3)], first, start=True, prefix="p"):
        first.events.subscribe(lambda event: said.append(event.message) if isinstance(event, Warned) else None)
        other = averager(second, torch.zeros(3))
        until(lambda: other.load_state_from_peers(timeout=10) is None and bool(said))
    assert "get_current_state" in said[0]


def test_every_future_can_be_awaited() -> None:
    """In the user's own event loop: steps, states, group bits, stores, gets, coroutines; and what they raise."""

    async def main() -> None:
        with two_peers() as (first, second):
            one, two = averager(first, torch.zeros(2)), averager(second, torch.ones(2))
            both = await asyncio.gather(one.step(wait=False, gather=np.float32(0.5)), two.step(wait=False, gather=[1]))
            assert both[0] == both[1] == {first.peer_id: 0.5, second.peer_id: [1]}
            assert await one.set_group_bits("01", wait=False) is None  # type: ignore[func-returns-value]
            assert await one.get_group_bits(wait=False) == "01"
            assert await first.store("key", np.float32(0.5), soon(), subkey="a", return_future=True)
            found = await first.get("key", latest=True, return_future=True)
            assert found is not None
            assert found.value["a"].value == 0.5

            async def fails(_dht: shoal.DHT, _node: object) -> None:
                raise KeyError("missing")

            with pytest.raises(KeyError, match="missing"):
                await first.run_coroutine(fails, return_future=True)
            two.shutdown()
            waiting = one.step(wait=False, timeout=LONG_S)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(waiting, 0.01)
            assert waiting.cancelled()
            until(lambda: not one._core().looking)
            ending = one.step(wait=False, timeout=LONG_S)
            one.shutdown()
            with pytest.raises(ClosedError):
                await ending

    asyncio.run(main())


def test_validators_added_before_the_start_count() -> None:
    """As those given to the constructor; and what they refuse is False."""
    dht = shoal.DHT(start=False, record_validators=[SchemaValidator({"first": int}, allow_extra_keys=False)])
    dht.add_validators([SchemaValidator({"second": bytes}, allow_extra_keys=False)])
    with dht:
        dht.run_in_background()
        dht.add_validators([SchemaValidator({"third": dict[str, int]}, allow_extra_keys=False)])
        assert dht.store("first", 1, soon())
        assert dht.store("second", b"bytes", soon())
        assert dht.store("third", 3, soon(), subkey="entry")
        assert not dht.store("first", "text", soon())
        assert not dht.store("third", 3, soon())
        assert not dht.store("fourth", 4, soon())
        assert dht.get("fourth", latest=True) is None


def test_an_averager_has_its_mode() -> None:
    """Also before it is started."""
    with shoal.DHT(start=True) as dht:
        given: list[dict[str, Any]] = [{}, {"client_mode": True}, {"auxiliary": True}]
        made = [shoal.DecentralizedAverager([torch.ones(1)], dht, start=False, prefix="p", **each) for each in given]
    modes = [each.mode for each in made]
    assert modes == [AveragingMode.NODE, AveragingMode.CLIENT, AveragingMode.AUX]


def test_state_sharing_is_set_before_the_start() -> None:
    """Whether, and with which priority; it counts from the start on."""
    with shoal.DHT(start=True) as dht:
        one = shoal.DecentralizedAverager([torch.ones(1)], dht, start=False, prefix="p")
        assert one.allow_state_sharing
        one.allow_state_sharing, one.state_sharing_priority = False, np.float32(2.5)  # type: ignore[assignment]
        one.run_in_background()
        assert not one.allow_state_sharing
        assert one.state_sharing_priority == 2.5


def test_auxiliary_peers_alone_are_told_at_once() -> None:
    """With all defaults: not after 300 s."""
    with two_peers() as (first, second):
        one, two = averager(first, torch.zeros(2), auxiliary=True), averager(second, torch.ones(2), auxiliary=True)
        for step in (one.step(wait=False), two.step(wait=False)):
            with pytest.raises(NobodyContributes, match="all 2 peers that look for a group are auxiliary"):
                step.result(LONG_S)
