"""Secrets that were given to a running deployment are nowhere in the clear: logs, argv, environment, state, database dump."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from controlplane.embedded.cleaning import processes_of
from controlplane.embedded.postgres import Postgres, system_user
from tests.system.running import Up

_MEANT_TO_HOLD_IT = {"operator-token"}


def _plant(up: Up, directory: Path) -> dict[str, str]:
    """Give the deployment one secret of each kind; name → text that must not be found."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "id")], check=True)
    identity = (directory / "id").read_text()
    assert up.call("POST", "/v1/projects", {"name": "secret-holder"})[0] == 201
    code, token = up.call("POST", "/v1/tokens", {"name": "member", "role": "member", "project": "secret-holder"})
    assert code == 201, token
    code, key = up.call("POST", "/v1/projects/secret-holder/keys", {"name": "app"})
    assert code == 201, key
    login = {"address": "127.0.0.1", "port": 9, "identity": identity}
    assert up.call("POST", "/v1/hosts/preflight", login)[0] == 202
    assert up.call("POST", "/v1/hosts/preflight", {**login, "port": "wrong"})[0] == 422
    return {
        "operator token": (up.state / "operator-token").read_text().strip(),
        "member token": token["secret"],
        "key": key["secret"],
        "identity": identity.splitlines()[2],
    }


def _files(state: Path) -> dict[str, bytes]:
    """All of the state but PostgreSQL's programs."""
    found: dict[str, bytes] = {}
    for path in state.rglob("*"):
        if path.is_file() and "programs-" not in str(path) and path.name not in _MEANT_TO_HOLD_IT:
            found[str(path)] = path.read_bytes()
    return found


def _dump(postgres: Postgres) -> bytes:
    user = system_user()
    argv = [str(postgres.bin_directory / "pg_dump"), "-h", str(postgres.run_directory), "-U", "bedplate", "bedplate"]
    account = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []} if user else {}
    return subprocess.run(argv, check=True, capture_output=True, env=postgres.environment(), cwd="/", **account).stdout


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_secret_is_found_in_the_clear(up: Up, tmp_path: Path) -> None:
    up.start()
    secrets = _plant(up, tmp_path)
    places = {f"argv of {pid}": Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(up.directory)}
    places |= {f"environment of {pid}": Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_of(up.directory)}
    assert len(places) > 10
    places["dump"] = _dump(Postgres(directory=up.state / "postgres"))
    assert b"secret-holder" in places["dump"]
    assert up.stop() == 0
    places |= _files(up.state)
    places["words of up"] = up.words().encode()
    found = [(name, place) for name, text in secrets.items() for place, content in places.items() if text.encode() in content]
    assert found == []

    master_key = (up.state / "master.key").read_bytes()
    assert [place for place, content in places.items() if master_key in content] == [str(up.state / "master.key")]
    for name in ("operator-token", "master.key"):
        assert (up.state / name).stat().st_mode & 0o777 == 0o600
