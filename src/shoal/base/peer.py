"""Names of peers and of the places where they listen. Pure values: no connection, no key.

A `PeerID` *is* the peer's Ed25519 public key: anybody who can sign with the key is the peer. An `Address` is one place
where a peer can be dialed, written `/ip4/127.0.0.1/tcp/4000/p2p/<peer id>` (hosts as `ip4`, `ip6` or `dns`). An
`Invite` is a text that one person sends another: a few addresses and the name of a run, with a checksum against typing
errors.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from typing import Self

import msgspec

from shoal.errors import ConfigError

__all__ = ["Address", "Invite", "PeerID", "check_run_id", "host_kind", "is_host", "kind_of", "parse_peers", "site_of"]

PEER_ID_BYTES = 32
_HOST = re.compile(r"[0-9A-Za-z.:_-]{1,253}")
_IP4_IN_IP6 = bytes(10) + b"\xff\xff"
_INVITE_SCHEME = "shoal:"
_LONGEST_INVITE, _UNPACKED_INVITE = 8192, 65536
_LONGEST_RUN_ID = 240
"""In characters: the names of its averagers and messages are somewhat longer, and may have 256."""
_HOST_KINDS = {"ip4": "ip4", "ip6": "ip6", "dns": "dns", "dns4": "dns", "dns6": "dns"}
"""The names of hosts in addresses, and what they name. Others write a name that leads to one family as dns4, dns6."""


class PeerID(bytes):
    """The identity of a peer: its 32-byte Ed25519 public key, printed as 52 letters and digits (base32).

    Args:
        raw: the public key, exactly 32 bytes.

    Raises:
        ConfigError: `raw` is not 32 bytes.
    """

    __slots__ = ()

    # Ids are the keys of most dictionaries here, thousands of times in a round: bytes hash and compare without Python.
    def __new__(cls, raw: bytes) -> Self:
        if not isinstance(raw, bytes) or len(raw) != PEER_ID_BYTES:
            raise ConfigError(f"a peer id is {PEER_ID_BYTES} bytes, got {raw!r}")
        return super().__new__(cls, raw)

    @classmethod
    def parse(cls, text: str) -> PeerID:
        """Read the printed form back. Raises `ConfigError` if `text` is not a peer id."""
        try:
            raw = base64.b32decode(text.upper() + "=" * (-len(text) % 8))
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != PEER_ID_BYTES or str(peer := cls(raw)) != text:
            raise ConfigError(f"not a peer id: {text!r} (expected 52 characters of a-z and 2-7)")
        return peer

    def to_bytes(self) -> bytes:
        """The 32 bytes of the public key."""
        return bytes(self)

    def to_base58(self) -> str:
        """The printed form, as `str`; this is hivemind's name for it, though shoal prints base32."""
        return str(self)

    to_string = pretty = to_base58

    @classmethod
    def from_base58(cls, text: str) -> PeerID:
        """As `parse`: reads the text that `to_base58` returned."""
        return cls.parse(text)

    def short(self) -> str:
        """The first 8 characters: enough for a line of a log, not for a decision."""
        return str(self)[:8]

    def __str__(self) -> str:
        return base64.b32encode(self).decode().rstrip("=").lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __repr__(self) -> str:
        return f"PeerID({str(self)!r})"


_cached = lru_cache(maxsize=1 << 12)
"""The same few hosts and addresses are read for each message. Those of strangers have at most 400 characters."""


def _packed(host: str) -> bytes:
    """The 4 or 16 bytes of an IP address; empty for a name."""
    try:
        # No connection is made. One message may hold ten thousand hosts, and `ipaddress` takes 4 µs for each.
        return inet_pton(AF_INET6 if ":" in host else AF_INET, host)
    except (OSError, ValueError):
        return b""


@_cached
def host_kind(host: str) -> str:
    """`ip4`, `ip6` or `dns`."""
    return {4: "ip4", 16: "ip6"}.get(len(_packed(host)), "dns")


def kind_of(name: str) -> str:
    """The kind of host that this word of an address stands for; empty if it is none."""
    return _HOST_KINDS.get(name, "")


@_cached
def is_host(host: str) -> bool:
    """Whether this is an IP address, or can be a DNS name."""
    if _HOST.fullmatch(host) is None:
        return False
    if ":" in host:
        return host_kind(host) == "ip6"
    # Resolvers raise UnicodeError for labels that cannot exist, and read a name whose last label is a number as IPv4.
    if host_kind(host) == "ip4":
        return True
    labels = host.removesuffix(".").split(".")
    return all(0 < len(label) <= 63 for label in labels) and not labels[-1].isdecimal()


@dataclass(frozen=True, slots=True)
class Address:
    """One place where one peer listens: `/<ip4|ip6|dns>/HOST/tcp/PORT/p2p/PEERID`.

    Attributes:
        host: an IPv4 or IPv6 address, or a DNS name.
        port: TCP port, 1 to 65535.
        peer_id: the peer that must answer there.
    """

    host: str
    port: int
    peer_id: PeerID

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} in an address is not within 1..65535")
        if not is_host(self.host):
            raise ConfigError(f"host {self.host!r} in an address is not an IP address or a DNS name")

    @property
    def kind(self) -> str:
        """`ip4`, `ip6` or `dns`."""
        return host_kind(self.host)

    @property
    def where(self) -> str:
        """`HOST:PORT`, for messages; an IPv6 host is in brackets."""
        return f"[{self.host}]:{self.port}" if self.kind == "ip6" else f"{self.host}:{self.port}"

    @classmethod
    @_cached
    def parse(cls, text: str) -> Address:
        """Read the printed form back. Raises `ConfigError` that says which piece is wrong."""
        pieces = text.strip().split("/")
        if "udp" in pieces:
            raise ConfigError(f"not an address that shoal can use, which speaks TCP only: {text!r}")
        if len(pieces) != 7 or pieces[0] or pieces[3] != "tcp" or pieces[5] != "p2p":
            raise ConfigError(
                f"not an address: {text!r} (expected /ip4/HOST/tcp/PORT/p2p/PEERID, as printed by `shoal dht`)"
            )
        kind, host, port = pieces[1], pieces[2], pieces[4]
        if not kind_of(kind):
            raise ConfigError(f"{kind!r} in address {text!r} is not one of {', '.join(_HOST_KINDS)}")
        if not re.fullmatch(r"[0-9]{1,5}", port):
            raise ConfigError(f"port {port!r:.20} in an address is not a number within 1..65535")
        address = cls(host, int(port), PeerID.parse(pieces[6]))
        if address.kind != kind_of(kind):
            raise ConfigError(f"host {host!r} in address {text!r} is {address.kind}, not {kind}")
        return address

    def __getitem__(self, protocol: str) -> str:
        """The text behind a protocol's name, as in `address["p2p"]`; raises KeyError for a name that is not there."""
        return {self.kind: self.host, "tcp": str(self.port), "p2p": str(self.peer_id)}[protocol]

    def __contains__(self, protocol: str) -> bool:
        """Whether there is such a name in the address: `ip4`, `ip6` or `dns`, `tcp`, `p2p`."""
        return protocol in {self.kind, "tcp", "p2p"}

    def values(self) -> list[str]:
        """Host, port and peer id, as text."""
        return [self[self.kind], self["tcp"], self["p2p"]]

    def __str__(self) -> str:
        return f"/{self.kind}/{self.host}/tcp/{self.port}/p2p/{self.peer_id}"


@dataclass(frozen=True, slots=True)
class Invite:
    """A text that one person sends another to join: `shoal:` and base64url of addresses, run id and a checksum.

    Attributes:
        addresses: where to dial, at least one.
        run_id: the run to join; empty when the invite names only the network.

    Raises:
        ConfigError: there is no address, or `run_id` cannot be the name of a run, or the text would be too long.
    """

    addresses: tuple[Address, ...]
    run_id: str = ""

    def __post_init__(self) -> None:
        check_run_id(self.run_id, least=0)
        if not self.addresses:
            raise ConfigError("addresses of an invite must be at least one")
        if len(self._body()) > _UNPACKED_INVITE or len(str(self)) > len(_INVITE_SCHEME) + _LONGEST_INVITE:
            raise ConfigError(f"addresses are too many for one invite: {len(self.addresses):,}")

    def _body(self) -> bytes:
        return msgspec.msgpack.encode((1, [str(address) for address in self.addresses], self.run_id))

    def __str__(self) -> str:
        body = self._body()
        packed = zlib.compress(body, 9)
        text = base64.urlsafe_b64encode(packed + zlib.crc32(packed).to_bytes(4, "big"))
        return _INVITE_SCHEME + text.decode().rstrip("=")

    def __repr__(self) -> str:
        return f"Invite.parse({str(self)!r})"  # what a notebook shows can be copied

    @classmethod
    def parse(cls, text: str) -> Invite:
        """Read an invite. Raises `ConfigError` that says what is wrong with the text."""
        body = _body_of(text)
        try:
            raw = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
            packed, checksum = raw[:-4], raw[-4:]
            if zlib.crc32(packed).to_bytes(4, "big") != checksum:
                raise binascii.Error("wrong checksum")
            unpacked = zlib.decompressobj().decompress(packed, _UNPACKED_INVITE)
            version, addresses, run_id = msgspec.msgpack.decode(unpacked, type=tuple[int, list[str], str])
        except (binascii.Error, zlib.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _damaged("a character is wrong, or its end is missing") from error
        if version != 1:
            raise ConfigError(f"this invite has format {version}, made by a newer shoal: upgrade to read it")
        return cls(tuple(Address.parse(address) for address in addresses), run_id)


def _body_of(text: str) -> str:
    """The part of an invite behind `shoal:`. Raises `ConfigError` if the text is not exactly one invite."""
    before, scheme, body = text.strip().partition(_INVITE_SCHEME)
    if not scheme:
        raise ConfigError(f"not an invite: {text[:24]!r}… (an invite begins with {_INVITE_SCHEME!r})")
    if before:
        raise _damaged(f"{before[-24:]!r} stands before {_INVITE_SCHEME!r}")
    if not body:
        raise _damaged(f"nothing follows {_INVITE_SCHEME!r}")
    # b64decode would skip characters outside its alphabet: a typing error must not pass.
    if wrong := re.search(r"[^A-Za-z0-9_-]", body):
        raise _damaged(f"it has {wrong[0]!r} in it")
    if len(body) > _LONGEST_INVITE:
        raise _damaged("it is longer than any invite")
    return body


def _damaged(what: str) -> ConfigError:
    return ConfigError(
        f"the invite is damaged, as {what}: copy it alone and whole, from {_INVITE_SCHEME!r} to its end, as one word"
    )


def check_run_id(run_id: object, name: str = "run_id", *, least: int = 1) -> None:
    """Check the name of a run.

    Args:
        run_id: the name.
        name: that of the user's argument.
        least: the number of characters that it has at least; 0 if there may be no run.

    Raises:
        ConfigError: this cannot be the name of a run.
    """
    if not isinstance(run_id, str) or not least <= len(run_id) <= _LONGEST_RUN_ID:
        size = f"{least} to {_LONGEST_RUN_ID}" if least else f"at most {_LONGEST_RUN_ID}"
        raise ConfigError(f"{name} must be a text of {size} characters, got {run_id!r:.80}")
    try:
        run_id.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} has a character that UTF-8 cannot write: {run_id!r:.80}") from error


def parse_peers(
    peers: object,
    *,
    name: str = "initial_peers",
    skipped: Callable[[str], None] = lambda _: None,
    invited: Callable[[str], None] = lambda _: None,
) -> tuple[Address, ...]:
    """Read `initial_peers`: addresses and invites, as text or objects, in one sequence.

    Lists of addresses often hold some that only other software can use (`/udp/…/quic`): such an address is skipped.

    Args:
        peers: an iterable of addresses or invites; a single one counts as a sequence of one; None for no peers.
        name: what errors call them.
        skipped: called with the reason for each item that cannot be used and is left out.
        invited: called with each run that an invite names.

    Returns:
        All addresses in the order given, each once.

    Raises:
        ConfigError: there are items but none of them can be used, or an item is not even text.
    """
    if peers is None:
        return ()
    if not isinstance(peers, str | Address | Invite | Iterable):
        raise ConfigError(f"{name} must be a list of addresses or invites, got {type(peers).__name__}")
    found: dict[Address, None] = {}
    errors: list[ConfigError] = []
    for item in [peers] if isinstance(peers, str | Address | Invite) else peers:
        try:
            addresses, run_id = _addresses(item)
            found.update(dict.fromkeys(addresses))
            if run_id:
                invited(run_id)
        except ConfigError as error:
            errors.append(error)
        except TypeError:
            raise ConfigError(f"{name} must hold addresses or invites, got {type(item).__name__}") from None
    if errors and not found:
        raise (
            ConfigError(f"{name}: {errors[0]}")
            if len(errors) == 1
            else ConfigError(f"none of the {len(errors)} {name} can be used; the first one: {errors[0]}")
        )
    for useless in errors:
        skipped(str(useless))
    return tuple(found)


def _addresses(item: object) -> tuple[Sequence[Address], str]:
    """The addresses and the run that one initial peer names; TypeError for an object that names none."""
    if isinstance(item, Address):
        return [item], ""
    if not isinstance(item, Invite):
        text = str(item).strip()
        if not isinstance(item, str) and not text.startswith("/"):  # an address of another library is its text
            raise TypeError
        if _INVITE_SCHEME not in text:
            if not text.startswith("/"):
                raise ConfigError(
                    f"neither an invite nor an address: {text!r:.80} (an invite begins with {_INVITE_SCHEME!r}, "
                    "an address with '/ip4/', '/ip6/' or '/dns/')"
                )
            return [Address.parse(text)], ""
        item = Invite.parse(text)
    return item.addresses, item.run_id


@_cached
def site_of(host: str) -> str:
    """The site that a host belongs to: what one owner has, who may use all of it.

    This is an IPv4 address, the 64 bits of an IPv6 network, or the last two labels of a name.
    """
    address = _packed(host)
    if not address:
        return ".".join(host.lower().rstrip(".").split(".")[-2:])
    if len(address) == 4:
        return host
    if address[:12] == _IP4_IN_IP6:
        return inet_ntop(AF_INET, address[12:])
    return f"{inet_ntop(AF_INET6, address[:8] + bytes(8))}/64"
