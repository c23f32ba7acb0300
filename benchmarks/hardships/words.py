"""What a peer says: where the run ends, that it has a better state, or samples, under ever new keys."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from benchmarks.hardships.kit import PREFIX, Stranger, address_of, beside, jobs, left, pace, strangers, swarm
from benchmarks.truth.kit import Verdict, apart, changed
from benchmarks.truth.peers import Peer, Peers
from shoal.errors import PeerError
from shoal.protocol.wire import Contact, GetManifest, ManifestPending
from shoal.state.wire import Donor, DownloadedState, SharedState, StateDonor, download_state

__all__ = ["REPLAYS"]


def _attacked(attack: Callable[[Sequence[Peer]], Awaitable[None]], seconds: float) -> tuple[float, float, list[Any]]:
    """Three peers train, and then somebody lies to them: epochs a second in the calm, and meanwhile; their reports."""
    with Peers() as peers:
        those = swarm(peers, jobs(3))
        calm = pace(those[0], 10.0)
        lied: float = asyncio.run(beside(attack(those), lambda: pace(those[0], seconds)))
        return calm, lied, left(those)


def _judged(calm: float, lied: float, seconds: float, most_s: float, reports: list[Any]) -> Verdict:
    lost_s = seconds * (1 - lied / calm)
    differ, common = apart(reports)
    measured = f"{calm:.1f} epochs a second, then {lied:.1f}: {max(0.0, lost_s):.1f} of {seconds:.0f} s lost"
    return Verdict(held=lost_s <= most_s and differ == 0 and common > 0, measured=measured)


def one_message_end() -> Verdict:
    """A stranger says that the run ends, to all; and one honest peer says so for itself: the others go on."""

    async def attack(those: Sequence[Peer]) -> None:
        async with strangers(3) as liars:
            for liar in liars:
                for peer in those:
                    truth = await liar.tell(address_of(peer), left=True)
                    await liar.tell(address_of(peer), epoch=0, digest=bytes(32), end_epoch=truth.epoch + 5)
            await asyncio.sleep(1e9)

    return _judged(*(found := _attacked(attack, 15.0))[:2], 15.0, 3.0, found[2])


async def _busy(stranger: Stranger, those: Sequence[Peer], epochs: int = 1000) -> None:
    """Claim a better state, and ask everybody to come again."""
    stranger.endpoint.serve(GetManifest, lambda peer, request: ManifestPending(busy=True), scope=PREFIX)
    for peer in those:
        truth = await stranger.tell(address_of(peer), left=True)
        await stranger.tell(address_of(peer), epoch=truth.epoch + epochs, digest=secrets.token_bytes(32))


def busy() -> Verdict:
    """Every 5 s a new key claims a better state, and is always busy: it costs 20 s of waiting, in all."""

    async def attack(those: Sequence[Peer]) -> None:
        async with strangers(30) as liars:
            for liar in liars:
                await _busy(liar, those)
                await asyncio.sleep(5.0)

    return _judged(*(found := _attacked(attack, 80.0))[:2], 80.0, 26.0, found[2])


def claims() -> Verdict:
    """Every 10 s a new key claims 10^12 samples at the run's state, and comes to no round: epochs go on."""

    async def attack(those: Sequence[Peer]) -> None:
        async with strangers(30) as liars:
            for number in range(10**6):
                with_key = liars[number // 50 % len(liars)]
                for peer in those:
                    await with_key.tell(address_of(peer), samples=10**12)
                await asyncio.sleep(0.2)

    calm, lied, reports = _attacked(attack, 60.0)
    return _judged(calm, lied, 60.0, 10.0, reports)


async def _steal(stranger: Stranger, peer: Peer) -> DownloadedState:
    address = address_of(peer)
    donors = [Donor(Contact(address.peer_id, (address,)))]
    return await download_state(stranger.endpoint, stranger.endpoint.env, PREFIX, donors, timeout_s=10.0)


def poisoned_names() -> Verdict:
    """Strangers give the run's own state under names near all bounds, and with a learning rate that is a word."""

    async def attack(those: Sequence[Peer]) -> None:
        async with strangers(6) as liars:
            for number, liar in enumerate(liars):
                state = await _steal(liar, those[0])
                metadata = dict(state.metadata)
                epoch, samples = [(10**7, 10**9), (10**7 - 1, 2**62), (2 * 10**7, 5)][number % 3]
                if number >= 3:  # a good name, and options that are none
                    epoch, samples = state.epoch + 100, 10**7
                    options = metadata["training"]
                    metadata["training"] = _with_word(options)
                name = [epoch, secrets.token_bytes(32), samples]
                shared = SharedState(metadata | {"state": name}, state.tensors, None, epoch)
                donor = StateDonor(liar.endpoint, liar.endpoint.env, PREFIX, _Holding(shared), lambda: 0)
                for peer in those:
                    with contextlib.suppress(PeerError):  # refused at once
                        await liar.tell(address_of(peer), epoch=epoch, digest=name[1], branch_samples=samples)
                await asyncio.sleep(5.0)
                donor.stop()

    return _judged(*(found := _attacked(attack, 40.0))[:2], 40.0, 26.0, found[2])


def _with_word(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: "boom" if name == "lr" else _with_word(each) for name, each in value.items()}
    return [_with_word(each) for each in value] if isinstance(value, list | tuple) else value


class _Holding:
    """Gives a state that nobody changes."""

    def __init__(self, state: SharedState) -> None:
        self._state = state

    def __call__(self) -> _Holding:
        return self

    async def __aenter__(self) -> SharedState:
        return self._state

    async def __aexit__(self, *_: object) -> None: ...


def crowded_newcomer() -> Verdict:
    """Twelve keys claim better states and are busy while a newcomer comes: it has the run's state within 30 s."""
    with Peers() as peers:
        those = swarm(peers, jobs(3))

        async def attack() -> None:
            async with strangers(12) as liars:
                for liar in liars:
                    await _busy(liar, those)
                await asyncio.sleep(1e9)

        def join() -> float:
            time.sleep(3.0)
            entry = next(value for name, value in those[0].said if name == "address")
            began = time.monotonic()
            new = peers.start(_train, job=changed(jobs(1)[0], index=9, entries=(entry,), target=240))
            new.until_steps(3, 90.0)
            return time.monotonic() - began

        took_s: float = asyncio.run(beside(attack(), join))
    return Verdict(held=took_s < 30.0, measured=f"the third epoch together {took_s:.1f} s after its start")


def _train(line: Any, job: Any) -> Any:
    from benchmarks.truth.kit import train

    return train(line, job)


REPLAYS = (one_message_end, busy, claims, poisoned_names, crowded_newcomer)
