"""`tailscope record`: the way of `serve`, for a while and without listeners for anybody but senders of spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tailscope import config as configuration
from tailscope.errors import UsageError
from tailscope.live.run import serve
from tailscope.live.settings import Scrape, Serve, address, duration, url_of


def record(
    output: Path,
    scrape: Sequence[str],
    otlp_grpc: str | None,
    otlp_http: str | None,
    every: str,
    for_: str | None,
    config: Path | None,
    say: Callable[[str], object],
) -> None:
    """Raises UsageError for what cannot be recorded."""
    if not (scrape or otlp_grpc or otlp_http):
        raise UsageError("nothing to record: give --scrape, --otlp-grpc or --otlp-http")
    every_s = duration(every, "--every")
    urls = tuple(url_of(target, "http", "/metrics", "--scrape") for target in scrape)
    settings = Serve(
        trace=output,
        listen=None,
        otlp_grpc=None if otlp_grpc is None else address(otlp_grpc, "--otlp-grpc"),
        otlp_http=None if otlp_http is None else address(otlp_http, "--otlp-http"),
        scrapes=(Scrape(targets=urls, every_s=every_s, timeout_s=0.8 * every_s),) if urls else (),
        config=configuration.load(config),
    )
    server = serve(settings, config, None if for_ is None else duration(for_, "--for"), say)
    say(server.summary())
