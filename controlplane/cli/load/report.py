"""A self-contained page of a benchmark: tables and plots as inline SVG, no script, nothing fetched."""

from __future__ import annotations

from html import escape
from typing import Any

from controlplane.cli.load.call import Called
from controlplane.cli.load.summary import QUANTILES, TIMES

_WIDTH, _HEIGHT, _PAD = 640, 220, 44
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1f24;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .75rem;border-bottom:1px solid #d7dbe0;text-align:right}
th:first-child,td:first-child{text-align:left}svg{display:block;margin:.5rem 0 1.5rem;max-width:100%}
.axis{stroke:#8a9099}.grid{stroke:#e6e9ed}.line{fill:none;stroke:#2457d6;stroke-width:1.5}.dot{fill:#2457d6;fill-opacity:.45}
text{font-size:11px;fill:#5a6069}code{background:#f3f5f7;padding:.1rem .3rem}.bad{color:#b3261e}
@media(prefers-color-scheme:dark){body{background:#15171a;color:#e6e8eb}td,th{border-color:#33373d}.grid{stroke:#2a2e33}
code{background:#22262b}text{fill:#a3a9b2}.line{stroke:#7aa2ff}.dot{fill:#7aa2ff}.bad{color:#ff8a80}}
"""


def page(title: str, document: dict[str, Any], calls: list[Called]) -> str:
    """`document` as printed by `--json`; `calls` for the plots."""
    summary = document["summary"]
    began = min((one.began for one in calls), default=0.0)
    good = [one for one in calls if not one.error]
    ttfts = [(one.began - began, 1000 * one.ttft) for one in good if one.ttft is not None]
    tpots = [(one.began - began, 1000 * one.tpot) for one in good if one.tpot is not None]
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(document['date'])} · <code>{escape(document['url'])}</code> · {escape(document['workload']['model'])}</p>",
        _figures(summary),
        _quantiles(summary),
        _errors(summary),
        _tries(document.get("tries", [])),
        _scatter("Time to first token over the run (ms)", ttfts),
        _scatter("Time per output token over the run (ms)", tpots),
        _cumulative("Time to first token, share of requests (ms)", sorted(value for _, value in ttfts)),
        _cumulative("Time per output token, share of requests (ms)", sorted(value for _, value in tpots)),
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return f'<!doctype html><html lang="en"><head>{head}<style>{_STYLE}</style></head><body>{"".join(parts)}</body></html>'


def _figures(summary: dict[str, Any]) -> str:
    names = (
        "requests",
        "errors",
        "seconds",
        "requests_per_second",
        "output_tokens_per_second",
        "prompt_tokens",
        "output_tokens",
    )
    rows = "".join(f"<tr><td>{name.replace('_', ' ')}</td><td>{summary[name]}</td></tr>" for name in names)
    return f"<table>{rows}</table>"


def _quantiles(summary: dict[str, Any]) -> str:
    columns = ("mean", *(f"p{percent}" for percent in QUANTILES))
    head = "".join(f"<th>{column}</th>" for column in columns)
    rows = ""
    for name in TIMES:
        cells = "".join(f"<td>{summary[name][column]:.1f}</td>" if summary[name] else "<td>–</td>" for column in columns)
        rows += f"<tr><td>{name.removesuffix('_ms').upper()} (ms)</td>{cells}</tr>"
    return f"<table><tr><th></th>{head}</tr>{rows}</table>"


def _errors(summary: dict[str, Any]) -> str:
    rows = "".join(f'<tr><td class="bad">{escape(kind)}</td><td>{n}</td></tr>' for kind, n in summary["errors_by_kind"].items())
    return f"<h2>Errors</h2><table>{rows}</table>" if rows else ""


def _tries(tries: list[dict[str, Any]]) -> str:
    rows = "".join(f"<tr><td>{one['rate']:.2f}</td><td>{escape('; '.join(one['missed']) or 'met')}</td></tr>" for one in tries)
    return f"<h2>Search</h2><table><tr><th>requests/s</th><th>objective</th></tr>{rows}</table>" if rows else ""


def _scatter(title: str, points: list[tuple[float, float]]) -> str:
    if not points:
        return ""
    widest, highest = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0
    dots = "".join(
        f'<circle class="dot" r="2" cx="{_x(x / widest):.1f}" cy="{_y(y / highest):.1f}"/>' for x, y in points[:5000]
    )
    return _plot(title, dots, f"{widest:.0f} s", f"{highest:.0f}")


def _cumulative(title: str, values: list[float]) -> str:
    if not values:
        return ""
    widest = values[-1] or 1.0
    step = max(1, len(values) // 1000)
    chosen = [*range(0, len(values), step), len(values) - 1]
    line = " ".join(f"{_x(values[place] / widest):.1f},{_y((place + 1) / len(values)):.1f}" for place in chosen)
    return _plot(title, f'<polyline class="line" points="{line}"/>', f"{widest:.0f}", "100 %")


def _plot(title: str, inner: str, right: str, top: str) -> str:
    grid = "".join(
        f'<line class="grid" x1="{_PAD}" x2="{_WIDTH - 8}" y1="{_y(part / 4):.1f}" y2="{_y(part / 4):.1f}"/>'
        for part in range(5)
    )
    axes = (
        f'<line class="axis" x1="{_PAD}" x2="{_WIDTH - 8}" y1="{_y(0)}" y2="{_y(0)}"/>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">{right}</text><text x="{_PAD}" y="{_HEIGHT - 4}">0</text>'
        f'<text x="{_PAD - 6}" y="{_y(1) + 4}" text-anchor="end">{top}</text>'
    )
    label = escape(title)
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return f'<h2>{label}</h2><svg role="img" aria-label="{label}" {size}>{grid}{axes}{inner}</svg>'


def _x(share: float) -> float:
    return _PAD + share * (_WIDTH - _PAD - 8)


def _y(share: float) -> float:
    return _HEIGHT - 24 - share * (_HEIGHT - 40)
