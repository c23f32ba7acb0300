"""An ordinary PyTorch loop, trained by everybody who runs it, with the optimizer that the lines marked `shoal` make.

`python examples/plain_loop.py` prints an invite; `python examples/plain_loop.py INVITE`, in another terminal, joins.
Close one with Ctrl+C, start another: the rest goes on.
"""

import hashlib
import os
import sys
import time
from pydoc_data.topics import topics

import torch
from torch import nn

import shoal  # shoal

RUN, EPOCHS, BATCH, CONTEXT = "plain-loop", int(os.environ.get("EPOCHS", "400")), 32, 24

torch.set_num_threads(1)  # so that several peers fit on one machine; for a large model leave it out
text = torch.tensor(list("\n".join(topics.values()).encode()))
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.seed()  # each peer draws other batches


def loss_of_batch():
    """How well the model tells the character that follows, at some places in the text, by the characters before it."""
    ends = torch.randint(CONTEXT, len(text), (BATCH,))
    return nn.functional.cross_entropy(model(torch.stack([text[end - CONTEXT : end] for end in ends])), text[ends])


def main():
    """Train to the end."""
    dht = shoal.DHT(initial_peers=sys.argv[1:], host_maddrs="/ip4/0.0.0.0/tcp/0", start=True)  # shoal
    print(dht.invite(RUN), flush=True)
    swarm = shoal.Optimizer(  # shoal
        dht=dht, run_id=RUN, strategy=shoal.strategies.Synchronous(1024), batch_size_per_step=BATCH, optimizer=optimizer
    )
    swarm.announce_end(EPOCHS)  # shoal
    shown = 0.0
    while not swarm.finished:
        loss = loss_of_batch()
        loss.backward()
        swarm.step()
        swarm.zero_grad()
        if time.monotonic() > shown + 2:
            shown = time.monotonic()
            print(f"{swarm.status()}, loss {loss.item():.3f}", flush=True)
    weights = hashlib.sha256(
        b"".join(bytes(p.detach().view(torch.uint8).flatten().tolist()) for p in model.parameters())
    )
    print(f"loss {loss_of_batch().item():.3f}, weights {weights.hexdigest()[:16]} at epoch {swarm.local_epoch}")
    dht.shutdown()


if __name__ == "__main__":
    main()
