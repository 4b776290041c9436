"""A trace in, a timeline out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tailscope.align import Scope, align
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.errors import UsageError
from tailscope.export import arrows, chrome, engines, findings, perfetto, ranks, requests
from tailscope.export.span import MOST_SLICES, Span, choose
from tailscope.export.timeline import SHOWN, Batch, Names, Timeline, Tracks
from tailscope.model import Diagnosis
from tailscope.output import replacing
from tailscope.ranks.compared import write_ranks
from tailscope.store import Trace

Format = Literal["perfetto", "chrome"]


@dataclass(frozen=True)
class Written:
    slices: int
    counters: int
    tracks: int
    bytes: int
    span: Span
    arrows: str


def export(
    trace: Trace,
    config: Config,
    scope: Scope,
    output: Path,
    *,
    format: Format = "perfetto",
    most: int = MOST_SLICES,
    with_findings: bool = True,
) -> Written:
    """Write a timeline of what begins in the scope. Without findings the trace is aligned, not diagnosed, and there are no arrows.

    Raises as `diagnose` does, and UsageError where there is nothing to show, or the file cannot be written.
    """
    diagnosis: Diagnosis | None = None
    if with_findings:
        diagnosis = diagnose(trace, config, scope)
    else:
        align(trace, config, scope)
        write_ranks(trace, scope)
    return write(trace, diagnosis, scope, output, format, most)


def write(
    trace: Trace, diagnosis: Diagnosis | None, scope: Scope, output: Path, format: Format, most: int
) -> Written:
    """Of a trace that is aligned already, and whose ranks are compared; billed, too, where there is a diagnosis."""
    trace.connection.execute(SHOWN)
    span = choose(trace, scope, diagnosis.findings if diagnosis else (), most)
    if not span.slices:
        if not any(trace.has(table) for table in ("requests", "iterations", "rank_events", "events")):
            raise UsageError(
                f"{trace.path}: no requests, steps, rank events or log events, of which a timeline is made; what /metrics says is in "
                f"`tailscope report`"
            )
        raise UsageError(
            f"{trace.path}: nothing with a time begins in what was asked for, so there is nothing to show"
        )
    timeline, told = _timeline(trace, diagnosis, span)
    with replacing(output) as part:
        with part.open("wb") as out:
            writer = perfetto.Writer(out) if format == "perfetto" else chrome.Writer(out)
            writer.write(timeline)
        size = part.stat().st_size
    return Written(writer.slices, writer.counters, len(timeline.tracks.all), size, span, told)


def _timeline(trace: Trace, diagnosis: Diagnosis | None, span: Span) -> tuple[Timeline, str]:
    tracks, names = Tracks(), Names()
    marks = findings.marks(diagnosis, span, tracks) if diagnosis else []
    instances: dict[str, int] = {}
    of_engines, of_events = engines.place(trace, span, tracks, instances)
    of_requests = requests.place(trace, span, tracks, names, instances)
    of_ranks = ranks.place(trace, span, tracks)
    flows, told = arrows.draw(trace, diagnosis, span, of_requests, of_ranks) if diagnosis else ([], "")

    def batches() -> Iterator[Batch]:
        if marks:
            yield marks
        yield from engines.batches(trace, span, names, of_engines, of_events)
        yield from requests.slices(trace, of_requests, names)
        yield from ranks.slices(of_ranks, names)
        # Last, so that where times are equal they lie in the slices above.
        if flows:
            yield flows

    return Timeline(tracks, names, span.first_ns, batches()), told
