"""Links and routes in dictionaries; nothing reaches the kernel."""

from __future__ import annotations

from hostagent.drivers.fault import Faults
from hostagent.drivers.network.protocol import (
    LinkObserved,
    LinkPlan,
    LinkRendered,
    LinkTraits,
    RoutePlan,
    RoutesObserved,
    RouteTraits,
)


class FakeLinks:
    traits = LinkTraits(name="fake", kinds=frozenset({"tap", "veth"}))

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.links: dict[str, LinkObserved] = {}

    def render(self, plan: LinkPlan) -> LinkRendered:
        return LinkRendered(requests=(("link_add", (("name", plan.interface), ("kind", plan.kind))),))

    async def observe(self, plan: LinkPlan) -> LinkObserved | None:
        await self.faults.reach("network.observe", plan.nic.id)
        found = self.links.get(plan.interface)
        return found if found is None or found.kind == plan.kind else None

    async def apply(self, plan: LinkPlan) -> LinkObserved:
        await self.faults.reach("network.apply", plan.nic.id)
        self.links[plan.interface] = LinkObserved(
            nic_id=plan.nic.id, interface=plan.interface, kind=plan.kind, is_complete=True, mtu_bytes=plan.nic.mtu_bytes
        )
        return self.links[plan.interface]

    async def remove(self, interface: str) -> None:
        await self.faults.reach("network.remove", interface)
        self.links.pop(interface, None)

    async def interfaces(self) -> tuple[str, ...]:
        return tuple(self.links)


class FakeRoutes:
    traits = RouteTraits(name="fake")

    def __init__(self, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.present: RoutesObserved | None = None

    def render(self, plan: RoutePlan) -> LinkRendered:
        return LinkRendered(
            requests=tuple(("route_replace", (("dst", r.destination_cidr), ("via", r.via))) for r in plan.wanted.routes)
        )

    async def observe(self) -> RoutesObserved | None:
        await self.faults.reach("routes.observe")
        return self.present

    async def apply(self, plan: RoutePlan) -> RoutesObserved:
        await self.faults.reach("routes.apply")
        self.present = RoutesObserved(routes=tuple(sorted(plan.wanted.routes, key=lambda r: r.destination_cidr)))
        return self.present

    async def remove(self) -> None:
        await self.faults.reach("routes.remove")
        self.present = None
