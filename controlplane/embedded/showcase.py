"""The steps of the demo, in the order of the story. Long, because the story is one.

The one rule: they talk to the REST API and the gateway as a tenant or operator does, never to a table or a host's agent.
What a person does at a terminal is done too: log in to a host to run `ssh` there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Coroutine
from datetime import datetime
from pathlib import Path

from controlplane.embedded.client import ApiFailed, Json, chat
from controlplane.embedded.services import python
from controlplane.embedded.stage import GATEWAY, HOSTS, Stage, StageFailed
from controlplane.embedded.timeline import Step
from provisioning.lab.lab import Lab, LabHost

PROJECT = "demo"
IMAGE = "debian-12"
VOLUME = "data"
VOLUME_BYTES = 256 << 20
MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France? Answer in one sentence."
_IMAGE_SECONDS = 1200
_ENROL_SECONDS = 180
_VM_SECONDS = 300
_VOLUME_SECONDS = 120
_WORDS_OF_GUEST = "what-only-this-guest-may-read"
_WRITE = (
    f"disk=/dev/$(lsblk -bdno NAME,SIZE | awk '$2 == {VOLUME_BYTES} {{print $1}}') && "
    f"yes {_WORDS_OF_GUEST} | head -c 4M | sudo dd of=$disk bs=1M iflag=fullblock oflag=direct status=none && "
    f"sudo dd if=$disk bs=4k count=1 iflag=direct status=none | head -n 1"
)
_MODEL_SECONDS = 900
_ENDPOINT_SECONDS = 300
_LOGIN_SECONDS = 180
_BALANCER_SECONDS = 60


async def run(stage: Stage) -> dict[str, object]:
    """All steps; returns question and answer. What takes long and needs nothing else begins first."""
    try:
        lab, directory = await _prepare(stage)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    await enrol(stage, lab)
    await gather(import_image(stage, directory), import_model(stage, MODEL))
    await make_project(stage)
    volume = await make_volume(stage)
    vm = await make_vm(stage)
    await log_in(stage, lab, vm)
    await write_volume(stage, lab, vm, volume)
    await make_endpoint(stage)
    await make_loadbalancer(stage, lab)
    answer = await ask(stage, await make_key(stage))
    return {"question": QUESTION, "answer": answer}


async def _prepare(stage: Stage) -> tuple[Lab, Path]:
    async with asyncio.TaskGroup() as group:
        group.create_task(start_control_plane(stage))
        lab = group.create_task(make_lab(stage))
        image = group.create_task(build_image(stage))
    return lab.result(), image.result()


async def start_control_plane(stage: Stage) -> None:
    with stage.timeline.step("Start the control plane") as step:
        await stage.start_control_plane()
        step.note(stage.api_url)


async def make_lab(stage: Stage) -> Lab:
    with stage.timeline.step("Make lab hosts") as step:
        lab = await stage.start_lab()
        step.note(", ".join(f"{host.name} {host.address}" for host in lab.hosts))
        return lab


async def build_image(stage: Stage) -> Path:
    """The guest image from Debian packages; from the cache when it is there."""
    with stage.timeline.step("Build the guest image") as step:
        output = await _run(python("provisioning.images", "build"), stage.environment(), step, seconds=_IMAGE_SECONDS)
        directory = Path(output.strip().splitlines()[-1])
        step.note(directory.name)
        return directory


async def enrol(stage: Stage, lab: Lab) -> None:
    """Each host as an operator adds it: the bootstrap key lets us in, a preflight shows its key, which is then pinned."""
    with stage.timeline.step("Enrol the hosts over SSH") as step:
        key = (await stage.api.get("/v1/hosts/bootstrap-key"))["public_key"]
        await gather(*(_enrol_one(stage, host, key, step) for host in lab.hosts))
        step.note(", ".join(host.name for host in lab.hosts))


async def _enrol_one(stage: Stage, host: LabHost, key: str, step: Step) -> None:
    await asyncio.to_thread(host.authorize, key)
    place: Json = {"address": host.address, "port": host.port, "user": "root"}
    asked = await stage.api.post("/v1/hosts/preflight", place)
    found = await stage.api.until(
        f"/v1/hosts/preflights/{asked['id']}", lambda preflight: preflight["finished_at"] is not None, seconds=_ENROL_SECONDS
    )
    if found["fingerprint"] != (expected := fingerprint(host.host_key)):
        raise StageFailed(f"{host.name} shows the key {found['fingerprint']}, not {expected}: {found['report']}")
    roles = ["gateway"] if host.name == GATEWAY else ["compute", "edge"]
    body = {**place, "name": host.name, "host_key_fingerprint": expected, "roles": roles, "qemu_on_kvm": True}
    await stage.api.post("/v1/hosts", body)
    await stage.api.until(
        f"/v1/hosts/{host.name}",
        lambda seen: seen["state"] == "ready" and seen["link"] == "up",
        seconds=_ENROL_SECONDS,
        tell=lambda seen: step.note(f"{host.name} {seen['state']}{_reasons(seen)}"),
    )


def fingerprint(public_key: str) -> str:
    """As `ssh-keygen -l` prints it: `SHA256:` and unpadded base64 of the digest of the key's blob."""
    blob = base64.b64decode(public_key.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _reasons(resource: Json) -> str:
    reasons = [str(entry.get("reason") or entry.get("type")) for entry in resource.get("conditions", [])]
    return f" ({', '.join(reasons)})" if reasons else ""


async def gather(*work: Coroutine[None, None, None]) -> None:
    """Do all; the first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for one in work:
                group.create_task(one)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def import_image(stage: Stage, directory: Path) -> None:
    with stage.timeline.step("Import the guest image") as step:
        made = await stage.api.post("/v1/images", {"source": {"directory": str(directory)}, "name": IMAGE})
        await stage.api.until(f"/v1/images/{IMAGE}", lambda image: image["state"] == "available", seconds=120)
        step.note(f"{IMAGE}, {sum(file['size_bytes'] for file in made['files']) >> 20} MiB")


async def make_project(stage: Stage) -> None:
    with stage.timeline.step("Make a project and a private network") as step:
        await stage.api.post("/v1/projects", {"name": PROJECT, "allow_containers": True})
        network = await stage.api.post(f"/v1/projects/{PROJECT}/networks", {"name": "default"})
        step.note(f"{network['ipv4_cidr']}, {network['ipv6_cidr']}")


async def make_volume(stage: Stage) -> Json:
    """An empty one, under a key of its own that is made on the host."""
    with stage.timeline.step("Create an encrypted volume") as step:
        path = f"/v1/projects/{PROJECT}/volumes"
        await stage.api.post(path, {"name": VOLUME, "size_bytes": VOLUME_BYTES})
        volume = await stage.api.until(
            f"{path}/{VOLUME}", _is_made, seconds=_VOLUME_SECONDS, tell=lambda volume: step.note(_words(volume))
        )
        words = "encrypted" if volume["observed"]["is_encrypted"] else "not encrypted"
        step.note(f"{VOLUME}, {VOLUME_BYTES >> 20} MiB on {volume['observed']['host']}, {words}")
        return volume


def _is_made(volume: Json) -> bool:
    if volume["status"] == "failed":
        raise ApiFailed(f"the volume failed: {volume['conditions']}")
    return volume["status"] == "available"


async def make_vm(stage: Stage) -> Json:
    """A VM with the volume, and a key that only this demo has; returns when the host says that it runs."""
    with stage.timeline.step("Create a VM through the REST API") as step:
        key = stage.directory / "ssh/id_ed25519"
        key.parent.mkdir(mode=0o700)
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "demo", "-f", str(key)]
        await asyncio.to_thread(subprocess.run, argv, check=True, stdin=subprocess.DEVNULL)
        body: Json = {
            "name": "first",
            "image": IMAGE,
            "network": "default",
            "vcpus": 1,
            "memory_bytes": 512 << 20,
            "volumes": [{"volume": VOLUME}],
            "ssh_keys": [key.with_suffix(".pub").read_text().strip()],
        }
        path = f"/v1/projects/{PROJECT}/vms/first"
        await stage.api.post(path.rpartition("/")[0], body)
        vm = await stage.api.until(path, _runs, seconds=_VM_SECONDS, tell=lambda vm: step.note(_words(vm)))
        place = f"{vm['ipv4']} and {vm['ipv6']} on {vm['observed']['host']} ({vm['observed']['driver']})"
        step.note(place + await _steps_of(stage, vm))
        return vm


async def _steps_of(stage: Stage, resource: Json) -> str:
    """What its first operation went through, in words: `: place 0.0 s, prepare 1.2 s`."""
    found = await stage.api.get(f"/v1/operations?filter=subject_id={resource['id']}&sort=created_at&limit=1")
    steps = [f"{step['name']} {_seconds(step):.1f} s" for one in found["items"] for step in one["steps"] if step["finished_at"]]
    return f": {', '.join(steps)}" if steps else ""


def _seconds(step: Json) -> float:
    return (datetime.fromisoformat(step["finished_at"]) - datetime.fromisoformat(step["started_at"])).total_seconds()


def _runs(vm: Json) -> bool:
    if vm["status"] == "failed":
        raise ApiFailed(f"the VM failed: {_words(vm)}")
    return vm["status"] == "running"


def _words(resource: Json) -> str:
    progress = resource.get("progress") or {}
    return ", ".join(str(part) for part in (resource.get("status"), progress.get("step")) if part)


async def log_in(stage: Stage, lab: Lab, vm: Json) -> None:
    """`ssh` into the VM from the lab host that does not run it."""
    with stage.timeline.step("Log in to the VM from the other lab host") as step:
        other, place = _other(lab, vm), f"{vm['user']}@{vm['ipv4']}"
        argv = _ssh(vm, "hostname; uname -sr")
        await asyncio.to_thread(_give_key, other, stage.directory / "ssh/id_ed25519")
        deadline = time.monotonic() + _LOGIN_SECONDS
        while True:
            done = await asyncio.to_thread(other.exec, argv, check=False, timeout=40)
            if done.returncode == 0:
                step.note(f"{other.name} → {place}: {' '.join(done.stdout.decode().split())}")
                return
            step.note(f"waiting for {place}: {done.stderr.decode(errors='replace').strip()[:60]}")
            if time.monotonic() > deadline:
                raise StageFailed(f"no login to {place} from {other.name}: {done.stderr.decode(errors='replace').strip()}")
            await asyncio.sleep(0.5)


async def write_volume(stage: Stage, lab: Lab, vm: Json, volume: Json) -> None:
    """Write words into the volume in the guest, and look for them in what lies on its host."""
    with stage.timeline.step("Write to the volume, and look for it on the host's disk") as step:
        written = await asyncio.to_thread(_other(lab, vm).exec, _ssh(vm, _WRITE), timeout=60)
        if _WORDS_OF_GUEST not in written.stdout.decode():
            raise StageFailed(f"the volume did not give back what was written: {written.stderr.decode(errors='replace')}")
        directory = f"/var/lib/bedplate/volume/{volume['id']}"
        look = ["sh", "-c", f"du -sk {directory} | cut -f 1; grep -r -c -a -F '{_WORDS_OF_GUEST}' {directory}; true"]
        size, *files = (await asyncio.to_thread(lab.host(vm["observed"]["host"]).exec, look)).stdout.decode().split()
        found = [name for name in files if not name.endswith(":0")]
        if found or not files:
            raise StageFailed(f"what the VM wrote can be read on the host: {found}")
        step.note(f"read back in the VM; not in {len(files)} files of {int(size) >> 10} MiB on {vm['observed']['host']}")


def _other(lab: Lab, vm: Json) -> LabHost:
    return lab.host(next(name for name in HOSTS if name != vm["observed"]["host"]))


def _ssh(vm: Json, command: str) -> list[str]:
    options = (
        "StrictHostKeyChecking=no",
        "UserKnownHostsFile=/dev/null",
        "BatchMode=yes",
        "ConnectTimeout=5",
        "LogLevel=ERROR",
    )
    flags = [word for option in options for word in ("-o", option)]
    return ["timeout", "30", "ssh", "-F", "none", "-i", "/root/demo-key", *flags, f"{vm['user']}@{vm['ipv4']}", command]


def _give_key(host: LabHost, key: Path) -> None:
    host.exec(["sh", "-c", "umask 077; cat >/root/demo-key"], stdin=key.read_bytes())


async def import_model(stage: Stage, name: str) -> None:
    """Weights and engine, fetched once and kept in the cache."""
    with stage.timeline.step(f"Import the model {name}") as step:
        await stage.api.post(f"/v1/models/{name}/import")
        model = await stage.api.until(
            f"/v1/models/{name}", _is_imported, seconds=_MODEL_SECONDS, tell=lambda model: step.note(_words(model))
        )
        step.note(f"{model['title']}, {model['size_bytes'] >> 20} MiB, engine {model['engine']}")


def _is_imported(model: Json) -> bool:
    if model["failure"]:
        raise ApiFailed(f"the model was not imported: {model['failure']}")
    return model["state"] == "available"


async def make_endpoint(stage: Stage) -> None:
    """As the fleet can: in a VM where KVM works, else in a container."""
    with stage.timeline.step("Serve the model on an endpoint") as step:
        await _serve(stage, step, {"name": "chat", "model": MODEL, "replicas": 1})


async def _serve(stage: Stage, step: Step, body: Json) -> None:
    path = f"/v1/projects/{PROJECT}/endpoints"
    await stage.api.post(path, body)
    endpoint = await stage.api.until(
        f"{path}/{body['name']}",
        lambda seen: seen["status"] == "ready",
        seconds=_ENDPOINT_SECONDS,
        tell=lambda seen: step.note("; ".join([seen["status"], *(_replica_words(one) for one in seen["replicas"])])),
    )
    machines = ", ".join(_machine_words(one) for one in endpoint["replicas"])
    step.note(f"one {machines} ({endpoint['observed']['isolation_reason']})")


async def make_loadbalancer(stage: Stage, lab: Lab) -> None:
    """In front of the endpoint's replicas, at a private address, carried by both lab hosts; then ask through it."""
    with stage.timeline.step("Put a load balancer in front of it") as step:
        path = f"/v1/projects/{PROJECT}/loadbalancers"
        body: Json = {
            "name": "front",
            "network": "default",
            "listeners": [{"port": 80, "target_port": 8000}],
            "backends": [{"endpoint": "chat"}],
            "probe": {"kind": "http", "path": "/v1/models", "interval_ms": 500, "timeout_ms": 400},
        }
        await stage.api.post(path, body)
        seen = await stage.api.until(
            f"{path}/front",
            lambda seen: seen["status"] == "up",
            seconds=_BALANCER_SECONDS,
            tell=lambda seen: step.note(_words(seen)),
        )
        vip = next(vip for vip in seen["vips"] if "." in vip)
        said = await _ask_through(lab, f"http://{vip}/v1/models")
        carried = " and ".join(edge["host"] for edge in seen["carried_by"])
        step.note(f"{vip}:80 on {carried}: {len(said)} bytes of /v1/models through it")


async def _ask_through(lab: Lab, url: str) -> bytes:
    """From the lab host that does not hold the address: whoever holds it balances what comes from outside."""
    argv = ["python3", "-c", f"import urllib.request as u; print(u.urlopen({url!r}, timeout=5).read().decode())"]
    deadline, words = time.monotonic() + _BALANCER_SECONDS, ""
    while True:
        for name in HOSTS:
            done = await asyncio.to_thread(lab.host(name).exec, argv, check=False, timeout=15)
            if done.returncode == 0 and done.stdout:
                return done.stdout
            words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        if time.monotonic() > deadline:
            raise StageFailed(f"nothing answers at {url}: {words}")
        await asyncio.sleep(0.5)


def _machine_words(replica: Json) -> str:
    what = f"{replica['isolation']} by {replica['accelerator']}" if replica["accelerator"] else replica["isolation"]
    return f"{what} on {replica['host']}"


def _replica_words(replica: Json) -> str:
    return " ".join(word for word in (replica["state"], replica["step"], replica["reason"]) if word)


async def make_key(stage: Stage) -> str:
    with stage.timeline.step("Make a key for applications") as step:
        made = await stage.api.post(f"/v1/projects/{PROJECT}/keys", {"name": "demo"})
        step.note(f"…{made['hint']}")
        return str(made["secret"])


async def ask(stage: Stage, key: str) -> str:
    """A streamed chat through the gateway, as any OpenAI client does it."""
    with stage.timeline.step("Ask it a question through the gateway") as step:
        body: Json = {
            "model": MODEL,
            "messages": [{"role": "user", "content": QUESTION}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": 64,
        }
        answer = await chat(f"{stage.gateway_url}/v1/chat/completions", key, body, tell=step.note)
        step.note(f"{answer.tokens} tokens, the first after {answer.first_token_seconds * 1000:.0f} ms")
        return answer.text


async def _run(argv: tuple[str, ...], environment: dict[str, str], step: Step, *, seconds: float) -> str:
    """Run a program of ours; its last line of words is the step's detail, its output the result."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    words = ""
    output = asyncio.create_task(process.stdout.read())
    try:
        async with asyncio.timeout(seconds):
            async for line in process.stderr:
                words = line.decode(errors="replace").strip() or words
                step.note(words)
            code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    if code != 0:
        raise StageFailed(f"{argv[3]} ended with exit code {code}: {words}")
    return (await output).decode()
