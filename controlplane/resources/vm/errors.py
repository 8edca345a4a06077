"""What can go wrong with VMs."""

from __future__ import annotations

from controlplane.core.errors import Conflict, Forbidden, InvalidInput, NoCapacity, NotFound


class VmNotFound(NotFound):
    """There is no VM with this name or id in the project."""

    code = "vm.not_found"
    title = "No such VM"


class VmNameTaken(Conflict):
    """The project has a VM of this name already; one that is being deleted counts until it is gone."""

    code = "vm.name_taken"
    title = "The name is taken"
    constraint = "vm_project_id_name_idx"


class VmNoCapacity(NoCapacity):
    """No host fits: `context` says what ran short on how many hosts. Nothing was made. Ask for less, or with
    `on_no_capacity: wait`.
    """

    code = "vm.no_capacity"


class VmProtected(Conflict):
    """The VM is protected from deletion; set `is_protected` to false first."""

    code = "vm.protected"
    title = "The VM is protected"


class VmDeleting(Conflict):
    """The VM is being deleted; nothing about it can be changed any more."""

    code = "vm.deleting"
    title = "The VM is being deleted"


class VmStopped(Conflict):
    """A VM that shall be stopped cannot be restarted; start it."""

    code = "vm.stopped"
    title = "The VM is stopped"


class VmDiskTooSmall(InvalidInput):
    """The root disk is smaller than the image needs."""

    code = "vm.disk_too_small"
    title = "The disk is too small for the image"


class VmMemoryTooSmall(InvalidInput):
    """The memory is less than the image boots with."""

    code = "vm.memory_too_small"
    title = "The memory is too small for the image"


class VmContainersNotAllowed(Forbidden):
    """Containers isolate less than VMs; an operator can allow them in the project (`allow_containers`)."""

    code = "vm.containers_not_allowed"
    title = "Containers are not allowed in this project"


class VmHostForbidden(Forbidden):
    """Only operators may choose the host."""

    code = "vm.host_forbidden"
    title = "Choosing the host is not allowed"


class VmHostUnknown(InvalidInput):
    """There is no host with this name or id."""

    code = "vm.host_unknown"
    title = "No such host"


class VmNetworkUnknown(InvalidInput):
    """There is no network with this name or id in the project."""

    code = "vm.network_unknown"
    title = "No such network"


class VmImageUnknown(InvalidInput):
    """There is no image with this name or id."""

    code = "vm.image_unknown"
    title = "No such image"


class VmSshKeyInvalid(InvalidInput):
    """An SSH key is not a public key in OpenSSH's form (`ssh-ed25519 AAAA… comment`)."""

    code = "vm.ssh_key_invalid"
    title = "The SSH key is not valid"


class VmIsolationUnsupported(InvalidInput):
    """A guest image brings a kernel and boots as a VM; containers run engine images, which endpoints use."""

    code = "vm.isolation_unsupported"
    title = "The image does not run in this isolation"
