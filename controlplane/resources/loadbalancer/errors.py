"""What can go wrong with load balancers."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NoCapacity, NotFound


class LoadbalancerNotFound(NotFound):
    """There is no load balancer with this name or id in the project."""

    code = "loadbalancer.not_found"
    title = "No such load balancer"


class LoadbalancerNameTaken(Conflict):
    """The project has a load balancer of this name already; one that drains counts until it is gone."""

    code = "loadbalancer.name_taken"
    title = "The name is taken"
    constraint = "loadbalancer_project_id_name_idx"


class LoadbalancerDeleting(Conflict):
    """It is being deleted; nothing about it can be changed any more."""

    code = "loadbalancer.deleting"
    title = "The load balancer is being deleted"


class LoadbalancerLimitReached(NoCapacity):
    """The project has as many load balancers as the operator lets it (`BEDPLATE_LIMITS__LOADBALANCERS`)."""

    code = "loadbalancer.limit_reached"
    title = "No more load balancers in this project"


class LoadbalancerNetworkUnknown(InvalidInput):
    """There is no network with this name or id in the project."""

    code = "loadbalancer.network_unknown"
    title = "No such network"


class LoadbalancerAddressUnknown(InvalidInput):
    """The project has reserved no address of this name or id."""

    code = "loadbalancer.address_unknown"
    title = "No such address"


class LoadbalancerAddressInUse(Conflict):
    """The address is attached to something else; move it with `address attach`."""

    code = "loadbalancer.address_in_use"
    title = "The address is attached already"


class LoadbalancerNoAddress(InvalidInput):
    """It would serve nowhere: name a reserved address (`addresses`), a network of the project (`network`), or both."""

    code = "loadbalancer.no_address"
    title = "The load balancer would have no address"


class LoadbalancerBackendUnknown(InvalidInput):
    """The project has no VM, endpoint or interface like this."""

    code = "loadbalancer.backend_unknown"
    title = "No such backend in the project"


class LoadbalancerBackendTaken(Conflict):
    """It is a backend of this load balancer already."""

    code = "loadbalancer.backend_taken"
    title = "The backend is there already"
    constraint = "loadbalancer_backend_loadbalancer_id_nic_id_endpoint_id_key"


class LoadbalancerBackendNotFound(NotFound):
    """The load balancer has no such backend."""

    code = "loadbalancer.backend_not_found"
    title = "No such backend"


class LoadbalancerTooManyBackends(Conflict):
    """A load balancer holds at most 251 backends."""

    code = "loadbalancer.too_many_backends"
    title = "The load balancer is full"


class LoadbalancerListenerTaken(Conflict):
    """Two listeners have the same protocol and port."""

    code = "loadbalancer.listener_taken"
    title = "The port is taken"
