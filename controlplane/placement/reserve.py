"""Taking, changing and giving back a share of one host. The one rule: the check and the taking are one statement.

The first try skips hosts that another transaction is just taking from, so that concurrent placements spread instead of
queueing. Only when that finds nothing, the second try waits, in the order of host ids so that no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import CTE, Select, delete, func, insert, literal, select, union_all, update
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.models.host import Host
from controlplane.models.reservation import Reservation
from controlplane.placement.filters import FREE_MEMORY_BYTES, FREE_VCPUS, all_pass
from controlplane.placement.request import DRIVERS, PlacementRequest
from controlplane.placement.score import order

WINDOW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a machine goes and which driver runs it there."""

    host_id: str
    driver: str


async def reserve(session: AsyncSession, subject_id: str, request: PlacementRequest) -> Placement | None:
    """Take the request's share of the best host for `subject_id`; None when none fits. Doing it twice is once."""
    held = await session.get(Reservation, subject_id)
    if held is not None:
        drivers = (await session.execute(select(Host.machine_drivers).where(Host.id == held.host_id))).scalar_one()
        return Placement(host_id=held.host_id, driver=choose_driver(request, drivers))
    for is_patient in (False, True):
        savepoint = await session.begin_nested()
        row = (await session.execute(_statement(subject_id, request, is_patient=is_patient))).one_or_none()
        if row is not None:
            await savepoint.commit()
            return Placement(host_id=row[0], driver=choose_driver(request, row[1]))
        await savepoint.rollback()
    return None


def choose_driver(request: PlacementRequest, available: Sequence[str]) -> str:
    """The best driver of the isolation class that the host has."""
    return next(driver for driver in DRIVERS[request.isolation] if driver in available)


def _statement(subject_id: str, request: PlacementRequest, *, is_patient: bool) -> Select[str, list[str]]:
    best = select(Host.id).where(all_pass(request)).limit(1)
    if is_patient:
        candidate = best.order_by(Host.id).with_for_update(key_share=True)
    else:
        near = best.where(Host.id.in_(_window(subject_id, request)))
        candidate = near.order_by(*order(request, subject_id)).with_for_update(key_share=True, skip_locked=True)
    taken = _take(candidate.cte("candidate"), request)
    kept = (
        insert(Reservation)
        .from_select(
            ["subject_id", "host_id", "vcpus", "memory_bytes"],
            select(literal(subject_id), taken.c.id, literal(request.vcpus), literal(request.reserved_memory_bytes)),
        )
        .returning(Reservation.host_id)
        .cte("kept")
    )
    return select(taken.c.id, taken.c.machine_drivers).join(kept, kept.c.host_id == taken.c.id)


def _window(subject_id: str, request: PlacementRequest) -> Select[str]:
    """WINDOW hosts that fit, the first on a ring of digests from the subject's own on: the best of so many is nearly the best
    of all, and reading them costs the same in a fleet of any size.
    """
    place, start = func.md5(Host.id), func.md5(subject_id)
    fitting = select(Host.id, place.label("place")).where(all_pass(request)).order_by(place).limit(WINDOW)
    onwards = fitting.where(place >= start).subquery()
    around = fitting.where(place < start).subquery()
    ring = union_all(select(onwards.c.id), select(around.c.id)).limit(WINDOW).cte("near")
    return select(ring.c.id)


def _take(candidate: CTE, request: PlacementRequest) -> CTE:
    return (
        update(Host)
        .where(Host.id == candidate.c.id)
        .values(
            reserved_vcpus=Host.reserved_vcpus + request.vcpus,
            reserved_memory_bytes=Host.reserved_memory_bytes + request.reserved_memory_bytes,
        )
        .returning(Host.id, Host.machine_drivers)
        .cte("taken")
    )


async def resize_reservation(session: AsyncSession, subject_id: str, request: PlacementRequest) -> bool:
    """Hold exactly this much on the same host from now on; False (and nothing changed) when a growth does not fit."""
    vcpus, memory_bytes = request.vcpus, request.reserved_memory_bytes
    held = (
        await session.execute(select(Reservation).where(Reservation.subject_id == subject_id).with_for_update())
    ).scalar_one()
    more_vcpus, more_memory = vcpus - held.vcpus, memory_bytes - held.memory_bytes
    if not more_vcpus and not more_memory:
        return True
    statement = update(Host).where(Host.id == held.host_id)
    if more_vcpus > 0:
        statement = statement.where(more_vcpus <= FREE_VCPUS)
    if more_memory > 0:
        statement = statement.where(more_memory <= FREE_MEMORY_BYTES)
    changed = (
        await session.execute(
            statement.values(
                reserved_vcpus=Host.reserved_vcpus + more_vcpus,
                reserved_memory_bytes=Host.reserved_memory_bytes + more_memory,
            ).returning(Host.id)
        )
    ).one_or_none()
    if changed is None:
        return False
    held.vcpus, held.memory_bytes = vcpus, memory_bytes
    await session.flush()
    return True


async def release(session: AsyncSession, subject_id: str) -> bool:
    """Give back what `subject_id` holds; False when it holds nothing (any more)."""
    gone = (
        delete(Reservation)
        .where(Reservation.subject_id == subject_id)
        .returning(Reservation.host_id, Reservation.vcpus, Reservation.memory_bytes)
        .cte("gone")
    )
    returned = (
        update(Host)
        .where(Host.id == gone.c.host_id)
        .values(
            reserved_vcpus=Host.reserved_vcpus - gone.c.vcpus,
            reserved_memory_bytes=Host.reserved_memory_bytes - gone.c.memory_bytes,
        )
        .returning(Host.id)
        .cte("returned")
    )
    return (await session.execute(select(returned.c.id))).one_or_none() is not None
