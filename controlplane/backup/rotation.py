"""A new master key: every secret of the database is sealed anew under it, in one transaction.

The one rule: the new key is on the disk before anything is sealed with it, and the old one stays until everything is. A
rotation that was cut anywhere is ended by running it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import asyncpg

from controlplane.core.sealing import SealBroken, Sealer

_CHECK = "deployment.key_check"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A column of secrets. `context` is what they are bound to, with the row's columns in braces."""

    table: str
    column: str
    context: str
    keys: tuple[str, ...] = ("id",)


SEALED = (
    Sealed(table="deployment", column="key_check", context=_CHECK),
    Sealed(table="bootstrap_key", column="private_key_sealed", context="bootstrap_key"),
    Sealed(table="host", column="ssh_key_sealed", context="host.ssh_key:{id}"),
    Sealed(table="host", column="identity_sealed", context="host.identity:{id}"),
    Sealed(table="host", column="bgp_passwords_sealed", context="host.bgp:{id}"),
    Sealed(table="host_preflight", column="identity_sealed", context="host.identity:{id}"),
    Sealed(table="idempotency_key", column="answer", context="idempotency:{actor}:{key}", keys=("actor", "key")),
    Sealed(table="project_key", column="private_sealed", context="project_key:{id}"),
    Sealed(table="provider", column="sealed_key", context="provider.key:{id}"),
    Sealed(table="user", column="totp_sealed", context="user.totp:{id}"),
    Sealed(table="vm", column="user_data_sealed", context="vm.user_data:{id}"),
)


async def is_sealed_with(url: str, sealer: Sealer) -> bool:
    """Whether this is the key that the database's secrets are sealed with; also of one that holds none yet."""
    connection = await asyncpg.connect(url)
    try:
        check = await connection.fetchval("SELECT key_check FROM public.deployment")
    finally:
        await connection.close()
    try:
        return check is None or bool(sealer.open(check, context=_CHECK))
    except SealBroken:
        return False


async def seal_anew(url: str, old: Sealer, new: Sealer, *, is_dry: bool = False) -> dict[str, int]:
    """How many secrets of which table now rest under the new key: all, or, when one does not open (SealBroken), none.

    Keys between hosts are derived from the master key: the documents that carry them are told to hosts again.
    """
    connection = await asyncpg.connect(url)
    done: dict[str, int] = {}
    try:
        transaction = connection.transaction()
        await transaction.start()
        for item in SEALED:
            done[f"{item.table}.{item.column}"] = await _seal_column(connection, item, old, new)
        await connection.execute("UPDATE public.host_document SET generation = generation + 1 WHERE kind = 'notices'")
        await (transaction.rollback() if is_dry else transaction.commit())
    finally:
        await connection.close()
    return done


async def _seal_column(connection: asyncpg.Connection, item: Sealed, old: Sealer, new: Sealer) -> int:
    columns = ", ".join(f'"{key}"' for key in item.keys)
    where = " AND ".join(f'"{key}" = ${number}' for number, key in enumerate(item.keys, 2))
    table, column = f'public."{item.table}"', f'"{item.column}"'
    query = f"SELECT {columns}, {column} AS sealed FROM {table} WHERE {column} IS NOT NULL"  # noqa: S608 - names of SEALED
    change = f"UPDATE {table} SET {column} = $1 WHERE {where}"  # noqa: S608 - names of SEALED
    rows = await connection.fetch(query)
    for row in rows:
        context = item.context.format(**{key: row[key] for key in item.keys})
        sealed = new.seal(old.open(row["sealed"], context=context), context=context)
        await connection.execute(change, sealed, *(row[key] for key in item.keys))
    return len(rows)
