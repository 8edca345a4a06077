"""`/v1/projects/{project}/keys`: keys of applications for the gateway."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.key import Key
from controlplane.resources.key import service
from controlplane.resources.key.errors import KeyExpiryInvalid, KeyNameTaken, KeyNotFound
from controlplane.resources.key.schemas import KeyCreate, KeyCreated, KeyUpdate, KeyView

noun = Noun("key", "keys", has_operations=False)
router = noun.router


@noun.create(KeyCreated, errors=[KeyNameTaken, KeyExpiryInvalid])
async def create(call: Call, body: KeyCreate) -> KeyCreated:
    """Make a key for the gateway; its plain text is in this answer only."""
    made = await service.create(call.session, call.project_id, **body.model_dump(), now=call.services.clock.now())
    call.subject = made.row
    return KeyCreated(**KeyView.model_validate(made.row).model_dump(), secret=made.secret)


@noun.list(KeyView)
async def list_(call: Call, page: Page) -> PageOf[Key]:
    """List the keys of a project; never their plain text."""
    return await call.page(Key, page, fields=["expires_at"])


@noun.show(KeyView, errors=[KeyNotFound])
async def show(call: Call, key: Ref) -> Key:
    """Show one key; never its plain text."""
    return await call.load(Key, key)


@noun.update(KeyView, errors=[KeyNotFound, KeyExpiryInvalid])
async def update(call: Call, key: Ref, body: KeyUpdate) -> Key:
    """Change what a key may do; in force within a second."""
    row = await call.load(Key, key)
    await service.change(call.session, row, body.model_dump(exclude_unset=True), call.services.clock.now())
    return row


@noun.delete(KeyView)
async def delete(call: Call, key: Ref) -> None:
    """Revoke a key; the gateway refuses it within a second."""
    await service.revoke(call.session, await call.load(Key, key))
