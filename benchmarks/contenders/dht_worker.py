"""One DHT node of `benchmarks.dht`, in a process of its own. Imports nothing of shoal: it also runs in the environment
of hivemind.

=========  ============================================  ===========================================================
request    meaning                                       answer
=========  ============================================  ===========================================================
start      join the nodes at `invites` (none: begin)     `invite`: how others find this node
store      store all `keys`, one after another           `seconds` of each, `failed`: how many
get        get all `keys`, one after another;            the same
           `latest`: ask all nodes that should hold it
at_once    `what` (store or get) all `keys` at once      `began`, `ended`: on the machine's clock, `failed`
stop       leave                                         nothing
=========  ============================================  ===========================================================

A value is 64 bytes that follow from the key; a get that finds anything else has failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

from benchmarks.contenders.orders import now, obey

LIFETIME_S = 900.0


class Result(Protocol):
    """What both libraries' futures are."""

    def result(self, timeout: float) -> Any:
        """Wait for it."""
        ...


class Node(Protocol):
    """One node of the library that is measured. `store` and `get` return futures."""

    def start(self, invites: list[str]) -> str:
        """Join; returns how others find this node."""
        ...

    def store(self, key: str, value: bytes, lifetime_s: float) -> Result:
        """A future of whether it is stored."""
        ...

    def get(self, key: str, *, latest: bool) -> Result:
        """A future of None, or of something with a `value`."""
        ...

    def stop(self) -> None:
        """Leave."""
        ...


def serve(node: Node) -> None:
    """Be a node until the input ends."""
    obey(lambda request: answer(node, request))


def value_of(key: str) -> bytes:
    return hashlib.blake2b(key.encode()).digest()


def answer(node: Node, request: dict[str, Any]) -> dict[str, Any]:
    def begin(what: str, key: str) -> Callable[[], bool]:
        if what == "store":
            stored = node.store(key, value_of(key), LIFETIME_S)
            return lambda: stored.result(60.0) is True
        found = node.get(key, latest=request.get("latest", False))
        return lambda: getattr(found.result(60.0), "value", None) == value_of(key)

    match request["do"]:
        case "start":
            return {"invite": node.start(request["invites"])}
        case "store" | "get" as what:
            seconds, failed = [], 0
            for key in request["keys"]:
                began = now()
                failed += not begin(what, key)()
                seconds.append(now() - began)
            return {"seconds": seconds, "failed": failed}
        case "at_once":
            began = now()
            waits = [begin(request["what"], key) for key in request["keys"]]
            failed = sum(not wait() for wait in waits)
            return {"began": began, "ended": now(), "failed": failed}
        case "stop":
            node.stop()
    return {}

