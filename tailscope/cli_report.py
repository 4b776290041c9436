"""The command `report`."""

from __future__ import annotations

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
    SloOption,
    ToOption,
    TracePath,
)
from tailscope.output import no_folder, replacing


def report(
    trace: TracePath,
    output: Annotated[Path, typer.Option("-o", "--output", help="Page to write.")] = Path("report.html"),
    config: ConfigOption = None,
    slo: SloOption = None,
    memory_limit: MemoryOption = "3GB",
    from_: FromOption = None,
    to: ToOption = None,
    last: LastOption = None,
    instance: InstanceOption = None,
    klass: ClassOption = None,
) -> None:
    """Write a diagnosis with its charts as one page, which needs nothing but a browser (docs/report.md)."""
    from tailscope.cli import on_trace
    from tailscope.report.build import report as run

    no_folder(output, "report.html")
    diagnosis, page = on_trace(
        run, trace, config, slo or [], memory_limit, (from_, to, last, instance, klass)
    )
    with replacing(output) as part:
        part.write_text(page, encoding="utf-8")
    typer.echo(f"{diagnosis.verdict.status.upper()}: written to {output} ({len(page) / 1e6:.2g} MB)")
