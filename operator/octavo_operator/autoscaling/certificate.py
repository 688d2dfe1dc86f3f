"""The serving certificate: short-lived, made in memory, trusted by the API server through the APIService's caBundle.

It is in no Secret, so the operator needs no rights over Secrets; a new leader makes its own.
"""

from __future__ import annotations

import ssl
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class ServingCertificate:
    """PEM texts. `authority` has signed only `certificate`, and its key is discarded."""

    certificate: bytes
    key: bytes
    authority: bytes
    made_at: datetime
    expires_at: datetime

    def is_due(self, now: datetime) -> bool:
        """True if to renew it: half of its lifetime is over, or the clock was set back."""
        return now >= self.made_at + (self.expires_at - self.made_at) / 2 or now < self.made_at - timedelta(minutes=5)

    def load_into(self, context: ssl.SSLContext) -> None:
        """Makes `context` present this certificate."""
        with tempfile.TemporaryDirectory() as folder:  # the ssl module reads files only
            pair = Path(folder, "pair.pem")
            pair.touch(mode=0o600)
            pair.write_bytes(self.certificate + self.key)
            context.load_cert_chain(pair)


def make(dns_names: list[str], lifetime: timedelta, now: datetime | None = None) -> ServingCertificate:
    """A new certificate, valid from five minutes ago, since clocks differ."""
    now = now or datetime.now(UTC)
    ends = now + lifetime
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("octavo-operator metrics CA")

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(authority_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(ends)
        )

    usage = {
        "digital_signature": False,
        "content_commitment": False,
        "key_encipherment": False,
        "data_encipherment": False,
        "key_agreement": False,
        "key_cert_sign": False,
        "crl_sign": False,
        "encipher_only": False,
        "decipher_only": False,
    }
    authority = (
        builder(authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**{**usage, "key_cert_sign": True}), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        builder(_name(dns_names[0][:64]), key.public_key())
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**{**usage, "digital_signature": True}), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return ServingCertificate(certificate.public_bytes(pem), private, authority.public_bytes(pem), now, ends)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
