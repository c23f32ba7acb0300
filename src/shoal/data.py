"""The samples of each peer: `PeerSampler`, for any map-style data set and torch's `DataLoader`.

N samples and a swarm whose peers come and go. Peers that know nothing of each other cannot do better than to walk
permutations of their own: when the swarm has drawn N samples, and peer i the share s_i of them, a share of
prod(1 - s_i) was never drawn (nearly 1/e among many peers), and as many draws gave a sample for the second time.

The peers of a run do know something of each other: the steps that led to their state, with each contributor's samples.
So a step of T samples deals the next T numbers of one *stream*, the data set shuffled pass by pass in the same way on
all peers. Each contributor gets as many numbers as it gave samples, in the order of the peers' ids. No message is
sent for it, no number is dealt twice, and none is left out. What a peer draws beyond what it was dealt (before its
first step, and in place of samples that came too late to count) comes from a permutation of its own. Only these draws
repeat samples. A peer that dies loses what it was dealt and has not drawn: about its samples of one step.

`docs/why/decisions/0034-each-step-deals-the-next-samples.md` has the reasons, ``python -m benchmarks.data`` the
numbers.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from shoal.base.checks import flag, whole
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.optim import Optimizer

__all__ = ["PeerSampler", "Shuffle"]

_Numbers = npt.NDArray[np.uint64]

_ROUNDS = 16
"""Of the Feistel network: even, so that its halves have their own sizes again at the end. With 12, the orders of 5
numbers are not equally likely; with 16 they are, as far as 20,000 keys show."""

_BLOCK = 256
"""Places that are shuffled at once: numpy takes about as long for one."""

_MOST_SAMPLES = 1 << 62
_SEEDS = 1 << 64

_Count = Annotated[int, msgspec.Meta(ge=0)]


class PeerSampler(torch.utils.data.Sampler[int]):
    """Gives this peer of a run its own samples, in random order, few of them twice before the others are used.

    Give it to a `DataLoader` as `sampler`, with or without workers. Each iteration goes on where the last one ended.

    With `swarm` the steps of the run deal the samples: see the module. The data set should then have equal samples, in
    one order, on all peers, and `step` should count these samples (not tokens, say). A peer with another data set
    trains, too, but more samples are drawn twice. Without `swarm` each peer walks a permutation of its own.

    The shuffle is a Feistel network with cycle walking (Black and Rogaway 2002, "Ciphers with Arbitrary Finite
    Domains"). It takes no memory, whatever the size of the data set.

    Args:
        dataset: anything with a length: its numbers from 0 on are given. If it has grown when an iteration begins, this
            peer begins a new pass.
        swarm: the `shoal.Optimizer` that the samples are trained with; None to know nothing of other peers.
        num_samples: in one iteration; None for as many as the data set has. `len()` of the sampler says it.
        endless: one iteration never ends, and the sampler has no length.
        seed: of this peer's own permutation, 0 to 2**64 - 1; None for a random one. Without `swarm`, peers with one
            seed draw the same samples. With it, each peer's id makes a difference.

    Raises:
        ConfigError: the data set is empty or has no length, or another argument is wrong; it is named.
    """

    def __init__(
        self,
        dataset: Sized,
        swarm: Optimizer | None = None,
        *,
        num_samples: int | None = None,
        endless: bool = False,
        seed: int | None = None,
    ) -> None:
        if swarm is not None and not hasattr(swarm, "dealt"):
            raise ConfigError(f"swarm must be a shoal.Optimizer, got {type(swarm).__name__}")
        self._dataset, self._swarm = dataset, swarm
        self._num_samples = None if num_samples is None else whole("num_samples", num_samples)
        self._endless = flag("endless", endless)
        if self._endless and num_samples is not None:
            raise ConfigError("num_samples and endless exclude each other: leave one of them out")
        seed = secrets.randbelow(_SEEDS) if seed is None else whole("seed", seed, least=0, most=_SEEDS - 1)
        peer = "" if swarm is None else swarm.dht.peer_id.to_bytes().hex()
        self._state = _State(peer=peer, seed=seed, size=self._count())
        self._deals_seen = swarm.dealt[-1].number if swarm is not None and swarm.dealt else 0
        self._shuffle()

    def _count(self) -> int:
        try:
            count = len(self._dataset)
        except TypeError:
            raise ConfigError(
                "dataset has no length: PeerSampler needs a map-style data set; one that is only iterated over draws "
                "its own samples, and has to be seeded differently on each peer"
            ) from None
        if not 0 < count <= _MOST_SAMPLES:
            raise ConfigError(f"dataset has {count} samples: it must have at least one, and at most 2**62")
        return count

    def _shuffle(self) -> None:
        state = self._state
        run = "" if self._swarm is None else self._swarm.run_id
        self._common = Shuffle(f"run {run}", state.size)
        self._own = Shuffle(f"peer {state.seed} {state.peer}", state.size)

    def __len__(self) -> int:
        """Samples of one iteration.

        Raises:
            TypeError: the sampler is endless.
        """
        if self._endless:
            raise TypeError("an endless PeerSampler has no length")
        return self._count() if self._num_samples is None else self._num_samples

    def __iter__(self) -> Iterator[int]:
        """The next samples; after `load_state_dict` the rest of the iteration that was saved."""
        state = self._state
        if (count := self._count()) != state.size:
            state.place = (state.place // state.size + 1) * count
            state.size, state.dealt = count, []
            self._shuffle()
        if not state.resumed:
            state.drawn = 0
        state.resumed = False
        stop = None if self._endless else len(self)
        while stop is None or state.drawn < stop:
            state.drawn += 1
            yield self._draw()
            state = self._state  # one may have been loaded meanwhile

    def _draw(self) -> int:
        state = self._state
        self._take_deals()
        state.ahead += 1
        if not state.dealt:
            state.place += 1
            return self._own[state.place - 1]
        start, stop = state.dealt[0]
        state.dealt[:1] = [(start + 1, stop)] if start + 1 < stop else []
        return self._common[start]

    def _take_deals(self) -> None:
        """Take in the deals since the last look. Nobody is dealt more than it has drawn, whatever `step` counts."""
        state = self._state
        for deal in self._swarm.dealt if self._swarm is not None else ():
            if deal.number > self._deals_seen:
                self._deals_seen = deal.number
                stop = min(deal.stop, deal.start + state.ahead)
                if stop > deal.start:
                    state.dealt.append((deal.start, stop))
                    state.ahead -= stop - deal.start

    def set_epoch(self, epoch: int) -> None:
        """Go on with iteration `epoch`, as trainers say before each one; back to an earlier one it never goes.

        Without effect on what the swarm deals, and for an endless sampler.

        Args:
            epoch: number of the iteration, from 0.
        """
        if not self._endless and self._swarm is None:
            self._state.place = max(self._state.place, whole("epoch", epoch, least=0) * len(self))

    def state_dict(self) -> dict[str, Any]:
        """The place of this peer: plain numbers and lists, for `torch.save` or JSON.

        A `DataLoader` with workers has drawn ahead of the batches that it gave: these samples are lost on resuming,
        but not with torchdata's `StatefulDataLoader`.
        """
        self._take_deals()
        state: dict[str, Any] = msgspec.to_builtins(self._state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved place. The next iteration gives the rest of the one that was saved.

        The deals of another peer are not taken over: neither those in another peer's checkpoint, nor those of this peer
        under an earlier identity (`identity_path` keeps one).

        Raises:
            ConfigError: it is not what `state_dict` gave; nothing was loaded.
        """
        try:
            state = msgspec.convert(state_dict, _State)
        except msgspec.ValidationError as error:
            raise ConfigError(f"state_dict is not what PeerSampler.state_dict() gave: {error}") from error
        state.resumed = True
        if state.peer != self._state.peer:
            state.peer, state.dealt, state.ahead = self._state.peer, [], 0
        self._state = state
        self._shuffle()


class _State(msgspec.Struct, kw_only=True):
    """All that a sampler remembers.

    Attributes:
        peer: the id of this peer as hex digits; empty without a swarm.
        seed: of its own permutation.
        size: of the data set.
        place: in its own permutation.
        drawn: samples of the present iteration.
        ahead: samples that were drawn and for which none were dealt yet.
        dealt: numbers of the run's stream, from (incl.) and to (excl.), which are drawn next.
        resumed: the next iteration is the rest of this one.
    """

    peer: str
    seed: Annotated[int, msgspec.Meta(ge=0)]
    size: Annotated[int, msgspec.Meta(ge=1)]
    place: _Count = 0
    drawn: _Count = 0
    ahead: _Count = 0
    dealt: list[tuple[_Count, _Count]] = []
    resumed: bool = False


class Shuffle:
    """An endless stream of the numbers below `size`: all of them in each pass, each pass in another order.

    Place p of the stream is known without those before it, in constant memory.

    Args:
        key: decides the order, with the number of the pass.
        size: at least 1.
    """

    def __init__(self, key: str, size: int) -> None:
        self._key, self._size = key, size
        self._block, self._numbers = (-1, -1), [0]

    def __getitem__(self, place: int) -> int:
        passes, within = divmod(place, self._size)
        block = passes, within // _BLOCK
        if block != self._block:
            start = block[1] * _BLOCK
            places = np.arange(start, min(start + _BLOCK, self._size), dtype=np.uint64)
            self._block, self._numbers = block, permuted(places, self._size, f"{passes} {self._key}").tolist()
        return self._numbers[within % _BLOCK]


def permuted(numbers: _Numbers, size: int, key: str) -> _Numbers:
    """Where a permutation of the numbers below `size` takes these.

    A Feistel network permutes the numbers of as many bits as `size` needs, at least two. A number that it takes beyond
    `size` is put through it again, until it is below: less than twice on average.

    Args:
        numbers: below `size`.
        size: at most 2**62.
        key: decides which permutation it is.
    """
    bits = max(2, (size - 1).bit_length())
    keys = np.frombuffer(hashlib.shake_256(key.encode()).digest(8 * _ROUNDS), "<u8").astype(np.uint64)
    found = _feistel(numbers, bits, keys)
    while (beyond := found >= size).any():
        found[beyond] = _feistel(found[beyond], bits, keys)
    return found


def _feistel(numbers: _Numbers, bits: int, keys: _Numbers) -> _Numbers:
    """The halves differ by a bit where `bits` is odd: they change their sizes with each round."""
    left_bits, right_bits = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    one = np.uint64(1)
    left, right = numbers >> right_bits, numbers & ((one << right_bits) - one)
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & ((one << left_bits) - one))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def _mixed(numbers: _Numbers) -> _Numbers:
    """The finalizer of SplitMix64 (Steele, Lea and Flood 2014): each bit depends on all."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
