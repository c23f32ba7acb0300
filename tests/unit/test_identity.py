"""Keys: signatures that mean one thing only, and files that only their owner can read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from shoal.base.peer import PeerID
from shoal.errors import ConfigError
from shoal.protocol.identity import _TORSION, SEED_BYTES, SIGNATURE_BYTES, Identity, verify

SEED = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
"""RFC 8032, section 7.1, test 1."""

posix = pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")


def test_the_peer_id_is_the_public_key() -> None:
    """Against the published test vector."""
    public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert Identity.from_seed(SEED).peer_id == PeerID(bytes.fromhex(public))


def test_what_is_signed_is_as_documented() -> None:
    """Anybody with an Ed25519 library can verify it."""
    signature = Identity.from_seed(SEED).sign(b"record", b"message")
    key = ed25519.Ed25519PrivateKey.from_private_bytes(SEED).public_key()
    key.verify(signature, b"shoal/1 record\0message")
    assert len(signature) == SIGNATURE_BYTES


@given(st.binary(max_size=100), st.sampled_from([b"record", b"transport"]))
def test_a_signature_verifies_for_its_signer_context_and_message_only(message: bytes, context: bytes) -> None:
    """Change any of them and it is worth nothing."""
    identity, other = Identity.from_seed(SEED), Identity.from_seed(bytes(SEED_BYTES))
    signature = identity.sign(context, message)
    assert verify(identity.peer_id, context, message, signature)
    assert not verify(other.peer_id, context, message, signature)
    assert not verify(identity.peer_id, b"another", message, signature)
    assert not verify(identity.peer_id, context, message + b"x", signature)
    assert not verify(identity.peer_id, context, message, bytes([signature[0] ^ 1]) + signature[1:])


def test_no_context_and_message_read_as_another_pair() -> None:
    """The border between them is part of what is signed, so a zero byte in a context is refused."""
    identity = Identity.ephemeral()
    signature = identity.sign(b"a", b"b\0c")
    assert not verify(identity.peer_id, b"a\0b".split(b"\0", 1)[0] + b"b", b"c", signature)
    for context in (b"", b"a\0b"):
        with pytest.raises(ConfigError, match="context"):
            identity.sign(context, b"c")


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=70))
def test_rubbish_is_false_and_no_exception(raw: bytes, signature: bytes) -> None:
    """Also a peer id that is no point of the curve."""
    assert verify(PeerID(raw), b"record", b"", signature) is False


def test_ephemeral_identities_differ() -> None:
    """Chance, not a constant."""
    assert Identity.ephemeral().peer_id != Identity.ephemeral().peer_id


@pytest.mark.parametrize("seed", [b"", bytes(31), bytes(33), "a" * 32, None])
def test_a_seed_is_32_bytes(seed: Any) -> None:
    """Else a `ConfigError`."""
    with pytest.raises(ConfigError, match="32 bytes"):
        Identity.from_seed(seed)


def test_the_secret_is_not_printed() -> None:
    """Logs show who, not how."""
    shown = repr(Identity.from_seed(SEED))
    assert SEED.hex() not in shown
    assert str(Identity.from_seed(SEED).peer_id) in shown


def test_a_key_file_brings_the_identity_back(tmp_path: Path) -> None:
    """`create`, then `load`, then `load_or_create`: the same peer. Paths may be text."""
    path = tmp_path / "peer.key"
    created = Identity.create(path)
    assert Identity.load(str(path)).peer_id == created.peer_id
    assert Identity.load_or_create(path).peer_id == created.peer_id
    assert Identity.load(path).sign(b"record", b"x") == created.sign(b"record", b"x")


def test_load_or_create_creates(tmp_path: Path) -> None:
    """The first time."""
    path = tmp_path / "peer.key"
    assert Identity.load_or_create(path).peer_id == Identity.load(path).peer_id


def test_a_key_made_by_openssl_can_be_loaded(tmp_path: Path) -> None:
    """`openssl genpkey -algorithm ed25519` writes unencrypted PKCS8."""
    key = ed25519.Ed25519PrivateKey.from_private_bytes(SEED)
    path = write_key(tmp_path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    assert Identity.load(path).peer_id == Identity.from_seed(SEED).peer_id


@posix
def test_a_key_file_is_private_from_birth(tmp_path: Path) -> None:
    """Mode 0600 whatever the umask allows."""
    before = os.umask(0)
    try:
        Identity.create(tmp_path / "peer.key")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "peer.key").stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_key_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    """The message names the file and the command that mends it; `load_or_create` refuses it too."""
    path = tmp_path / "peer.key"
    Identity.create(path)
    path.chmod(mode)
    for load in (Identity.load, Identity.load_or_create):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert f"chmod 600 {path}" in str(caught.value)
    path.chmod(0o400)
    Identity.load(path)


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    """Neither a key nor anything else that lies there."""
    path = tmp_path / "peer.key"
    path.write_text("precious", encoding="utf-8")
    with pytest.raises(ConfigError, match="exists"):
        Identity.create(path)
    assert path.read_text(encoding="utf-8") == "precious"


def test_a_key_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts during the write, or after a loss of power, finds no half a key; nothing else is left."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    Identity.create(tmp_path / "one.key")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"cannot create key file .*No space left"):
            Identity.create(tmp_path / "two.key")
    assert [path.name for path in tmp_path.iterdir()] == ["one.key"]


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    """And the message says how to make one."""
    with pytest.raises(ConfigError, match=r"nothing\.key.*create"):
        Identity.load(tmp_path / "nothing.key")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """`create` does not make folders."""
    for make in (Identity.create, Identity.load_or_create):
        with pytest.raises(ConfigError, match="cannot create key file"):
            make(tmp_path / "no" / "peer.key")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Identity.load(tmp_path)  # a folder is no file


P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def plus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The sum of two points of the curve (RFC 8032)."""
    (x, y), (u, v) = a, b
    shared = D * x * y * u * v
    return (x * v + u * y) * pow(1 + shared, -1, P) % P, (y * v + x * u) * pow(1 - shared, -1, P) % P


def point(key: bytes) -> tuple[int, int] | None:
    """What a public key says, whether its encoding is canonical or not."""
    y = (int.from_bytes(key, "little") & (1 << 255) - 1) % P
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    x = x if x * x % P == square else x * pow(2, (P - 1) // 4, P) % P
    return (x, y) if x * x % P == square else None


def test_low_order_keys_are_refused() -> None:
    """Under a key whose point has a small order everybody can sign: nobody has it. All there are, in each encoding."""
    small = [bytes([*raw[:31], raw[31] | sign]) for raw in _TORSION for sign in (0, 0x80)]
    found = set()
    for raw in small:
        at = point(raw)
        assert at is not None
        twice = plus(at, at)
        four = plus(twice, twice)
        assert plus(four, four) == (0, 1)
        found |= {at, ((P - at[0]) % P, at[1])}
        assert not verify(PeerID(raw), b"record", b"message", raw[:31] + bytes(33))
    assert len(found) == 8, "the curve has eight such points"
    anybody = bytes([1, *bytes(31)])
    forged = anybody + bytes(32)
    ed25519.Ed25519PublicKey.from_public_bytes(anybody).verify(forged, b"whatever")  # raises nothing: that is why
    assert not verify(PeerID(anybody), b"record", b"message", forged)


def other_keys() -> dict[str, bytes]:
    """What is not a key of ours."""
    ed = ed25519.Ed25519PrivateKey.generate()
    pem = ed.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    elliptic = ec.generate_private_key(ec.SECP256R1())
    return {
        "empty": b"",
        "rubbish": bytes(range(256)),
        "half": pem[:60],
        "encrypted": ed.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")),
        "another kind": elliptic.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
    }


@pytest.mark.parametrize("kind", ["empty", "rubbish", "half", "encrypted", "another kind"])
def test_what_is_no_key_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """A `ConfigError` with the path."""
    path = write_key(tmp_path, other_keys()[kind])
    with pytest.raises(ConfigError, match=str(path)):
        Identity.load(path)


def write_key(folder: Path, content: bytes) -> Path:
    """A private file."""
    path = folder / "some.key"
    path.write_bytes(content)
    path.chmod(0o600)
    return path
