"""The kernel's harness on a real agent on a lab host: database and kernel in this process, and what is left on the host."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import func

from controlplane.core.ids import Kind, new_id
from controlplane.kernel.harness import Fault, Harness, Scenario
from controlplane.kernel.registry import Registry
from controlplane.kernel.world import World
from controlplane.models.deployment import Deployment
from controlplane.models.host import Host
from controlplane.resources.host.learned import learn
from controlplane.resources.image import service as images
from controlplane.resources.image.schemas import ImageManifest
from controlplane.resources.image.store import ImageStore
from hostagent.protocol.frames import Answer, Request
from hostagent.protocol.verbs import Nothing
from provisioning.images.build import build
from provisioning.images.manifest import read_manifest
from tests.programs.fleet import Fleet
from tests.system.agenthost import AgentHost

MIB = 1 << 20
PATIENCE = 60  # rounds of 0.3 s at least
SETTLED_SECONDS = 10.0


async def add_lab_host(fleet: Fleet, agent: AgentHost) -> None:
    """The host of a deployment that starts anew; the agent stays for all tests of a file."""
    host_id = new_id(Kind.HOST)

    async def answer(request: Request) -> Answer:
        try:
            return await agent.answer(request)
        except (OSError, ConnectionError) as error:
            raise TimeoutError(str(error)) from error

    fleet.links.add(host_id, answer, agent.upload)
    fleet.links.stream = lambda _host_id, request: agent.open_stream(request)
    row = Host(
        id=host_id,
        name="lab",
        address=agent.host.record.address,
        state="ready",
        link="up",
        link_changed_at=func.now(),
        ssh_key_sealed=b"sealed",
        ssh_public_key="ssh-ed25519 AAAA",
        roles=["compute"],
        config={"qemu_on_kvm": True},
        conditions=[],
    )
    learn(row, await agent.call("facts.observe", Nothing()), fleet.world.clock.now())
    async with fleet.database.session() as session:
        session.add(row)
        session.add(Deployment(epoch=int(time.time()), key_check=b"none"))  # later than what this host was told before


async def import_tiny_image(fleet: Fleet, directory: Path) -> None:
    """The guest image's kernel and initramfs over an empty disk."""
    built = await asyncio.to_thread(build)
    manifest = read_manifest(built)
    directory.mkdir()
    contents = {
        manifest.boot.kernel_file: (built / manifest.boot.kernel_file).read_bytes(),
        manifest.boot.initramfs_file: (built / manifest.boot.initramfs_file).read_bytes(),
        "root.raw": bytes(MIB),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    tiny = ImageManifest.model_validate(
        {
            "name": "tiny",
            "architecture": "x86_64",
            "root_file": "root.raw",
            "min_disk_bytes": 16 * MIB,
            "min_memory_bytes": 128 * MIB,
            "boot": {
                "kind": "kernel",
                "kernel_file": manifest.boot.kernel_file,
                "initramfs_file": manifest.boot.initramfs_file,
                "cmdline": manifest.boot.cmdline,
            },
            "files": [
                {"name": name, "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
                for name, content in contents.items()
            ],
        }
    )
    (directory / "manifest.json").write_text(tiny.model_dump_json())
    taken = await images.take_directory(ImageStore(fleet.world.settings.state_dir), directory)
    async with fleet.database.session() as session:
        await images.create_of_stored(session, taken)


async def more_than(agent: AgentHost, before: dict[str, list[str]]) -> list[str]:
    """What is on the host now and was not before; what is just ending gets a moment."""
    end = time.monotonic() + SETTLED_SECONDS
    while True:
        now = await asyncio.to_thread(agent.leftovers)
        found = [f"{what}: {item}" for what in now for item in now[what] if item not in before[what]]
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


async def let_the_host_work(world: World[Any], subject: str, step: str) -> None:
    del world, subject, step
    await asyncio.sleep(0.3)


def rules(agent: AgentHost) -> list[str]:
    """Every rule and element on the host, without counters and handles, and without what the kernel itself learns and
    forgets.
    """
    found = []
    for item in json.loads(agent.host.exec(["nft", "--json", "--stateless", "list", "ruleset"]).stdout)["nftables"]:
        for kind, body in item.items():
            elements = body.pop("elem", []) if isinstance(body, dict) else []
            lasting = [element for element in elements if "expires" not in str(element)]
            body.pop("handle", None)
            found.append(f"{kind} {json.dumps(body, sort_keys=True)}")
            found += [f"{kind} {body.get('name')}: {json.dumps(element)}" for element in lasting]
    return sorted(found)


def scenario(
    registry: Registry,
    program: str,
    make: Callable[[World[Any], int], Awaitable[str]],
    leftovers: Callable[[World[Any], str], Awaitable[Sequence[str]]],
    changes: Sequence[str],
) -> Scenario:
    return Scenario(
        registry=registry,
        program=program,
        make=make,
        leftovers=leftovers,
        nudge=let_the_host_work,
        changes=changes,
        patience=PATIENCE,
    )


async def few_lives(harness: Harness, *after: int) -> int:
    """Of all that `Harness.run` tries: every step twice, by a crash and by a stolen lease, and some ends before that."""
    for fault in (Fault.CRASH, Fault.STOLEN):
        await harness.life(fault=fault)
    for steps in after:
        await harness.life(destroy_after=steps)
    return 2 + len(after)


async def leaving_nothing(fleet: Fleet, agent: AgentHost, tried: Scenario, lives: Callable[[Harness], Awaitable[int]]) -> int:
    """How many lives left nothing on the host; `tried` looks at the rest. What the host has of its own (policy, tunnel,
    images) comes with the first life and stays.
    """
    await Harness(fleet.world, tried).life()
    before, rules_before = agent.leftovers(), rules(agent)

    async def leftovers(world: World[Any], subject: str) -> Sequence[str]:
        found = [*await tried.leftovers(world, subject), *await more_than(agent, before)]
        return found + [line for line in rules(agent) if line not in rules_before]

    count = await lives(Harness(fleet.world, replace(tried, leftovers=leftovers)))
    after = agent.leftovers()
    assert {what: len(items) for what, items in after.items()} == {what: len(items) for what, items in before.items()}
    return count
