"""How cost grows with the number of peers: ``python -m benchmarks.growth``. Messages and bytes that one peer sends.

Real processes on loopback (``--groups``, TLS, links warm):

- *round*: one round of averaging in which all are one group, matchmaking and its part of the DHT included, without
  the tensor's own bytes (each peer sends 2 (N - 1) / N times the tensor);
- *store*, *get*: one DHT operation of each peer (`get` with `latest=True`, which asks all that hold the key), what the
  others answer included.

Simulated (``--swarms``): the same DHT operations in a network of N nodes, and *match*: groups of 16 of N peers are
formed through the DHT, the peers dealt to N / 16 keys at random (`benchmarks.moshpit_sim`), without averaging: its
cost depends on the group alone. Bytes there are before encryption: TLS adds 22 for each record. The numbers of the
simulation are the same on every machine.

A message is one frame (`docs/why/protocol.md`): a call, a reply, a heartbeat, or one message of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import dht_sim, moshpit_sim
from benchmarks.allreduce import ContenderFailed, Peer, processor, write
from benchmarks.contenders.counting import Messages
from shoal.dht import DhtSettings
from shoal.sim import SimNetwork, Swarm, run

START_S, ASK_S = 90.0, 90.0
GROUP = 16
WIDTH = 40


@dataclass(frozen=True)
class Row:
    """What one peer sends for one thing."""

    where: str
    what: str
    peers: int
    messages: float
    bytes: float


# ------------------------------------------------------------------------------------------------------ real processes


async def measure_processes(count: int, numel: int, rounds: int) -> list[Row]:
    """A swarm of this many processes."""
    processes: list[Peer] = []
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-") as logs:
        try:
            invites: list[str] = []
            for number in range(count):
                options = [str(count), str(numel)]
                process = await Peer.spawn(sys.executable, "growth_peer", options, Path(logs) / f"{number}.log")
                processes.append(process)
                invites.append((await process.ask("start", START_S, invites=invites[:1]))["invite"])

            async def sent() -> tuple[int, int]:
                answers = [await process.ask("sent", ASK_S) for process in processes]
                return sum(each["messages"] for each in answers), sum(each["bytes"] for each in answers)

            async def average(_: int) -> None:
                await asyncio.gather(*(process.ask("average", ASK_S) for process in processes))

            async def store(turn: int) -> None:
                for number, process in enumerate(processes):
                    await process.ask("store", ASK_S, key=f"{turn} {number}")

            async def get(turn: int) -> None:
                for number, process in enumerate(processes):
                    await process.ask("get", ASK_S, key=f"{turn} {(number + 1) % count}")

            rows = []
            payload = 2 * (count - 1) / count * numel * 4
            for what, work, own_bytes in (("round", average, payload), ("store", store, 0.0), ("get", get, 0.0)):
                if what == "round":
                    await average(-1)
                    await average(-2)
                before = await sent()
                for turn in range(rounds):
                    await work(turn)
                after = await sent()
                messages, nbytes = ((b - a) / count / rounds for a, b in zip(before, after, strict=True))
                rows.append(Row("processes", what, count, messages, nbytes - own_bytes))
            return rows
        finally:
            await asyncio.gather(*(process.stop() for process in processes))


# ---------------------------------------------------------------------------------------------------------- simulation


async def simulate_dht(nodes: int, operations: int, seed: int, messages: Messages) -> list[Row]:
    """One operation each of some nodes. Runs under `shoal.sim.run`."""
    rng = random.Random(f"{seed}/growth")
    swarm = Swarm[dht_sim.Peer](seed, network=SimNetwork(seed, latency_s=0.002, jitter_s=0.002))
    await dht_sim.grow(swarm, nodes, DhtSettings(refresh_s=1e6, republish_s=1e6, retry_lost_s=1e6))
    names = list(swarm.peers)
    await asyncio.sleep(60.0)  # what the last arrivals set off is over
    expires = swarm.host(names[0]).env.clock.time() + dht_sim.LIFETIME_S

    async def store(number: int) -> None:
        name = rng.choice(names)
        await swarm.run_on(name, swarm.peer(name).node.store, f"{number}", bytes(64), expires)

    async def get(number: int) -> None:
        name = rng.choice(names)
        found = await swarm.run_on(name, swarm.peer(name).node.get, f"{number}", latest=True)
        assert found is not None

    rows = []
    for what, work in (("store", store), ("get", get)):
        rows.append(await cost(what, nodes, operations, work, messages, lambda: traffic(swarm)))
    return rows


async def cost(
    what: str,
    peers: int,
    count: int,
    work: Callable[[int], Awaitable[None]],
    messages: Messages,
    nbytes: Callable[[], int],
) -> Row:
    """What one of `count` pieces of work, one after another, makes all peers send together."""
    before = messages.sent, nbytes()
    for number in range(count):
        await work(number)
    return Row("simulated", what, peers, (messages.sent - before[0]) / count, (nbytes() - before[1]) / count)


def traffic(swarm: Swarm[dht_sim.Peer] | Swarm[moshpit_sim.Peer]) -> int:
    """Bytes sent so far by all that live."""
    return sum(peer.endpoint.traffic[0] for peer in swarm.peers.values())


async def simulate_matchmaking(peers: int, seed: int, messages: Messages) -> Row:
    """Two rounds of groups of 16, of which the second counts. Runs under `shoal.sim.run`."""
    rng = random.Random(f"{seed}/growth")
    swarm = Swarm[moshpit_sim.Peer](seed, network=SimNetwork(seed, latency_s=0.002, jitter_s=0.002))
    await moshpit_sim.grow(swarm, peers, GROUP, None)
    await asyncio.sleep(60.0)
    before = (0, 0)
    for _ in range(2):
        moshpit_sim.deal(list(swarm.peers.values()), max(1, peers // GROUP), rng)
        before = messages.sent, traffic(swarm)
        groups, _times = await moshpit_sim.play_round(swarm, [], rng)
        for group in groups:
            group.release()
    return Row("simulated", "match", peers, (messages.sent - before[0]) / peers, (traffic(swarm) - before[1]) / peers)


# -------------------------------------------------------------------------------------------------------------- output


def curve(rows: Sequence[Row]) -> str:
    """One line for each number of peers, with a bar for the messages."""
    most = max(row.messages for row in rows)
    lines = []
    for row in rows:
        bar = "#" * max(1, round(WIDTH * row.messages / most))
        lines.append(f"{row.peers:6} peers {row.messages:9.1f} messages {row.bytes:10.0f} bytes  {bar}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--groups", default="2,4,8,16", help="numbers of real processes, with commas; empty: none")
    parser.add_argument("--swarms", default="16,64,250,1000", help="numbers of simulated peers, with commas")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--operations", type=int, default=200, help="DHT operations in each simulation")
    parser.add_argument("--numel", type=int, default=1000, help="float32 values that the processes average")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    args = parser.parse_args()
    print(f"what one peer sends; {processor()}, {os.cpu_count()} cores", flush=True)
    rows: list[Row] = []
    try:
        for count in map(int, filter(None, args.groups.split(","))):
            rows += asyncio.run(measure_processes(count, args.numel, args.rounds))
    except ContenderFailed as error:
        raise SystemExit(f"a peer could not go on: {error}") from None
    messages = Messages()
    for count in map(int, filter(None, args.swarms.split(","))):
        began = time.monotonic()
        with dht_sim.without_gc():
            rows += run(lambda: simulate_dht(count, args.operations, args.seed, messages), seed=args.seed)  # noqa: B023
        with dht_sim.without_gc():
            rows.append(run(lambda: simulate_matchmaking(count, args.seed, messages), seed=args.seed))  # noqa: B023
        print(f"{count} peers simulated in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    for where, what in dict.fromkeys((row.where, row.what) for row in rows):
        print(f"\n{what}, {where}")
        print(curve([row for row in rows if (row.where, row.what) == (where, what)]))
    if args.json:
        write(args.json, {"rows": [asdict(row) for row in rows], "rounds": args.rounds, "numel": args.numel})
    return 0


if __name__ == "__main__":
    sys.exit(main())
