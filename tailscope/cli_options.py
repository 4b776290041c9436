"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TracePath = Annotated[
    str, typer.Argument(help="Trace: a directory, a Parquet file with one table, or a glob.", metavar="TRACE")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Configuration; ./tailscope.toml if it is there.")
]
SloOption = Annotated[
    list[str] | None,
    typer.Option(help="Objective, e.g. '<512:ttft_p99_s=2'; may be given often.", metavar="CLASS:METRIC=S"),
]
MemoryOption = Annotated[
    str, typer.Option("--memory-limit", help="Memory for queries, e.g. 4GB; beyond it they spill.")
]
FromOption = Annotated[
    str | None,
    typer.Option("--from", help="Look at arrivals from this time on (ISO 8601, UTC unless it says)."),
]
ToOption = Annotated[str | None, typer.Option("--to", help="... and before this time.")]
LastOption = Annotated[str | None, typer.Option("--last", help="The last 30s, 15m, 2h or 1d of the trace.")]
InstanceOption = Annotated[str | None, typer.Option("--instance", help="Only this instance.")]
ClassOption = Annotated[str | None, typer.Option("--class", help="Only this class of requests.")]
