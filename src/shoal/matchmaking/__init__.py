"""Matchmaking: peers that want to average find each other and agree on one group.

`Matchmaker` is what an averager uses. The rules are in `machine` (a pure state machine, with the proof that no peers
follow each other in a circle and no peer is in two groups), the pace is in `lookout`, and the known peers are in
`declarers`; `search` runs them on streams. `GroupBits` says under which key to look next.
"""

from shoal.matchmaking.group import Group, GroupDirectory
from shoal.matchmaking.group_bits import GroupBits, next_group_bits
from shoal.matchmaking.matchmaker import Matchmaker

__all__ = ["Group", "GroupBits", "GroupDirectory", "Matchmaker", "next_group_bits"]
