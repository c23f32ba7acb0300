"""What does a storm cost? ``python -m benchmarks.storm --peers 16 --faults-per-hour 600 --minutes 10``.

Real processes train one model together, each at a pace that a timer sets; first in calm, then in a storm: at random
moments one that is live, drawn at random, is killed (SIGKILL) and starts anew a second later with three live peers as
its entries, or is stopped (SIGSTOP) for 10 s, or its line is cut for 10 s without a word to anybody; then in calm
again. The reference is the mean of both calms: how much a machine does changes from minute to minute. Each trainer has
a network namespace of its own; where these cannot be made (they need root) there are no cuts, and that is said.
Everything of shoal is at its defaults.

- *Live*: neither killed, stopped nor cut off, and in the network.
- *Goodput*: samples committed per second and live trainer, in the storm over those in the calm. Their numbers in both
  calms are printed beside it: if they differ by a tenth, the goodput is known to a twentieth.
- *Participation*: contributors over live trainers, at each epoch.
- *Back*: from the first packet, the waking or the healing to the first contribution.
- *Wrong suspicions*: how often one that was live, for two seconds at least, was found silent by one that was live: in
  the first calm and in the storm, those of the last coordinator apart. ``--busy`` and ``--hold-gil`` make that harder.
- *Stand-still*: the longest time without an epoch, above the longest of the calm; the 99th percentile beside it.
- *In `step`*: the longest time that one that was live stood still in a call of `step`, beside the longest of its own
  merges, search and round together; first of the one that stood longest, then of the worst beside its own merges.

`--strategy` is one of `shoal.strategies`. A model that is merged in parts has an epoch of each part; a sample counts in
each for its share. `--every` is by default as many batches as an epoch of the synchronous storm has of each trainer.
Batches that a killed trainer has not given to a merge are lost; `floor` says what that costs, in the mean, at this rate
of kills: half the way between two merges.

Restarts are forks of one process that has imported torch: what the import costs on few cores is not what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.allreduce import ROOT, exit_on_sigterm, write
from benchmarks.emulator.namespaces import NotPermitted
from benchmarks.emulator.switched import Switched
from benchmarks.storm.judge import Fault, Figures, Lives, Stood, both, figures, main_line, stood, wrong_suspicions
from benchmarks.strategies.named import NAMES

KINDS = ("kill", "stop", "cut")
RESTART_S, STOP_S, CUT_S = 1.0, 10.0, 10.0
ENTRIES = 3
BATCH = 16
PORT = 4000
WARM_UP_S = 90.0
BARS = {"goodput": 0.97, "participation": 0.97, "back": 2.0, "stand-still": 2.0}
DECOUPLED_BARS = {"goodput": 0.985}


class Swarm:
    """The trainers, and what they said.

    Attributes:
        said: each line, in order.
        lives: who was live when.
        place_of: of each peer id.
    """

    def __init__(self, args: argparse.Namespace, network: Switched | None) -> None:
        self._args, self._network = args, network
        self.said: list[dict[str, Any]] = []
        self.lives = Lives(args.peers)
        self.place_of: dict[str, int] = {}
        self._guard = threading.Lock()
        self._changed = threading.Condition(self._guard)
        self._pid: dict[int, int] = {}
        self._name: dict[int, str] = {}
        self._entry: dict[int, str] = {}
        self._packets: dict[str, float] = {}
        self._down: set[int] = set()
        with (args.log.with_suffix(".err") if args.log else Path(os.devnull)).open("wb") as errors:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.contenders.storm_peer"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
                cwd=ROOT,
            )
        threading.Thread(target=self._read, daemon=True).start()
        self._wait(lambda: bool(self.said), 120.0, "the process that forks the trainers")

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            with contextlib.suppress(ValueError), self._changed:
                said = json.loads(line)
                self.said.append(said)
                self._note(said)
                self._changed.notify_all()

    def _note(self, said: dict[str, Any]) -> None:
        name = said["peer"]
        if not name:
            return
        place = int(name.split(".")[0])
        if name != self._name.get(place):
            return  # of a life that is over
        if "pid" in said:
            self._pid[place] = said["pid"]
        elif "packet" in said:
            self._packets[name] = said["at"]
        elif "ready" in said:
            self.place_of[said["ready"]] = place
            self._entry[place] = said["addresses"][0]
            self._down.discard(place)
            self.lives.begin(place, said["at"])

    def _wait(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(done, limit_s):
                raise TimeoutError(f"{what}: nothing within {limit_s:.0f} s")

    def start(self, place: int, rng: random.Random) -> None:
        """Start the trainer of a place, or the next one there."""
        args = self._args
        with self._guard:
            entries = [self._entry[other] for other in sorted(self._live())]
            life = int(self._name[place].split(".")[1]) + 1 if place in self._name else 0
            name = self._name[place] = f"{place}.{life}"
        order = {
            "name": name,
            "namespace": None if self._network is None else self._network.paths[place],
            "settings": {
                "host": "127.0.0.1" if self._network is None else self._network.addresses[place],
                "port": 0 if self._network is None else PORT,
                "entries": rng.sample(entries, min(ENTRIES, len(entries))),
                "target": round(args.peers * BATCH * args.epoch_s / args.batch_s),
                "batch": BATCH,
                "batch_s": args.batch_s,
                "hold_gil": args.hold_gil,
                "numel": int(args.state_mb * 250_000),
                "strategy": {
                    "name": args.strategy,
                    "every": args.every,
                    "fragments": args.fragments,
                    "quorum": args.quorum,
                },
                "lr": 0.01 * args.epoch_s,
            },
        }
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        self._server.stdin.flush()

    def start_all(self, rng: random.Random) -> None:
        """The first one, then the others together."""
        for place in range(self._args.peers):
            self.start(place, rng)
            if place == 0:
                self._wait(lambda: bool(self._live()), 60.0, "the first trainer")
        self._wait(lambda: len(self._live()) == self._args.peers, 120.0, "the trainers")

    def _live(self) -> set[int]:
        return self._entry.keys() - self._down

    def live(self) -> list[int]:
        """The peers that are live now."""
        with self._guard:
            return sorted(self._live())

    def strike(self, kind: str, place: int) -> float:
        """Do this to one that is live; returns when."""
        with self._guard:
            self._down.add(place)
            at = time.monotonic()
            self.lives.end(place, at)
        if kind == "cut":
            assert self._network is not None
            self._network.cut(place)
        else:
            os.kill(self._pid[place], signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        return at

    def bring_back(self, fault: Fault, rng: random.Random) -> float | None:
        """End what was done to it; returns when it was back, None for one that starts anew."""
        place = fault.place
        if fault.kind == "kill":
            self.start(place, rng)
            return None
        if fault.kind == "cut":
            assert self._network is not None
            self._network.heal(place)
        else:
            os.kill(self._pid[place], signal.SIGCONT)
        with self._guard:
            self._down.discard(place)
            at = time.monotonic()
            self.lives.begin(place, at)
        return at

    def first_packet(self, place: int, life: int) -> float | None:
        """When a restarted one sent it."""
        return self._packets.get(f"{place}.{life}")

    def life(self, place: int) -> int:
        """How often its trainer was started anew."""
        return int(self._name[place].split(".")[1])

    def epochs(self) -> list[dict[str, Any]]:
        """What was said of epochs so far."""
        with self._guard:
            return [each for each in self.said if "epoch" in each]

    def cpu_s(self) -> float:
        """CPU seconds of those that live now."""
        total = 0
        for pid in self._pid.values():
            with contextlib.suppress(OSError):
                total += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        return total / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Kill all of them: they die with the process that forked them."""
        self._server.kill()
        self._server.wait()


def gusts(args: argparse.Namespace, rng: random.Random) -> Iterator[tuple[float, str]]:
    """When, in seconds from the beginning, what comes: a Poisson process."""
    at = 0.0
    while True:
        at += rng.expovariate(args.faults_per_hour / 3600) if args.faults_per_hour else float("inf")
        yield at, rng.choices(KINDS, args.kinds)[0]


def storm(swarm: Swarm, args: argparse.Namespace, rng: random.Random) -> tuple[list[Fault], float, float]:
    """Let it blow, until all are back; returns the faults, when it began, and when the last one could have struck."""
    began = time.monotonic()
    ends = began + 60 * args.minutes
    faults: list[Fault] = []
    restarted: list[tuple[Fault, int]] = []
    to_lift: list[tuple[float, int, Fault]] = []
    coming = gusts(args, rng)
    after_s, kind = next(coming)
    while True:
        due = min(began + after_s, to_lift[0][0] if to_lift else ends, ends)
        time.sleep(max(0.0, due - time.monotonic()))
        if to_lift and to_lift[0][0] <= due:
            _, _, fault = heapq.heappop(to_lift)
            back_at = swarm.bring_back(fault, rng)
            if fault.kind == "kill":
                restarted.append((fault, swarm.life(fault.place)))
            else:
                faults.append(fault._replace(back_at=back_at))
        elif due >= ends:
            break
        else:
            if live := swarm.live():
                place = rng.choice(live)
                fault = Fault(swarm.strike(kind, place), kind, place, None)
                down_s = {"kill": RESTART_S, "stop": STOP_S, "cut": CUT_S}[kind]
                heapq.heappush(to_lift, (fault.at + down_s, len(faults) + len(to_lift), fault))
            after_s, kind = next(coming)
    for due, _, fault in sorted(to_lift):
        time.sleep(max(0.0, due - time.monotonic()))
        swarm.bring_back(fault, rng)
        faults.append(fault)  # it was not back within the storm
    faults += [fault._replace(back_at=swarm.first_packet(fault.place, life)) for fault, life in restarted]
    return sorted(faults), began, ends


def calm(swarm: Swarm, args: argparse.Namespace) -> tuple[float, float, float]:
    """Wait until all take part, then watch; returns when that began, when it ended, and the CPU seconds in it."""
    since = time.monotonic()
    while time.monotonic() < since + WARM_UP_S:
        last = {each["epoch"]: len(each["by"]) for each in swarm.epochs() if each["at"] >= since}
        if len(last) >= 6 and all(by == args.peers for by in list(last.values())[-3:]):
            break
        time.sleep(0.5)
    else:
        print(f"not all took part within {WARM_UP_S:.0f} s of calm", flush=True)
    began, cpu_s = time.monotonic(), swarm.cpu_s()
    time.sleep(60 * args.calm)
    return began, time.monotonic(), swarm.cpu_s() - cpu_s


def percentile(values: list[float], part: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def describe(still: Figures, wild: Figures, faults: list[Fault]) -> dict[str, Any]:
    """The figures that are asked for."""
    back = sorted(each for kind in wild.back.values() for each in kind)
    return {
        "goodput": wild.rate / max(1e-9, still.rate),
        "participation": wild.participation,
        "back": {
            "median": percentile(back, 0.5),
            "p90": percentile(back, 0.9),
            "worst": back[-1] if back else 0.0,
            "never": wild.never,
            **{kind: [percentile(each, 0.5), each[-1]] for kind, each in wild.back.items()},
        },
        "stand-still": wild.gaps[-1] - still.gaps[-1],
        "gap": {"calm worst": still.gaps[-1], "storm worst": wild.gaps[-1], "storm p99": percentile(wild.gaps, 0.99)},
        "faults": dict(Counter(fault.kind for fault in faults)),
        "calm": {"participation": still.participation, "rate": still.rate, "epochs": still.epochs},
        "rate": wild.rate,
        "epochs": wild.epochs,
    }


def show_in_step(in_step: dict[str, list[Stood]]) -> bool:
    """Print how long trainers stood still in `step`; whether none stood for longer than its own longest merge."""
    for span, each in in_step.items():
        longest, worst = max(each), max(each, key=lambda one: one.longest_s - one.merge_s)
        print(
            f"  in step, {span}: {longest.longest_s:.2f} s (its longest merge {longest.merge_s:.2f}); worst beside its "
            f"own merge {worst.longest_s:.2f} ({worst.merge_s:.2f})",
            flush=True,
        )
    return all(one.longest_s <= one.merge_s for one in in_step["storm"])


def show(found: dict[str, Any], minutes: float, strategy: str) -> bool:
    """Print the figures; whether all bars were reached."""
    back, gap, faults = found["back"], found["gap"], found["faults"]
    per_hour = sum(faults.values()) * 60 / minutes
    print(
        f"storm: {sum(faults.values())} faults ({per_hour:.0f} an hour: "
        f"{', '.join(f'{count} {kind}' for kind, count in faults.items())}), {found['epochs']} epochs"
    )
    before, after = (calm["rate"] for calm in found["calms"])
    print(
        f"  goodput        {found['goodput']:.3f} (floor {found['floor']:.3f}): {found['rate']:.1f} samples a second "
        f"and trainer, {before:.1f} in the calm before it and {after:.1f} after it"
    )
    print(f"  participation  {found['participation']:.3f} (calm {found['calm']['participation']:.3f})")
    each = ", ".join(f"{kind} {back[kind][0]:.1f} (worst {back[kind][1]:.1f})" for kind in KINDS if kind in back)
    print(
        f"  back           {back['median']:.1f} s (median), {back['p90']:.1f} (p90), {back['worst']:.1f} (worst), "
        f"{back['never']} never; {each}"
    )
    print(
        f"  stand-still    {found['stand-still']:.1f} s (longest gap {gap['storm worst']:.1f}, calm "
        f"{gap['calm worst']:.1f}); p99 of gaps {gap['storm p99']:.1f} s",
        flush=True,
    )
    for span, (members, coordinators) in found["wrong"].items():
        rounds = found["calms"][0]["epochs"] if span == "calm" else found["epochs"]
        print(
            f"  in {span}: {members} members and {coordinators} coordinators wrongly found silent in {rounds} rounds",
            flush=True,
        )
    stands_for_its_merge = show_in_step(found["in step"])
    if strategy == "decoupled":
        return stands_for_its_merge and bool(found["goodput"] >= DECOUPLED_BARS["goodput"])
    return bool(
        found["goodput"] >= BARS["goodput"]
        and found["participation"] >= BARS["participation"]
        and back["worst"] <= BARS["back"]
        and not back["never"]
        and found["stand-still"] <= BARS["stand-still"]
    )


def play(args: argparse.Namespace, network: Switched | None) -> dict[str, Any]:
    """All of it; returns what is written down."""
    rng = random.Random(args.seed)
    swarm = Swarm(args, network)
    try:
        swarm.start_all(rng)
        calm_began, calm_ended, cpu_s = calm(swarm, args)
        cores = cpu_s / (calm_ended - calm_began)
        print(f"calm: {args.peers} trainers use {cores:.2f} of {os.cpu_count()} cores", flush=True)
        faults, began, ended = storm(swarm, args, rng)
        after = calm(swarm, args)[:2]
    finally:
        swarm.end()
    line = main_line(swarm.said, swarm.place_of)
    calms = [figures(line, swarm.lives, [], *span) for span in ((calm_began, calm_ended), after)]
    wild = figures(line, swarm.lives, faults, began, ended)
    found = describe(both(*calms), wild, faults) | {"cores": cores, "calms": [each._asdict() for each in calms]}
    spans = {"calm": (calm_began, calm_ended), "storm": (began, ended)}
    found["wrong"] = {
        name: wrong_suspicions(swarm.said, swarm.place_of, swarm.lives, *span) for name, span in spans.items()
    }
    found["in step"] = {name: stood(swarm.said, swarm.lives, *span) for name, span in spans.items()}
    killed = sum(fault.kind == "kill" for fault in faults)
    lost_s = killed * min(args.every * args.batch_s, ended - began) / 2
    found["floor"] = 1.0 - lost_s / max(1e-9, swarm.lives.seconds(began, ended))
    if args.log:
        with args.log.open("w") as log:
            log.writelines(json.dumps(each) + "\n" for each in swarm.said)
            log.writelines(json.dumps({"fault": fault, "at": fault.at}) + "\n" for fault in faults)
    times = sorted(
        {calm_began, ended, *(t for spans in swarm.lives.spans for span in spans for t in span if t < ended)}
    )
    return {
        **found,
        "drawn": {
            "calm_s": began - calm_began,
            "live": [[t - began, len(swarm.lives.at(t))] for t in times if t >= calm_began],
            "took_part": [[e.at - began, len(e.by), e.loss] for e in line if calm_began <= e.at < ended],
            "faults": [[fault.at - began, fault.kind] for fault in faults],
        },
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--faults-per-hour", type=float, default=600.0)
    parser.add_argument("--minutes", type=float, default=10.0, help="of storm")
    parser.add_argument("--calm", type=float, default=1.5, help="minutes of calm before it, and after it")
    parser.add_argument("--kinds", default="65:25:10", help="weights of kills, stops and cuts")
    parser.add_argument("--epoch-s", type=float, default=1.0, help="about how long an epoch takes with all trainers")
    parser.add_argument("--batch-s", type=float, default=None, help="seconds of a batch; default: a fifth of an epoch")
    parser.add_argument("--strategy", choices=NAMES, default="synchronous")
    parser.add_argument("--every", type=int, default=None, help="batches between two merges of a part")
    parser.add_argument("--fragments", type=int, default=4, help="parts of the model, for those that have them")
    parser.add_argument("--quorum", type=int, default=2, help="peers that a merge takes")
    parser.add_argument("--state-mb", type=float, default=1.0, help="10^6 bytes of parameters")
    parser.add_argument("--busy", type=int, default=0, help="processes that do nothing but count, beside the trainers")
    parser.add_argument("--hold-gil", action="store_true", help="a batch is Python that never lets go by itself")
    parser.add_argument("--loss", type=float, default=0.0, help="part of all packets that is lost (needs nft)")
    parser.add_argument("--seed", type=int, default=1, help="decides when what happens to whom")
    parser.add_argument("--log", type=Path, metavar="FILE", help="write there what was said and done")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the storm there (SVG)")
    args = parser.parse_args()
    args.batch_s = args.batch_s or args.epoch_s / 5
    args.every = args.every or max(2, round(args.epoch_s / args.batch_s))
    args.kinds = [float(part) for part in args.kinds.split(":")]
    if len(args.kinds) != len(KINDS) or args.peers < 3:
        parser.error("--kinds wants three weights, --peers at least 3")
    return args


def main() -> int:
    args = arguments()
    exit_on_sigterm()
    with contextlib.ExitStack() as stack:
        network = None
        try:
            network = stack.enter_context(Switched(args.peers, loss=args.loss))
        except NotPermitted as error:
            if args.loss:
                sys.exit(f"--loss needs network namespaces: {error}")
            print(f"no cuts, as there are no network namespaces here: {error}")
            args.kinds[2] = 0.0
        for _ in range(args.busy):
            spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
        found = play(args, network)
    reached = show(found, args.minutes, args.strategy)
    if args.json:
        settings = {key: value for key, value in vars(args).items() if key not in {"log", "json", "picture"}}
        write(args.json, {"settings": settings, **found})
    if args.picture:
        from benchmarks.storm.picture import draw

        draw(found, args.picture)
    bars = f"{DECOUPLED_BARS}, and in step no longer than its own merge" if args.strategy == "decoupled" else f"{BARS}"
    print("all bars reached" if reached else f"bars: {bars}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
