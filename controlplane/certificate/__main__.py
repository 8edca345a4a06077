"""`python -m controlplane.certificate renew | show`: what `bedplate cert acme`, `cert show` and the API's clock run.

The one rule: it is a process of its own, so the API carries none of it, and killing it costs nothing but one try.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from pydantic import ValidationError

from controlplane.certificate import schedule
from controlplane.certificate.store import RenewalBusy, Store, held_at
from controlplane.keyfile import KeyFileUnusable, load_sealer
from controlplane.settings import Settings, TlsSettings

BUSY = 75  # EX_TEMPFAIL of sysexits(3)


def renew(settings: Settings, *, is_forced: bool, is_dry: bool) -> int:
    """Words on stderr, the certificate's path on stdout. Exit code 0: what is shown is good; 75: another one is at it."""
    from controlplane.certificate.conversation import AcmeFailed
    from controlplane.certificate.renewal import rehearse
    from controlplane.certificate.renewal import renew as renew_certificate

    sealer = load_sealer(settings)
    if is_dry:
        findings = asyncio.run(rehearse(settings, sealer))
        for finding in findings:
            _say(f"{'ok' if finding.is_ok else 'no':<3} {finding.name:<12} {finding.words}")
        return 0 if all(finding.is_ok for finding in findings if finding.is_fatal) else 1
    try:
        renewed = asyncio.run(renew_certificate(settings, sealer, is_forced=is_forced))
    except RenewalBusy as error:
        _say(f"Error: {error}")
        return BUSY
    except AcmeFailed as error:
        _say(f"Error: no certificate from {settings.tls.acme.directory_url}\n  why:     {error}")
        return 1
    held = renewed.held
    _say(f"{'certificate fetched' if renewed.is_new else 'the certificate is good'}: {', '.join(sorted(held.names))}")
    _say(f"valid until {held.not_after:%Y-%m-%d %H:%M} UTC; renewed from {schedule.renew_at(held):%Y-%m-%d %H:%M} UTC on")
    print(Store(settings.acme_directory).pem)
    return 0


def show(settings: Settings) -> list[dict[str, Any]]:
    """What each listener shows, and how its renewal stands."""
    return [
        {"name": name, **_shown(settings, own, settings.tls_of(own))}
        for name, own in (("api", settings.api.tls), ("gateway", settings.gateway.tls))
    ]


def _shown(settings: Settings, own: TlsSettings, tls: TlsSettings) -> dict[str, Any]:
    if tls.certificate is None:
        return {"source": "none"}
    source = "files" if own.certificate is not None else "acme"
    held = held_at(tls.certificate)
    shown: dict[str, Any] = {"source": source, "path": str(tls.certificate)}
    if held is not None:
        shown |= {
            "names": sorted(held.names),
            "issuer": held.issuer,
            "not_before": held.not_before.isoformat(),
            "not_after": held.not_after.isoformat(),
            "is_placeholder": source == "acme" and held.is_self_signed,
        }
    if source == "acme":
        record = Store(settings.acme_directory).record()
        shown |= {
            "renew_at": None if held is None or held.is_self_signed else schedule.renew_at(held).isoformat(timespec="seconds"),
            "failures": record.failures,
            "last_error": record.last_error or None,
            "last_error_at": record.last_error_at or None,
            "next_try_at": record.next_try_at or None,
        }
    return shown


def _say(words: str) -> None:
    print(words, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bedplate cert")
    verbs = parser.add_subparsers(dest="verb", required=True)
    renewing = verbs.add_parser("renew")
    renewing.add_argument("--force", action="store_true")
    renewing.add_argument("--dry-run", action="store_true")
    verbs.add_parser("show")
    chosen = parser.parse_args(arguments)
    try:
        settings = Settings()
        if chosen.verb == "show":
            print(json.dumps(show(settings)))
            return 0
        if not settings.tls.acme.domains:
            _say("Error: no names are set\n  try:     BEDPLATE_TLS__ACME__DOMAINS=api.example.org,models.example.org")
            return 2
        return renew(settings, is_forced=chosen.force, is_dry=chosen.dry_run)
    except ValidationError as error:
        _say(f"Error: the configuration is not valid: {error}")
        return 2
    except (KeyFileUnusable, OSError) as error:
        _say(f"Error: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
