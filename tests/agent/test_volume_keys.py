"""Keys of volumes: wrapped for host and project, handed in when the host has none, gone with their volume."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from controlplane.remote.fake import FakeLinks
from hostagent.lib import wrap
from hostagent.protocol.errors import AgentError
from hostagent.protocol.results import Running, Succeeded
from hostagent.protocol.verbs import SealedKey, VolumeUnlock
from hostagent.protocol.wanted import EncryptionWanted, Generation, KekWanted, Purge, SnapshotWanted, VolumeWanted
from hostagent.verbs import snapshot, volume
from hostagent.verbs.context import Agent
from tests.fakehost import FakeHost

MIB = 1 << 20
VOLUME = "vol_1"
KEK = rsa.generate_private_key(65537, 3072)


def oaep(label: str) -> padding.OAEP:
    return padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), label.encode())


def kek(number: int, private: rsa.RSAPrivateKey = KEK) -> KekWanted:
    public = private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return KekWanted(id=f"kek_{number}", public_key=public.decode())


def generation(number: int) -> Generation:
    return Generation(epoch=1, number=number)


def wanted(unlock: str = "host", number: int = 1) -> VolumeWanted:
    encryption = EncryptionWanted(unlock=unlock, kek=kek(1))
    return VolumeWanted(id=VOLUME, generation=generation(number), size_bytes=MIB, backend="fake", encryption=encryption)


def unwrapped(handed: dict[str, str], private: rsa.RSAPrivateKey = KEK) -> bytes:
    return private.decrypt(base64.b64decode(handed["wrapped"]), oaep(f"volume-key:{handed['id']}"))


async def made(agent: Agent, document: VolumeWanted) -> dict[str, str]:
    result = (await volume.ensure(agent, document)).result
    assert isinstance(result, Succeeded), result
    (key,) = result.observed["keys"]
    return key


@pytest.fixture
async def host(tmp_path: Path):
    fake = (await FakeHost.open("h", tmp_path)).join(FakeLinks())
    yield fake
    await fake.close()


async def after_a_restart(host: FakeHost, root: Path) -> FakeHost:
    """The same state directory under a new agent, which knows nothing."""
    fresh = await FakeHost.open("h", root)
    fresh.storage.volumes.update({key: replace(seen, state="idle") for key, seen in host.storage.volumes.items()})
    return fresh


async def test_a_key_is_wrapped_for_host_and_project_and_lies_nowhere_plain(host: FakeHost, tmp_path: Path):
    handed = await made(host.agent, wanted())

    key = unwrapped(handed)
    assert (handed["id"], handed["kek_id"], len(key)) == (VOLUME, "kek_1", 32)
    forms = (key, key.hex().encode(), base64.b64encode(key))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.parent.name == "keys" for path in written)
    assert [path for path in written if any(form in path.read_bytes() for form in forms)] == []
    assert (await after_a_restart(host, tmp_path)).agent.keyring.locked(host.agent.paths.volume_directory(VOLUME)) == ()


async def test_a_volume_of_the_control_plane_waits_for_its_key(host: FakeHost, tmp_path: Path):
    key = unwrapped(await made(host.agent, wanted("control_plane")))
    fresh = await after_a_restart(host, tmp_path)

    result = (await volume.ensure(fresh.agent, wanted("control_plane"))).result
    observed = await volume.KIND.observe(fresh.agent, VOLUME, wanted("control_plane"))
    assert observed is not None
    assert (observed.state, volume.KIND.is_settled(wanted("control_plane"), observed)) == ("locked", True)
    assert isinstance(result, Running)
    assert (result.step, result.needs) == ("locked", (VOLUME,))

    public = load_pem_public_key((await fresh.agent.keyring.public_key()).encode())
    assert isinstance(public, rsa.RSAPublicKey)

    def sealed(content: bytes, label: str = f"unlock:{VOLUME}") -> VolumeUnlock:
        text = base64.b64encode(public.encrypt(content, oaep(label))).decode()
        return VolumeUnlock(id=VOLUME, keys=(SealedKey(id=VOLUME, sealed=text),))

    for wrong in (sealed(b"x" * 32), sealed(key, "unlock:vol_2")):
        with pytest.raises(AgentError, match=r"key\.wrong"):
            await volume.unlock(fresh.agent, wrong)
    assert (await volume.unlock(fresh.agent, sealed(key))).missing == ()
    observed = await volume.KIND.observe(fresh.agent, VOLUME, wanted("control_plane"))
    assert observed is not None
    assert observed.state == "idle"
    await fresh.close()


async def test_another_kek_wraps_the_key_anew(host: FakeHost):
    first = await made(host.agent, wanted())
    other = rsa.generate_private_key(65537, 3072)
    rotated = replace(wanted(), generation=generation(2), encryption=EncryptionWanted(kek=kek(2, other)))

    second = await made(host.agent, rotated)
    assert second["kek_id"] == "kek_2"
    assert unwrapped(second, other) == unwrapped(first)


async def test_a_host_that_lost_its_own_key_asks_for_its_volumes(host: FakeHost, tmp_path: Path):
    await made(host.agent, wanted())
    host.agent.paths.host_key.unlink()
    fresh = await after_a_restart(host, tmp_path)

    directory = fresh.agent.paths.volume_directory(VOLUME)
    assert (await fresh.agent.keyring.open(directory)).missing == (VOLUME,)
    assert fresh.agent.keyring.locked(directory) == (VOLUME,)
    await fresh.close()


async def test_a_clone_and_a_snapshot_carry_the_keys_of_what_they_are_made_of(host: FakeHost):
    origin = await made(host.agent, wanted())
    document = SnapshotWanted(id="snap_1", generation=generation(1), volume_id=VOLUME, backend="fake", kek=kek(1))
    taken = (await snapshot.ensure(host.agent, document)).result
    assert isinstance(taken, Succeeded)
    assert [unwrapped(key) for key in taken.observed["keys"]] == [unwrapped(origin)]

    clone = replace(wanted(), id="vol_2", snapshot_id="snap_1")
    cloned = (await volume.ensure(host.agent, clone)).result
    assert isinstance(cloned, Succeeded)
    keys = {key["id"]: unwrapped(key) for key in cloned.observed["keys"]}
    assert set(keys) == {VOLUME, "vol_2"}
    assert keys[VOLUME] == unwrapped(origin) != keys["vol_2"]


async def test_with_a_volume_its_key_is_gone(host: FakeHost):
    await made(host.agent, wanted())
    directory = host.agent.paths.volume_directory(VOLUME)
    assert list((directory / "keys").iterdir())
    await volume.KIND.remove(host.agent, VOLUME, wanted())

    assert not directory.exists()


async def test_keys_stay_while_a_machine_holds_the_volume_and_go_before_its_data(host: FakeHost):
    key = unwrapped(await made(host.agent, wanted("control_plane")))
    directory = host.agent.paths.volume_directory(VOLUME)
    host.storage.faults.fail("storage.withdraw", AgentError("volume.in_use", "a machine still uses it"))
    with pytest.raises(AgentError, match=r"volume\.in_use"):
        await volume.KIND.remove(host.agent, VOLUME, wanted())
    assert (await host.agent.keyring.open(directory)).keys == {VOLUME: key}

    host.storage.faults.fail("storage.remove", OSError("the disk is broken"))
    with pytest.raises(OSError, match="broken"):
        await volume.KIND.remove(host.agent, VOLUME, wanted())
    assert directory.exists()
    assert (await host.agent.keyring.open(directory)).keys == {}
    assert not (directory / "keys").exists()


async def test_a_key_that_is_handed_in_while_its_volume_goes_does_not_come_back(host: FakeHost, tmp_path: Path, monkeypatch):
    key = unwrapped(await made(host.agent, wanted("control_plane")))
    fresh = await after_a_restart(host, tmp_path)
    public = load_pem_public_key((await fresh.agent.keyring.public_key()).encode())
    assert isinstance(public, rsa.RSAPublicKey)
    sealed = base64.b64encode(public.encrypt(key, oaep(f"unlock:{VOLUME}"))).decode()
    body = VolumeUnlock(id=VOLUME, keys=(SealedKey(id=VOLUME, sealed=sealed),))
    arrived, go_on, unwrap = asyncio.Event(), asyncio.Event(), wrap.unwrap

    async def slowly(*arguments: Any, **named: Any) -> bytes:
        arrived.set()
        await go_on.wait()
        return await unwrap(*arguments, **named)

    monkeypatch.setattr(wrap, "unwrap", slowly)
    unlocking = asyncio.create_task(volume.unlock(fresh.agent, body))
    await arrived.wait()
    going = asyncio.create_task(volume.purge(fresh.agent, Purge(id=VOLUME, generation=generation(2))))
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(unlocking, going)

    assert isinstance(going.result().result, Succeeded)
    assert not fresh.agent.paths.volume_directory(VOLUME).exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and VOLUME in path.name and "keys" in path.parts]
    with pytest.raises(AgentError, match=r"volume\.missing"):
        await volume.unlock(fresh.agent, body)
    await fresh.close()


async def test_a_snapshot_is_gone_when_its_room_is(host: FakeHost):
    await made(host.agent, wanted())
    document = SnapshotWanted(id="snap_1", generation=generation(1), volume_id=VOLUME, backend="fake", kek=kek(1))
    await snapshot.ensure(host.agent, document)
    host.storage.faults.hold("storage.drop_snapshot")
    purge = Purge(id="snap_1", generation=generation(1))
    merging = [(await snapshot.purge(host.agent, purge)).result for _ in range(2)]
    assert [getattr(result, "step", "") for result in merging] == ["merging", "merging"]
    assert host.agent.documents.get("snapshot", "snap_1") is not None

    host.storage.faults.release("storage.drop_snapshot")
    results = [(await snapshot.purge(host.agent, purge)).result for _ in range(2)]
    assert isinstance(results[-1], Succeeded)
    assert host.agent.documents.get("snapshot", "snap_1") is None
    assert not host.agent.paths.snapshot_directory("snap_1").exists()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"encryption": EncryptionWanted(unlock="control_plane")}, "volume.invalid"),
        ({"encryption": EncryptionWanted(cipher="none")}, "volume.unencrypted"),
        ({"encryption": EncryptionWanted(kek=KekWanted(id="kek_9", public_key="none"))}, "key.invalid"),
        ({"queue_size": 100}, "volume.invalid"),
        ({"pool": "fast"}, "volume.pool_unknown"),
        ({"image_id": "img_1", "image_file": "disk", "snapshot_id": "snap_1"}, "volume.invalid"),
    ],
)
async def test_what_can_never_be_made_true_is_refused(host: FakeHost, change: dict[str, object], code: str):
    document = replace(wanted(), **change)
    try:
        result = (await volume.ensure(host.agent, document)).result
        found = getattr(result, "code", "")
    except AgentError as error:
        found = error.code
    assert found == code
