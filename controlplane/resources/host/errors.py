"""Errors of hosts."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NotFound, Unavailable


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
    """Machines, volumes or snapshots are still on the host. Drain it, move or delete them, then remove it."""

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


class ArtifactUnknown(NotFound):
    """The list of artifacts has none of this name that the control plane would ship."""

    code = "host.artifact_unknown"
    title = "No such artifact"


class ArtifactMismatch(InvalidInput):
    """What arrived is not the file that was meant: another file, or half of it. Send it again."""

    code = "host.artifact_mismatch"
    title = "The artifact has another digest"


class ArtifactWrongArchitecture(InvalidInput):
    """The file was built for another architecture, or is no program."""

    code = "host.artifact_wrong_architecture"
    title = "The artifact is for another architecture"


class ArtifactTooLarge(InvalidInput):
    """The file is larger than any artifact may be."""

    code = "host.artifact_too_large"
    title = "The artifact is too large"


class ArtifactUnreachable(Unavailable):
    """The artifact's source does not answer. Give the file by `--artifact-dir`."""

    code = "host.artifact_unreachable"
    title = "The artifact cannot be fetched"
