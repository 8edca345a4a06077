"""What ran short on how many hosts. The one rule: a host is counted at the first thing that makes it unsuitable; among
suitable hosts cores and memory are counted each for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter
from sqlalchemy import BigInteger, ColumnElement, and_, cast, func, not_, null, select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.json import Json
from controlplane.models.host import Host
from controlplane.placement.filters import FREE_MEMORY_BYTES, FREE_VCPUS, Filter, all_pass, capacity, suitability
from controlplane.placement.request import PlacementRequest
from controlplane.placement.score import fullness

REJECTIONS = Counter(
    "bedplate_placement_rejections", "Hosts that a refused placement could not take, by the filter that said no.", ["filter"]
)
MAX_HOSTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Short:
    """One reason and on how many hosts it holds. `most_free` is the best that any suitable host has of it."""

    filter: str
    hosts: int
    reason: str
    needed: int | None = None
    most_free: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """`fitting` hosts could take the machine now."""

    hosts: int
    fitting: int
    short: tuple[Short, ...]

    @property
    def sentence(self) -> str:
        if self.hosts == 0:
            return "There is no host in the fleet yet."
        if self.fitting:
            return f"{self.fitting} of {self.hosts} hosts could take it now."
        reasons = "; ".join(f"{item.hosts} {item.reason}{_free(item)}" for item in self.short)
        return f"None of {self.hosts} hosts can take it: {reasons}."

    def as_json(self) -> dict[str, Json]:
        return {
            "hosts": self.hosts,
            "fitting": self.fitting,
            "detail": self.sentence,
            "short": [
                {
                    "filter": item.filter,
                    "hosts": item.hosts,
                    "reason": item.reason,
                    "needed": item.needed,
                    "most_free": item.most_free,
                }
                for item in self.short
            ],
        }


def _free(item: Short) -> str:
    return "" if item.most_free is None else f" (most free: {item.most_free})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One host, for operators: `rejected_by` is empty where the machine fits; `score` orders those, smaller first."""

    host_id: str
    name: str
    rejected_by: tuple[str, ...]
    free_vcpus: int
    free_memory_bytes: int
    score: float


async def explain(session: AsyncSession, request: PlacementRequest) -> Explanation:
    """Count reasons over the whole fleet, in one statement."""
    columns: list[ColumnElement[int]] = [func.count(), func.count().filter(all_pass(request))]
    filters = list(_counted(request))
    for item, counted in filters:
        columns.append(func.count().filter(counted))
        columns.append(_most_free(request, item))
    row = (await session.execute(select(*columns).select_from(Host))).one()
    short = tuple(
        Short(filter=item.name, hosts=row[at], reason=item.reason, needed=item.needed, most_free=row[at + 1])
        for at, (item, _) in zip(range(2, len(row), 2), filters, strict=True)
        if row[at]
    )
    return Explanation(hosts=row[0], fitting=row[1], short=short)


def _counted(request: PlacementRequest) -> list[tuple[Filter, ColumnElement[bool]]]:
    """Each filter with the expression of the hosts that are counted against it."""
    counted: list[tuple[Filter, ColumnElement[bool]]] = []
    earlier: list[ColumnElement[bool]] = []
    for item in suitability(request):
        counted.append((item, and_(*earlier, not_(item.passes))))
        earlier.append(item.passes)
    counted.extend((item, and_(*earlier, not_(item.passes))) for item in capacity(request))
    return counted


def _most_free(request: PlacementRequest, item: Filter) -> ColumnElement[int]:
    suitable = and_(*(other.passes for other in suitability(request)))
    if item.measure is None:
        return cast(null(), BigInteger).label(f"{item.name}_most_free")
    return func.greatest(func.max(item.measure).filter(suitable), 0)


def count_rejections(explanation: Explanation) -> None:
    """Raise `bedplate_placement_rejections_total` for a placement that was refused."""
    for item in explanation.short:
        REJECTIONS.labels(filter=item.filter).inc(item.hosts)


async def verdicts(session: AsyncSession, request: PlacementRequest) -> list[Verdict]:
    """Every host (at most MAX_HOSTS, by name) with what rejects it."""
    filters = (*suitability(request), *capacity(request))
    statement = (
        select(Host.id, Host.name, FREE_VCPUS, FREE_MEMORY_BYTES, fullness(request), *(item.passes for item in filters))
        .order_by(Host.name)
        .limit(MAX_HOSTS)
    )
    found: list[Verdict] = []
    for host_id, name, free_vcpus, free_memory_bytes, score, *passes in (await session.execute(statement)).all():
        rejected_by = tuple(item.name for item, is_passed in zip(filters, passes, strict=True) if not is_passed)
        found.append(
            Verdict(
                host_id=host_id,
                name=name,
                rejected_by=rejected_by,
                free_vcpus=free_vcpus,
                free_memory_bytes=free_memory_bytes,
                score=score,
            )
        )
    return found
