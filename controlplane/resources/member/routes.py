"""`/v1/projects/{project}/members`: who has which role there."""

from __future__ import annotations

from controlplane.api.frame import Call, Noun, Page, PageOf, Ref
from controlplane.core.errors import FieldError
from controlplane.core.ids import Kind, is_id, new_id
from controlplane.models.member import Member
from controlplane.resources.member.errors import MemberExists, MemberNotFound, MemberUserUnknown
from controlplane.resources.member.schemas import MemberCreate, MemberUpdate, MemberView
from controlplane.resources.user import queries as users

noun = Noun("member", "members", has_operations=False)
router = noun.router


@noun.create(MemberView, errors=[MemberExists, MemberUserUnknown])
async def create(call: Call, body: MemberCreate) -> Member:
    """Give a person a role in this project."""
    user = await users.by_ref(call.session, body.user)
    if user is None:
        wrong = FieldError(pointer="/user", detail=f"no person {body.user}")
        raise MemberUserUnknown(wrong.detail, errors=(wrong,))
    row = Member(id=new_id(Kind.MEMBER), project_id=call.project_id, user_id=user.id, role=body.role)
    row.user = user
    call.session.add(row)
    await call.session.flush()
    return row


@noun.list(MemberView)
async def list_(call: Call, page: Page) -> PageOf[Member]:
    """List the members of this project."""
    return await call.page(Member, page, fields=["role", "user_id"])


@noun.show(MemberView, errors=[MemberNotFound])
async def show(call: Call, member: Ref) -> Member:
    """Show one member; takes the person's name too."""
    return await _member(call, member)


@noun.update(MemberView, errors=[MemberNotFound])
async def update(call: Call, member: Ref, body: MemberUpdate) -> Member:
    """Change a member's role, from the next request on."""
    row = await _member(call, member)
    row.role = body.role
    return row


@noun.delete(MemberView)
async def delete(call: Call, member: Ref) -> None:
    """Take a person out of this project, from the next request on."""
    await call.session.delete(await _member(call, member))


async def _member(call: Call, ref: str) -> Member:
    """The member with this id, or whose person has this name or id."""
    if not is_id(ref, Kind.MEMBER):
        user = await users.by_ref(call.session, ref)
        found = None if user is None else await users.member_id(call.session, call.project_id, user.id)
        ref = found or ref
    return await call.load(Member, ref)
