"""One renewal from beginning to end: is it due, ask, check what came, put it in place, remember how it went.

The one rule: the certificate in use is replaced only by one that fits its key, names what was asked and is valid now.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from controlplane.certificate import schedule
from controlplane.certificate.challenge import PATH, ChallengeUnanswerable, Responder
from controlplane.certificate.conversation import AcmeFailed, Conversation, Fetched
from controlplane.certificate.store import Held, Store
from controlplane.core.sealing import Sealer
from controlplane.settings import Settings

_PROBE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """`held` is what is shown now; `is_new`: it came with this call."""

    held: Held
    is_new: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of a dry run. What is not `is_ok` and `is_fatal` would make the real run fail."""

    name: str
    words: str
    is_ok: bool = True
    is_fatal: bool = True


async def renew(settings: Settings, sealer: Sealer, *, is_forced: bool = False) -> Renewed:
    """Fetch a certificate if one is due. Raises AcmeFailed (remembered, with a time to try again) and RenewalBusy."""
    acme, store = settings.tls.acme, Store(settings.acme_directory)
    with store.locked():
        record, held, now = store.record(), store.held(), datetime.now(UTC)
        due = schedule.due(acme, held, record, now)
        if held is not None and due.at > now and not is_forced:
            return Renewed(held=held, is_new=False, why=due.why)
        store.put_record(schedule.begun(acme, record, now))
        try:
            fetched = await _fetch(settings, store, sealer)
        except AcmeFailed as failure:
            then = datetime.now(UTC)
            store.put_record(schedule.failed(acme, record, then, str(failure), retry_after=failure.retry_after))
            raise
        store.put(key_pem=fetched.key_pem, chain_pem=fetched.chain_pem)
        store.put_record(schedule.succeeded(acme))
        return Renewed(held=Held.of(fetched.chain_pem), is_new=True, why=due.why)


async def _fetch(settings: Settings, store: Store, sealer: Sealer) -> Fetched:
    acme = settings.tls.acme
    before = store.account(sealer, acme.directory_url)
    conversation = Conversation(acme, before)
    if before is None:
        store.put_account(sealer, conversation.account)  # before the authority hears of the key: it is never lost
    try:
        async with Responder.listening(acme.challenge_listen) as responder:
            fetched = await asyncio.to_thread(conversation.fetch, responder.answers)
    except ChallengeUnanswerable as error:
        raise AcmeFailed(str(error)) from error
    finally:
        if conversation.account != before:
            store.put_account(sealer, conversation.account)
    check(fetched, acme.domains, datetime.now(UTC))
    return fetched


def check(fetched: Fetched, names: tuple[str, ...], now: datetime) -> None:
    """Raises AcmeFailed when what came is not what was asked for."""
    try:
        held = Held.of(fetched.chain_pem)
        leaf = x509.load_pem_x509_certificates(fetched.chain_pem)[0]
        key = serialization.load_pem_private_key(fetched.key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise AcmeFailed(f"what the authority issued cannot be read: {error}") from error
    if leaf.public_key() != key.public_key():
        raise AcmeFailed("the authority issued a certificate for another key")
    if missing := sorted(set(names) - held.names):
        raise AcmeFailed(f"the authority issued a certificate that does not name {', '.join(missing)}")
    if not held.not_before <= now < held.not_after:
        span = f"{held.not_before:%Y-%m-%d %H:%M} to {held.not_after:%Y-%m-%d %H:%M} UTC"
        raise AcmeFailed(f"the authority issued a certificate that is not valid now ({span}); is this machine's clock right?")


async def rehearse(settings: Settings, sealer: Sealer) -> list[Finding]:
    """What a renewal would find. Nothing is ordered, nothing is written."""
    acme, store = settings.tls.acme, Store(settings.acme_directory)
    account = store.account(sealer, acme.directory_url)
    due = schedule.due(acme, store.held(), store.record(), datetime.now(UTC))
    when = "at once" if due.at <= datetime.now(UTC) else f"at {due.at:%Y-%m-%d %H:%M} UTC"
    known = f"known as {account.url}" if account and account.url else "would be made"
    return [
        Finding(name="certificate", words=f"for {', '.join(acme.domains)}: would be fetched {when}, because {due.why}"),
        Finding(name="account", words=known),
        *await asyncio.to_thread(_authority, Conversation(acme, account)),
        *await _challenge(settings),
    ]


def _authority(conversation: Conversation) -> list[Finding]:
    acme = conversation.acme
    try:
        terms = conversation.terms()
    except AcmeFailed as failure:
        return [Finding(name="authority", words=str(failure), is_ok=False)]
    agreed = "agreed to" if acme.terms_agreed else "not agreed to: read them, then set BEDPLATE_TLS__ACME__TERMS_AGREED=true"
    return [
        Finding(name="authority", words=f"{acme.directory_url} answers"),
        Finding(name="terms", words=f"{terms.url or 'none published'}: {agreed}", is_ok=acme.terms_agreed),
    ]


async def _challenge(settings: Settings) -> list[Finding]:
    """Whether the listener opens, and whether each name leads to it from here (through a NAT it may not, and still work)."""
    listen = settings.tls.acme.challenge_listen
    try:
        async with Responder.listening(listen) as responder:
            responder.answers[f"{PATH}rehearsal"] = "here"
            found = [Finding(name="challenge", words=f"{listen} can be listened on")]
            for name in settings.tls.acme.domains:
                wrong = await _reach(name)
                words = f"http://{name} leads here" if wrong is None else f"http://{name} does not lead here: {wrong}"
                found.append(Finding(name="challenge", words=words, is_ok=wrong is None, is_fatal=False))
            return found
    except ChallengeUnanswerable as error:
        return [Finding(name="challenge", words=str(error), is_ok=False)]


async def _reach(name: str) -> str | None:
    """Ask port 80 of a name for the rehearsal's answer; what is wrong, in words."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            reader, writer = await asyncio.open_connection(name, 80)
            try:
                writer.write(f"GET {PATH}rehearsal HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n".encode())
                answer = await reader.read(4096)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer within {_PROBE_SECONDS:.0f} s"
    except socket.gaierror:
        return "the name has no address"
    except OSError as error:
        return error.strerror or str(error)
    return None if answer.endswith(b"here") else "something else answers there"
