"""Of a diagnosis for a terminal: what classes' quantiles do not show. Only what stands out gets a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tailscope.safe import printable
from tailscope.units import amount, percent, seconds

BARS = "▁▂▃▄▅▆▇█"
#: Lines of cells and of classes over time, the worst first.
MOST_LINES = 4

Entry = Mapping[str, Any]


def attained(entry: Entry) -> str:
    """Beside a class: how many of its requests meet all objectives, and at what rate."""
    limits = ", ".join(f"{o['metric']} < {seconds(o['limit_s'])}" for o in entry["objectives"])
    missing = " and ".join(entry["not_measured"])
    if entry["reason"] == "not-measured":
        return f"nothing to hold it against: {missing} not measured"
    if entry["share"] is None:
        text = f"undecided: {entry['n']} of {entry['n'] + entry['unknown']} requests tell ({limits})"
    else:
        low, high = entry["ci95"]
        text = f"{percent(entry['share'])} [{percent(low)}, {percent(high)}] meet {limits}"
        if entry["goodput_rps"] is not None:
            text += f": {amount(entry['goodput_rps'])} of {amount(entry['rate_rps'])} requests/s"
    if entry["failed"]:
        text += f"; {entry['failed']:,} failed or given up"
    if entry["unknown"] and entry["share"] is not None:
        text += f"; {entry['unknown']:,} not known"
    return f"{text}; {missing} not measured" if missing else text


def over_time(entries: list[Entry]) -> Iterator[Text]:
    """A line for each class and metric whose tail lies in a part of the time."""
    uneven = [entry for entry in entries if any(row["unusual"] for row in entry["bins"])]
    by_class: dict[str, Entry] = {}
    for entry in uneven:
        known = by_class.get(entry["class"])
        if known is None or _worst(entry)["above"] > _worst(known)["above"]:
            by_class[entry["class"]] = entry
    for entry in list(by_class.values())[:MOST_LINES]:
        worst = _worst(entry)
        at = datetime.fromtimestamp(worst["start_ns"] / 1e9, UTC)
        yield Text(
            f"  {printable(entry['class'], 24)} {entry['metric']} above {seconds(entry['limit_s'])} by {seconds(entry['bin_s'])}: "
            f"{_spark(entry)}  most at {at:%H:%M:%S} UTC: {worst['above']:,} of {worst['n']:,}"
        )


def _worst(entry: Entry) -> Entry:
    found: Entry = max(entry["bins"], key=lambda row: (row["unusual"], row["above"]))
    return found


def _spark(entry: Entry) -> str:
    """The share above the limit in each bin from the first to the last; blank where nothing arrived."""
    width_ns = round(entry["bin_s"] * 1e9)
    first = entry["bins"][0]["start_ns"]
    shown = [" "] * ((entry["bins"][-1]["start_ns"] - first) // width_ns + 1)
    for row in entry["bins"]:
        place = (row["start_ns"] - first) // width_ns
        shown[place] = BARS[min(int(row["above"] / row["n"] * len(BARS)), len(BARS) - 1)]
    return "".join(shown)


def cells(entries: list[Entry]) -> Iterator[Text]:
    worst = sorted((e for e in entries if e["stands_out"]), key=lambda e: -e["slow"])
    n = sum(e["n"] for e in entries)
    for entry in worst[:MOST_LINES]:
        (low, high), (least, most) = entry["prompt_tokens"], entry["output_tokens"]
        yield Text(
            f"  prompts of {low:,}-{high - 1:,} with answers of {least:,}-{most - 1:,} tokens: {percent(entry['n'] / n)} of requests, "
            f"{entry['share_of_slow']:.0%} of the TTFTs above their class's p95 (TTFT p50 {seconds(entry['ttft']['p50_s'])})"
        )


def groups(name: str, entries: list[Entry]) -> Table | None:
    """Tenants or priorities side by side; nothing where there is one."""
    if len(entries) < 2:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(name, no_wrap=True)
    for column in ("n", "failed", "tokens", "TTFT p50", "p95", "p99", "E2E p50", "p95", "p99"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        share = entry["share_of_tokens"]
        latencies = [seconds(entry[m][q]) for m in ("ttft", "e2e") for q in ("p50_s", "p95_s", "p99_s")]
        label = "(none)" if entry["id"] is None else printable(str(entry["id"]), 24)
        table.add_row(
            f"{label} ({entry['members']:,})" if entry["members"] > 1 else label,
            f"{entry['n']:,}",
            f"{entry['failed']:,}",
            "-" if share is None else f"{share:.0%}",
            *latencies,
        )
    return table
