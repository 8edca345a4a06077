"""`bedplate cert`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from controlplane.cli.context import state_directory
from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.output import Format, say, show_many
from controlplane.core.files import write_whole

_PROGRAM = "controlplane.certificate"  # run, not imported: this is a client
_COLUMNS = {
    "FOR": "name",
    "SOURCE": "source",
    "NAMES": "names",
    "ENDS": "not_after",
    "RENEWED": "renew_at",
    "LAST ERROR": "last_error",
}
_WIDE = {"ISSUER": "issuer", "PATH": "path", "FAILURES": "failures", "NEXT TRY": "next_try_at"}

app = typer.Typer(rich_markup_mode=None, name="cert", no_args_is_help=True, help="Certificates of the API and the gateway.")


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
            write_whole(authority_key_file, authority.key_pem, 0o600)
            write_whole(authority_file, authority.certificate_pem, 0o644)
        issued = authority.issue(names)
        write_whole(place / "server.key", issued.key_pem, 0o600)
        write_whole(place / "server.pem", issued.certificate_pem, 0o644)
    except AuthorityUnusable as error:
        raise CommandFailed(f"{authority_file} cannot be used", why=str(error), exit_code=Exit.USAGE) from error
    except (OSError, ValueError) as error:
        raise CommandFailed(f"cannot write to {place}", why=str(error)) from error
    say(f"certificate for {', '.join(names)}")
    say("the server needs:  BEDPLATE_API__TLS__CERTIFICATE and BEDPLATE_API__TLS__KEY (server.pem, server.key)")
    say(f"clients need:      bedplate login https://{names[0]}:8700 --ca {authority_file}")
    print(place)


@app.command()
def acme(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be found; order and write nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch a new one also when the old one is good.")] = False,
) -> None:
    """Fetch or renew the certificate by ACME now, on the server's machine and with its settings; the API does it by itself."""
    sys.stdout.flush()
    options = [flag for flag, is_set in (("--dry-run", dry_run), ("--force", force)) if is_set]
    argv = [sys.executable, "-P", "-m", _PROGRAM, "renew", *options]
    os.execv(sys.executable, argv)  # noqa: S606 - constant program, no shell


@app.command()
def show(output: Annotated[Format, typer.Option("-o", "--output", help="Form of the output.")] = Format.TABLE) -> None:
    """Show what API and gateway of this machine show, until when it is valid, and how its renewal stands."""
    argv = [sys.executable, "-P", "-m", _PROGRAM, "show"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        code = Exit.USAGE if done.returncode == Exit.USAGE else Exit.FAILED
        raise CommandFailed("the certificates cannot be shown", why=done.stderr.strip(), exit_code=code)
    show_many(json.loads(done.stdout), output, _COLUMNS, _WIDE)
