"""Notices and heartbeats between two agents' ends, over real datagrams on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostagent.drivers.network import balancer_notices
from hostagent.drivers.network.balancer_notice import NOBODY, Listening, Notice, decode, encode, new_session, sender_of
from hostagent.drivers.network.balancer_notices import Notices
from hostagent.lib.wait import until
from hostagent.protocol.network import NoticePeerWanted, NoticesWanted
from hostagent.protocol.wanted import Generation

KEY = bytes(range(32))
PLAIN = Notice(sender="host_a", session=b"a" * 16, to_session=b"b" * 16, counter=7, down=frozenset({"nic_1", "nic_2"}))


@pytest.mark.parametrize(
    "change", [{}, {"leaving": frozenset({"nic_3"})}, {"down": frozenset()}, {"is_bye": True}, {"to_session": NOBODY}]
)
def test_what_is_written_is_read(change):
    notice = replace(PLAIN, **change)
    data = encode(notice, "host_b", KEY)
    assert sender_of(data) == "host_a"
    assert decode(data, "host_b", KEY) == notice


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_bit_is_noticed(at, change):
    data = bytearray(encode(PLAIN, "host_b", KEY))
    data[at % len(data)] ^= change
    with pytest.raises(ValueError, match="signature"):
        decode(bytes(data), "host_b", KEY)


def test_another_key_or_another_receiver_is_refused():
    data = encode(PLAIN, "host_b", KEY)
    for receiver, key in (("host_b", bytes(32)), ("host_c", KEY)):
        with pytest.raises(ValueError, match="signature"):
            decode(data, receiver, key)


@given(st.binary(max_size=200))
def test_rubbish_is_refused(data):
    with pytest.raises((ValueError, IndexError)):
        sender_of(data)


def test_what_was_recorded_is_not_believed_again():
    mine, listening = b"b" * 16, Listening()
    assert listening.believes(PLAIN, mine)
    assert not listening.believes(PLAIN, mine), "the same again"
    assert listening.believes(replace(PLAIN, counter=8), mine)
    assert not listening.believes(replace(PLAIN, counter=9, to_session=b"x" * 16), mine), "meant for an earlier life of ours"
    assert listening.believes(replace(PLAIN, session=b"c" * 16, counter=1), mine), "the sender started again"
    assert not listening.believes(replace(PLAIN, counter=99), mine), "and its former life is over"
    assert new_session() < new_session()


class Heard:
    """What a balancer would be told."""

    def __init__(self) -> None:
        self.ended: set[str] = set()
        self.left: set[str] = set()
        self.told: Counter[str] = Counter()

    def notice(self, nic_ids, *, has_ended):
        self.ended = self.ended | set(nic_ids) if has_ended else self.ended - set(nic_ids)

    def leaving(self, nic_ids, *, is_leaving):
        self.left = self.left | set(nic_ids) if is_leaving else self.left - set(nic_ids)

    def silence(self, nic_ids):
        self.told.update(f"silent {name}" for name in nic_ids)

    def heard(self, nic_ids):
        self.told.update(f"heard {name}" for name in nic_ids)


def free_port():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Pair:
    """A host with machines, and an edge."""

    def __init__(self) -> None:
        ports = {"host_a": free_port(), "edge_b": free_port()}
        peer = NoticePeerWanted(host_id="", address="127.0.0.1", port=0, key=KEY.hex())

        def document(mine, other, **lists):
            peers = (replace(peer, host_id=other, port=ports[other], **lists),)
            generation = Generation(epoch=1, number=1)
            return NoticesWanted(
                id="notices",
                generation=generation,
                host_id=mine,
                listen_address="127.0.0.1",
                listen_port=ports[mine],
                peers=peers,
            )

        self.host_document = document("host_a", "edge_b", sends=("nic_1", "nic_2"))
        self.edge_document = document("edge_b", "host_a", accepts=("nic_1",))
        self.heard = Heard()
        self.host, self.edge = self.make_host(), Notices(self.heard)
        self.edge.is_ready = True

    @staticmethod
    def make_host() -> Notices:
        made = Notices(Heard())
        made.is_ready = True
        return made

    async def until(self, is_true):
        async def check():
            return is_true()

        assert await until(check, seconds=10)


@pytest.fixture
async def pair():
    made = Pair()
    await made.edge.take(made.edge_document)
    await made.host.take(made.host_document)
    await made.until(lambda: made.edge.heard() == {"host_a": True})
    yield made
    made.host.close()
    made.edge.close()
    await asyncio.sleep(0)


async def silenced(notices):
    """As if killed: its socket is gone, and nobody said good-bye."""
    notices._close_transport()
    for _ in range(3):  # a transport closes in the loop's next turns
        await asyncio.sleep(0)


async def test_an_end_is_told_and_taken_back(pair):
    pair.host.machine(["nic_1"], is_running=False)
    await pair.until(lambda: pair.heard.ended == {"nic_1"})
    pair.host.machine(["nic_1"], is_running=True)
    await pair.until(lambda: pair.heard.ended == set())


async def test_a_stop_is_told_before_it_happens(pair):
    pair.host.leave(["nic_1", "nic_2"])
    await pair.until(lambda: pair.heard.left == {"nic_1"})
    assert pair.heard.ended == set()
    pair.host.machine(["nic_1"], is_running=False)
    await pair.until(lambda: (pair.heard.ended, pair.heard.left) == ({"nic_1"}, set()))


async def test_only_listed_machines_are_believed(pair):
    pair.host.machine(["nic_2", "nic_3"], is_running=False)
    pair.host.machine(["nic_1"], is_running=False)
    await pair.until(lambda: bool(pair.heard.ended))
    assert pair.heard.ended == {"nic_1"}


async def test_silence_is_told_and_ends(pair):
    silent: list[str] = []
    pair.edge.on_silence = silent.append
    await silenced(pair.host)
    await pair.until(lambda: pair.heard.told["silent nic_1"] == 1)
    assert silent == ["host_a"]
    assert pair.edge.heard() == {"host_a": False}
    again = pair.make_host()
    await again.take(pair.host_document)
    await pair.until(lambda: pair.heard.told["heard nic_1"] == 1)
    assert pair.edge.heard() == {"host_a": True}
    again.close()


async def test_a_goodbye_is_no_silence(pair):
    pair.host.close()
    await pair.until(lambda: pair.edge.heard() == {})
    await asyncio.sleep(2 * balancer_notices.SILENT_SECONDS)
    assert pair.heard.told["silent nic_1"] == 0


async def test_a_host_that_started_again_says_nothing_of_its_machines_before_it_looked(pair):
    pair.host.machine(["nic_1"], is_running=False)
    await pair.until(lambda: pair.heard.ended == {"nic_1"})
    await silenced(pair.host)
    again = Notices(Heard())
    await again.take(pair.host_document)
    await pair.until(lambda: pair.edge.heard() == {"host_a": False})
    assert pair.heard.ended == {"nic_1"}, "nobody said that it came back"
    again.machine(["nic_1"], is_running=True)
    again.is_ready = True
    await pair.until(lambda: pair.heard.ended == set())
    again.close()


async def test_strangers_are_counted_and_ignored(pair):
    place = ("127.0.0.1", pair.edge_document.listen_port)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for data in (
            b"",
            b"x" * 300,
            encode(replace(PLAIN, sender="host_x"), "edge_b", KEY),
            encode(PLAIN, "edge_b", bytes(32)),
        ):
            stranger.sendto(data, place)
        await pair.until(lambda: pair.edge.refused == 4)
    assert pair.heard.ended == set()
