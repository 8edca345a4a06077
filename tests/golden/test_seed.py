from __future__ import annotations

import shutil
import subprocess

import pytest
import yaml

from hostagent.drivers.machine.seed import render_seed, seed_image
from hostagent.drivers.machine.vfat import ImageTooLargeError
from hostagent.protocol.wanted import Generation, NicWanted, SeedWanted

FIRST = Generation(epoch=1, number=1)
NICS = (
    NicWanted(id="nic_1", generation=FIRST, mac="06:00:00:00:00:01", ipv4="10.1.2.3", ipv6="fd00::3", mtu_bytes=1420),
    NicWanted(id="nic_2", generation=FIRST, mac="06:00:00:00:00:02", ipv4="10.1.3.3", ipv6=""),
)
SEED = SeedWanted(
    hostname="web-1",
    ssh_authorized_keys=("ssh-ed25519 AAAAC3Nza someone@example", 'ssh-ed25519 AAAAC3Nzb "quoted" ключ'),
    nameservers=("192.0.2.53", "2001:db8::53"),
)


def test_the_seed_is_what_it_was(golden):
    text = "".join(f"==> {name}\n{content}" for name, content in render_seed("vm_1", SEED, NICS).items())

    golden("seed.txt", text)


def test_every_text_is_yaml_that_says_what_was_wanted():
    seed = {name: yaml.safe_load(text) for name, text in render_seed("vm_1", SEED, NICS).items()}

    assert seed["meta-data"] == {"instance-id": "vm_1", "local-hostname": "web-1"}
    assert seed["user-data"]["users"][0]["ssh_authorized_keys"] == list(SEED.ssh_authorized_keys)
    first = seed["network-config"]["ethernets"]["eth0"]
    assert first["addresses"] == ["10.1.2.3/32", "fd00::3/128"]
    assert {route["via"]: route["on-link"] for route in first["routes"]} == {"169.254.1.1": True, "fe80::1": True}
    assert "routes" not in seed["network-config"]["ethernets"]["eth1"]


def test_a_tenants_user_data_is_left_alone_and_ours_goes_beside_it():
    script = "#!/bin/sh\necho hello\n"
    seed = render_seed("vm_1", SeedWanted(hostname="a", ssh_authorized_keys=("ssh-ed25519 A",), user_data=script), ())

    assert seed["user-data"] == script
    assert yaml.safe_load(seed["vendor-data"])["users"][0]["ssh_authorized_keys"] == ["ssh-ed25519 A"]


@pytest.mark.skipif(shutil.which("mcopy") is None, reason="mtools is not installed")
@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 300_000])
def test_another_program_reads_the_files_of_the_image(tmp_path, size):
    user_data = "#cloud-config\n" + "x" * size
    seed = SeedWanted(hostname="a", user_data=user_data)
    image = tmp_path / "seed.img"
    image.write_bytes(seed_image(render_seed("vm_1", seed, NICS)))

    subprocess.run(["mcopy", "-i", str(image), "::*", str(tmp_path)], check=True, timeout=10)

    assert {name: (tmp_path / name).read_text() for name in render_seed("vm_1", seed, NICS)} == render_seed("vm_1", seed, NICS)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ImageTooLargeError):
        seed_image(render_seed("vm_1", SeedWanted(hostname="a", user_data="x" * 9_000_000), ()))
