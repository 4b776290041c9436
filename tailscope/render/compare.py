"""A comparison, or a sweep, for a terminal and for programs. The JSON is a contract: tailscope/comparison.schema.json."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import orjson
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tailscope.compare.blocks import FLOOR_S, Change
from tailscope.compare.load import LoadItem
from tailscope.compare.pair import MOST_PERCENT, About, Comparison, FindingChange, Outcome, Part
from tailscope.compare.read import METRICS
from tailscope.compare.sweep import Sweep
from tailscope.compare.untested import told
from tailscope.render.as_json import dumps, plain
from tailscope.render.parts import Heading, Item, Lead
from tailscope.render.words import sentence
from tailscope.safe import printable
from tailscope.units import amount, percent, seconds

#: Raised when a key is removed or changes its meaning; new keys do not raise it.
SCHEMA_VERSION = 1
#: Parts of each class's bill, and couplings, that are shown.
MOST_PARTS, MOST_COUPLED = 5, 6

STATUS_STYLE = {
    "improved": "bold green",
    "same": "bold green",
    "regressed": "bold red",
    "mixed": "bold yellow",
}
VERDICT_STYLE = {"faster": "green", "slower": "red", "same": "", "cannot tell": "dim"}
REASONS = {
    "too-few-samples": "too few samples",
    "too-few-blocks": "too few blocks of time",
    "interval": "",
}


def schema() -> dict[str, Any]:
    """The JSON schema (2020-12) that `comparison_json` and `sweep_json` keep."""
    parsed: dict[str, Any] = orjson.loads(files("tailscope").joinpath("comparison.schema.json").read_bytes())
    return parsed


def comparison_json(found: Comparison, regressions: Sequence[Change]) -> str:
    document = asdict(found)
    verdict: dict[str, Any] = {"status": document.pop("status"), "text": document.pop("text")}
    verdict |= {"regressions": len(regressions), "tested": found.tested}
    common = document.pop("common")
    return dumps(
        plain(
            {
                "schema_version": SCHEMA_VERSION,
                "kind": "pair",
                "verdict": verdict,
                "before": document.pop("before"),
                "after": document.pop("after"),
                "load": document.pop("load"),
                "common": {**common, "enough": found.common.enough},
                **{name: _named(rows) for name, rows in document.items()},
            }
        )
    )


def sweep_json(found: Sweep) -> str:
    document = asdict(found)
    verdict = {
        "text": document.pop("text"),
        "knee": document.pop("knee"),
        "saturates": document.pop("saturates"),
    }
    return dumps(plain({"schema_version": SCHEMA_VERSION, "kind": "sweep", "verdict": verdict, **document}))


def _named(rows: Any) -> Any:
    """`klass` is `class` outside of Python."""
    return [
        {("class" if key == "klass" else key): value for key, value in row.items()}
        if isinstance(row, dict)
        else row
        for row in rows
    ]


def comparison_text(found: Comparison, console: Console) -> None:
    for part in comparison_parts(found):
        console.print(part)


def sweep_text(found: Sweep, console: Console) -> None:
    for part in sweep_parts(found):
        console.print(part)


# -- a pair -----------------------------------------------------------------------------------------


def comparison_parts(found: Comparison) -> Iterator[RenderableType]:
    """All there is to say, in order."""
    style = STATUS_STYLE.get(found.status, "bold yellow")
    yield Lead(found.status.upper(), style, sentence(found.text))
    yield Text(_trace("before", found.before), "dim")
    yield Text(_trace("after ", found.after), "dim")
    yield Text()
    yield Heading("The same load?")
    yield from _load(found.load)
    if found.changes:
        yield Text()
        yield Heading(
            "Latency, in the part alike in " + ", ".join(found.common.matched_by)
            if found.common.matched_by
            else "Latency"
        )
        yield from _changes(found.changes)
        yield Text(
            "A change is called only where it stands out among all of these quantiles at once. How to read this: docs/compare.md.",
            "dim",
        )
    if found.untested:
        yield Text()
        yield Heading("Not tested")
        for line in told(found.untested):
            yield Item(sentence(line), "dim")
    if found.as_observed:
        yield Text()
        yield Heading("All requests as they came (not the same load)")
        yield from _changes(found.as_observed, called=False)
    if found.ranges:
        yield Text()
        yield Heading("By the servers' histograms")
        yield _ranges(found)
    if found.outcomes:
        yield Text()
        yield Heading("What came out")
        yield _outcomes(found.outcomes)
    if found.bill:
        yield Text()
        yield Heading("Mean bill of a request, and of the slowest")
        yield _bill(found.bill)
    if found.coupling:
        yield Text()
        yield Heading("Who meets whose prefill")
        yield _coupling(found)
    if found.findings:
        yield Text()
        yield Heading("Findings")
        for f in found.findings:
            yield Text(f"  {f.state:7} {finding_line(f)}")
    if found.notes:
        yield Text()
        yield Heading("Notes")
        for note in found.notes:
            yield Item(sentence(note))


def finding_line(found: FindingChange) -> str:
    shares = " to ".join("-" if s is None else f"{s:.0%}" for s in (found.before_share, found.after_share))
    return f"{found.rule}: {sentence(found.title)} ({shares} of the tail's excess)"


def change_line(row: Change) -> str:
    """What a row of the table says, as a sentence."""
    amount = _change(row)
    times = f"{seconds(row.before_s)} before, {seconds(row.after_s)} after"
    return f"{printable(row.klass, 24)} {row.metric} {row.quantile}: {times}{f', {amount}' if amount else ''}: {_verdict(row)}"


def _trace(name: str, about: About) -> str:
    return (
        f"{name} {printable(about.path)}: {about.requests:,} requests in {(about.last_ns - about.first_ns) / 1e9:,.0f} s "
        f"({amount(about.rate)}/s, {about.loop} loop, {amount(about.in_flight)} in flight), {about.blocks:.0f} blocks of "
        f"{seconds(about.block_s)}"
    )


def _load(items: Sequence[LoadItem]) -> Iterator[RenderableType]:
    shown = [item for item in items if item.status != "same"]
    table = _table("", "before", "after", "difference", "")
    for item in shown:
        table.add_row(
            printable(item.name, 48),
            _amount(item.before, item.unit),
            _amount(item.after, item.unit),
            _load_interval(item),
            _load_status(item),
            style="yellow" if item.status in ("differs", "may differ") else "dim",
        )
    if shown:
        yield table
    alike = [printable(item.name, 48) for item in items if item.status == "same"]
    if alike:
        yield Text(f"  the same: {', '.join(alike)}")


def _load_status(item: LoadItem) -> str:
    if item.status != "cannot tell":
        return item.status
    return "no difference shown" if item.interval is not None else "not tested"


def _amount(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    return f"{amount(value)}{f' {unit}' if unit else ''}"


def _load_interval(item: LoadItem) -> str:
    if item.interval is None:
        return ""
    low, high = item.interval
    if item.about in ("arrivals", "lengths"):
        return f"{percent(low, True)} to {percent(high, True)}"
    return f"{100 * low:+.1f} to {100 * high:+.1f} points"


def _changes(rows: Sequence[Change], called: bool = True) -> Iterator[RenderableType]:
    table = _table(
        "class",
        "metric",
        "",
        "before",
        "after",
        "change, 95 % interval",
        "P(faster)",
        "P(5 % slower)",
        "n_eff",
        "",
    )
    previous = ("", "")
    shown = [
        row for row in rows if (row.before_s is not None or row.after_s is not None) and not _nothing(row)
    ]
    for row in shown:
        new = (row.klass, row.metric) != previous
        previous = (row.klass, row.metric)
        table.add_row(
            printable(row.klass, 24) if new else "",
            row.metric if new else "",
            row.quantile,
            seconds(row.before_s),
            seconds(row.after_s),
            _change(row),
            "" if row.p_faster is None else f"{row.p_faster:.0%}",
            "" if row.p_slower_5 is None else f"{row.p_slower_5:.0%}",
            " / ".join(f"{n:,.0f}" for n in row.n_eff),
            _verdict(row) if called else "",
            style=VERDICT_STYLE[row.verdict] if called else "dim",
        )
    if shown:
        yield table
    still = [f"{printable(r.klass, 24)} {r.metric} {r.quantile}" for r in rows if _nothing(r)]
    if still:
        yield Text(f"  nothing to speak of on either side: {', '.join(still)}", "dim")


def _nothing(row: Change) -> bool:
    """Too short to be measured before and after, as a queue that is empty."""
    return row.before_s is not None and row.after_s is not None and max(row.before_s, row.after_s) < FLOOR_S


def _verdict(row: Change) -> str:
    reason = REASONS.get(row.reason or "", row.reason or "")
    return row.verdict + (f": {reason}" if reason else "")


def _change(row: Change) -> str:
    if row.change is None or row.interval is None:
        return ""
    low, high = row.interval
    if high > MOST_PERCENT:
        return f"{amount(1 + row.change)}x" if row.before_s and row.before_s > FLOOR_S else ""
    return f"{percent(row.change, True)} [{percent(low, True)}, {percent(high, True)}]"


def _ranges(found: Comparison) -> Table:
    table = _table("metric", "n", "p50", "p99 before", "p99 after", "")
    for row in found.ranges:
        table.add_row(
            row.metric,
            f"{row.n[0]:,} / {row.n[1]:,}",
            f"{_bucket(row.before50_s)} / {_bucket(row.after50_s)}",
            _bucket(row.before99_s),
            _bucket(row.after99_s),
            f"{row.moved}: cannot tell by buckets alone",
        )
    return table


def _bucket(bucket: tuple[float, float | None]) -> str:
    low, high = bucket
    return f"> {seconds(low)}" if high is None else f"{seconds(low)}-{seconds(high)}"


def _outcomes(rows: Sequence[Outcome]) -> Table:
    table = _table("", "before", "after", "difference", "95 % interval")
    for row in rows:
        name = row.name if row.klass is None else f"{row.name}, {printable(row.klass, 24)}"
        if row.unit == "share":
            cells = [f"{row.before:.2%}", f"{row.after:.2%}", f"{100 * row.difference:+.2g} points"]
            interval = "" if row.interval is None else " to ".join(f"{100 * v:+.2g}" for v in row.interval)
        else:
            cells = [
                f"{amount(row.before)} {row.unit}",
                f"{amount(row.after)} {row.unit}",
                _more(row.difference),
            ]
            interval = "" if row.interval is None else " to ".join(map(_more, row.interval))
        table.add_row(name, *cells, interval)
    return table


def _more(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{amount(abs(value))}"


def _bill(parts: Sequence[Part]) -> Table:
    table = _table("class", "component", "before", "after", "difference", "95 % interval", "in the tail")
    for klass in dict.fromkeys(p.klass for p in parts):
        for i, part in enumerate([p for p in parts if p.klass == klass][:MOST_PARTS]):
            tail = (part.tail_before_s, part.tail_after_s)
            table.add_row(
                printable(klass, 24) if i == 0 else "",
                part.component,
                seconds(part.before_s),
                seconds(part.after_s),
                signed(part.difference_s),
                "" if part.interval_s is None else " to ".join(signed(v) for v in part.interval_s),
                "" if tail == (None, None) else " to ".join(seconds(t or 0.0) for t in tail),
            )
    return table


def _coupling(found: Comparison) -> Table:
    table = _table("class", "behind prefill of", "share before", "after", "seconds a request before", "after")
    for row in found.coupling[:MOST_COUPLED]:
        shares = ["-" if s is None else f"{s:.0%}" for s in (row.before_share, row.after_share)]
        waited = [seconds(s) for s in (row.before_s, row.after_s)]
        table.add_row(printable(row.victim, 24), printable(row.culprit, 24), *shares, *waited)
    return table


# -- a sweep ----------------------------------------------------------------------------------------


def sweep_parts(found: Sweep) -> Iterator[RenderableType]:
    """All there is to say, in order."""
    yield Lead("", "", sentence(found.text))
    yield Text()
    table = _table("", *(str(i) for i, _ in enumerate(found.points, 1)), "")
    for name, cells in _sweep_rows(found):
        table.add_row(name, *cells, "")
    yield table
    for i, point in enumerate(found.points, 1):
        yield Text(f"  {i}. {printable(point.path)}", "dim")
    if found.evidence:
        yield Text()
        yield Heading("What is full first" + (f": {found.saturates}" if found.saturates else ": cannot tell"))
        for text in found.evidence:
            yield Item(sentence(text))
    for note in found.notes:
        yield Text(f"note: {sentence(note)}", "yellow")


def _sweep_rows(found: Sweep) -> Iterator[tuple[str, list[str]]]:
    """A row a number, a column a trace: there are more numbers than traces."""
    points = found.points
    yield found.axis, [amount(p.load) for p in points]
    yield "completed requests/s", [amount(p.throughput) for p in points]
    yield "output tokens/s", [f"{p.output_tokens:,.0f}" for p in points]
    yield "failed", [percent(p.failed) for p in points]
    for metric in METRICS:
        for q in ("p50", "p99"):
            cells = [seconds(p.latency.get(metric, {}).get(q)) for p in points]
            if set(cells) != {"-"}:
                yield f"{metric} {q}", cells
    yield (
        f"{found.metric} {found.quantile} against 1",
        ["-" if p.growth is None else f"{p.growth:.3g}x" for p in points],
    )
    yield (
        "  95 % interval",
        ["-" if p.interval is None else f"{p.interval[0]:.3g}-{p.interval[1]:.3g}" for p in points],
    )
    yield "  flat", [{True: "yes", False: "no", None: "?"}[p.flat] for p in points]
    yield "time in steps", [_share(p.busy) for p in points]
    yield "KV cache, p95", [_share(p.kv_p95) for p in points]
    yield "sequence slots, p95", [_share(p.slots_p95) for p in points]
    yield "steps at the token budget", [_share(p.budget) for p in points]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


# -- both -------------------------------------------------------------------------------------------


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        last = i == len(columns) - 1
        left = i == 0 or (last and not name)
        table.add_column(name, justify="left" if left else "right", no_wrap=not last)
    return table


def signed(value: float) -> str:
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"
