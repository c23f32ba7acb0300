"""A process with one DHT node of `benchmarks.dht`, or several. Imports nothing of shoal: it also runs in hivemind's
environment.

=========  ============================================  ===========================================================
request    meaning                                       answer
=========  ============================================  ===========================================================
start      join the nodes at `invites` (none: begin),    `invite`: how others find this node; `node`: its number here
           with these `options` of a DHT
store      store `key` from `node`                       `seconds`, `failed`: 0 or 1
get        get `key` from `node`; `latest`: ask all      the same
           nodes that should hold it
at_once    `what` (store or get) all `keys` at once: a   `began`, `ended`: on the machine's clock, `failed`
           list for each node
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

    def start(self, invites: list[str], **options: Any) -> str:
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


def serve(make: type[Node]) -> None:
    """Have nodes until the input ends."""
    nodes: list[Node] = []
    obey(lambda request: answer(make, nodes, request))


def value_of(key: str) -> bytes:
    return hashlib.blake2b(key.encode()).digest()


def answer(make: type[Node], nodes: list[Node], request: dict[str, Any]) -> dict[str, Any]:
    def begin(what: str, node: Node, key: str) -> Callable[[], bool]:
        if what == "store":
            stored = node.store(key, value_of(key), LIFETIME_S)
            return lambda: stored.result(60.0) is True
        found = node.get(key, latest=request.get("latest", False))
        return lambda: getattr(found.result(60.0), "value", None) == value_of(key)

    match request["do"]:
        case "start":
            nodes.append(make())
            return {"invite": nodes[-1].start(request["invites"], **request["options"]), "node": len(nodes) - 1}
        case "store" | "get" as what:
            began = now()
            failed = int(not begin(what, nodes[request["node"]], request["key"])())
            return {"seconds": now() - began, "failed": failed}
        case "at_once":
            began = now()
            waits = [
                begin(request["what"], node, key)
                for node, keys in zip(nodes, request["keys"], strict=True)
                for key in keys
            ]
            failed = sum(not wait() for wait in waits)
            return {"began": began, "ended": now(), "failed": failed}
        case "stop":
            for node in nodes:
                node.stop()
    return {}
