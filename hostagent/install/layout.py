"""What an installed agent consists of, as texts and paths. Pure: data in, files out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hostagent.lib.paths import Paths

USER = "bedplate"
PYTHON = "/usr/bin/python3"
SYSTEMD_UNIT = "bedplate-agent.service"
SUPERVISOR_UNIT = "bedplate-supervisor"
AGENT_UNIT = "bedplate-agent"
SYSCTL_FILE = Path("/etc/sysctl.d/90-bedplate.conf")
SYSTEMD_DIRECTORY = Path("/etc/systemd/system")
MODULES_FILE = Path("/etc/modules-load.d/90-bedplate.conf")
FORWARDING = {"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1"}

_SYSTEMD_TEXT = """\
[Unit]
Description=Bedplate host agent
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
TimeoutStartSec=300
ExecStart={command}
Restart=always
RestartSec=1
KillMode=process
RuntimeDirectory=bedplate
RuntimeDirectoryPreserve=yes

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where one version of the agent lies. `digest` is the file's sha256."""

    paths: Paths
    digest: str

    @property
    def version_directory(self) -> Path:
        return self.paths.programs / "agent" / self.digest

    @property
    def file(self) -> Path:
        return self.version_directory / "agent.pyz"

    @property
    def current(self) -> Path:
        return self.paths.programs / "agent" / "current"

    @property
    def home(self) -> Path:
        """Of the login user. It belongs to root, so that the user cannot change its own keys."""
        return self.paths.state / "login"

    @property
    def backups(self) -> Path:
        """Copies of /etc/passwd- and its like from before our user."""
        return self.paths.state / "accounts"

    @property
    def authorized_keys(self) -> Path:
        return self.home / ".ssh" / "authorized_keys"

    @property
    def manifest(self) -> Path:
        return self.paths.state / "install.json"

    def face(self, name: str) -> list[str]:
        return [PYTHON, "-I", str(self.current / "agent.pyz"), name]

    def authorized_keys_text(self, public_key: str) -> str:
        kind, body = public_key.split()[:2]
        return f'restrict,command="{" ".join(self.face("dispatch"))}" {kind} {body} bedplate\n'

    def systemd_text(self) -> str:
        return _SYSTEMD_TEXT.format(command=" ".join(self.face("serve")))

    def plain_units(self) -> dict[Path, str]:
        """For a host whose pid 1 starts what stands in /etc/bedplate/units.d and reads it again at SIGHUP.

        The agent's unit names its version, so that another version is started anew and the supervisor is left alone.
        """
        directory = self.paths.config / "units.d"
        log = {name: str(self.paths.log / f"{name}.log") for name in ("agent", "supervisor")}
        agent = {
            "name": AGENT_UNIT,
            "argv": self.face("serve"),
            "env": {"BEDPLATE_AGENT": self.digest},
            "log_path": log["agent"],
        }
        below = {"name": SUPERVISOR_UNIT, "argv": self.face("supervisor"), "log_path": log["supervisor"]}
        units = {SUPERVISOR_UNIT: below, AGENT_UNIT: agent}
        return {directory / f"{name}.json": json.dumps(unit) + "\n" for name, unit in units.items()}


def host_toml(config: dict[str, str | int]) -> str:
    """The declared share of a host, one key a line."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in sorted(config.items()))


def modules_text(processor_flags: set[str]) -> str:
    """Kernel modules to have before the agent starts: udev loads KVM's by itself, but whenever it comes to it."""
    names = {"svm": "kvm_amd", "vmx": "kvm_intel"}
    return "".join(f"{name}\n" for name in (*(name for flag, name in names.items() if flag in processor_flags), "tun"))


def sysctl_text(values: dict[str, str]) -> str:
    return "".join(f"{name} = {value}\n" for name, value in values.items())
