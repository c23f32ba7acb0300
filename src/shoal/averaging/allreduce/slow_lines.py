"""How long a round waits for members that have announced slow lines. Pure.

A member that needs more than twice as long as the others, and a little more, is left out of a round. Where rounds are
far apart that loses more than it saves: all that this member has trained since the last one. So a member whose line is
slow, as its user says or as it was measured, is waited for while it keeps the pace that follows, if that is worth it.

It is worth it if more members count for the time that passes, from the last round to the end of this one. So a round
waits for those members whose announced times make

    number of members that are done by then / (the time since the last round + that time)

the largest. Of n members, one that announces a slow line and then gives nothing costs the others a part of 1 / n of
their pace at most: as much as it would have given.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

__all__ = ["promised_s"]

_SLACK = 1.5
"""A member may take so many times as long as its bandwidth says: headers, repeated packets, others on its line."""


def promised_s(
    upload_bytes: Sequence[float],
    bandwidths: Sequence[float | None],
    *,
    since_last_s: float,
    margin_s: float,
    most_s: float,
) -> list[float]:
    """The time for which each member of a round is waited for, from its beginning on, if it keeps its pace.

    Args:
        upload_bytes: what each member has to send.
        bandwidths: bytes per second of each member, as it has announced; None or 0 if it knows none.
        since_last_s: the seconds since the last round; 0 if nobody is waited for beyond the usual rule.
        margin_s: what is added to each time, seconds.
        most_s: nobody is waited for for longer.

    Returns:
        Seconds for each member; 0.0 for those that are waited for by the usual rule alone.
    """
    if since_last_s <= 0:
        return [0.0] * len(bandwidths)
    times = [
        _SLACK * nbytes / width + margin_s if width else 0.0
        for nbytes, width in zip(upload_bytes, bandwidths, strict=True)
    ]
    done = sorted(each for each in times if each <= most_s)
    worth = max(done, key=lambda each: bisect_right(done, each) / (since_last_s + each), default=0.0)
    return [each if each <= worth else 0.0 for each in times]
