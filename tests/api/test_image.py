"""Images through the API: by manifest and uploads, or from a directory of the server; nothing unverified is kept."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from controlplane.resources.image.store import ImageStore
from tests.api.fleet import FILES, lay_ground, manifest

IMAGES = "/v1/images"


async def put(client, path: str, content: bytes):
    return await client.put(path, content=content, headers={"content-type": "application/octet-stream"})


def digest(name: str) -> str:
    return hashlib.sha256(FILES[name]).hexdigest()


async def test_manifest_then_uploads_then_available(operator, member, settings):
    made = await operator.post(IMAGES, json={"manifest": manifest()})
    assert made.status_code == 201, made.text
    body = made.json()
    assert (body["state"], [file["is_stored"] for file in body["files"]]) == ("uploading", [False] * 3)
    for name, content in FILES.items():
        stored = await put(operator, f"{IMAGES}/debian/blobs/{digest(name)}", content)
        assert stored.status_code == 200, stored.text
    assert stored.json()["image_state"] == "available"
    shown = (await member.get(f"{IMAGES}/debian")).json()
    assert (shown["state"], [file["is_stored"] for file in shown["files"]]) == ("available", [True] * 3)
    assert (settings.state_dir / "images" / digest("root.raw")).read_bytes() == FILES["root.raw"]
    again = await put(operator, f"{IMAGES}/debian/blobs/{digest('vmlinuz')}", FILES["vmlinuz"])
    assert again.status_code == 200
    second = await operator.post(IMAGES, json={"manifest": manifest("debian-2")})
    assert second.json()["state"] == "available"


@pytest.mark.parametrize("content", [b"", b"kernal", b"kernel and more"])
async def test_bytes_that_do_not_match_are_not_kept(operator, settings, content):
    await operator.post(IMAGES, json={"manifest": manifest()})
    refused = await put(operator, f"{IMAGES}/debian/blobs/{digest('vmlinuz')}", content)
    assert (refused.status_code, refused.json()["code"]) == (422, "image.blob_mismatch")
    assert list((settings.state_dir / "images").iterdir()) == []
    assert (await operator.get(f"{IMAGES}/debian")).json()["state"] == "uploading"


async def test_only_what_the_manifest_names_is_taken(operator):
    await operator.post(IMAGES, json={"manifest": manifest()})
    refused = await put(operator, f"{IMAGES}/debian/blobs/{'0' * 64}", b"x")
    assert (refused.status_code, refused.json()["code"]) == (404, "image.blob_unknown")


async def test_an_upload_may_be_larger_than_other_bodies(operator):
    content = bytes(3 << 20)
    files = [
        {"name": "root.raw", "sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)},
        *manifest()["files"][1:],
    ]
    await operator.post(IMAGES, json={"manifest": manifest(files=files)})
    stored = await put(operator, f"{IMAGES}/debian/blobs/{files[0]['sha256']}", content)
    assert stored.status_code == 200, stored.text


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "Debian"},
        {"architecture": "z80"},
        {"root_file": "missing"},
        {"files": []},
        {"files": manifest()["files"] * 2},
        {"files": [{"name": "../evil", "sha256": "0" * 64, "size_bytes": 1}]},
        {"files": [{"name": "root.raw", "sha256": "xyz", "size_bytes": 1}]},
        {"boot": {"kind": "floppy"}},
        {"boot": {"kind": "kernel", "kernel_file": "none", "initramfs_file": "initramfs", "cmdline": ""}},
        {"min_disk_bytes": 0},
        {"licence": "free"},
    ],
)
async def test_wrong_manifests(operator, changes):
    refused = await operator.post(IMAGES, json={"manifest": manifest() | changes})
    assert (refused.status_code, refused.json()["code"]) == (422, "request.invalid"), refused.text
    assert (await operator.get(IMAGES)).json()["items"] == []


async def test_from_a_directory(operator, tmp_path):
    directory = tmp_path / "image"
    directory.mkdir()
    missing = await operator.post(IMAGES, json={"source": {"directory": str(directory)}})
    assert (missing.status_code, missing.json()["code"]) == (422, "image.manifest_invalid")
    (directory / "manifest.json").write_text(json.dumps(manifest()))
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    made = await operator.post(IMAGES, json={"source": {"directory": str(directory)}, "name": "mine"})
    assert made.status_code == 201, made.text
    assert (made.json()["name"], made.json()["state"]) == ("mine", "available")
    (directory / "vmlinuz").write_bytes(b"kernal")
    (directory / "manifest.json").write_text(
        json.dumps(manifest("other", files=[{**file, "sha256": "1" * 64} for file in manifest()["files"][:1]]))
    )
    refused = await operator.post(IMAGES, json={"source": {"directory": str(directory)}})
    assert refused.status_code == 422


async def test_a_directory_is_copied_without_a_transaction(operator, api, tmp_path, monkeypatch):
    """Copying takes minutes: no connection waits for it. Of two requests with one key the second repeats the first's answer."""
    directory = tmp_path / "image"
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps(manifest()))
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    take, waiting = ImageStore.take_file, []
    may = asyncio.Event()

    async def slow(*arguments, **options):
        waiting.append(arguments)
        await may.wait()
        await take(*arguments, **options)

    monkeypatch.setattr(ImageStore, "take_file", slow)
    body, headers = {"source": {"directory": str(directory)}}, {"idempotency-key": "once"}
    both = [asyncio.create_task(operator.post(IMAGES, json=body, headers=headers)) for _ in range(2)]
    async with asyncio.timeout(20):
        while len(waiting) < 2:
            await asyncio.sleep(0.02)
    state = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'"
    assert await api.database.pool.fetchval(state) == 0
    may.set()
    answers = await asyncio.gather(*both)
    assert [answer.status_code for answer in answers] == [201, 201], [answer.text for answer in answers]
    assert sorted("idempotency-replayed" in answer.headers for answer in answers) == [False, True]
    assert answers[0].json()["id"] == answers[1].json()["id"]
    assert len((await operator.get(IMAGES)).json()["items"]) == 1


async def test_what_is_being_removed_is_not_counted_and_not_stored_again_yet(operator, api):
    await operator.post(IMAGES, json={"manifest": manifest("first")})
    for name, content in FILES.items():
        await put(operator, f"{IMAGES}/first/blobs/{digest(name)}", content)
    await api.database.pool.execute("UPDATE blob SET removing_at = now()")
    made = await operator.post(IMAGES, json={"manifest": manifest("second")})
    assert (made.json()["state"], [file["is_stored"] for file in made.json()["files"]]) == ("uploading", [False] * len(FILES))
    path = f"{IMAGES}/second/blobs/{digest('vmlinuz')}"
    refused = await put(operator, path, FILES["vmlinuz"])
    assert (refused.status_code, refused.json()["code"]) == (409, "image.blob_being_removed")
    await api.database.pool.execute("DELETE FROM blob")
    assert (await put(operator, path, FILES["vmlinuz"])).status_code == 200


async def test_neither_or_both_origins(operator):
    assert (await operator.post(IMAGES, json={})).status_code == 422
    both = await operator.post(IMAGES, json={"manifest": manifest(), "source": {"directory": "/x"}})
    assert both.status_code == 422


async def test_members_read_only(member, operator):
    await operator.post(IMAGES, json={"manifest": manifest()})
    assert (await member.get(IMAGES)).status_code == 200
    assert (await member.post(IMAGES, json={"manifest": manifest("x")})).status_code == 403
    assert (await member.put(f"{IMAGES}/debian/blobs/{'0' * 64}", content=b"x")).status_code in (403, 404)
    assert (await member.delete(f"{IMAGES}/debian")).status_code in (403, 404)
    taken = await operator.post(IMAGES, json={"manifest": manifest()})
    assert (taken.status_code, taken.json()["code"]) == (409, "image.name_taken")


async def test_an_image_in_use_stays_and_an_unfinished_one_makes_no_vm(operator, api):
    await lay_ground(api.database.sessionmaker)
    await operator.post(
        IMAGES,
        json={
            "manifest": manifest(
                "half", files=[*manifest()["files"][1:], {"name": "root.raw", "sha256": "2" * 64, "size_bytes": 5}]
            )
        },
    )
    body = {"name": "web", "image": "half", "network": "net", "on_no_capacity": "wait"}
    refused = await operator.post("/v1/projects/ours/vms", json=body)
    assert (refused.status_code, refused.json()["code"]) == (409, "image.not_available")
    made = await operator.post("/v1/projects/ours/vms", json=body | {"image": "debian"})
    assert made.status_code == 201, made.text
    refused = await operator.delete(f"{IMAGES}/debian")
    assert (refused.status_code, refused.json()["code"]) == (409, "image.in_use")
    going = await operator.delete(f"{IMAGES}/half")
    assert (going.status_code, going.json()["state"]) == (202, "deleting")
