"""What gateways share of limits, in Redis: one script takes from all buckets of a key at once, or from none.

The one rule: Redis is never waited for longer than 250 ms, and one that failed is not asked again by a request before it
answered in the background. What it holds may be lost at any time: then what we saw last is put back.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.gateway.bucket import Bucket
from controlplane.gateway.resp import Client, RedisAway, Refused, Reply

ANSWER_SECONDS = 0.25

# KEYS: the buckets, then the slots. ARGV: number of buckets, 1 to take in any case; for each bucket its rate a minute, what
# is needed, what is wanted, how full it was when seen last (µs); for the slots who we are, how many we want to hold, how many
# there are. Answer: 0 or the number of what did not fit, then the wait (µs); or 0, and for each bucket what was granted and how
# full it is (µs).
SCRIPT = """
local n, window = tonumber(ARGV[1]), 60000000
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local ahead, taken = {}, {}
for i = 1, n do
  local rate, need = tonumber(ARGV[4 * i - 1]), tonumber(ARGV[4 * i])
  local stored = redis.call('GET', KEYS[i])
  ahead[i] = tonumber(ARGV[4 * i + 2])
  if stored then
    local at, old = string.match(stored, '^(%d+):(%d+)$')
    ahead[i] = math.max(0, at - now)
    if tonumber(old) ~= rate then ahead[i] = math.min(window, ahead[i] * old / rate) end
  end
  if ARGV[2] == '0' and need > 0 then
    local wait = ahead[i] + math.min(need, rate) * window / rate - window
    if wait > 0.5 then return {i, math.ceil(wait)} end
  end
end
if KEYS[n + 1] then
  local me, held, most = ARGV[4 * n + 3], tonumber(ARGV[4 * n + 4]), tonumber(ARGV[4 * n + 5])
  local others = 0
  local slots = redis.call('HGETALL', KEYS[n + 1])
  for i = 1, #slots, 2 do
    local count, until_us = string.match(slots[i + 1], '^(%d+):(%d+)$')
    if slots[i] ~= me then
      if tonumber(until_us) > now then others = others + count else redis.call('HDEL', KEYS[n + 1], slots[i]) end
    end
  end
  if ARGV[2] == '0' and others + held > most then return {n + 1, 0} end
  if held > 0 then
    redis.call('HSET', KEYS[n + 1], me, string.format('%d:%.0f', held, now + 30000000))
    redis.call('PEXPIRE', KEYS[n + 1], 60000)
  else redis.call('HDEL', KEYS[n + 1], me) end
end
local answer = {0}
for i = 1, n do
  local rate, need, want = tonumber(ARGV[4 * i - 1]), tonumber(ARGV[4 * i]), tonumber(ARGV[4 * i + 1])
  local grant = need
  if ARGV[2] == '0' then grant = math.max(need, math.min(want, math.floor((window - ahead[i]) * rate / window))) end
  ahead[i] = math.max(0, ahead[i] + grant * window / rate)
  redis.call('SET', KEYS[i], string.format('%.0f:%.0f', now + ahead[i], rate), 'PX', 120000 + math.floor(ahead[i] / 1000))
  answer[2 * i], answer[2 * i + 1] = grant, math.ceil(ahead[i])
end
return answer
"""
_DIGEST = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slots:
    """Requests at a time: `held` of `most` places, leased for 30 s."""

    name: str
    held: int
    most: int


@dataclass(frozen=True, slots=True)
class Want:
    """`need` must be had, up to `want` may be; negative gives back."""

    bucket: Bucket
    need: int
    want: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """`bucket` None: no place is free."""

    bucket: Bucket | None
    wait_seconds: float


class SharedLimits:
    """`is_away` after a question that failed, until someone finds that it answers again."""

    def __init__(self, url: str, instance: str) -> None:
        self._client = Client(url, answer_seconds=ANSWER_SECONDS)
        self._instance = instance
        self.is_away = False

    async def take(self, wants: Sequence[Want], slots: Slots | None, *, is_forced: bool = False) -> Refusal | None:
        """All of it or nothing; `is_forced`: without asking whether it fits. Raises RedisAway."""
        now = time.monotonic()
        names = [want.bucket.name for want in wants]
        arguments: list[int | str] = [len(wants), int(is_forced)]
        for want in wants:
            arguments += [want.bucket.per_minute, want.need, want.want, want.bucket.hint_us(now)]
        if slots is not None:
            names.append(slots.name)
            arguments += [self._instance, slots.held, slots.most]
        answer = await self._run(names, arguments)
        now = time.monotonic()
        if answer[0]:
            index = answer[0] - 1
            if index == len(wants):
                return Refusal(None, 0.0)
            want, wait = wants[index], answer[1] / 1e6
            want.bucket.refused(want.need, wait, now)
            return Refusal(want.bucket, wait)
        for number, want in enumerate(wants):
            want.bucket.fetched(answer[2 * number + 1], answer[2 * number + 2], now)
        return None

    async def look(self, buckets: Sequence[Bucket]) -> None:
        """See what others have taken meanwhile. Raises RedisAway."""
        if not buckets:
            return
        times, stored = await asyncio.gather(self._ask("TIME"), self._ask("MGET", *(bucket.name for bucket in buckets)))
        assert isinstance(times, list)
        assert isinstance(stored, list)
        seconds, microseconds = times
        now, there = time.monotonic(), 1_000_000 * _whole(seconds) + _whole(microseconds)
        for bucket, value in zip(buckets, stored, strict=True):
            if isinstance(value, bytes):
                at, _, rate = value.partition(b":")
                if int(rate) == bucket.per_minute:
                    bucket.seen(max(0, int(at) - there), now)

    async def is_back(self) -> bool:
        """Whether it answers again."""
        try:
            await self._ask("PING")
        except RedisAway:
            return False
        return True

    async def _run(self, names: Sequence[str], arguments: Sequence[int | str]) -> list[int]:
        """The script by its digest; whole when the server does not know it (yet, or any longer)."""
        words = (len(names), *names, *arguments)
        try:
            answer = await self._ask("EVALSHA", _DIGEST, *words)
        except Refused as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            answer = await self._ask("EVAL", SCRIPT, *words)
        assert isinstance(answer, list)
        return [_whole(number) for number in answer]

    async def _ask(self, *words: bytes | str | int) -> Reply:
        """Raises RedisAway, also for a server that answers but cannot work (it loads its file, it is full)."""
        try:
            return await self._client.ask(*words)
        except RedisAway:
            self.is_away = True
            raise
        except Refused as error:
            if str(error).startswith("NOSCRIPT"):
                raise
            self.is_away = True
            raise RedisAway(str(error)) from error

    def close(self) -> None:
        self._client.close()


def _whole(number: Reply) -> int:
    assert isinstance(number, (int, bytes))
    return int(number)
