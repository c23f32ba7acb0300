"""TLS settings: version 1.3 only, no session tickets, and a certificate that only carries the channel.

Nobody checks the certificate itself: the peers prove their identities inside the channel (`shoal.transport.handshake`),
by signatures that cover the certificate's hash.
"""

from __future__ import annotations

import secrets
import ssl
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

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
    # `ssl` reads keys from files only: the key on the disk is encrypted with a password that never touches the disk.
    password = secrets.token_bytes(32).hex()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password.encode()))
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        path = Path(folder) / "certificate.pem"
        path.write_bytes(secret + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(path, password=password)
    return context, certificate.public_bytes(Encoding.DER)
