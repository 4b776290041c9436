"""The command `dashboards`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from tailscope.errors import UsageError


def dashboards(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write to; made where it is not there.")
    ],
) -> None:
    """Write the dashboards for Grafana, and how it is told to load them (docs/dashboards.md)."""
    shipped = files("tailscope.dashboards")
    found = [entry for folder in (shipped, shipped / "provisioning") for entry in folder.iterdir()]
    try:
        for entry in sorted(found, key=lambda entry: entry.name):
            if not entry.name.endswith((".json", ".yaml")):
                continue
            place = output / "provisioning" if entry.name.endswith(".yaml") else output
            place.mkdir(parents=True, exist_ok=True)
            # Grafana may be told to read it at any moment.
            part = place / f"{entry.name}.part"
            part.write_bytes(entry.read_bytes())
            part.replace(place / entry.name)
            typer.echo(place / entry.name)
    except OSError as error:
        raise UsageError(f"{output}: cannot be written: {error.strerror}") from error
