"""Public SSH keys as people paste them (RFC 4253, section 6.6). The one rule: one line, without options before it."""

from __future__ import annotations

import base64
import binascii

_TYPES = {
    "ssh-ed25519",
    "ssh-rsa",
    "ecdsa-sha2-nistp256",
    "ecdsa-sha2-nistp384",
    "ecdsa-sha2-nistp521",
    "sk-ssh-ed25519@openssh.com",
    "sk-ecdsa-sha2-nistp256@openssh.com",
}


def checked_public_key(text: str) -> str:
    """The key without spaces around it; ValueError, with the reason, when it is none."""
    parts = text.strip().split(None, 2)
    if len(parts) < 2 or parts[0] not in _TYPES or not text.isprintable():
        raise ValueError(f"an SSH public key looks like `ssh-ed25519 AAAA… comment`; known types: {', '.join(sorted(_TYPES))}")
    try:
        blob = base64.b64decode(parts[1], validate=True)
    except binascii.Error as error:
        raise ValueError("the key's second word is not base64") from error
    length = int.from_bytes(blob[:4])
    if blob[4 : 4 + length] != parts[0].encode():
        raise ValueError("the key's content is of another type than its first word says")
    return text.strip()
