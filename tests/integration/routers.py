"""Machines behind routers that translate addresses, in network namespaces. Linux, root, `ip` and `nft` only.

::

    public 203.0.113.1 ── wan 203.0.113.2, .3, ... routers 192.168.1.1 ── home 192.168.1.5, one behind each router

Whoever is at home dials out; nobody gets in, but through ports that are forwarded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

__all__ = ["Routers", "why_not"]

HOME = "192.168.1.5"


def why_not() -> str:
    """What keeps these tests from running here; empty if nothing does."""
    if os.name != "posix" or os.geteuid() != 0:
        return "only root can make network namespaces"
    packages = {"ip": "iproute2", "nft": "nftables"}
    missing = [package for tool, package in packages.items() if shutil.which(tool) is None]
    return f"needs {' and '.join(missing)}" if missing else ""


class Routers:
    """One public machine and so many homes; a context manager that removes all of it.

    Args:
        homes: how many.
        forwarded: a TCP port that the first router forwards to the home behind it.
    """

    def __init__(self, homes: int, *, forwarded: int | None = None) -> None:
        self._homes, self._forwarded = homes, forwarded
        self._prefix = f"shoal-{os.getpid()}-r"
        self.names: list[str] = []

    def command(self, home: int | None) -> tuple[str, ...]:
        """What a command must begin with to run at this home; None: on the public machine."""
        return ("ip", "netns", "exec", self._of(home))

    def path(self, home: int | None) -> str:
        """The file of this home's namespace, for `setns`; None: of the public machine's."""
        return f"/var/run/netns/{self._of(home)}"

    def _of(self, home: int | None) -> str:
        return self._name("public" if home is None else f"home{home}")

    def _name(self, what: str) -> str:
        return f"{self._prefix}-{what}"

    def __enter__(self) -> Self:
        try:
            self._add("public")
            self._ip("public", "link add br0 type bridge")
            self._ip("public", "addr add 203.0.113.1/24 dev br0")
            self._ip("public", "link set br0 up")
            for number in range(self._homes):
                self._add_home(number)
        except BaseException:
            self._remove()
            raise
        return self

    def _add_home(self, number: int) -> None:
        router, home = f"router{number}", f"home{number}"
        self._add(router)
        self._add(home)
        self._ip("public", f"link add wan{number} type veth peer name wan netns {self._name(router)}")
        self._ip("public", f"link set wan{number} master br0 up")
        self._ip(router, f"link add lan type veth peer name eth0 netns {self._name(home)}")
        for device, address in (("wan", f"203.0.113.{number + 2}/24"), ("lan", "192.168.1.1/24")):
            self._ip(router, f"addr add {address} dev {device}")
            self._ip(router, f"link set {device} up")
        self._ip(home, f"addr add {HOME}/24 dev eth0")
        self._ip(home, "link set eth0 up")
        self._ip(home, "route add default via 192.168.1.1")
        run = ("ip", "netns", "exec", self._name(router))
        subprocess.run([*run, "sysctl", "-q", "net.ipv4.ip_forward=1"], check=True)
        chains = ["chain out { type nat hook postrouting priority 100; oifname wan masquerade; }"]
        if self._forwarded is not None and number == 0:
            to_home = f"iifname wan tcp dport {self._forwarded} dnat to {HOME};"
            chains.append(f"chain in {{ type nat hook prerouting priority -100; {to_home} }}")
        chains.append("chain shut { type filter hook input priority 0; iifname wan ct state new drop; }")
        rules = "\n".join(["table ip nat {", *chains, "}", ""])
        subprocess.run([*run, "nft", "-f", "-"], input=rules, text=True, check=True)

    def _add(self, what: str) -> None:
        subprocess.run(["ip", "netns", "add", self._name(what)], check=True)
        self.names.append(self._name(what))
        self._ip(what, "link set lo up")

    def _ip(self, what: str, arguments: str) -> None:
        subprocess.run(["ip", "-n", self._name(what), *arguments.split()], check=True)

    def _remove(self) -> None:
        for name in reversed(self.names):
            subprocess.run(["ip", "netns", "del", name], check=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
