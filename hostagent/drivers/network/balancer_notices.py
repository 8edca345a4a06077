"""Heartbeats and notices between this host and others, on the data network.

The one rule: what another host says takes down only backends that our own document lists for it, and its silence is believed
only when a direct try fails too. A pause of our own is nobody's silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from hostagent.drivers.network.balancer import Balancers
from hostagent.drivers.network.balancer_notice import Listening, Notice, decode, encode, new_session, sender_of
from hostagent.protocol.errors import AgentError
from hostagent.protocol.network import NoticePeerWanted, NoticesWanted

logger = logging.getLogger(__name__)
BEAT_SECONDS = 0.1
LOOK_SECONDS = 0.025  # so that silence is found out soon after its time
SILENT_SECONDS = 0.3
RETRY_SECONDS = 1.0


class Notices(asyncio.DatagramProtocol):
    """`is_ready`: this host's own machines were looked at once; before that it says nothing about them.

    `on_silence` is called with a host that was heard and is not any more, once a second.
    """

    def __init__(self, balancers: Balancers) -> None:
        self.wanted: NoticesWanted | None = None
        self.is_ready = False
        self.on_silence: Callable[[str], None] = lambda _host_id: None
        self.refused = 0
        self._balancers = balancers
        self._session = new_session()
        self._counter = 0
        self._ended: set[str] = set()
        self._leaving: set[str] = set()
        self._peers: dict[str, NoticePeerWanted] = {}
        self._listening: dict[str, Listening] = {}
        self._tried: dict[str, float] = {}
        self._transport: asyncio.DatagramTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._looked_at = self._beat_at = 0.0

    async def take(self, wanted: NoticesWanted) -> None:
        """Raises AgentError `notices.not_bound`."""
        before, self.wanted = self.wanted, wanted
        self._peers = {peer.host_id: peer for peer in wanted.peers}
        self._listening = {name: self._listening.get(name, Listening()) for name in self._peers}
        place = (wanted.listen_address, wanted.listen_port)
        if before is not None and self._transport is not None and place == (before.listen_address, before.listen_port):
            return
        self._close_transport()
        try:
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: self, local_addr=place)
        except OSError as error:
            raise AgentError("notices.not_bound", f"cannot listen on {place[0]} port {place[1]}: {error}") from error
        self._transport = transport
        self._beat()

    def remove(self) -> None:
        for peer in self._peers.values():
            self._balancers.notice(peer.accepts, has_ended=False)
            self._balancers.leaving(peer.accepts, is_leaving=False)
            self._balancers.heard(peer.accepts)
        self.wanted, self._peers, self._listening = None, {}, {}
        self._close_transport()

    def close(self) -> None:
        """Say good-bye, so that nobody takes our going for a death."""
        if self._transport is not None:
            for peer in self._peers.values():
                self._send(peer, is_bye=True)
        self._close_transport()

    @property
    def is_bound(self) -> bool:
        return self._transport is not None

    def heard(self) -> dict[str, bool]:
        """By host whether it is heard; those of which nothing is expected are left out."""
        now = asyncio.get_running_loop().time()
        return {name: now - one.heard_at <= SILENT_SECONDS for name, one in self._listening.items() if one.heard_at is not None}

    def machine(self, nic_ids: Iterable[str], *, is_running: bool) -> None:
        """A machine of this host: told at once to those whom it concerns."""
        concerned = set(nic_ids)
        ended = self._ended - concerned if is_running else self._ended | concerned
        self._tell(concerned, ended, self._leaving - concerned)

    def leave(self, nic_ids: Iterable[str]) -> None:
        """A machine of this host is going to be stopped; `machine` says when that is over."""
        concerned = set(nic_ids)
        self._tell(concerned, self._ended, self._leaving | concerned)

    def _tell(self, concerned: set[str], ended: set[str], leaving: set[str]) -> None:
        is_news = (ended, leaving) != (self._ended, self._leaving)
        self._ended, self._leaving = ended, leaving
        if is_news and self.is_ready and self._transport is not None:
            for peer in self._peers.values():
                if concerned.intersection(peer.sends):
                    self._send(peer)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        del addr
        try:
            peer = self._peers[sender_of(data)]
            assert self.wanted is not None
            notice = decode(data, self.wanted.host_id, bytes.fromhex(peer.key))
        except (ValueError, KeyError, IndexError):
            self.refused += 1
            return
        listening = self._listening[peer.host_id]
        was_unknown = listening.session != notice.session
        is_news = listening.believes(notice, self._session)
        if was_unknown:
            self._send(peer)
        if is_news:
            self._believe(peer, listening, notice)

    def error_received(self, exc: Exception) -> None:
        """A port unreachable says that an agent is away: its silence says so too."""

    def _believe(self, peer: NoticePeerWanted, listening: Listening, notice: Notice) -> None:
        down = notice.down.intersection(peer.accepts)
        if fresh := down - listening.down:
            self._balancers.notice(fresh, has_ended=True)
        if back := listening.down - down:
            self._balancers.notice(back, has_ended=False)
        listening.down = frozenset(down)
        leaving = notice.leaving.intersection(peer.accepts)
        if leaving != listening.leaving:
            self._balancers.leaving(leaving - listening.leaving, is_leaving=True)
            self._balancers.leaving(listening.leaving - leaving, is_leaving=False)
        listening.leaving = leaving
        if peer.host_id in self._tried:
            del self._tried[peer.host_id]
            self._balancers.heard(peer.accepts)
        listening.heard_at = None if notice.is_bye else asyncio.get_running_loop().time()

    def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if now - self._looked_at < BEAT_SECONDS:  # later means that we were not there to hear anything
            self._look_for_silence(now)
        self._looked_at = now
        if now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            for peer in self._peers.values():
                self._send(peer)
        self._timer = loop.call_at(now + LOOK_SECONDS, self._beat)

    def _look_for_silence(self, now: float) -> None:
        for name, listening in self._listening.items():
            if listening.heard_at is None or now - listening.heard_at <= SILENT_SECONDS:
                continue
            if now - self._tried.get(name, -RETRY_SECONDS) >= RETRY_SECONDS:
                self._tried[name] = now
                self._balancers.silence(self._peers[name].accepts)
                self.on_silence(name)

    def _send(self, peer: NoticePeerWanted, *, is_bye: bool = False) -> None:
        if self._transport is None or self.wanted is None or not (self.is_ready or not peer.sends):
            return
        self._counter += 1
        notice = Notice(
            sender=self.wanted.host_id,
            session=self._session,
            to_session=self._listening[peer.host_id].session,
            counter=self._counter,
            down=frozenset(self._ended.intersection(peer.sends)),
            leaving=frozenset(self._leaving.intersection(peer.sends)),
            is_bye=is_bye,
        )
        self._transport.sendto(encode(notice, peer.host_id, bytes.fromhex(peer.key)), (peer.address, peer.port))

    def _close_transport(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None
