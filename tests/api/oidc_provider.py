"""A small OpenID Connect provider, a process of its own with its own keys. `POST /next` says who signs in next, and what is
wrong then.

Prints its port. It checks what a real one checks: client, secret, redirect address, PKCE, and that a code is used once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "bedplate", "a secret: with % and +"
REDIRECT = "http://api.test/v1/sessions/sso/finish"


class Provider(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server_port}/realm"
        self.codes: dict[str, dict[str, str]] = {}
        self.next: dict = {}
        self.rotate()

    def rotate(self) -> None:
        self.key = RSAKey.generate_key(2048, {"kid": secrets.token_hex(4)}, private=True)

    def id_token(self, asked: dict[str, str]) -> str:
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
            **self.next["claims"],
        }
        claims = {name: value for name, value in claims.items() if value is not None}
        match self.next.get("signed"):
            case "by another":
                return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, RSAKey.generate_key(2048, private=True))
            case "by none":
                return _joined({"alg": "none"}, claims, lambda _: b"")
            case "by hmac":
                public = self.key.as_pem(private=False)
                header = {"alg": "HS256", "kid": self.key.kid}
                return _joined(header, claims, lambda text: hmac.digest(public, text, "sha256"))
            case "by a new key":
                self.rotate()
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)


def _joined(header: dict, claims: dict, sign) -> str:
    """A token by hand, as no library would make it."""

    def encoded(part: bytes) -> str:
        return base64.urlsafe_b64encode(part).rstrip(b"=").decode()

    text = ".".join(encoded(json.dumps(part).encode()) for part in (header, claims))
    return f"{text}.{encoded(sign(text.encode()))}"


class Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        match url.path:
            case "/realm/.well-known/openid-configuration":
                issuer = self.server.issuer
                self.answer(
                    200,
                    {
                        "issuer": issuer,
                        "authorization_endpoint": f"{issuer}/authorize",
                        "token_endpoint": f"{issuer}/token",
                        "jwks_uri": f"{issuer}/keys",
                    },
                )
            case "/realm/keys":
                self.answer(200, {"keys": [self.server.key.as_dict(private=False)]})
            case "/realm/authorize":
                self.authorize(query)
            case _:
                self.answer(404, {})

    def authorize(self, query: dict[str, str]) -> None:
        wanted = {"response_type": "code", "client_id": CLIENT, "redirect_uri": REDIRECT, "code_challenge_method": "S256"}
        if any(query.get(name) != value for name, value in wanted.items()) or "openid" not in query["scope"].split():
            self.answer(400, {"error": "invalid_request"})
            return
        code = secrets.token_urlsafe()
        self.server.codes[code] = query
        back = {"state": query["state"], "code": code, **self.server.next.get("back", {})}
        self.send_response(302)
        self.send_header("location", f"{REDIRECT}?{urlencode(back)}")
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/next":
            self.server.next = json.loads(body)
            self.answer(200, {})
            return
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        asked = self.server.codes.pop(form["code"], None)
        shown = base64.b64decode(self.headers.get("authorization", "").removeprefix("Basic ")).decode()
        verifier = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=").decode()
        if shown != "bedplate:a%20secret%3A%20with%20%25%20and%20%2B":
            self.answer(401, {"error": "invalid_client"})
        elif asked is None or asked["code_challenge"] != verifier or form["redirect_uri"] != asked["redirect_uri"]:
            self.answer(400, {"error": "invalid_grant"})
        else:
            self.answer(200, {"access_token": "x", "token_type": "Bearer", "id_token": self.server.id_token(asked)})

    def answer(self, status: int, body: dict) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, words: str, *given: object) -> None:
        print(words % given, file=sys.stderr)


if __name__ == "__main__":
    provider = Provider()
    print(provider.server_port, flush=True)
    provider.serve_forever()
