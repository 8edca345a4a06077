"""`/v1/models`: the catalogue, and what of it was imported."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Ref
from controlplane.resources.model import queries, service
from controlplane.resources.model.catalogue import Catalogue
from controlplane.resources.model.errors import ModelEntryInvalid, ModelNotFound
from controlplane.resources.model.plan import Plan
from controlplane.resources.model.queries import ShownModel
from controlplane.resources.model.schemas import CatalogueProblem, ModelList, ModelValidate, ModelView

noun = Noun("model", "models", in_project=False)
router = noun.router

_catalogues: dict[str, Catalogue] = {}


def _catalogue(call: Call) -> Catalogue:
    """One reader a state directory, so that unchanged files are parsed once."""
    state_dir = call.services.settings.state_dir
    return _catalogues.setdefault(str(state_dir), Catalogue.of(state_dir))


@noun.route("GET", "", "list", ModelList)
async def list_(call: Call) -> ModelList:
    """List the models of the catalogue."""
    found = _catalogue(call).look()
    plans = [Plan(model=entry, engine=found.engines[entry.engine]) for _, entry in sorted(found.models.items())]
    return ModelList(
        items=[ModelView.model_validate(item) for item in await queries.shown(call.session, plans)],
        problems=[CatalogueProblem.model_validate(problem) for problem in found.problems],
    )


@noun.route("POST", "/validate", "validate", ModelView, errors=[ModelEntryInvalid])
async def validate(call: Call, body: ModelValidate) -> ShownModel:
    """Check a catalogue entry and show what it would come to, without keeping it."""
    return ShownModel(plan=service.validate(_catalogue(call), body.yaml), row=None, run=None)


@noun.route("GET", "/{model}", "show", ModelView, errors=[ModelNotFound])
async def show(call: Call, model: Ref) -> ShownModel:
    """Show one model of the catalogue."""
    return (await queries.shown(call.session, [service.plan(_catalogue(call), model)]))[0]


@noun.route("POST", "/{model}/import", "import", ModelView, status=202, errors=[ModelNotFound])
async def import_(call: Call, model: Ref) -> ShownModel:
    """Fetch weights and engine of a model, so that endpoints can serve it."""
    plan = service.plan(_catalogue(call), model)
    call.subject = await service.import_(call.session, plan)
    return (await queries.shown(call.session, [plan]))[0]
