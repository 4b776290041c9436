"""What became of each ingested file: rows in, rows left out and why."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tailscope.ingest import Outcome
from tailscope.safe import printable


def render(outcomes: list[Outcome], trace: str, console: Console, base: Path | None = None) -> None:
    read = [o for o in outcomes if o.status == "ingested"]
    if read:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("file", overflow="fold")
        table.add_column("kind", no_wrap=True)
        table.add_column("rows", overflow="fold")
        table.add_column("left out", overflow="fold")
        for outcome in read:
            rows = ", ".join(
                f"{n:,} {name}" for name, n in outcome.stored.rows.items() if n and name != "sources"
            )
            table.add_row(Text(_name(outcome, base)), outcome.kind, rows or "none", Text(_left_out(outcome)))
        console.print(table)
    for outcome in outcomes:
        if outcome.status == "failed":
            console.print(Text(f"could not read {printable(outcome.message, 500)}", "bold red"))
    known = [o for o in outcomes if o.status == "known"]
    for message in dict.fromkeys(o.message for o in known):
        alike = [o for o in known if o.message == message]
        console.print(Text(f"{message}: {_names(alike, base)}", "dim"))
    skipped = [o for o in outcomes if o.status == "skipped"]
    for message in dict.fromkeys(o.message for o in skipped):
        alike = [o for o in skipped if o.message == message]
        console.print(Text(f"skipped, {message}: {_names(alike, base)}", "dim"))
    notes = Counter(note for o in read for note in o.tally.notes)
    for note in notes:
        console.print(Text(f"note: {printable(note, 400)}", "dim"))
    total = sum(sum(n for name, n in o.stored.rows.items() if name != "sources") for o in read)
    rejected = sum(o.tally.rejected.total() for o in read)
    console.print(
        Text(
            f"{printable(trace)}: {total:,} rows of {len(read)} file(s) added, {rejected:,} records rejected, "
            f"{sum(o.stored.duplicate for o in read):,} rows known already"
        )
    )


def _left_out(outcome: Outcome) -> str:
    parts = [
        f"{count:,} rejected: {reason}{_first(outcome, reason)}"
        for reason, count in outcome.tally.rejected.most_common()
    ]
    parts += [
        f"{count:,} values left empty: {reason}{_first(outcome, reason)}"
        for reason, count in outcome.tally.blanked.most_common()
    ]
    parts += [f"{outcome.stored.duplicate:,} known already"] if outcome.stored.duplicate else []
    parts += (
        [f"{outcome.stored.conflicting:,} with a known key but other content (kept)"]
        if outcome.stored.conflicting
        else []
    )
    parts += [f"{count:,} {reason}" for reason, count in outcome.tally.skipped.most_common()]
    return "; ".join(parts)


def _first(outcome: Outcome, reason: str) -> str:
    where = outcome.tally.first_seen.get(reason, "")
    return f" (first: {printable(where)})" if where else ""


def _name(outcome: Outcome, base: Path | None) -> str:
    path = Path(outcome.path)
    return printable(str(path.relative_to(base)) if base and path.is_relative_to(base) else outcome.path)


def _names(outcomes: list[Outcome], base: Path | None, most: int = 12) -> str:
    names = [_name(o, base) for o in outcomes]
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
