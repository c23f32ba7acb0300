"""TLS settings: version 1.3 only, no session tickets, and a certificate that only carries the channel.

Nobody checks the certificate itself: the peers prove their identities inside the channel (`shoal.transport.handshake`),
by signatures that cover the certificate's hash.
"""

from __future__ import annotations

import os
import secrets
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from shoal.errors import LocalError

__all__ = ["client_context", "server_context"]


def client_context() -> ssl.SSLContext:
    """The dialing side's TLS settings."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def server_context() -> tuple[ssl.SSLContext, bytes]:
    """The listening side's TLS settings with a new self-signed certificate, and that certificate (DER)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "shoal")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))  # nobody checks: fixed, so that clocks do not matter
        .not_valid_after(datetime(2100, 1, 1, tzinfo=UTC))
        .sign(key, hashes.SHA256())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    # `ssl` reads keys from files only: should it come to a disk, it is encrypted with a password that never does.
    password = secrets.token_bytes(32).hex()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode()))
    with _file_of(secret + certificate.public_bytes(Encoding.PEM)) as path:
        context.load_cert_chain(path, password=password)
    return context, certificate.public_bytes(Encoding.DER)


@contextmanager
def _file_of(content: bytes) -> Iterator[Path]:
    """A file with this content, for a moment: in memory where that can be had (Linux), as no folder may be writable."""
    descriptor = os.memfd_create("shoal") if hasattr(os, "memfd_create") else None
    if descriptor is not None and (path := Path(f"/proc/self/fd/{descriptor}")).exists():
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            file.write(content)
            yield path
        return
    if descriptor is not None:
        os.close(descriptor)  # /proc is not mounted
    try:
        folder = tempfile.TemporaryDirectory(prefix="shoal-")
        path = Path(folder.name) / "certificate.pem"
        path.write_bytes(content)
    except OSError as error:
        raise LocalError(
            f"no folder for temporary files can be written, and the TLS key needs one for a moment ({error}): set "
            "TMPDIR to a folder that can be"
        ) from error
    with folder:
        yield path
