"""Who an identity provider says one is, and what that gives here. The one rule: the provider proves who comes; what they may do
is given by a role here, or by a group that the settings name.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from dataclasses import asdict

from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core import json
from controlplane.core.ids import Kind, new_id
from controlplane.core.sealing import SealBroken, Sealer
from controlplane.identity.errors import SsoRefused
from controlplane.identity.oidc import Claims, Flow
from controlplane.models.member import Member
from controlplane.models.user import User
from controlplane.resources.session import queries
from controlplane.settings import OidcSettings

FLOW_SECONDS = 600

_CONTEXT = "sso.flow"
_NAME = re.compile(r"[a-z0-9]([a-z0-9._@+-]{0,126}[a-z0-9])?")
_RANK = {"viewer": 1, "editor": 2, "admin": 3}
_OPERATOR = "operator"
_log = logging.getLogger(__name__)


def sealed(sealer: Sealer, flow: Flow) -> str:
    """What the browser keeps meanwhile."""
    body = json.dumps({**asdict(flow), "until": time.time() + FLOW_SECONDS})
    return sealer.seal(body, context=_CONTEXT).hex()


def opened(sealer: Sealer, cookie: str | None, state: str) -> Flow:
    """The sign-in that this browser began with this state; raises SsoRefused."""
    try:
        body = json.loads(sealer.open(bytes.fromhex(cookie or ""), context=_CONTEXT))
    except (ValueError, SealBroken) as error:
        raise SsoRefused("this browser has begun no sign-in by the provider") from error
    assert isinstance(body, dict)
    until = body.pop("until")
    flow = Flow(**body)  # pyright: ignore[reportArgumentType] - sealed by us
    if flow.state != state or time.time() > float(str(until)):
        raise SsoRefused("this is not the sign-in that the browser began, or it took longer than ten minutes")
    return flow


def own_path(text: str) -> str:
    """A path of the console, whatever was asked for."""
    return text if re.fullmatch(r"/(?![/\\])[\x21-\x7e]{0,1000}", text) else "/"


async def person(session: AsyncSession, settings: OidcSettings, claims: Claims) -> tuple[User, bool]:
    """The account of who comes, locked, and whether it was linked or made just now; raises SsoRefused."""
    await queries.lock_sso(session)
    user = await queries.by_subject(session, claims.issuer, claims.subject)
    is_new = user is None
    if user is None:
        name = claims.email if claims.email and _NAME.fullmatch(claims.email) else _plain_name(claims)
        user = await queries.by_name(session, name)
        if user is not None and not (settings.links_by_email and claims.email == name and user.sso_subject is None):
            raise SsoRefused(f"an account {name} is here already, and is not linked to the provider's")
        if user is None:
            if not settings.creates_people:
                raise SsoRefused("an operator makes accounts here; yours is not made yet")
            user = User(id=new_id(Kind.USER), name=name, display_name=claims.name)
            session.add(user)
        user.sso_issuer, user.sso_subject = claims.issuer, claims.subject
    if user.is_disabled:
        raise SsoRefused("the account is disabled")
    await session.flush()
    return user, is_new


def _plain_name(claims: Claims) -> str:
    """A name for who comes without a verified address: nobody is called by what they merely say."""
    return f"sso-{hashlib.sha256(f'{claims.issuer} {claims.subject}'.encode()).hexdigest()[:16]}"


async def give_roles(session: AsyncSession, settings: OidcSettings, user: User, groups: frozenset[str]) -> dict[str, str]:
    """What the person's groups give, in everything that any group gives; what changed, by project or `operator`."""
    named = {target for targets in settings.groups.values() for target in targets}
    given = {target for group in groups for target in settings.groups.get(group, [])}
    changed: dict[str, str] = {}
    if _OPERATOR in named and user.is_operator != (_OPERATOR in given):
        user.is_operator = _OPERATOR in given
        changed[_OPERATOR] = str(user.is_operator).lower()
    for ref in sorted({target.partition(":")[0] for target in named} - {_OPERATOR}):
        project = await queries.project(session, ref)
        if project is None:
            _log.warning("oidc.groups names the project %s, which is not there", ref)
            continue
        roles = [role for name, _, role in (target.partition(":") for target in given) if name == ref]
        role = max(roles, key=lambda item: _RANK[item], default=None)
        if await _is_changed(session, project.id, user, role):
            changed[project.id] = role or "none"
    return changed


async def _is_changed(session: AsyncSession, project_id: str, user: User, role: str | None) -> bool:
    member = await queries.member(session, project_id, user.id)
    if (member is None and role is None) or (member is not None and member.role == role):
        return False
    if member is None:
        assert role is not None
        session.add(Member(id=new_id(Kind.MEMBER), project_id=project_id, user_id=user.id, role=role))
    elif role is None:
        await session.delete(member)
    else:
        member.role, member.generation = role, member.generation + 1
    await session.flush()
    return True
