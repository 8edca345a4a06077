"""What the commands of a noun have in common, so that `nouns/<noun>.py` holds only what is its own.

The one rule: a command is a thin face of one API call; what it prints is what the API answered.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.output import Columns, Format, say, show_many, show_one

Output = Annotated[Format, typer.Option("--output", "-o", help="Form of what is printed.")]
InProject = Annotated[str | None, typer.Option("--project", "-p", help="Project; default: the context's.")]
Waiting = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]
Timeout = Annotated[str, typer.Option(help="Longest wait, like 90s, 30m or 2h.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
File = Annotated[Path | None, typer.Option("--file", "-f", help="Body as YAML; - is stdin. Options win over it.")]
Description = Annotated[str | None, typer.Option(help="For people.")]
LabelOptions = Annotated[list[str] | None, typer.Option("--label", help="Label KEY=VALUE; may be repeated.")]
Filters = Annotated[list[str] | None, typer.Option("--filter", help="field=value, field!=value or field~part.")]
Sort = Annotated[str | None, typer.Option(help="Field to sort by; -field: descending.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Most items to show.")]


class Noun:
    """The commands of one noun. `columns` are shown in tables, `wide` besides with `-o wide`."""

    def __init__(
        self, name: str, plural: str, *, columns: Columns, wide: Columns | None = None, in_project: bool = True, help: str = ""
    ) -> None:  # fmt: skip
        self.name, self.plural, self.in_project = name, plural, in_project
        self.columns, self.wide = columns, wide or {}
        self.app = typer.Typer(rich_markup_mode=None, name=name, no_args_is_help=True, help=help or f"Work with {plural}.")

    def path(self, client: Any, project: str | None = None, ref: str = "", action: str = "") -> str:
        """The API path of the list, of one thing, or of an action on it."""
        from controlplane.cli.client import segment

        base = client.in_project(self.plural, project) if self.in_project else f"/v1/{self.plural}"
        return "/".join([base, *([segment(ref)] if ref else []), *([action] if action else [])])

    def create(
        self,
        body: Mapping[str, Any],
        *,
        project: str | None = None,
        output: Format = Format.TABLE,
        wait: bool = True,
        timeout: str = "30m",
    ) -> dict[str, Any]:
        """POST `body`, wait, print the thing as it is then."""
        from controlplane.cli.client import Client

        client = Client()
        made = client.post(self.path(client, project), body)
        return self._follow(client, made, project, output, wait=wait, timeout=timeout)

    def act(
        self,
        ref: str,
        action: str = "",
        body: Mapping[str, Any] | None = None,
        *,
        project: str | None = None,
        output: Format = Format.TABLE,
        wait: bool = True,
        timeout: str = "30m",
    ) -> dict[str, Any]:
        """POST an action, or PATCH without one; wait; print."""
        from controlplane.cli.client import Client

        if not action and not body:
            raise CommandFailed("nothing to change was given", hint="--help shows what can be", exit_code=Exit.USAGE)
        client = Client()
        path = self.path(client, project, ref, action)
        changed = client.post(path, body) if action else client.patch(path, body or {})
        return self._follow(client, changed, project, output, wait=wait, timeout=timeout)

    def _follow(
        self, client: Any, item: dict[str, Any], project: str | None, output: Format, *, wait: bool, timeout: str
    ) -> dict[str, Any]:
        from controlplane.cli.wait import wait_for

        if wait and client.operation_id is not None:
            path = self.path(client, project, item["id"])
            wait_for(client, client.operation_id, timeout=timeout, path=path)
            item = client.get(path)
        elif client.operation_id is not None:
            say(f"bedplate operation wait {client.operation_id}")
        show_one(item, output)
        return item

    def delete(
        self, refs: list[str], *, project: str | None = None, yes: bool = False, wait: bool = True, timeout: str = "30m"
    ) -> None:
        """DELETE each, after asking; what is not there is an error here, because it is probably a typing mistake."""
        from controlplane.cli.client import Client
        from controlplane.cli.wait import wait_for

        confirm(f"Delete {self.name} {', '.join(refs)}?", yes=yes)
        client = Client()
        for ref in refs:
            path = self.path(client, project, ref)
            item = client.get(path)
            client.delete(path)
            if wait:
                wait_for(client, client.operation_id, timeout=timeout, path=path)
            say(f"deleted {self.name} {item.get('name') or ref}" if wait else f"deleting {self.name} {ref}")

    def add_list(self) -> None:
        """Mount `list`."""
        if self.in_project:

            def in_project(
                output: Output = Format.TABLE, project: InProject = None, filter: Filters = None, sort: Sort = None,
                limit: Limit = None,
            ) -> None:  # fmt: skip
                self.print_list(output, project=project, filter=filter, sort=sort, limit=limit)

            self.app.command("list", help=f"List {self.plural}.")(in_project)
        else:

            def everywhere(
                output: Output = Format.TABLE, filter: Filters = None, sort: Sort = None, limit: Limit = None
            ) -> None:
                self.print_list(output, filter=filter, sort=sort, limit=limit)

            self.app.command("list", help=f"List {self.plural}.")(everywhere)

    def add_show(self) -> None:
        """Mount `show`."""
        if self.in_project:

            def in_project(ref: str, output: Output = Format.TABLE, project: InProject = None) -> None:
                self.print_one(ref, output, project=project)

            self.app.command("show", help=f"Show one {self.name} (name or id).")(in_project)
        else:

            def everywhere(ref: str, output: Output = Format.TABLE) -> None:
                self.print_one(ref, output)

            self.app.command("show", help=f"Show one {self.name} (name or id).")(everywhere)

    def add_delete(self, verb: str = "delete") -> None:
        """Mount `delete` (or another word for it)."""
        if self.in_project:

            def in_project(
                refs: list[str], project: InProject = None, yes: Yes = False, wait: Waiting = True, timeout: Timeout = "30m"
            ) -> None:
                self.delete(refs, project=project, yes=yes, wait=wait, timeout=timeout)

            self.app.command(verb, help=f"Delete {self.plural} (names or ids).")(in_project)
        else:

            def everywhere(refs: list[str], yes: Yes = False, wait: Waiting = True, timeout: Timeout = "30m") -> None:
                self.delete(refs, yes=yes, wait=wait, timeout=timeout)

            self.app.command(verb, help=f"Delete {self.plural} (names or ids).")(everywhere)

    def add_update(self, *, has_description: bool = True) -> None:
        """Mount `update` of a noun in a project, for what is said by labels, description and a file alone."""
        from controlplane.cli import spec

        def described(
            ref: str, label: LabelOptions = None, description: Description = None, file: File = None,
            project: InProject = None, output: Output = Format.TABLE,
        ) -> None:  # fmt: skip
            options = {"labels": spec.pairs(label), "description": description}
            self.act(ref, body=spec.merged(file, options), project=project, output=output)

        def labelled(
            ref: str, label: LabelOptions = None, file: File = None, project: InProject = None, output: Output = Format.TABLE
        ) -> None:
            described(ref, label, None, file, project, output)

        self.app.command("update", help="Change what is given.")(described if has_description else labelled)

    def print_list(self, output: Format, *, project: str | None = None, limit: int | None = None, **query: Any) -> None:
        from controlplane.cli.client import Client

        client = Client()
        show_many(client.items(self.path(client, project), limit=limit, **query), output, self.columns, self.wide)

    def print_one(self, ref: str, output: Format, *, project: str | None = None) -> None:
        from controlplane.cli.client import Client

        client = Client()
        show_one(client.get(self.path(client, project, ref)), output)


def print_stream(client: Any, path: str, **query: Any) -> None:
    """Bytes as they come, to standard output. Raises CommandFailed when the stream is cut."""
    import httpx2

    try:
        with client.stream(path, headers={}, **query) as answer:
            for chunk in answer.iter_bytes():
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
    except httpx2.TransportError as error:
        client.get("/v1/tokens/current")  # says so when the token is what ended
        raise CommandFailed("the stream was cut", why=str(error)) from error


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is destroyed. Raises CommandFailed when nobody can answer, or the answer is no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed("this needs a confirmation", hint="add --yes", exit_code=Exit.USAGE)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CommandFailed("nothing was done", exit_code=Exit.FAILED)
