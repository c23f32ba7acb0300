"""Matchmaking: peers that want to average find each other and agree on one group.

`Matchmaker` is what an averager uses. It runs the rules of `machine`, a pure state machine, which has the proof that no
peers follow each other in a circle and no peer is in two groups. `declarations` has the known peers and the pace,
`leaders` what a peer makes of those that lead it, `events` the transitions as data. `GroupBits` says under which key to
look next.
"""

from shoal.averaging.group import Group
from shoal.averaging.matchmaking.config import MatchmakingConfig
from shoal.averaging.matchmaking.directory import GroupDirectory
from shoal.averaging.matchmaking.group_bits import GroupBits, next_group_bits
from shoal.averaging.matchmaking.joins import JoinTerms
from shoal.averaging.matchmaking.matchmaker import Matchmaker

__all__ = ["Group", "GroupBits", "GroupDirectory", "JoinTerms", "Matchmaker", "MatchmakingConfig", "next_group_bits"]
