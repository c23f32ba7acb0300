"""The words of the members of a gradient round when they join, and the step that follows from these for all of them.

With the group, every member gets the words of all. So each concludes the same from them, alone: the step's options, the
parameters that no member had a gradient of, and the contribution of each member. Pure functions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec

from shoal.base.peer import PeerID
from shoal.protocol.wire import MAX_GROUP_SIZE, MAX_SAMPLES, MAX_TRAINED, Epoch, Member, Samples, encode
from shoal.run.decide.check import Check
from shoal.run.view.words import RECORD, SITE_BYTES, Weigh, shared_out
from shoal.train.options import Options, agreed

__all__ = [
    "MOST_CORES",
    "Agreement",
    "Contributor",
    "Deal",
    "Said",
    "agree",
    "checks_of",
    "deal_to",
    "said_bytes",
]

MOST_CORES = 64
"""No step uses more, so that every machine can follow it."""

Cores = Annotated[int, msgspec.Meta(ge=0, le=MOST_CORES)]


class Said(msgspec.Struct, frozen=True, array_like=True):
    """The words of a member that joins a gradient round.

    Attributes:
        options: of its parameter groups.
        unused: a bit for each trained parameter (that of parameter i is `1 << i % 8` in byte `i // 8`): no batch since
            the last step has given it a gradient. Shorter if the rest has.
        check: what the parameters are, if it is time to say so.
        samples: that it has when it begins to look for a group.
        end: where the run ends as far as it is concerned; None for nowhere.
        cores: that its trainer's thread uses, if the rounding of its steps depends on that; else 0.
    """

    options: Options
    unused: Annotated[bytes, msgspec.Meta(max_length=MAX_TRAINED // 8)] = b""
    check: Check | None = None
    samples: Samples = 0
    end: Epoch | None = None
    cores: Cores = 0


class Contributor(msgspec.Struct, frozen=True, array_like=True):
    """The words of one member that contributed to a step.

    Attributes:
        peer: its id.
        samples: that it had; of these the share of the parts, if its values are in some parts of the average only.
        end: where the run ends as far as it is concerned; None for nowhere.
        site: where it was, see `words.sites_of`.
        rounds: the steps that it has given to until then, without a pause of all that are kept. Known in a record of
            steps only: see `committed`.
    """

    peer: PeerID
    samples: Samples
    end: Epoch | None = None
    site: Annotated[bytes, msgspec.Meta(max_length=SITE_BYTES)] = b""
    rounds: Annotated[int, msgspec.Meta(ge=0, le=RECORD)] = 0


Contributors = Annotated[list[Contributor], msgspec.Meta(max_length=MAX_GROUP_SIZE)]


class Agreement(msgspec.Struct, frozen=True, array_like=True):
    """The agreement of a round's members on its step.

    Attributes:
        options: by all members; None if nobody has said any.
        mask: of the trained parameters that no member had a gradient of, as in `Said`.
        contributors: to the step, in the order of their ids.
        cores: that the step uses on each of them: as many as the member that has fewest; 0 where it does not matter.
    """

    options: Options | None
    mask: Annotated[bytes, msgspec.Meta(max_length=MAX_TRAINED // 8)]
    contributors: Contributors
    cores: Cores = 0

    @property
    def unused(self) -> frozenset[int]:
        """The trained parameters that no member had a gradient of."""
        return _members(self.mask)

    @property
    def digest(self) -> bytes:
        """SHA-256 of all that; part of the name of the state after the step."""
        own = self.options.digest if self.options is not None else b""
        return hashlib.sha256(own + self.mask + encode([self.contributors, self.cores])).digest()


def agree(
    gathered: Mapping[PeerID, Any],
    contributors: Collection[PeerID],
    in_part: Mapping[PeerID, Fraction] | None = None,
    *,
    weigh: Weigh,
    total: float = math.inf,
    sites: Mapping[PeerID, bytes] = MappingProxyType({}),
    mine: Options | None = None,
    last: Options | None = None,
) -> Agreement:
    """The agreement that follows from the words of the members: the same for all of them.

    Args:
        gathered: plain values by member, as `StepResult.gathered`. One that is not as it should be does not count.
        contributors: the members whose values are in the average.
        in_part: the share of the parts, of each member whose values are in some parts of it only. With a share of 0
            they are named all the same, so that one which does not learn the verdict gives nothing twice.
        weigh: the words of the members.
        total: the largest total weight of a part. All members together have given no more samples than that.
        sites: of the members, as their group knows them.
        mine: the options of this peer, see `agreed`.
        last: the options of the step before, see `agreed`.
    """
    most = MAX_SAMPLES if total >= MAX_SAMPLES else math.ceil(total)
    shares = {**(in_part or {}), **dict.fromkeys(contributors, Fraction(1))}
    said = {peer: _read(gathered[peer]) for peer in sorted(gathered)}
    read = {peer: each for peer, each in said.items() if each is not None}
    # Without samples a trainer may be in its first batch: a schedule that it has made is found at its first step.
    trained = {peer: each for peer, each in read.items() if each.samples} or read
    weights = weigh(trained)
    options = agreed([(each.options, weights[peer]) for peer, each in trained.items()], mine=mine, last=last)
    # The fewest: no machine is asked for more than it has, unless its word weighs nothing yet.
    cores = min((each.cores for peer, each in trained.items() if each.cores and weights[peer]), default=0)
    unused = _in_all([each.unused if each is not None else b"" for each in said.values()])
    gave = {peer: min(most, int(each.samples * shares[peer])) for peer, each in read.items() if shares.get(peer)}
    counted = shared_out(gave, most)
    made = [
        Contributor(peer, max(1, counted[peer]) if shares[peer] else 0, each.end, sites.get(peer, b""))
        for peer, each in read.items()
        if peer in shares
    ]
    return Agreement(options, unused, made, cores)


def said_bytes(members: Iterable[Member]) -> int:
    """The bytes of the words of these members."""
    return sum(len(member.gathered) for member in members)


class Deal(NamedTuple):
    """The numbers of samples that steps deal to one contributor, for `shoal.data`: as many as it gave to them.

    Attributes:
        number: of this deal, counted on this peer from 1.
        start: the first one.
        stop: the first one that is another contributor's.
    """

    number: int
    start: int
    stop: int


def deal_to(peer: PeerID, contributors: Sequence[Contributor], start: int, stop: int) -> tuple[int, int]:
    """The share of one peer in the numbers that a step deals, from its first one to the first of the next peer.

    Each contributor gets a share by its samples, in the order of their ids. A peer that gave none gets none.

    Args:
        peer: whose share.
        contributors: to the step.
        start: samples in the state before the step.
        stop: samples in the state after it.
    """
    total, before = max(1, sum(each.samples for each in contributors)), 0
    for each in sorted(contributors, key=lambda each: each.peer):
        if each.peer == peer:
            first, last = (start + (stop - start) * done // total for done in (before, before + each.samples))
            return first, last
        before += each.samples
    return start, start


def checks_of(gathered: Mapping[PeerID, Any]) -> dict[PeerID, Check]:
    """The members' descriptions of their parameters."""
    said = ((peer, _read(plain)) for peer, plain in gathered.items())
    return {peer: each.check for peer, each in said if each is not None and each.check is not None}


# msgspec looks at a type when it is first read; two peers in one process that do so at once crash it (0.22).
msgspec.msgpack.Decoder(Said)


def _read(plain: Any) -> Said | None:
    try:
        said = msgspec.convert(plain, Said)
    except msgspec.ValidationError:
        return None
    return said if said.options.problem() is None else None


def _in_all(masks: list[bytes]) -> bytes:
    size = min(map(len, masks), default=0)
    common = (1 << 8 * size) - 1
    for mask in masks:
        common &= int.from_bytes(mask[:size], "little")
    return common.to_bytes(size, "little").rstrip(b"\0")


def _members(mask: bytes) -> frozenset[int]:
    return frozenset(8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1)
