"""`bedplate image`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane.cli import spec
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import File, Noun, Output, Timeout, Waiting
from controlplane.cli.output import Format, say, show_one

if TYPE_CHECKING:
    from controlplane.cli.client import Client

noun = Noun(
    "image",
    "images",
    in_project=False,
    columns={"NAME": "name", "STATE": "state", "ARCH": "architecture", "OS": "os", "HOSTS": "hosts", "AGE": "created_at"},
    wide={"ID": "id", "USER": "default_user", "MIN DISK": "min_disk_bytes", "DESCRIPTION": "description"},
    help="Guest images.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete("remove")


@app.command("import")
def import_image(
    directory: Annotated[Path | None, typer.Argument(help="Directory with manifest.json and the files it names.")] = None,
    url: Annotated[str | None, typer.Option(help="Of a manifest.json; the control plane fetches the files beside it.")] = None,
    sha256: Annotated[str | None, typer.Option(help="With --url: SHA-256 of that manifest.")] = None,
    name: Annotated[str | None, typer.Option(help="Use this name instead of the manifest's.")] = None,
    file: File = None,
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2h",
) -> None:
    """Make an image of a directory, whose files are uploaded, of a manifest by URL, or of one in FILE whose files have URLs."""
    from controlplane.cli.client import Client
    from controlplane.cli.wait import seconds_of

    if sum(source is not None for source in (directory, url, file)) != 1:
        raise CommandFailed("give a directory, --url or --file", exit_code=Exit.USAGE)
    if url is not None:
        manifest = _fetched(url, sha256)
    else:
        manifest = _manifest(directory / "manifest.json") if directory is not None else spec.merged(file, {})
    client = Client()
    body: dict[str, Any] = {"manifest": manifest} if name is None else {"manifest": manifest, "name": name}
    image = client.post("/v1/images", body)
    for entry in image["files"]:
        if directory is not None and not entry["is_stored"] and not entry["url"]:
            say(f"uploading {entry['name']} ({entry['size_bytes'] / (1 << 20):.1f} MiB)")
            client.upload(f"/v1/images/{image['id']}/blobs/{entry['sha256']}", directory / entry["name"])
    if wait and any(entry["url"] for entry in image["files"]):
        _until_fetched(client, image["id"], seconds_of(timeout))
    show_one(client.get(f"/v1/images/{image['id']}"), output)


def _until_fetched(client: Client, image_id: str, seconds: float) -> None:
    """Tells how far it is, once in a while."""
    deadline, told = time.monotonic() + seconds, ""
    while (image := client.get(f"/v1/images/{image_id}"))["state"] == "uploading":
        if image["failure"]:
            hint = f"bedplate image remove {image['name']}"
            raise CommandFailed(f"{image['name']} could not be fetched", why=image["failure"], hint=hint)
        if time.monotonic() > deadline:
            raise CommandFailed(f"{image['name']} is not whole yet", why=image["last_error"] or "", exit_code=Exit.TIMED_OUT)
        done, size = (sum(file[key] for file in image["files"] if file["url"]) for key in ("fetched_bytes", "size_bytes"))
        words = f"fetching {image['name']}: {done >> 20} of {size >> 20} MiB ({100 * done // max(size, 1)} %)"
        words += f", again after: {image['last_error']}" if image["last_error"] else ""
        if words != told:
            say(words)
        told = words
        time.sleep(1)


def _fetched(url: str, sha256: str | None) -> dict[str, Any]:
    """The manifest at a URL, whose files lie beside it."""
    import hashlib
    from urllib.parse import urljoin

    import httpx2

    if sha256 is None:
        raise CommandFailed("--url needs --sha256 of the manifest", exit_code=Exit.USAGE)
    try:
        answer = httpx2.get(url, follow_redirects=True, timeout=30).raise_for_status()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise CommandFailed(f"cannot fetch {url}", why=str(error)) from error
    if (found := hashlib.sha256(answer.content).hexdigest()) != sha256.lower():
        raise CommandFailed(f"{url} is not the manifest that was meant", why=f"its sha256 is {found}, not {sha256}")
    manifest = _parsed(answer.content, url)
    for file in manifest.get("files", []):
        file.setdefault("url", urljoin(str(answer.url), file["name"]))
    return manifest


def _manifest(path: Path) -> dict[str, Any]:
    try:
        return _parsed(path.read_bytes(), str(path))
    except OSError as error:
        raise CommandFailed(f"cannot read {path}", why=str(error), exit_code=Exit.USAGE) from error


def _parsed(content: bytes, place: str) -> dict[str, Any]:
    try:
        manifest = json.loads(content)
    except ValueError as error:
        raise CommandFailed(f"cannot read {place}", why=str(error), exit_code=Exit.USAGE) from error
    if not isinstance(manifest, dict):
        raise CommandFailed(f"{place} does not hold an object", exit_code=Exit.USAGE)
    return manifest
