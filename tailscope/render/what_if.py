"""What-ifs of profiled steps for a terminal and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailscope.render.as_json import dumps
from tailscope.safe import printable
from tailscope.what_if import Gaps, Otherwise, WindowWhatIf

#: Raised when a key is removed or changes its meaning; new keys do not raise it.
SCHEMA_VERSION = 1
#: Parts of the critical path that are named.
MOST_PARTS = 6


def as_json(path: str, windows: Sequence[WindowWhatIf]) -> str:
    document = {
        "schema_version": SCHEMA_VERSION,
        "trace": path,
        "windows": [asdict(window) for window in windows],
    }
    return dumps(document)


def as_text(windows: Sequence[WindowWhatIf], console: Console) -> None:
    if not windows:
        console.print(
            "No step can be replayed: this needs torch profiler traces of all ranks of a world at one time "
            "(`tailscope diagnose` says what there is)."
        )
        return
    for window in windows:
        console.print(Text(_title(window), "bold"))
        console.print(_table(window))
        console.print(Text(_path(window)))
        if window.phases:
            console.print(Text(_phases(window)))
        console.print()
    console.print(
        Text(
            "Savings are upper bounds: with shorter steps other batches would have been scheduled. How: docs/ranks.md.",
            "dim",
        )
    )


def _title(window: WindowWhatIf) -> str:
    begin = f"{datetime.fromtimestamp(window.first_ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC"
    ranks = f"{len(window.ranks)} ranks" + (
        f" of {len(window.ranks) + window.missing}" if window.missing else ""
    )
    return f"{printable(window.world, 60)}: {window.steps} steps of {ranks} from {begin}, {_ms(window.step_s)} each"


def _table(window: WindowWhatIf) -> Table:
    classes = list(dict.fromkeys(g.klass for o in window.otherwise for g in o.gaps))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("what if")
    table.add_column("step", justify="right")
    table.add_column("saved", justify="right")
    for klass in classes:
        table.add_column(f"ITL {printable(klass, 20)} p50 / p99", justify="right")
    for one in window.otherwise:
        gaps = {g.klass: g for g in one.gaps}
        cells = [_gaps(gaps[klass]) if klass in gaps else "" for klass in classes]
        table.add_row(_name(one), _ms(one.step_s), f"{one.saved:.1%}", *cells)
    return table


def _name(one: Otherwise) -> str:
    names = {
        "no skew": "no rank took longer than the others",
        "usual transfers": "transfers as usual",
        "balanced experts": "experts balanced",
    }
    return names.get(one.scenario) or f"rank {one.rank} as the others"


def _gaps(gaps: Gaps) -> str:
    text = f"{_ms(gaps.p50_s)} → {_ms(gaps.p50_without_s)}"
    if gaps.p99_s is None or gaps.p99_without_s is None:
        return f"{text} / too few ({gaps.n})"
    return f"{text} / {_ms(gaps.p99_s)} → {_ms(gaps.p99_without_s)}"


def _path(window: WindowWhatIf) -> str:
    parts = [
        f"{'transfers' if p.rank is None else f'rank {p.rank} {p.phase}'} {p.share:.0%}"
        for p in window.path[:MOST_PARTS]
        if p.share >= 0.005
    ]
    return "On the critical path: " + ", ".join(parts) + "."


def _phases(window: WindowWhatIf) -> str:
    parts = [
        f"{p.phase} {_ms(p.exposed_s)}"
        + (f" (+ {_ms(p.hidden_s)} hidden)" if p.hidden_s >= 0.01 * p.exposed_s else "")
        for p in window.phases
        if p.exposed_s + p.hidden_s > 0
    ]
    return "A rank's step, by phase: " + ", ".join(parts) + "."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
