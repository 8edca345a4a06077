"""Changes of replicas. The one rule: a replica takes its share of a host and its address in the transaction that makes it."""

from __future__ import annotations

from sqlalchemy import func
from sqlalchemy.ext.asyncio import AsyncSession

from controlplane.core.ids import Kind, new_id
from controlplane.kernel import service as kernel
from controlplane.models.endpoint import Endpoint
from controlplane.models.firewall import FirewallRule
from controlplane.models.image import Image
from controlplane.models.replica import Replica
from controlplane.models.vm import Vm
from controlplane.resources.firewall import service as firewalls
from controlplane.resources.key.publish import publish
from controlplane.resources.model.plan import plan_of, workload
from controlplane.resources.network.queries import is_encrypted
from controlplane.resources.nic.service import allocate_nic
from controlplane.resources.vm.service import place
from controlplane.resources.volume.service import create_root, unplaced_bytes

PROGRAM = "replica"


async def create(session: AsyncSession, endpoint: Endpoint) -> tuple[Replica, Vm]:
    """A replica with its machine, placed or waiting (`vm.host_id` None, `vm.shortage` says why)."""
    replica_id = new_id(Kind.REPLICA)
    is_vm = endpoint.spec["isolation"] == "vm"
    image = await session.get_one(Image, str(endpoint.spec["guest_image_id" if is_vm else "engine_image_id"]))
    vm = _machine(endpoint, image, replica_id)
    vm.placement = {**vm.placement, "needs_tunnel": await is_encrypted(session, endpoint.network_id or "")}
    session.add(vm)
    await session.flush()
    replica = Replica(
        id=replica_id, project_id=endpoint.project_id, endpoint_id=endpoint.id, revision=endpoint.revision, vm_id=vm.id
    )
    session.add(replica)
    await session.flush()
    if is_vm:
        await create_root(session, vm, size_bytes=image.min_disk_bytes)
        vm.placement = {**vm.placement, "disks": {**await unplaced_bytes(session, vm.id)}}
    await place(session, vm, image.architecture)
    assert endpoint.network_id is not None
    await allocate_nic(session, endpoint.network_id, owner_id=vm.id, host_id=vm.host_id)
    await _open_port(session, endpoint, vm)
    await kernel.start(session, PROGRAM, replica.id, host_id=vm.host_id)
    return replica, vm


def _machine(endpoint: Endpoint, image: Image, replica_id: str) -> Vm:
    """A container's image is the engine's; a VM boots a guest's, and the engine's is the root of its workload."""
    spec = endpoint.spec
    described = workload(
        plan_of(spec),
        vcpus=endpoint.vcpus,
        weights_image_id=str(spec["weights_image_id"]),
        root_image_id="" if image.purpose == "engine" else str(spec["engine_image_id"]),
    )
    return Vm(
        id=new_id(Kind.VM),
        project_id=endpoint.project_id,
        name=f"{endpoint.name[:40].rstrip('-')}-{replica_id[-8:]}",
        owner_id=replica_id,
        image_id=image.id,
        workload=described,
        isolation=str(spec["isolation"]),
        vcpus=endpoint.vcpus,
        memory_bytes=endpoint.memory_bytes,
        applied_vcpus=endpoint.vcpus,
        applied_memory_bytes=endpoint.memory_bytes,
        placement={"needs_kvm": True} if spec.get("needs_kvm") else {},
        user=image.default_user,
        ssh_keys=[],
        on_guest_poweroff="restart",
    )


async def _open_port(session: AsyncSession, endpoint: Endpoint, vm: Vm) -> None:
    """Gateways may speak to the engine, and nobody else: the endpoint's own firewall says so."""
    port = (vm.workload or {})["port"]
    assert isinstance(port, int)
    rule = FirewallRule(
        direction="ingress", action="allow", protocol="tcp", port_first=port, port_last=port, far_end="gateways"
    )
    await firewalls.open_owned(
        session, owner_id=endpoint.id, project_id=endpoint.project_id, name=endpoint.name, rule=rule, vm_id=vm.id
    )


async def remove(session: AsyncSession, replica: Replica) -> None:
    """Begin to take it away: gateways stop sending to it at once. Doing it twice is once."""
    if replica.state != "deleting":
        replica.state, replica.deleting_at = "deleting", func.now()
        replica.generation += 1
        await kernel.start(session, PROGRAM, replica.id)
        await kernel.destroy(session, PROGRAM, replica.id)
        await publish(session, "routes")
