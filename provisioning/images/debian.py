"""Debian's packages: which mirror, a base tree, single packages unpacked.

The one rule: no address of a mirror stands in the product. It is the operator's setting or the machine's own apt
configuration, and apt on this machine verifies what comes from it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d"))
COMMAND_SECONDS = 1800


class BuildError(RuntimeError):
    """The image cannot be built; the text names the program and ends with what it said."""


def run(argv: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            cwd=cwd,
        )
    except FileNotFoundError as error:
        raise BuildError(f"{argv[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{argv[0]}: no end after {COMMAND_SECONDS} s") from error
    if done.returncode != 0:
        raise BuildError(f"{' '.join(argv[:4])} …: exit {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def find_mirror(suite: str, configured: str = "", sources: tuple[Path, ...] = SOURCES) -> str:
    """The setting, or the first mirror of the machine's apt configuration that has the suite."""
    if configured:
        return configured.rstrip("/")
    for address, suites in _entries(sources):
        if suite in suites and "security" not in address:
            return address.rstrip("/")
    raise BuildError(f"no Debian mirror for {suite} in the machine's apt configuration: set BEDPLATE_APT_MIRROR")


def _entries(sources: tuple[Path, ...]) -> Iterator[tuple[str, set[str]]]:
    """(address, suites) of every enabled `deb` source, one-line style and deb822 (sources.list(5))."""
    files = [path for place in sources for path in (sorted(place.iterdir()) if place.is_dir() else [place]) if path.is_file()]
    for path in files:
        text = path.read_text(errors="replace")
        if path.suffix == ".sources":
            yield from _deb822(text)
            continue
        for line in text.splitlines():
            match = re.match(r"deb\s+(?:\[[^]]*]\s+)?(\S+)\s+(\S+)", line)
            if match:
                yield match[1], {match[2]}


def _deb822(text: str) -> Iterator[tuple[str, set[str]]]:
    for stanza in re.split(r"\n\s*\n", text):
        lines = [line for line in stanza.splitlines() if not line.startswith("#")]
        fields = {key.strip().lower(): value.split() for key, _, value in (line.partition(":") for line in lines)}
        if "deb" in fields.get("types", []) and fields.get("enabled", ["yes"]) != ["no"]:
            for address in fields.get("uris", []):
                yield address, set(fields.get("suites", []))


def proxy_environment() -> dict[str, str]:
    """The proxy of apt, as debootstrap's wget wants it."""
    found = {}
    for scheme in ("http", "https"):
        words = run(["apt-config", "dump", "--format", "%v%n", f"Acquire::{scheme}::Proxy"]).split()
        if words and words[0] not in ("DIRECT", "false"):
            found[f"{scheme}_proxy"] = words[0]
    return found


def make_tree(tree: Path, *, suite: str, mirror: str, packages: tuple[str, ...]) -> None:
    """A minimal Debian tree at `tree`; needs root. A half-made one is removed."""
    temporary = tree.with_name(f"{tree.name}.{os.getpid()}.new")
    shutil.rmtree(temporary, ignore_errors=True)
    argv = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}"]
    argv += [f"--keyring={KEYRING}"] if KEYRING.exists() else []
    try:
        run([*argv, suite, str(temporary), mirror], env=proxy_environment())
        temporary.rename(tree)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def private_apt(apt: Path, *, suite: str, mirror: str, architecture: str) -> list[str]:
    """Options for apt-get and apt-cache with lists, cache and sources of their own below `apt`, brought up to date.

    The machine's apt state is neither used nor changed; what comes is verified by Debian's keyring.
    """
    for name in ("lists/partial", "archives/partial", "trusted"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    (apt / "sources.list").write_text(f"deb {signed}{mirror} {suite} main\ndeb {signed}{mirror} {suite}-updates main\n")
    options = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": apt / "lists",
        "Dir::State::Status": apt / "status",
        "Dir::Cache::Archives": apt / "archives",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
    }
    flags = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    run(["apt-get", "-q", *flags, "update"])
    return flags


def download_kernel(directory: Path, *, suite: str, mirror: str, package: str, architecture: str) -> Path:
    """Downloads what the kernel meta package depends on and unpacks it below `directory`; returns the unpacked tree."""
    apt = directory / "apt"
    flags = private_apt(apt, suite=suite, mirror=mirror, architecture=architecture)
    shown = run(["apt-cache", *flags, "show", "--no-all-versions", package])
    match = re.search(r"^Depends: .*?(linux-image-[0-9][^ ,]*)", shown, re.MULTILINE)
    if not match:
        raise BuildError(f"{package} of {suite} names no kernel")
    run(["apt-get", "-q", *flags, "download", match[1]], cwd=directory)
    unpacked = directory / "unpacked"
    for deb in sorted(directory.glob(f"{match[1]}_*.deb")):
        run(["dpkg-deb", "-x", str(deb), str(unpacked)])
    shutil.rmtree(apt)
    return unpacked
