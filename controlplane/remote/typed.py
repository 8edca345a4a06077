"""The typed calls of `HostLinks` on top of `call`. The one rule: whoever implements `call` gets the rest from here."""

from __future__ import annotations

from typing import Any

from controlplane.remote.link import Result, Wanted, kind_of
from hostagent.protocol.facts import HostFacts
from hostagent.protocol.verbs import HostObserved, Nothing, Subject
from hostagent.protocol.wanted import Generation, Observed, Purge


class TypedCalls:
    async def call(self, host_id: str, verb: str, body: object, *, deadline_seconds: float = 30.0) -> Any:
        raise NotImplementedError

    async def ensure(self, host_id: str, wanted: Wanted, *, deadline_seconds: float = 30.0) -> Result:
        outcome = await self.call(host_id, f"{kind_of(wanted)}.ensure", wanted, deadline_seconds=deadline_seconds)
        return outcome.result

    async def purge(
        self, host_id: str, kind: str, object_id: str, generation: Generation, *, deadline_seconds: float = 30.0
    ) -> Result:
        body = Purge(id=object_id, generation=generation)
        outcome = await self.call(host_id, f"{kind}.purge", body, deadline_seconds=deadline_seconds)
        return outcome.result

    async def observe(self, host_id: str, kind: str, object_id: str, *, deadline_seconds: float = 30.0) -> Observed | None:
        answer = await self.call(host_id, f"{kind}.observe", Subject(id=object_id), deadline_seconds=deadline_seconds)
        return answer.object

    async def observe_host(self, host_id: str, *, deadline_seconds: float = 30.0) -> HostObserved:
        return await self.call(host_id, "host.observe", Nothing(), deadline_seconds=deadline_seconds)

    async def facts(self, host_id: str, *, deadline_seconds: float = 60.0) -> HostFacts:
        return await self.call(host_id, "facts.observe", Nothing(), deadline_seconds=deadline_seconds)
