"""`/v1/tokens`: bearer tokens of operators and project members."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.models.token import Token
from controlplane.resources.project.errors import ProjectNotFound
from controlplane.resources.token import service
from controlplane.resources.token.errors import TokenExpiryInvalid, TokenNameTaken, TokenNotFound, TokenRoleInvalid
from controlplane.resources.token.schemas import TokenCreate, TokenCreated, TokenView

noun = Noun("token", "tokens", in_project=False, has_operations=False)
router = noun.router


@noun.create(TokenCreated, errors=[TokenNameTaken, TokenRoleInvalid, TokenExpiryInvalid, ProjectNotFound])
async def create(call: Call, body: TokenCreate) -> TokenCreated:
    """Make a bearer token; its plain text is in this answer only."""
    made = await service.create(call.session, **body.model_dump(), now=call.services.clock.now())
    call.subject = made.row
    return TokenCreated(**TokenView.model_validate(made.row).model_dump(), secret=made.secret)


@noun.list(TokenView)
async def list_(call: Call, page: Page) -> PageOf[Token]:
    """List the tokens of the deployment; never their plain text."""
    return await call.page(Token, page, fields=["role", "project_id", "expires_at"])


@noun.route("GET", "/current", "current", TokenView)
async def current(call: Call) -> Token:
    """Show the token of this request: who am I."""
    return await call.load(Token, call.actor.id)


@noun.show(TokenView, errors=[TokenNotFound])
async def show(call: Call, token: Ref) -> Token:
    """Show one token; never its plain text."""
    return await call.load(Token, token)


@noun.delete(TokenView)
async def delete(call: Call, token: Ref) -> None:
    """Revoke a token: the next request with it is refused."""
    await call.session.delete(await call.load(Token, token))
