"""A recommender with a million items, of which only the rows that a step touches are sent.

::

    torchrun --nproc-per-node 2 examples/recommender.py     # needs matplotlib for the picture

Two towers (Covington et al., 2016): one makes a vector of the items that a user has clicked, the other one of the next
item, which has to be found among all others of the batch. Clicks are made up: each user likes one genre, and within a
genre items are drawn by Zipf's law. The model is trained in stage 2 of `shoal.zero`, twice on the same batches: with
dense gradients of the table, then with ``sparse=True``. Bytes, times and losses are printed and drawn. The optimizer is
Adagrad, which leaves rows without a gradient as they are: so both ways end with the same loss.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist

import shoal.zero  # shoal

GENRES, CLICKS, MB = 50, 8, 1e6


class Towers(torch.nn.Module):
    """Vectors of users and of items, from one table of items."""

    def __init__(self, items, width, *, sparse):
        super().__init__()
        self.items = torch.nn.Embedding(items, width, sparse=sparse)  # shoal: only touched rows travel
        torch.nn.init.normal_(self.items.weight, std=0.1)
        self.user_tower, self.item_tower = (
            torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.GELU(), torch.nn.Linear(64, width))
            for _ in range(2)
        )

    def forward(self, clicked, following):
        """The loss of finding each user's next item among those of all users: items (users, clicks) and (users)."""
        users = self.items(clicked).mean(1)
        users = users + self.user_tower(users)
        found = self.items(following)
        found = found + self.item_tower(found)
        return torch.nn.functional.cross_entropy(users @ found.T, torch.arange(len(users), device=users.device))


def clicks(users, items, made):
    """The items that users have clicked, and their next ones: in each genre the first ones often, the last seldom."""
    each = items // GENRES
    genre = torch.randint(GENRES, (users, 1), generator=made)
    drawn = (each ** torch.rand(users, CLICKS + 1, generator=made, dtype=torch.float64)).long() - 1
    rows = drawn * GENRES + genre  # frequent items of all genres come first, as in a sorted vocabulary
    return rows[:, :-1], rows[:, -1]


def train(sparse, args, device):
    """Train once; returns the losses of all ranks and the seconds behind each step, and the bytes of each step."""
    torch.manual_seed(0)
    model = Towers(args.items, args.width, sparse=sparse).to(device)
    model, optimizer = shoal.zero.shard(  # shoal
        model, lambda parameters: torch.optim.Adagrad(parameters, lr=args.rate), stage=2
    )
    made = torch.Generator().manual_seed(1 + dist.get_rank())
    losses, seconds, began = [], [], time.perf_counter()
    for _ in range(args.steps):
        loss = model(*(each.to(device) for each in clicks(args.batch, args.items, made)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        seconds.append(time.perf_counter() - began)
    found = torch.stack(losses)
    dist.all_reduce(found)
    sent = optimizer.traffic().sent / args.steps
    return {"losses": (found / dist.get_world_size()).tolist(), "seconds": seconds, "sent": sent}


def last(losses):
    """The mean of the last tenth."""
    part = losses[-max(len(losses) // 10, 1) :]
    return sum(part) / len(part)


def draw(found, args):
    """The picture: losses over steps and over seconds, and bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    steps, seconds, sent = figure.subplots(1, 3, width_ratios=[2, 2, 1])
    for (name, each), color in zip(found.items(), ("#e07b00", "#1668b8"), strict=True):
        size = max(args.steps // 20, 1)
        smooth = [sum(each["losses"][max(at - size, 0) : at]) / min(at, size) for at in range(1, args.steps + 1)]
        steps.plot(range(1, args.steps + 1), smooth, color=color, label=name)
        seconds.plot(each["seconds"], smooth, color=color)
        bar = sent.bar(name, each["sent"] / MB, color=color)
        sent.bar_label(bar, fmt="%.2f")
    steps.set(xlabel="steps", ylabel="loss (nats)")
    steps.legend(frameon=False)
    seconds.set(xlabel="seconds")
    sent.set(ylabel="MB that a rank sends in a step", yscale="log")
    for axes in (steps, seconds, sent):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb")
    figure.savefig(args.picture)


def main():
    """Train both ways, print what each took, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=16, help="of an item's vector (default 16)")
    parser.add_argument("--batch", type=int, default=512, help="users of each rank in a step (default 512)")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate (default 0.1)")
    parser.add_argument("--picture", default="recommender.png")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    chief = dist.get_rank() == 0
    if chief:
        print(f"{args.items:,} items, {dist.get_world_size()} ranks, {args.steps} steps of {args.batch} users each")
        print("gradients   MB sent per step   seconds per step   loss of the last steps", flush=True)
    found = {}
    for name in ("dense", "sparse"):
        found[name] = each = train(name == "sparse", args, device)
        times = sorted(after - before for before, after in zip([0.0, *each["seconds"]], each["seconds"], strict=False))
        if chief:
            middle, loss = times[len(times) // 2], last(each["losses"])
            print(f"{name:9} {each['sent'] / MB:18.3f} {middle:18.4f} {loss:24.4f}", flush=True)
    if chief:
        dense, sparse = found["dense"], found["sparse"]
        print(f"sparse gradients send {sparse['sent'] / dense['sent']:.2%} of the bytes; the picture: {args.picture}")
        draw(found, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
