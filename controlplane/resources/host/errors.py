"""Errors of hosts."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound


class HostNotFound(NotFound):
    """No such host; `bedplate host list` shows those there are."""

    code = "host.not_found"
    title = "No such host"


class HostNameTaken(Conflict):
    """Another host has this name. To repair a host, give the address it was added with."""

    code = "host.name_taken"
    title = "The name is taken"
    constraint = "host_name_key"


class HostAddressTaken(Conflict):
    """A host with this address and port was added under another name."""

    code = "host.address_taken"
    title = "The host is there already"
    constraint = "host_address_key"


class HostNotEmpty(Conflict):
    """Machines still live on the host. Drain it, move or delete them, then remove it."""

    code = "host.not_empty"
    title = "The host is not empty"


class HostIsRemoving(Conflict):
    """The host is being removed; wait until it is gone."""

    code = "host.removing"
    title = "The host is being removed"


class HostNotReady(Conflict):
    """Only a host that is enrolled can do that; `bedplate host show` says what it waits for."""

    code = "host.not_ready"
    title = "The host is not ready"


class HostNameReserved(InvalidInput):
    """The name is a word of the API."""

    code = "host.name_reserved"
    title = "The name is reserved"


class IdentityInvalid(InvalidInput):
    """The identity is not an unencrypted OpenSSH or PEM private key."""

    code = "host.identity_invalid"
    title = "The identity cannot be used"
