"""`bedplate usage`: what the gateway served."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from controlplane.cli.noun import InProject, Output
from controlplane.cli.output import Format, show_many

app = typer.Typer(rich_markup_mode=None)

SUMS = {
    "HOUR": "hour",
    "MODEL": "model",
    "KEY": "key",
    "REQUESTS": "requests",
    "PROMPT": "prompt_tokens",
    "COMPLETION": "completion_tokens",
    "COST": "cost",
}
SUMS_WIDE = {"CACHED": "cached_tokens", "ESTIMATED": "estimated_requests", "UNBILLED": "unbilled_requests", "KEY ID": "key_id"}
RECORDS = {
    "STARTED": "started_at",
    "MODEL": "model",
    "OUTCOME": "outcome",
    "PROMPT": "prompt_tokens",
    "COMPLETION": "completion_tokens",
    "FIRST TOKEN MS": "first_token_ms",
}
RECORDS_WIDE = {"REQUEST": "request_id", "REPLICA": "replica_id", "ESTIMATED": "is_estimated", "BILLED": "is_billable"}


@app.command()
def usage(
    since: Annotated[str, typer.Option(help="How far to look back, like 24h or 30m.")] = "24h",
    model: Annotated[str | None, typer.Option(help="Only this model name.")] = None,
    key: Annotated[str | None, typer.Option(help="Only this key, by name or id.")] = None,
    total: Annotated[bool, typer.Option("--total", help="One line a model and key instead of one an hour.")] = False,
    records: Annotated[bool, typer.Option("--records", help="The latest requests, one by one.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The sums as CSV.")] = False,
    project: InProject = None,
    output: Output = Format.TABLE,
) -> None:
    """Show requests and tokens by hour, model and key."""
    from controlplane.cli.client import Client
    from controlplane.cli.wait import seconds_of

    client = Client()
    begin = (datetime.now(UTC) - timedelta(seconds=seconds_of(since))).isoformat()
    path = client.in_project("usage", project)
    by = "total" if total else "hour"
    if records:
        found = client.get(f"{path}/records", since=begin, model=model, key=key)
        show_many(found["items"], output, RECORDS, RECORDS_WIDE)
        return
    if csv:
        with client.stream(f"{path}/export", headers={}, since=begin, model=model, key=key, by=by) as answer:
            print(answer.read().decode(), end="")
        return
    found = client.get(path, since=begin, model=model, key=key, by=by)
    show_many(found["items"], output, SUMS, SUMS_WIDE)
