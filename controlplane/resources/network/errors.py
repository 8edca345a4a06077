"""What can go wrong with networks."""

from __future__ import annotations

from controlplane.core.errors import Conflict, InvalidInput, NoCapacity, NotFound


class NetworkNotFound(NotFound):
    """There is no network with this name or id in the project."""

    code = "network.not_found"
    title = "No such network"


class NetworkNameTaken(Conflict):
    """The project has a network of this name already."""

    code = "network.name_taken"
    title = "The name is taken"
    constraint = "network_project_id_name_idx"


class NetworkCidrTaken(Conflict):
    """The prefix overlaps one that is in use somewhere in the deployment; leave it out to get a free one."""

    code = "network.cidr_taken"
    title = "The prefix is in use"
    constraint = "network_ipv4_cidr_excl"


class NetworkCidrOutsidePool(InvalidInput):
    """The prefix is not inside the operator's address pool; leave it out to get a free one."""

    code = "network.cidr_outside_pool"
    title = "The prefix lies outside the pool"


class NetworkPoolExhausted(NoCapacity):
    """The operator's pool has no free prefix of the usual size left."""

    code = "network.pool_exhausted"
    title = "No free prefix is left"


class NetworkFull(NoCapacity):
    """Every address of the network is held by a machine; make another network."""

    code = "network.full"
    title = "No free address is left in the network"


class NetworkFirewallUnknown(InvalidInput):
    """There is no firewall with this name or id in the project."""

    code = "network.firewall_unknown"
    title = "No such firewall"


class NetworkInUse(Conflict):
    """Machines or load balancers still have interfaces in the network, or a firewall's rule names it; delete those first."""

    code = "network.in_use"
    title = "The network is in use"


class NetworkEncryptionUnsupported(Conflict):
    """WireGuard runs on no host, neither in the kernel nor as `wireguard-go`. Adding a host again installs what is missing."""

    code = "network.encryption_unsupported"
    title = "No host can encrypt"


class NetworkDataUntrusted(Conflict):
    """Plain networks need a data interface, declared as trusted, on every host: `--data-interface` when the host is added."""

    code = "network.data_untrusted"
    title = "There is no trusted data network"
