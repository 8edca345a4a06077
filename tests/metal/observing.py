"""What a server with systemd has become: everything that enrolment could touch, as one document to compare."""

from __future__ import annotations

import json
from typing import Any

from provisioning.lab.metal import MetalHost

SNAPSHOT = """
import hashlib, json, os, pathlib, subprocess
TOPS = ("/etc", "/opt", "/root", "/home", "/usr/local", "/usr/lib/systemd", "/var/lib", "/srv", "/tmp", "/run")
SKIPPED = ("/var/lib/dpkg", "/var/lib/apt", "/var/lib/systemd", "/run/systemd", "/run/udev", "/run/log", "/run/user",
           "/run/sudo", "/run/mount", "/run/lock", "/run/sshd.pid",
           "/usr/local/lib/python3.11", "/root/.lesshst", "/tmp/systemd-private")
found = {}
for top in TOPS:
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if not os.path.join(directory, name).startswith(SKIPPED) and name != "__pycache__"]
        for name in (*names, *files):
            path = pathlib.Path(directory, name)
            if str(path).startswith(SKIPPED):
                continue
            status = path.lstat()
            said = f"{status.st_mode:o} {status.st_uid}:{status.st_gid}"
            if path.is_symlink():
                said += " -> " + os.readlink(path)
            elif path.is_file():
                said += " " + hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path)] = said
for name in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"):
    found["sysctl " + name] = pathlib.Path("/proc/sys/" + name.replace(".", "/")).read_text().strip()
PROGRAMS = {
    "packages": ["dpkg-query", "-W"], "chosen packages": ["apt-mark", "showmanual"], "nft": ["nft", "list", "ruleset"],
    "unit files": ["systemctl", "list-unit-files", "--no-legend", "--plain"], "links": ["ip", "-br", "link"],
    "routes": ["ip", "route", "show", "table", "all"], "rules": ["ip", "rule"], "users": ["getent", "passwd"],
    "groups": ["getent", "group"], "units": ["systemctl", "list-units", "--all", "--no-legend", "--plain", "bedplate*"],
    "failed units": ["systemctl", "list-units", "--failed", "--no-legend", "--plain"],
    "names": ["find", "/etc", "/var", "/run", "/opt", "/srv", "-name", "*bedplate*"],
    "programs": ["ps", "-N", "--ppid", "2", "-eo", "args"],
}
for name, argv in PROGRAMS.items():
    lines = subprocess.run(argv, capture_output=True, text=True).stdout.split("\\n")
    found[name] = sorted({line.strip() for line in lines if "proto kernel" not in line})
found["programs"] = [line for line in found["programs"] if line.startswith("/") and "systemd-" not in line]
found["cgroups"] = [str(path) for path in pathlib.Path("/sys/fs/cgroup").rglob("*bedplate*") if path.is_dir()]
print(json.dumps(found))
"""


def snapshot(host: MetalHost) -> dict[str, Any]:
    return json.loads(host.exec(["python3", "-I", "-c", SNAPSHOT], timeout=120).stdout)
