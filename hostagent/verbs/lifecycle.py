"""What `ensure`, `purge` and `observe` have in common for every kind of object: generations, tombstones, jobs.

The one rule: the document (or the tombstone) is on disk before anything is done, so a killed agent goes on where it was.
"""

from __future__ import annotations

from typing import Any, Protocol

from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Outcome, Running, Succeeded
from hostagent.protocol.verbs import ObjectObserved, Subject
from hostagent.protocol.wanted import Generation, Observed, Purge
from hostagent.verbs.context import Agent
from hostagent.verbs.documents import Key, check_id
from hostagent.verbs.jobs import Job, Result


class Kind(Protocol):
    """One noun on the host. `apply` and `remove` are idempotent and may be cancelled at any await."""

    name: str

    def check(self, agent: Agent, document: Any) -> None:
        """Raises AgentError (not retryable) for a document that can never be made true here."""
        ...

    async def apply(self, agent: Agent, document: Any, job: Job) -> Result:
        """Make it so; Running only for what waits for something outside (an upload)."""
        ...

    async def remove(self, agent: Agent, object_id: str, document: Any | None) -> Running | None:
        """Make it gone; Running while something of it still is not."""
        ...

    async def observe(self, agent: Agent, object_id: str, document: Any | None) -> Observed | None: ...

    def is_settled(self, document: Any, observed: Observed | None) -> bool:
        """Whether what is observed is what the document wants."""
        ...

    async def found(self, agent: Agent) -> tuple[str, ...]:
        """Ids of everything of this kind on the host, also without a document."""
        ...


async def ensure(agent: Agent, kind: Kind, document: Any) -> Outcome:
    key = (kind.name, check_id(document.id))
    async with agent.admission.hold(key):
        await _admit(agent, kind, key, document)
        result = agent.jobs.take(key, "ensure", document.generation)
        if result is not None:
            return Outcome(result=result)
        job = agent.jobs.current(key)
        if job is not None and (job.action, job.generation) != ("ensure", document.generation):
            await agent.jobs.cancel(key)
            job = None
        if job is None:
            job = start_ensure(agent, kind, document)
    return Outcome(result=await agent.jobs.wait(job, agent.settle_seconds))


async def _admit(agent: Agent, kind: Kind, key: Key, document: Any) -> None:
    """Take the document, or refuse it: older than what is here, or purged already, or another one of the same generation."""
    _refuse_former(agent, document.generation)
    grave = agent.documents.tombstone(*key)
    if grave is not None and document.generation <= grave:
        raise AgentError("generation.purged", f"{key[1]} was purged at generation {_text(grave)}", retryable=False)
    present = agent.documents.get(*key)
    if present is not None and document.generation < present.generation:
        raise AgentError("generation.stale", f"{key[1]} is at generation {_text(present.generation)}", retryable=False)
    if present is not None and document.generation == present.generation:
        if document != present:
            raise AgentError(
                "generation.conflict", f"{key[1]}: another document of generation {_text(present.generation)}", retryable=False
            )
        return
    kind.check(agent, document)
    await agent.documents.put(kind.name, document)


def _refuse_former(agent: Agent, generation: Generation) -> None:
    """A control plane that was restored elsewhere has told this host something: the one before it is not heard any more."""
    newest = agent.documents.newest_epoch()
    if generation.epoch < newest:
        raise AgentError(
            "generation.former_epoch",
            f"this host serves epoch {newest}; this was said under epoch {generation.epoch}",
            retryable=False,
        )


def start_ensure(agent: Agent, kind: Kind, document: Any) -> Job:
    """The caller made sure that no job runs for this object."""

    async def work(job: Job) -> Result:
        return await kind.apply(agent, document, job)

    return agent.jobs.start((kind.name, document.id), "ensure", document.generation, work)


async def purge(agent: Agent, kind: Kind, body: Purge) -> Outcome:
    key = (kind.name, check_id(body.id))
    async with agent.admission.hold(key):
        _refuse_former(agent, body.generation)
        present = agent.documents.get(*key)
        if present is not None and present.generation > body.generation:
            raise AgentError("generation.stale", f"{body.id} is at generation {_text(present.generation)}", retryable=False)
        agent.documents.entomb(*key, body.generation)
        result = agent.jobs.take(key, "purge", body.generation)
        if result is not None:
            return Outcome(result=result)
        job = agent.jobs.current(key)
        if job is not None and job.action != "purge":
            await agent.jobs.cancel(key)
            job = None
        if job is None:
            job = start_purge(agent, kind, body.id, body.generation)
    return Outcome(result=await agent.jobs.wait(job, agent.settle_seconds))


def start_purge(agent: Agent, kind: Kind, object_id: str, generation: Generation) -> Job:
    """The caller made sure that no job runs for this object and that its tombstone is on disk."""

    async def work(job: Job) -> Result:
        job.step = "removing"
        unfinished = await kind.remove(agent, object_id, agent.documents.get(kind.name, object_id))
        if unfinished is not None:
            return unfinished
        agent.documents.drop(kind.name, object_id)
        return Succeeded(observed={"state": "absent"})

    return agent.jobs.start((kind.name, object_id), "purge", generation, work)


async def observe(agent: Agent, kind: Kind, body: Subject) -> ObjectObserved:
    return ObjectObserved(object=await observe_one(agent, kind, check_id(body.id)))


async def observe_one(agent: Agent, kind: Kind, object_id: str) -> Observed | None:
    """The object as it is; `broken` when its document cannot be read, `unknown` when it has none."""
    reason = agent.documents.broken.get((kind.name, object_id))
    if reason is not None:
        return Observed(id=object_id, kind=_name(kind), generation=None, state="broken", detail={"reason": reason})
    document = agent.documents.get(kind.name, object_id)
    observed = await kind.observe(agent, object_id, document)
    if observed is None and document is not None:
        return Observed(id=object_id, kind=_name(kind), generation=document.generation, state="absent")
    return observed


def _name(kind: Kind) -> Any:
    return kind.name


def _text(generation: Generation) -> str:
    return f"{generation.epoch}.{generation.number}"
