"""The command `export`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tailscope.cli_options import (
    ClassOption,
    ConfigOption,
    FromOption,
    InstanceOption,
    LastOption,
    MemoryOption,
    ToOption,
    TracePath,
)
from tailscope.output import no_folder

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
    trace: TracePath,
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")],
    format: Annotated[
        TimelineFormat,
        typer.Option(help="perfetto: its own format; chrome: JSON that other viewers read, too."),
    ] = TimelineFormat.perfetto,
    most_slices: Annotated[
        int,
        typer.Option(
            "--most-slices", min=1, help="Write no more; of more, the time about the worst finding."
        ),
    ] = 1_000_000,
    findings: Annotated[
        bool,
        typer.Option("--findings/--no-findings", help="Diagnose, and show findings and who made whom wait."),
    ] = True,
    config: ConfigOption = None,
    memory_limit: MemoryOption = "3GB",
    from_: FromOption = None,
    to: ToOption = None,
    last: LastOption = None,
    instance: InstanceOption = None,
    klass: ClassOption = None,
) -> None:
    """Write a timeline for ui.perfetto.dev: requests, steps, ranks, findings, and who made whom wait (docs/export.md)."""
    from tailscope.cli import on_trace
    from tailscope.export.export import export as run
    from tailscope.safe import printable

    no_folder(output, "out.pftrace")
    written = on_trace(
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
