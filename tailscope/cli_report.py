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
from tailscope.errors import UsageError


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

    if output.is_dir():
        raise UsageError(f"{output}: is a folder; name a file, e.g. {output / 'report.html'}")
    diagnosis, page = on_trace(
        run, trace, config, slo or [], memory_limit, (from_, to, last, instance, klass)
    )
    try:
        # Somebody may have the page before it open.
        part = output.with_name(output.name + ".part")
        part.write_text(page, encoding="utf-8")
        part.replace(output)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
    typer.echo(f"{diagnosis.verdict.status.upper()}: written to {output} ({len(page) / 1e6:.2g} MB)")
