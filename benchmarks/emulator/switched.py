"""Hosts in network namespaces of their own, joined by the kernel's own switch: lines as fast as the machine, to be cut.

A line that is *cut* carries nothing, and says nothing: no FIN, no RST, no "host unreachable", as when a cable is pulled
or the power fails behind a router. Linux only, and only for who may make namespaces (root).
"""

from __future__ import annotations

import os
import subprocess
from types import TracebackType
from typing import Self

from benchmarks.emulator.namespaces import NotPermitted, end_processes, ip, remove, remove_leftovers

__all__ = ["Switched"]

_LOSES = """table inet loses {
  chain down { type filter hook prerouting priority 0; iifname "line" numgen random mod 1000 < %d drop; }
}
"""


class Switched:
    """Hosts around a switch. A context manager: it begins and ends with the block.

    Args:
        hosts: how many, at most 250.
        loss: the part of packets that is lost on each line down, in thousandths; needs nft.

    Attributes:
        addresses: of the hosts, which can reach each other and nothing else.
        paths: of their namespaces, for `setns`.

    Raises:
        NotPermitted: on entering the block.
    """

    def __init__(self, hosts: int, *, loss: float = 0.0) -> None:
        self._loss = loss
        self.addresses = [f"10.202.0.{index + 1}" for index in range(hosts)]
        self._names = [f"shoal-{os.getpid()}-{index}" for index in range(hosts + 1)]  # the last one is the switch
        self.paths = [f"/var/run/netns/{name}" for name in self._names[:-1]]

    def __enter__(self) -> Self:
        remove_leftovers()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        switch = self._names[-1]
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        cards = [f"02:00:0a:ca:00:{index:02x}" for index in range(len(self.addresses))]
        for index, address in enumerate(self.addresses):
            name = self._names[index]
            ip("netns", "add", name)
            ip("-n", switch, "link", "add", f"p{index}", "type", "veth", "peer", "name", "line", "netns", name)
            ip("-n", switch, "link", "set", f"p{index}", "master", "bridge", "up")
            ip("-n", name, "link", "set", "line", "address", cards[index])
            ip("-n", name, "address", "add", f"{address}/24", "dev", "line")
            ip("-n", name, "link", "set", "line", "up")
            ip("-n", name, "link", "set", "lo", "up")
            if self._loss:
                _run("ip", "netns", "exec", name, "nft", "-f", "-", input_=_LOSES % round(1000 * self._loss))
        for index in range(len(self.addresses)):
            # A host that asks for a neighbour in vain is told "no route" after 3 s: behind a router nobody is.
            lines = [
                f"neigh add {address} lladdr {card} dev line nud permanent"
                for other, (address, card) in enumerate(zip(self.addresses, cards, strict=True))
                if other != index
            ]
            _run("ip", "-n", self._names[index], "-batch", "-", input_="\n".join(lines))

    def cut(self, host: int) -> None:
        """From now on nothing comes from this host, and nothing comes to it."""
        ip("-n", self._names[-1], "link", "set", f"p{host}", "nomaster")

    def heal(self, host: int) -> None:
        """The line of this host carries again."""
        ip("-n", self._names[-1], "link", "set", f"p{host}", "master", "bridge")

    def _remove(self) -> None:
        for name in self._names:
            end_processes(name)
        for name in self._names:
            remove(name)


def _run(*command: str, input_: str | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, input=input_)
    if done.returncode:
        raise NotPermitted(f"`{' '.join(command)}` said: {done.stderr.strip()}")
