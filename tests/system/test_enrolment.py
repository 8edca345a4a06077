"""Enrolment on real lab hosts: looked at, added, repaired, refused for every good reason, and removed without a trace."""

from __future__ import annotations

import asyncio
import hashlib
import re
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from controlplane.remote.link import HostUnreachable
from provisioning.host import zipapp
from provisioning.lab import LabHost
from tests.system.enrolling import Deployment, difference, eventually, fingerprint, snapshot

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.caps("root", "netns", "sshd"), pytest.mark.timeout(300)]


async def test_a_host_is_added_repaired_and_removed_without_a_trace(deployment: Deployment, host: LabHost) -> None:
    before = snapshot(host)
    await deployment.bootstrap(host)
    enrolled_before = snapshot(host)

    operation, found = await deployment.preflight(host)
    assert operation["state"] == "succeeded", operation
    assert found["fingerprint"] == fingerprint(host)
    assert found["report"]["is_fit"], found["report"]["checks"]
    planned = {(change["kind"], change["subject"]) for change in found["changes"]}
    assert ("user", "bedplate") in planned
    assert difference(enrolled_before, snapshot(host)) == {}, "preflight reads only"

    operation, added = await deployment.add(host, labels={"rack": "1"}, location="here")
    assert operation["state"] == "succeeded", operation
    assert added["state"] == "ready"
    assert {(change["kind"], change["subject"]) for change in added["changes"]} == planned, "the dry run tells the truth"
    assert added["observed"]["agent_version"] == zipapp.build().version
    assert added["observed"]["allocatable"] == {"vcpus": 1, "memory_bytes": 3 << 30}
    assert added["observed"]["data_ipv4"] == host.data_address
    facts = (await deployment.get("/v1/hosts/h/inventory"))["facts"]
    assert facts["hostname"] == "h"
    assert facts["cpus"]
    assert {condition["type"] for condition in added["conditions"]} >= {"Ready"}
    assert host.exec(["id", "bedplate"]).returncode == 0

    host.exec(["sh", "-c", "rm -rf /opt/bedplate/agent/current; userdel --force bedplate"])
    operation, repaired = await deployment.add(host)
    assert operation["state"] == "succeeded", operation
    assert repaired["id"] == added["id"]
    assert repaired["generation"] == 2
    assert host.exec(["id", "bedplate"]).returncode == 0

    assert (await deployment.remove("h"))["state"] == "succeeded"
    assert (await deployment.client.get("/v1/hosts/h")).status_code == 404
    await eventually(
        lambda: difference(enrolled_before, snapshot(host)) == {}, lambda: difference(enrolled_before, snapshot(host))
    )
    (host.disk / "root/.ssh/authorized_keys").write_text((host.lab.directory / "ssh/id_ed25519.pub").read_text())
    assert difference(before, snapshot(host)) == {}


async def test_an_enrolled_host_survives_a_reboot(deployment: Deployment, host: LabHost) -> None:
    await deployment.bootstrap(host)
    _, added = await deployment.add(host)
    boot = (await deployment.get("/v1/hosts/h/inventory"))["facts"]["boot_id"]
    await asyncio.to_thread(host.reboot)
    links = deployment.runner.world.hosts

    async def answers() -> bool:
        try:
            return (await links.facts(added["id"])).boot_id != boot
        except HostUnreachable:
            return False

    await eventually(answers)


async def incidents(deployment: Deployment, subject: str) -> dict[str, str]:
    """Open incidents of a subject: code to words."""
    items = (await deployment.get("/v1/incidents?limit=100"))["items"]
    return {item["code"]: item["detail"] for item in items if item["subject"] == subject and item["resolved_at"] is None}


async def test_every_refusal_says_which_step_failed_and_why(deployment: Deployment, host: LabHost) -> None:
    """No key there; another host key; nobody listens; then the same host is added after all."""
    operation, found = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.login_refused")
    assert "does not let root in" in operation["error_detail"]
    assert "host.login_refused" in await incidents(deployment, found["id"])

    await deployment.bootstrap(host)
    operation, _ = await deployment.add(host, host_key_fingerprint="SHA256:" + "A" * 43)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.key_mismatch")
    assert fingerprint(host) in operation["error_detail"]
    operation, _ = await deployment.preflight(host, host_key_fingerprint="SHA256:" + "A" * 43)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.key_mismatch")

    host.exec(["sh", "-c", "mv /usr/bin/python3 /usr/bin/python3.away"])
    operation, _ = await deployment.add(host)
    assert operation["error_code"] == "host.python_missing"
    host.exec(["sh", "-c", "mv /usr/bin/python3.away /usr/bin/python3"])

    operation, added = await deployment.add(host)
    assert operation["state"] == "succeeded", operation
    assert added["id"] == found["id"]
    assert await incidents(deployment, found["id"]) == {}

    operation, _ = await deployment.preflight(host, port=1)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.unreachable")
    assert "refused" in operation["error_detail"]


async def test_artifacts_are_shipped_by_digest_and_a_missing_package_without_a_route_is_named(
    deployment: Deployment, host: LabHost
) -> None:
    await deployment.bootstrap(host)
    program = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00" + (62).to_bytes(2, "little") + b"x" * 100_000
    digest = hashlib.sha256(program).hexdigest()
    path = f"/v1/hosts/artifacts/cloud-hypervisor?sha256={digest}"
    answer = await deployment.client.put(path, content=program, headers={"content-type": "application/octet-stream"})
    assert answer.status_code == 200, answer.text

    host.exec(["dpkg", "--remove", "--force-depends", "zstd"])
    operation, added = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.install_failed"), operation
    assert "zstd" in operation["error_detail"]
    host.exec(["sh", "-c", "printf 'Package: zstd\\nStatus: install ok installed\\nVersion: 9\\n' >> /var/lib/dpkg/status"])
    operation, _ = await deployment.add(host)
    assert operation["state"] == "succeeded", operation
    shipped = f"/opt/bedplate/cloud-hypervisor/{digest}/cloud-hypervisor"
    assert host.exec(["sha256sum", shipped]).stdout.decode().startswith(digest)
    assert host.exec(["stat", "-c", "%a", shipped]).stdout == b"755\n"
    assert (await deployment.remove(added["name"]))["state"] == "succeeded"
    await eventually(lambda: host.exec(["test", "-e", "/opt/bedplate"], check=False).returncode == 1)


async def test_a_full_disk_half_way_is_named_and_removed_again(deployment: Deployment, host: LabHost) -> None:
    await deployment.bootstrap(host)
    before = snapshot(host)
    host.exec(["sh", "-c", "mkdir /opt/bedplate && mount -t tmpfs -o size=64k tmpfs /opt/bedplate"])
    operation, added = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.disk_full"), operation
    assert "agent.pyz" in operation["error_detail"]
    assert added["state"] == "enrolling"
    assert {change["kind"] for change in added["changes"]} >= {"directory", "user"}
    assert (await incidents(deployment, added["id"])).keys() == {"host.disk_full"}
    host.exec(["umount", "/opt/bedplate"])
    host.exec(["rmdir", "/opt/bedplate"])
    assert (await deployment.remove("h"))["state"] == "succeeded"
    assert difference(before, snapshot(host)) == {}


async def test_a_machine_that_is_not_fit_is_refused_before_anything_changes(deployment: Deployment, host: LabHost) -> None:
    await deployment.bootstrap(host)
    host.exec(["sh", "-c", "echo AllowUsers root >> /etc/ssh/sshd_config"])
    before = snapshot(host)
    operation, added = await deployment.add(host)
    assert (operation["state"], operation["error_code"]) == ("failed", "host.not_fit"), operation
    assert "AllowUsers" in operation["error_detail"]
    assert difference(before, snapshot(host)) == {}
    assert (await deployment.remove(added["name"]))["state"] == "succeeded"


NEIGHBOURS = """
set -e
printf 'table ip filter { chain FORWARD { type filter hook forward priority 0; policy drop; }; }' | nft -f -
mkdir -p /etc/ufw && echo ENABLED=yes >/etc/ufw/ufw.conf
cp /bin/sleep /run/dockerd && (/run/dockerd 300 >/dev/null 2>&1 &)
ip link add odd0 type veth peer name odd1
ip -6 addr add 2a00:1450:4001::1/64 dev odd0 nodad
ip -6 addr add 2a02:26f0:1::1/64 dev odd0 nodad
"""


async def test_what_may_disturb_machines_is_found_and_does_not_keep_a_host_out(deployment: Deployment, host: LabHost) -> None:
    """Foreign forward policies, a second global IPv6 prefix, a clock that is wrong, a host that is a VM."""
    await deployment.bootstrap(host)
    _, quiet = await deployment.preflight(host)
    quiet_checks = {check["name"]: check for check in quiet["report"]["checks"]}
    assert not {"firewall", "ipv6"} & quiet_checks.keys()
    assert quiet_checks["swap"]["result"] == "ok", "with or without"
    assert ("bare_metal" in quiet_checks) == quiet["report"]["facts"]["is_virtual_machine"]

    await asyncio.to_thread(host.exec, ["sh", "-c", NEIGHBOURS])
    deployment.clock.by = timedelta(minutes=-3)
    operation, found = await deployment.preflight(host)
    assert operation["state"] == "succeeded"
    report = found["report"]
    assert report["is_fit"], report["checks"]
    warned = {check["name"]: check for check in report["checks"] if check["result"] == "warn"}
    for owner in ("ip filter FORWARD", "docker", "ufw"):
        assert owner in warned["firewall"]["why"]
    assert "bp*" in warned["firewall"]["fix"]
    assert "several global IPv6 prefixes" in warned["ipv6"]["why"]
    assert re.search(r"1(79|8\d) s ahead of the control plane", warned["clock"]["why"]), warned["clock"]


async def test_an_uploaded_identity_is_used_once_and_kept_nowhere(
    deployment: Deployment, host: LabHost, tmp_path: Path
) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    public, private = (tmp_path / "key.pub").read_text().strip(), (tmp_path / "key").read_text()
    script = f"useradd -m -p '*' ops; mkdir ~ops/.ssh; echo '{public}' > ~ops/.ssh/authorized_keys; chown -R ops: ~ops/.ssh"
    host.exec(["sh", "-c", script])
    operation, _ = await deployment.add(host, user="ops", identity=private)
    assert operation["error_code"] == "host.not_fit", operation
    assert "root" in operation["error_detail"]
    host.authorize(public)
    operation, added = await deployment.add(host, identity=private)
    assert operation["state"] == "succeeded", operation
    row = await deployment.database.pool.fetchrow("SELECT * FROM host WHERE id = $1", added["id"])
    assert row["identity_sealed"] is None
    body = deployment.body(host, name="x", host_key_fingerprint=fingerprint(host), identity="no key")
    answer = await deployment.client.post("/v1/hosts", json=body)
    assert answer.json()["code"] == "host.identity_invalid"
