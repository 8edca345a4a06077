"""What a guest's volumes go through in a system test: one guest is asked all of it, because a boot is dear."""

from __future__ import annotations

import asyncio
import contextlib
import time

import httpx2

from controlplane.embedded import showcase
from tests.system.deployment import MIB, Deployed, Json

PROJECT = f"/v1/projects/{showcase.PROJECT}"
VOLUMES = f"{PROJECT}/volumes"
MARKER = "planted-in-a-guest-and-readable-nowhere-else"
DATA, GROWN, CLONE, WAITING = (64 * MIB, 96 * MIB, 128 * MIB, 32 * MIB)  # each disk is known to the guest by its size
FILLED = 4 * MIB


async def settled(deployed: Deployed, name: str, *, status: str, seconds: float = 180) -> Json:
    def is_there(volume: Json) -> bool:
        assert volume["status"] != "failed", volume["conditions"]
        return volume["status"] == status and volume["observed"]["generation"] == volume["generation"]

    return await deployed.stage.api.until(f"{VOLUMES}/{name}", is_there, seconds=seconds)


def on_disk(size_bytes: int, command: str) -> str:
    """A command of the guest about the disk of that size."""
    return f"disk=/dev/$(lsblk -bdno NAME,SIZE | awk '$2 == {size_bytes} {{print $1}}'); {command}"


async def digest(deployed: Deployed, vm: Json, size_bytes: int) -> str:
    words = f"sudo dd if=$disk bs=1M count={FILLED // MIB} iflag=direct status=none | sha256sum"
    return (await deployed.login(vm, on_disk(size_bytes, words))).split()[0]


async def fill(deployed: Deployed, vm: Json, size_bytes: int) -> None:
    words = (
        f"(yes {MARKER} | head -c 1M; head -c 3M /dev/urandom) | sudo dd of=$disk bs=64k iflag=fullblock conv=fsync status=none"
    )
    await deployed.login(vm, on_disk(size_bytes, words))


async def in_guest(deployed: Deployed, vm: Json, size_bytes: int, seconds: float) -> bool:
    """Whether the running guest sees a disk of that size within the time."""
    deadline = time.monotonic() + seconds
    while not (await deployed.login(vm, on_disk(size_bytes, "echo $disk"))).strip().removeprefix("/dev/"):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(1)
    return True


async def stays_through_everything(deployed: Deployed) -> None:
    """Snapshot, clone, growth, rotation of the key, a reboot of the host; and nothing of it can be read there.

    Long, because a boot is dear: one guest is asked all of it.
    """
    api = deployed.stage.api
    await deployed.cli("volume", "create", "data", "--size", f"{DATA // MIB}M", "--host", "lab1")
    await deployed.cli(
        "volume", "create", "waiting", "--size", f"{WAITING // MIB}M", "--host", "lab1", "--unlock", "control_plane"
    )
    for name in ("data", "waiting"):
        assert (await settled(deployed, name, status="available"))["observed"]["is_encrypted"]
    await deployed.create("keeper", volumes=[{"volume": "data"}, {"volume": "waiting"}])
    vm = await deployed.until("keeper", "running")
    await fill(deployed, vm, DATA)
    await fill(deployed, vm, WAITING)
    before, waiting = await digest(deployed, vm, DATA), await digest(deployed, vm, WAITING)

    await deployed.cli("volume", "snapshot", "data", "before")
    assert await digest(deployed, vm, DATA) == before
    await fill(deployed, vm, DATA)
    after = await digest(deployed, vm, DATA)
    assert after != before

    await deployed.cli("volume", "snapshot", "data", "later")
    await fill(deployed, vm, DATA)
    after = await digest(deployed, vm, DATA)
    await deployed.cli("snapshot", "delete", "later", "--yes")  # its layer is merged under the running guest
    assert await digest(deployed, vm, DATA) == after

    await deployed.cli("volume", "create", "clone", "--snapshot", "before", "--size", f"{CLONE // MIB}M")
    await deployed.cli("volume", "attach", "clone", "keeper")
    await deployed.cli("volume", "grow", "data", f"{GROWN // MIB}M")
    await settled(deployed, "clone", status="attached")
    grown = await settled(deployed, "data", status="attached")
    assert await in_guest(deployed, vm, CLONE, 30), "a running guest gets it"
    assert await digest(deployed, vm, CLONE) == before
    assert await in_guest(deployed, vm, GROWN, 10) is (grown["takes_effect"] == "now"), grown
    assert showcase.PROJECT in await deployed.cli("project", "rotate-key", showcase.PROJECT)

    host, boot = deployed.host_of(vm), await deployed.boot_of(vm)
    await asyncio.to_thread(host.reboot)
    await deployed.another_boot(vm, boot, seconds=300)
    vm = await deployed.until("keeper", "running")
    assert await digest(deployed, vm, GROWN) == after, "grown, and as it was"
    assert await digest(deployed, vm, CLONE) == before, "as when the snapshot was taken"
    assert await digest(deployed, vm, WAITING) == waiting
    assert await said(deployed, "volume.locked"), "it waited for the control plane, and said so"

    words = ["sh", "-c", f"find /var/lib/bedplate /run/bedplate -type f -print0 | xargs -0 grep -l -a -F '{MARKER}'; true"]
    assert (await asyncio.to_thread(host.exec, words, timeout=120)).stdout == b"", "noise to whoever has the disks"
    directory = f"/var/lib/bedplate/volume/{(await api.get(f'{VOLUMES}/clone'))['id']}"
    await deployed.cli("volume", "detach", "clone")
    assert not await in_guest(deployed, vm, CLONE, 0), "a running guest lets it go"
    assert (await settled(deployed, "clone", status="available"))["vm"] is None
    await deployed.cli("volume", "delete", "clone", "--yes")
    await deployed.delete("keeper")
    assert host.exec(["test", "-e", directory], check=False).returncode == 1


async def said(deployed: Deployed, kind: str) -> bool:
    """Whether there was such an event in the project, up to now."""
    headers = {"authorization": f"Bearer {deployed.stage.token_file.read_text().strip()}"}
    wanted = {"after": "0", "kind": kind, "project": showcase.PROJECT}
    async with (
        httpx2.AsyncClient(base_url=deployed.stage.api_url, headers=headers, timeout=10, trust_env=False) as client,
        client.stream("GET", "/v1/events", params=wanted) as response,
    ):
        with contextlib.suppress(httpx2.ReadTimeout, TimeoutError):
            async with asyncio.timeout(10):
                async for line in response.aiter_lines():
                    if line == f"event: {kind}":
                        return True
    return False
