"""The command `alerts`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tailscope.errors import UsageError
from tailscope.output import no_folder, replacing


def alerts(
    config: Annotated[
        Path | None, typer.Option("--config", help="Configuration; ./tailscope.toml if it is there.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; without it, printed.")
    ] = None,
    stock: Annotated[
        bool,
        typer.Option("--stock", help="For vLLM's own metrics, without those of tailscope serve."),
    ] = False,
    vllm_version: Annotated[
        str | None,
        typer.Option(help="With --stock: whose names, e.g. 0.10; without it, the newest known.", metavar="V"),
    ] = None,
    dashboard_url: Annotated[
        str | None,
        typer.Option(help="What alerts link to; without it, Prometheus's own graph.", metavar="URL"),
    ] = None,
    trace: Annotated[
        str, typer.Option(help="How the trace is called in the commands that alerts say to run.")
    ] = "TRACE",
) -> None:
    """Write alerting rules for Prometheus: objectives of classes, what rules look for, and tailscope's own health (docs/alerts.md)."""
    from tailscope import alerts as made
    from tailscope import config as configuration
    from tailscope import registry, stock_metrics

    if vllm_version is not None and not stock:
        raise UsageError("--vllm-version goes with --stock: tailscope's own metrics are the same for all")
    version = stock_metrics.parse_version(vllm_version) if vllm_version else stock_metrics.NEWEST
    wanted = made.Wanted(
        vllm=version if stock else None,
        dashboard_url=None if dashboard_url is None else made.parse_url(dashboard_url),
        trace=trace,
    )
    text = made.render(configuration.load(config), [rule for rule, _ in registry.rules()], wanted)
    if output is None:
        typer.echo(text, nl=False)
        return
    no_folder(output, "rules.yaml")
    with replacing(output) as part:
        part.write_text(text, encoding="utf-8")
