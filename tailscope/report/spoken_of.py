"""The requests and steps that a finding speaks of, and the sections that show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tailscope.model import Diagnosis, Finding
from tailscope.store import Trace
from tailscope.units import clock

#: Requests and steps named under a finding.
MOST = 5
#: Findings whose requests are looked up.
MOST_FINDINGS = 40


@dataclass
class SpokenOf:
    requests: list[dict[str, Any]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    panels: list[str] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    #: Whether the page can be narrowed to it.
    filters: bool = False


def look_up(trace: Trace, diagnosis: Diagnosis) -> dict[int, SpokenOf]:
    """By the findings' numbers."""
    found = {}
    for number, finding in enumerate(diagnosis.findings[:MOST_FINDINGS], 1):
        classes = list(dict.fromkeys(v.id for v in finding.victims if v.kind == "class"))
        instances = _instances(finding)
        one = SpokenOf(
            panels=_panels(finding),
            classes=classes,
            filters=finding.window_ns is not None or bool(classes),
        )
        about = (finding.culprit, *finding.victims)
        ids = [p.id for p in about if p.kind == "request"]
        metrics = {str(v.detail.get("metric")) for v in finding.victims}
        first, last = finding.window_ns or (None, None)
        one.requests = trace.rows(
            _REQUESTS
            + ("e2e_ns" if metrics & {"E2E", "TPOT", "ITL"} else "ttft_ns")
            + " DESC NULLS LAST, rid LIMIT $most",
            {
                "classes": classes or None,
                "ids": ids or None,
                "instances": instances or None,
                "first": first,
                "last": last,
                "most": MOST,
            },
        )
        if finding.window_ns:
            one.steps = trace.rows(
                _STEPS, {"instances": instances or None, "first": first, "last": last, "most": MOST}
            )
            for step in one.steps:
                step["at"] = clock(step["end_ns"], short=True)
                step["engine"] = (
                    f"{step['instance']} engine {step['engine']}"
                    if step["engine"] is not None
                    else step["instance"]
                )
        found[number] = one
    return found


_REQUESTS = """
SELECT rid, request_id, klass, ttft_ns / 1e9 AS ttft_s, e2e_ns / 1e9 AS e2e_s FROM joined
WHERE billed AND ttft_ns >= 0 AND ($classes IS NULL OR list_contains($classes::VARCHAR[], klass))
  AND ($ids IS NULL OR list_contains($ids::VARCHAR[], request_id)) AND ($instances IS NULL OR list_contains($instances::VARCHAR[], instance))
  AND ($first IS NULL OR (arrival_ns <= $last AND arrival_ns + coalesce(e2e_ns, ttft_ns) >= $first))
ORDER BY
"""
_STEPS = """
SELECT k, instance, engine, end_ns, tile_ns / 1e9 AS seconds, prefill_tokens, decode_requests FROM steps
WHERE ($instances IS NULL OR list_contains($instances::VARCHAR[], instance)) AND end_ns >= $first AND start_ns <= $last
ORDER BY tile_ns DESC, k LIMIT $most
"""


def _instances(finding: Finding) -> list[str]:
    about = (finding.culprit, *finding.victims)
    named = [p.id for p in about if p.kind == "instance"]
    named += [str(p.detail["instance"]) for p in about if p.detail.get("instance") is not None]
    return list(dict.fromkeys(named))


def _panels(finding: Finding) -> list[str]:
    kinds = {finding.culprit.kind, *(v.kind for v in finding.victims)}
    panels = []
    if kinds & {"rank", "link", "expert"}:
        panels.append("ranks")
    if "expert" in kinds or "expert" in finding.rule:
        panels.append("experts")
    if "class" in kinds or "tenant" in kinds:
        panels += ["excess", "latency", "requests"]
    if finding.culprit.kind in ("class", "tenant"):
        panels.append("blame")
    if "size" in finding.rule or "output" in finding.rule:
        panels.append("shapes")
    panels.append("iterations")
    return panels
