"""A peer on a machine that is taken away with a notice (SIGTERM), and that goes on when the machine is back.

`python examples/spot_instance.py FOLDER` prints an invite; `python examples/spot_instance.py OTHER INVITE`, in another
terminal, joins. End one with `kill PID`: it finishes its round, tells the others, saves and ends with code 143. Start
it again: it goes on from its folder, or from the others where these are further. `shoal run` does the same from
outside, for a program without these lines: see docs/how-to/shoal-run.md.
"""

import os
import sys
import time
from pathlib import Path

import torch

import shoal

RUN, EPOCHS, BATCH = "spot", int(os.environ.get("EPOCHS", "200")), 16

torch.set_num_threads(1)  # so that several peers fit on one machine
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))


def train(swarm):
    """Until the run ends, or the notice comes."""
    swarm.announce_end(EPOCHS)
    shown = 0.0
    while not swarm.finished:
        inputs = torch.randn(BATCH, 8)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.amax(1, keepdim=True))
        loss.backward()
        swarm.step()
        swarm.zero_grad()
        if time.monotonic() > shown + 2:
            shown = time.monotonic()
            print(f"{swarm.status()}, loss {loss.item():.4f}", flush=True)


def main():
    """Join, train, and leave in order."""
    folder, *invites = sys.argv[1:] or sys.exit(__doc__)
    Path(folder).mkdir(exist_ok=True)
    dht = shoal.DHT(
        initial_peers=invites,
        host_maddrs="/ip4/0.0.0.0/tcp/0",  # other machines may join; without this line only this one
        identity_path=f"{folder}/peer.key",  # the same peer after a restart,
        peers_file=f"{folder}/peers.txt",  # which finds the others again
        start=True,
    )
    print(dht.invite(RUN), flush=True)
    swarm = shoal.Optimizer(
        dht=dht,
        run_id=RUN,
        strategy=shoal.strategies.Synchronous(target_batch_size=1024),
        batch_size_per_step=BATCH,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        model=model,
        checkpoint=f"{folder}/checkpoints",
        save_every=50,
    )
    print(f"begins at epoch {swarm.local_epoch}", flush=True)
    try:
        with shoal.leave_on_sigterm(dht, grace_s=20):  # of the minutes or seconds that the notice gives
            train(swarm)
    finally:
        swarm.save_last()  # outside of that block, which may be ended at any moment
    print(f"the run has ended at epoch {swarm.local_epoch}")
    dht.shutdown()


if __name__ == "__main__":
    main()
