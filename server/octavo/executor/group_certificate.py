"""Certificates of the nodes of an engine, which the group's token alone gives: nothing has to be handed out or renewed.

Every node derives the key of the same authority from the token and signs a certificate for a fresh key of its own. So
whoever presents a certificate of that authority knows the token, and the token itself never crosses the network.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_SALT = b"octavo: nodes of an engine"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_VALID = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)  # nodes' clocks may differ


@lru_cache(maxsize=4)
def tls_contexts(token: bytes) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of the side that accepts and of the side that connects, which both demand a certificate."""
    authority_key = _authority_key(token)
    authority = _certificate("authority", authority_key.public_key(), authority_key, is_authority=True)
    key = ec.generate_private_key(ec.SECP256R1())
    own = _certificate("node", key.public_key(), authority_key, is_authority=False)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + own.public_bytes(Encoding.PEM)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.num_tickets = 0  # a connection is never resumed
    for context in (server, client):
        context.check_hostname = False  # any member of the group may be at any address
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=authority.public_bytes(Encoding.PEM).decode())
        _load(context, pem)
    return server, client


def _authority_key(token: bytes) -> ec.EllipticCurvePrivateKey:
    """Derive it by scrypt, so that guessing a weak token from a certificate is slow."""
    secret = hashlib.scrypt(token, salt=_SALT, n=1 << 14, r=8, p=1, dklen=48)
    return ec.derive_private_key(int.from_bytes(secret, "big") % (_ORDER - 1) + 1, ec.SECP256R1())


def _certificate(
    name: str, key: ec.EllipticCurvePublicKey, authority: ec.EllipticCurvePrivateKey, *, is_authority: bool
) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name("authority"))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_VALID[0])
        .not_valid_after(_VALID[1])
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
        .sign(authority, hashes.SHA256())
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"octavo {name}")])


def _load(context: ssl.SSLContext, pem: bytes) -> None:
    """Give ``context`` its certificate and key, which `ssl` reads from a path alone, by a file that no disk holds."""
    descriptor = os.memfd_create("certificate")
    try:
        os.write(descriptor, pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
