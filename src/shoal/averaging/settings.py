"""How an averager finds groups and averages: every number, and every relation between them, checked in one place.

Messages use the names that users of `DecentralizedAverager` give (`averaging_expiration`); fields have the house's
names (`window_s`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.averaging.allreduce.schema import MAX_TILE_BYTES, MIN_TILE_BYTES
from shoal.averaging.matchmaking import MatchmakingConfig
from shoal.averaging.timeouts import TIMEOUTS, check_timeouts
from shoal.errors import ConfigError
from shoal.protocol.wire import MAX_GROUP_SIZE

__all__ = ["AveragerSettings", "check_group_bits"]

_MAX_BITS = 64
_MAX_DECLARE_STATE_PERIOD_S = 1800.0
"""A declaration holds for two periods, and the DHT keeps a record for an hour."""


class AveragerSettings(MatchmakingConfig, frozen=True, kw_only=True):
    """How an averager finds groups (`MatchmakingConfig`) and averages. Checked by `Averager`.

    Attributes:
        averaging_alpha: tensors move this fraction of the way to the average, 0 < alpha <= 1.
        part_size_bytes: the vector is sent in tiles of at most this size, as encoded; smaller ones on slow lines.
        allreduce_timeout_s: longest time from the group to the verdict.
        silence_s: a member that sends nothing for this long, while it owes values, is left out.
        reducer_silence_s: a member that moves nothing for this long, while it owes averages, is left out by the
            coordinator (which allows 2 s more for its reports); None: twice `silence_s`. It must be more than
            `silence_s`: a reducer may be waiting for a sender.
        next_chunk_timeout_s: a donor of state that sends nothing for this long is left for another one; at least 2.
        min_vector_size: a peer that would reduce fewer elements than this reduces none.
        group_bits: which of several groups, at most 64 of `0` and `1`; drawn anew after each round, and after each
            search without a group, unless empty.
        declare_state_period_s: how often a donor declares itself; at most 1800.
        fresh_state_s: a copy of the state that is older than this is not given to newcomers, unless others are just
            taking it, as the state may change without a call of `StateSharing.changed`; None if it never does.
        settings: named values that must be equal on all peers; a difference is refused by name.
    """

    averaging_alpha: float = 1.0
    part_size_bytes: int = 1 << 20
    allreduce_timeout_s: float = 120.0
    silence_s: float = 5.0
    reducer_silence_s: float | None = None
    next_chunk_timeout_s: float = 5.0
    min_vector_size: int = 0
    group_bits: str = ""
    declare_state_period_s: float = 30.0
    fresh_state_s: float | None = None
    settings: Mapping[str, str] = {}

    def check(self) -> None:
        """Raise `ConfigError` for the first invalid value, or the first two that do not fit each other."""
        check_timeouts({name: getattr(self, field) for name, field in TIMEOUTS.items()})
        period, most = self.declare_state_period_s, _MAX_DECLARE_STATE_PERIOD_S
        _need(_number(period) and 0 < period < math.inf, "declare_state_period", period, "a number of seconds above 0")
        _need(period <= most, "declare_state_period", period, f"at most {most:g} seconds")
        alpha, tile, width, vector = self.averaging_alpha, self.part_size_bytes, self.bandwidth, self.min_vector_size
        _need(_number(alpha) and 0 < alpha <= 1, "averaging_alpha", alpha, "above 0 and at most 1")
        _need(
            _whole(tile) and MIN_TILE_BYTES <= tile <= MAX_TILE_BYTES,
            "part_size_bytes",
            tile,
            f"a whole number from {MIN_TILE_BYTES} to {MAX_TILE_BYTES}",
        )
        _need(
            width is None or (_number(width) and 0 <= width < math.inf),
            "bandwidth",
            width,
            "None (not known), or bytes per second from 0",
        )
        _need(_whole(vector) and vector >= 0, "min_vector_size", vector, "a whole number of elements from 0")
        for name in ("auxiliary", "client_mode"):
            _need(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        check_group_bits("initial_group_bits", self.group_bits)
        self._check_sizes()
        if self.auxiliary and self.client_mode:
            raise ConfigError(
                "auxiliary=True needs a peer that can be dialed, to reduce for others: set client_mode=False"
            )
        if self.auxiliary and self.bandwidth == 0:
            raise ConfigError("auxiliary=True with bandwidth=0 would do nothing at all: give it a bandwidth, or None")

    def _check_sizes(self) -> None:
        size, least = self.target_group_size, self.min_group_size
        _need(
            _whole(least) and 1 <= least <= MAX_GROUP_SIZE,
            "min_group_size",
            least,
            f"a whole number, 1 to {MAX_GROUP_SIZE}",
        )
        if size is not None:
            _need(
                _whole(size) and 2 <= size <= MAX_GROUP_SIZE,
                "target_group_size",
                size,
                f"None (no limit), or a whole number from 2 to {MAX_GROUP_SIZE}",
            )
            if least > size:
                raise ConfigError(
                    f"min_group_size={least} must be at most target_group_size={size}: "
                    "lower min_group_size or raise target_group_size"
                )


def check_group_bits(name: str, bits: object) -> str:
    """The bits, checked.

    Raises:
        ConfigError: they are not valid bits; names the argument `name`.
    """
    if not isinstance(bits, str) or set(bits) - {"0", "1"} or len(bits) > _MAX_BITS:
        raise ConfigError(f"{name} must be a text of 0 and 1, at most {_MAX_BITS} of them, got {bits!r}")
    return bits


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _need(holds: bool, name: str, value: object, what: str) -> None:
    if not holds:
        raise ConfigError(f"{name} must be {what}, got {value!r}")
