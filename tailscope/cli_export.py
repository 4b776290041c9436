"""The command `export`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tailscope.errors import UsageError

app = typer.Typer(
    help="Write a trace for other tools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class TimelineFormat(StrEnum):
    perfetto = "perfetto"
    chrome = "chrome"


@app.callback()
def export() -> None:
    """Write a trace for other tools."""


@app.command()
def perfetto(
    trace: Annotated[
        str,
        typer.Argument(help="Trace: a directory, a Parquet file with one table, or a glob.", metavar="TRACE"),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    format: Annotated[
        TimelineFormat,
        typer.Option(help="perfetto: its own format; chrome: JSON that other viewers read, too."),
    ] = TimelineFormat.perfetto,
    most_slices: Annotated[
        int,
        typer.Option(
            "--most-slices", min=1, help="Write no more; where there are, the time about the worst finding."
        ),
    ] = 1_000_000,
    findings: Annotated[
        bool,
        typer.Option("--findings/--no-findings", help="Diagnose, and show findings and who made whom wait."),
    ] = True,
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration; ./tailscope.toml if it is there.")
    ] = None,
    memory_limit: Annotated[
        str, typer.Option("--memory-limit", help="Memory for queries, e.g. 4GB; beyond it they spill.")
    ] = "3GB",
    from_: Annotated[
        str | None,
        typer.Option("--from", help="Look at arrivals from this time on (ISO 8601, UTC unless it says)."),
    ] = None,
    to: Annotated[str | None, typer.Option("--to", help="... and before this time.")] = None,
    last: Annotated[
        str | None, typer.Option("--last", help="The last 30s, 15m, 2h or 1d of the trace.")
    ] = None,
    instance: Annotated[str | None, typer.Option("--instance", help="Only this instance.")] = None,
    klass: Annotated[str | None, typer.Option("--class", help="Only this class of requests.")] = None,
) -> None:
    """Write a timeline for ui.perfetto.dev: requests, steps, ranks, findings, and who made whom wait (docs/export.md)."""
    from tailscope.cli import _on_trace
    from tailscope.export.export import export as run
    from tailscope.safe import printable

    if output.is_dir():
        raise UsageError(f"{output}: is a folder; name a file, for example {output / 'out.pftrace'}")
    written = _on_trace(
        lambda opened, settings, scope: run(
            opened,
            settings,
            scope,
            output,
            format=format.value,
            most=most_slices,
            with_findings=findings,
        ),
        trace,
        config,
        [],
        memory_limit,
        (from_, to, last, instance, klass),
    )
    if written.span.left_out:
        print(f"tailscope: {written.span.left_out}", file=sys.stderr)
    size = written.bytes / 1e6
    print(
        f"{printable(str(output))}: {written.slices:,} slices and {written.counters:,} counter values on {written.tracks:,} tracks, "
        f"{size:.3g} MB; {written.arrows or 'no findings'}. Open it in https://ui.perfetto.dev"
    )
