"""A newcomer is killed at each point of its download: nothing of it stays with the donors, and it can come again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shoal import sim
from shoal.base.peer import PeerID
from shoal.state.wire import DownloadedState, ShareLimits, StateDonor
from shoal.state.wire.assembly import Assembly
from shoal.state.wire.download import _Download
from shoal.state.wire.feed import Feed, Target
from tests.sim.test_catch_up import MEMBERS, MIB, Scene, held, paces

CHUNKS = 4
LINGER_S = ShareLimits().linger_s


def donors(scene: Scene) -> list[StateDonor]:
    """Those of the members."""
    found = [scene.run.swarm.peer(name).participant._states.sharing._donor for name in MEMBERS]
    return [donor for donor in found if donor is not None]


def kill_at(point: str, monkeypatch: pytest.MonkeyPatch, kill: Callable[[], None]) -> None:
    """Have it killed once when its download is there. A killed peer's code goes on to its next wait, no further."""
    left = [kill]

    def now() -> None:
        if left:
            left.pop()()

    async def manifest_came(download: Any, donor: Any, manifest: Any) -> Feed:
        now()
        await sim.sleep(0)
        return await join(download, donor, manifest)

    def chunk_came(target: Target, chunk: int, peer: PeerID) -> None:
        verified(target, chunk, peer)
        assert len(target.manifest.hashes) == CHUNKS
        if target.plan.verified == int(point.partition(" ")[2]):
            now()

    def checks(assembly: Assembly, share: range | None = None) -> Any:
        now()
        return finish(assembly, share)

    async def checked(download: Any, target: Target) -> DownloadedState | None:
        state = await finish_all(download, target)
        now()
        await sim.sleep(0)
        return state

    join, verified, finish, finish_all = _Download._join, Target.verified, Assembly.finish, _Download._finish
    if point == "manifest":
        monkeypatch.setattr(_Download, "_join", manifest_came)
    elif point == "checks":
        monkeypatch.setattr(Assembly, "finish", checks)
    elif point == "checked":
        monkeypatch.setattr(_Download, "_finish", checked)
    else:
        monkeypatch.setattr(Target, "verified", chunk_came)


@pytest.mark.parametrize(
    ("point", "how"),
    [
        ("chunk 2", "vanish"),
        ("checked", "crash"),
        *(
            pytest.param(point, how, marks=pytest.mark.long(full=point != "manifest"))
            for point, how in [
                *((point, "crash") for point in ("manifest", "chunk 1", "chunk 2", f"chunk {CHUNKS}", "checks")),
                *((point, "vanish") for point in ("manifest", "checked")),
            ]
        ),
    ],
)
def test_a_newcomer_that_is_killed_in_its_download_stays_with_the_donors(
    point: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its places are free at once, or when its silence is noticed; the copy after `linger_s`; epochs go on as before.

    When it starts again it takes part after one download, and ends with the bits of the others.
    """

    async def main() -> None:
        scene = Scene(6.0, 3 * MIB)
        await scene.begin()
        came = scene.loop.time()
        killed = asyncio.Event()

        def kill() -> None:
            assert any(donor.snapshot is not None for donor in donors(scene))
            getattr(scene.run.swarm, how)("late")
            killed.set()

        with monkeypatch.context() as patched:
            kill_at(point, patched, kill)
            late = await scene.newcomer()
            async with asyncio.timeout(60.0):
                await killed.wait()
        await sim.sleep(1.0 if how == "crash" else 6.0)
        assert [donor.receivers for donor in donors(scene)] == [0, 0, 0]
        await sim.sleep(2 * LINGER_S)
        assert [donor.snapshot for donor in donors(scene)] == [None, None, None]
        assert not late.epochs
        member = scene.run.swarm.peer("p0")
        alone, beside = paces(member, 0.0, came), paces(member, came, scene.loop.time())
        assert sum(beside) / len(beside) <= 1.05 * sum(alone) / len(alone), (alone, beside)
        assert max(beside) <= max(alone) + 1.0, (alone, beside)
        late = await scene.run.swarm.restart("late")
        scene.train("late")
        await held(scene, late, 30.0)

    sim.run(main, seed=5)
