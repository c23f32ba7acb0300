"""What one bad line between two honest peers costs the swarm: ``python -m benchmarks.bad_line``. On virtual time.

Four peers train, and reach each other. After a minute the line between two of them carries ``--rate`` bytes a second:
less than a heartbeat needs. One of the two leads the groups, or neither does. Printed for each minute: the steps, as a
share of the first one's, and the share of its samples that count of the peer of which fewest do, over the same share of
the first minute. With ``--heal`` the line is whole again in the last minute.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial

from shoal import sim
from shoal.base.peer import PeerID
from shoal.events import Event, GroupFormed
from shoal.strategies import DiLoCo, Strategy
from tests.sim.optimizer_kit import Run, Trainer
from tests.sim.strategy_kit import MEAN
from tests.sim.test_idle_members import BATCH, BATCHES, train_together

_WHOLE_BYTES_S = 1e9


class Minutes:
    """Counts steps and samples minute by minute."""

    def __init__(self, trainers: list[Trainer]) -> None:
        self._trainers = trainers
        self._first: tuple[int, float] | None = None

    async def one(self) -> tuple[float, float]:
        """One minute: the steps, and the least share of samples that count; both over those of the first minute."""
        before = [self._counts(each) for each in self._trainers]
        await sim.sleep(60.0)
        after = [self._counts(each) for each in self._trainers]
        moved = [[new - old for new, old in zip(*pair, strict=True)] for pair in zip(after, before, strict=True)]
        steps, share = max(each[0] for each in moved), min(each[1] / max(1, each[2]) for each in moved)
        first_steps, first_share = self._first = self._first or (steps, share)
        return steps / first_steps, share / first_share

    @staticmethod
    def _counts(trainer: Trainer) -> tuple[int, int, int]:
        contributed = trainer.participant.contribution.contributed
        return trainer.participant.epoch, contributed, BATCH * trainer.batches_done


def _note_leader(led: list[PeerID], event: Event) -> None:
    if isinstance(event, GroupFormed):
        led.append(event.coordinator)


async def play(strategy: Strategy | None, *, leads: bool, args: argparse.Namespace) -> list[tuple[float, float]]:
    """A minute of calm, and the others."""
    run = Run(target=args.peers * BATCH * BATCHES if strategy is None else 1, width=2000)
    trainers = await train_together(run, args.peers, strategy=strategy)
    peers, led = [trainer.participant.core.peer_id for trainer in trainers], list[PeerID]()
    for trainer in trainers:
        trainer.participant.core.env.events.subscribe(partial(_note_leader, led))
    minutes = Minutes(trainers)
    found = [await minutes.one()]
    one = (peers.index(led[-1]) + (not leads)) % args.peers
    hosts = f"p{one}", f"p{(one + 1) % args.peers}"
    for minute in range(args.minutes):
        whole = args.heal and minute == args.minutes - 1
        run.swarm.network.set_link(*hosts, bandwidth_bytes_s=_WHOLE_BYTES_S if whole else args.rate)
        found.append(await minutes.one())
    return found


def main() -> int:
    """Print a line for each strategy, and each place of the bad line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=30.0, help="bytes a second that the bad line carries")
    parser.add_argument("--minutes", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--heal", action="store_true", help="the line is whole in the last minute")
    args = parser.parse_args()
    for name, strategy in (("synchronous", None), ("DiLoCo(8)", DiLoCo(8, MEAN))):
        for leads in (True, False):
            found = sim.run(lambda s=strategy, ls=leads: play(s, leads=ls, args=args), seed=args.seed)  # type: ignore[misc]
            where = "one end leads" if leads else "neither end leads"
            minutes = ", ".join(f"{steps:.2f} ({share:.2f})" for steps, share in found[1:])
            print(f"{name}, {where}: steps (samples that count) {minutes}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
