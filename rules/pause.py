"""The engine stood still: once or now and then, at no beat, and for no new shape of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scipy import stats

from tailscope import outliers
from tailscope.model import (
    Alert,
    Decision,
    Evidence,
    Finding,
    Panel,
    Party,
    Remedy,
    Rows,
    Rule,
    Signal,
    Threshold,
)

from . import _alerts, _pauses, _tails
from ._tails import BEYOND_BATCH, Row

UNKNOWN = "nothing that is known"


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    return _pauses.by_lane(rows, lambda lane, steps: lane_decision(lane, steps, limits), RULE.missing)


def lane_decision(lane: Row, rows: Sequence[Row], limits: Mapping[str, float]) -> Decision:
    """What the long steps of an engine, or of some that step together, say."""
    steps = _tails.counted(len(rows), "long step")
    left, others = not_judged_elsewhere(rows, lane, limits)
    if not left:
        return Decision("clear", f"{steps}, {' and '.join(others)}")
    named = [row for row in left if who_of(row) != UNKNOWN]
    aside = {row["round"] for row in named}
    chance = limits["alone"] / lane["lanes"]
    rounds, test = _pauses.those_apart(lane["tops"], aside, 1 + limits["times"], chance)
    apart = [row for row in left if row["round"] in rounds]
    unnoticed_s = sum(row["beyond_s"] for row in apart)
    if unnoticed_s < limits["noticed"]:
        apart = []
    by_whom: dict[str, list[Row]] = {}
    for row in sorted([*named, *apart], key=lambda r: r["round"]):
        by_whom.setdefault(who_of(row), []).append(row)
    if not by_whom:
        if test is None:
            return Decision(
                "inconclusive", f"{steps}, and too few steps to tell a pause from what they are like"
            )
        if unnoticed_s:
            return Decision("clear", f"{steps}: {unnoticed_s:.2g} s that nobody notices")
        return Decision("clear", f"{steps}, none apart from the others (p = {test.p_value:.2g})")
    findings = []
    for who, stops in by_whom.items():
        # Of a window that was chosen: what nobody of it was there for is none of its pauses.
        members = [row for row in stops if row["requests"] or row["hurt"]]
        tails = _tails.tails((row["hurt"] for row in members), lane["classes"])
        hurt = _tails.felt(tails, limits["share"], limits["slowdown"])
        if hurt:
            findings.append(finding(lane, who, members, hurt, test if who == UNKNOWN else None, others))
    lost_s = sum(row["beyond_s"] for members in by_whom.values() for row in members)
    if not findings:
        return Decision("clear", f"stood still for {lost_s:.3g} s in all, which is no real part of a tail")
    name = _tails.engine_name(lane)
    return Decision("found", f"engine {name} stood still for {lost_s:.3g} s in all", tuple(findings))


def not_judged_elsewhere(
    rows: Sequence[Row], lane: Row, limits: Mapping[str, float]
) -> tuple[list[Row], list[str]]:
    """The long steps that no other rule speaks for, and what the others are: the first batch and compilations, shapes that
    are new, steps at a beat."""
    others = []
    at_start = [row for row in rows if row["is_start"] or row["is_compiled"]]
    if at_start:
        others.append(f"{len(at_start)} of a first batch or beside a compilation")
    left = [row for row in rows if row not in at_start]
    unnamed = [row for row in left if not row["deliberate"] and not row["reason"]]
    firsts = sum(row["is_first"] for row in unnamed)
    chance = stats.hypergeom.sf(firsts - 1, lane["steps"], lane["firsts"] or 0, len(unnamed))
    if firsts > 1 and chance <= limits["chance"]:
        # An engine may have other sizes than we know, so that not each first one is seen to be one.
        others.append(f"{len(unnamed)} of which {firsts} are of shapes that are new")
        left = [row for row in left if row not in unnamed]
    # Of all long steps, as the rule on a beat has them.
    found, clock = _pauses.best_rhythm(rows)
    if found is not None and found.p_value <= limits["chance"]:
        members = [rows[i] for i in found.members]
        if _pauses.periods(members, found, clock)[1] >= limits["apart"]:
            others.append(f"{len(members)} at a beat")
            left = [row for row in left if row not in members]
    return left, others


def who_of(row: Row) -> str:
    """Who stopped the engine in a step, as far as something stood beside it."""
    beside = [text for text in (row["deliberate"], row["reason"]) if text]
    if not beside:
        return UNKNOWN
    return " and ".join(sorted(_pauses.who_pauses(beside))) or "what its log tells of"


def finding(
    lane: Row,
    who: str,
    members: Sequence[Row],
    hurt: Sequence[_tails.Tail],
    test: outliers.Outliers | None,
    others: Sequence[str],
) -> Finding:
    lost_s = sum(row["beyond_s"] for row in members)
    worst = sorted(members, key=lambda row: -row["beyond_s"])
    requests = max((row["requests"] or 0 for row in members), default=0)
    longest = worst[0]
    evidence = [
        Evidence(
            f"at {_pauses.clock(row['start_ns'])} a step took {row['beyond_s']:.3g} s longer than its batch accounts for, "
            f"{row['times']:.3g} x what it does"
            + (f"; {row['requests']:,.0f} requests were there" if row["requests"] else "")
            + (
                f"; beside it: {'; '.join(t for t in (row['deliberate'], row['reason']) if t)}"
                if who != UNKNOWN
                else ""
            ),
            {
                k: row[k]
                for k in ("start_ns", "end_ns", "beyond_s", "times", "requests", "reason", "deliberate")
            },
        )
        for row in worst[:3]
    ]
    if len(members) > 1:
        evidence.append(
            Evidence(
                f"{len(members)} such steps, {lost_s:.3g} s in all, {lost_s / lane['busy_s']:.1%} of the time the engine was busy",
                {"pauses": len(members), "lost_s": lost_s, "busy_s": lane["busy_s"]},
            )
        )
    evidence.append(Evidence(_tails.sentence(hurt, "what they took" if len(members) > 1 else "what it took")))
    counter = []
    if test is not None:
        evidence.append(
            Evidence(
                f"they lie apart from all other steps: p = {test.p_value:.1g} for so wide a gap in a tail like theirs",
                {"p_value": test.p_value, "apart": test.count, "tail_exponent": test.tail},
            )
        )
        counter.append(
            Evidence(
                "nothing stands beside them in the log or /metrics: what stopped the engine is not known"
            )
        )
    if others:
        counter.append(Evidence(f"not counted here: {' and '.join(others)}, which other rules judge"))
    own_doing = who == _pauses.PROFILER_NAME and bool(lane["profiles"])
    if own_doing:
        counter.append(Evidence("taking the profiles that the trace holds is what stopped it"))
    if not counter:
        counter.append(
            Evidence("that something stood beside a step does not prove that it made the step long")
        )
    name, subject = _tails.engine_name(lane), _tails.engines_name(lane)
    times = (
        f"for {longest['beyond_s']:.3g} s"
        if len(members) == 1
        else f"{len(members)} times, up to {longest['beyond_s']:.3g} s"
    )
    why = ", and nothing says why" if who == UNKNOWN else f" ({who})"
    known = _pauses.who_pauses(t for row in members for t in (row["reason"], row["deliberate"]) if t)
    return Finding(
        rule=RULE.name,
        status="found",
        # Who profiles to find a cause does not look for what the profiler did.
        severity="low" if own_doing else _tails.severity(hurt),
        basis="inferred",
        title=f"{subject} stood still {times}{why}",
        culprit=Party(
            "process", who if known else name, {"instance": lane["instance"], "engine": lane["engine"]}
        )
        if known
        else Party("engine", name, {"instance": lane["instance"]}),
        victims=tuple(
            Party(v.kind, v.id, {**v.detail, "requests_there": requests}) for v in _tails.victims(hurt)
        ),
        share_of_tail=hurt[0].share,
        window_ns=(members[0]["start_ns"], max(row["end_ns"] for row in members)),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=_pauses.remedies_for(known) or RULE.remedies,
        confirm_by=RULE.confirm_by,
        explains=_tails.explains(hurt),
        claims=BEYOND_BATCH,
    )


RULE = Rule(
    name="pause",
    summary="The engine stood still, once or now and then.",
    why=(
        "Whatever stops an engine stops all requests in it and all that come meanwhile. A single stop of some seconds makes the "
        "p99 of a whole test, and nothing in the requests themselves shows it."
    ),
    needs=("step_costs",),
    missing="needs steps of an engine",
    thresholds=(
        _pauses.TIMES,
        Threshold("most", 400, "steps", "The longest steps of an engine are those that anybody felt."),
        Threshold(
            "chance", 0.001, "", "Against a beat, or new shapes, by chance: what these rules decide by."
        ),
        _pauses.ALONE,
        Threshold(
            "noticed",
            0.1,
            "s",
            "All steps apart from the others beside which nothing stands: nobody notices less (Miller 1968), and heavy steps are as long.",
        ),
        Threshold("apart", 10, "steps", "What comes more often than that is a kind of batch, not a pause."),
        _tails.SHARE,
        _tails.SLOWDOWN,
    ),
    remedies=(
        Remedy(
            "See what held the engine core: its log, the node's, and other processes at that time",
            "server log about the time; dmesg; nvidia-smi --query-gpu=clocks_throttle_reasons.active; kubectl get events",
            "any",
            "Your time",
        ),
        Remedy(
            "See whether Python's garbage collector is it, and in which process",
            "VLLM_GC_DEBUG=1",
            "vLLM V1, since about 0.11",
            "A line in the log for each collection",
        ),
        Remedy(
            "Have the log say more of what the engine does",
            "--enable-logging-iteration-details, VLLM_LOGGING_LEVEL=DEBUG",
            "vLLM V1; iteration details since about 0.28",
            "A larger log",
        ),
        Remedy(
            "Let the router send new requests elsewhere while an engine gives no tokens",
            "router health check on vllm:generation_tokens_total standing still while vllm:num_requests_running > 0",
            "any router",
            "Some seconds of capacity at a false alarm",
        ),
    ),
    confirm_by=(
        "Sample the engine core's stack at the next stop (py-spy dump --pid): it shows who holds it up",
        "Without what stopped it, replay the same load: the requests that were there have the latency of the others",
    ),
    decide=decide,
    alerts=(
        _alerts.found("Pause", "pause", "The engine stood still"),
        Alert(
            "StandingStill",
            "warning",
            "1m",
            "{{ $labels.instance }} has {{ $value }} requests running and has computed nothing for five minutes",
            (
                Signal(
                    f"min_over_time(vllm:num_requests_running{_alerts.WINDOW})",
                    "> 0",
                    f"and rate(vllm:generation_tokens_total{_alerts.WINDOW}) == 0\n"
                    f"and rate(vllm:prompt_tokens_total{_alerts.WINDOW}) == 0",
                ),
            ),
            "An engine that stands still finishes nothing, so no histogram shows it and no p99 rises: all that wait for it wait "
            "until somebody restarts it or sends their requests elsewhere.",
            panel=Panel(
                "engine",
                "Requests running all the time",
                "none",
                "{{instance}} {{engine}}",
                "The fewest requests that ran at once in five minutes: above nothing while no tokens are computed, the engine stands still.",
            ),
        ),
    ),
)
