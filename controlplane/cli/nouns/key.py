"""`bedplate key`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from controlplane.cli import spec
from controlplane.cli.noun import File, InProject, Noun, Output
from controlplane.cli.output import Format, say, show_one

noun = Noun(
    "key",
    "keys",
    columns={"NAME": "name", "HINT": "hint", "MODELS": "models", "EXPIRES": "expires_at", "AGE": "created_at"},
    wide={"ID": "id", "SCOPES": "scopes", "REQUESTS/MIN": "requests_per_minute", "TOKENS/MIN": "tokens_per_minute"},
    help="Keys of applications for the gateway.",
)
app = noun.app
noun.add_list()
noun.add_show()
noun.add_delete("revoke")


@app.command()
def create(
    name: Annotated[str | None, typer.Argument(help="A DNS label.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="A model name it may call; may be repeated; default: all.")] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Tokens a minute.")] = None,
    token_budget: Annotated[int | None, typer.Option(min=1, help="Tokens in a budget's period.")] = None,
    money_budget: Annotated[str | None, typer.Option(help="Money in a budget's period, like 100.00.")] = None,
    budget_period: Annotated[str | None, typer.Option(help="total (default), day or month.")] = None,
    priority: Annotated[str | None, typer.Option(help="low, normal (default) or high: who waits first.")] = None,
    expires: Annotated[str | None, typer.Option(help="Refused after this time, like 12h or 90m.")] = None,
    max_concurrent: Annotated[int | None, typer.Option(min=1, help="Requests at a time.")] = None,
    allow_from: Annotated[list[str] | None, typer.Option(help="A prefix it may be used from; may be repeated.")] = None,
    scope: Annotated[list[str] | None, typer.Option(help="A kind of call, like chat or audio; may be repeated.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="KEY=VALUE, which rules of routes can ask for.")] = None,
    file: File = None,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Make a key. It is printed this once."""
    from controlplane.cli.client import Client
    from controlplane.cli.wait import seconds_of

    expires_at = None if expires is None else (datetime.now(UTC) + timedelta(seconds=seconds_of(expires))).isoformat()
    options = {
        "name": name,
        "models": model or None,
        "max_concurrent": max_concurrent,
        "allowed_cidrs": allow_from or None,
        "scopes": scope or None,
        "labels": spec.pairs(label),
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "token_budget": token_budget,
        "money_budget": money_budget,
        "budget_period": budget_period,
        "priority": priority,
        "expires_at": expires_at,
    }
    client = Client()
    made = client.post(noun.path(client, project), spec.merged(file, options))
    if output in {Format.TABLE, Format.WIDE}:
        say(f"key {made['name']}, shown this once:")
        print(made["secret"])
    else:
        show_one(made, output)
