"""All settings in one object, read by entry points only and passed down.

Environment prefix `BEDPLATE_`, nested with `__` (`BEDPLATE_DATABASE__URL`), or a TOML file (`/etc/bedplate/config.toml`,
another by `BEDPLATE_CONFIG`). The environment wins over the file. Unknown keys are fatal in both.
"""

from __future__ import annotations

import json
import os
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

OTHER_VARIABLES = frozenset(  # of the start script, of this file, of the command line's client
    {
        "BEDPLATE_CACHE",
        "BEDPLATE_CLOUD_HYPERVISOR",
        "BEDPLATE_CONFIG",
        "BEDPLATE_CONTEXT",
        "BEDPLATE_PYTHON",
        "BEDPLATE_TOKEN",
        "BEDPLATE_URL",
    }
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DatabaseSettings(Section):
    url: str = Field(default="", description="PostgreSQL URL (`postgresql://…`). Empty: `bedplate up` runs its own server.")
    pool_size: int = Field(default=10, ge=1, le=200, description="Connections each process may hold.")
    api_statement_seconds: int = Field(
        default=30,
        ge=0,
        le=3600,
        description="A statement of the API that takes longer is cancelled, and answered 503. 0 = never.",
    )


class RedisSettings(Section):
    url: str = Field(default="", description="Redis or Valkey URL. Empty: `bedplate up` runs its own server.")


class TlsSettings(Section):
    certificate: Path | None = Field(default=None, description="PEM certificate chain; with it the listener speaks TLS.")
    key: Path | None = Field(default=None, description="PEM private key of the certificate.")


def _split(value: object) -> object:
    """`a.example, b.example` as a list; a JSON list too."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    return json.loads(text) if text.startswith("[") else [part.strip() for part in text.split(",") if part.strip()]


_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
DomainName = Annotated[str, StringConstraints(to_lower=True, max_length=253, pattern=rf"^{_LABEL}(\.{_LABEL})*$")]


def is_private_url(text: str) -> bool:
    """Whether nobody on the way reads along."""
    url = urlsplit(text)
    return url.scheme == "https" or (url.scheme == "http" and url.hostname in {"127.0.0.1", "::1", "localhost"})


class AcmeSettings(Section):
    domains: Annotated[tuple[DomainName, ...], NoDecode, BeforeValidator(_split)] = Field(
        default=(),
        max_length=100,
        description="DNS names of the certificate, with commas between. With them API and gateway speak TLS with one "
        "certificate that is fetched by ACME and renewed, except where they have a certificate of their own.",
    )
    directory_url: str = Field(
        default="https://acme-v02.api.letsencrypt.org/directory",
        description="The certificate authority's ACME directory (RFC 8555).",
    )
    email: str = Field(
        default="",
        pattern=r"^([^@\s,]+@[^@\s,]+)?$",
        description="Where the authority may write to about the certificate.",
    )
    terms_agreed: bool = Field(default=False, description="You agree to the authority's terms of service.")
    challenge: Literal["http-01"] = Field(default="http-01", description="How the authority is shown that the names are ours.")
    challenge_listen: str = Field(
        default=":80",
        description="Address and port that answer the authority's challenge, open only while it asks. "
        "It comes to port 80 of every name.",
    )
    ca_file: Path | None = Field(
        default=None, description="PEM certificates to trust for the directory's own TLS; default: the public authorities."
    )

    @field_validator("directory_url")
    @classmethod
    def _is_private(cls, value: str) -> str:
        """An account's signatures are not for plain HTTP; loopback is for tests and sidecars."""
        if is_private_url(value):
            return value
        raise ValueError("an ACME directory has an https:// URL")


class CertificateSettings(Section):
    acme: AcmeSettings = AcmeSettings()


class ApiSettings(Section):
    listen: str = Field(default="127.0.0.1:8700", description="Address and port of API and console.")
    max_body_bytes: int = Field(default=1 << 20, ge=1024, description="Largest request body; larger ones are refused with 413.")
    session_hours: int = Field(default=168, ge=1, le=8760, description="A browser's session ends after this at the latest.")
    sign_in_failures_per_address: int = Field(
        default=50,
        ge=5,
        le=100_000,
        description="Failures of signing in that one client address (IPv6: /64) may have in 15 minutes; then it is refused "
        "until these are over.",
    )
    login_token_days: int = Field(default=90, ge=1, le=3650, description="A token made by `bedplate login` ends after this.")
    session_idle_minutes: int = Field(default=720, ge=5, le=525_600, description="An unused session ends after this.")
    tls: TlsSettings = TlsSettings()


MappedRole = Annotated[str, StringConstraints(pattern=r"^(operator|[a-z0-9_-]{1,64}:(admin|editor|viewer))$")]


class OidcSettings(Section):
    """Signing in by an OpenID Connect provider."""

    issuer: str = Field(default="", description="The provider's issuer URL; empty: people sign in by name and password alone.")
    client_id: str = Field(default="", description="What the provider calls this deployment.")
    client_secret_file: Path | None = Field(
        default=None, description="File with the client's secret; without one the client is public, and PKCE alone protects it."
    )
    name: str = Field(default="single sign-on", max_length=64, description="What the button in the console says.")
    scopes: str = Field(default="openid email profile", pattern=r"^openid( \S+)*$", description="What is asked for.")
    public_url: str = Field(
        default="",
        description="Address of the console as browsers know it, where it is not the one they ask for. "
        "The provider must know `<address>/v1/sessions/sso/finish`.",
    )
    creates_people: bool = Field(default=True, description="Make an account, without any right, for who comes the first time.")
    links_by_email: bool = Field(
        default=False,
        description="Let who comes with a verified e-mail address into the account that has it as its name. "
        "Only where the provider's word on addresses is as good as your own.",
    )
    groups_claim: str = Field(default="groups", description="Claim of the ID token that lists the person's groups.")
    groups: dict[str, list[MappedRole]] = Field(
        default_factory=dict,
        description="What groups may do (a JSON object): `operator`, or `<project>:<role>`. At each sign-in by the provider, "
        "people get in what is named here exactly what their groups give.",
    )
    ca_file: Path | None = Field(default=None, description="PEM certificates to trust for the provider's own TLS.")

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.issuer and not (is_private_url(self.issuer) and self.client_id):
            raise ValueError("an OpenID Connect provider has an https:// issuer and a client_id")
        return self


class GatewaySettings(Section):
    listen: str = Field(default="127.0.0.1:8800", description="Address and port of the OpenAI-compatible gateway.")
    max_body_bytes: int = Field(default=32 << 20, ge=1024, description="Largest request body.")
    max_upload_bytes: int = Field(
        default=256 << 20,
        ge=1024,
        description="Largest form with audio or images; kept in a file under `state_dir`.",
    )
    instance: str = Field(
        default="gw0",
        pattern="^[a-z0-9][a-z0-9-]{0,62}$",
        description="Name of this gateway in metering records; unique among live gateways.",
    )
    requests_per_minute: int = Field(default=60_000, ge=1, description="Limit for keys that have none of their own.")
    tokens_per_minute: int = Field(default=60_000_000, ge=1, description="Limit for keys that have none of their own.")
    queue_requests: int = Field(default=1000, ge=0, description="Requests that may wait for one endpoint; more are refused.")
    queue_bytes: int = Field(default=256 << 20, ge=0, description="Bytes of bodies that may wait in all.")
    journal_sync_ms: int = Field(
        default=100, ge=0, description="How often the usage journal is synced to disk: what a power cut may cost. 0 = never."
    )
    drain_seconds: int = Field(
        default=120,
        ge=5,
        le=1500,
        description="How long a replica that is taken away may go on with answers that are open; what is open then is cut.",
    )
    tls: TlsSettings = TlsSettings()


class WorkerSettings(Section):
    processes: int = Field(default=1, ge=1, le=64, description="Worker processes that `bedplate up` starts.")
    max_steps_in_flight: int = Field(default=64, ge=1, le=1000, description="Steps one worker process runs at a time.")
    metrics_listen: str = Field(default="", description="Address and port of a worker's /metrics; empty: none.")


class NetworkSettings(Section):
    ipv4_pool: IPv4Network = Field(
        default=IPv4Network("10.192.0.0/10"),
        description="Prefix that private networks are cut from. It must be used by nothing else that VMs or hosts reach. "
        "Changing it leaves networks that exist as they are.",
    )
    ipv4_prefix_length: int = Field(
        default=24, ge=8, le=29, description="Prefix length of a network that asks for no particular one."
    )
    encryption: Literal["wireguard", "none"] = Field(
        default="wireguard",
        description="Of networks that do not say: `wireguard`, or `none` where all hosts share a data network that you trust.",
    )
    tunnel_port: int = Field(
        default=51820,
        ge=1024,
        le=65534,
        description="UDP port at which hosts take each other's tunnels; the next one is used while keys are rotated, in turn.",
    )
    rotate_keys_days: int = Field(
        default=90, ge=0, le=3650, description="Tunnel keys older than this are rotated by themselves; 0: only when asked."
    )
    notices_port: int = Field(
        default=8702, ge=1, le=65535, description="UDP port on which hosts tell edge hosts of ended machines."
    )
    infrastructure_cidrs: list[IPv4Network | IPv6Network] = Field(
        default_factory=list,
        description="Prefixes (a JSON list) that no VM may reach: management networks, the control plane. Hosts' own "
        "addresses are always among them.",
    )

    @model_validator(mode="after")
    def _pool_holds_networks(self) -> Self:
        if self.ipv4_prefix_length < self.ipv4_pool.prefixlen:
            raise ValueError(f"ipv4_prefix_length {self.ipv4_prefix_length} is larger than the pool {self.ipv4_pool}")
        return self


class LimitSettings(Section):
    """Most things of a kind that one project may have."""

    firewalls: int = Field(default=100, ge=1, le=10_000, description="Firewalls in a project.")
    addresses: int = Field(default=64, ge=0, le=10_000, description="Reserved addresses in a project.")
    volumes: int = Field(default=1000, ge=0, le=100_000, description="Volumes in a project, without those of endpoints.")
    snapshots: int = Field(default=1000, ge=0, le=100_000, description="Snapshots in a project.")
    loadbalancers: int = Field(default=64, ge=0, le=10_000, description="Load balancers in a project.")


class ImageSettings(Section):
    """Images and weights on their way: limits of each process, so that they never starve tenants."""

    download_bytes_per_second: int = Field(default=0, ge=0, description="Most that is fetched from URLs; 0: no limit.")
    upload_bytes_per_second: int = Field(default=0, ge=0, description="Most that is sent to hosts; 0: no limit.")


class WatchSettings(Section):
    socket: Path | None = Field(
        default=None,
        description="UNIX socket over which watches relay streams, each with a suffix; default `<state_dir>/watch.sock`.",
    )
    metrics_listen: str = Field(default="", description="Address and port of the watch's /metrics; empty: none.")


def default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/bedplate")
    return Path.home() / ".local/state/bedplate"


class Settings(BaseSettings):
    """Everything a Bedplate process can be told."""

    model_config = SettingsConfigDict(
        env_prefix="BEDPLATE_", env_nested_delimiter="__", extra="forbid", frozen=True, env_ignore_empty=True
    )

    state_dir: Path = Field(default_factory=default_state_dir, description="Where keys, databases, caches and journals live.")
    master_key_file: Path | None = Field(
        default=None, description="File with the 32-byte master key; default `<state_dir>/master.key`."
    )
    master_key_command: list[str] = Field(
        default_factory=list, description="Command (a JSON list) that prints the master key, for keys kept elsewhere."
    )
    insecure_http: bool = Field(
        default=False, description="Allow plain HTTP on other addresses than loopback. Shown as a warning."
    )
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="Least level that is logged.")
    apt_mirror: str = Field(default="", description="Debian mirror for guest images; default: the machine's apt configuration.")
    cache_dir: Path | None = Field(
        default=None,
        validation_alias=AliasChoices("cache_dir", "BEDPLATE_CACHE_DIR", "BEDPLATE_CACHE"),
        description="Where downloads and built images are kept; default `~/.cache/bedplate`.",
    )
    database: DatabaseSettings = DatabaseSettings()
    redis: RedisSettings = RedisSettings()
    api: ApiSettings = ApiSettings()
    oidc: OidcSettings = OidcSettings()
    gateway: GatewaySettings = GatewaySettings()
    worker: WorkerSettings = WorkerSettings()
    watch: WatchSettings = WatchSettings()
    network: NetworkSettings = NetworkSettings()
    limits: LimitSettings = LimitSettings()
    images: ImageSettings = ImageSettings()
    tls: CertificateSettings = CertificateSettings()

    @property
    def acme_directory(self) -> Path:
        """Where what ACME brings is kept."""
        return self.state_dir / "tls/acme"

    def tls_of(self, own: TlsSettings) -> TlsSettings:
        """What a listener shows: the certificate of its own, else the one that ACME brings, else none."""
        if own.certificate is not None or own.key is not None or not self.tls.acme.domains:
            return own
        pem = self.acme_directory / "server.pem"
        return TlsSettings(certificate=pem, key=pem)

    @model_validator(mode="after")
    def _refuse_unknown_variables(self) -> Settings:
        fields = {name.upper() for name in type(self).model_fields}
        for variable in os.environ:
            name = variable.removeprefix("BEDPLATE_")
            if name != variable and variable not in OTHER_VARIABLES and name.split("__")[0] not in fields:
                raise ValueError(f"unknown setting {variable} in the environment")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del dotenv_settings, file_secret_settings
        path = Path(os.environ.get("BEDPLATE_CONFIG", "/etc/bedplate/config.toml"))
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)


__all__ = ["SecretStr", "Settings"]
