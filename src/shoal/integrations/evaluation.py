"""Evaluation by one elected peer: `Evaluation`. The others read its result.

All peers at one epoch hold the same weights, so one evaluation of them is enough. At each `every`-th epoch one of the
peers that contributed to its step evaluates (`Optimizer.is_elected`), and stores the result in the DHT, in an entry
that only it can write. If that peer dies, the next evaluation is done by another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
import torch

from shoal.base.checks import whole
from shoal.base.clock import get_dht_time
from shoal.base.peer import PeerID
from shoal.errors import ConfigError, ShoalError
from shoal.events import Evaluated, Event, Warned
from shoal.optim import Optimizer
from shoal.protocol.wire import Epoch, Samples

__all__ = ["Evaluation"]

_TTL_S = 3600.0
_MOST_VALUES = 64
_LOSS = "loss"

_Values = Annotated[
    dict[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], float], msgspec.Meta(max_length=_MOST_VALUES)
]
_Record = tuple[Epoch, _Values, Samples]
"""With the samples that went into the state: of two results of one epoch the other one is of a state that was lost."""


class Evaluation:
    """Lets one peer of the run evaluate after each `every`-th epoch, and gives all peers the result.

    ::

        evaluation = Evaluation(swarm, held_out_loss, every=20)
        while not swarm.finished:
            ...  # forward, backward
            swarm.step()
            swarm.zero_grad()
            if (found := evaluation.after_step()) is not None:
                print(found.epoch, found.values)

    Each new result is also an event, `shoal.events.Evaluated`, which `shoal.integrations.metrics` hands on.

    Args:
        swarm: the optimizer of this peer.
        evaluate: evaluates the weights as they are, and returns a loss, or numbers by name (64 at most). It is called
            under `torch.no_grad()`, between `swarm.eval()` and `swarm.train()`; set the model's own mode in it.
        every: epochs between two evaluations, the same on all peers.

    Attributes:
        latest: the result of the highest epoch that is known here; None before the first.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(
        self, swarm: Optimizer, evaluate: Callable[[], float | Mapping[str, float]], *, every: int = 10
    ) -> None:
        if not isinstance(swarm, Optimizer):
            raise ConfigError(f"swarm must be a shoal.Optimizer, got {type(swarm).__name__}")
        if not callable(evaluate):
            raise ConfigError(f"evaluate must be a function, got {evaluate!r:.80}")
        self._swarm, self._evaluate, self._every = swarm, evaluate, whole("every", every)
        self.latest: Evaluated | None = None
        self._key = f"{swarm.run_id}_evaluation"
        self._seen = swarm.local_epoch
        self._newest = 0, 0  # epoch and samples of `latest`
        self._read: Any = None

    def after_step(self) -> Evaluated | None:
        """Call it after each `step`: evaluates if it is this peer's turn.

        Returns:
            A result that is new here, of this peer or another one; else None. It waits for no other peer, so another
            peer's result comes some batches later.

        Raises:
            ConfigError: `evaluate` returned no number.
            ClosedError: the optimizer or its DHT was shut down.
        """
        epoch, before = self._swarm.local_epoch, self._seen
        self._seen = epoch
        if epoch < before:  # it took over the state of others, and its results were of the one that it gave up
            self.latest, self._newest = None, (0, 0)
        if epoch // self._every > before // self._every and self._swarm.is_elected():
            self._newest = epoch, self._samples
            return self._told(self._own(epoch))
        found = self._others(epoch)
        if epoch != before and (self.latest is None or self.latest.epoch < epoch - epoch % self._every):
            self._read = self._read or self._swarm.dht.get(self._key, latest=True, return_future=True)
        return None if found is None else self._told(found)

    @property
    def _samples(self) -> int:
        return self._swarm.collaboration.state.samples

    def _own(self, epoch: int) -> Evaluated:
        """Evaluate here, and tell the others."""
        swarm = self._swarm
        swarm.eval()
        try:
            with torch.no_grad():
                result = self._evaluate()
        finally:
            swarm.train()
        values = _checked(result)
        me = swarm.dht.peer_id
        try:
            swarm.dht.store(self._key, [epoch, values, self._samples], get_dht_time() + _TTL_S, me.to_bytes())
        except ShoalError as error:
            message = f"the result of epoch {epoch} could not be stored: {error}. Other peers do not get it"
            self._emit(Warned(where="evaluation", message=message))
        return Evaluated(run_id=swarm.run_id, epoch=epoch, peer=me, values=values)

    def _others(self, epoch: int) -> Evaluated | None:
        """The newest result that was read, if it is a new one."""
        if self._read is None or not self._read.done():
            return None
        read, self._read = self._read, None
        found = None if read.exception() is not None else read.result()
        newest, samples_here = self.latest, self._samples
        for peer, entry in found.value.items() if found is not None and isinstance(found.value, Mapping) else ():
            try:
                at, values, samples = msgspec.convert(entry.value, _Record)
                result = Evaluated(run_id=self._swarm.run_id, epoch=at, peer=PeerID(peer), values=values)
            except (msgspec.ValidationError, ConfigError):
                continue  # no peer of ours writes such a record
            # An epoch that is still to come would hide all real results. With fewer samples it is of a lost state.
            may_be = at <= epoch or (at <= epoch + self._every and samples > samples_here)
            if may_be and (at, samples) > self._newest:
                newest, self._newest = result, (at, samples)
        return None if newest is self.latest else newest

    def _told(self, result: Evaluated) -> Evaluated:
        self.latest = result
        self._emit(result)
        return result

    def _emit(self, event: Event) -> None:
        dht = self._swarm.dht
        dht.loop_thread.call_soon(partial(dht.events.emit, event))


def _checked(result: object) -> dict[str, float]:
    """What `evaluate` returned, by name."""
    named: Mapping[Any, Any] = result if isinstance(result, Mapping) else {_LOSS: result}
    try:
        return msgspec.convert({name: float(value) for name, value in named.items()}, _Values)
    except (TypeError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"evaluate must return a number, or up to {_MOST_VALUES} numbers by name, got {result!r:.80}"
        ) from error
