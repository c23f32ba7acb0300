"""The check of the parameters themselves: peers that name one state must hold one state; a difference is mended.

A name says which steps went into a state, not which values came of it. A hook that only one peer has, random numbers in
a step or a broken memory may change them. So every few epochs each member of a gradient round describes its parameters
as it joins: by a digest of their bytes, and a sample of their values. At the end of a run the peers tell each other the
same. From these, every member concludes the same:

- The parameters that the members of most weight hold are the state (see `words`); of equal weights, those of the first
  peer in an order that chance has made.
- A rival group is as many members that have at least half of that weight. Then the weight does not decide alone.
  Parameters that something else than shoal has written to give way first (see `Changed`): a member knows that of its
  own. Of members that differ at one check after the other the same ones take over each time: those that did so the last
  time.
- Members with another arithmetic (torch, device, way of computing) than these holders must hold the same within
  `BOUND`, as far as the sample tells.
- Members of equal arithmetic must hold the same parameters to the bit. Among the holders' own arithmetic these are the
  state. Among another arithmetic, members that are not near the state do not count: the parameters are those that the
  others of most weight hold; of equal weights, those of the first peer.
- A member that holds other parameters takes no step. It gives them a new name, which is worse than any, and downloads
  the parameters of its own arithmetic, or those of the holders if nobody of its arithmetic is near the state. With the
  holders' it would differ from its own kind at the next check again. If a difference is found again and again, it is
  mended the first, second, fourth, ... time in a row only.
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import torch
from blake3 import blake3

from shoal.base.peer import PeerID
from shoal.compression import view_bytes
from shoal.run.view.words import Weigh, heaviest
from shoal.train.options import HOW
from shoal.train.value_mark import Changed

__all__ = ["BOUND", "Check", "Checks", "Verdict", "check_of", "is_due", "judge"]

BOUND = 1e-5
"""The most that samples differ where arithmetic differs, against their size (root mean squares), in float32.

Measured by `python -m benchmarks.drift`: AdamW with AVX-512 against `ATEN_CPU_CAPABILITY=default`: 1.0e-8 after 10
steps, 1.0e-7 after 1,000; in bfloat16 2.0e-5.
"""

_BOUND_16_BITS = 0.01
_SAMPLE = 256
_LONGEST_NUMERICS = 160
_RIVAL = 2
"""What some say of their own parameters counts beside others of up to this multiple of their weight: keys are free."""

_LOOK_BYTES = 64 << 20
"""Whoever puts other values in place, and the first ones back, takes longer than it takes to read these bytes."""
_HOST = torch.device("cpu")


class Check(msgspec.Struct, frozen=True, array_like=True):
    """The parameters of one member, as it describes them.

    Attributes:
        arithmetic: names what it computes steps with.
        digest: of the bytes of all parameters.
        sample: some of their values, at places that follow from the name of the state; float32, one after another.
        bits: of the narrowest dtype among the parameters.
        numerics: the settings that its steps depend on, in words, for people.
        changed: whether something else than shoal has written to them since the last check, or since they were taken
            over: see `Changed`.
        followed: whether it held others than it should at the last check, too.
    """

    arithmetic: Annotated[bytes, msgspec.Meta(max_length=16)]
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    sample: Annotated[bytes, msgspec.Meta(max_length=4 * _SAMPLE)]
    bits: Annotated[int, msgspec.Meta(ge=1, le=64)] = 32
    numerics: Annotated[str, msgspec.Meta(max_length=_LONGEST_NUMERICS)] = ""
    changed: Changed = Changed.NOT
    followed: bool = False

    def is_near(self, other: Check) -> bool:
        """Whether the samples agree within the bound. Numbers that are none are near nothing."""
        if len(self.sample) != len(other.sample) or len(self.sample) % 4:
            return False
        mine, theirs = (struct.unpack(f"<{len(each) // 4}f", each) for each in (self.sample, other.sample))
        apart, bound = math.dist(mine, theirs), BOUND if self.bits > 16 else _BOUND_16_BITS
        return math.isfinite(apart) and apart <= bound * math.hypot(*theirs)


class Verdict(NamedTuple):
    """The conclusion from the checks of all members.

    Attributes:
        digest: of the state.
        holders: the members that hold exactly this.
        others: the members that hold something else, each with the members whose parameters it takes over. A member
            that holds the state to rounding, and the same as most of its own arithmetic, is neither a holder nor one
            of these.
        is_tie: whether as many differ from some parameters as hold them, and nobody says that its own were changed, so
            that those may be the wrong ones. It decides nothing: the user is told to look at both sides.
    """

    digest: bytes
    holders: frozenset[PeerID]
    others: Mapping[PeerID, frozenset[PeerID]]
    is_tie: bool = False


def is_due(epoch: int, every: int) -> bool:
    """Whether the parameters of this epoch are checked: in the middle between those whose states are averaged."""
    return every > 0 and epoch % every == every // 2 and epoch > 0


def judge(checks: Mapping[PeerID, Check], weigh: Weigh, chance: bytes = b"") -> Verdict | None:
    """The verdict that follows from these, if the words of their peers are weighed so; None if there are none.

    `chance` decides between equal weights, see `words.heaviest`.
    """
    if not checks:
        return None
    state, holders = _most(checks, weigh, chance)
    groups: dict[bytes, dict[PeerID, Check]] = {}
    for peer, check in checks.items():
        groups.setdefault(check.arithmetic, {})[peer] = check
    others = dict[PeerID, frozenset[PeerID]]()
    for group in groups.values():
        kept = holders
        if holders.isdisjoint(group) and (near := {peer: each for peer, each in group.items() if each.is_near(state)}):
            kept = _most(near, weigh, chance)[1]
        others.update((peer, kept) for peer in group.keys() - kept)
    sides = dict[frozenset[PeerID], list[PeerID]]()
    for peer, kept in others.items():
        sides.setdefault(kept, []).append(peer)
    tie = any(
        len(kept) <= len(side) and _changed(checks, side) <= _changed(checks, kept) for kept, side in sides.items()
    )
    return Verdict(state.digest, holders, others, is_tie=tie)


def _changed(checks: Mapping[PeerID, Check], peers: Collection[PeerID]) -> Changed:
    """The least that any of these says."""
    return min(checks[peer].changed for peer in peers)


def _most(checks: Mapping[PeerID, Check], weigh: Weigh, chance: bytes) -> tuple[Check, frozenset[PeerID]]:
    """The check that counts, with its holders: that of most weight, unless as many members of weight know better."""
    weights = weigh(checks)
    digests = heaviest({peer: check.digest for peer, check in checks.items()}, weights, chance)
    holders: dict[bytes, list[PeerID]] = {digest: [] for digest in digests}
    for peer, check in checks.items():
        holders[check.digest].append(peer)
    of_weight = {digest: [peer for peer in holders[digest] if weights.get(peer, 0)] for digest in digests}
    weight = {digest: sum(weights[peer] for peer in of_weight[digest]) for digest in digests}
    first = digests[0]
    rivals = [
        digest
        for digest in digests
        if len(of_weight[digest]) >= len(of_weight[first]) and _RIVAL * weight[digest] >= weight[first]
    ]
    # As most weigh, the first of those that give way least: one holder that gives way to nobody is enough.
    digest = min(
        rivals, key=lambda each: min((checks[peer].changed, checks[peer].followed) for peer in of_weight[each])
    )
    # Others may name this digest, and another sample.
    return heaviest({peer: checks[peer] for peer in holders[digest]}, weights, chance)[0], frozenset(holders[digest])


class Checks:
    """The conclusions of one peer from one check after the other.

    Attributes:
        last: the epoch of the last check, the digest of our parameters then, and that of the state: for others to see.
    """

    def __init__(self) -> None:
        self.last: tuple[int, bytes, bytes] | None = None
        self._in_a_row = 0
        self._told = 0

    def concluded(self, epoch: int, verdict: Verdict, checks: Mapping[PeerID, Check], me: PeerID) -> bool:
        """A check was made. True if our parameters are to be mended now."""
        if me not in checks:
            return False
        wrong = me in verdict.others
        self.last = epoch, checks[me].digest, checks[me].digest if wrong else verdict.digest
        self._in_a_row = self._in_a_row + 1 if wrong else 0
        return wrong and self._in_a_row.bit_count() == 1

    def count_difference(self, verdict: Verdict, *, always: bool = False) -> bool:
        """Count this verdict. True if it is to be told: for the first, second, fourth, ... difference in a row.

        `always`: for each one, as nobody checks the parameters again.
        """
        self._told = self._told + 1 if verdict.others else 0
        return self._told > 0 if always else self._told.bit_count() == 1

    @property
    def again(self) -> bool:
        """Whether our parameters differed the last time, too."""
        return self._in_a_row > 1

    @property
    def others_again(self) -> bool:
        """Whether somebody's parameters differed the last time, too."""
        return self._told > 1

    @property
    def differed(self) -> bool:
        """Whether our parameters differed the last time."""
        return self._in_a_row > 0


def check_of(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.Tensor],
    name: bytes,
    *,
    on_host: bool = False,
    numerics: str = "",
    holds: Callable[[], bool] = lambda: True,
    at_rest: bool = False,
) -> Check | None:
    """Describe these parameters, in the state that has this digest as its name.

    Args:
        optimizer: that steps them.
        parameters: in order.
        name: the digest.
        on_host: the steps are taken on the CPU, wherever the parameters are.
        numerics: further settings that they depend on, in words.
        holds: whether the parameters have the values of this state now.
        at_rest: nothing is trained meanwhile, so that all cores may be used.

    Returns:
        None if others came into their place meanwhile.
    """
    devices = sorted({_device(each) for each in ([_HOST] if on_host else [each.device for each in parameters])})
    how = sorted({name for group in optimizer.param_groups for name in HOW if group.get(name)})
    about = f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability(), *devices, *how, numerics
    words = ", ".join(filter(None, about))
    both, unseen = blake3(max_threads=blake3.AUTO if at_rest else 1), 0
    with torch.no_grad():
        for parameter in parameters:
            both.update(view_bytes(parameter.detach().to("cpu").contiguous()))
            unseen += parameter.nbytes
            if unseen >= _LOOK_BYTES and not holds():
                return None
            unseen %= _LOOK_BYTES
    sample = _sample(parameters, name)
    if not holds():
        return None
    return Check(
        arithmetic=_arithmetic(optimizer, words),
        digest=both.digest(16),
        sample=sample,
        bits=min((8 * each.element_size() for each in parameters if each.dtype.is_floating_point), default=32),
        numerics=words[:_LONGEST_NUMERICS],
    )


def _sample(parameters: Sequence[torch.Tensor], name: bytes) -> bytes:
    total = sum(each.numel() for each in parameters)
    generator = torch.Generator().manual_seed(int.from_bytes(name[:7], "little"))
    size = (min(_SAMPLE, total),)
    places = torch.randint(total, size, generator=generator, dtype=torch.int64, device="cpu").sort().values
    found, begin, first, values = places.tolist(), 0, 0, []
    with torch.no_grad():
        for parameter in parameters:
            stop = begin + parameter.numel()
            if (last := bisect_left(found, stop, first)) > first:
                here = (places[first:last] - begin).to(parameter.device)
                values.append(parameter.detach().flatten()[here].to("cpu", torch.float32))
            begin, first = stop, last
    return bytes(view_bytes(torch.cat(values))) if values else b""


def _arithmetic(optimizer: torch.optim.Optimizer, numerics: str) -> bytes:
    """Peers with equal values take equal steps, to the bit."""
    how = [[name, repr(group.get(name))] for group in optimizer.param_groups for name in sorted(HOW)]
    forms = [[name, type(value).__name__] for group in optimizer.param_groups for name, value in sorted(group.items())]
    text = repr((numerics, how, forms))
    return hashlib.sha256(text.encode()).digest()[:8]


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
