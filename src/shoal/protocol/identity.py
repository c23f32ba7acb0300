"""The identity of a peer: an Ed25519 key pair whose public half is the `PeerID`.

Signatures are domain-separated: the signed bytes are ``b"shoal/1 "``, the context, a zero byte, the message; a context
holds no zero byte. So a proof made to open a connection can never pass as a signed DHT record, nor the other way round.

A key file is PEM (PKCS8, not encrypted), the format that `openssl genpkey -algorithm ed25519` writes. It is created
with mode 0600 and refused when others can read it (on systems with POSIX modes).

Source: RFC 8032 (Ed25519), by way of the `cryptography` package.
"""

from __future__ import annotations

import contextlib
import os
import stat
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from shoal.base.peer import PeerID
from shoal.errors import ConfigError

__all__ = ["SEED_BYTES", "SIGNATURE_BYTES", "Identity", "verify"]

SEED_BYTES = 32
"""The length of the secret from which an identity is derived."""

SIGNATURE_BYTES = 64
"""The length of every signature."""

_MAX_FILE_BYTES = 16 << 10
_CACHED_BYTES = 1024
"""Verdicts on longer messages are not kept: everybody may send them."""

_TORSION = frozenset(
    bytes.fromhex(y)
    for y in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
        "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    )
)
"""The points whose order divides 8, without the bit of the sign. If such a point is the public key, anybody can sign.
The list is that of libsodium (`ge25519_has_small_order`), with canonical and other encodings."""


class Identity:
    """A peer's secret key. Make one with `ephemeral`, `load`, `create`, `load_or_create` or, in tests, `from_seed`.

    Args:
        key: the private key.
    """

    __slots__ = ("_key", "_peer_id")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._peer_id = PeerID(key.public_key().public_bytes_raw())

    @classmethod
    def ephemeral(cls) -> Identity:
        """A new identity that is forgotten with the process."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity that follows from 32 bytes: for simulation, where everything must follow from one seed.

        Raises:
            ConfigError: `seed` is not 32 bytes.
        """
        if not isinstance(seed, bytes) or len(seed) != SEED_BYTES:
            raise ConfigError(f"seed must be {SEED_BYTES} bytes, got {seed!r:.80}")
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Identity:
        """Read a key file.

        Raises:
            ConfigError: there is no such file, others can read it, or it holds no Ed25519 key; says what to do.
        """
        try:
            return cls._load(path)
        except FileNotFoundError as error:
            raise ConfigError(f"no key file at {os.fspath(path)}: create one with `shoal key new`") from error

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Identity:
        """Make a new identity and write it to a new file that only its owner can read.

        Raises:
            ConfigError: the file exists already, or cannot be written.
        """
        try:
            return cls._create(path)
        except FileExistsError as error:
            raise ConfigError(f"key file {os.fspath(path)} exists: load it, or choose another path") from error

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """Read the key file, or make it if there is none.

        Raises:
            ConfigError: as for `load` and `create`.
        """
        with contextlib.suppress(FileNotFoundError):
            return cls._load(path)
        with contextlib.suppress(FileExistsError):
            return cls._create(path)
        return cls.load(path)  # another process made it just now

    @classmethod
    def _load(cls, path: str | os.PathLike[str]) -> Identity:
        name = os.fspath(path)
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(_MAX_FILE_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot read key file {name}: {error.strerror}") from error
        try:
            key = load_pem_private_key(text, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{name} is not a key file: expected an unencrypted PEM private key") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"the key in {name} is not an Ed25519 key: create one with `shoal key new`")
        if os.name == "posix" and mode & 0o077:
            raise ConfigError(
                f"others can read or write key file {name} (mode {stat.S_IMODE(mode):04o}): run `chmod 600 {name}`, "
                "or create a new key if somebody may have read it"
            )
        return cls(key)

    @classmethod
    def _create(cls, path: str | os.PathLike[str]) -> Identity:
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        # The file has another name until all of it is on the disk: a process that starts meanwhile, or after a loss of
        # power, finds a whole key or none. The file is created with its mode: at no moment can others open it.
        draft = Path(f"{os.fspath(path)}.{os.getpid()}.{os.urandom(4).hex()}")
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(pem)
                file.flush()
                os.fsync(fd)
            os.link(draft, path)  # fails if it exists, as renaming would not
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(f"cannot create key file {os.fspath(path)}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):  # it was not made, say because its name is too long
                draft.unlink()
        return cls(key)

    @property
    def peer_id(self) -> PeerID:
        """The public half."""
        return self._peer_id

    def sign(self, context: bytes, message: bytes) -> bytes:
        """Sign `message` for one purpose.

        Args:
            context: the purpose, such as `b"record"`; a signature for one context is worth nothing in another.
            message: the bytes to sign.

        Returns:
            64 bytes.
        """
        return self._key.sign(_signed_bytes(context, message))

    def __repr__(self) -> str:
        return f"Identity({self._peer_id})"


def verify(peer_id: PeerID, context: bytes, message: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `peer_id` for this context and message. Bad input gives False, never an exception.

    A public key that is a point of small order is no peer's key: everybody could sign for it.
    """
    if peer_id[:31] + bytes([peer_id[31] & 0x7F]) in _TORSION:
        return False
    check = _is_signed if len(message) <= _CACHED_BYTES else _is_signed.__wrapped__
    return check(peer_id, context, message, signature)


# The directory gives the same records again and again.
@lru_cache(maxsize=4096)
def _is_signed(raw: bytes, context: bytes, message: bytes, signature: bytes) -> bool:
    try:
        _public_key(raw).verify(signature, _signed_bytes(context, message))
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=1024)
def _public_key(raw: bytes) -> Ed25519PublicKey:
    """A key object. Making one takes an eighth of the time of a verification, and the same peers sign repeatedly."""
    return Ed25519PublicKey.from_public_bytes(raw)


def _signed_bytes(context: bytes, message: bytes) -> bytes:
    if not context or b"\0" in context:
        raise ConfigError(f"context must be non-empty and without zero bytes, got {context!r:.80}")
    return b"shoal/1 " + context + b"\0" + message
