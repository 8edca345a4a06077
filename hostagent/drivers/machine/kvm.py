"""Whether KVM is usable, by booting a tiny guest with it; and the host's TSC frequency.

The one rule: `/dev/kvm` proves nothing. A guest kernel must reach its first process within the deadline, else machines run by
TCG and the host says why. The guest is any kernel at hand and an initramfs of one static program, made here byte by byte.
Source: Linux, Documentation/driver-api/early-userspace/buffer-format.rst; System V ABI, ELF-64.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import struct
import tempfile
import time
from pathlib import Path

from hostagent.drivers.machine.qemu_command import PROGRAM, SANDBOX
from hostagent.lib.program import run
from hostagent.protocol.errors import AgentError
from hostagent.protocol.facts import KvmFact

DEVICE = Path("/dev/kvm")
IMAGES = Path("/var/lib/bedplate/images")
FIRST_WORD_SECONDS = 5.0  # under KVM a kernel speaks within a second
PROBE_SECONDS = 20.0
START_SECONDS = 0.1  # what `qemu --version` takes at most on a real machine, also on a busy one
MOST_PATIENCE = 10.0
KERNEL_SPEAKS = b"Linux version"
NO_KERNEL = "no kernel is on this host yet to try it with"
MARK = b"bedplate: a guest runs"
LOAD_ADDRESS = 0x400000
HEADERS_BYTES = 120


async def probe(images: Path = IMAGES) -> KvmFact:
    """The fact of this host, with whatever kernel is at hand."""
    return await probe_kvm(host_kernels(images), tsc_khz=tsc_khz())


async def probe_kvm(kernels: tuple[Path, ...], *, tsc_khz: int, device: Path = DEVICE, accelerator: str = "kvm") -> KvmFact:
    """Boots the first kernel that exists. Never raises; where KVM does not work it takes FIRST_WORD_SECONDS, longer on a host
    that is slow itself (an emulated one).
    """
    if not os.access(device, os.F_OK):
        return KvmFact(device_present=False, usable=False, reason="there is no /dev/kvm")
    if not os.access(PROGRAM, os.X_OK):
        return KvmFact(device_present=True, usable=False, reason=f"{PROGRAM} is not installed")
    kernel = next((path for path in kernels if path.is_file()), None)
    if kernel is None:
        return KvmFact(device_present=True, usable=False, reason=NO_KERNEL)
    with tempfile.TemporaryDirectory(prefix="bedplate-probe-") as directory:
        initramfs = Path(directory) / "initramfs"
        await asyncio.to_thread(initramfs.write_bytes, probe_initramfs())
        reason = await _boot(_argv(kernel, initramfs, tsc_khz, accelerator), await _patience())
    return KvmFact(device_present=True, usable=not reason, reason=reason)


async def _patience() -> float:
    """How many times slower than a real machine this host starts a program that does nothing; 1 to MOST_PATIENCE."""
    began = time.monotonic()
    try:
        await run(PROGRAM, "--version", deadline_seconds=START_SECONDS * MOST_PATIENCE, check=False)
    except AgentError:
        return MOST_PATIENCE
    return min(max((time.monotonic() - began) / START_SECONDS, 1.0), MOST_PATIENCE)


async def _boot(argv: tuple[str, ...], patience: float) -> str:
    """Why the guest did not reach its first process; "" when it did."""
    first_word_seconds, probe_seconds = FIRST_WORD_SECONDS * patience, PROBE_SECONDS * patience
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    said, loop = b"", asyncio.get_running_loop()
    deadline = loop.time() + first_word_seconds
    try:
        while MARK not in said:
            chunk = await asyncio.wait_for(process.stdout.read(4096), deadline - loop.time())
            if not chunk:
                words = (await process.stderr.read(4096)).decode(errors="replace").strip()
                return words[-200:] or "the guest ended before its first process"
            if KERNEL_SPEAKS not in said and KERNEL_SPEAKS in said + chunk:
                deadline += probe_seconds
            said += chunk
    except TimeoutError:
        if KERNEL_SPEAKS in said:
            return f"a guest kernel did not reach its first process within {probe_seconds:.0f} s"
        return f"a guest kernel did not say a word within {first_word_seconds:.0f} s"
    else:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def device_groups(device: Path = DEVICE) -> tuple[int, ...]:
    """The group that may open the device now: udev gives it away some time after its module is loaded."""
    return (device.stat().st_gid,) if device.exists() else ()


def host_kernels(images: Path) -> tuple[Path, ...]:
    """Kernels to try: those of guest images on this host, newest first, then the host's own."""
    found = [path for path in images.glob("*/vmlinu*") if path.is_file()]
    found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return (*found, Path(f"/boot/vmlinuz-{os.uname().release}"))


def tsc_khz(cpuinfo: Path = Path("/proc/cpuinfo")) -> int:
    """The frequency the kernel measured, from the first processor; 1 GHz where it says none."""
    for line in cpuinfo.read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "cpu MHz":
            return round(float(value) * 1000)
    return 1_000_000


def probe_initramfs() -> bytes:
    return initramfs_of(probe_program())


def initramfs_of(program: bytes) -> bytes:
    """A gzipped cpio archive (newc) with the program as `/init`, and `/dev/console`."""
    archive = _member("dev", 0o040755) + _member("dev/console", 0o020600, device=(5, 1))
    archive += _member("init", 0o100755, program) + _member("TRAILER!!!", 0)
    return gzip.compress(archive, mtime=0)


def probe_program() -> bytes:
    """A static x86-64 ELF program: write the mark to descriptor 1, then reboot(2), which ends QEMU under `-no-reboot`."""
    code_length = 5 + 5 + 10 + 5 + 2 + 5 + 5 + 5 + 5 + 2 + 2
    mark_address = LOAD_ADDRESS + HEADERS_BYTES + code_length
    code = b"\xb8" + struct.pack("<I", 1)  # mov eax, SYS_write
    code += b"\xbf" + struct.pack("<I", 1)  # mov edi, 1
    code += b"\x48\xbe" + struct.pack("<Q", mark_address)  # mov rsi, mark
    code += b"\xba" + struct.pack("<I", len(MARK) + 1) + b"\x0f\x05"  # mov edx, length; syscall
    code += b"\xbf" + struct.pack("<I", 0xFEE1DEAD)  # mov edi, LINUX_REBOOT_MAGIC1
    code += b"\xbe" + struct.pack("<I", 0x28121969)  # mov esi, LINUX_REBOOT_MAGIC2
    code += b"\xba" + struct.pack("<I", 0x01234567)  # mov edx, LINUX_REBOOT_CMD_RESTART
    code += b"\xb8" + struct.pack("<I", 169) + b"\x0f\x05"  # mov eax, SYS_reboot; syscall
    code += b"\xeb\xfe"  # jmp to itself
    assert len(code) == code_length
    size = HEADERS_BYTES + len(code) + len(MARK) + 1
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, LOAD_ADDRESS + HEADERS_BYTES, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, LOAD_ADDRESS, LOAD_ADDRESS, size, size, 0x1000)
    return header + segment + code + MARK + b"\n"


def _member(name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, device[0], device[1], len(name) + 1, 0)
    header = b"070701" + b"".join(b"%08X" % field for field in fields)
    named = header + name.encode() + b"\0"
    return named.ljust(-(-len(named) // 4) * 4, b"\0") + content.ljust(-(-len(content) // 4) * 4, b"\0")


def _argv(kernel: Path, initramfs: Path, tsc: int, accelerator: str) -> tuple[str, ...]:
    cpu = "host" if accelerator == "kvm" else "max"
    cmdline = f"console=ttyS0 edd=off earlyprintk=serial,ttyS0,115200 loglevel=6 panic=-1 reboot=t tsc_early_khz={tsc}"
    return (
        *(PROGRAM, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-sandbox", SANDBOX),
        *("-machine", f"q35,accel={accelerator}", "-cpu", cpu, "-m", "128M"),
        *("-kernel", str(kernel), "-initrd", str(initramfs), "-append", cmdline, "-serial", "stdio"),
    )
