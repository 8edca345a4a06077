"""The NoCloud seed of a machine: what its first boot reads. Rendering is pure: a wanted document in, three texts out.

The one rule: every text is block-style YAML with double-quoted strings, one value a line, so that cloud-init reads it and a
first-boot program without a YAML parser can read it line by line. A tenant's own `user_data` is never rewritten: then what
we have to say goes to `vendor-data`, which cloud-init merges under it.
"""

from __future__ import annotations

import json
from typing import Any

from hostagent.drivers.machine.vfat import vfat_image
from hostagent.protocol.wanted import NicWanted, SeedWanted, WorkloadWanted

GATEWAY_IPV4 = "169.254.1.1"
GATEWAY_IPV6 = "fe80::1"
LABEL = "CIDATA"
WORKLOAD = "workload.json"

Yaml = dict[str, Any] | list[Any] | str | int | bool


def render_seed(machine_id: str, seed: SeedWanted, nics: tuple[NicWanted, ...]) -> dict[str, str]:
    """The seed's files by name: `meta-data`, `network-config`, `user-data`, `vendor-data`."""
    ours = "#cloud-config\n" + render_yaml(_cloud_config(seed))
    return {
        "meta-data": render_yaml({"instance-id": machine_id, "local-hostname": seed.hostname}),
        "network-config": render_yaml(_network_config(nics, seed.nameservers)),
        "user-data": seed.user_data or ours,
        "vendor-data": ours if seed.user_data else "#cloud-config\n{}\n",
    }


def seed_image(seed: dict[str, str]) -> bytes:
    """The seed's files as a vfat disk image labelled CIDATA; the same files always make the same bytes."""
    return vfat_image(LABEL, {name: text.encode() for name, text in seed.items()})


def root_serial() -> str:
    """The serial number of the disk that holds a workload's root."""
    return "workload-root"


def mount_serial(index: int) -> str:
    """The serial number of the disk that is seen at the path of the workload's mount of this index."""
    return f"mount{index}"


def workload_text(workload: WorkloadWanted) -> str:
    """What the workload runner of our guest images reads: the command, and which disk is seen where, by serial number."""
    description = {
        "version": 1,
        "root": root_serial(),
        "mounts": [{"serial": mount_serial(index), "path": mount.path} for index, mount in enumerate(workload.mounts)],
        "argv": list(workload.argv),
        "env": workload.env,
        "secret_env": workload.secret_env,
        "port": workload.port,
        "health_path": workload.health_path,
    }
    return json.dumps(description, ensure_ascii=False, indent=1) + "\n"


def _cloud_config(seed: SeedWanted) -> dict[str, Yaml]:
    user: dict[str, Yaml] = {
        "name": seed.user,
        "lock_passwd": True,
        "shell": "/bin/bash",
        "sudo": "ALL=(ALL) NOPASSWD:ALL",
    }
    if seed.ssh_authorized_keys:
        user["ssh_authorized_keys"] = list(seed.ssh_authorized_keys)
    return {
        "hostname": seed.hostname,
        "manage_etc_hosts": True,
        "ssh_pwauth": False,
        "users": [user],
    }


def _network_config(nics: tuple[NicWanted, ...], nameservers: tuple[str, ...]) -> dict[str, Yaml]:
    """Version 2, static: the first nic carries the default routes; gateways are on the link, though in no subnet."""
    ethernets: dict[str, Yaml] = {}
    for index, nic in enumerate(nics):
        ethernet: dict[str, Yaml] = {
            "match": {"macaddress": nic.mac},
            "set-name": f"eth{index}",
            "mtu": nic.mtu_bytes,
            "dhcp4": False,
            "dhcp6": False,
            "accept-ra": False,
            "addresses": [f"{nic.ipv4}/32"] * bool(nic.ipv4) + [f"{nic.ipv6}/128"] * bool(nic.ipv6),
        }
        if index == 0:
            ethernet["routes"] = _default_routes(nic)
            if nameservers:
                ethernet["nameservers"] = {"addresses": list(nameservers)}
        ethernets[f"eth{index}"] = ethernet
    return {"version": 2, "ethernets": ethernets} if ethernets else {"version": 2}


def _default_routes(nic: NicWanted) -> list[Yaml]:
    routes: list[Yaml] = []
    if nic.ipv4:
        routes.append({"to": "0.0.0.0/0", "via": GATEWAY_IPV4, "on-link": True})
    if nic.ipv6:
        routes.append({"to": "::/0", "via": GATEWAY_IPV6, "on-link": True})
    return routes


def render_yaml(value: dict[str, Yaml]) -> str:
    """Block YAML of nested, non-empty dicts and lists; strings are quoted as JSON quotes them, which YAML reads alike."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Yaml) -> list[str]:
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            if isinstance(item, dict | list):
                lines += [f"{key}:", *(f"  {line}" for line in _lines(item))]
            else:
                lines.append(f"{key}: {json.dumps(item, ensure_ascii=False)}")
        return lines
    if isinstance(value, list):
        lines = []
        for item in value:
            first, *rest = _lines(item)
            lines += [f"- {first}", *(f"  {line}" for line in rest)]
        return lines
    return [json.dumps(value, ensure_ascii=False)]
