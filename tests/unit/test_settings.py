"""Settings come from environment and file, the environment wins, what is unknown is fatal; the page tells all."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from controlplane.embedded import reference
from controlplane.settings import Settings


@pytest.fixture(autouse=True)
def _no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BEDPLATE_CONFIG", str(tmp_path / "config.toml"))


def test_the_environment_wins_over_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[api]\nlisten = "127.0.0.1:1"\nmax_body_bytes = 2048\n')
    monkeypatch.setenv("BEDPLATE_API__LISTEN", "127.0.0.1:2")
    settings = Settings()
    assert (settings.api.listen, settings.api.max_body_bytes) == ("127.0.0.1:2", 2048)


@pytest.mark.parametrize("variable", ["BEDPLATE_DATABSE__URL", "BEDPLATE_API__LISTN", "BEDPLATE_LISTEN"])
def test_an_unknown_variable_is_fatal(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "x")
    with pytest.raises(ValidationError, match=r"unknown setting|Extra inputs"):
        Settings()


@pytest.mark.parametrize("text", ['databse = "x"\n', '[api]\nlistn = "x"\n'])
def test_an_unknown_key_in_the_file_is_fatal(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ValidationError, match="Extra inputs"):
        Settings()


@pytest.mark.parametrize("name", ["BEDPLATE_CACHE_DIR", "BEDPLATE_CACHE"])
def test_both_names_of_the_cache_are_heard(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("BEDPLATE_CACHE_DIR", raising=False)
    monkeypatch.setenv(name, "/somewhere")
    assert Settings().cache_dir == Path("/somewhere")


def test_the_page_is_up_to_date() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run: python -m controlplane.embedded.reference"


def test_every_setting_is_described() -> None:
    assert [variable for variable, _, field in reference.variables() if not field.description] == []
