"""One trainer by hivemind 1.1.12: see `contenders.trainers`. Runs with the Python of hivemind's own environment.

The settings are those of its configuration guide, but for a shorter `matchmaking_time` (and a `request_timeout` that is
below it, as it asks for) and an `averaging_timeout` of 15 s, so that a failed round costs less. The optimizer is not
offloaded, as there is no device. Where it is delayed, `delay_grad_averaging` and `delay_optimizer_step` are given; they
need offloading.
"""

from __future__ import annotations

import multiprocessing
from functools import partial
from typing import Any

import hivemind  # type: ignore[import-not-found]
from hivemind.optim.grad_averager import GradientAverager  # type: ignore[import-not-found]

from benchmarks.contenders.orders import now
from benchmarks.contenders.trainers import Job, make_inner, make_schedule, serve
from shoal.demo.model import MaskedLM


class TimedAverager(GradientAverager):  # type: ignore[misc]
    """Notes how long the all-reduce takes; the averager sees it in a process of its own."""

    def __init__(self, *args: Any, took_s: Any, **kwargs: Any) -> None:
        self._took_s = took_s
        super().__init__(*args, **kwargs)

    async def _aggregate_with_group(self, *args: Any, **kwargs: Any) -> Any:
        began = now()
        result = await super()._aggregate_with_group(*args, **kwargs)
        self._took_s.value = now() - began
        return result


class HivemindTrainer:
    """Built as its guide says."""

    def __init__(self, job: Job, model: MaskedLM) -> None:
        self._took_s = multiprocessing.get_context("fork").Value("d", 0.0)
        self._dht = hivemind.DHT(
            initial_peers=job["entries"], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True, startup_timeout=60.0
        )
        patience = {"request_timeout": job["matchmaking_s"] / 2}
        if job["delayed"]:
            inner: dict[str, Any] = {
                "params": list(model.parameters()),
                "optimizer": lambda params: make_inner(job, params),
                "delay_grad_averaging": True,
                "delay_optimizer_step": True,
            }
        else:
            inner = {"optimizer": make_inner(job, model.parameters())}
        self.optimizer = hivemind.Optimizer(
            dht=self._dht,
            run_id="optimizer",
            target_batch_size=job["target"],
            batch_size_per_step=job["batch"],
            scheduler=lambda optimizer: make_schedule(job, optimizer),
            matchmaking_time=job["matchmaking_s"],
            averaging_timeout=15.0,
            averager_opts=patience,
            grad_averager_factory=partial(TimedAverager, took_s=self._took_s, **patience),
            **inner,
        )

    @property
    def reduced_s(self) -> float | None:
        return self._took_s.value or None

    def addresses(self) -> list[str]:
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def begin(self, *, late: bool) -> None:
        """Take over the state, as its examples do; the wait for the others was no slow batch."""
        if late:
            self.optimizer.load_state_from_peers()
        self.optimizer.tracker.performance_ema.reset_timer()


if __name__ == "__main__":
    serve(HivemindTrainer)
