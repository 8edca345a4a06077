"""What is asked: prompts and answers of given lengths, with shared beginnings, the same for the same seed.

The one rule: a word of a prompt is about a token (short common words are, in most vocabularies); what counts in results is
what the server says it used.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state", "family",
    "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "program", "work",
    "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot", "right", "study",
    "book", "eye", "job", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power",
    "hour", "game", "line", "end", "member", "law", "car",
)  # fmt: skip


class NotALength(ValueError):
    """The text is no distribution of lengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens: always `mean`, or drawn: uniform over mean ± spread, normal or lognormal with that deviation; never under 1."""

    kind: str
    mean: float
    spread: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`512`, `uniform:100:900`, `normal:512:64`, `lognormal:512:200`. Raises NotALength."""
        kind, _, rest = text.partition(":") if ":" in text else ("fixed", "", text)
        try:
            numbers = [float(number) for number in rest.split(":")]
        except ValueError as error:
            raise NotALength(f"{text!r}: a length is like 512, uniform:100:900 or normal:512:64") from error
        if kind == "fixed" and len(numbers) == 1 and numbers[0] >= 1:
            return cls(kind=kind, mean=numbers[0])
        if kind == "uniform" and len(numbers) == 2 and 1 <= numbers[0] <= numbers[1]:
            return cls(kind=kind, mean=(numbers[0] + numbers[1]) / 2, spread=(numbers[1] - numbers[0]) / 2)
        if kind in ("normal", "lognormal") and len(numbers) == 2 and numbers[0] >= 1 and numbers[1] >= 0:
            return cls(kind=kind, mean=numbers[0], spread=numbers[1])
        raise NotALength(f"{text!r}: a length is like 512, uniform:100:900 or normal:512:64")

    def draw(self, dice: random.Random) -> int:
        if self.kind == "fixed":
            return round(self.mean)
        if self.kind == "uniform":
            return max(1, round(dice.uniform(self.mean - self.spread, self.mean + self.spread)))
        if self.kind == "normal":
            return max(1, round(dice.gauss(self.mean, self.spread)))
        import math

        sigma = math.sqrt(math.log(1 + (self.spread / self.mean) ** 2))
        return max(1, round(dice.lognormvariate(math.log(self.mean) - sigma**2 / 2, sigma)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`shared_tokens` of each prompt come from one of `prefixes` common beginnings; `extra` is laid into every body."""

    model: str
    prompt: Lengths
    output: Lengths
    shared_tokens: int = 0
    prefixes: int = 1
    seed: int = 1
    extra: dict[str, Any] | None = None

    def bodies(self) -> Iterator[bytes]:
        """Bodies of `/v1/chat/completions`, without end."""
        dice = random.Random(self.seed)  # noqa: S311 - a workload must be repeatable
        beginnings = [_text(random.Random(f"{self.seed}/{number}"), self.shared_tokens) for number in range(self.prefixes)]  # noqa: S311
        while True:
            own = max(1, self.prompt.draw(dice) - self.shared_tokens)
            content = f"{dice.choice(beginnings)} {_text(dice, own)}".strip()
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": self.output.draw(dice),
                "stream": True,
                "stream_options": {"include_usage": True},
                **(self.extra or {}),
            }
            yield json.dumps(body).encode()

    def described(self) -> dict[str, Any]:
        """As it stands in reports; `from_described` reads it back."""
        return asdict(self)

    @classmethod
    def from_described(cls, described: dict[str, Any]) -> Workload:
        lengths = {name: Lengths(**described[name]) for name in ("prompt", "output")}
        return cls(**{**described, **lengths})


def _text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choices(WORDS, k=words))
