"""One limit of one key, seen from this gateway: what all gateways have used, and what of it we took in advance.

The one rule: `credit` is taken from the common bucket already, so spending it asks nobody; it is never more than a second's
worth for longer than a second.
"""

from __future__ import annotations

WINDOW_SECONDS = 60.0


class Bucket:
    """The generic cell rate algorithm (ITU-T I.371): one number, the theoretical arrival time.

    `share`: how many gateways divide the rate between them while each is on its own.
    """

    __slots__ = ("alone", "arrival", "credit", "fetched_at", "name", "per_minute", "spent", "what")

    def __init__(self, name: str, what: str, per_minute: int, now: float) -> None:
        self.name = name
        self.what = what
        self.per_minute = per_minute
        self.arrival = now  # of the common bucket, as it was seen last
        self.credit = 0  # negative: more was used than reserved, and is owed
        self.spent = 0  # from credit, since the last fetch
        self.alone = 0  # without asking, to be told when the others can be reached again
        self.fetched_at = now

    def ahead(self, now: float) -> float:
        return max(0.0, self.arrival - now)

    def hint_us(self, now: float) -> int:
        """How full the common bucket was, for a server that has lost it."""
        return int(1e6 * self.ahead(now))

    def wait_alone(self, cost: int, share: int, now: float) -> float:
        """Seconds until `cost` fits; 0 = now. What is larger than the bucket fits when the bucket is full."""
        interval = WINDOW_SECONDS * share / self.per_minute
        wanted = min(max(0, cost - self.credit), max(1, self.per_minute // share))
        return max(0.0, self.ahead(now) + wanted * interval - WINDOW_SECONDS - 1e-9)

    def take_alone(self, cost: int, share: int, now: float) -> None:
        """A negative cost gives back."""
        from_credit = min(cost, self.credit) if self.credit > 0 else 0
        self.credit -= from_credit
        cost -= from_credit
        self.alone += cost
        self.arrival = max(self.arrival, now) + cost * WINDOW_SECONDS * share / self.per_minute

    def rejoin(self, share: int) -> int:
        """What was used while alone, now a debt; the bucket is as full as it was seen last before that."""
        used, self.alone = self.alone, 0
        self.credit -= used
        self.arrival -= used * WINDOW_SECONDS * share / self.per_minute
        return used

    def spend(self, cost: int) -> None:
        self.credit -= cost
        self.spent += cost

    def expected(self, now: float) -> int:
        """What the next second will probably spend, from what was spent since the last fetch; at most a second's rate."""
        elapsed = max(0.02, now - self.fetched_at)
        return min(self.per_minute // 60, int(self.spent / elapsed) if elapsed < 1.0 or self.spent > 1 else 0)

    def surplus(self, now: float) -> int:
        """Credit that others should have: more than a second's worth, or not used for a second. Negative: what is owed."""
        if self.credit < 0:
            return self.credit
        return self.credit if now - self.fetched_at > 1.0 else max(0, self.credit - self.per_minute // 60)

    def fetched(self, granted: int, ahead_us: int, now: float) -> None:
        self.credit += granted
        self.seen(ahead_us, now)
        self.spent, self.fetched_at = 0, now

    def refused(self, need: int, wait: float, now: float) -> None:
        """`need` would fit after `wait`: so full is the common bucket."""
        self.arrival = now + wait + WINDOW_SECONDS * (1 - min(need, self.per_minute) / self.per_minute)

    def seen(self, ahead_us: int, now: float) -> None:
        self.arrival = now + ahead_us / 1e6

    def remaining(self, now: float) -> int:
        free = int((WINDOW_SECONDS - self.ahead(now)) * self.per_minute / WINDOW_SECONDS + 1e-6)
        return max(0, min(self.per_minute, free + max(0, self.credit)))

    def reset(self, now: float) -> float:
        """Seconds until the bucket is full again."""
        return max(0.0, self.ahead(now) - max(0, self.credit) * WINDOW_SECONDS / self.per_minute)


def duration(seconds: float) -> bytes:
    """As Go writes durations: `0s`, `250ms`, `1.5s`, `6m0s`, `1h0m0s`."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds if milliseconds else b"0s"
    whole, rest = divmod(milliseconds, 1000)
    minutes, whole = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    tail = f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)
    return (f"{hours}h" if hours else "").encode() + (f"{minutes}m" if hours or minutes else "").encode() + f"{tail}s".encode()
