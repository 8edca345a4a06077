"""The talk with a certificate authority by ACME (RFC 8555), through the `acme` package; the one module that imports it.

The one rule: it blocks, so it runs in a thread, and whatever goes wrong comes out as AcmeFailed with the authority's words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import requests
from acme import challenges, crypto_util, errors, messages
from acme.client import ClientNetwork, ClientV2
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from josepy.errors import Error as JoseError
from josepy.jwa import ES256
from josepy.jwk import JWK, JWKEC

from controlplane.certificate.store import Account, pem_of
from controlplane.settings import AcmeSettings

_NETWORK_SECONDS = 30
_TOTAL_SECONDS = 180
_NONCE_TRIES = 4


class AcmeFailed(RuntimeError):
    """The authority was not reached, or did not issue; the message says why, `retry_after` when to come back at the soonest."""

    def __init__(self, words: str, *, retry_after: timedelta | None = None) -> None:
        super().__init__(words)
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    key_pem: bytes
    chain_pem: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What an authority says of itself."""

    url: str
    needs_external_account: bool


class _Network(ClientNetwork):
    """Asks again with a fresh nonce as often as RFC 8555 (6.5) wants it, and remembers Retry-After."""

    def __init__(self, acme: AcmeSettings, key: JWK | None) -> None:
        super().__init__(key, alg=ES256, user_agent="bedplate", timeout=_NETWORK_SECONDS)
        if acme.ca_file is not None:
            self.verify_ssl = str(acme.ca_file)  # pyright: ignore[reportAttributeAccessIssue] - requests takes a file too
        self.retry_after: timedelta | None = None
        self.session.hooks["response"].append(self._note)

    def _note(self, response: requests.Response, *_: Any, **__: Any) -> None:
        if response.status_code in {429, 503} and "retry-after" in response.headers:
            self.retry_after = ClientV2.retry_after(response, 0) - datetime.now()  # noqa: DTZ005 - as the library counts

    def post(self, *arguments: Any, **options: Any) -> requests.Response:
        for _ in range(_NONCE_TRIES - 1):
            try:
                return super().post(*arguments, **options)
            except messages.Error as error:
                if error.code != "badNonce":
                    raise
        return super().post(*arguments, **options)


class Conversation:
    """One visit at an authority. `account` is what to keep afterwards, also after a failure."""

    def __init__(self, acme: AcmeSettings, account: Account | None) -> None:
        self.acme = acme
        self.account = account or Account(directory_url=acme.directory_url, key_pem=pem_of(_new_key()).decode())
        self._key = JWKEC(key=serialization.load_pem_private_key(self.account.key_pem.encode(), password=None))
        self._network = _Network(acme, self._key)

    def terms(self) -> Terms:
        """What the directory says; nothing is changed. Raises AcmeFailed."""
        with self._told():
            return _terms(self._client())

    def fetch(self, answers: MutableMapping[str, str]) -> Fetched:
        """A certificate for all names, its challenges answered through `answers` (path → text). Raises AcmeFailed."""
        with self._told():
            client = self._client()
            self._sign_in(client)
            key_pem = pem_of(_new_key())
            order = self._order(client, crypto_util.make_csr(key_pem, list(self.acme.domains)))
            for authorization in _all(order.authorizations):
                if authorization.body.status != messages.STATUS_VALID:
                    self._answer(client, authorization, answers)
            deadline = datetime.now() + timedelta(seconds=_TOTAL_SECONDS)  # noqa: DTZ005 - as the library counts
            finished = client.poll_and_finalize(order, deadline)
            return Fetched(key_pem=key_pem, chain_pem=finished.fullchain_pem.encode())

    def _client(self) -> ClientV2:
        return ClientV2(ClientV2.get_directory(self.acme.directory_url, self._network), self._network)

    def _sign_in(self, client: ClientV2) -> None:
        """Use the account; make it, or tell its new address, where that is not done yet."""
        terms = _terms(client)
        if not self.acme.terms_agreed:
            raise AcmeFailed(
                f"the authority's terms are not agreed to: read {terms.url or 'what it publishes'}, "
                "then set BEDPLATE_TLS__ACME__TERMS_AGREED=true"
            )
        if terms.needs_external_account:
            raise AcmeFailed("the authority takes only accounts that are bound to one made elsewhere; that is not supported")
        if self.account.url and self._is_known(client):
            return
        wanted = messages.NewRegistration.from_data(email=self.acme.email or None, terms_of_service_agreed=True)
        try:
            url = client.new_account(wanted).uri
        except errors.ConflictError as found:  # the key has an account already
            url = found.location
            self._network.account = messages.RegistrationResource(uri=url, body=messages.Registration())
        self.account = replace(self.account, url=url, email=self.acme.email)

    def _order(self, client: ClientV2, request_pem: bytes) -> messages.OrderResource:
        """A new order; an authority that has lost our account gets a new one first."""
        try:
            return client.new_order(request_pem)
        except messages.Error as error:
            if error.code != "accountDoesNotExist":
                raise
        self._network.account = None
        self.account = replace(self.account, url="")
        self._sign_in(client)
        return client.new_order(request_pem)

    def _is_known(self, client: ClientV2) -> bool:
        """Whether the authority knows the account that we remember."""
        held = messages.RegistrationResource(uri=self.account.url, body=messages.Registration())
        self._network.account = held
        if self.account.email == self.acme.email:
            return True
        try:
            client.update_registration(held, messages.Registration.from_data(email=self.acme.email or None, contact=()))
        except messages.Error as error:
            if error.code != "accountDoesNotExist":
                raise
            self._network.account = None
            return False
        self.account = replace(self.account, email=self.acme.email)
        return True

    def _answer(
        self, client: ClientV2, authorization: messages.AuthorizationResource, answers: MutableMapping[str, str]
    ) -> None:
        name = authorization.body.identifier.value
        for body in _all(authorization.body.challenges):
            if isinstance(body.chall, challenges.HTTP01):
                response, text = body.chall.response_and_validation(self._key)
                answers[body.chall.path] = text
                client.answer_challenge(body, response)
                return
        offered = ", ".join(str(body.chall.typ) for body in _all(authorization.body.challenges))
        raise AcmeFailed(f"for {name} the authority offers no http-01 challenge, only {offered or 'none'}")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Whatever the library and its network throw, as AcmeFailed."""
        try:
            yield
        except AcmeFailed:
            raise
        except messages.Error as error:
            raise AcmeFailed(_words(error), retry_after=self._network.retry_after) from error
        except errors.ValidationError as error:
            raise AcmeFailed(_refused(error)) from error
        except errors.IssuanceError as error:
            raise AcmeFailed(_words(error.error)) from error
        except errors.TimeoutError as error:
            raise AcmeFailed(f"the authority did not decide within {_TOTAL_SECONDS} s") from error
        except requests.RequestException as error:
            raise AcmeFailed(f"{self.acme.directory_url} does not answer: {error}") from error
        except (errors.Error, JoseError, OSError, ValueError, KeyError) as error:
            raise AcmeFailed(f"{self.acme.directory_url} does not speak ACME as RFC 8555 has it: {_plain(error)}") from error


def _all(values: Any) -> list[Any]:
    """The library's decoders hide that these are tuples."""
    return list(values)


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _terms(client: ClientV2) -> Terms:
    meta = client.directory.meta
    return Terms(url=meta.terms_of_service or "", needs_external_account=bool(meta.external_account_required))


def _words(error: messages.Error) -> str:
    """A problem document in one line: `rateLimited: too many certificates (a.test: …)`."""
    words = f"{error.code or error.typ}: {error.detail or error.description or 'no reason given'}"
    inner = [
        f"{problem.identifier.value if problem.identifier else ''}: {problem.detail}"
        for problem in _all(error.subproblems or ())
    ]
    return f"{words} ({'; '.join(inner)})" if inner else words


def _plain(error: Exception) -> str:
    for part in error.args:
        if isinstance(part, requests.Response):
            return f"HTTP {part.status_code} from {part.url}"
    return str(error) or type(error).__name__


def _refused(error: errors.ValidationError) -> str:
    reasons: list[str] = []
    for authorization in error.failed_authzrs:
        found = [body.error for body in _all(authorization.body.challenges) if body.error is not None]
        reasons += [f"{authorization.body.identifier.value}: {_words(problem)}" for problem in found]
    return f"the authority did not reach this machine at port 80 of its names: {'; '.join(reasons)}"
