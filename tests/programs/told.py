"""What a host was told of its network, played in memory: documents by kind and id, kept as a real agent keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from controlplane.remote.fake import FakeLinks
from hostagent.protocol import codec
from hostagent.protocol.errors import AgentError
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.results import Failed, Outcome, Running, Succeeded
from hostagent.protocol.verbs import ENSURE, BackendTraffic, ObjectObserved, Subject, TrafficObserved
from hostagent.protocol.wanted import Observed, Purge
from tests.fakehost import FakeHost

KINDS = frozenset({"policy", "firewall", "address", "loadbalancer", "notices", "edgeways"})


@dataclass
class ToldHost:
    """Stands before a FakeHost and answers for the kinds of the network. `requests` is every verb in its order.

    `answers`: what to answer instead, by kind; `refusals`: likewise, of what it does not begin; `details`, `traffic`: what
    `observe` says, by id.
    """

    host: FakeHost
    documents: dict[tuple[str, str], Any] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    answers: dict[str, Running | Failed] = field(default_factory=dict)
    refusals: dict[str, AgentError] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    traffic: dict[str, tuple[BackendTraffic, ...]] = field(default_factory=dict)

    @classmethod
    def before(cls, host: FakeHost, links: FakeLinks) -> ToldHost:
        told = cls(host)
        links.add(host.id, told.answer, host.upload)
        return told

    async def answer(self, request: Request) -> Answer:
        kind, _, verb = request.verb.partition(".")
        self.requests.append(request.verb)
        if kind == "traffic":
            carried = self.traffic.get(codec.decode(Subject, request.body).id, ())
            return Answer(id=request.id, body=codec.encode(TrafficObserved(backends=carried)))
        if kind not in KINDS:
            return await self.host.answer(request)
        try:
            return Answer(id=request.id, body=codec.encode(self._carry_out(kind, verb, request)))
        except AgentError as error:
            return Answer(id=request.id, error=error)

    def _carry_out(self, kind: str, verb: str, request: Request) -> object:
        if verb == "observe":
            return self._observed(kind, codec.decode(Subject, request.body).id)
        document = codec.decode(ENSURE[request.verb] if verb == "ensure" else Purge, request.body)
        known = self.documents.get((kind, document.id))
        if known is not None and known.generation > document.generation:
            raise AgentError("generation.stale", "an older generation", retryable=False)
        if verb == "ensure" and kind in self.refusals:
            raise self.refusals[kind]
        if verb == "ensure" and kind in self.answers:
            return Outcome(result=self.answers[kind])
        if verb == "ensure":
            self.documents[kind, document.id] = document
        else:
            self.documents.pop((kind, document.id), None)
        return Outcome(result=Succeeded(observed={"state": "present"}))

    def _observed(self, kind: str, object_id: str) -> ObjectObserved:
        document = self.documents.get((kind, object_id))
        if document is None:
            return ObjectObserved(object=None)
        name: Any = kind
        seen = Observed(
            id=object_id, kind=name, generation=document.generation, state="present", detail=self.details.get(object_id, {})
        )
        return ObjectObserved(object=seen)

    @property
    def id(self) -> str:
        return self.host.id

    def of(self, kind: str, object_id: str) -> Any:
        return self.documents.get((kind, object_id))
