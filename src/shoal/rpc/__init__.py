"""Calls and streams between peers, over any transport.

`Endpoint` is what the rest of shoal uses. See `endpoint` for its rules, `framing` for the bytes.
"""

from shoal.rpc.dial_limits import NotDialed
from shoal.rpc.endpoint import Endpoint
from shoal.rpc.framing import Limits
from shoal.rpc.reachability import Reachability
from shoal.rpc.rhythm import LOOK_S
from shoal.rpc.stream import Stream

__all__ = ["LOOK_S", "Endpoint", "Limits", "NotDialed", "Reachability", "Stream"]
