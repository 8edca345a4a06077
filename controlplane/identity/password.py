"""Passwords (argon2id, RFC 9106) and one-time codes (TOTP, RFC 6238). The one rule: hashing happens in a thread, outside of
any transaction, and takes as long for a name that nobody has.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from pyotp import random_base32
from pyotp.totp import TOTP

MIN_CHARACTERS = 12
MAX_CHARACTERS = 256

_ISSUER = "Bedplate"
_STEP_SECONDS = 30
_STEPS_AROUND = 1  # a phone's clock may be half a minute off
_hasher = PasswordHasher()  # RFC 9106's second recommended choice: 64 MiB, 3 passes, 4 lanes
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="password")
"""Each hash takes 64 MiB and a core: a storm of sign-ins must take neither all memory nor all cores."""


async def hashed(password: str) -> str:
    return await asyncio.get_running_loop().run_in_executor(_threads, _hasher.hash, password)


async def is_right(password: str, stored: str | None) -> bool:
    """Whether it is the password; `stored` None costs the same and is never right."""
    is_match = await asyncio.get_running_loop().run_in_executor(_threads, _verify, password, stored)
    return is_match and stored is not None


def _verify(password: str, stored: str | None) -> bool:
    try:
        return _hasher.verify(stored or _nobodys(), password)
    except (VerificationError, InvalidHashError):
        return False


@functools.cache
def _nobodys() -> str:
    return _hasher.hash(secrets.token_urlsafe())


def new_totp_secret() -> str:
    return random_base32()


def totp_uri(secret: str, name: str) -> str:
    """What an authenticator reads from a QR code."""
    return TOTP(secret).provisioning_uri(name=name, issuer_name=_ISSUER)


def totp_step(secret: str, code: str, *, now: datetime, after_step: int) -> int | None:
    """The time step whose code this is, None when it is of none; one at or before `after_step` was used already."""
    present = int(now.timestamp()) // _STEP_SECONDS
    totp = TOTP(secret)
    for step in range(present - _STEPS_AROUND, present + _STEPS_AROUND + 1):
        if step > after_step and hmac.compare_digest(totp.at(step * _STEP_SECONDS), code):
            return step
    return None
