"""What ACME leaves on disk, in `<state_dir>/tls/acme`: one PEM file, the sealed account, what was tried.

The one rule: key and chain are one file, renamed into place, so no listener ever meets a key with another's chain.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from controlplane.core.files import write_whole
from controlplane.core.sealing import SealBroken, Sealer

_ACCOUNT = "tls.acme.account"
_PLACEHOLDER_DAYS = 365
_SKEW = timedelta(minutes=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A certificate on disk, as far as it matters for its renewal."""

    names: frozenset[str]
    issuer: str
    serial: int
    not_before: datetime
    not_after: datetime
    is_self_signed: bool

    @classmethod
    def of(cls, pem: bytes) -> Self:
        """The first certificate of a chain; raises ValueError."""
        leaf = x509.load_pem_x509_certificates(pem)[0]
        names: list[str] = []
        with contextlib.suppress(x509.ExtensionNotFound):
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value.get_values_for_type(x509.DNSName)
        return cls(
            names=frozenset(names),
            issuer=leaf.issuer.rfc4514_string(),
            serial=leaf.serial_number,
            not_before=leaf.not_valid_before_utc,
            not_after=leaf.not_valid_after_utc,
            is_self_signed=leaf.issuer == leaf.subject,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An account at one authority; `url` is empty until it is registered."""

    directory_url: str
    key_pem: str
    url: str = ""
    email: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was tried. `issued_for` and `tried_for` are marks of the settings then; times are ISO 8601, empty = never."""

    issued_for: str = ""
    tried_for: str = ""
    failures: int = 0
    last_error: str = ""
    last_error_at: str = ""
    next_try_at: str = ""


class RenewalBusy(RuntimeError):
    """Another process renews at the moment."""


@dataclass(frozen=True, slots=True)
class Store:
    directory: Path

    @property
    def pem(self) -> Path:
        """Key and chain: what API and gateway show."""
        return self.directory / "server.pem"

    def held(self) -> Held | None:
        """What API and gateway show now; None when there is nothing that could be shown."""
        return held_at(self.pem)

    def put(self, *, key_pem: bytes, chain_pem: bytes) -> None:
        write_whole(self.pem, key_pem.rstrip() + b"\n" + chain_pem.lstrip())

    def ensure_placeholder(self, names: list[str]) -> None:
        """Something to show until the authority has answered: signed by itself. What is there already stays."""
        if self.pem.exists():
            return
        key = ec.generate_private_key(ec.SECP256R1())
        partial = self.directory / f"placeholder.{os.getpid()}"
        write_whole(partial, pem_of(key) + _self_signed(key, names))
        try:
            with contextlib.suppress(FileExistsError):  # API and gateway start at once: the first wins
                os.link(partial, self.pem)
        finally:
            partial.unlink()

    def record(self) -> Record:
        try:
            content = json.loads((self.directory / "renewal.json").read_text())
            return Record(**content)
        except (OSError, ValueError, TypeError):
            return Record()

    def put_record(self, record: Record) -> None:
        write_whole(self.directory / "renewal.json", json.dumps(asdict(record), indent=2).encode())

    def account(self, sealer: Sealer, directory_url: str) -> Account | None:
        """The account at this authority; None when there is none, or it was sealed under another master key."""
        try:
            plain = sealer.open((self.directory / "account.sealed").read_bytes(), context=_ACCOUNT)
            found = Account(**json.loads(plain))
        except (OSError, SealBroken, ValueError, TypeError):
            return None
        return found if found.directory_url == directory_url else None

    def put_account(self, sealer: Sealer, account: Account) -> None:
        write_whole(self.directory / "account.sealed", sealer.seal(json.dumps(asdict(account)).encode(), context=_ACCOUNT))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One renewal at a time on this state directory. Raises RenewalBusy."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RenewalBusy(f"another process is renewing the certificate in {self.directory}") from None
            yield


def held_at(path: Path) -> Held | None:
    """The certificate in a PEM file, None when there is none that can be read."""
    try:
        return Held.of(path.read_bytes())
    except (OSError, ValueError):
        return None


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _self_signed(key: ec.EllipticCurvePrivateKey, names: list[str]) -> bytes:
    now = datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Bedplate, until ACME answers")])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + timedelta(days=_PLACEHOLDER_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
