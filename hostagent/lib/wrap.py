"""Keys on their way between host and control plane: RSA-OAEP by the `openssl` program.

The one rule: a label says what a wrap is for, and a wrap opens under no other. SHA-256 twice (digest and MGF1), so that any
library opens it. Source: RFC 8017, section 7.1; openssl-pkeyutl(1).
"""

from __future__ import annotations

from hostagent.lib.program import run, secret_input
from hostagent.protocol.errors import AgentError

_BITS = 3072
_PADDING = ("rsa_padding_mode:oaep", "rsa_oaep_md:sha256", "rsa_mgf1_md:sha256")
_SECONDS = 30.0


async def generate() -> bytes:
    """A private key as PEM."""
    argv = ("openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", f"rsa_keygen_bits:{_BITS}")
    return (await run(*argv, deadline_seconds=_SECONDS)).stdout


async def public_of(private: bytes) -> str:
    """Its public half as PEM."""
    with secret_input(private) as key:
        finished = await run("openssl", "pkey", "-in", f"/dev/fd/{key}", "-pubout", pass_fds=(key,))
    return finished.stdout.decode("ascii")


async def wrap(plain: bytes, public: str, *, label: str) -> bytes:
    """Raises AgentError `key.invalid` (not retryable) for what is no RSA key, or one too short."""
    with secret_input(public.encode()) as key:
        argv = ("openssl", "pkeyutl", "-encrypt", "-pubin", "-inkey", f"/dev/fd/{key}", *_options(label))
        finished = await run(*argv, stdin=plain, pass_fds=(key,), check=False)
    if finished.returncode != 0:
        raise AgentError("key.invalid", "the public key is none that a volume's key can be wrapped to", retryable=False)
    return finished.stdout


async def unwrap(wrapped: bytes, private: bytes, *, label: str) -> bytes:
    """Raises AgentError `key.wrong` (not retryable) for what was not wrapped to this key under this label."""
    with secret_input(private) as key:
        argv = ("openssl", "pkeyutl", "-decrypt", "-inkey", f"/dev/fd/{key}", *_options(label))
        finished = await run(*argv, stdin=wrapped, pass_fds=(key,), check=False)
    if finished.returncode != 0:
        raise AgentError("key.wrong", "the wrapped key does not open here", retryable=False)
    return finished.stdout


def _options(label: str) -> tuple[str, ...]:
    words = (*_PADDING, f"rsa_oaep_label:{label.encode().hex()}")
    return tuple(part for word in words for part in ("-pkeyopt", word))
