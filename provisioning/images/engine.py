"""Engine packages, the root of a container or of a VM's workload: one `root.tar.zst`, a Debian tree with an engine and nothing
else.

The one rule: the name in the cache is the digest of everything that goes in. The tree is made of single packages, without
package manager, shell or setuid programs: an engine needs none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from provisioning.images.debian import BuildError, find_mirror, private_apt, run
from provisioning.images.wheels import Wheel, sha256_of, unpacked

FORMAT = 3
ROOT_FILE = "root.tar.zst"
PYTHON = "3.11"
_PROGRAMS = Path(__file__).with_name("engine")
_INSTALLED = "opt/engine"
_MERGED = ("bin", "sbin", "lib", "lib64")
_EMPTY = ("dev", "etc", "models", "proc", "run", "sys", "tmp", "var/tmp")
_LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian", "usr/share/bug", "usr/share/doc-base")
_ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/:/usr/sbin/nologin\nengine:x:1000:1000:engine:/tmp:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nengine:x:1000:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost\n::1 localhost\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModule:
    """A wheel of the engine; `sha256` is the digest of `file`, its compiled part."""

    wheel: Wheel
    file: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecipe:
    """What goes into the package: `program` (a file beside the recipes, installed as `serve.py`) and the modules it imports;
    `left_out` are globs of what no engine reads.
    """

    name: str
    program: str
    modules: tuple[EngineModule, ...]
    left_out: tuple[str, ...] = ()
    suite: str = "bookworm"
    architecture: str = "x86_64"
    packages: tuple[str, ...] = (
        "base-files",
        "libbz2-1.0",
        "libc6",
        "libcrypt1",
        "libexpat1",
        "libffi8",
        "libgcc-s1",
        "libgomp1",
        "liblzma5",
        "libpython3.11-minimal",
        "libpython3.11-stdlib",
        "libssl3",
        "libstdc++6",
        "libuuid1",
        "python3.11-minimal",
        "zlib1g",
    )

    @property
    def debian_architecture(self) -> str:
        return {"x86_64": "amd64", "aarch64": "arm64"}[self.architecture]

    @property
    def program_file(self) -> Path:
        return _PROGRAMS / self.program

    def digest(self) -> str:
        content = hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode())
        content.update(self.program_file.read_bytes())
        return content.hexdigest()


LLAMA_CPP = EngineRecipe(
    name="llama-cpp",
    program="chat.py",
    modules=(
        EngineModule(
            wheel=Wheel(project="xllamacpp", version="2026.10.11549"),
            file="xllamacpp/xllamacpp.abi3.so",
            sha256="78dcbbfcc861ee3377554325dc12864829a76ec3de6f1882886d4a82a2def7f5",
        ),
    ),
)
EMBEDDING = EngineRecipe(
    name="embedding",
    program="embed.py",
    modules=(
        EngineModule(
            wheel=Wheel(project="onnxruntime", version="1.32.0", python=PYTHON),
            file="onnxruntime/capi/onnxruntime_pybind11_state.cpython-311-x86_64-linux-gnu.so",
            sha256="f31fb5f25aea85032805e0722c07a41443a23c8b612c7238dbea3cf67e9042ba",
        ),
        EngineModule(
            wheel=Wheel(project="numpy", version="2.4.6", python=PYTHON),
            file="numpy/_core/_multiarray_umath.cpython-311-x86_64-linux-gnu.so",
            sha256="1535fbed1e9ac6b717e72ad9bd5c20b9f0536a21084fcadc40c00255a8f35d1d",
        ),
        EngineModule(
            wheel=Wheel(project="tokenizers", version="0.23.3", python=PYTHON),
            file="tokenizers/tokenizers.abi3.so",
            sha256="4b1458a379296762a034d3bc89299c0c35b4eefb0577acca922f481b262c65a1",
        ),
    ),
    left_out=(
        *("numpy/**/tests", "numpy/f2py", "numpy/_core/include", "numpy/_core/lib", "numpy/random/lib", "**/*.pyi"),
        *("onnxruntime/datasets", "onnxruntime/quantization", "onnxruntime/tools", "onnxruntime/transformers"),
    ),
)
RECIPES = {recipe.name: recipe for recipe in (LLAMA_CPP, EMBEDDING)}


def build_engine(recipe: EngineRecipe, cache: Path, *, mirror: str = "", say: Callable[[str], None] = lambda _: None) -> Path:
    """The finished `root.tar.zst`, built when the cache has none (about a minute). Raises BuildError or FetchError."""
    engines = cache / "engines"
    engines.mkdir(parents=True, exist_ok=True)
    finished = engines / f"{recipe.name}-{recipe.digest()[:16]}"
    with _locked(engines):
        if not finished.exists():
            work = finished.with_name(f"{finished.name}.new")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                tree = work / "tree"
                say(f"Debian packages for {recipe.name}")
                _unpack_packages(
                    recipe, work, tree, find_mirror(recipe.suite, mirror or os.environ.get("BEDPLATE_APT_MIRROR", ""))
                )
                say(f"engine {', '.join(module.wheel.requirement for module in recipe.modules)}")
                _add_engine(recipe, tree, cache)
                _compile(tree)
                say("packing")
                _pack(tree, work / ROOT_FILE)
                for leftover in ("tree", "apt", "packages"):
                    shutil.rmtree(work / leftover, ignore_errors=True)
                work.rename(finished)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
    return finished / ROOT_FILE


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One build at a time in one cache; a second one waits and finds the result."""
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack_packages(recipe: EngineRecipe, work: Path, tree: Path, mirror: str) -> None:
    """Every package below `tree`, on a merged /usr; documentation is left out."""
    packages = work / "packages"
    packages.mkdir()
    flags = private_apt(work / "apt", suite=recipe.suite, mirror=mirror, architecture=recipe.debian_architecture)
    run(["apt-get", "-q", *flags, "download", *recipe.packages], cwd=packages)
    (tree / "usr").mkdir(parents=True)
    for name in _MERGED:
        (tree / "usr" / name).mkdir()
        (tree / name).symlink_to(f"usr/{name}")
    for package in sorted(packages.glob("*.deb")):
        stage = work / "stage"
        run(["dpkg-deb", "-x", str(package), str(stage)])
        for entry in stage.iterdir():
            target = tree / "usr" / entry.name if entry.name in _MERGED else tree / entry.name
            target.mkdir(exist_ok=True)
            run(["cp", "-a", f"{entry}/.", str(target)])
        shutil.rmtree(stage)
    for name in _LEFT_OUT:
        shutil.rmtree(tree / name, ignore_errors=True)
    for name in _EMPTY:
        (tree / name).mkdir(parents=True, exist_ok=True)
    (tree / "usr/bin/python3").symlink_to("python3.11")
    for name, content in _ACCOUNTS.items():
        (tree / name).write_text(content)


def _add_engine(recipe: EngineRecipe, tree: Path, cache: Path) -> None:
    installed = tree / _INSTALLED
    installed.mkdir(parents=True)
    for module in recipe.modules:
        wheel = unpacked(module.wheel, cache)
        found = sha256_of(wheel / module.file)
        if found != module.sha256:
            raise BuildError(f"{module.file} of {module.wheel.requirement} has sha256 {found}, not {module.sha256}")
        for entry in wheel.iterdir():
            if entry.is_dir():
                shutil.copytree(entry, installed / entry.name)
    for pattern in recipe.left_out:
        for path in list(installed.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copy(recipe.program_file, installed / "serve.py")


def _compile(tree: Path) -> None:
    """Byte code beside every module, by the tree's own interpreter: nothing is compiled at each start, which on an emulated
    processor takes longer than the rest. Sources are not looked at again (unchecked hashes), so times do not matter.
    """
    libraries = next(tree.glob("usr/lib/*-linux-gnu"))
    loader = next(tree.glob("lib64/ld-linux-*.so.*"), None) or next(tree.glob("lib/ld-linux-*.so.*"))
    python = [str(loader), "--library-path", str(libraries), str(tree / f"usr/bin/python{PYTHON}"), "-S", "-m", "compileall"]
    flags = ["-q", "-s", str(tree), "-p", "/", "--invalidation-mode", "unchecked-hash"]
    environment = {"PYTHONHOME": str(tree / "usr"), "PYTHONHASHSEED": "0"}
    run([*python, *flags, str(tree / _INSTALLED), str(tree / f"usr/lib/python{PYTHON}")], env=environment)


def _pack(tree: Path, target: Path) -> None:
    """The same bytes for the same tree: names sorted, times and owners fixed."""

    def fixed(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = 0, 0, 0, "", ""
        entry.mode &= 0o1777
        if entry.name in ("tmp", "var/tmp"):
            entry.mode = 0o1777
        return entry

    with target.open("wb") as output:
        packer = subprocess.Popen(["zstd", "-q", "-10", "-T0", "-c"], stdin=subprocess.PIPE, stdout=output)
        assert packer.stdin is not None
        with tarfile.open(fileobj=packer.stdin, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            for path in sorted(tree.rglob("*")):
                archive.add(path, arcname=str(path.relative_to(tree)), recursive=False, filter=fixed)
        packer.stdin.close()
        if packer.wait() != 0:
            raise BuildError(f"zstd: exit {packer.returncode}")
