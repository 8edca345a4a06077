"""`bedplate event`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from controlplane.cli.output import Format, say

app = typer.Typer(rich_markup_mode=None, name="event", no_args_is_help=True, help="What happens, as it happens.")
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 15.0


@app.command()
def tail(
    after: Annotated[int | None, typer.Option(min=0, help="Begin behind this position; 0: with the oldest.")] = None,
    project: Annotated[str | None, typer.Option("--project", "-p", help="Only events of this project.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Only kinds that begin so, like vm.")] = None,
    subject: Annotated[str | None, typer.Option(help="Only events of the thing with this id.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="End after so many.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="table, or json: one line an event.")] = Format.TABLE,
) -> None:
    """Follow events until interrupted; a cut connection is taken up where it was."""
    for number, event in enumerate(follow(after, project=project, kind=kind, subject=subject), start=1):
        if output is Format.JSON:
            print(json.dumps(event, ensure_ascii=False), flush=True)
        else:
            name = event["body"].get("name") or event["subject_id"]
            print(f"{event['created_at'][11:19]}  {event['kind']:<24} {name}", flush=True)
        if count is not None and number >= count:
            return


def follow(after: int | None, **query: Any) -> Iterator[dict[str, Any]]:
    """Events for ever. Raises CommandFailed when the first connection fails; later ones are made again and again."""
    import httpx2

    from controlplane.cli.client import Client

    client, position = Client(), after
    client.get("/v1/tokens/current")
    pause = 0.0
    while True:
        headers = {} if position is None else {"last-event-id": str(position)}
        try:
            with client.stream("/v1/events", headers=headers, **query) as answer:
                pause = 0.0
                for reached, name, data in messages(answer.iter_lines()):
                    position = reached
                    if name == "events.reset":
                        say("some events are too old to be kept: look at everything anew")
                    elif data is not None:
                        yield data
        except httpx2.TransportError as error:
            if pause == 0.0:
                print(f"the stream was cut ({error}); waiting for the API", file=sys.stderr)
        pause = min(max(2 * pause, _FIRST_PAUSE_SECONDS), _LONGEST_PAUSE_SECONDS)
        time.sleep(pause)


def messages(lines: Iterator[str]) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Position, name and data of each server-sent event; of a mere position name and data are missing."""
    found: dict[str, str] = {}
    for line in lines:
        field, _, value = line.partition(": ")
        if line:
            found[field] = value
        elif "id" in found:
            data = json.loads(found["data"]) if "data" in found else None
            yield int(found["id"]), found.get("event", ""), data
            found = {}
