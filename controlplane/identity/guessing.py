"""Wrong proofs of who one is, counted. The one rule: an account that is there and one that is not are counted alike.

A name looks at no proof for 15 s after its fifth failure in a row, then for 30 s, …, at most 15 minutes. A client address may
fail so many times in 15 minutes, whatever the names.
"""

from __future__ import annotations

import hashlib
import ipaddress
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.identity.errors import AddressLocked
from controlplane.models.attempt import Attempt
from controlplane.models.user import User

ADDRESS_WINDOW = timedelta(minutes=15)

_FREE_FAILURES = 5
_FIRST_LOCK = timedelta(seconds=15)
_LONGEST_LOCK = timedelta(minutes=15)
_FORGOTTEN_AFTER = timedelta(hours=1)
_IPV6_SITE_BITS = 64  # what one subscriber has at least


Counted = User | Attempt
"""What failures are counted in."""


def locked_seconds(row: Counted, now: datetime) -> int:
    """For how long no proof is looked at; 0 when one is."""
    if row.locked_until is None or row.locked_until <= now:
        return 0
    return int((row.locked_until - now).total_seconds()) + 1


def count(row: Counted, now: datetime) -> None:
    """One more failure; an hour after the last one, or after the end of a lock, earlier ones are forgotten."""
    last = max((moment for moment in (row.failed_at, row.locked_until) if moment is not None), default=now)
    if last + _FORGOTTEN_AFTER < now:
        forgive(row)
    row.failed_sign_ins, row.failed_at = row.failed_sign_ins + 1, now
    beyond = row.failed_sign_ins - _FREE_FAILURES
    if beyond >= 0:
        row.locked_until = now + min(_FIRST_LOCK * 2 ** min(beyond, 16), _LONGEST_LOCK)


def forgive(row: Counted) -> None:
    row.failed_sign_ins, row.failed_at, row.locked_until = 0, None, None


async def of_name(session: AsyncSession, name: str) -> Attempt | None:
    """What was counted for a name that nobody has."""
    return await session.get(Attempt, _name_key(name))


async def locked_name(session: AsyncSession, name: str, now: datetime) -> Attempt:
    """The same, made when it is missing, and locked until the transaction ends."""
    return await _locked(session, _name_key(name), now)


async def refuse_address(session: AsyncSession, address: str, now: datetime) -> None:
    """Raises AddressLocked while the client's address has failed too often."""
    found = await session.get(Attempt, _address_key(address))
    seconds = locked_seconds(found, now) if found is not None else 0
    if seconds:
        raise AddressLocked(f"too many failures from your address; try again in {seconds} s", retry_after_seconds=seconds)


async def count_address(session: AsyncSession, address: str, now: datetime, *, most: int) -> None:
    """One more failure from there; from `most` in 15 minutes on it is locked until these are over. The caller commits."""
    row = await _locked(session, _address_key(address), now)
    if row.began_at + ADDRESS_WINDOW <= now:
        forgive(row)
        row.began_at = now
    row.failed_sign_ins, row.failed_at = row.failed_sign_ins + 1, now
    if row.failed_sign_ins >= most:
        row.locked_until = row.began_at + ADDRESS_WINDOW


async def _locked(session: AsyncSession, key: str, now: datetime) -> Attempt:
    await session.execute(insert(Attempt).values(key=key, began_at=now).on_conflict_do_nothing())
    query = select(Attempt).where(Attempt.key == key).with_for_update().execution_options(populate_existing=True)
    return (await session.scalars(query)).one()


def _name_key(name: str) -> str:
    return f"name {hashlib.sha256(name.encode()).hexdigest()}"


def _address_key(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return f"address {address[:64]}"
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or ipaddress.ip_network((parsed, _IPV6_SITE_BITS), strict=False).network_address
    return f"address {parsed}"
