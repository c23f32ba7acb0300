"""How two peers prove their identities, inside a TLS channel with certificates that nobody vouches for.

The server's certificate is self-signed and lives as long as its transport. The channel is tied to the peers because
both sign, with their Ed25519 keys, the certificate *that they see*. A man in the middle has to show another
certificate, so the proofs that he relays do not verify. The signed message (context `transport`) is::

    role (b"client" or b"server") 0x00 | version u16 | SHA-256 of the server's certificate (DER)
    | client's PeerID | server's PeerID | client's nonce | server's nonce        (32 bytes each)

Each frame is a big-endian u16 length (at most `MAX_FRAME_BYTES`) and a MessagePack array whose first item is the type:
`_Hello` of the client, `_Proof` of the server, `_Proof` of the client, `_Welcome` of the server. A `_Refusal` may take
the place of any frame of the server.

The server checks that it is the one wanted before it signs anything; the client checks the server's proof before it
sends its own. A nonce of each side makes every proof good for one connection only. Later versions may append fields
to `hello`: unknown trailing fields are ignored, so an old peer can still say which versions it speaks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from shoal.base.peer import PEER_ID_BYTES, PeerID
from shoal.errors import PeerProtocolError, PeerRefused
from shoal.protocol.identity import SIGNATURE_BYTES, Identity, verify
from shoal.protocol.wire import read
from shoal.transport.connection import TcpConnection
from shoal.transport.sealed import KEY_BYTES

__all__ = ["MAX_FRAME_BYTES", "OTHER_VERSION", "Versions", "greet_as_client", "greet_as_server"]

MAX_FRAME_BYTES = 1024
"""The longest frame before a connection is authenticated."""

OTHER_VERSION = "version"
"""The code of a refusal: the two sides speak no common version."""

_CONTEXT = b"transport"
_NONCE_BYTES = 32

_Id = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Signature = Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
_Version = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Versions(NamedTuple):
    """The versions of the protocol that one side speaks, from `lowest` to `highest`, both included."""

    lowest: int
    highest: int

    def __str__(self) -> str:
        return f"{self.lowest}" if self.lowest == self.highest else f"{self.lowest} to {self.highest}"

    def common(self, other: Versions) -> int | None:
        """The highest version that both speak, or None."""
        highest = min(self.highest, other.highest)
        return highest if highest >= max(self.lowest, other.lowest) else None


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """Base of all frames."""


class _Hello(_Frame, frozen=True, array_like=True, tag="hello"):
    """Step 1, by the client.

    Attributes:
        min_version: the lowest version that the client speaks.
        max_version: the highest.
        peer_id: the client's own.
        wanted: the peer that the client dialed.
        nonce: drawn at random.
        clear: the client would send data as it is, not sealed.
    """

    min_version: _Version
    max_version: _Version
    peer_id: _Id
    wanted: _Id
    nonce: _Nonce
    clear: bool = False


class _Proof(_Frame, frozen=True, array_like=True, tag="proof"):
    """Step 2, by the server; step 3, by the client.

    Attributes:
        version: the highest version that both speak; the client repeats it.
        nonce: drawn at random by the server; the client's is that of its `hello`.
        signature: over the message that both sides sign.
        key: random: the sender's data is sealed with it.
        clear: data goes as it is if this is true in `hello` and in the server's proof.
    """

    version: _Version
    nonce: _Nonce
    signature: _Signature
    key: _Key
    clear: bool = False


class _Welcome(_Frame, frozen=True, array_like=True, tag="welcome"):
    """Step 4, by the server: the connection is open."""


class _Refusal(_Frame, frozen=True, array_like=True, tag="refusal"):
    """At any step, by the server. The connection ends.

    Attributes:
        reason: for people.
        min_version: the lowest version that the server speaks.
        max_version: the highest.
    """

    reason: Annotated[str, msgspec.Meta(max_length=300)]
    min_version: _Version
    max_version: _Version


F = TypeVar("F", bound=_Frame)

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Hello | _Proof | _Welcome | _Refusal)


class _Channel(NamedTuple):
    """The values that both proofs sign."""

    version: int
    certificate: bytes
    client: PeerID
    server: PeerID
    client_nonce: bytes
    server_nonce: bytes

    def message(self, role: bytes) -> bytes:
        digest = hashlib.sha256(self.certificate).digest()
        ids = self.client + self.server
        return role + b"\0" + self.version.to_bytes(2, "big") + digest + ids + self.client_nonce + self.server_nonce


async def greet_as_client(
    connection: TcpConnection, identity: Identity, wanted: PeerID, versions: Versions, *, clear: bool = False
) -> None:
    """Do the TLS handshake, make the server prove that it is `wanted`, and prove who we are.

    Args:
        connection: a fresh TCP connection.
        identity: our own.
        wanted: the peer that must be on the other side.
        versions: the versions that we speak.
        clear: send data as it is, if the server wants that too; otherwise it is sealed.

    Raises:
        PeerRefused: the server is another peer, speaks no version of ours, or refused.
        PeerProtocolError: it sent what the protocol does not allow.
        PeerUnreachable: it does not speak TLS 1.3, or is gone.
    """
    certificate = await connection.start_tls()
    nonce = os.urandom(_NONCE_BYTES)
    await _send(connection, _Hello(*versions, identity.peer_id.to_bytes(), wanted.to_bytes(), nonce, clear))
    proof = await _expect(connection, _Proof, wanted, versions)
    if versions.common(Versions(proof.version, proof.version)) is None:
        raise PeerProtocolError(f"chose protocol version {proof.version}, which was not offered", wanted)
    if proof.clear and not clear:
        raise PeerProtocolError("chose to send data as it is, which was not offered", wanted)
    channel = _Channel(proof.version, certificate, identity.peer_id, wanted, nonce, proof.nonce)
    if not verify(wanted, _CONTEXT, channel.message(b"server"), proof.signature):
        raise PeerRefused(
            "the peer at this address cannot prove that it is the one that was dialed: the address is wrong, "
            "or somebody is in between",
            wanted,
        )
    signature = identity.sign(_CONTEXT, channel.message(b"client"))
    key = os.urandom(KEY_BYTES)
    await _send(connection, _Proof(proof.version, nonce, signature, key, proof.clear))
    await _expect(connection, _Welcome, wanted, versions)
    _leave_tls(connection, key, proof.key, clear=proof.clear)
    connection.authenticated(wanted, proof.version)
    connection.start_counting()


async def greet_as_server(
    connection: TcpConnection,
    identity: Identity,
    versions: Versions,
    *,
    certificate: bytes,
    admit: Callable[[PeerID], str | None],
    clear: bool = False,
) -> None:
    """Do the TLS handshake, prove our identity if the client wants us, and make the client prove its own.

    Args:
        connection: a fresh TCP connection.
        identity: our own.
        versions: the versions that we speak.
        certificate: the certificate that this side's TLS context shows, DER.
        admit: called with a proved client; returns why the client may not stay, or None.
        clear: send data as it is, if the client wants that too; otherwise it is sealed.

    Raises:
        PeerRefused: the client was told no; the connection is closed. Its `code` is `OTHER_VERSION` if the two speak no
            common version.
        PeerProtocolError: it sent what the protocol does not allow.
        PeerUnreachable: it does not speak TLS 1.3, or is gone.
    """
    await connection.start_tls()
    hello = await _expect(connection, _Hello, None, versions)
    client, offered = PeerID(hello.peer_id), Versions(hello.min_version, hello.max_version)
    version = versions.common(offered)
    if hello.wanted != identity.peer_id:
        raise await _refuse(connection, "the peer that was dialed is not the one that answers here", client, versions)
    if version is None:
        reason = f"protocol version {offered} is not spoken here"
        raise await _refuse(connection, reason, client, versions, code=OTHER_VERSION)
    channel = _Channel(version, certificate, client, identity.peer_id, hello.nonce, os.urandom(_NONCE_BYTES))
    signature = identity.sign(_CONTEXT, channel.message(b"server"))
    key, clear = os.urandom(KEY_BYTES), clear and hello.clear
    await _send(connection, _Proof(version, channel.server_nonce, signature, key, clear))
    proof = await _expect(connection, _Proof, client, versions)
    if not verify(client, _CONTEXT, channel.message(b"client"), proof.signature):
        raise await _refuse(connection, "the proof of identity does not verify", client, versions)
    if (objection := admit(client)) is not None:
        raise await _refuse(connection, objection, client, versions)
    connection.authenticated(client, version)
    await _send(connection, _Welcome())
    _leave_tls(connection, key, proof.key, clear=clear)
    connection.start_counting()


def _leave_tls(connection: TcpConnection, sending_key: bytes, receiving_key: bytes, *, clear: bool) -> None:
    """The last frame was sent or read: the following bytes are no longer TLS."""
    if clear:
        connection.unseal()
    else:
        connection.seal(sending_key, receiving_key)


async def _send(connection: TcpConnection, frame: _Frame) -> None:
    body = _encode(frame)
    await connection.write(len(body).to_bytes(2, "big") + body)


async def _expect(connection: TcpConnection, kind: type[F], peer_id: PeerID | None, ours: Versions) -> F:
    """Read one frame, which must be of `kind`. A refusal becomes `PeerRefused`."""
    header = bytearray(2)
    await connection.readinto(header)
    size = int.from_bytes(header, "big")
    if not 0 < size <= MAX_FRAME_BYTES:
        raise PeerProtocolError(f"a greeting frame of {size} bytes (at most {MAX_FRAME_BYTES} are allowed)", peer_id)
    body = bytearray(size)
    await connection.readinto(body)
    try:
        frame = read(_decoder, body)
    except msgspec.MsgspecError as error:
        raise PeerProtocolError(f"a greeting frame that cannot be read: {error}", peer_id) from error
    if isinstance(frame, _Refusal):
        reason = "".join(letter if letter.isprintable() else "?" for letter in frame.reason)
        theirs = Versions(frame.min_version, frame.max_version)
        cure = "" if ours.common(theirs) else ": install the same version of shoal on both"
        raise PeerRefused(f"{reason} (it speaks protocol version {theirs}, this side {ours}{cure})", peer_id)
    if not isinstance(frame, kind):
        raise PeerProtocolError(f"sent {type(frame).__name__} where {kind.__name__} was expected", peer_id)
    return frame


async def _refuse(
    connection: TcpConnection, reason: str, client: PeerID, ours: Versions, *, code: str = "refused"
) -> PeerRefused:
    """Refuse, and close. Returns the error to raise; the caller then drops the socket."""
    await _send(connection, _Refusal(reason, *ours))
    await connection.close()
    return PeerRefused(f"told no: {reason}", client, code=code)
