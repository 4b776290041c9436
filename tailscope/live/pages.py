"""What a running server shows of itself: /metrics, /healthz, /readyz, /api/diagnosis, /api/history and a status page."""

from __future__ import annotations

import asyncio
import html
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from tailscope.live.access import Access
from tailscope.live.request_metrics import MOST_TEXT, RequestMetrics
from tailscope.live.watch import COUPLING, UNEXPLAINED, Watch, Watched, excess_of, ratios_of

#: Findings that become series; more than a person could act on.
MOST_SERIES = 200
END = b"# EOF\n"


class WatchMetrics:
    """A collector of what the continuous diagnosis says."""

    def __init__(self, state: Watched) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        state = self._state
        findings = GaugeMetricFamily(
            "tailscope_finding", "Findings that are open.", labels=["rule", "severity", "culprit", "victim"]
        )
        found = list(state.open.values())[:MOST_SERIES]
        for labels in dict.fromkeys(_cut(f.rule, f.severity, f.culprit, f.victim) for f in found):
            findings.add_metric(labels, 1)
        yield findings
        diagnosis = state.diagnosis
        excess = {} if diagnosis is None else {_cut(*key): s for key, s in excess_of(diagnosis).items()}
        parts = GaugeMetricFamily(
            "tailscope_tail_excess_seconds",
            "Excess of the last window's tail over typical requests, by where it went.",
            labels=["class", "metric", "component"],
        )
        for key, seconds in excess.items():
            parts.add_metric(key, seconds)
        yield parts
        for name, text, components in (
            ("coupling", "Share of a tail's excess that is others' prefill.", COUPLING),
            ("unexplained", "Share of a tail's excess that nothing explains.", (UNEXPLAINED,)),
        ):
            ratios = GaugeMetricFamily(f"tailscope_{name}_ratio", text, labels=["class", "metric"])
            for pair, ratio in ratios_of(excess, components).items():
                ratios.add_metric(pair, ratio)
            yield ratios
        stragglers = GaugeMetricFamily(
            "tailscope_straggler_ratio",
            "Share of the steps' time that others wait for the rank.",
            labels=["rank", "server"],
        )
        for (rank, server), share in _stragglers(diagnosis).items():
            stragglers.add_metric([rank, server], share)
        yield stragglers
        outcomes = CounterMetricFamily("tailscope_diagnoses", "Looks at the window.", labels=["outcome"])
        for outcome, count in state.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        if state.took_s is not None:
            yield GaugeMetricFamily(
                "tailscope_diagnosis_duration_seconds", "Duration of the last look.", value=state.took_s
            )
        if state.diagnosed_s is not None:
            yield GaugeMetricFamily(
                "tailscope_diagnosis_timestamp_seconds",
                "When the last good look was.",
                value=state.diagnosed_s,
            )


def _stragglers(diagnosis: Any) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for finding in (diagnosis or {"findings": []})["findings"]:
        culprit = finding["culprit"]
        if culprit["kind"] != "rank":
            continue
        for evidence in finding["evidence"]:
            share = evidence["data"].get("share_of_steps")
            if isinstance(share, (int, float)):
                key = _cut(str(culprit["id"]), str(culprit.get("instance", "")))
                found[key] = max(found.get(key, 0.0), float(share))
    return found


def _cut(*labels: str) -> Any:
    """Values of labels; those of findings are anybody's text."""
    return tuple(text[:MOST_TEXT] for text in labels)


def routes(
    registry: CollectorRegistry,
    requests: RequestMetrics,
    watch: Watch | None,
    access: Access,
    not_ready: Callable[[], str],
) -> list[web.RouteDef]:
    """Handlers; `not_ready` says why the server does not work, or nothing."""

    def guarded(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        async def checked(request: web.Request) -> web.StreamResponse:
            if not access.allows(request.headers.get("Authorization")):
                return web.Response(status=401, text="a bearer token is needed\n")
            return await handler(request)

        return checked

    # Tens of thousands of lines: spans are acknowledged meanwhile.
    async def metrics(request: web.Request) -> web.StreamResponse:
        return await asyncio.to_thread(written, request)

    def written(request: web.Request) -> web.StreamResponse:
        if "application/openmetrics-text" in request.headers.get("Accept", ""):
            head = openmetrics.generate_latest(registry).removesuffix(END)  # type: ignore[no-untyped-call]
            body, kind = head + requests.render(exemplars=True) + END, openmetrics.CONTENT_TYPE_LATEST
        else:
            body = generate_latest(registry) + requests.render(exemplars=False)
            kind = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=body, headers={"Content-Type": kind})

    async def diagnosis(request: web.Request) -> web.StreamResponse:
        state = Watched() if watch is None else watch.state
        return _json(
            {
                "diagnosed_s": state.diagnosed_s,
                "problem": state.problem,
                "open": [asdict(finding) for finding in state.open.values()],
                "diagnosis": state.diagnosis,
            }
        )

    async def history(request: web.Request) -> web.StreamResponse:
        return _json([] if watch is None else watch.history())

    async def status(request: web.Request) -> web.StreamResponse:
        state = Watched() if watch is None else watch.state
        page = _page(state, not_ready(), [] if watch is None else watch.history(20))
        return web.Response(
            text=page,
            content_type="text/html",
            headers={"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"},
        )

    async def healthy(request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def ready(request: web.Request) -> web.StreamResponse:
        why = not_ready()
        return web.Response(status=503 if why else 200, text=f"{why or 'ok'}\n")

    return [
        web.get("/metrics", guarded(metrics)),
        web.get("/api/diagnosis", guarded(diagnosis)),
        web.get("/api/history", guarded(history)),
        web.get("/", guarded(status)),
        # A probe has no token, and learns nothing else here.
        web.get("/healthz", healthy),
        web.get("/readyz", ready),
    ]


def _json(value: Any) -> web.Response:
    return web.Response(text=json.dumps(value, ensure_ascii=False), content_type="application/json")


def _page(state: Watched, problem: str, history: list[dict[str, Any]]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(f.severity)}</td><td>{html.escape(f.rule)}</td><td>{html.escape(f.title)}</td>"
        f"<td>{_ago(f.opened_s)}</td></tr>"
        for f in state.open.values()
    )
    changes = "".join(
        f"<tr><td>{_ago(entry['time_s'])}</td><td>{html.escape(entry['change'])}</td>"
        f"<td>{html.escape(entry['rule'])}</td><td>{html.escape(entry['title'])}</td></tr>"
        for entry in reversed(history)
    )
    verdict = "No look at the window yet." if state.diagnosis is None else state.diagnosis["verdict"]["text"]
    looked = "" if state.diagnosed_s is None else f" (looked {_ago(state.diagnosed_s)} ago)"
    trouble = "".join(f'<p role="alert">{html.escape(text)}</p>' for text in (problem, state.problem) if text)
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>tailscope</title>
<style>:root{{color-scheme:light dark}}body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid #8885;vertical-align:top}}
[role=alert]{{border-left:4px solid #c00;padding-left:1rem}}</style>
<h1>tailscope</h1>{trouble}<p>{html.escape(verdict)}{looked}</p>
<h2>Open findings</h2>{f"<table><tr><th>severity<th>rule<th>what<th>open for</tr>{rows}</table>" if rows else "<p>None.</p>"}
<h2>Lately</h2>{f"<table><tr><th>ago<th>what<th>rule<th>finding</tr>{changes}</table>" if changes else "<p>Nothing opened or closed.</p>"}
<p>More: <a href="/metrics">/metrics</a>, <a href="/api/diagnosis">/api/diagnosis</a>, <a href="/api/history">/api/history</a>.</p>
"""


def _ago(time_s: float) -> str:
    seconds = max(0.0, time.time() - time_s)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
