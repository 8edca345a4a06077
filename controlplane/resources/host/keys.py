"""SSH keys of the control plane: made, sealed, opened.

The one rule: a private key leaves this module sealed, bound to the row it belongs to.
"""

from __future__ import annotations

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
)

from controlplane.core.sealing import Sealer
from controlplane.resources.host.errors import IdentityInvalid

BOOTSTRAP_CONTEXT = "bootstrap_key"


def host_context(host_id: str) -> str:
    """What the agent's key of a host is sealed for."""
    return f"host.ssh_key:{host_id}"


def identity_context(subject_id: str) -> str:
    """What an uploaded identity is sealed for: the host or preflight that it logs in to."""
    return f"host.identity:{subject_id}"


def new_key(comment: str) -> tuple[str, bytes]:
    """(public half as one line, private half in OpenSSH's format) of a fresh Ed25519 key."""
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return f"{public} {comment}", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


def sealed_identity(sealer: Sealer, identity: str, subject_id: str) -> bytes:
    """Raises IdentityInvalid for what is no key, or one with a passphrase."""
    text = identity.strip().encode() + b"\n"
    try:
        if b"OPENSSH PRIVATE KEY" in text:
            load_ssh_private_key(text, password=None)
        else:
            load_pem_private_key(text, password=None)
    except TypeError as error:
        raise IdentityInvalid("the key has a passphrase; give one without, it is used for this enrolment only") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise IdentityInvalid("this is not a private key in OpenSSH's or PEM format") from error
    return sealer.seal(text, context=identity_context(subject_id))
