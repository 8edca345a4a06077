"""Files that may lie in a directory of somebody less trusted than the agent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hostagent.lib import files


def test_the_last_words_of_a_log(tmp_path: Path):
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree\n")
    assert files.tail(log, 6) == "three"
    assert files.tail(log, 1000) == "one\ntwo\nthree"
    assert files.tail(tmp_path / "absent", 6) == ""


def test_no_words_of_what_a_link_or_a_pipe_stands_for(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    assert files.tail(tmp_path / "link", 100) == ""
    assert files.tail(tmp_path / "pipe", 100) == ""


def test_a_planted_link_is_neither_given_away_nor_written_through(tmp_path: Path):
    target = tmp_path / "target"
    target.write_text("kept")
    target.chmod(0o644)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        files.give(tmp_path / "link", os.getuid(), os.getgid(), 0o600)
    assert target.stat().st_mode & 0o777 == 0o644
    (tmp_path / f".record.json.{os.getpid()}.partial").symlink_to(target)
    files.write_atomically(tmp_path / "record.json", b"new")
    assert target.read_text() == "kept"
    assert (tmp_path / "record.json").read_bytes() == b"new"
    assert not (tmp_path / "record.json").is_symlink()
