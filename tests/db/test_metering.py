"""The journal and its landing: nothing closed is lost, nothing counts twice, what was cut settles as estimated."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from controlplane.metering import journal as journals
from controlplane.metering.journal import Journal, JournalInUse
from controlplane.metering.landing import Lander, ensure_day
from controlplane.metering.record import Closing, Opening, Outcome


def open_one(journal: Journal, request: str = "r") -> Opening:
    return journal.open(
        project_id="proj_1",
        key_id="key_1",
        model="chat",
        endpoint_id="ep_1",
        replica_id="rep_1",
        request_id=request,
        path="/v1/chat/completions",
        is_stream=True,
        prompt_estimate=11,
    )


def closing(opening: Opening, *, completion: int = 3, **more) -> Closing:
    values = {
        "ended_at": opening.started_at + 5,
        "outcome": Outcome.COMPLETED,
        "status": 200,
        "endpoint_id": "ep_1",
        "replica_id": "rep_1",
        "prompt_tokens": 7,
        "completion_tokens": completion,
        "is_estimated": False,
        "is_billable": True,
        **more,
    }
    return Closing(**values)


@pytest.fixture
def write(tmp_path) -> Iterator[Callable[..., Journal]]:
    """Starts journals (in `tmp_path` unless told) and shuts them at the end."""
    journals_made: list[Journal] = []

    def start(directory=tmp_path, **options) -> Journal:
        journals_made.append(Journal(directory, **options))
        return journals_made[-1]

    yield start
    for journal in journals_made:
        with contextlib.suppress(OSError):
            journal.shut()


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def sums(connection: asyncpg.Connection) -> tuple[int, int, int, int]:
    query = """SELECT coalesce(sum(requests), 0), coalesce(sum(prompt_tokens), 0), coalesce(sum(completion_tokens), 0),
               coalesce(sum(unbilled_requests), 0) FROM usage_hour"""
    return tuple(int(value) for value in await connection.fetchrow(query))


async def test_lands_once(tmp_path, write, connection) -> None:
    journal = write()
    lander = Lander(journal, "gw0")
    for _ in range(5):
        opening = open_one(journal)
        journal.close(opening, closing(opening))
        journal.close(opening, closing(opening, completion=99))
    assert await lander.run_once(connection) == 5
    assert await lander.run_once(connection) == 0
    assert await Lander(journal, "gw0").run_once(connection) == 0, "the same journal again changes nothing"
    assert await sums(connection) == (5, 35, 15, 0)


async def test_unbilled_records_raise_no_tokens(tmp_path, write, connection) -> None:
    journal = write()
    opening = open_one(journal)
    journal.close(opening, closing(opening, outcome=Outcome.UPSTREAM_DIED, status=502, is_billable=False))
    await Lander(journal, "gw0").run_once(connection)
    assert await sums(connection) == (1, 0, 0, 1)


async def test_open_records_settle_at_their_last_progress(tmp_path, write, connection) -> None:
    journal = write()
    _, flowing, closed = open_one(journal, "silent"), open_one(journal, "flowing"), open_one(journal, "closed")
    for count in (1, 4):
        journal.progress(flowing, prompt_tokens=8, completion_tokens=count)
    journal.close(closed, closing(closed))
    journal.shut()
    heir = write()
    assert await Lander(heir, "gw0").run_once(connection) == 3
    rows = {row["request_id"]: row for row in await connection.fetch("SELECT * FROM usage_record")}
    assert (rows["flowing"]["completion_tokens"], rows["flowing"]["prompt_tokens"]) == (4, 8)
    assert (rows["silent"]["completion_tokens"], rows["silent"]["is_billable"]) == (0, False)
    assert [rows[name]["is_estimated"] for name in ("silent", "flowing", "closed")] == [True, True, False]
    assert journals.segments(tmp_path) == [heir.open_segment], "what has landed is not kept"
    assert await sums(connection) == (3, 15, 7, 1)


async def test_cut_and_broken_lines_count_as_never_written(tmp_path, write, connection) -> None:
    journal = write()
    opening = open_one(journal)
    journal.close(opening, closing(opening))
    journal.shut()
    path = journals.path_of(tmp_path, journal.open_segment)
    whole = path.read_bytes()
    path.write_bytes(whole + b"00000000 {}\n" + b"zz\n" + whole.splitlines(keepends=True)[1][:-20])
    assert await Lander(write(), "gw0").run_once(connection) == 1


async def test_segments_turn_over_and_are_dropped(tmp_path, write, connection) -> None:
    journal = write(segment_bytes=2000)
    lander = Lander(journal, "gw0")
    held = open_one(journal, "held")
    for _ in range(30):
        opening = open_one(journal)
        journal.close(opening, closing(opening))
    assert len(journals.segments(tmp_path)) > 3
    assert await lander.run_once(connection) == 30
    assert journals.segments(tmp_path) == sorted({held.segment, journal.open_segment}), "an open request keeps its segment"
    journal.close(held, closing(held))
    assert await lander.run_once(connection) == 1
    assert journals.segments(tmp_path) == [journal.open_segment]


async def test_segment_numbers_never_repeat(tmp_path, write) -> None:
    numbers = []
    for _ in range(3):
        journal = write()
        numbers.append(journal.open_segment)
        journal.shut()
        journals.drop(tmp_path, journal.open_segment)
    assert numbers == sorted(set(numbers))


async def test_two_writers_are_refused(write) -> None:
    journal = write()
    with pytest.raises(JournalInUse):
        write()
    journal.shut()
    write()


async def test_landing_interrupted_between_records_loses_nothing(tmp_path, write, connection, database_url) -> None:
    """The database goes away in the middle: what was not acknowledged lands the next time."""
    journal = write()
    lander = Lander(journal, "gw0")
    for _ in range(3):
        opening = open_one(journal)
        journal.close(opening, closing(opening))
    doomed = await asyncpg.connect(database_url)
    doomed.terminate()
    with pytest.raises(asyncpg.InterfaceError):
        await lander.run_once(doomed)
    assert await lander.run_once(connection) == 3


async def test_two_gateways_at_once_on_the_same_hour(tmp_path, write, database_url, connection) -> None:
    async def one(name: str) -> None:
        own = await asyncpg.connect(database_url)
        journal = write(tmp_path / name)
        lander = Lander(journal, name)
        for _ in range(20):
            opening = open_one(journal)
            journal.close(opening, closing(opening))
            await lander.run_once(own)
        await own.close()

    await asyncio.gather(*(one(f"gw{number}") for number in range(4)))
    assert await sums(connection) == (80, 560, 240, 0)


async def test_a_day_is_one_partition(connection) -> None:
    from datetime import date

    for _ in range(2):
        await ensure_day(connection, date(2026, 11, 30))
    query = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_record'::regclass"
    assert [row[0] for row in await connection.fetch(query)] == ["usage_record_20261130"]


def test_a_full_disk_is_said_and_survived(tmp_path, write, monkeypatch) -> None:
    journal = write()
    opening = open_one(journal)
    real = os.write
    monkeypatch.setattr("os.write", lambda descriptor, data: real(descriptor, data[:10]))
    with pytest.raises(OSError, match="full"):
        open_one(journal)
    monkeypatch.setattr("os.write", real)
    journal.close(opening, closing(opening))
    entries, _ = journals.read(tmp_path, journal.open_segment, 0)
    assert [type(entry).__name__ for entry in entries] == ["Opening", "Closed"]


async def test_an_end_that_cannot_be_written_is_settled_by_the_next_process(tmp_path, write, connection, monkeypatch) -> None:
    journal = write(segment_bytes=1)
    opening = open_one(journal, "full")

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="no space"):
            journal.close(opening, closing(opening))
        with pytest.raises(OSError, match="no space"):
            open_one(journal, "refused")
    assert len(journal._live) == 1, "what was never opened keeps no segment"
    open_one(journal, "next")  # begins another segment
    await Lander(journal, "gw").run_once(connection)
    assert journals.path_of(tmp_path, opening.segment).exists()
    journal.shut()
    await Lander(write(), "gw").run_once(connection)
    rows = await connection.fetch("SELECT request_id, outcome FROM usage_record ORDER BY request_id")
    assert [tuple(row) for row in rows] == [("full", "gateway_died"), ("next", "gateway_died")]


async def test_day_partitions_are_no_difference_to_the_models(empty_database_url) -> None:
    from datetime import date

    from controlplane import migrate

    await migrate.upgrade(empty_database_url)
    connection = await asyncpg.connect(empty_database_url)
    await ensure_day(connection, date(2026, 11, 30))
    await connection.close()
    assert await migrate.differences(empty_database_url) == []


async def test_a_sync_survives_the_turn_of_a_segment(write, monkeypatch) -> None:
    """The thread syncs what it was given, also when the writer leaves that segment meanwhile; left ones are synced too."""
    journal = write(segment_bytes=1, is_synced=True)
    entered, go_on, synced = threading.Event(), threading.Event(), []
    sync = os.fdatasync

    def slow(descriptor: int) -> None:
        entered.set()
        assert go_on.wait(10)
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        sync(descriptor)

    first = journal.open_segment
    open_one(journal)
    monkeypatch.setattr(os, "fdatasync", slow)
    syncing = asyncio.create_task(journal.sync())
    assert await asyncio.to_thread(entered.wait, 10)
    open_one(journal)  # the first is full: it is left under the thread's hands
    second = journal.open_segment
    open_one(journal)
    go_on.set()
    await syncing
    await journal.sync()
    names = [int(name.stem) for name in synced]
    assert names == [first, first, second, journal.open_segment]
    held = [entry.resolve() for entry in Path("/proc/self/fd").iterdir()]
    assert sum(name.parent == journal.directory and name.suffix == ".journal" for name in held) == 1


async def test_landing_reads_beside_the_loop(tmp_path, write, connection, monkeypatch) -> None:
    journal = write()
    journal.close(opening := open_one(journal), closing(opening))
    read, threads = journals.read, set()

    def noting(*arguments, **options):
        threads.add(threading.current_thread() is threading.main_thread())
        return read(*arguments, **options)

    monkeypatch.setattr(journals, "read", noting)
    assert await Lander(journal, "gw0").run_once(connection) == 1
    assert threads == {False}
