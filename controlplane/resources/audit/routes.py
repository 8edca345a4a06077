"""`/v1/projects/{project}/audit` and, for operators, `/v1/audit`: who changed what."""

from __future__ import annotations

from fastapi import APIRouter

from controlplane.api.frame import Call, Noun, Page, PageOf
from controlplane.api.schemas import Listing
from controlplane.core.paging import PageTokenInvalid
from controlplane.models.audit import AuditEntry
from controlplane.resources.audit.schemas import AuditView

_of_project = Noun("audit", "audit", has_operations=False)
_of_all = Noun("audit", "audit", in_project=False, has_operations=False)
_FIELDS = ["action", "actor", "actor_name", "subject_kind", "subject_id", "request_id", "project_id"]


@_of_project.list(AuditView)
async def list_(call: Call, page: Page) -> PageOf[AuditEntry]:
    """List the changes in a project; `sort=-id` begins with the newest."""
    return await call.page(AuditEntry, page, fields=_FIELDS)


@_of_all.route("GET", "", "list-all", Listing[AuditView], errors=[PageTokenInvalid])
async def list_all(call: Call, page: Page) -> PageOf[AuditEntry]:
    """List the changes in the whole deployment; `sort=-id` begins with the newest."""
    return await call.page(AuditEntry, page, fields=_FIELDS)


router = APIRouter()
router.include_router(_of_project.router)
router.include_router(_of_all.router)
