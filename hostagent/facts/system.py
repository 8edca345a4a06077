"""Operating system, programs, kernel features, foreign firewalls. The one rule: features are tried, not read off."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostagent.facts.sysfs import PROC, SYS, entries, text
from hostagent.lib.program import minimal_environment, run
from hostagent.protocol.errors import AgentError
from hostagent.protocol.facts import InterfaceFact, ProgramFact

PROGRAM_SECONDS = 5.0
_VERSION = re.compile(r"\d+(?:\.\d+)+")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "qemu-system-x86_64": ("--version",),
    "qemu-storage-daemon": ("--version",),
    "qemu-img": ("--version",),
    "runc": ("--version",),
    "cloud-hypervisor": ("--version",),
    "nft": ("--version",),
    "ip": ("-V",),
    "openssl": ("version",),
    "zstd": ("--version",),
    "wg": ("--version",),
    "wireguard-go": ("--version",),
}
# Tried in a network namespace of their own, so that nothing of the host changes.
_LINK_FEATURES = {
    "veth": ("veth", "peer", "name", "bp1"),
    "wireguard": ("wireguard",),
    "vxlan": ("vxlan", "id", "1", "dstport", "4789"),
}
_FLOWTABLE = "table inet bp_probe { flowtable f { hook ingress priority 0; devices = { lo }; }; }\n"
_DEVICES = {"tun": "/dev/net/tun", "vhost_net": "/dev/vhost-net", "vhost_vsock": "/dev/vhost-vsock", "vfio": "/dev/vfio/vfio"}
_FIREWALLS = {"dockerd": "docker", "firewalld": "firewalld", "podman": "podman", "kube-proxy": "kubernetes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPolicy:
    """A chain of somebody else that hooks `forward`; `is_drop`: what it does not accept is dropped, also machines' packets."""

    owner: str
    is_drop: bool


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    pairs = (line.partition("=") for line in text(path).splitlines() if "=" in line)
    return {name.strip(): value.strip().strip("\"'") for name, _, value in pairs}


def is_virtual_machine(sys: Path = SYS, proc: Path = PROC) -> bool:
    """By the CPU's hypervisor flag, or a product name that says so."""
    if "hypervisor" in processor_flags(proc):
        return True
    names = " ".join(text(sys / f"class/dmi/id/{name}") for name in ("sys_vendor", "product_name")).lower()
    return any(word in names for word in ("qemu", "kvm", "vmware", "virtualbox", "virtual machine", "xen", "bochs"))


def processor_flags(proc: Path = PROC) -> set[str]:
    """Of the first processor (`svm`, `vmx`, `hypervisor` …)."""
    line = next((line for line in text(proc / "cpuinfo").splitlines() if line.startswith("flags")), "")
    return set(line.partition(":")[2].split())


def supervisor() -> str:
    return "systemd" if Path("/run/systemd/system").is_dir() else "plain"


async def programs() -> tuple[ProgramFact, ...]:
    return tuple(await asyncio.gather(*(_program(name, flags) for name, flags in PROGRAMS.items())))


async def _program(name: str, flags: tuple[str, ...]) -> ProgramFact:
    path = shutil.which(name, path=minimal_environment()["PATH"])
    if path is None:
        return ProgramFact(name=name)
    try:
        finished = await run(path, *flags, deadline_seconds=PROGRAM_SECONDS, check=False)
    except AgentError:
        return ProgramFact(name=name, path=path)
    matched = _VERSION.search((finished.stdout + finished.stderr).decode(errors="replace"))
    return ProgramFact(name=name, path=path, version=matched[0] if matched else "unknown")


async def kernel_features() -> dict[str, bool]:
    """Each feature by trying it; False also where this process may not try."""
    features = {name: _opens(path) for name, path in _DEVICES.items()}
    tried = {
        name: _succeeds("unshare", "-n", "ip", "link", "add", "bp0", "type", *words) for name, words in _LINK_FEATURES.items()
    }
    tried["nftables"] = _succeeds("nft", "list", "tables")
    tried["flowtable"] = _succeeds("nft", "-c", "-f", "-", stdin=_FLOWTABLE.encode())
    tried["user_namespaces"] = _succeeds("unshare", "-U", "true")
    results = await asyncio.gather(*tried.values())
    features |= dict(zip(tried, results, strict=True))
    features["cgroup_v2"] = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    features["iommu"] = bool(entries(SYS / "class/iommu"))
    return features


async def interfaces() -> tuple[InterfaceFact, ...]:
    """All but loopback and the agent's own links."""
    facts = []
    for link in await _ip_json("addr"):
        name = link.get("ifname", "")
        if link.get("link_type") == "loopback" or name.startswith(("bp", "bq", "bw")):
            continue
        speed = text(SYS / f"class/net/{name}/speed")
        facts.append(
            InterfaceFact(
                name=name,
                mac=link.get("address", ""),
                mtu_bytes=link.get("mtu", 0),
                addresses=tuple(f"{a['local']}/{a['prefixlen']}" for a in link.get("addr_info", ()) if "local" in a),
                speed_mbit=int(speed) if speed.isdigit() else None,
            )
        )
    return tuple(facts)


async def forward_policies() -> tuple[ForwardPolicy, ...]:
    """Others' chains at the forward hook (nft sees those of iptables-nft too), and ufw, firewalld or Docker where they run."""
    found: dict[str, bool] = {}
    try:
        finished = await run("nft", "-j", "list", "chains", deadline_seconds=PROGRAM_SECONDS, check=False)
        listed: Any = json.loads(finished.stdout or b"{}").get("nftables", ())
    except (AgentError, ValueError):
        listed = ()
    for item in listed:
        chain = item.get("chain", {})
        if chain.get("hook") == "forward" and chain.get("table") != "bedplate":
            owner = f"{chain.get('family')} {chain.get('table')} {chain.get('name')}"
            found[owner] = chain.get("policy") == "drop"
    for name in _running_programs() & set(_FIREWALLS):
        found.setdefault(_FIREWALLS[name], True)
    if "ENABLED=yes" in text(Path("/etc/ufw/ufw.conf")):
        found["ufw"] = True
    return tuple(ForwardPolicy(owner=owner, is_drop=is_drop) for owner, is_drop in sorted(found.items()))


def _running_programs() -> set[str]:
    return {text(entry / "comm") for entry in entries(PROC) if entry.name.isdigit()}


async def _ip_json(*words: str) -> list[dict[str, Any]]:
    try:
        finished = await run("ip", "-j", *words, deadline_seconds=PROGRAM_SECONDS)
        return json.loads(finished.stdout or b"[]")
    except (AgentError, ValueError):
        return []


async def _succeeds(*argv: str, stdin: bytes = b"") -> bool:
    try:
        return (await run(*argv, stdin=stdin, deadline_seconds=PROGRAM_SECONDS, check=False)).returncode == 0
    except AgentError:
        return False


def _opens(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True
