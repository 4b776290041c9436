"""How much of a wait people feel, and that no share makes more of it."""

from __future__ import annotations

from typing import Any

import pytest

from tailscope.felt import least, weigh
from tailscope.model import ClassRow, Finding, Objective, Party, Severity


class Answers:
    """A trace whose answers have so many tokens (median)."""

    def rows(self, _sql: str) -> list[dict[str, Any]]:
        return [{"klass": "<512", "tokens": 101.0}]


def objective(limit_s: float, status: Any = "kept") -> tuple[Objective, ...]:
    return (Objective("p99", limit_s, 0, 500, status),)


def finding(seconds: float, metric: str = "TTFT", severity: Severity = "high", **more: Any) -> Finding:
    return Finding(
        rule="hol-coupling",
        status="found",
        severity=severity,
        basis="inferred",
        title="",
        culprit=Party("class", "<8k"),
        victims=(),
        share_of_tail=0.9,
        window_ns=None,
        evidence=(),
        explains={f"<512\t{metric}": seconds},
        **more,
    )


def row(metric: str = "TTFT", **more: Any) -> ClassRow:
    return ClassRow("<512", metric, "engine", "requests", 500, **more)


def weighed(one: Finding, *rows: ClassRow) -> Finding:
    [found] = weigh(Answers(), [one], rows)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("metric", "seconds", "severity"),
    [
        ("TTFT", 0.013, "low"),
        ("TTFT", 0.15, "medium"),
        ("TTFT", 0.25, "high"),
        ("E2E", 0.09, "low"),
        ("ITL", 0.013, "low"),
        ("ITL", 0.1, "high"),
        # A hundred tokens later by so much each are a tenth of a second.
        ("TPOT", 0.0009, "low"),
        ("TPOT", 0.003, "high"),
    ],
)
def test_what_is_not_felt_is_low(metric: str, seconds: float, severity: Severity) -> None:
    found = weighed(finding(seconds, metric), row(metric))
    assert found.severity == severity
    assert bool(found.counter_evidence) == (severity != "high")


def test_severity_is_never_raised() -> None:
    assert weighed(finding(5.0, severity="low"), row()).severity == "low"


def test_an_objective_says_what_is_felt() -> None:
    assert weighed(finding(0.05), row(objectives=objective(0.2))).severity == "high"
    assert weighed(finding(0.4), row(objectives=objective(5.0))).severity == "low"
    everyone = ClassRow("all", "TTFT", "engine", "requests", 500, objectives=objective(0.2))
    assert least("<512", "TTFT", [row(), everyone], None) == pytest.approx(0.02)


def test_a_broken_objective_stays() -> None:
    assert weighed(finding(0.01), row(objectives=objective(0.2, "broken"))).severity == "high"


def test_what_costs_all_steps_stays() -> None:
    assert weighed(finding(0.01, standing=0.5), row()).severity == "high"
    assert weighed(finding(0.01, standing=0.2), row()).severity == "medium"


def test_a_client_s_view_counts_as_its_class_and_metric() -> None:
    one = finding(0.0)
    client = Finding(**{**one.__dict__, "explains": {"<512\tTTFT\tclient": 0.02}})
    assert weighed(client, row()).severity == "low"
