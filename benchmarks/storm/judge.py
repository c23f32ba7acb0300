"""What a storm did, from what was said and done. Pure: lists of facts go in, figures come out.

*Live* is a trainer that is neither killed, stopped nor cut off, and has joined the network. The *main line* is, of each
epoch, the state that most trainers told of: one that trains alone while it is cut off is not on it. A model that is
merged in parts has a line of each; all of them are looked at as one, and a sample counts in each for its part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

__all__ = ["Epoch", "Fault", "Figures", "Lives", "Stood", "both", "figures", "main_line", "stood", "wrong_suspicions"]


class Fault(NamedTuple):
    """One fault.

    Attributes:
        at: when it began.
        kind: `kill`, `stop` or `cut`.
        place: the trainer's, which a restarted one takes over.
        back_at: when the trainer sent its first packet, woke, or had a line again; None if not within the storm.
    """

    at: float
    kind: str
    place: int
    back_at: float | None


class Epoch(NamedTuple):
    """One swarm step of the main line: when it was told of first, its samples, and the places that contributed.

    If the model is merged in parts, it is one of `part`, and its samples are that part's share of them.
    """

    at: float
    number: int
    part: str
    samples: float
    by: frozenset[int]
    loss: float


class Lives:
    """When each place was live.

    Attributes:
        spans: for each place, its times of life, in order: beginning, and end or infinity.
    """

    def __init__(self, places: int) -> None:
        self.spans: list[list[tuple[float, float]]] = [[] for _ in range(places)]

    def begin(self, place: int, at: float) -> None:
        """It is live from now on."""
        self.spans[place].append((at, float("inf")))

    def end(self, place: int, at: float) -> None:
        """It is live no more."""
        if self.spans[place]:
            self.spans[place][-1] = self.spans[place][-1][0], at

    def at(self, time: float) -> set[int]:
        """The peers that are live then."""
        return {place for place, spans in enumerate(self.spans) if any(a <= time < b for a, b in spans)}

    def seconds(self, begin: float, end: float) -> float:
        """Trainer seconds of life within these times."""
        return sum(max(0.0, min(b, end) - max(a, begin)) for spans in self.spans for a, b in spans)


class Figures(NamedTuple):
    """Of one span of time.

    Attributes:
        epochs: of the main line.
        rate: samples committed per second and live trainer, from the first step of each part to its last: a span holds
            no whole number of steps, and a step more or less is a hundredth of a minute and a half.
        participation: contributors over those live, as each epoch was told of, summed over epochs.
        gaps: between successive epochs, seconds, sorted.
        back: for each kind, the times from the return to the first contribution, sorted.
        never: returns after which no contribution came before the end; those that another fault hit left out.
    """

    epochs: int
    rate: float
    participation: float
    gaps: list[float]
    back: dict[str, list[float]]
    never: int


def main_line(said: Iterable[dict[str, Any]], place_of: dict[str, int]) -> list[Epoch]:
    """The epochs of the main line, in order of their times.

    Args:
        said: what the trainers said; those with an `epoch` matter.
        place_of: the place of each peer id.
    """
    told: dict[tuple[int, str], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for each in said:
        if "epoch" in each:
            told[each["epoch"], each.get("part", "")][each["digest"]].append(each)
    parts = len({part for _, part in told})
    line = []
    for (number, part), states in told.items():
        same = max(states.values(), key=len)
        by = Counter(place_of[peer] for each in same for peer in each["by"] if peer in place_of)
        loss = sum(each["loss"] for each in same) / len(same)
        samples = same[0]["samples"] / parts
        line.append(Epoch(min(each["at"] for each in same), number, part, samples, frozenset(by), loss))
    return sorted(line, key=lambda epoch: (epoch.at, epoch.number))


class Stood(NamedTuple):
    """How long a trainer stood still in a call of `step` at most, and its longest merge (with the search), seconds."""

    longest_s: float
    merge_s: float


def stood(said: Iterable[dict[str, Any]], lives: Lives, begin: float, end: float) -> list[Stood]:
    """Of each place, while it was live. The calls in which a newcomer waits for the state are left out."""
    longest, merges = [0.0] * len(lives.spans), [0.0] * len(lives.spans)
    for each in said:
        if not begin <= each["at"] < end or not ("merged_s" in each or "stood_s" in each):
            continue
        place = int(each["peer"].split(".")[0])
        began = each["at"] - each.get("stood_s", each.get("merged_s"))
        if not any(a <= began and each["at"] < b for a, b in lives.spans[place]):
            continue  # it was stopped or cut off meanwhile
        if "merged_s" in each:
            merges[place] = max(merges[place], each["merged_s"])
        elif not each["joins"]:
            longest[place] = max(longest[place], each["stood_s"])
    return [Stood(*each) for each in zip(longest, merges, strict=True)]


def _rate(line: Sequence[Epoch], lives: Lives) -> float:
    """Samples per second and live trainer, of successive steps of one part: the first one ends what is not counted."""
    return sum(epoch.samples for epoch in line[1:]) / max(1e-9, lives.seconds(line[0].at, line[-1].at))


def figures(line: Sequence[Epoch], lives: Lives, faults: Sequence[Fault], begin: float, end: float) -> Figures:
    """Of the time from `begin` to `end`."""
    within = [epoch for epoch in line if begin <= epoch.at < end]
    live = [lives.at(epoch.at) for epoch in within]
    took_part = sum(len(epoch.by & there) for epoch, there in zip(within, live, strict=True))
    times = sorted([begin, *(epoch.at for epoch in within), end])
    back: dict[str, list[float]] = defaultdict(list)
    never = 0
    for fault in faults:
        if fault.back_at is None or not begin <= fault.at < end:
            continue
        later = (other.at for other in faults if other.place == fault.place and other.at > fault.back_at)
        again = min(later, default=end)
        came = next((epoch.at for epoch in line if epoch.at > fault.back_at and fault.place in epoch.by), None)
        if came is not None and came <= again:
            back[fault.kind].append(came - fault.back_at)
        elif again == end and end - fault.back_at > 5.0:
            never += 1
    return Figures(
        epochs=len(within),
        rate=sum(_rate([epoch for epoch in within if epoch.part == part], lives) for part in {e.part for e in within}),
        participation=took_part / max(1, sum(map(len, live))),
        gaps=sorted(b - a for a, b in pairwise(times)),
        back={kind: sorted(each) for kind, each in back.items()},
        never=never,
    )


def both(one: Figures, other: Figures) -> Figures:
    """Two spans of calm of about equal length as one: rate and participation are means."""
    return Figures(
        epochs=one.epochs + other.epochs,
        rate=(one.rate + other.rate) / 2,
        participation=(one.participation + other.participation) / 2,
        gaps=sorted(one.gaps + other.gaps),
        back={},
        never=0,
    )


def wrong_suspicions(
    said: Iterable[dict[str, Any]], place_of: dict[str, int], lives: Lives, begin: float, end: float
) -> tuple[int, int]:
    """How often one that was live was found silent by one that was live: a member, and one that decided last.

    Both for two seconds, at least: who has just woken may be found silent for what it did not say before. A peer whose
    place has been taken over by a restarted one is dead, and rightly found silent.
    """
    members = coordinators = 0
    living: dict[int, str] = {}
    for each in said:
        if "ready" in each:
            living[place_of[each["ready"]]] = each["ready"]
        if "silent" not in each or not begin <= each["at"] < end or each["silent"] not in place_of:
            continue
        if living.get(place_of[each["silent"]], each["silent"]) != each["silent"]:
            continue
        both = place_of[each["silent"]], int(each["peer"].split(".")[0])
        if all(any(a <= each["at"] - 2.0 and each["at"] < b for a, b in lives.spans[place]) for place in both):
            coordinators += each["decides"]
            members += not each["decides"]
    return members, coordinators
