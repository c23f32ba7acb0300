"""The metrics of a run, for files and dashboards: JSON lines, TensorBoard, Weights & Biases, Prometheus, or a function.

`Metrics` follows the epochs of one peer. A thread of its own hands the numbers on, so neither the training nor the
network waits for a disk or a server.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from shoal.base.checks import path, whole
from shoal.base.clock import get_dht_time
from shoal.base.pool import DaemonPool
from shoal.errors import ConfigError, ShoalError
from shoal.events import EpochAdvanced, Evaluated, Event, Warned
from shoal.optim import Optimizer, Status
from shoal.runtime.dht import DHT

__all__ = ["JsonLines", "Metrics", "Prometheus", "SharedMean", "Sink", "TensorBoard", "WandB"]

Sink = Callable[[int, Mapping[str, float]], None]
"""Takes the epoch, and the metrics by name. It is called in one thread, one epoch after the other."""

_TTL_S, _LEAST_TTL_S, _PAUSES = 600.0, 60.0, 4.0
"""What a peer says counts for 4 of its pauses between saying something: then it is gone."""

_CLOSE_S = 10.0
_NAME = "swarm"


class Metrics:
    """Hands the metrics of a run on after its epochs, until `close`, or the end of a `with` block.

    | metric | |
    | --- | --- |
    | `samples` | that went into the step |
    | `epoch_s` | seconds of an epoch, since the metrics before |
    | `peers`, `clients` | live peers of the run, and those of them that only dial |
    | `samples_per_s`, `own_samples_per_s` | speed of all peers together, and of this one |
    | `members`, `contributors`, `left_out`, `round_s` | of the round; none after a step that was taken alone |
    | `contributed`, `dropped` | samples of this peer that went into steps so far, and those that went into none |
    | `evaluated_NAME`, `evaluated_epoch` | the last result that is known of an `Evaluation`, and its epoch |
    | `loss`, `swarm_loss` | mean of this peer's losses since the metrics before; of all peers', weighted by samples |

    Args:
        swarm: the optimizer of this peer.
        sinks: where the metrics go. If one raises, a warning says so, once, and the others go on.
        every: epochs between two reports. Epochs that come faster than the sinks take them are left out.

    Raises:
        ConfigError: an argument is wrong; it is named.
    """

    def __init__(self, swarm: Optimizer, *sinks: Sink, every: int = 1) -> None:
        if not isinstance(swarm, Optimizer):
            raise ConfigError(f"swarm must be a shoal.Optimizer, got {type(swarm).__name__}")
        for sink in sinks:
            if not callable(sink):
                raise ConfigError(f"each sink must be callable, such as JsonLines(path), got {sink!r:.80}")
        self._swarm, self._sinks, self._every = swarm, sinks, whole("every", every)
        self._mean = SharedMean(swarm.dht, f"{swarm.run_id}_loss")
        self._pool = DaemonPool(1, "shoal-metrics")
        self._lock = threading.Lock()
        self._next: tuple[EpochAdvanced, Status, float] | None = None
        self._busy = False
        self._evaluated: dict[str, float] = {}
        self._loss, self._samples = 0.0, 0
        self._last: tuple[int, float] = swarm.local_epoch, time.monotonic()
        self._told = set[int]()
        self._unsubscribe: Callable[[], None] | None = swarm.dht.events.subscribe(self._heard)

    def loss(self, value: float, samples: int) -> None:
        """The loss of a batch of this peer, the mean over so many samples. Any thread may call it."""
        with self._lock:
            self._loss, self._samples = self._loss + float(value) * samples, self._samples + samples

    def close(self) -> None:
        """Hand on what has come, and close the sinks that can be closed; 10 s at most. Safe to call twice."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
            self._pool.submit(self._close_sinks)
            self._pool.shutdown(timeout_s=_CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _heard(self, event: Event) -> None:  # in the loop, as the status wants it
        if isinstance(event, Evaluated) and event.run_id == self._swarm.run_id:
            results = {f"evaluated_{name}": value for name, value in event.values.items()}
            self._evaluated = {**results, "evaluated_epoch": event.epoch}
        if not isinstance(event, EpochAdvanced) or event.run_id != self._swarm.run_id or event.epoch % self._every:
            return
        status = self._swarm.collaboration.status()
        with self._lock:
            self._next = event, status, time.monotonic()
            idle, self._busy = not self._busy, True
        if idle:
            self._pool.submit(self._hand_on)

    def _hand_on(self) -> None:
        while True:
            with self._lock:
                news, self._next = self._next, None
                self._busy = news is not None
            if news is None:
                return
            metrics = self._metrics(*news)
            for number, sink in enumerate(self._sinks):
                try:
                    sink(news[0].epoch, metrics)
                except BaseException as error:  # noqa: BLE001 (the user's own code, a full disk, a server)
                    self._failed(number, sink, error)

    def _failed(self, number: int, sink: Sink, error: BaseException) -> None:
        if number not in self._told:
            self._told.add(number)
            why = f"{getattr(sink, '__name__', type(sink).__name__)}: {type(error).__name__}: {error}"
            message = f"metrics were not taken by {why}. Training and other sinks go on, and the next will be tried"
            warning = Warned(where="metrics", message=message)
            self._swarm.dht.loop_thread.call_soon(lambda: self._swarm.dht.events.emit(warning))

    def _metrics(self, event: EpochAdvanced, status: Status, now: float) -> dict[str, float]:
        (epoch, since), self._last = self._last, (event.epoch, now)
        metrics: dict[str, float] = {
            "samples": event.samples,
            "epoch_s": (now - since) / max(1, event.epoch - epoch),
            "peers": len(status.peers),
            "clients": sum(peer.role == "client" for peer in status.peers),
            "samples_per_s": status.samples_per_s,
            "own_samples_per_s": status.peers[0].samples_per_s,
            "contributed": status.contributed,
            "dropped": status.dropped,
            **self._evaluated,
        }
        if (last := status.last_round) is not None:
            metrics |= {
                "members": len(last.members),
                "contributors": len(last.contributors),
                "left_out": len(last.left_out),
                "round_s": last.duration_s,
            }
        with self._lock:
            loss, samples, self._loss, self._samples = self._loss, self._samples, 0.0, 0
        if samples:
            metrics["loss"] = loss / samples
        try:
            mean = self._mean.exchange(metrics.get("loss"), samples)
        except ShoalError:  # the DHT was shut down meanwhile
            mean = None
        return metrics if mean is None else {**metrics, "swarm_loss": mean}

    def _close_sinks(self) -> None:
        for number, sink in enumerate(self._sinks):
            try:
                if callable(close := getattr(sink, "close", None)):
                    close()
            except Exception as error:  # noqa: BLE001 (the others are closed all the same)
                self._failed(number, sink, error)


class SharedMean:
    """A mean over all peers of a run, weighted by samples, in the DHT. Each peer can write only its own entry.

    Args:
        dht: this peer.
        key: names the mean; the same on all peers.
    """

    def __init__(self, dht: DHT, key: str) -> None:
        self._dht, self._key = dht, key
        self._read: Any = None
        self._said_at, self._until = math.inf, 0.0

    def exchange(self, value: float | None, samples: int) -> float | None:
        """Say this peer's value, if there is one; returns the mean as it was read since the last call.

        It waits for nothing: None if nothing was read yet. What a peer says counts until it says something new, and for
        4 of its pauses between two values (60 s to 10 minutes), so that peers which are gone do not count.
        """
        if value is not None and math.isfinite(value) and samples > 0:
            now, me = get_dht_time(), self._dht.peer_id.to_bytes()
            lives_s = min(_TTL_S, max(_LEAST_TTL_S, _PAUSES * (now - self._said_at)))
            # In the DHT a value takes the place of one that expires earlier.
            self._said_at, self._until = now, max(now + lives_s, self._until + 0.001)
            self._dht.store(self._key, [float(value), int(samples)], self._until, me, return_future=True)
        read, self._read = self._read, self._dht.get(self._key, latest=True, return_future=True)
        if read is None or not read.done() or read.exception() is not None or (found := read.result()) is None:
            return None
        return _mean(found.value)


def _mean(said: object) -> float | None:
    """The mean of what peers have said; what is no number with a number of samples does not count."""
    total = weight = 0.0
    for entry in said.values() if isinstance(said, Mapping) else ():
        match getattr(entry, "value", None):
            case [float(value), int(samples)] if math.isfinite(value) and 0 < samples < 1 << 40:
                total, weight = total + value * samples, weight + samples
    return total / weight if weight else None


# --------------------------------------------------------------------------------------------------------------- sinks


class JsonLines:
    """Appends one JSON object for each epoch to a file: `epoch`, `time` (seconds since 1970), and the metrics.

    Numbers that are not finite are null.

    Args:
        file: its path; its folder is made if it is not there.

    Raises:
        ConfigError: it is no path, or cannot be written.
    """

    def __init__(self, file: str) -> None:
        place = path("file", file)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = place.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"file={str(place)!r} cannot be written: {error}") from error

    def __call__(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write a line."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"epoch": epoch, "time": time.time(), **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard:
    """Writes for TensorBoard: each metric as `swarm/NAME`, over the epochs. Needs `pip install tensorboard`.

    Args:
        log_dir: as of torch's `SummaryWriter`.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, log_dir: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise ConfigError(f"TensorBoard is not installed ({error}): pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(path("log_dir", log_dir)))

    def __call__(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Write the values."""
        for name, value in metrics.items():
            self._writer.add_scalar(f"{_NAME}/{name}", value, epoch)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """Logs to a run of Weights & Biases: each metric as `swarm/NAME`, with `swarm/epoch` to draw them over.

    Args:
        run: what `wandb.init()` gave. It stays the program's own, and is not finished here.

    Raises:
        ConfigError: it is no such run.
    """

    def __init__(self, run: Any) -> None:
        if not callable(getattr(run, "log", None)):
            raise ConfigError(f"run must be what wandb.init() gave, got {type(run).__name__}")
        self._run = run

    def __call__(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Log the values, at the program's own step."""
        self._run.log({f"{_NAME}/{name}": value for name, value in {"epoch": epoch, **metrics}.items()})


class Prometheus:
    """Serves the last metrics for Prometheus to read: `shoal_NAME`. Needs `pip install prometheus-client`.

    Args:
        port: of HTTP; 0 takes a free one, see `port`.
        address: to listen at; only this machine by default.

    Attributes:
        port: where it listens.

    Raises:
        ConfigError: the client is not installed, or the port is in use.
    """

    def __init__(self, port: int, address: str = "127.0.0.1") -> None:
        try:
            import prometheus_client  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise ConfigError(f"Prometheus is not installed ({error}): pip install prometheus-client") from error
        self._client, self._registry = prometheus_client, prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        port = whole("port", port, least=0, most=65535)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, self._registry)
        except OSError as error:
            raise ConfigError(f"port {port} of {address} cannot be listened at: {error}") from error
        self.port: int = self._server.server_port

    def __call__(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Set the values. One that is missing this time keeps no old value."""
        for name, value in {"epoch": epoch, **metrics}.items():
            if name not in self._gauges:
                self._gauges[name] = self._client.Gauge(f"shoal_{name}", "", registry=self._registry)
            self._gauges[name].set(value)
        for name in self._gauges.keys() - metrics.keys() - {"epoch"}:
            self._gauges[name].set(math.nan)

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
