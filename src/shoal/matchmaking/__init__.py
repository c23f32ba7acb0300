"""Matchmaking: peers that want to average find each other and agree on one group.

`Matchmaker` is what an averager uses. The rules are in `machine` (a pure state machine, with the proof that nobody
leads in a circle or is in two groups), the pace in `lookout`, who is known in `declarers`; `search` runs them on
streams. `GroupBits` says under which key to look next.
"""

from shoal.matchmaking.group import Group, GroupDirectory
from shoal.matchmaking.group_bits import GroupBits, next_group_bits
from shoal.matchmaking.matchmaker import Matchmaker

__all__ = ["Group", "GroupBits", "GroupDirectory", "Matchmaker", "next_group_bits"]
