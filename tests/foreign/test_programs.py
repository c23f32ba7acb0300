"""Programs in the manner of other libraries' users, two peers each: equal weights at the end, and no false warning.

Each is written as its author would write it, without a thought for shoal, but for the optimizer.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shoal
from tests.foreign.kit import Ended, Peer, Program, together

BATCH, EPOCHS = 8, 6


def wrap(
    peer: Peer, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: int | None = BATCH
) -> shoal.Optimizer:
    """The change that shoal asks of a program."""
    swarm = shoal.Optimizer(
        dht=peer.dht,
        run_id=name,
        target_batch_size=8 * BATCH,
        batch_size_per_step=batch,
        optimizer=optimizer,
        model=model,
    )
    swarm.announce_end(EPOCHS)
    return swarm


def gan(peer: Peer) -> Ended:
    """Two models, two optimizers: the generator's loss leaves gradients in the discriminator."""
    torch.manual_seed(peer.number)
    judge, artist = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1)), nn.Linear(2, 4)
    of_judge = wrap(peer, "judge", judge, torch.optim.Adam(judge.parameters(), 1e-2, betas=(0.5, 0.99)))
    of_artist = wrap(peer, "artist", artist, torch.optim.Adam(artist.parameters(), 1e-2, betas=(0.5, 0.99)))
    peer.meet(of_judge, of_artist)
    loss = nn.functional.binary_cross_entropy_with_logits
    while not (of_judge.finished and of_artist.finished):
        of_judge.zero_grad()
        fake = artist(torch.randn(BATCH, 2))
        loss(judge(torch.randn(BATCH, 4)), torch.ones(BATCH, 1)).backward()
        loss(judge(fake.detach()), torch.zeros(BATCH, 1)).backward()
        of_judge.step()
        of_artist.zero_grad()
        loss(judge(fake), torch.ones(BATCH, 1)).backward()
        of_artist.step()
    return peer.ended([judge, artist], [of_judge, of_artist])


class Experts(nn.Module):
    """A layer of which each token takes one expert; some experts get no token of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 12)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 6)) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route each token."""
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero().flatten()
            if len(places):
                out = out.index_add(0, places, weight[places, None] * expert(x[places]))
        return x + out


def experts(peer: Peer) -> Ended:
    """A mixture of experts with a clipped norm."""
    torch.manual_seed(peer.number)
    model = Experts()
    swarm = wrap(peer, "experts", model, torch.optim.AdamW(model.parameters(), 1e-2))
    peer.meet(swarm)
    while not swarm.finished:
        x = torch.randn(BATCH, 6)
        (model(x) - x.flip(1)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        swarm.step()
        swarm.zero_grad()
    return peer.ended([model], [swarm])


class Detector(nn.Module):
    """Takes a list of images of different sizes and a list of targets, and returns its losses, as torchvision's do."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.box, self.label = nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Losses by name."""
        features = torch.cat([self.backbone(image[None]) for image in images])
        boxes = torch.stack([target["boxes"][0] for target in targets])
        labels = torch.stack([target["labels"][0] for target in targets])
        return {
            "box": nn.functional.smooth_l1_loss(self.box(features), boxes),
            "label": nn.functional.cross_entropy(self.label(features), labels),
        }


def detection(peer: Peer) -> Ended:
    """Lists of images, a schedule with warm-up that moves with each step."""
    torch.manual_seed(peer.number)
    model = Detector()
    swarm = wrap(peer, "detection", model, torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9))
    peer.meet(swarm)
    while not swarm.finished:
        images = [torch.rand(3, 8 + number, 12) for number in range(BATCH)]
        targets = [{"boxes": torch.rand(2, 4), "labels": torch.randint(0, 3, (2,))} for _ in images]
        losses = model(images, targets)
        swarm.zero_grad()
        torch.stack([*losses.values()]).sum().backward()
        swarm.step()
    return peer.ended([model], [swarm])


def weight_norm(peer: Peer) -> Ended:
    """Weight normalization in its old form and its new one."""
    torch.manual_seed(peer.number)
    old = nn.utils.weight_norm(nn.Conv1d(2, 3, 3))
    model = nn.Sequential(old, nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 1, 3)))
    swarm = wrap(peer, "weight_norm", model, torch.optim.RMSprop(model.parameters(), 1e-2))
    peer.meet(swarm)
    while not swarm.finished:
        swarm.zero_grad()
        model(torch.randn(BATCH, 2, 12)).square().mean().backward()
        swarm.step()
    return peer.ended([model], [swarm])


def language(peer: Peer) -> Ended:
    """An LSTM that keeps its hidden state from batch to batch, with tied weights and two micro-batches a step."""
    torch.manual_seed(peer.number)
    model = nn.ModuleDict(
        {"in": nn.Embedding(20, 8), "body": nn.LSTM(8, 8, 2, batch_first=True), "out": nn.Linear(8, 20)}
    )
    model["out"].weight = model["in"].weight
    swarm = wrap(peer, "language", model, torch.optim.SGD(model.parameters(), 0.1))
    peer.meet(swarm)
    hidden = None
    while not swarm.finished:
        for _ in range(2):
            tokens = torch.randint(0, 20, (BATCH // 2, 9))
            features, hidden = model["body"](model["in"](tokens[:, :-1]), hidden)
            hidden = tuple(each.detach() for each in hidden)
            loss = nn.functional.cross_entropy(model["out"](features).flatten(0, 1), tokens[:, 1:].flatten())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        swarm.step()
        swarm.zero_grad()
    return peer.ended([model], [swarm])


def recommender(peer: Peer) -> Ended:
    """Sparse gradients of embeddings, and a dense tower: two optimizers of one loss."""
    torch.manual_seed(peer.number)
    users, items, tower = nn.Embedding(50, 4, sparse=True), nn.EmbeddingBag(80, 4, sparse=True), nn.Linear(8, 1)
    sparse = nn.ModuleList([users, items])
    of_sparse = wrap(peer, "sparse", sparse, torch.optim.Adam(sparse.parameters(), 1e-2))
    of_tower = wrap(peer, "tower", tower, torch.optim.Adam(tower.parameters(), 1e-2))
    peer.meet(of_sparse, of_tower)
    while not (of_sparse.finished and of_tower.finished):
        bags = torch.randint(0, 80, (BATCH, 5))
        features = torch.cat([users(torch.randint(0, 50, (BATCH,))), items(bags)], 1)
        of_sparse.zero_grad()
        of_tower.zero_grad()
        nn.functional.mse_loss(tower(features), torch.rand(BATCH, 1)).backward()
        of_sparse.step()
        of_tower.step()
    return peer.ended([sparse, tower], [of_sparse, of_tower])


def reinforcement(peer: Peer) -> Ended:
    """Rollouts of the policy between the batches, in train mode, some without `no_grad`."""
    torch.manual_seed(peer.number)
    policy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2))
    swarm = wrap(peer, "reinforcement", policy, torch.optim.Adam(policy.parameters(), 1e-2), batch=None)
    peer.meet(swarm)
    while not swarm.finished:
        with torch.no_grad():
            states = torch.randn(40, 3)
            actions = torch.distributions.Categorical(logits=policy(states)).sample()
        policy(torch.randn(30, 3)).argmax(1)  # a metric, for which its author forgot `no_grad`
        rewards = (actions == (states[:, 0] > 0)).float() - 0.5
        for start in range(0, 40, BATCH):
            if swarm.finished:
                break
            chosen = slice(start, start + BATCH)
            log_prob = torch.distributions.Categorical(logits=policy(states[chosen])).log_prob(actions[chosen])
            swarm.zero_grad()
            (-log_prob * rewards[chosen]).mean().backward()
            swarm.step()
    return peer.ended([policy], [swarm])


PROGRAMS: list[Program] = [gan, experts, detection, weight_norm, language, recommender, reinforcement]


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("program", PROGRAMS, ids=[each.__name__ for each in PROGRAMS])
def test_a_foreign_program_trains_with_a_second_peer(program: Program) -> None:
    """Both end with equal weights at the announced end; samples are counted in batches; nothing is warned of."""
    ended = together(program)
    assert [each.warnings for each in ended] == [[], []]
    assert [set(each.epochs) for each in ended] == [{EPOCHS}, {EPOCHS}]
    assert all(map(torch.equal, *(each.weights for each in ended)))
    assert all(counted % BATCH == 0 and counted > 0 for each in ended for counted in each.counted)
