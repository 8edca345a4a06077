"""Pure parts of the guest image: the seed's text as the boot program reads it, mirrors, recipes, the initramfs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hostagent.drivers.machine.seed import render_seed
from hostagent.protocol.wanted import Generation, NicWanted, SeedWanted
from provisioning.images.debian import BuildError, find_mirror
from provisioning.images.kernel import load_order
from provisioning.images.recipe import FILES, Recipe

NIC = NicWanted(
    id="nic_1",
    generation=Generation(epoch=1, number=1),
    mac="02:00:00:00:00:09",
    ipv4="10.0.0.9",
    ipv6="fd00::9",
    mtu_bytes=1420,
)


def flatten(text: str) -> dict[str, str]:
    argv = ["awk", "-f", str(FILES / "flatten.awk")]
    done = subprocess.run(argv, input=text, check=True, capture_output=True, text=True, timeout=10)
    return dict(line.split("\t", 1) for line in done.stdout.splitlines())


@pytest.mark.skipif(shutil.which("awk") is None, reason="no awk")
def test_the_boot_program_reads_what_the_agent_renders() -> None:
    key = 'ssh-ed25519 AAAA "quoted" c:\\d'
    seed = SeedWanted(hostname="h", user="u", ssh_authorized_keys=(key, "second"), nameservers=("fd00::53", "10.0.0.53"))
    files = render_seed("vm_1", seed, (NIC,))
    assert flatten(files["meta-data"]) == {".instance-id": "vm_1", ".local-hostname": "h"}
    network = flatten(files["network-config"])
    assert network[".ethernets.eth0.match.macaddress"] == NIC.mac
    assert network[".ethernets.eth0.addresses.0"] == "10.0.0.9/32"
    assert network[".ethernets.eth0.addresses.1"] == "fd00::9/128"
    assert network[".ethernets.eth0.routes.1.via"] == "fe80::1"
    assert network[".ethernets.eth0.nameservers.addresses.1"] == "10.0.0.53"
    users = flatten(files["user-data"])
    assert users[".users.0.name"] == "u"
    assert users[".users.0.ssh_authorized_keys.0"] == key
    assert users[".users.0.ssh_authorized_keys.1"] == "second"


@pytest.mark.skipif(shutil.which("awk") is None, reason="no awk")
def test_lists_may_stand_at_the_indent_of_their_key() -> None:
    assert flatten("# comment\na:\n- b: 1\n  c:\n  - x\n- y\nd: 2\n") == {
        ".a.0.b": "1",
        ".a.0.c.0": "x",
        ".a.1": "y",
        ".d": "2",
    }


def test_the_mirror_comes_from_the_setting_or_from_apt(tmp_path: Path) -> None:
    (tmp_path / "a.sources").write_text(
        "Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\n\n"
        "Types: deb\n# a comment\nURIs: http://one.example/debian/\nSuites: bookworm bookworm-updates\nComponents: main\n"
    )
    (tmp_path / "b.list").write_text("deb [signed-by=/k] http://two.example/debian trixie main\n")
    assert find_mirror("bookworm", sources=(tmp_path,)) == "http://one.example/debian"
    assert find_mirror("trixie", sources=(tmp_path,)) == "http://two.example/debian"
    assert find_mirror("trixie", "http://mine.example/d/", sources=(tmp_path,)) == "http://mine.example/d"
    with pytest.raises(BuildError, match="BEDPLATE_APT_MIRROR"):
        find_mirror("sid", sources=(tmp_path,))


def test_whatever_changes_the_image_changes_its_digest() -> None:
    recipe = Recipe()
    assert recipe.digest() == Recipe().digest()
    assert recipe.digest() != replace(recipe, cmdline="console=ttyS0").digest()
    assert recipe.tree_digest() == replace(recipe, cmdline="console=ttyS0").tree_digest()
    assert recipe.tree_digest() != replace(recipe, packages=()).tree_digest()


def test_modules_load_after_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "modules.dep").write_text("k/a-b.ko: k/c.ko k/d.ko\nk/c.ko: k/d.ko\nk/d.ko:\nk/e.ko: k/d.ko\n")
    order = load_order(tmp_path, ("a_b", "built_in", "e"))
    assert [path.name for path in order] == ["d.ko", "c.ko", "a-b.ko", "e.ko"]
