"""The master key: made once and kept, private, whole."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from controlplane.core.sealing import Sealer
from controlplane.keyfile import KeyFileUnusable, load_sealer
from controlplane.settings import Settings


def test_it_is_made_once(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "state")
    with ThreadPoolExecutor(8) as pool:
        sealers = list(pool.map(lambda _: load_sealer(settings), range(16)))
    sealed = sealers[0].seal(b"secret", context="x")
    assert {sealer.open(sealed, context="x") for sealer in sealers} == {b"secret"}
    key = tmp_path / "state/master.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in key.parent.iterdir()] == ["master.key"]


def test_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    load_sealer(settings)
    (tmp_path / "master.key").chmod(0o644)
    with pytest.raises(KeyFileUnusable, match="chmod 0600"):
        load_sealer(settings)


def test_a_named_file_is_never_made(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path, master_key_file=tmp_path / "elsewhere.key")
    with pytest.raises(KeyFileUnusable, match="cannot read"):
        load_sealer(settings)
    assert list(tmp_path.iterdir()) == []


def test_half_a_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "elsewhere.key"
    path.write_bytes(b"x" * 31)
    path.chmod(0o600)
    with pytest.raises(KeyFileUnusable, match="exactly 32"):
        load_sealer(Settings(state_dir=tmp_path, master_key_file=path))


def test_systemds_credential_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bedplate-master-key").write_bytes(b"k" * 32)
    (tmp_path / "bedplate-master-key").chmod(0o400)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    sealed = Sealer(b"k" * 32).seal(b"secret", context="x")
    assert load_sealer(Settings(state_dir=tmp_path / "state")).open(sealed, context="x") == b"secret"
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("script", ["printf %032d 7", "printf %032d 7 | base64"])
def test_a_command_gives_the_key(tmp_path: Path, script: str) -> None:
    settings = Settings(state_dir=tmp_path, master_key_command=["sh", "-c", script])
    sealed = Sealer(b"7".rjust(32, b"0")).seal(b"secret", context="x")
    assert load_sealer(settings).open(sealed, context="x") == b"secret"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["exit 3", "echo short", "exec /nonexistent"])
def test_a_command_without_a_key_is_refused(tmp_path: Path, script: str) -> None:
    with pytest.raises(KeyFileUnusable, match="master key command"):
        load_sealer(Settings(state_dir=tmp_path, master_key_command=["sh", "-c", script]))
