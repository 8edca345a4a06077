"""A stand-in for the program `cloud-hypervisor`: it answers on its socket as v53 does, and checks all that it is told against
the calls and schemas in `cloud_hypervisor_api.json` (names and types of Cloud Hypervisor's OpenAPI document).

The one rule: where the document errs, it does as the program does: 500 for a wrong state (never 405), 200 with nothing for
`vmm.shutdown`, 400 for a body that is not wanted, and descriptors beside `vm.add-net` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

API = json.loads(Path(__file__).with_name("cloud_hypervisor_api.json").read_text(encoding="utf-8"))
POWER_OFF = bytes.fromhex("66ba0006b034ee")  # mov dx, 0x600; mov al, 0x34; out dx, al
SCHEMAS = {"#" + name for name in API["schemas"]}
TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "number": (int, float)}
STALL_SECONDS = 60.0
VERSION = os.environ.get("FAKE_VERSION") or "53.0.0"


class Refused(Exception):
    def __init__(self, status, *causes):
        self.status, self.causes = status, causes


def checked(kind, value, place):
    """Raises Refused for a field that the schema does not know, that is missing, or of another type."""
    if kind.startswith("["):
        if not isinstance(value, list):
            raise Refused(400, "invalid JSON", f"{place} is no list")
        for item in value:
            checked(kind[1:], item, place)
    elif kind.startswith("#"):
        schema = API["schemas"][kind[1:]]
        if "enum" in schema:
            if value not in schema["enum"]:
                raise Refused(400, "invalid JSON", f"{place}: {value} is none of {schema['enum']}")
            return
        if not isinstance(value, dict):
            raise Refused(400, "invalid JSON", f"{place} is no object")
        for name in schema["required"]:
            if name not in value:
                raise Refused(400, "invalid JSON", f"{place} lacks {name}")
        for name, item in value.items():
            if name not in schema["properties"]:
                raise Refused(400, "invalid JSON", f"{place} has no {name}")
            checked(schema["properties"][name], item, f"{place}.{name}")
    elif "|" in kind or kind not in TYPES:
        if value not in kind.split("|"):
            raise Refused(400, "invalid JSON", f"{place}: {value}")
    elif not isinstance(value, TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        raise Refused(400, "invalid JSON", f"{place} is no {kind}")


def validate(config):
    """What the program looks at when it boots."""
    cpus, memory = config["cpus"], config["memory"]
    topology = cpus.get("topology")
    if topology:
        product = 1
        for count in topology.values():
            product *= count
        if product != cpus["max_vcpus"]:
            raise Refused(500, "The VM could not boot", "CPU topology does not match max_vcpus")
    ids = [item["id"] for kind in ("disks", "net", "devices") for item in config.get(kind, ()) if "id" in item]
    if len(set(ids)) != len(ids) or any(name.startswith("__") for name in ids):
        raise Refused(500, "The VM could not boot", f"ids {ids}")
    for disk in config.get("disks", ()):
        if disk.get("num_queues", 1) > cpus["boot_vcpus"]:
            raise Refused(500, "The VM could not boot", "more queues than vCPUs")
        if not disk.get("vhost_user"):
            if "image_type" not in disk:
                raise Refused(500, "The VM could not boot", "the image's type is not said")
            if not os.access(disk["path"], os.R_OK):
                raise Refused(500, "The VM could not boot", f"cannot open {disk['path']}")
        elif not (memory.get("shared") or memory.get("hugepages")):
            raise Refused(500, "The VM could not boot", "vhost-user needs shared memory")
        else:
            reach(disk["vhost_socket"])
    payload = config["payload"]
    if "kernel" in payload and "firmware" in payload:
        raise Refused(500, "The VM could not boot", "kernel and firmware exclude each other")
    for path in (payload.get("kernel") or payload.get("firmware"), payload.get("initramfs")):
        if path and not os.access(path, os.R_OK):
            raise Refused(500, "The VM could not boot", f"cannot open {path}")


def reach(path):
    end = time.monotonic() + STALL_SECONDS
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            try:
                client.connect(path)
            except OSError:
                if time.monotonic() > end:
                    raise Refused(500, "The VM could not boot", f"cannot reach {path}") from None
                time.sleep(0.1)
            else:
                return


class Vmm:
    def __init__(self, arguments):
        self.api = arguments["--api-socket"].removeprefix("path=")
        self.events = arguments["--event-monitor"].removeprefix("path=")
        self.config = None
        self.kept = {}
        self.state = ""
        self.began = time.monotonic()
        Path(self.events).write_bytes(b"")
        self.event("vmm", "starting")

    def event(self, source, name):
        stamp = {"secs": int(time.monotonic() - self.began), "nanos": 0}
        record = {"timestamp": stamp, "source": source, "event": name, "properties": None}
        with Path(self.events).open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(record, indent=2) + "\n\n")

    def end(self, why):
        print(f"cloud-hypervisor: <vmm> INFO:vmm/src/lib.rs -- {why}", file=sys.stderr, flush=True)
        self.event("vmm", "shutdown")
        Path(self.api).unlink()
        os._exit(0)

    def answer(self, method, name, body, descriptors):
        known = API["calls"].get(name)
        if known is None or known[0] != method:
            raise Refused(404, f"no call {name}")
        if bool(body) != bool(known[1]):
            raise Refused(400, "Bad request", "a body is sent where none is wanted, or none where one is")
        value = json.loads(body) if body else None
        if value is not None and "#" + known[1] in SCHEMAS:
            checked("#" + known[1], value, name)
        if descriptors and name != "vm.add-net":
            raise Refused(400, "Bad request", "descriptors are not taken here")
        return getattr(self, name.replace(".", "_").replace("-", "_"))(value, descriptors)

    def vmm_ping(self, body, descriptors):
        return {"build_version": f"v{VERSION}", "version": VERSION, "pid": os.getpid(), "features": ["kvm"]}

    def vm_create(self, body, descriptors):
        if self.config is not None:
            raise Refused(500, "The VM is created already")
        self.config, self.state = body, "Created"

    def vm_add_net(self, body, descriptors):
        self.must_exist()
        if body.get("num_queues", 2) != 2 * len(descriptors):
            raise Refused(500, "num_queues must be twice the number of descriptors")
        self.config.setdefault("net", []).append(body)

    def vm_info(self, body, descriptors):
        self.must_exist()
        kinds = ("disks", "net") if self.state == "Running" else ()
        tree = {item["id"]: {"id": item["id"]} for kind in kinds for item in self.config.get(kind, ())}
        size = self.config["memory"]["size"]
        return {"config": self.config, "state": self.state, "memory_actual_size": size, "device_tree": tree | self.kept}

    def vm_add_disk(self, body, descriptors):
        self.must_exist()
        if body["id"] in {item["id"] for item in self.config.get("disks", ())} | self.kept.keys():
            raise Refused(500, "Error from device manager", f"identifier {body['id']} is not unique")
        reach(body["vhost_socket"])
        self.config.setdefault("disks", []).append(body)
        return {"id": body["id"], "bdf": "0000:00:07.0"}

    def vm_remove_device(self, body, descriptors):
        """The configuration forgets it at once, the guest lets it go some time later."""
        self.must_exist()
        found = [item for item in self.config.get("disks", ()) if item["id"] == body["id"]]
        if not found:
            raise Refused(500, "Error from device manager", f"unknown device id {body['id']}")
        self.config["disks"].remove(found[0])
        self.kept[body["id"]] = {"id": body["id"]}
        threading.Timer(0.3, self.kept.pop, (body["id"],)).start()

    def vm_boot(self, body, descriptors):
        self.must_exist()
        if self.state != "Created":
            raise Refused(500, "The VM could not boot", "wrong state")
        self.event("vm", "booting")
        validate(self.config)
        self.state = "Running"
        self.event("vm", "booted")
        serial = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        serial.bind(self.config["serial"]["socket"])
        serial.listen(1)
        threading.Thread(target=self.guest, args=(serial,), daemon=True).start()

    def guest(self, serial):
        client, _ = serial.accept()
        client.sendall(b"hi\n")
        if POWER_OFF in Path(self.config["payload"]["kernel"]).read_bytes():
            self.end("VM guest exit event")
        while typed := client.recv(100):
            client.sendall(typed)

    def vm_power_button(self, body, descriptors):
        self.must_exist()

    def vmm_shutdown(self, body, descriptors):
        threading.Timer(0.05, self.end, ("VM exit event",)).start()

    def must_exist(self):
        if self.config is None:
            raise Refused(404, "The VM does not exist")


def serve(vmm):
    os.umask(0o077)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(vmm.api)
    listener.listen(4)
    while True:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            received, descriptors = b"", []
            while b"\r\n\r\n" not in received:
                chunk, more, _, _ = socket.recv_fds(connection, 65_536, 8)
                if not chunk:
                    break
                received, descriptors = received + chunk, descriptors + more
            head, _, body = received.partition(b"\r\n\r\n")
            if not head:
                continue
            first, *lines = head.decode().split("\r\n")
            length = next((int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0)
            while len(body) < length:
                body += connection.recv(65_536)
            method, path, _ = first.split(" ")
            try:
                value = vmm.answer(method, path.removeprefix("/api/v1/"), body, descriptors)
                status = 200 if value is not None or path.endswith("vmm.shutdown") else 204
            except Refused as refused:
                status, value = refused.status, list(refused.causes)
            content = b"" if value is None else json.dumps(value).encode()
            length = f"Content-Length: {len(content)}\r\n" if status != 204 else ""
            connection.sendall(f"HTTP/1.1 {status} \r\n{length}\r\n".encode() + content)


def main(words):
    if words == ["--version"]:
        print(f"cloud-hypervisor v{VERSION}")
        return
    arguments = dict(zip(words[::2], words[1::2], strict=False))
    unknown = set(arguments) - {"--api-socket", "--event-monitor", "--seccomp", "-v"}
    if unknown:
        print(f"unexpected argument {unknown}", file=sys.stderr)
        sys.exit(2)
    vmm = Vmm(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: vmm.end("VM exit event"))
    serve(vmm)


if __name__ == "__main__":
    main(sys.argv[1:])
