"""Short requests wait behind the prefill of long ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tailscope.model import (
    HIGH_SHARE,
    Alert,
    Decision,
    Evidence,
    Finding,
    Panel,
    Party,
    Rows,
    Rule,
    Signal,
    Threshold,
    severity_of,
)

from . import _alerts, _coupling_forms, _prefill, _tails

#: An exposure test that is not significant at this level has seen nothing.
NOT_SEEN = 0.05


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows:
        return Decision("no-data", RULE.missing)
    if rows[0]["unsized"]:
        return Decision("no-data", "no request says how long its prompt is")
    rows = [row for row in rows if row["culprit"] is not None]
    # Of a victim whose TTFT is not known the exposure test is of E2E.
    with_ttft = {row["victim"] for row in rows if row["metric"] == "TTFT"}
    rows = [{**row, "tested": "TTFT" if row["victim"] in with_ttft else "E2E"} for row in rows]
    if not rows:
        return Decision(
            "clear", f"no two classes with enough requests have prompts {limits['size_ratio']:g}x as long"
        )
    by_culprit = groupby(sorted(rows, key=lambda r: (r["culprit"], r["victim"])), key=lambda r: r["culprit"])
    findings = [finding for _, group in by_culprit if (finding := judge(list(group), limits))]
    if any(f.status == "found" for f in findings):
        return Decision("found", "long prefills hold up shorter requests", tuple(findings))
    if findings:
        return Decision(
            "inconclusive", "slower beside long prefills, but the data cannot show why", tuple(findings)
        )
    if not rows[0]["has_steps"] and not any(could_have_shown(r, limits) for r in rows):
        return Decision(
            "inconclusive",
            "no iterations at the requests' time, and too few independent requests met a long prefill to test it",
        )
    return Decision("clear", "long prefills explain too little of any class's tail")


def judge(rows: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> Finding | None:
    """A finding for one culprit class: by the steps' evidence where there is any, else by the exposure test."""
    if not rows[0]["has_steps"]:
        exposed = [r for r in rows if slower_when_exposed(r, limits)]
        return by_statistics(max(exposed, key=lambda r: r["difference_s"]), limits) if exposed else None
    hurt = [r for r in rows if matters(r, limits)]
    return by_steps(sorted(hurt, key=share, reverse=True), limits) if hurt else None


def share(row: Mapping[str, Any]) -> float:
    return _tails.share_of(row["blamed_s"], row["excess_s"])


def matters(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether the culprit's prefill is a real part of an excess that is worth the name."""
    if not row["excess_s"] or row["excess_s"] <= 0:
        return False
    slower = row["blamed_s"] / row["p50_s"] if row["p50_s"] else 0.0
    least = limits["gap"] if row["metric"] == "ITL" else limits["slowdown"]
    return share(row) >= limits["share"] and slower >= least


def slower_when_exposed(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    if row["p_value"] is None or row["p_value"] > limits["p_value"]:
        return False
    if row["control_p_value"] is not None and row["control_p_value"] <= limits["p_value"]:
        return False  # another instance's prefills cannot slow these requests: what both share is the load
    return bool(row["difference_s"] >= limits["slowdown"] * (row["p50_s"] or 0.0))


def could_have_shown(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether the exposure test had the samples to find an effect, so that finding none means something."""
    return row["p_value"] is not None and row["n_eff"] >= limits["effective_samples"]


def by_statistics(row: Mapping[str, Any], limits: Mapping[str, float]) -> Finding:
    """Without membership in steps this is a correlation that survived a test, never a mechanism."""
    enough = row["n_eff"] >= limits["effective_samples"]
    return Finding(
        rule=RULE.name,
        status="found" if enough else "inconclusive",
        severity="low",
        basis="inferred",
        title=f"Requests of class {row['victim']} that arrive beside a prefill of class {row['culprit']} are slower",
        culprit=Party("class", row["culprit"]),
        victims=(
            Party(
                "class",
                row["victim"],
                {"metric": row["tested"], "requests": row["n"], "exposed": row["exposed"]},
            ),
        ),
        share_of_tail=None,
        window_ns=None,
        evidence=(exposure(row),),
        counter_evidence=(
            Evidence(
                "no iterations at the requests' time: it is not known which requests shared a step with the prefills"
            ),
            control(row),
        ),
        # What cannot be decided is no reason to change anything.
        remedies=RULE.remedies if enough else (),
        confirm_by=RULE.confirm_by,
    )


def by_steps(hurt: Sequence[Mapping[str, Any]], limits: Mapping[str, float]) -> Finding:
    """`hurt`: rows of one culprit, the worst first, one a victim class and metric."""
    worst = hurt[0]
    culprit, form = worst["culprit"], _coupling_forms.form_of(hurt)
    victims = list(dict.fromkeys(r["victim"] for r in hurt))
    evidence = [
        Evidence(
            f"{r['victim']} {r['metric']}: {r['blamed_s']:.3g} s of {r['excess_s']:.3g} s excess ({r['tail_rule']}) is {culprit} "
            "prefill in the same steps or in steps waited behind",
            {k: r[k] for k in ("victim", "metric", "blamed_s", "excess_s")},
        )
        for r in hurt[:6]
    ]
    evidence.append(_coupling_forms.parts(next((r for r in hurt if r["metric"] == "TTFT"), worst)))
    if worst["coupled_p50_s"] is not None and worst["uncoupled_p50_s"] is not None:
        evidence.append(
            Evidence(
                f"{worst['victim']} TTFT p50 {worst['coupled_p50_s']:.3g} s for the {worst['coupled']:,} requests coupled to such a "
                f"prefill, {worst['uncoupled_p50_s']:.3g} s for the other {worst['uncoupled']:,}",
                {k: worst[k] for k in ("coupled", "uncoupled", "coupled_p50_s", "uncoupled_p50_s")},
            )
        )
    if worst["longest_step_s"] and worst["usual_step_s"]:
        evidence.append(
            Evidence(
                f"steps with prefill took up to {worst['longest_step_s']:.3g} s, the median step without it {worst['usual_step_s']:.3g} s",
                {k: worst[k] for k in ("longest_step_s", "usual_step_s")},
            )
        )
    counter = [control(worst)]
    # The exposure test and the dose are of TTFT: they speak for or against what is said of it.
    tested = next((r for r in hurt if r["metric"] in ("TTFT", "E2E")), None)
    if tested is not None:
        if tested["p_value"] is not None:
            (evidence if tested["p_value"] <= 0.05 else counter).append(exposure(tested))
        for said in (_coupling_forms.dose(tested, limits), _coupling_forms.order(tested)):
            if said is not None:
                (evidence if said.speaks_for else counter).append(said.evidence)
    severity = severity_of(share(worst), any(r["slo_broken"] for r in hurt))
    if tested is not None and contradicted(tested, limits):
        severity = _coupling_forms.LOWER[severity]
        counter.append(
            Evidence(
                "the two estimators disagree: neither the exposure test nor the dose sees what the steps' evidence claims, so this "
                "counts a step less"
            )
        )
    details = {r["victim"]: r for r in reversed(hurt)}
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity,
        basis="inferred",
        title=(
            f"Requests of class {' and '.join(victims)} wait behind the prefill of class {culprit} "
            f"(prompts {worst['prompt_ratio']:.0f}x as long), {_coupling_forms.FORMS[form]}"
        ),
        culprit=Party(
            "class",
            culprit,
            {
                "form": form,
                "requests": worst["culprit_requests"],
                "longest_prompt_tokens": worst["culprit_longest"],
                "on": worst["culprit_instances"],
            },
        ),
        victims=tuple(
            Party(
                "class",
                v,
                {
                    "metric": details[v]["metric"],
                    "requests": details[v]["n"],
                    "coupled": details[v]["coupled"],
                },
            )
            for v in victims
        ),
        share_of_tail=share(worst),
        window_ns=(worst["first_ns"], worst["last_ns"]) if worst["first_ns"] is not None else None,
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=_coupling_forms.remedies(form, hurt, limits),
        confirm_by=(*_coupling_forms.confirm_by(worst), *RULE.confirm_by),
        claims=_tails.OTHERS_PREFILL,
        explains={f"{r['victim']}\t{r['metric']}": r["blamed_s"] for r in hurt},
    )


def contradicted(row: Mapping[str, Any], limits: Mapping[str, float]) -> bool:
    """Whether the statistics see nothing although they had the samples to: no more TTFT with more prefill, and none beside
    it at all."""
    return (
        could_have_shown(row, limits)
        and row["p_value"] > NOT_SEEN
        and row["rho_high"] is not None
        and row["rho_high"] < limits["dose"]
    )


def exposure(row: Mapping[str, Any]) -> Evidence:
    return Evidence(
        f"exposure test: {row['exposed']} requests with such a prefill within a fixed window after arrival had "
        f"{row['difference_s']:+.3g} s {row['tested']}, own load held equal (p = {row['p_value']:.2g})",
        {"exposed": row["exposed"], "difference_s": row["difference_s"], "p_value": row["p_value"]},
    )


def control(row: Mapping[str, Any]) -> Evidence:
    if row["control_p_value"] is None:
        return Evidence("no such prefill on another instance at the time, to serve as a negative control")
    return Evidence(
        f"negative control, other instances' prefills: {row['control_difference_s']:+.3g} s (p = {row['control_p_value']:.2g})",
        {"difference_s": row["control_difference_s"], "p_value": row["control_p_value"]},
    )


RULE = Rule(
    name="hol-coupling",
    summary="Short requests wait behind the prefill of long ones.",
    why=(
        "A step ends for all requests in it at once. A long prompt's chunk makes the step tens of times longer, and "
        "every request that shares the step, or arrives while it runs, waits for it."
    ),
    needs=("class_rows",),
    missing="needs requests of at least one class in number, with TTFT or at least E2E",
    thresholds=(
        Threshold(
            "size_ratio",
            4,
            "x",
            "Below a few times the victim's length, prefill is a peer, not a head of line.",
        ),
        _tails.SHARE,
        _prefill.SLOWDOWN,
        _prefill.GAP,
        Threshold(
            "p_value",
            0.01,
            "",
            "Measured on 1,997 unrelated pools that share bursty load: 0.6 % are called coupled at 0.01, 4.5 % at 0.05.",
        ),
        Threshold(
            "dose",
            0.1,
            "Spearman's rho",
            "Where even the upper end of its interval lies below, the harm does not follow the amount of prefill.",
        ),
        Threshold("effective_samples", 100, "", "A statistical estimator alone decides nothing below this."),
    ),
    remedies=_coupling_forms.REMEDIES["compute"],
    confirm_by=(
        "Replay with --max-num-batched-tokens halved: the longest step and the coupled TTFT fall together",
        "Remove the long class for ten minutes: the coupled requests' TTFT falls to the uncoupled one's",
    ),
    decide=decide,
    alerts=(
        Alert(
            "Coupling",
            "warning",
            "5m",
            "{{ $value | humanizePercentage }} of the {{ $labels.metric }} excess of class {{ $labels.class }} is others' prefill",
            (
                Signal(
                    "max by (class, metric) (tailscope_coupling_ratio)",
                    ">= $high",
                    _alerts.is_found("hol-coupling"),
                ),
            ),
            thresholds=(
                Threshold(
                    "high", HIGH_SHARE, "0-1", "From this share of a class's excess on a finding is high."
                ),
            ),
            panel=Panel(
                "classes",
                "Share of the tail that is others' prefill",
                "percentunit",
                "{{class}} {{metric}}",
                "How much of the slow requests' excess is waiting for prefill of others: it falls to nothing when classes are decoupled.",
            ),
        ),
    ),
)
