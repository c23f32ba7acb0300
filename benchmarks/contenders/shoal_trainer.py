"""One trainer by `shoal.Optimizer`: see `contenders.trainers`."""

from __future__ import annotations

import shoal
from benchmarks.contenders.trainers import Job, make_inner, make_schedule, serve
from shoal.demo.model import MaskedLM
from shoal.events import Event, RoundFinished


class ShoalTrainer:
    """All at its defaults, but for `delay_grad_averaging` where it is delayed."""

    def __init__(self, job: Job, model: MaskedLM) -> None:
        self._reduced_s: float | None = None
        self._dht = shoal.DHT(initial_peers=job["entries"], start=True)
        self._dht.events.subscribe(self._note)
        self.optimizer = shoal.Optimizer(
            dht=self._dht,
            run_id="optimizer",
            target_batch_size=job["target"],
            batch_size_per_step=job["batch"],
            params=model.parameters(),
            optimizer=lambda params: make_inner(job, params),
            scheduler=lambda optimizer: make_schedule(job, optimizer),
            delay_grad_averaging=job["delayed"],
        )

    def _note(self, event: Event) -> None:
        if isinstance(event, RoundFinished):
            self._reduced_s = event.duration_s

    @property
    def reduced_s(self) -> float | None:
        return self._reduced_s

    def addresses(self) -> list[str]:
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def begin(self, *, late: bool) -> None:
        """Nothing: a newcomer takes over the state in its first `step`."""


if __name__ == "__main__":
    _ = shoal.DHT, shoal.Optimizer  # imported before the first fork
    serve(ShoalTrainer)
