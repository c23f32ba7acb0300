"""The JSON file of a demo run: its content, and how it is written.

The file is replaced whole (written beside, then renamed), so a reader sees one complete state at any time.

===================== ==============================================================================================
field                 meaning
===================== ==============================================================================================
phase                 starting, training, stopping, leaving, baseline, done
exit_reason           empty until the end; then "completed", "interrupted", or what went wrong
run_id                full name of the run
elapsed_s             time since the start when this was written
seconds, seed, peers  the options
peers_started         peer processes at the start
killed                peers that ended without leaving: by the demo's plan or by another cause
joined                peers that came later and trained, or at least reached the last epoch with the others
epochs                the newest swarm epoch
epoch_times_s         when each epoch was reached, since the start
max_stall_s           longest time without a new epoch, from the first epoch on
samples               sequences that went into all epochs
loss_first, loss_last held-out loss at epoch 0 and at the newest epoch it was measured for, nats per masked token
losses                all measured (epoch, seconds, loss)
baseline_loss_last    held-out loss of the single process at its end
baseline_samples      sequences it had until then (fewer than `samples` if its time ran out)
baseline_complete     whether it had as many as the swarm; null while it has not ended
weights_sha256        of each peer that stood at the last epoch, by peer id
names                 peer id to name
state_download_s      how long the newcomer's state download took; null if there was none
state_download_bytes  its size; null if there was none
pids                  of all peer processes ever started
log                   (seconds, text) of each event
===================== ==============================================================================================
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shoal.demo.settings import DemoOptions
from shoal.demo.state import DemoState

__all__ = ["make_record", "write_record"]


def make_record(state: DemoState, options: DemoOptions, now_s: float) -> dict[str, object]:
    """The content of the file at `now_s` seconds since the start."""
    peers = state.peers.values()
    return {
        "phase": state.phase,
        "exit_reason": state.exit_reason,
        "run_id": state.run_id,
        "elapsed_s": round(now_s, 3),
        "seconds": options.seconds,
        "seed": options.seed,
        "peers": options.peers,
        "peers_started": sum(not peer.newcomer for peer in peers),
        "killed": sum(peer.lost for peer in peers),
        "joined": sum(
            peer.newcomer and (peer.training_since_s is not None or peer.finished is not None) for peer in peers
        ),
        "epochs": state.epoch,
        "epoch_times_s": [round(view.at_s, 3) for view in state.epochs],
        "max_stall_s": round(state.max_stall_s(now_s), 3),
        "samples": state.samples,
        "loss_first": state.loss_first,
        "loss_last": state.loss_last,
        "losses": [(point.epoch, round(point.at_s, 3), round(point.loss, 5)) for point in state.losses],
        "baseline_loss_last": state.baseline_loss_last,
        "baseline_samples": state.baseline[-1].samples if state.baseline else 0,
        "baseline_complete": state.baseline_complete,
        "weights_sha256": {state.peers[name].peer_id: done.weights_sha256 for name, done in state.finished.items()},
        "names": {peer.peer_id: peer.name for peer in peers if peer.peer_id},
        "state_download_s": round(state.download.duration_s, 4) if state.download else None,
        "state_download_bytes": state.download.bytes_received if state.download else None,
        "pids": [peer.pid for peer in peers],
        "log": [(round(line.at_s, 3), line.text) for line in state.log],
    }


def write_record(path: Path, record: dict[str, object]) -> None:
    """Replace the file at `path` by `record`, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    beside.replace(path)
