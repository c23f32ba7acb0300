"""Machines behind routers that translate addresses, in network namespaces. Linux, root, `ip` and `nft` only.

::

    public 203.0.113.1 ── wan 203.0.113.2, .3, ... routers 192.168.1.1 ── home 192.168.1.5, one behind each router
           203.0.113.101, .102, ... further machines on that network: `"machine0"`, `"machine1"`, ...

Whoever is at home dials out; nobody gets in, but through ports that are forwarded. The machines of the network reach
each other; with `default_route` they have a way to the outside, too, though nobody is there.
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
        machines: how many further machines are on the public network.
        forwarded: a TCP port that the first router forwards to the home behind it.
        default_route: whether the machines of the public network have one.
    """

    def __init__(
        self, homes: int, *, machines: int = 0, forwarded: int | None = None, default_route: bool = False
    ) -> None:
        self._homes, self._machines, self._forwarded, self._default_route = homes, machines, forwarded, default_route
        self._prefix = f"shoal-{os.getpid()}-r"
        self.names: list[str] = []

    def command(self, home: int | str | None) -> tuple[str, ...]:
        """What a command must begin with to run at this home or machine; None: on the public machine."""
        return ("ip", "netns", "exec", self._of(home))

    def path(self, home: int | str | None) -> str:
        """The file of this home's namespace, for `setns`; None: of the public machine's."""
        return f"/var/run/netns/{self._of(home)}"

    def _of(self, place: int | str | None) -> str:
        return self._name("public" if place is None else place if isinstance(place, str) else f"home{place}")

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
            for number in range(self._machines):
                self._add_machine(number)
            if self._default_route:
                for place in ("public", *(f"machine{number}" for number in range(self._machines))):
                    self._ip(place, "route add default via 203.0.113.254")
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

    def _add_machine(self, number: int) -> None:
        machine = f"machine{number}"
        self._add(machine)
        self._ip("public", f"link add lan{number} type veth peer name eth0 netns {self._name(machine)}")
        self._ip("public", f"link set lan{number} master br0 up")
        self._ip(machine, f"addr add 203.0.113.{101 + number}/24 dev eth0")
        self._ip(machine, "link set eth0 up")

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
