"""Watches a run, and keeps its checkpoints: it trains nothing, needs no GPU, and may come and go.

`python -m examples.albert.run_training_monitor` prints an invite for the trainers; with `--peers INVITE` it joins a
network that is there. It reads in the DHT where the trainers stand. After each step of the swarm it writes a line of
JSON. After every `--save-every` of them it visits the run as a newcomer would: it downloads the state, saves it and
leaves. Then it measures the held-out loss.
"""

import contextlib
import logging
import sys
import time
from pathlib import Path

import torch

import shoal
from shoal.integrations.metrics import JsonLines, SharedMean, TensorBoard, WandB

if not __package__:  # run by its path, and not as a module
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.albert.training import Data, held_out_loss, join, make_model, parser, trainer_arguments


def sinks_of(args):
    """Where the metrics go: a file, and TensorBoard and W&B if they are there."""
    yield JsonLines(args.output / "metrics.jsonl")
    with contextlib.suppress(shoal.ConfigError):  # not installed
        yield TensorBoard(str(args.output / "tensorboard"))
    if args.wandb:
        import wandb  # type: ignore[import-not-found]

        yield WandB(wandb.init(project=args.wandb))


def visit(args, data, model, dht, last):
    """Download the state of the run into the model, and save it; returns its epoch.

    Args:
        args: the program's.
        data: of the run.
        model: that gets the weights.
        dht: this peer.
        last: wait for the last state of the run. The trainers wait for a peer that is not there yet.
    """
    arguments = trainer_arguments(args, args.output, use_cpu=True)
    with join(model, arguments, args, data, dht, client_mode=True).optimizer as visitor:
        visitor.announce_end(args.epochs)
        visitor.load_state_from_peers()
        waits_until = time.monotonic() + args.patience
        while last and visitor.local_epoch < args.epochs and time.monotonic() < waits_until:
            time.sleep(0.1)
            visitor.load_state_from_peers()
        if not visitor.local_epoch:
            raise shoal.StateUnavailable("nobody gave a state: the trainers have left")
        visitor.save(args.output / "checkpoints", keep=args.keep)
        return visitor.local_epoch


def main():
    """Watch until the run has ended."""
    found = parser(__doc__.split("\n", 1)[0])
    found.add_argument("--output", type=Path, default=Path("albert-monitor"), help="folder for metrics and checkpoints")
    found.add_argument("--save-every", type=int, default=20, help="steps of the swarm between two checkpoints")
    found.add_argument("--keep", type=int, default=3, help="so many checkpoints stay")
    found.add_argument("--held-out", type=int, default=256, help="samples of which the held-out loss is measured")
    found.add_argument("--patience", type=float, default=60.0, help="seconds without trainers, after which it ends")
    found.add_argument("--wandb", help="project of Weights & Biases, if that is installed")
    args = found.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    args.output.mkdir(parents=True, exist_ok=True)

    data = Data(args.data)
    model = make_model(args, data)
    place = f"/ip4/{args.host}/tcp/{args.port}"
    with shoal.DHT(initial_peers=args.peers, host_maddrs=place, start=True) as dht, contextlib.ExitStack() as stack:
        print(dht.invite(args.run), flush=True)
        mean = SharedMean(dht, f"{args.run}_loss")
        sinks = [stack.enter_context(contextlib.closing(sink)) for sink in sinks_of(args)]
        told = saved = 0
        gone_since = None  # the trainers; before the first ones come it waits for ever
        while gone_since is None or time.monotonic() < gone_since + args.patience:
            time.sleep(0.5)
            if (run := shoal.read_run(dht, args.run)) is None:
                gone_since = gone_since or (time.monotonic() if told else None)
                continue
            gone_since = None
            epoch, loss = run.best.epoch, mean.exchange(None, 0)
            if epoch <= told:
                continue
            metrics = {"peers": len(run.peers), "samples_per_s": run.samples_per_s}
            if loss is not None:
                metrics["swarm_loss"] = loss
            last = epoch >= args.epochs - 2
            if last or epoch // args.save_every > saved // args.save_every:
                with contextlib.suppress(shoal.StateUnavailable):  # the next time, then
                    epoch = saved = visit(args, data, model, dht, last)
                    metrics["held_out_loss"] = held_out_loss(model, data, args.held_out)
            for sink in sinks:
                sink(epoch, metrics)
            told = epoch
            print(f"epoch {epoch}: " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)
            if saved >= args.epochs:
                return
        print(f"no trainers for {args.patience:g} s: the last checkpoint is of epoch {saved}", flush=True)


if __name__ == "__main__":
    main()
