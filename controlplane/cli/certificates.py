"""A private certificate authority and what it issues: ECDSA P-256, X.509 v3 (RFC 5280).

The one rule: the authority's key signs on this machine only; servers get a chain and a key of their own.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_CA_DAYS = 3650
_SERVER_DAYS = 825
_SKEW = timedelta(minutes=5)  # clocks differ


class AuthorityUnusable(ValueError):
    """The files are not a certificate authority's, or do not fit together."""


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A server's certificate and key."""

    certificate_pem: bytes
    key_pem: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str) -> Self:
        """A fresh authority, good for ten years."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(f"Bedplate {name}"), _name(f"Bedplate {name}"), key.public_key(), _CA_DAYS)
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        return cls(certificate=builder.sign(key, hashes.SHA256()), key=key)

    @classmethod
    def load(cls, certificate_pem: bytes, key_pem: bytes) -> Self:
        """Raises AuthorityUnusable."""
        try:
            certificate = x509.load_pem_x509_certificate(certificate_pem)
            key = serialization.load_pem_private_key(key_pem, password=None)
        except (ValueError, TypeError) as error:
            raise AuthorityUnusable(str(error)) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise AuthorityUnusable("the key does not belong to the certificate")
        return cls(certificate=certificate, key=key)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return _pem(self.key)

    def issue(self, names: Sequence[str]) -> Issued:
        """A server's certificate for DNS names and addresses, good for 825 days."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_name(names[0]), self.certificate.subject, key.public_key(), _SERVER_DAYS)
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.SubjectAlternativeName([_general_name(name) for name in names]), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False),
        ]
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, critical=is_critical)
        certificate = builder.sign(self.key, hashes.SHA256())
        return Issued(certificate_pem=certificate.public_bytes(serialization.Encoding.PEM), key_pem=_pem(key))


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )
