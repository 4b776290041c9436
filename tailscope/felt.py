"""Whether anybody can feel what a finding explains. A share of an excess says where a tail comes from, not whether it matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tailscope.ledger.histogram import ALL
from tailscope.model import SEVERITIES, ClassRow, Evidence, Finding, severity_of
from tailscope.store import Trace

#: A wait below a tenth of a second is felt as none (Miller 1968, Nielsen 1993): of the first token, and of the whole answer.
INSTANT_S = 0.1
#: A gap between tokens below this is a stream without a stop: what MLPerf Inference 5.0 allows an interactive Llama 2 70B as
#: TPOT (beside 450 ms of TTFT).
SMOOTH_S = 0.04
#: What is below a tenth of an objective's limit is not what breaks it.
OF_OBJECTIVE = 0.1
#: From so many times the least that is felt it is plain: up to 0.2 s of TTFT only who waits for it notices.
PLAIN = 2.0


def weigh(trace: Trace, findings: Sequence[Finding], rows: Sequence[ClassRow]) -> list[Finding]:
    """The findings, those of less than people feel as low, those of little more as medium at most. One whose class breaks an
    objective stays, and so does what its share of all of the steps' time earns; so do findings that name no time of a class."""
    tokens = {
        row["klass"]: row["tokens"]
        for row in trace.rows(
            "SELECT klass, median(output_tokens) AS tokens FROM joined WHERE billed AND output_tokens > 1 GROUP BY klass"
        )
    }
    return [_weighed(finding, rows, tokens) for finding in findings]


def least(klass: str, metric: str, rows: Sequence[ClassRow], tokens: float | None) -> float:
    """Seconds from which more of a class's metric is felt: a tenth of its objective, else by what people notice."""
    for name in (klass, ALL):
        limits = [o.limit_s for r in rows if (r.klass, r.metric) == (name, metric) for o in r.objectives]
        if limits:
            return OF_OBJECTIVE * min(limits)
    if metric == "ITL":
        return SMOOTH_S
    if metric == "TPOT":
        # Every token of an answer comes later: together they make the answer late.
        return min(SMOOTH_S, INSTANT_S / max((tokens or 2.0) - 1, 1.0))
    return INSTANT_S


def _weighed(finding: Finding, rows: Sequence[ClassRow], tokens: dict[str, float]) -> Finding:
    if not finding.explains:
        return finding
    felt: list[tuple[float, float, str]] = []
    for key, seconds in finding.explains.items():
        klass, metric = key.split("\t")[:2]
        if any(row.slo_broken for row in rows if (row.klass, row.metric) == (klass, metric)):
            return finding
        felt.append(
            (
                seconds / least(klass, metric, rows, tokens.get(klass)),
                seconds,
                f"{metric} of class {klass}",
            )
        )
    most, seconds, where = max(felt)
    allowed = min(
        "low" if most < 1 else "medium" if most < PLAIN else "high",
        severity_of(finding.standing),
        key=SEVERITIES.index,
    )
    if SEVERITIES.index(finding.severity) >= SEVERITIES.index(allowed):
        return finding
    floor = f"the {seconds / most:.3g} s from which that is felt" if most > 0 else "what is felt"
    text = f"{seconds:.3g} s more {where} is {'less' if most < 1 else 'little more'} than {floor}, so this is {allowed} whatever its share"
    against = (*finding.counter_evidence, Evidence(text, {"seconds": seconds}))
    return replace(finding, severity=allowed, counter_evidence=against)
