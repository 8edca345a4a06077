"""What can go wrong with reserved addresses."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NoCapacity, NotFound


class AddressNotFound(NotFound):
    """There is no address with this name or id in the project."""

    code = "address.not_found"
    title = "No such address"


class AddressNameTaken(Conflict):
    """The project has an address of this name already."""

    code = "address.name_taken"
    title = "The name is taken"
    constraint = "address_project_id_name_idx"


class AddressTaken(Conflict):
    """The very address that was asked for is reserved already; leave it out to get a free one."""

    code = "address.taken"
    title = "The address is reserved"
    constraint = "address_address_key"


class AddressOutsidePool(InvalidInput):
    """The address that was asked for lies in no pool (or not in that one), or is excluded from it."""

    code = "address.outside_pool"
    title = "The address lies outside the pool"


class AddressPoolUnknown(InvalidInput):
    """There is no pool with this name or id, or none of the family that was asked for."""

    code = "address.pool_unknown"
    title = "No such pool"


class AddressPoolExhausted(NoCapacity):
    """Every address of the pools of this family is reserved."""

    code = "address.pool_exhausted"
    title = "No free address is left"


class AddressLimitReached(NoCapacity):
    """The project has as many addresses as the operator lets it (`BEDPLATE_LIMITS__ADDRESSES`)."""

    code = "address.limit_reached"
    title = "No more addresses in this project"


class AddressAttached(Conflict):
    """It is attached to something else; detach it, or ask with `move`."""

    code = "address.attached"
    title = "The address is attached already"


class AddressInUse(Conflict):
    """It is attached; detach it before it is released."""

    code = "address.in_use"
    title = "The address is in use"


class AddressTargetUnknown(InvalidInput):
    """There is no VM or load balancer with this name or id in the project."""

    code = "address.target_unknown"
    title = "Nothing to attach the address to"


class AddressFamilyTaken(Conflict):
    """The VM has a reserved address of this family already."""

    code = "address.family_taken"
    title = "The VM has such an address already"
    constraint = "address_vm_id_family_idx"
