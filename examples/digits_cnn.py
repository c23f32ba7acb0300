"""A small CNN learns handwritten digits, with everybody who runs this; one peer at a time tests it.

`python examples/digits_cnn.py` prints an invite; `python examples/digits_cnn.py INVITE`, in another terminal, joins.
The digits are those of scikit-learn: 1,797 images of 8 x 8 points, no download (`pip install -e '.[examples]'`).
"""

import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

import shoal
from shoal.integrations.evaluation import Evaluation

EPOCHS, BATCH, TEST = int(os.environ.get("EPOCHS", "300")), 32, 360

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
data = torch.utils.data.TensorDataset(images[TEST:], labels[TEST:])  # the same on all peers, in one order

torch.set_num_threads(1)  # so that several peers fit on one machine
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)


def accuracy():
    """Of the images that nobody trains with."""
    model.eval()  # for batch norm; without it the test images would change the statistics
    right = (model(images[:TEST]).argmax(1) == labels[:TEST]).float().mean().item()
    model.train()
    return {"accuracy": right}


def main():
    """Train to the end."""
    dht = shoal.DHT(initial_peers=sys.argv[1:], host_maddrs="/ip4/0.0.0.0/tcp/0", start=True)
    print(dht.invite("digits"), flush=True)
    swarm = shoal.Optimizer(
        dht=dht,
        run_id="digits",
        strategy=shoal.strategies.Synchronous(target_batch_size=256),
        batch_size_per_step=BATCH,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        params=model.parameters(),
        model=model,
        extra_tensors=list(model.buffers()),  # the statistics of batch norm, which the peers average
        average_state_every=10,
    )
    swarm.announce_end(EPOCHS)
    evaluation = Evaluation(swarm, accuracy, every=10)
    shown = 0.0
    sampler = shoal.data.PeerSampler(data, swarm, endless=True)
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=BATCH, sampler=sampler):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        swarm.step()
        swarm.zero_grad()
        if (found := evaluation.after_step()) is not None:
            print(f"epoch {found.epoch}: accuracy {found.values['accuracy']:.3f}", flush=True)
        if time.monotonic() > shown + 2:
            shown = time.monotonic()
            print(f"{swarm.status()}, loss {loss.item():.3f}", flush=True)
        if swarm.finished:
            break
    with torch.no_grad():
        print(f"accuracy {accuracy()['accuracy']:.3f} at epoch {swarm.local_epoch}")
    dht.shutdown()


if __name__ == "__main__":
    main()
