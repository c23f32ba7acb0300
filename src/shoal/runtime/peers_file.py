"""Known peers in a file: a peer that is started again finds its swarm, even if all its first peers are gone.

Each line is an address, as `DHT.get_visible_maddrs` gives it. An unreadable line is skipped. The file is replaced as a
whole, so that a kill leaves the old one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.averaging.core import PeerCore
from shoal.base.files import replace_file
from shoal.base.peer import Address, PeerID
from shoal.errors import ConfigError

__all__ = ["PeersFile"]

_MAX_PEERS = 64
_MAX_BYTES = 1 << 20
_FIRST_S, _PERIOD_S = 5.0, 60.0


class PeersFile:
    """The file of one peer.

    Args:
        path: the file's; it need not exist yet.

    Raises:
        ConfigError: the file exists and cannot be read, or holds something else; or there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept: tuple[Address, ...] | None = None
        if not path.parent.is_dir():
            raise ConfigError(f"peers_file={str(path)!r}: there is no folder {str(path.parent)!r}")
        self._addresses()

    def read(self, without: PeerID) -> tuple[Address, ...]:
        """The addresses in the file, except those of this peer; none if there is no file yet."""
        return tuple(address for address in self._addresses() if address.peer_id != without)

    def _addresses(self) -> dict[Address, None]:
        try:
            with self._path.open("rb") as file:
                text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ConfigError(f"peers_file={str(self._path)!r} cannot be read: {error.strerror or error}") from error
        found: dict[Address, None] = {}
        for line in text.splitlines():
            with suppress(ConfigError):  # a line that was torn, or edited
                found[Address.parse(line)] = None
        if text.strip() and not found:
            raise ConfigError(
                f"peers_file={str(self._path)!r} holds something else than the addresses of peers, and would be "
                "written over: name another file, or one that does not exist yet"
            )
        return found

    async def keep(self, core: PeerCore, warn: Callable[[str], None]) -> None:
        """Write the known peers to the file now and then, until cancelled."""
        pause_s = _FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = _PERIOD_S
            await self.write(core, warn)

    async def write(self, core: PeerCore, warn: Callable[[str], None]) -> None:
        """Write the peers that are known now, if they have changed. An empty list replaces nothing."""
        addresses = tuple(address for contact in core.node.contacts(_MAX_PEERS) for address in contact.addresses)
        if not addresses or addresses == self._kept:
            return
        try:
            await core.env.executor.run(self._replace, addresses)
        except OSError as error:
            warn(f"{self._path} cannot be written: {error.strerror or error}")
        else:
            self._kept = addresses

    def _replace(self, addresses: tuple[Address, ...]) -> None:
        replace_file(self._path, "".join(f"{address}\n" for address in addresses).encode())
