"""A stand-in for the demo's children that speaks their protocol without torch and without a network.

Run as `demo_child.py peer SCRIPT CONFIG` or `demo_child.py baseline SCRIPT CONFIG`, SCRIPT being a `Script` as JSON. It
ends when its stdin does.
"""

from __future__ import annotations

import os
import select
import sys
import time

import msgspec

from shoal import events
from shoal.base.peer import PeerID
from shoal.demo.messages import (
    BaselineConfig,
    BaselinePoint,
    Finished,
    HeldOutLoss,
    Leave,
    PeerConfig,
    Ready,
    Report,
    Stop,
    Working,
    decode_command,
    encode,
)

_SOMEBODY = PeerID(bytes(32))


class Script(msgspec.Struct, frozen=True):
    """What the stand-ins of a run have in common.

    Attributes:
        began: wall clock of epoch 0; by it and `epoch_s` they agree on the epoch without talking to each other.
        epoch_s: length of an epoch.
        starters: names of the peers that are there from epoch 0.
        faults: by name: "crash" (at start), "mute" (closes its stdout), "deaf" (never finishes), "other weights",
            "other epoch", "rising loss", "chatter" (also prints what is no message).
    """

    began: float
    epoch_s: float
    starters: tuple[str, ...]
    faults: dict[str, str]

    @property
    def epoch(self) -> int:
        """The epoch that the swarm is at now."""
        return max(0, int((time.time() - self.began) / self.epoch_s))


def say(report: Report) -> None:
    """Send a report."""
    os.write(1, encode(report) + b"\n")


def hear(within_s: float) -> list[Stop | Leave]:
    """Commands that come within this time; ends the process at the end of stdin."""
    if not select.select([0], [], [], within_s)[0]:
        return []
    heard = os.read(0, 1 << 16)
    if not heard:
        os._exit(3)
    return [decode_command(line) for line in heard.splitlines()]


def loss_at(epoch: int, fault: str) -> float:
    """A loss that falls, or rises."""
    return 8.0 / (1 + 0.1 * epoch) if fault != "rising loss" else 5.0 + epoch


def be_peer(script: Script, config: PeerConfig) -> None:
    """Go through a peer's life."""
    fault = script.faults.get(config.name, "")
    if fault == "crash":
        sys.exit("RuntimeError: no more memory")
    if fault == "chatter":
        os.write(1, b"not json\n{}\n" + b'{"type":"Unknown"}\n')
    if fault == "mute":
        os.close(1)
        hear(3600)
    say(Ready(peer_id=f"id-of-{config.name}", run_id=config.run_id, addresses=(f"at-{config.name}",), parameters=10))
    epoch = 0
    if config.name not in script.starters:
        epoch = script.epoch
        say(events.StateDownloaded(prefix="p", donors=(_SOMEBODY,), bytes_received=1000, duration_s=0.01))
    else:
        say(HeldOutLoss(epoch=0, loss=loss_at(0, fault)))
    last = None
    while True:
        say(Working(state="training", epoch=epoch, samples=epoch * 4, samples_per_s=10.0))
        for command in hear(script.epoch_s / 3):
            last = command.epoch if isinstance(command, Stop) else last
            if isinstance(command, Leave):
                os._exit(0)
        if last is not None and epoch >= last and fault != "deaf":
            break
        while epoch < min(script.epoch, last or 10**9):
            epoch += 1
            both = _SOMEBODY, _SOMEBODY
            averaged = events.RoundFinished(
                prefix="p", round_id=b"", peers=both, left_out=(), bytes_sent=0, bytes_received=0, duration_s=0.01
            )
            say(averaged)
            say(events.EpochAdvanced(run_id="run", epoch=epoch, samples=16, peers=2, digest=b""))
            say(HeldOutLoss(epoch=epoch, loss=loss_at(epoch, fault)))
    digest = "b" * 64 if fault == "other weights" else "a" * 64
    say(Finished(epoch=epoch + (fault == "other epoch"), weights_sha256=digest, loss=loss_at(epoch, fault)))
    while not any(isinstance(command, Leave) for command in hear(60)):
        pass
    os._exit(0)


def be_baseline(script: Script, config: BaselineConfig) -> None:
    """Report a loss for every second epoch."""
    if "baseline" in script.faults:
        sys.exit("RuntimeError: the baseline broke")
    samples = 0
    for epoch, more in enumerate(config.epoch_samples, start=1):
        samples += more
        if epoch % 2 == 0 or epoch == len(config.epoch_samples):
            say(BaselinePoint(epoch=epoch, samples=samples, loss=loss_at(epoch, "")))


if __name__ == "__main__":
    role, script_json, config_json = sys.argv[1:]
    told = msgspec.json.decode(script_json, type=Script)
    if role == "peer":
        be_peer(told, msgspec.json.decode(config_json, type=PeerConfig))
    else:
        be_baseline(told, msgspec.json.decode(config_json, type=BaselineConfig))
