"""The result of a demo run, in sentences that say no more than was measured. For supervisor, screen and picture."""

from __future__ import annotations

from shoal.demo.state import DemoState

__all__ = ["conclusion", "proof", "verdict"]


def conclusion(state: DemoState) -> list[str]:
    """The lines printed at the end: the proof or the failure first."""
    if state.exit_reason != "completed":
        return [f"The run did not succeed: {state.exit_reason}"]
    return [proof(state), _comparison(state), *_losses_and_gains(state)]


def proof(state: DemoState, *, digits: int = 64) -> str:
    """That the peers hold the same weights, with the first `digits` hexadecimal digits of the hash."""
    # One that was lost after it had reported does not survive, but its hash must fit all the same.
    surviving = sum(not state.peers[name].lost for name in state.finished)
    finished = list(state.finished.values())
    hashes = {done.weights_sha256 for done in finished}
    if len(hashes) != 1:
        return "The peers do not hold the same weights."
    who = f"All {surviving} surviving peers hold" if surviving > 1 else "The one surviving peer holds"
    return f"{who} identical weights at epoch {finished[0].epoch}: sha256 {hashes.pop()[:digits]}"


def _comparison(state: DemoState) -> str:
    """How far the loss came, and how far one process alone did with as many sequences."""
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
