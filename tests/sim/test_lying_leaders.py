"""A leader whose `Begin` is a lie: a thousand made-up members, numbers that cannot be. An honest peer joins it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from shoal import sim
from shoal.averaging.directory import DhtDirectory
from shoal.base.peer import Address, PeerID
from shoal.errors import PeerTimeout, RoundFailed
from shoal.events import Event, PeerDropped
from shoal.protocol import wire
from shoal.rpc.dial_limits import MOST_PER_SITE, MOST_UNPROVED
from tests.sim.averaging_kit import SETTINGS, Trial
from tests.sim.test_averager_steps import _wall
from tests.sim.test_extremes import cases, decodes, some
from tests.wire_extremes import replaced

NUMEL = 2000
Begins = Callable[[wire.Member, wire.Member], msgspec.Raw]


async def led(begin: Begins, steps: int, watch: Callable[[Any], None]) -> tuple[Trial, list[Event], PeerID]:
    """An honest averager and one that leads it with these; its steps, each of three seconds at most."""
    settings = msgspec.structs.replace(SETTINGS, window_s=1.0, request_timeout_s=0.5)
    trial, events = Trial(settings=settings), list[Event]()
    honest = await trial.add("honest", [torch.zeros(NUMEL)])
    bad = await trial.add("bad", [torch.zeros(NUMEL)])
    honest.core.env.events.subscribe(events.append)
    watch(honest.core.endpoint)

    async def lead(stream: Any, join: wire.Join) -> None:
        await stream.send(wire.JoinAccepted())
        own = wire.Member(bad.core.endpoint.contact, True, None, b"\xc0")
        await stream.send(begin(join.member, own))
        while await stream.recv() is not None:
            pass

    async def declare() -> None:
        bad.core.endpoint.serve_stream(wire.Join, lead, scope="trial")
        directory = DhtDirectory(bad.core.node, bad.core.endpoint, timeout_s=2.0)
        for _ in range(steps):
            await directory.declare("trial.0b", _wall(trial, "bad") + 0.9, bad.core.endpoint.contact)
            await sim.sleep(3.0)

    await trial.swarm.run_on("bad", bad.close)
    declaring = trial.swarm.spawn("bad", declare())
    for _ in range(steps):
        loop = asyncio.get_running_loop()
        ends = loop.time() + 3.0
        with pytest.raises(RoundFailed):
            await trial.step("honest", timeout_s=2.5, allow_retries=False)
        await sim.sleep(ends - loop.time())
    declaring.cancel()
    return trial, events, bad.core.peer_id


def test_a_begin_with_a_thousand_made_up_members_costs_a_member_few_dials() -> None:
    """It opened 1,022 sockets at each honest member, wherever it said, and none were left for the program."""
    under_way = list[int]()

    def made_up(joiner: wire.Member, own: wire.Member) -> msgspec.Raw:
        others = []
        for number in range(1000):
            peer = PeerID(number.to_bytes(32, "big"))
            address = Address(f"203.0.{number // 250}.{number % 250}", 4000, peer)
            others.append(wire.Member(wire.Contact(peer, (address,)), True, None, b"\xc0"))
        members = [own, joiner, *others]
        shares = [NUMEL - 1001, 1, *[1] * 1000]
        return msgspec.Raw(wire.encode(wire.Begin(b"r" * 16, members, 0, shares, 1024)))

    def watch(endpoint: Any) -> None:
        transport = endpoint._dialer.dials._transport
        dial, now = transport.dial, 0

        async def counting(peer: PeerID, addresses: Any, *, timeout_s: float) -> Any:
            nonlocal now
            now += 1
            under_way.append(now)
            try:
                if addresses[0].host.startswith("203."):  # packets to there are lost
                    await sim.sleep(timeout_s)
                    raise PeerTimeout("no connection", peer)
                return await dial(peer, addresses, timeout_s=timeout_s)
            finally:
                now -= 1

        transport.dial = counting

    async def main() -> None:
        trial, _, _ = await led(made_up, 1, watch)
        await sim.sleep(10.0)
        await trial.close()

    sim.run(main, seed=3)
    assert MOST_UNPROVED // 2 <= max(under_way) <= MOST_UNPROVED + MOST_PER_SITE


def test_a_begin_with_extremes_is_refused_by_name() -> None:
    """A sample of its fields: the search goes on, and the leader is named."""
    sent = list[bool]()

    def extreme(joiner: wire.Member, own: wire.Member) -> msgspec.Raw:
        begin = wire.Begin(b"r" * 16, [own, joiner], 0, [NUMEL, 0], 1024)
        case = list(some([case for case in cases([begin]) if not decodes(*case)], 8))[len(sent)]
        sent.append(True)
        return msgspec.Raw(replaced(*case))

    async def main() -> None:
        trial, events, leader = await led(extreme, 6, lambda _: None)
        dropped = [event for event in events if isinstance(event, PeerDropped)]
        assert len(sent) >= 2
        assert {event.peer for event in dropped} == {leader}
        assert len(dropped) >= 2  # then it is avoided
        await trial.close()

    sim.run(main, seed=4)
