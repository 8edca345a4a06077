"""Changes of models. The one rule: an import freezes the catalogue's entry; importing what has not changed is nothing."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.kernel import service as kernel
from controlplane.models.model import Model
from controlplane.resources.model.catalogue import Catalogue, ModelEntry, parse
from controlplane.resources.model.errors import ModelEntryInvalid, ModelNotFound
from controlplane.resources.model.plan import Plan

PROGRAM = "model"


def plan(catalogue: Catalogue, name: str) -> Plan:
    """The entry with its engine; raises ModelNotFound."""
    found = catalogue.look()
    entry = found.models.get(name)
    if entry is None:
        raise ModelNotFound(f"no model {name} in the catalogue")
    return Plan(model=entry, engine=found.engines[entry.engine])


def validate(catalogue: Catalogue, text: str) -> Plan:
    """An entry that is not in the catalogue yet; raises ModelEntryInvalid."""
    try:
        entry = parse(text, ModelEntry)
    except ValueError as error:
        raise ModelEntryInvalid(str(error)) from error
    assert isinstance(entry, ModelEntry)
    engine = catalogue.look().engines.get(entry.engine)
    if engine is None:
        raise ModelEntryInvalid(f"there is no engine {entry.engine} in the catalogue")
    return Plan(model=entry, engine=engine)


async def import_(session: AsyncSession, plan: Plan) -> Model:
    """Fetch weights and engine into the image store, in the background. Doing it again repairs or takes a changed entry."""
    row = await session.scalar(select(Model).where(Model.name == plan.model.name).with_for_update(key_share=True))
    if row is None:
        row = Model(id=new_id(Kind.MODEL), name=plan.model.name, spec=plan.spec, digest=plan.digest, generation=1)
        session.add(row)
    elif row.digest != plan.digest:
        row.spec, row.digest, row.state = plan.spec, plan.digest, "importing"
        row.weights_image_id = row.engine_image_id = None
        row.generation += 1
    await session.flush()
    await kernel.start(session, PROGRAM, row.id)
    await kernel.resume(session, PROGRAM, row.id)
    return row
