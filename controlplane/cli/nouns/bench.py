"""`bedplate bench`: load on any OpenAI-compatible URL."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controlplane.cli.errors import CommandFailed, Exit
from controlplane.cli.output import say

if TYPE_CHECKING:
    from controlplane.cli.load.call import Called
    from controlplane.cli.load.drive import Plan, Ran, Target
    from controlplane.cli.load.workload import Workload

app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Measure an OpenAI-compatible endpoint: latencies, throughput, its limit."
)

Url = Annotated[str, typer.Option(help="Base URL with /v1.", envvar="BEDPLATE_BENCH_URL")]
Key = Annotated[str, typer.Option(help="API key.", envvar="BEDPLATE_BENCH_KEY", show_default=False)]
CaFile = Annotated[str, typer.Option(help="Certificates to trust besides the system's.")]
Model = Annotated[str, typer.Option(help="The model to call.")]
Prompt = Annotated[str, typer.Option(help="Prompt tokens: 512, uniform:100:900, normal:512:64, lognormal:512:200.")]
Answer = Annotated[str, typer.Option("--output-tokens", help="Output tokens, likewise.")]
Shared = Annotated[int, typer.Option(min=0, help="Tokens of each prompt that are shared with others.")]
Prefixes = Annotated[int, typer.Option(min=1, help="How many different shared beginnings.")]
Seed = Annotated[int, typer.Option(help="Same seed, same requests.")]
Extra = Annotated[str, typer.Option(help="JSON laid into every body, like '{\"ignore_eos\":true}'.")]
Seconds = Annotated[float, typer.Option(min=0.1, help="How long requests are sent.")]
WarmUp = Annotated[float, typer.Option(min=0, help="Requests that begin in these first seconds do not count.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Html = Annotated[Path | None, typer.Option(help="Write a page with plots.")]
Save = Annotated[Path | None, typer.Option(help="Keep the result as a baseline.")]
Most = Annotated[float | None, typer.Option(min=0.001, help="Milliseconds that may not be exceeded.")]


@app.command("load")
def load_(
    model: Model,
    url: Url = "http://127.0.0.1:8800/v1",
    key: Key = "",
    ca_file: CaFile = "",
    prompt_tokens: Prompt = "256",
    output: Answer = "64",
    shared_tokens: Shared = 0,
    prefixes: Prefixes = 1,
    seed: Seed = 1,
    extra: Extra = "",
    concurrency: Annotated[int | None, typer.Option(min=1, help="Closed loop: so many at a time; default 8.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Open loop: so many a second.")] = None,
    seconds: Seconds = 30.0,
    requests: Annotated[int | None, typer.Option(min=1, help="At most so many.")] = None,
    warm_up: WarmUp = 0.0,
    is_json: Json = False,
    html: Html = None,
    save: Save = None,
) -> None:
    """Send requests and say what they took."""
    from controlplane.cli.load.drive import Plan, Target

    if concurrency is not None and rate is not None:
        raise CommandFailed("--concurrency (closed loop) and --rate (open loop) exclude each other", exit_code=Exit.USAGE)
    workload = _workload(model, prompt_tokens, output, shared_tokens, prefixes, seed, extra)
    plan = Plan(
        concurrency=None if rate else concurrency or 8, rate=rate, seconds=seconds, requests=requests, warm_up_seconds=warm_up
    )
    target = Target(url=url, key=key, ca_file=ca_file)
    document, ran = _run(target, workload, plan)
    _show(document, ran.calls, "Load", is_json=is_json, html=html, save=save)
    if document["summary"]["requests"] == document["summary"]["errors"]:
        raise CommandFailed("no request succeeded", why=next(iter(document["summary"]["errors_by_kind"]), "none was sent"))


@app.command()
def limit(
    model: Model,
    url: Url = "http://127.0.0.1:8800/v1",
    key: Key = "",
    ca_file: CaFile = "",
    prompt_tokens: Prompt = "256",
    output: Answer = "64",
    shared_tokens: Shared = 0,
    prefixes: Prefixes = 1,
    seed: Seed = 1,
    extra: Extra = "",
    ttft_ms: Most = None,
    tpot_ms: Most = None,
    e2e_ms: Most = None,
    percent: Annotated[int, typer.Option(help="The percentile that is held to: 50, 90, 95 or 99.")] = 95,
    first: Annotated[float, typer.Option(min=0.001, help="Requests a second to begin with.")] = 1.0,
    most: Annotated[float, typer.Option(min=0.001, help="Requests a second not to go beyond.")] = 1000.0,
    seconds: Seconds = 20.0,
    is_json: Json = False,
    html: Html = None,
) -> None:
    """Find the highest rate that still meets an objective: doubling, then halving the bracket."""
    import asyncio

    from controlplane.cli.load.drive import Plan, Target, drive
    from controlplane.cli.load.judge import Objective, find_limit, limit_of
    from controlplane.cli.load.summary import QUANTILES, summarise

    if percent not in QUANTILES:
        raise CommandFailed(f"--percent is one of {', '.join(map(str, QUANTILES))}", exit_code=Exit.USAGE)
    workload = _workload(model, prompt_tokens, output, shared_tokens, prefixes, seed, extra)
    target = Target(url=url, key=key, ca_file=ca_file)
    objective = Objective(ttft_ms=ttft_ms, tpot_ms=tpot_ms, e2e_ms=e2e_ms, percent=percent)
    kept: dict[float, list[Called]] = {}

    async def run(at: float) -> dict[str, Any]:
        ran = await drive(target, workload, Plan(rate=at, seconds=seconds))
        summary, kept[at] = summarise(ran), ran.calls
        say(f"{at:8.2f} requests/s: {'; '.join(objective.missed(summary)) or 'met'}")
        return summary

    tries = asyncio.run(find_limit(run, objective, first=first, most=most))
    best = limit_of(tries)
    if best is None:
        raise CommandFailed("no rate met the objective", why="; ".join(tries[-1].missed), exit_code=Exit.FAILED)
    document = _document(target, workload, Plan(rate=best.rate, seconds=seconds), best.summary)
    document |= {"limit_requests_per_second": round(best.rate, 3), "objective": asdict(objective)}
    document["tries"] = [{"rate": one.rate, "missed": one.missed} for one in tries]
    _show(document, kept[best.rate], "Limit", is_json=is_json, html=html, save=None)


@app.command()
def regress(
    baseline: Annotated[Path, typer.Option(help="What `bench load --save` wrote.")],
    url: Annotated[str, typer.Option(help="Base URL with /v1; default: the baseline's.")] = "",
    key: Key = "",
    ca_file: CaFile = "",
    tolerance: Annotated[float, typer.Option(min=0, max=10, help="What may become worse: 0.1 = a tenth.")] = 0.1,
    is_json: Json = False,
    html: Html = None,
) -> None:
    """Run the baseline's load again; exit 1 when something became worse."""
    from controlplane.cli.load.drive import Plan, Target
    from controlplane.cli.load.judge import regressions
    from controlplane.cli.load.workload import Workload

    try:
        before = json.loads(baseline.read_text())
        workload, plan = Workload.from_described(before["workload"]), Plan(**before["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{baseline} is no baseline", why=str(error), exit_code=Exit.USAGE) from error
    document, ran = _run(Target(url=url or before["url"], key=key, ca_file=ca_file), workload, plan)
    document["regressions"] = regressions(before["summary"], document["summary"], tolerance=tolerance)
    _show(document, ran.calls, "Regression", is_json=is_json, html=html, save=None)
    if document["regressions"]:
        raise CommandFailed("worse than the baseline", why="; ".join(document["regressions"]), exit_code=Exit.FAILED)


def _workload(model: str, prompt: str, output: str, shared: int, prefixes: int, seed: int, extra: str) -> Workload:
    """Why seven: they are the options that every run takes."""
    from controlplane.cli.load.workload import Lengths, NotALength, Workload

    try:
        lengths = Lengths.parse(prompt), Lengths.parse(output)
        more = json.loads(extra) if extra else None
    except (NotALength, ValueError) as error:
        raise CommandFailed(str(error), exit_code=Exit.USAGE) from error
    if more is not None and not isinstance(more, dict):
        raise CommandFailed("--extra is no JSON object", exit_code=Exit.USAGE)
    return Workload(
        model=model, prompt=lengths[0], output=lengths[1], shared_tokens=shared, prefixes=prefixes, seed=seed, extra=more
    )


def _run(target: Target, workload: Workload, plan: Plan) -> tuple[dict[str, Any], Ran]:
    import asyncio

    from controlplane.cli.load.drive import drive
    from controlplane.cli.load.summary import summarise

    ran = asyncio.run(drive(target, workload, plan))
    return _document(target, workload, plan, summarise(ran)), ran


def _document(target: Target, workload: Workload, plan: Plan, summary: dict[str, Any]) -> dict[str, Any]:
    """What is printed, kept and compared; the key is no part of it."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "url": target.url,
        "workload": workload.described(),
        "plan": asdict(plan),
        "summary": summary,
    }


def _show(
    document: dict[str, Any], calls: list[Called], title: str, *, is_json: bool, html: Path | None, save: Path | None
) -> None:
    """Why six: where a result goes is the user's choice, one by one."""
    if html is not None:
        from controlplane.cli.load.report import page

        html.write_text(page(title, document, calls))
    if save is not None:
        save.write_text(json.dumps(document, indent=1))
    if is_json:
        print(json.dumps(document))
        return
    from controlplane.cli.load.summary import QUANTILES, TIMES
    from controlplane.cli.output import print_table

    summary = document["summary"]
    columns = ("mean", *(f"p{percent}" for percent in QUANTILES))
    rows = [[name, *(f"{summary[name][column]:.1f}" if summary[name] else "-" for column in columns)] for name in TIMES]
    print_table(["", *columns], rows)
    print(
        f"{summary['requests']} requests, {summary['errors']} errors in {summary['seconds']:.1f} s: "
        f"{summary['requests_per_second']:.2f} requests/s, {summary['output_tokens_per_second']:.1f} tokens/s"
        + (f"; limit {document['limit_requests_per_second']} requests/s" if "limit_requests_per_second" in document else "")
        + os.linesep.join(["", *(f"  {n} x {kind}" for kind, n in summary["errors_by_kind"].items())])
    )
