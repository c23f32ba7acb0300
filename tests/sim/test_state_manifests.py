"""Peers that ask a donor for its state again and again and never take it: what that costs is bounded for each host."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from shoal.base.clock import Env
from shoal.protocol.wire import GetManifest, ManifestPending, ManifestReply
from shoal.sim import Swarm, run, sleep
from shoal.state.wire import Pacer
from shoal.state.wire.upload import Upload
from shoal.transport.memory import MemoryConnection
from tests.sim.state_kit import MIB, PREFIX, Box, Node, SlowExecutor, donors_of, fetch, new_swarm, node

COPY_S = 4.5
"""How long a copy takes: to look at it, to copy and to hash it."""


def now() -> float:
    """Seconds of the loop."""
    return asyncio.get_running_loop().time()


@pytest.fixture(autouse=True)
def one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers whose names begin with `nat-` have one address."""

    def seen(connection: MemoryConnection) -> str:
        host: str = connection._hosts[1]
        return "nat" if host.startswith("nat-") else host

    monkeypatch.setattr(MemoryConnection, "remote_host", property(seen))


async def start(
    *names: str, slow: bool = True, mebibytes: int = 4, metadata: str = ""
) -> tuple[Swarm[Node], Node, Box]:
    """A donor whose state moves on every second, and others."""

    def change(env: Env) -> Env:
        return replace(env, executor=SlowExecutor(COPY_S / 3)) if slow else env

    swarm = new_swarm()
    box = Box([torch.zeros(mebibytes * MIB // 4)], metadata=metadata)
    donor = await swarm.start_peer("donor", node(box, change_env=change))
    await swarm.start_peers(list(names), node())

    async def train() -> None:
        while True:
            await sleep(1.0)
            await box.write(box.epoch + 1.0)

    swarm.spawn("donor", train())
    return swarm, donor, box


def begin_to_ask(swarm: Swarm[Node], donor: Node, *names: str) -> None:
    """These peers ask for the manifest from now on, each again and again."""

    async def ask(me: Node) -> None:
        while True:
            reply = await me.endpoint.call(donor.endpoint.contact, GetManifest(PREFIX), timeout_s=5.0)
            assert isinstance(reply, ManifestReply | ManifestPending)
            await sleep(0.4)

    for name in names:
        swarm.spawn(name, ask(swarm.peer(name)))


@pytest.mark.parametrize("keys", [3, 10, pytest.param(30, marks=pytest.mark.long(full=True))])
def test_peers_that_never_download_have_the_state_copied_all_the_time(keys: int) -> None:
    """One host causes copies for a tenth of the time and five seconds, however many keys it has."""

    async def main() -> None:
        names = [f"nat-{number}" for number in range(keys)]
        swarm, donor, box = await start(*names)
        begin_to_ask(swarm, donor, *names)
        await sleep(60.0)
        assert 2 <= box.holds <= 3  # it were 9
        await sleep(150.0)
        assert box.holds <= 6

    run(main)


def test_many_hosts_together_have_the_state_copied_all_the_time() -> None:
    """All together cause copies for a quarter of the time and ten seconds."""

    async def main() -> None:
        names = [f"host{number}" for number in range(20)]
        swarm, donor, box = await start(*names)
        begin_to_ask(swarm, donor, *names)
        await sleep(60.0)
        assert box.holds * COPY_S <= 60.0 / 4 + 10.0 + COPY_S
        assert await get_in(swarm, donor, box, "host3", within_s=5 * COPY_S + 4.0)

    run(main)


async def get_in(swarm: Swarm[Node], donor: Node, box: Box, name: str, within_s: float) -> bool:
    """One downloads a state that is no older than it wants: the present epoch."""
    began = now()
    state = await fetch(swarm, name, donors_of(donor), min_epoch=box.epoch)
    values = {float(state.tensors[0].min()), float(state.tensors[0].max())}
    return values == {float(state.epoch)} and now() - began <= within_s


def test_newcomers_of_other_hosts_are_served_beside_those_that_only_ask() -> None:
    """Within the seconds that a copy and a download take, and also those who have no use for an older state."""

    async def main() -> None:
        names = [f"nat-{number}" for number in range(5)]
        swarm, donor, box = await start(*names, "a", "b", "c")
        begin_to_ask(swarm, donor, *names)
        await sleep(40.0)
        for name in ("a", "b", "c"):
            assert await get_in(swarm, donor, box, name, within_s=COPY_S + 4.0)
            await sleep(7.0)

    run(main)


def test_newcomers_behind_the_address_of_those_that_only_ask_get_in() -> None:
    """The next copy that the host causes is theirs, too: they wait for ten times as long as it takes."""

    async def main() -> None:
        names = [f"nat-{number}" for number in range(5)]
        honest = [f"nat-honest{number}" for number in range(4)]
        swarm, donor, box = await start(*names, *honest)
        begin_to_ask(swarm, donor, *names)
        await sleep(60.0)
        for name in honest[:2]:
            assert await get_in(swarm, donor, box, name, within_s=11 * COPY_S + 4.0)
        copies = box.holds
        assert all(await asyncio.gather(*(get_in(swarm, donor, box, name, within_s=60.0) for name in honest)))
        assert box.holds <= copies + 4

    run(main)


@pytest.mark.parametrize("slow", [True, False])
def test_a_machine_whose_peers_all_download_is_limited(slow: bool) -> None:
    """Forty peers of one host one after another get the present state at once, each from a copy of its own."""

    async def main() -> None:
        names = [f"nat-{number}" for number in range(40)]
        swarm, donor, box = await start(*names, slow=slow, mebibytes=1)
        for name in names:
            assert await get_in(swarm, donor, box, name, within_s=COPY_S * slow + 1.5)
            await sleep(1.0)
        assert box.holds == 40

    run(main)


def test_newcomers_that_are_killed_before_they_download_keep_out_those_after_them() -> None:
    """Ten of one host, one after another, ask and are gone: the next one waits no longer than for one of them, 2 s."""

    async def main() -> None:
        names = [f"nat-{number}" for number in range(10)]
        swarm, donor, box = await start(*names, "nat-last", slow=False)
        for name in names:
            me = swarm.peer(name)
            reply = await me.endpoint.call(donor.endpoint.contact, GetManifest(PREFIX), timeout_s=5.0)
            assert isinstance(reply, ManifestReply)
            swarm.crash(name)
            await sleep(1.5)
        assert await get_in(swarm, donor, box, "nat-last", within_s=4.0)

    run(main)


def test_ever_new_keys_keep_an_old_copy() -> None:
    """Each key that was told of a copy keeps it for 2 s, those of one host 12 s together: it were 120 s."""

    async def main() -> None:
        names = [f"nat-{number}" for number in range(60)]
        swarm, donor, box = await start(*names, "new", slow=False)

        async def ask() -> None:
            for name in names:
                me = swarm.peer(name)
                await me.endpoint.call(donor.endpoint.contact, GetManifest(PREFIX), timeout_s=5.0)
                await sleep(1.0)

        asking = asyncio.create_task(ask())
        await sleep(2.5)
        assert await get_in(swarm, donor, box, "new", within_s=15.0)
        asking.cancel()

    run(main)


def test_manifests_are_taken_for_rounds_that_states_give_way_to() -> None:
    """A newcomer's 10 MB took 40 s beside requests for manifests: states had a tenth of what those took."""

    async def main() -> None:
        swarm, donor, _ = await start("nat-0", slow=False, metadata="x" * 100_000)
        me, upload = swarm.peer("nat-0"), Upload.of(donor.endpoint)
        for _ in range(3):
            await me.endpoint.call(donor.endpoint.contact, GetManifest(PREFIX), timeout_s=5.0)
            await sleep(0.1)
        began = now()
        for _ in range(4):
            await upload.admit(upload.piece_bytes(MIB, Pacer(None), 0.1), Pacer(None), 0.1)
        assert now() == began

    run(main)
