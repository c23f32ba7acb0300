"""The result of a demo run: in sentences that say no more than was measured, and as a JSON file.

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

__all__ = ["conclusion", "make_record", "proof", "verdict", "write_record"]


def conclusion(state: DemoState) -> list[str]:
    """The lines printed at the end: the proof or the failure first."""
    if state.exit_reason != "completed":
        return [f"The run did not succeed: {state.exit_reason}"]
    return [proof(state), _comparison(state), *_losses_and_gains(state)]


def proof(state: DemoState, *, digits: int = 64) -> str:
    """The sentence that the peers hold the same weights, with the first `digits` hexadecimal digits of the hash."""
    # One that was lost after it had reported does not survive, but its hash must fit all the same.
    surviving = sum(not state.peers[name].lost for name in state.finished)
    finished = list(state.finished.values())
    hashes = {done.weights_sha256 for done in finished}
    if len(hashes) != 1:
        return "The peers do not hold the same weights."
    who = f"All {surviving} surviving peers hold" if surviving > 1 else "The one surviving peer holds"
    return f"{who} identical weights at epoch {finished[0].epoch}: sha256 {hashes.pop()[:digits]}"


def _comparison(state: DemoState) -> str:
    """The sentence on how far the loss fell, and how far it fell in one process alone with as many sequences."""
    first, last, alone = state.loss_first, state.loss_last, state.baseline_loss_last
    if first is None or last is None:
        return "No loss was measured."
    swarm = f"Held-out loss {first:.2f} → {last:.2f} in {state.epoch} epochs, {state.samples:,} sequences"
    if alone is None:
        return f"{swarm}."
    if state.baseline_complete:
        return f"{swarm}; one process alone with as many: {alone:.2f}."
    reached = state.baseline[-1]
    there = next((point.loss for point in reversed(state.losses) if point.epoch <= reached.epoch), first)
    return (
        f"{swarm}; one process alone came to {alone:.2f} after {reached.samples:,} of them when its time was up "
        f"(the swarm had {there:.2f} there)."
    )


def _losses_and_gains(state: DemoState) -> list[str]:
    """The peers that were lost and that came, and the cost of both."""
    lines = []
    lost = [peer for peer in state.peers.values() if peer.lost]
    for peer in lost:
        after = next((view for view in state.epochs if view.at_s > (peer.ended_at_s or 0.0)), None)
        how = "was killed (SIGKILL)" if peer.fate == "killed" else "died"
        went_on = f"; the next epoch was done {after.at_s - (peer.ended_at_s or 0.0):.1f} s later" if after else ""
        lines.append(f"{peer.name} {how} at {peer.ended_at_s or 0.0:.1f} s{went_on}.")
    if not lost:
        lines.append("No peer was killed: there were not two that had trained in time.")
    for peer in state.peers.values():
        if peer.newcomer and peer.training_since_s is not None:
            got = state.download
            state_text = (
                f"; its state, {got.bytes_received / 1e6:.1f} MB, came in {got.duration_s:.2f} s" if got else ""
            )
            lines.append(f"{peer.name} joined at {peer.training_since_s:.1f} s{state_text}.")
    if len(state.epochs) > 1:
        lines.append(f"Longest time without a new epoch: {state.max_stall_s(0.0):.1f} s.")
    return lines


def verdict(state: DemoState) -> str:
    """The fault of a run whose peers have ended, in words; empty if there is none.

    Right means: every peer that was not lost stood at the announced last epoch, all with the same weights, and the
    held-out loss fell.
    """
    finished = state.finished
    kept = [peer for peer in state.peers.values() if not peer.lost]
    late = [peer.name for peer in kept if peer.name not in finished]
    first, last = state.loss_first, state.loss_last
    if not finished:
        return "no peer reached the last epoch"
    if late:
        return f"{', '.join(late)} did not reach the last epoch"
    if {done.epoch for done in finished.values()} != {state.stop_epoch}:
        return "the peers stopped at different epochs: " + _per_peer(state, "epoch")
    if len({done.weights_sha256 for done in finished.values()}) != 1:
        return "the peers hold different weights: " + _per_peer(state, "weights_sha256")
    if first is None or last is None or not last < first:
        return f"the loss did not fall: from {first} to {last}"
    return ""


def _per_peer(state: DemoState, field: str) -> str:
    return ", ".join(f"{name} {str(getattr(done, field))[:12]}" for name, done in state.finished.items())


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
