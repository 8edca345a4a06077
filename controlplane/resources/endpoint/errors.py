"""Errors of endpoints."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NoCapacity, NotFound


class EndpointNotFound(NotFound):
    """No such endpoint in this project; `bedplate endpoint list` shows them."""

    code = "endpoint.not_found"
    title = "No such endpoint"


class EndpointNameTaken(Conflict):
    """Another endpoint of the project has this name."""

    code = "endpoint.name_taken"
    title = "The name is taken"
    constraint = "endpoint_project_id_name_idx"


class EndpointAutoscaled(Conflict):
    """The autoscaler decides on the number of replicas; change its bounds, or set `autoscale` to null."""

    code = "endpoint.autoscaled"
    title = "The autoscaler decides on the replicas"


class EndpointDeleting(Conflict):
    """The endpoint is being deleted; it takes no changes any more."""

    code = "endpoint.deleting"
    title = "The endpoint is being deleted"


class EndpointRollingOut(Conflict):
    """Another revision is being rolled out: `endpoint promote`, `endpoint rollback`, or wait until it is done."""

    code = "endpoint.rolling_out"
    title = "A roll-out goes on"


class EndpointNotRollingOut(Conflict):
    """There is no roll-out to promote."""

    code = "endpoint.not_rolling_out"
    title = "No roll-out goes on"


class EndpointNoEarlierRevision(Conflict):
    """There is no earlier revision that served; `bedplate endpoint revisions` lists them."""

    code = "endpoint.no_earlier_revision"
    title = "Nothing to go back to"


class EndpointNetworkUnknown(InvalidInput):
    """`network` names no network of this project."""

    code = "endpoint.network_unknown"
    title = "No such network"


class EndpointIsolationUnsupported(InvalidInput):
    """The model's engine does not run in this isolation class; the detail names those it runs in."""

    code = "endpoint.isolation_unsupported"
    title = "The engine does not run so"


class EndpointContainersNotAllowed(Conflict):
    """The replica would be a container, and the project's policy does not allow containers (`allow_containers`)."""

    code = "endpoint.containers_not_allowed"
    title = "Containers are not allowed here"


class EndpointNotAccelerated(Conflict):
    """No host has usable KVM, so a VM would be emulated: ask for `isolation: vm` by name to have that, or allow containers."""

    code = "endpoint.not_accelerated"
    title = "VMs would be emulated here"


class EndpointGuestMissing(Conflict):
    """Replicas in VMs need a guest image that runs workloads: build ours (`python -m provisioning.images build`) and
    `bedplate image import` it.
    """

    code = "endpoint.guest_missing"
    title = "There is no guest image for replicas"


class EndpointMemoryTooSmall(InvalidInput):
    """`memory_bytes` is less than weights, cache and engine need; the detail says the sum."""

    code = "endpoint.memory_too_small"
    title = "The memory does not suffice"


class EndpointNoCapacity(NoCapacity):
    """The replicas do not fit; the context says what ran short on how many hosts. Nothing was made."""

    code = "endpoint.no_capacity"
    title = "No capacity for the replicas"
