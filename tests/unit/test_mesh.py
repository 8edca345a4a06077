"""Which hosts are told of each other: those with machines of one project, and who serves machines of all."""

from __future__ import annotations

from controlplane.resources.network.mesh import Member, Mesh
from hostagent.protocol.wanted import Generation


def member(number: int, *, encrypted: str = "", plain: str = "", serves_all: bool = False) -> Member:
    """`encrypted`, `plain`: the projects, a letter each, of which it has a machine."""
    return Member(
        host_id=f"h{number}",
        underlay=(f"192.0.2.{number}", ""),
        own=(f"10.255.0.{number}", f"fd00:ff::{number}"),
        keys={1: f"key{number}"},
        encrypted=tuple(f"10.{number}.{place}.1/32" for place in range(len(encrypted))),
        plain=tuple(f"10.9.{number}.{place}/32" for place in range(len(plain))),
        projects=frozenset(encrypted + plain),
        encrypted_projects=frozenset(encrypted),
        serves_all=serves_all,
    )


def peers(*members: Member) -> dict[str, set[str]]:
    mesh = Mesh(members={one.host_id: one for one in members})
    told = {one.host_id: mesh.tunnel(one.host_id, Generation(epoch=1, number=1)).peers for one in members}
    return {host: {peer.host_id for peer in found} for host, found in told.items()}


def test_hosts_that_share_a_project_are_peers_and_others_are_not() -> None:
    assert peers(member(1, encrypted="p"), member(2, encrypted="pq"), member(3, encrypted="q"), member(4)) == {
        "h1": {"h2"},
        "h2": {"h1", "h3"},
        "h3": {"h2"},
        "h4": set(),
    }


def test_an_edge_is_a_peer_of_every_host_with_encrypted_machines() -> None:
    found = peers(member(1, encrypted="p"), member(2, plain="p"), member(3, serves_all=True), member(4, serves_all=True))
    assert found == {"h1": {"h2", "h3", "h4"}, "h2": {"h1"}, "h3": {"h1"}, "h4": {"h1"}}


def test_a_host_without_a_peer_is_sent_nothing_of_its_machines() -> None:
    """Nor in the clear: the prefix of their network is unreachable there."""
    mesh = Mesh(members={"h1": member(1, encrypted="p"), "h2": member(2, encrypted="q")}, prefixes=("10.1.0.0/16",))
    wanted = mesh.routes("h2", Generation(epoch=1, number=1))
    assert (wanted.routes, wanted.unreachable_cidrs) == ((), ("10.1.0.0/16",))


def test_a_new_neighbour_changes_what_is_told_and_a_strange_one_does_not() -> None:
    def digest(*others: Member) -> str:
        mesh = Mesh(members={one.host_id: one for one in (member(1, encrypted="p"), *others)})
        return mesh.tunnel_digest("h1", {host: one.digest() for host, one in mesh.members.items()})

    assert digest() == digest(member(2, encrypted="q"))
    assert digest() != digest(member(2, encrypted="p"))
