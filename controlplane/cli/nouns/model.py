"""`bedplate model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.noun import Noun, Output, Timeout, Waiting
from controlplane.cli.output import Format, say, show_many, show_one

noun = Noun(
    "model",
    "models",
    in_project=False,
    columns={
        "NAME": "name",
        "STATE": "state",
        "ENGINE": "engine",
        "SIZE": "size_bytes",
        "MEMORY": "memory_bytes",
        "TITLE": "title",
    },
    wide={"CONTEXT": "context_tokens", "FEATURES": "features", "ISOLATIONS": "isolations", "LICENCE": "license"},
    help="Models of the catalogue.",
)
app = noun.app
noun.add_show()


@app.command("list")
def list_(output: Output = Format.TABLE) -> None:
    """List the catalogue; files that are not valid are named on stderr."""
    from controlplane.cli.client import Client

    found = Client().get("/v1/models")
    for problem in found["problems"]:
        say(f"{problem['path']} is not in force: {problem['detail']}")
    show_many(found["items"], output, noun.columns, noun.wide)


@app.command()
def validate(file: Annotated[Path, typer.Argument(help="A catalogue entry as YAML.")], output: Output = Format.TABLE) -> None:
    """Check a catalogue entry, and show what a replica of it would be."""
    from controlplane.cli.client import Client

    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot read {file}", why=str(error), exit_code=Exit.USAGE) from error
    show_one(Client().post("/v1/models/validate", {"yaml": text}), output)


@app.command("import")
def import_(
    name: Annotated[str, typer.Argument(help="The model's name in the catalogue.")],
    output: Output = Format.TABLE,
    wait: Waiting = True,
    timeout: Timeout = "2h",
) -> None:
    """Fetch weights and engine, so that endpoints can serve the model."""
    from controlplane.cli.client import Client, segment
    from controlplane.cli.wait import wait_for

    client = Client()
    client.post(f"/v1/models/{segment(name)}/import")
    if wait and client.operation_id is not None:
        wait_for(client, client.operation_id, timeout=timeout)
    show_one(client.get(f"/v1/models/{segment(name)}"), output)
