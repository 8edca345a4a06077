from __future__ import annotations

from hostagent.lib.logfile import trim


def test_a_long_log_keeps_its_last_words_and_its_writer(tmp_path):
    path = tmp_path / "vm.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"".join(b"line %06d\n" % number for number in range(2000)))
        assert trim(path, most_bytes=10_000, kept_bytes=1000)
        writer.write(b"after\n")

    lines = path.read_bytes().splitlines()
    assert len(path.read_bytes()) <= 1006
    assert lines[-2:] == [b"line 001999", b"after"]
    assert all(len(line) in (5, 11) for line in lines)


def test_a_short_log_and_an_absent_one_are_left_alone(tmp_path):
    path = tmp_path / "vm.log"
    assert not trim(path)
    path.write_bytes(b"short\n")
    assert not trim(path)
    assert path.read_bytes() == b"short\n"
