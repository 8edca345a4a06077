"""Other gateways before the same engine, each where its program is on PATH: nginx, LiteLLM, vllm-router, smg."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.gateway_ports import free_port, until_listening

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    url: str
    pid: int


Start = Callable[[str, str, Path, int], list[str]]


def program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextlib.contextmanager
def process(argv: list[str], port: int, **environment: str) -> Iterator[int]:
    """A child that listens on `port`; its pid."""
    child = subprocess.Popen(
        argv, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until_listening(port, _START_SECONDS)
        yield child.pid
    finally:
        child.terminate()
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _nginx(engine: str, key: str, directory: Path, port: int) -> list[str]:
    del key
    (directory / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {directory}/pid; error_log stderr crit; events {{ worker_connections 4096; }}\n"
        f"http {{ access_log off; keepalive_requests 1000000000;\n"
        f"upstream e {{ server {engine.removeprefix('http://')}; keepalive 64; keepalive_requests 1000000000; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://e; proxy_http_version 1.1;\n"
        "proxy_set_header Connection ''; proxy_buffering off; } } }\n"
    )
    return ["-p", str(directory), "-c", "nginx.conf"]


def _litellm(engine: str, key: str, directory: Path, port: int) -> list[str]:
    """One worker, a master key, no database, no callbacks."""
    (directory / "litellm.yaml").write_text(
        f"model_list:\n  - model_name: bench\n    litellm_params: {{model: openai/bench, api_base: {engine}/v1, api_key: x}}\n"
        f"general_settings: {{master_key: {key}}}\n"
    )
    return ["--config", str(directory / "litellm.yaml"), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


def _vllm_router(engine: str, key: str, directory: Path, port: int) -> list[str]:
    del key, directory
    return ["--worker-urls", engine, "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]


def _smg(engine: str, key: str, directory: Path, port: int) -> list[str]:
    return ["launch", *_vllm_router(engine, key, directory, port)]


STARTS: dict[str, Start] = {"nginx": _nginx, "litellm": _litellm, "vllm-router": _vllm_router, "smg": _smg}


@contextlib.contextmanager
def peer(name: str, engine: str, key: str) -> Iterator[Peer | None]:
    """One of them, ready to answer; None where it is not installed, or does not come up (it is said on stderr)."""
    found = program(name)
    if found is None:
        yield None
        return
    directory, port = Path(tempfile.mkdtemp(prefix="bedplate-bench-")), free_port()
    try:
        argv = [found, *STARTS[name](engine, key, directory, port)]
        with process(argv, port, LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR") as pid:
            made = Peer(name, f"http://127.0.0.1:{port}", pid)
            is_ready = _answers(made.url, key)
            if not is_ready:
                print(f"{name} does not answer: left out", file=sys.stderr)
            yield made if is_ready else None
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _answers(url: str, key: str) -> bool:
    """Whether a chat gets through within a minute: some listen before they know their engine."""
    body = b'{"model":"bench","messages":[{"role":"user","content":"x"}]}'
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        request = urllib.request.Request(f"{url}/v1/chat/completions", data=body, headers=headers)  # noqa: S310 - loopback
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 - loopback
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    return False
