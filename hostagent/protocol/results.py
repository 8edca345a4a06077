"""What `ensure` and `purge` answer. Long work runs detached: `Running` now, `Succeeded` or `Failed` when asked again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """`step` is the word a person may read (`upload`, `boot`); `needs` lists what the control plane must send first: files by
    digest (`upload`), or keys by id for `volume.unlock` (`locked`).
    """

    kind: Literal["running"] = "running"
    step: str = ""
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """`observed`, by kind. `volume`: `state` (`idle`, `exported`), `size_bytes`, `path`, `encrypted`, `keys` and `takes_effect`
    (`now`, or `after_reboot`: the running machine sees the size at its next start). `snapshot`: `state` (`present`),
    `size_bytes`, `volume_id`, `taken_unix_ms`, `consistency` (`crash`), `keys`. Both: `layers`, the files they stand on, as
    `{"id", "bytes"}`: the snapshot for which one was closed, else the volume that writes to it; and what it takes on disk.
    `keys`: every key that the data needs, as `{"id", "kek_id", "wrapped"}`; `wrapped` is base64 of RSA-OAEP (SHA-256, MGF1 with
    SHA-256, label `volume-key:<id>`) to that KEK, both empty where no KEK was named. The id is the volume's it was made for.
    """

    kind: Literal["succeeded"] = "succeeded"
    observed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    code: str
    message: str
    retryable: bool
    kind: Literal["failed"] = "failed"
    context: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The body of an answer to `*.ensure` and `*.purge`."""

    result: Running | Succeeded | Failed
