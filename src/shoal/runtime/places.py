"""The address at which a peer listens, and the one that it announces: `/ip4/HOST/tcp/PORT`, without a peer id.

`/tcp/PORT` leaves the host open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shoal.base.peer import host_kind, is_host, kind_of
from shoal.errors import ConfigError

__all__ = ["filled_in", "one_place"]

_ANYWHERE = ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")


def one_place(maddrs: object, argument: str, skip: Callable[[str, str], None]) -> tuple[str | None, int]:
    """Host and port of the one TCP address that `maddrs` holds; None for the host if it is left open.

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
        cure = "give the one that most peers reach, or a name that has them all: /dns/HOST/tcp/PORT"
        if argument == "host_maddrs":
            cure = "/ip6/::/tcp/PORT listens by IPv6 and by IPv4, /ip4/0.0.0.0/tcp/PORT on all interfaces by IPv4"
        raise ConfigError(f"{argument} must be one address, got {len(places)}: {cure}")
    match places[0].split("/"):
        case ["", "tcp", port] if _is_port(port):
            return None, int(port)
        case ["", kind, host, "tcp", port] if _is_port(port) and is_host(host) and host_kind(host) == kind_of(kind):
            return host, int(port)
    raise ConfigError(
        f"{argument} must look like /ip4/127.0.0.1/tcp/0 (ip4, ip6 or dns; port 0 to 65535), got {places[0]!r}"
    )


def _is_port(text: str) -> bool:
    return text.isdecimal() and int(text) <= 65535


def filled_in(own: object, place: str) -> str | None:
    """The place to listen at, where a program has a place of its own, and `shoal run` another one.

    A program that listens on all interfaces at any port leaves both open.

    Args:
        own: what the program gives as `host_maddrs`; None: nothing.
        place: what `shoal run` is given; `/tcp/PORT` says nothing of the host.

    Returns:
        None if the program's own place stays.
    """
    own = own[0] if isinstance(own, list | tuple) and len(own) == 1 else own
    if own is None or own == []:
        return place
    if own not in _ANYWHERE:
        return None
    return f"{own.removesuffix('/tcp/0')}{place}" if place.startswith("/tcp/") else place
