"""The command `dashboards`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tailscope.errors import UsageError
from tailscope.output import replacing


def dashboards(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write to; made where it is not there.")
    ],
) -> None:
    """Write the dashboards for Grafana, and how it is told to load them (docs/dashboards.md)."""
    shipped = files("tailscope.dashboards")
    found = [entry for folder in (shipped, shipped / "provisioning") for entry in folder.iterdir()]
    for entry in sorted(found, key=lambda entry: entry.name):
        if not entry.name.endswith((".json", ".yaml")):
            continue
        place = output / "provisioning" if entry.name.endswith(".yaml") else output
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{place}: cannot be made: {error.strerror}") from error
        with replacing(place / entry.name) as part:
            part.write_bytes(entry.read_bytes())
        typer.echo(place / entry.name)
