"""The first login as it is where root is not let in: another user with sudo, through a bastion."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from provisioning.lab.metal import MetalHost
from tests.agent.sshd import Sshd
from tests.metal.observing import snapshot
from tests.system.enrolling import Deployment, difference, eventually, fingerprint

pytestmark = [
    pytest.mark.metal,
    pytest.mark.thorough,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.caps("root", "qemu", "debootstrap", "sshd"),
]
MAKE_USER = """
useradd --create-home --shell /bin/bash --password '*' ops
install -d -m 700 -o ops -g ops ~ops/.ssh
cat > ~ops/.ssh/authorized_keys
chown ops: ~ops/.ssh/authorized_keys
"""
FORGET_USER = "userdel --force --remove ops; rm -f /etc/sudoers.d/ops"


@pytest.fixture
async def bastion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An sshd that forwards, and the worker's own keys and known hosts for it."""
    directory, home = tmp_path / "bastion", tmp_path / "home"
    directory.mkdir()
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    one = Sshd(directory, tmp_path)
    public = one.key.export_public_key().decode().strip()
    (directory / "authorized_keys").write_text(f"{public}\n")
    log = directory / "log"
    with (directory / "config").open("a") as config:
        config.write("AllowTcpForwarding yes\nLogLevel DEBUG1\n")
    one.key.write_private_key(home / ".ssh/id_ed25519")
    (home / ".ssh/id_ed25519").chmod(0o600)
    host_key = one.host_key.export_public_key().decode().strip()
    (home / ".ssh/known_hosts").write_text(f"[127.0.0.1]:{one.port} {host_key}\n")
    monkeypatch.setenv("HOME", str(home))
    await one.start(log)
    yield one, log
    one.stop()


async def test_a_user_with_sudo_through_a_bastion(
    deployment: Deployment, metal: MetalHost, bastion: tuple[Sshd, Path], tmp_path: Path
) -> None:
    jump, log = bastion
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    public, private = (tmp_path / "key.pub").read_bytes(), (tmp_path / "key").read_text()
    metal.exec(["bash", "-c", MAKE_USER], stdin=public)
    try:
        login = {"user": "ops", "identity": private, "jump": f"root@127.0.0.1:{jump.port}", "sudo": True}
        operation, _ = await deployment.preflight(metal, **login)
        assert (operation["state"], operation["error_code"]) == ("failed", "host.sudo_refused"), operation

        metal.exec(["sh", "-c", "echo 'ops ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/ops"])
        before = snapshot(metal)
        operation, found = await deployment.preflight(metal, **login)
        assert operation["state"] == "succeeded", operation
        assert found["fingerprint"] == fingerprint(metal), "the key of the host behind the bastion"
        assert found["report"]["is_fit"], found["report"]["checks"]
        operation, added = await deployment.add(metal, **login)
        assert operation["state"] == "succeeded", operation
        assert added["state"] == "ready"
        said = log.read_text(errors="replace")
        assert f"target {metal.address} port 22" in said, "it went through the bastion"
        assert (await deployment.remove(metal.name))["state"] == "succeeded"
        await eventually(
            lambda: difference(before, snapshot(metal)) == {}, lambda: difference(before, snapshot(metal)), seconds=180
        )
    finally:
        metal.exec(["bash", "-c", FORGET_USER], check=False)
