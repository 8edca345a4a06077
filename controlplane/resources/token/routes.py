"""`/v1/tokens`: bearer tokens of operators, of projects, and of people for their own programs."""

from __future__ import annotations

from sqlalchemy import ColumnElement, or_

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref, RequestContext
from controlplane.authz.service import Role
from controlplane.core.ids import is_id
from controlplane.models.token import Token
from controlplane.resources.project.errors import ProjectNotFound
from controlplane.resources.token import queries, service
from controlplane.resources.token.errors import (
    TokenExpiryInvalid,
    TokenNameAmbiguous,
    TokenNameTaken,
    TokenNotFound,
    TokenRoleForbidden,
    TokenRoleInvalid,
    TokenScopeInvalid,
)
from controlplane.resources.token.schemas import TokenCreate, TokenCreated, TokenView

_REFUSALS = [TokenNameTaken, TokenRoleInvalid, TokenRoleForbidden, TokenScopeInvalid, TokenExpiryInvalid]

noun = Noun("token", "tokens", in_project=False, has_operations=False)
router = noun.router


@noun.create(TokenCreated, errors=[*_REFUSALS, ProjectNotFound])
async def create(call: Call, body: TokenCreate) -> TokenCreated:
    """Make a bearer token; its plain text is in this answer only."""
    asked = service.Asked(**{**body.model_dump(), "role": Role(body.role)})
    made = await service.create(call.session, call.actor, asked, call.services.clock.now())
    call.subject = made.row
    return TokenCreated(**TokenView.model_validate(made.row).model_dump(), secret=made.secret)


@noun.list(TokenView)
async def list_(call: Call, page: Page) -> PageOf[Token]:
    """List the tokens that are yours to revoke: your own, your projects' as an admin, all as an operator."""
    return await call.page(Token, page, fields=["role", "project_id", "user_id", "maker_id", "expires_at"], seen=_seen(call))


@noun.route("GET", "/current", "current", TokenView)
async def current(call: Call) -> Token:
    """Show the token of this request: who am I."""
    if call.actor.session_id is not None:
        raise TokenNotFound("this request came with a session, not with a token")
    return await call.load(Token, call.actor.id, seen=[])


@noun.show(TokenView, errors=[TokenNotFound, TokenNameAmbiguous])
async def show(call: Call, token: Ref) -> Token:
    """Show one token; never its plain text."""
    return await _load(call, token)


@noun.delete(TokenView, errors=[TokenNameAmbiguous])
async def delete(call: Call, token: Ref) -> None:
    """Revoke a token: the next request with it is refused."""
    await call.session.delete(await _load(call, token))


async def _load(call: RequestContext, ref: str) -> Token:
    """By id, or by a name that only one of the tokens that are seen has; raises TokenNameAmbiguous."""
    if not is_id(ref) and "\0" not in ref:
        ids = await queries.ids_by_name(call.session, ref, _seen(call))
        if len(ids) > 1:
            raise TokenNameAmbiguous(f"{len(ids)} tokens are called {ref}: take the id", ids=[*ids])
    return await call.load(Token, ref, seen=_seen(call))


def _seen(call: RequestContext) -> list[ColumnElement[bool]]:
    """Personal tokens by their person, project tokens by the project's admins."""
    if call.actor.is_operator:
        return []
    governed = [project for project, role in call.actor.roles.items() if role is Role.ADMIN]
    return [or_(Token.user_id == call.actor.user_id, Token.project_id.in_(governed))]
