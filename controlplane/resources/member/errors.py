"""Errors of members."""

from __future__ import annotations

from controlplane.core.errors import Conflict, NotFound


class MemberNotFound(NotFound):
    """No such member of this project; `bedplate member list` shows them."""

    code = "member.not_found"
    title = "No such member"


class MemberExists(Conflict):
    """The person is a member already; `bedplate member set` changes the role."""

    code = "member.exists"
    title = "Already a member"
    constraint = "member_project_id_user_id_key"


class MemberUserUnknown(NotFound):
    """No person has this name; an operator makes accounts with `bedplate user create`."""

    code = "member.user_unknown"
    title = "No such person"
