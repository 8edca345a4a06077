"""`bedplate image`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import Noun, Output
from controlplane.cli.output import Format, say, show_one

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
    directory: Annotated[Path, typer.Argument(help="Directory with manifest.json and the files it names.")],
    name: Annotated[str | None, typer.Option(help="Use this name instead of the manifest's.")] = None,
    output: Output = Format.TABLE,
) -> None:
    """Make an image of a directory: its manifest first, then every file that the control plane does not have."""
    from controlplane.cli.client import Client

    manifest = _manifest(directory)
    client = Client()
    body: dict[str, Any] = {"manifest": manifest} if name is None else {"manifest": manifest, "name": name}
    image = client.post("/v1/images", body)
    for file in image["files"]:
        if not file["is_stored"]:
            say(f"uploading {file['name']} ({file['size_bytes'] / (1 << 20):.1f} MiB)")
            client.upload(f"/v1/images/{image['id']}/blobs/{file['sha256']}", directory / file["name"])
    show_one(client.get(f"/v1/images/{image['id']}"), output)


def _manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot read {path}", why=str(error), exit_code=Exit.USAGE) from error
    if not isinstance(manifest, dict):
        raise CommandFailed(f"{path} does not hold an object", exit_code=Exit.USAGE)
    return manifest
