"""The time limits of an averager: limits that were not given follow from the given ones.

Invariant: for any given limits, either all limits fit each other, or an error names limits that were given, and no
others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType

from shoal.errors import ConfigError

__all__ = ["TIMEOUTS", "check_timeouts", "choose_timeouts"]

_EXPIRATION_S, _REQUEST_S, _SILENCE_S, _ROUND_S = 15.0, 3.0, 5.0, 120.0

_MAX_EXPIRATION_S = 1800.0
"""A search declares itself until its window ends, and the DHT keeps a record for an hour; clocks differ."""

_MIN_SILENCE_S = 1.0
_MIN_NEXT_CHUNK_S = 2.0
"""Donors hold a piece of their state for 1.5 s while they average."""

TIMEOUTS: Mapping[str, str] = MappingProxyType(
    {
        "averaging_expiration": "window_s",
        "request_timeout": "request_timeout_s",
        "allreduce_timeout": "allreduce_timeout_s",
        "sender_timeout": "silence_s",
        "reducer_timeout": "reducer_silence_s",
        "next_chunk_timeout": "next_chunk_timeout_s",
    }
)
"""The users' names of the time limits, and the fields of `AveragerSettings`."""
_AS_THEY_ARE: Mapping[str, str] = MappingProxyType({})


def choose_timeouts(
    given: Mapping[str, float | None], *, names: Mapping[str, str] = _AS_THEY_ARE, round_s: float = _ROUND_S
) -> dict[str, float | None]:
    """All time limits of `AveragerSettings`, by the names of its fields.

    Args:
        given: the limits by the names of `DecentralizedAverager`; a missing one or None follows from the others.
        names: the user's names for these limits, if they are other names.
        round_s: longest round, unless a given limit needs more.

    Raises:
        ConfigError: a given limit is invalid, or two of them do not fit each other.
    """
    check_timeouts(given, names=names)
    limits = (given.get(name) for name in TIMEOUTS)
    expiration, request, allreduce, sender, reducer, chunk = (
        None if limit is None else float(limit) for limit in limits
    )
    if expiration is None:
        expiration = min(max(_EXPIRATION_S, 2 * (request or 0)), _MAX_EXPIRATION_S)
    if request is None:
        request = min(_REQUEST_S, expiration / 2)
    if sender is None:
        # A round needs time for a sender that falls silent, and then for a reducer that was waiting for it.
        most = min((allreduce or math.inf) / 3, (reducer or math.inf) / 2)
        sender = max(_MIN_SILENCE_S, min(chunk or _SILENCE_S, most))
    if allreduce is None:
        allreduce = max(round_s, 2 * (reducer or 2 * sender))
    chosen = (expiration, request, allreduce, sender, reducer, chunk or _SILENCE_S)
    return dict(zip(TIMEOUTS.values(), chosen, strict=True))


def check_timeouts(limits: Mapping[str, float | None], *, names: Mapping[str, str] = _AS_THEY_ARE) -> None:
    """Raise `ConfigError` for the first invalid limit, or the first two that do not fit each other."""

    def need(holds: bool, name: str, what: str) -> None:
        if not holds:
            raise ConfigError(f"{names.get(name, name)} must be {what}, got {limits[name]!r}")

    def less(smaller: str, larger: str) -> None:
        low, high = limits.get(smaller), limits.get(larger)
        if low is not None and high is not None and not low < high:
            one, other = names.get(smaller, smaller), names.get(larger, larger)
            raise ConfigError(f"{one}={low:g} must be less than {other}={high:g}: lower {one} or raise {other}")

    for name, value in limits.items():
        number = isinstance(value, Real) and not isinstance(value, bool) and 0 < value < math.inf
        need(value is None or number, name, "a number of seconds above 0")
    window, request = limits.get("averaging_expiration"), limits.get("request_timeout")
    sender, chunk = limits.get("sender_timeout"), limits.get("next_chunk_timeout")
    most, least = _MAX_EXPIRATION_S, _MIN_NEXT_CHUNK_S
    need(window is None or window <= most, "averaging_expiration", f"at most {most:g} seconds")
    need(request is None or window is not None or request < most, "request_timeout", f"less than {most:g} seconds")
    less("request_timeout", "averaging_expiration")
    need(sender is None or sender >= _MIN_SILENCE_S, "sender_timeout", "at least 1 second")
    need(chunk is None or chunk >= least, "next_chunk_timeout", f"at least {least:g} seconds")
    for name in ("reducer_timeout", "allreduce_timeout"):
        limit = limits.get(name)
        need(limit is None or limit > _MIN_SILENCE_S, name, f"more than {_MIN_SILENCE_S:g} second")
        less("sender_timeout", name)
