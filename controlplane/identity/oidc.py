"""An OpenID Connect provider: discovery, authorization code with PKCE, and the check of what it says (OpenID Connect Core 1.0).

The one rule: nothing of an ID token is believed before its signature, issuer, audience, times and nonce are right.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import secrets
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpx2
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from controlplane.identity.errors import SsoRefused, SsoUnavailable
from controlplane.settings import OidcSettings, is_private_url

_ALGORITHMS = ["RS256", "PS256", "ES256", "RS384", "ES384", "RS512", "ES512", "EdDSA"]  # of key pairs; never HMAC or none
_KEPT_SECONDS = 3600.0
_KEYS_AGAIN_SECONDS = 30.0
_TIMEOUT_SECONDS = 10.0
_LEEWAY_SECONDS = 60
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One sign-in under way; it rests sealed in the browser's cookie."""

    state: str
    nonce: str
    verifier: str
    next: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What of an ID token is used; `email` only when the provider has verified it."""

    issuer: str
    subject: str
    email: str | None
    name: str
    groups: frozenset[str]


def new_flow(next_path: str) -> Flow:
    return Flow(
        state=secrets.token_urlsafe(32), nonce=secrets.token_urlsafe(32), verifier=secrets.token_urlsafe(48), next=next_path
    )


class Provider:
    """What it publishes is kept for an hour; keys are read anew when a token names one that is not known."""

    def __init__(self, settings: OidcSettings) -> None:
        self._settings = settings
        self._lock = asyncio.Lock()
        self._published: dict[str, Any] = {}
        self._published_at = self._keys_at = float("-inf")
        self._keys = KeySet([])

    async def authorization_url(self, flow: Flow, redirect_uri: str) -> str:
        """Where the browser goes; raises SsoUnavailable."""
        published = await self._discovered()
        challenge = base64.urlsafe_b64encode(hashlib.sha256(flow.verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": redirect_uri,
            "scope": self._settings.scopes,
            "state": flow.state,
            "nonce": flow.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        endpoint = str(published["authorization_endpoint"])
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(query)}"

    async def claims(self, flow: Flow, code: str, redirect_uri: str) -> Claims:
        """Exchange the code and check the ID token; raises SsoRefused and SsoUnavailable."""
        published = await self._discovered()
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": flow.verifier,
        }
        answer = await self._asked("POST", str(published["token_endpoint"]), **self._authenticated(published, form))
        return await self._checked(str(answer.get("id_token", "")), flow)

    def _authenticated(self, published: Mapping[str, Any], form: dict[str, str]) -> dict[str, Any]:
        """The token request with the client's secret, in the way that the provider takes (RFC 6749, 2.3.1)."""
        file, client_id = self._settings.client_secret_file, self._settings.client_id
        if file is None:
            return {"data": {**form, "client_id": client_id}}
        secret = file.read_text().strip()
        if "client_secret_basic" in published.get("token_endpoint_auth_methods_supported", ["client_secret_basic"]):
            return {"data": form, "auth": (quote(client_id, safe=""), quote(secret, safe=""))}
        return {"data": {**form, "client_id": client_id, "client_secret": secret}}

    async def _checked(self, id_token: str, flow: Flow) -> Claims:
        try:
            try:
                token = jwt.decode(id_token, await self._known_keys(), algorithms=_ALGORITHMS)
            except (JoseError, ValueError):
                token = jwt.decode(id_token, await self._known_keys(anew=True), algorithms=_ALGORITHMS)
            found = token.claims
            jwt.JWTClaimsRegistry(
                leeway=_LEEWAY_SECONDS,
                iss={"essential": True, "value": self._settings.issuer},
                aud={"essential": True, "value": self._settings.client_id},
                sub={"essential": True},
                exp={"essential": True},
                iat={"essential": True},
                nonce={"essential": True, "value": flow.nonce},
            ).validate(found)
        except (JoseError, ValueError) as error:
            _log.warning("an ID token was refused: %r", error)
            raise SsoRefused("the provider's word cannot be believed") from error
        if isinstance(found["aud"], list) and len(found["aud"]) > 1 and found.get("azp") != self._settings.client_id:
            raise SsoRefused("the provider's word is for somebody else")
        return self._claims(found)

    def _claims(self, found: Mapping[str, Any]) -> Claims:
        groups = found.get(self._settings.groups_claim) or []
        email = found.get("email") if found.get("email_verified") is True else None
        return Claims(
            issuer=str(found["iss"]),
            subject=str(found["sub"]),
            email=str(email).lower() if email else None,
            name=str(found.get("name") or "")[:128],
            groups=frozenset([groups] if isinstance(groups, str) else (str(group) for group in groups)),
        )

    async def _discovered(self) -> Mapping[str, Any]:
        async with self._lock:
            if time.monotonic() - self._published_at > _KEPT_SECONDS:
                issuer = self._settings.issuer
                found = await self._asked("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration")
                if found.get("issuer") != issuer:
                    raise SsoUnavailable(f"the provider calls itself {found.get('issuer')}, not {issuer}")
                for endpoint in ("authorization_endpoint", "token_endpoint", "jwks_uri"):
                    if not is_private_url(str(found.get(endpoint))):
                        raise SsoUnavailable(f"the provider's {endpoint} has no https:// URL")
                self._published, self._published_at = found, time.monotonic()
            return self._published

    async def _known_keys(self, *, anew: bool = False) -> KeySet:
        """The provider's keys; anew only when they are not quite fresh, so that bad tokens make no storm of requests."""
        published = await self._discovered()
        async with self._lock:
            if time.monotonic() - self._keys_at > (_KEYS_AGAIN_SECONDS if anew else _KEPT_SECONDS):
                found: Any = await self._asked("GET", str(published["jwks_uri"]))
                self._keys, self._keys_at = KeySet.import_key_set(found), time.monotonic()
            return self._keys

    async def _asked(self, method: str, url: str, **options: Any) -> dict[str, Any]:
        ca = self._settings.ca_file
        verify = ssl.create_default_context(cafile=str(ca)) if ca is not None else True
        try:
            async with httpx2.AsyncClient(verify=verify, timeout=_TIMEOUT_SECONDS) as client:
                answer = await client.request(method, url, headers={"accept": "application/json"}, **options)
                body = answer.json()
        except (httpx2.HTTPError, OSError, ValueError) as error:
            _log.warning("the identity provider does not answer %s: %r", url, error)
            raise SsoUnavailable from error
        if answer.status_code >= 500 or not isinstance(body, dict):
            raise SsoUnavailable(f"the identity provider answers {answer.status_code}")
        if answer.status_code >= 400:
            _log.warning("the identity provider refuses %s: %s", url, body.get("error"))
            raise SsoRefused(f"the identity provider refuses: {body.get('error')}")
        return body


def provider_of(settings: OidcSettings) -> Provider | None:
    """None where no issuer is set."""
    return Provider(settings) if settings.issuer else None
