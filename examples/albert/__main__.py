"""The whole example with one command: `python -m examples.albert`, or `make albert-demo`.

It starts a monitor and three trainers on this machine. When a third of the steps are done it kills one trainer
(SIGKILL); at half of them a new one joins. At the end it compares the weights of all trainers that lived to the end,
trains one process alone on as many samples, and writes a picture and the numbers. What it does not reach it says too:
then it ends with code 1.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

KILLED, LATE = "trainer-2", "late"


class Processes:
    """The programs of the example, each with a log of its own."""

    def __init__(self, folder, settings):
        self.folder, self.settings, self.all = folder, settings, {}

    def start(self, name, program, *arguments, last=()):
        """Start one of the programs beside this one; of an argument that comes twice, the last one counts."""
        command = [sys.executable, "-m", f"examples.albert.{program}", *arguments, *self.settings, *last]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.all[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def log(self, name):
        """What it has said so far."""
        return (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def wait(self, name):
        """Wait for its end."""
        if (code := self.all[name].wait()) != 0:
            raise SystemExit(f"{name} ended with {code}:\n{self.log(name)[-4000:]}")

    def run(self, name, program, *arguments):
        """Start one, and wait for its end."""
        self.start(name, program, *arguments)
        self.wait(name)

    def check(self):
        """Stop if one has failed."""
        for name, process in self.all.items():
            if process.poll() not in (None, 0, -signal.SIGKILL):
                self.wait(name)

    def kill_all(self):
        """Leave nothing behind."""
        for process in self.all.values():
            process.kill()
            process.wait()


def rows(folder):
    """The lines of a metrics file."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def swarm(processes, args):
    """The run of the trainers; returns when things happened, seconds since 1970."""
    folder, began = args.output, time.time()
    processes.start(
        "monitor", "run_training_monitor", "--output", str(folder / "monitor"), "--save-every", str(args.save_every)
    )
    while "shoal:" not in processes.log("monitor"):
        processes.check()
        time.sleep(0.1)
    invite = next(line for line in processes.log("monitor").splitlines() if line.startswith("shoal:"))

    def train(name):
        own = ["--output", str(folder / name), "--batch-size", str(args.batch_size)]
        processes.start(name, "run_trainer", *own, "--peers", invite)

    names = [f"trainer-{number}" for number in range(1, args.trainers + 1)]
    for name in names:
        train(name)
    times, shown = {"began": began}, 0
    while any(processes.all[name].poll() is None for name in names if name != KILLED):
        processes.check()
        epoch = max([row["epoch"] for row in rows(folder / "monitor")], default=0)
        if epoch >= args.epochs // 3 and "killed" not in times:
            processes.all[KILLED].send_signal(signal.SIGKILL)
            times["killed"] = time.time()
            print(f"epoch {epoch}: {KILLED} is killed (SIGKILL)", flush=True)
        if epoch >= args.epochs // 2 and "joined" not in times:
            train(LATE)
            times["joined"] = time.time()
            print(f"epoch {epoch}: another trainer is started", flush=True)
        if epoch >= shown + args.epochs // 10:
            shown = epoch
            print(f"epoch {epoch} after {time.time() - began:.0f} s", flush=True)
        time.sleep(0.5)
    survivors = [name for name in (*names, LATE) if name != KILLED]
    for name in (*survivors, "monitor"):
        processes.wait(name)
    return survivors, times


def alone(processes, args, samples):
    """One process without shoal, on as many samples in as many steps."""
    step = max(1, round(samples / args.epochs / args.batch_size)) * args.batch_size
    folder = args.output / "alone"
    options = ["--alone", "--save-steps", str(args.save_every), "--keep", "1000"]
    options += ["--output", str(folder), "--batch-size", str(args.batch_size)]
    processes.start("alone", "run_trainer", *options, last=["--target-batch-size", str(step)])
    processes.wait("alone")
    return step


def losses(args, step):
    """Held-out losses: of the single process by samples, and of both at the end."""
    from transformers import AlbertForPreTraining

    from examples.albert.training import Data, held_out_loss

    data, folder = Data(args.data), args.output

    def loss(path, samples=None):
        return held_out_loss(AlbertForPreTraining.from_pretrained(path), data, samples)

    steps = {int(path.name.rpartition("-")[2]): path for path in (folder / "alone").glob("checkpoint-*")}
    curve = [(step * number, loss(steps[number], 256)) for number in sorted(steps)]
    return curve, loss(folder / "trainer-1" / "final"), loss(folder / "alone" / "final")


def summarize(processes, args, survivors, times):
    """All numbers."""
    folder = args.output
    ends = {
        name: next(line for line in processes.log(name).splitlines() if ", parameters " in line) for name in survivors
    }
    first, late, monitor = (rows(folder / name) for name in ("trainer-1", LATE, "monitor"))
    samples, by_epoch = 0, {0: 0}
    for row in first:
        samples += int(row["samples"])
        by_epoch[row["epoch"]] = samples
    contributed = next((number for number, row in enumerate(late, 1) if row["contributed"]), None)
    gaps = [after["time"] - before["time"] for before, after in itertools.pairwise(first)]
    return {
        "ends": ends,
        "equal": len(set(ends.values())) == 1,
        "epochs": args.epochs,
        "samples": samples,
        "seconds": first[-1]["time"] - first[0]["time"],
        "longest_wait_s": max(gaps),
        "late_contributed_in_its_epoch": contributed,
        "late_from_epoch": late[0]["epoch"] if late else None,
        "killed_s": times["killed"] - first[0]["time"],
        "joined_s": times["joined"] - first[0]["time"],
        "held_out": [
            (by_epoch[max(each for each in by_epoch if each <= row["epoch"])], row["held_out_loss"])
            for row in monitor
            if "held_out_loss" in row
        ],
        "peers": [(row["time"] - first[0]["time"], row["peers"]) for row in monitor],
    }


def draw(found, path):
    """The picture: loss over samples, trainers over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[3, 1])
    above.plot(*zip(*found["held_out"], strict=True), color="#1668b8", linewidth=2.2, label="the swarm")
    above.plot(
        *zip(*found["alone"], strict=True), color="#e07b00", linewidth=1.8, dashes=(4, 2), label="one process alone"
    )
    above.set(xlabel="samples", ylabel="held-out loss (nats)", xlim=(0, None))
    above.legend(frameon=False)
    below.step(*zip(*found["peers"], strict=True), where="post", color="#1668b8", linewidth=1.8)
    for at, text, color in (
        (found["killed_s"], "kill -9", "#c81e3a"),
        (found["joined_s"], "one more starts", "#15803d"),
    ):
        below.axvline(at, color=color, linewidth=1.2)
        below.annotate(text, (at, 0.3), (4, 0), textcoords="offset points", color=color)
    below.set(xlabel="seconds", ylabel="trainers", xlim=(0, found["seconds"]), ylim=(0, None))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb")
    figure.savefig(path)


def report(found):
    """Print the numbers, and whether the aims are reached; returns whether all are."""
    print(f"{found['epochs']} epochs, {found['samples']:,} samples in {found['seconds']:.0f} s")
    print(f"longest time without an epoch: {found['longest_wait_s']:.1f} s")
    for name, end in found["ends"].items():
        print(f"{name}: {end}")
    ratio = found["loss"] / found["loss_alone"] - 1
    aims = {
        "all trainers that lived to the end hold equal bits": found["equal"],
        f"the late one contributed in its epoch {found['late_contributed_in_its_epoch']} (aim: 2)": (
            (found["late_contributed_in_its_epoch"] or 99) <= 2
        ),
        f"held-out loss {found['loss']:.4f}, one process {found['loss_alone']:.4f}: {ratio:+.2%} (aim: at most +2%)": (
            ratio <= 0.02
        ),
    }
    for text, reached in aims.items():
        print(f"{'reached' if reached else 'NOT REACHED'}: {text}")
    return all(aims.values())


def main():
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("albert-demo"), help="folder (default albert-demo)")
    parser.add_argument("--data", type=Path, default=Path("albert-data"), help="made if it is missing")
    parser.add_argument("--epochs", type=int, default=400, help="steps of the swarm (default 400)")
    parser.add_argument("--trainers", type=int, default=3, help="at the beginning (default 3)")
    parser.add_argument("--batch-size", type=int, default=16, help="of each trainer (default 16)")
    parser.add_argument("--save-every", type=int, default=20, help="epochs between checkpoints (default 20)")
    args, more = parser.parse_known_args()  # the rest is handed on to all programs
    args.output.mkdir(parents=True, exist_ok=True)
    if any(args.output.iterdir()):
        raise SystemExit(f"{args.output} is not empty: give another --output, or remove it")
    print(f"logs, metrics and checkpoints are in {args.output}; load average {os.getloadavg()[0]:.1f}", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    settings = ["--data", str(args.data), "--epochs", str(args.epochs), *more]
    processes = Processes(args.output, settings)
    try:
        if not (args.data / "tokens.safetensors").exists():
            print("making the data", flush=True)
            Processes(args.output, []).run("data", "tokenize_text", "--output", str(args.data))
        survivors, times = swarm(processes, args)
        found = summarize(processes, args, survivors, times)
        print(f"one process trains alone; load average {os.getloadavg()[0]:.1f}", flush=True)
        step = alone(processes, args, found["samples"])
        found["alone"], found["loss"], found["loss_alone"] = losses(args, step)
    finally:
        processes.kill_all()
    (args.output / "result.json").write_text(json.dumps(found, indent=1))
    draw(found, args.output / "picture.png")
    sys.exit(not report(found))


if __name__ == "__main__":
    main()
