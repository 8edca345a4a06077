"""From a machine plan to runc's configuration. Pure.

The one rule: nothing inside is the host's root (own user namespace), nothing gains a right it was not started with (no
capabilities, no new privileges), and what the host shares is read-only. Source: OCI runtime specification 1.0.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hostagent.drivers.machine.protocol import MachinePlan
from hostagent.drivers.network.protocol import HOST_IPV4, HOST_IPV6, HOST_MAC
from hostagent.protocol.errors import AgentError
from hostagent.protocol.wanted import WorkloadWanted

USER = 1000
CPU_PERIOD_MICROSECONDS = 100_000
TASKS = 4096
SHM_BYTES = 256 << 20
TMP_BYTES = 256 << 20
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SEED_TARGET = "/var/lib/cloud/seed/nocloud"

# What no workload needs and what has carried escapes: namespaces, mounts, modules, tracing, keyrings, raw clocks, io_uring.
DENIED_CALLS = (
    *("acct", "add_key", "adjtimex", "bpf", "chroot", "clock_adjtime", "clock_settime", "create_module", "delete_module"),
    *("fanotify_init", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module", "io_uring_enter"),
    *("io_uring_register", "io_uring_setup", "ioperm", "iopl", "kcmp", "kexec_file_load", "kexec_load", "keyctl"),
    *("lookup_dcookie", "mount", "mount_setattr", "move_mount", "name_to_handle_at", "nfsservctl", "open_by_handle_at"),
    *("open_tree", "perf_event_open", "pivot_root", "process_vm_readv", "process_vm_writev", "ptrace", "query_module"),
    *("quotactl", "quotactl_fd", "reboot", "request_key", "setdomainname", "sethostname", "setns", "settimeofday", "stime"),
    *("swapoff", "swapon", "syslog", "umount", "umount2", "unshare", "uselib", "userfaultfd", "ustat", "vhangup", "vm86"),
)
EPERM, ENOSYS = 1, 38
NAMESPACE_FLAGS = 0x7E020000  # CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}


def bundle_config(plan: MachinePlan, root: Path) -> dict[str, Any]:
    """The config.json of runc; holds the workload's secrets. Raises AgentError `vm.unsupported`."""
    workload = plan.vm.workload
    if workload is None or not workload.argv:
        raise AgentError("vm.unsupported", "a container needs a workload: a command to run", retryable=False)
    if plan.disks:
        raise AgentError("vm.unsupported", "a container takes no disks", retryable=False)
    return {
        "ociVersion": "1.0.2",
        "hostname": plan.vm.seed.hostname,
        "root": {"path": str(root), "readonly": False},
        "process": _process(workload),
        "mounts": _mounts(plan),
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "user", "cgroup")],
            "uidMappings": [{"containerID": 0, "hostID": plan.uid, "size": plan.uid_count}],
            "gidMappings": [{"containerID": 0, "hostID": plan.gid, "size": plan.uid_count}],
            "cgroupsPath": f"/bedplate/{plan.vm.id}",
            "resources": {
                "memory": {"limit": plan.vm.memory_bytes},
                "cpu": {"quota": plan.vm.vcpus * CPU_PERIOD_MICROSECONDS, "period": CPU_PERIOD_MICROSECONDS},
                "pids": {"limit": TASKS},
            },
            "seccomp": seccomp_profile(),
            "maskedPaths": [
                *("/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi"),
                *("/proc/timer_list", "/proc/timer_stats", "/sys/firmware", "/sys/devices/virtual/net", "/sys/kernel/debug"),
            ],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def seccomp_profile() -> dict[str, Any]:
    """Everything but DENIED_CALLS and new namespaces; clone3 hides its flags, so it answers ENOSYS and libc takes clone."""
    rules: list[dict[str, Any]] = [
        {"names": list(DENIED_CALLS), "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM},
        {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS},
    ]
    for flag in (1 << bit for bit in range(32)):
        if flag & NAMESPACE_FLAGS:  # a filter tests a masked argument for equality, so every flag by itself
            test = {"index": 0, "value": flag, "valueTwo": flag, "op": "SCMP_CMP_MASKED_EQ"}
            rules.append({"names": ["clone"], "action": "SCMP_ACT_ERRNO", "errnoRet": EPERM, "args": [test]})
    architectures = ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]
    return {"defaultAction": "SCMP_ACT_ALLOW", "architectures": architectures, "syscalls": rules}


def network_setup(plan: MachinePlan) -> list[dict[str, Any]]:
    """For the starter: the far ends of the veths and the lines that `ip -batch` makes of them, inside the namespace."""
    return [
        {"interface": nic.interface, "peer": nic.peer, "lines": _nic_lines(index, plan)} for index, nic in enumerate(plan.nics)
    ]


def _nic_lines(index: int, plan: MachinePlan) -> list[str]:
    attachment = plan.nics[index]
    nic, name = attachment.nic, f"eth{index}"
    lines = [f"link set dev {attachment.peer} name {name}", f"link set dev {name} address {nic.mac} mtu {nic.mtu_bytes} up"]
    for address, length, gateway, family in ((nic.ipv4, 32, HOST_IPV4, "-4"), (nic.ipv6, 128, HOST_IPV6, "-6")):
        if not address:
            continue
        lines.append(f"address add {address}/{length} dev {name}" + (" nodad" if family == "-6" else ""))
        lines.append(f"neighbour replace {gateway} lladdr {HOST_MAC} dev {name} nud permanent")
        if index == 0:
            lines.append(f"route add default via {gateway} dev {name} onlink")
    return lines


def _process(workload: WorkloadWanted) -> dict[str, Any]:
    environment = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8"} | workload.env | workload.secret_env
    return {
        "terminal": False,
        "user": {"uid": USER, "gid": USER, "umask": 0o022},
        "cwd": "/",
        "args": list(workload.argv),
        "env": [f"{name}={value}" for name, value in environment.items()],
        "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted", "inheritable", "ambient")},
        "noNewPrivileges": True,
    }


def _mounts(plan: MachinePlan) -> list[dict[str, Any]]:
    mounts = [
        _mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
        _mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=64k"),
        _mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"),
        _mount("/dev/shm", "tmpfs", "shm", "nosuid", "noexec", "nodev", "mode=1777", f"size={SHM_BYTES}"),
        _mount("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev"),
        _mount("/tmp", "tmpfs", "tmpfs", "nosuid", "nodev", "mode=1777", f"size={TMP_BYTES}"),
        # a network namespace that another user namespace owns cannot carry a sysfs of its own
        _mount("/sys", "none", "/sys", "rbind", "nosuid", "noexec", "nodev", "ro"),
    ]
    bound = [(plan.run_directory / name, target) for name, target in host_files()]
    if plan.seed:
        bound.append((plan.run_directory / "seed", SEED_TARGET))
    bound += [(mount.source, mount.path) for mount in plan.mounts]
    mounts += [_mount(target, "none", str(source), "rbind", "nosuid", "nodev", "ro") for source, target in bound]
    return mounts


def host_files() -> tuple[tuple[str, str], ...]:
    """(name in the run directory, place inside) of the files that tell the machine who it is."""
    return (("hostname", "/etc/hostname"), ("hosts", "/etc/hosts"), ("resolv.conf", "/etc/resolv.conf"))


def host_file_texts(plan: MachinePlan) -> dict[str, str]:
    name = plan.vm.seed.hostname
    hosts = ["127.0.0.1 localhost", "::1 localhost"]
    hosts += [f"{address} {name}" for nic in plan.nics for address in (nic.nic.ipv4, nic.nic.ipv6) if address]
    return {
        "hostname": f"{name}\n",
        "hosts": "".join(f"{line}\n" for line in hosts),
        "resolv.conf": "".join(f"nameserver {server}\n" for server in plan.vm.seed.nameservers),
    }


def _mount(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}
