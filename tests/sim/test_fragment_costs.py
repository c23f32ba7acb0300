"""What the fragments of a model cost beside one: words, looks, records. All is counted, and nothing is timed."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import pytest

from benchmarks.merge_sim import Scene
from benchmarks.wire_count import counted
from shoal import sim
from shoal.dht import DhtNode
from shoal.run.participant import Participant

PEERS, EVERY, BATCHES, BATCH_S = 2, 50, 100, 0.1


OPTIONS = argparse.Namespace(
    seed=3,
    strategy="decoupled",
    every=EVERY,
    quorum=2,
    batch_s=BATCH_S,
    numel=4096,
    rest=True,
    late=0.0,
    group=None,
    share=0,
)


class Costs(Counter[str]):
    """Counts calls of methods."""

    def count(self, patch: pytest.MonkeyPatch, of: type[Any], name: str, what: str) -> None:
        """Count those of this method, under this name."""
        method = getattr(of, name)

        def counts(*args: Any, **options: Any) -> Any:
            self[what] += 1
            return method(*args, **options)

        patch.setattr(of, name, counts)


def costs(fragments: int) -> Costs:
    """What two peers with so many fragments do in a hundred batches, from their first way on."""
    found = Costs()

    async def main() -> None:
        with counted() as sent:
            scene = Scene(OPTIONS, PEERS, fragments)
            for _ in range(PEERS):
                await scene.add()
            await sim.sleep(3.0)
            sent.clear()
            found.clear()
            chains = [chain for peer in scene.swarm.peers.values() for chain in peer.fragments]
            before = sum(chain.epoch for chain in chains)
            await sim.sleep(BATCHES * BATCH_S)
            found["merges"] = sum(chain.epoch for chain in chains) - before
            found["words"], found["bytes of words"] = sent.messages["progress"], sent.bytes["progress"]

    with pytest.MonkeyPatch.context() as patch:
        found.count(patch, Participant, "_look", "looks")
        found.count(patch, DhtNode, "store", "records")
        sim.run(main, seed=3)
    return found


def test_eight_fragments_cost_little_more_than_one() -> None:
    """Each looked and wrote as if it were a run of its own: 67 looks for each merge, and a record in the DHT."""
    one, many = costs(1), costs(8)
    assert many["merges"] >= 7 * one["merges"] > 0
    assert many["looks"] <= 18 * many["merges"]
    assert many["words"] <= 14 * many["merges"]
    assert many["bytes of words"] <= 3 * one["bytes of words"]
    assert many["records"] <= one["records"]
