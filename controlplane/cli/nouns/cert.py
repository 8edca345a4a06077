"""`bedplate cert`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.context import state_directory
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.output import say

app = typer.Typer(name="cert", no_args_is_help=True, help="Certificates of the API and the gateway.")


@app.callback()
def _group() -> None:
    """Keeps `init` a sub-command."""


@app.command()
def init(
    name: Annotated[list[str] | None, typer.Option(help="DNS name or address of the server; may be repeated.")] = None,
    directory: Annotated[Path | None, typer.Option("--directory", help="Where to write; default: <state>/tls.")] = None,
) -> None:
    """Make a private authority (once) and a server certificate (each time); running servers take it in by themselves."""
    from controlplane.cli.certificates import Authority, AuthorityUnusable

    place = directory or state_directory() / "tls"
    wanted: list[str] = [*(name or []), socket.gethostname(), "localhost", "127.0.0.1", "::1"]
    names = list(dict.fromkeys(wanted))
    authority_file, authority_key_file = place / "ca.pem", place / "ca.key"
    try:
        place.mkdir(parents=True, exist_ok=True)
        if authority_file.exists() and authority_key_file.exists():
            authority = Authority.load(authority_file.read_bytes(), authority_key_file.read_bytes())
        else:
            authority = Authority.make(names[0])
            _write(authority_key_file, authority.key_pem, 0o600)
            _write(authority_file, authority.certificate_pem, 0o644)
        issued = authority.issue(names)
        _write(place / "server.key", issued.key_pem, 0o600)
        _write(place / "server.pem", issued.certificate_pem, 0o644)
    except AuthorityUnusable as error:
        raise CommandFailed(f"{authority_file} cannot be used", why=str(error), exit_code=Exit.USAGE) from error
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot write to {place}", why=str(error)) from error
    say(f"certificate for {', '.join(names)}")
    say("the server needs:  BEDPLATE_API__TLS__CERTIFICATE and BEDPLATE_API__TLS__KEY (server.pem, server.key)")
    say(f"clients need:      bedplate login https://{names[0]}:8700 --ca {authority_file}")
    print(place)


def _write(path: Path, content: bytes, mode: int) -> None:
    """Whole or not at all, never readable by more than `mode` allows."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.chmod(mode)
    partial.rename(path)
