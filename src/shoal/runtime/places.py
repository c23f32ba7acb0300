"""The address at which a peer listens, and the one that it announces: `/ip4/HOST/tcp/PORT`, without a peer id."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable

from shoal.errors import ConfigError
from shoal.peer import is_host

__all__ = ["one_place"]


def one_place(maddrs: object, argument: str, skip: Callable[[str, str], None]) -> tuple[str, int]:
    """Host and port of the one TCP address that `maddrs` holds.

    Args:
        maddrs: an address, or a sequence with one. The same address by UDP (QUIC) beside it is skipped.
        argument: the name of the user's argument.
        skip: called with the argument, and the reason, for each address that is skipped.

    Raises:
        ConfigError: there is no such address, or more than one.
    """
    if not isinstance(maddrs, Iterable):
        raise ConfigError(f"{argument} must be an address such as /ip4/127.0.0.1/tcp/0, got {maddrs!r:.80}")
    texts = [maddrs] if isinstance(maddrs, str) else [str(each) for each in maddrs]
    places = [text for text in texts if "/udp/" not in text] or texts
    for text in texts:
        if text not in places:
            skip(argument, f"shoal speaks TCP only, not {text}")
    if len(places) != 1:
        raise ConfigError(f"{argument} must be one address, got {len(places)}")
    pieces = places[0].split("/")
    if len(pieces) == 5 and not pieces[0] and pieces[3] == "tcp" and pieces[4].isdecimal():
        kind, host, port = pieces[1], pieces[2], int(pieces[4])
        if port <= 65535 and is_host(host) and _kind(host) == kind:
            return host, port
    raise ConfigError(
        f"{argument} must look like /ip4/127.0.0.1/tcp/0 (ip4, ip6 or dns; port 0 to 65535), got {places[0]!r}"
    )


def _kind(host: str) -> str:
    try:
        return f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"
