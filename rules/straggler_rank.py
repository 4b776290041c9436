"""One rank comes late to the collectives, and all others wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import median
from typing import Any

from scipy import stats

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
    Severity,
    Signal,
    Threshold,
)
from tailscope.units import ms

from . import _alerts
from ._lateness import cause_of, common_evidence, others, over_time, place_of, where
from ._ranks import HEALTHY, MATCHED, SHARE, Row, alone, by_window, unfit, unprofiled, unsure
from ._tails import WAITING, Part, part_of, severity_by

#: From this many other ranks on their spread says what is ordinary.
MANY_OTHERS = 3


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    all_ns = sum(r["own_ns"] or 0 for r in rows)
    return by_window(rows, lambda window: unless_missing(window, all_ns, limits), RULE.missing)


def unless_missing(rows: Sequence[Row], all_ns: int, limits: Mapping[str, float]) -> Decision:
    """What a window says; that no rank is late cannot be said of ranks without a profile."""
    decision = window_decision(rows, all_ns, limits)
    return (
        Decision(*nothing_to_compare(rows[0]))
        if decision.status == "clear" and rows[0]["missing"]
        else decision
    )


def window_decision(rows: Sequence[Row], all_ns: int, limits: Mapping[str, float]) -> Decision:
    """What one window of profiles says. `all_ns`: lateness in all windows of the trace."""
    window = rows[0]
    if window["rank"] is None or not window["steps"]:
        return Decision(*nothing_to_compare(window))
    if window["steps"] < 2:
        return Decision(
            "inconclusive",
            f"one step of {len(rows)} ranks is profiled: who was last in it may be last by chance",
        )
    if not window["step_ns"]:
        return Decision("inconclusive", "all collectives are at one time: the profiles are damaged")
    worst = max(rows, key=lambda r: (r["own_ns"], r["decided_ns"]))
    undecided_ns = sum(r["caused_ns"] - r["decided_ns"] for r in rows)
    decided_ns = sum(r["decided_ns"] for r in rows)
    if unfitting := unfit(window, limits["matched"]):
        return unfitting
    if undecided_ns > decided_ns and not isfinite(window["error_ns"]):
        return Decision("inconclusive", "too few collectives in common to know the ranks' clocks")
    if undecided_ns > decided_ns and undecided_ns >= limits["share"] * window["step_ns"]:
        return Decision(
            "inconclusive",
            f"ranks wait for each other by less than clocks are known: {limits['errors']:.0f} x {ms(window['error_ns'])}",
        )
    if worst["own_ns"] and worst["agreed_ns"] < limits["agreement"] * worst["decided_ns"]:
        return Decision(
            "inconclusive",
            f"by the clocks rank {worst['rank']} is late, but it is not the one that leaves collectives soonest: clocks are off",
        )
    least = max(2.0, limits["rare"] * window["steps"])
    transient = [r for r in rows if (r["outlier_steps"] or 0) >= least and is_few(r) and dominates(r, rows)]
    if worst in transient and passes(worst, limits):
        return found_passing(rows, transient, all_ns)
    chance = by_chance(rows, worst)
    share = worst["own_ns"] / window["step_ns"]
    if chance < limits["chance"] and window["steps"] >= limits["steps"] and share >= limits["share"]:
        found = persistent(rows, worst, share, chance, tail_of(worst, all_ns), limits)
        return Decision(
            "found",
            f"rank {worst['rank']} late in {worst['lead_steps']} of {window['steps']} {window['unit']}",
            (found,),
        )
    if transient:
        return found_passing(rows, transient, all_ns)
    stopped = standing_still(rows, limits)
    if stopped is not None:
        return found_passing(rows, [stopped], all_ns)
    if share >= limits["share"] and (chance < limits["chance"] or worst["lead_steps"] == window["steps"]):
        return Decision(
            "inconclusive",
            f"rank {worst['rank']} is the latest in {worst['lead_steps']} of {window['steps']} {window['unit']}, which are too few to "
            "tell it from chance",
        )
    if undecided := unsure(window, limits["healthy"], "the ranks"):
        return undecided
    round_about = 1 - window["no_skew_ns"] / window["replayed_ns"] if window["replayed_ns"] else 0.0
    even = share < limits["share"] * len(rows)
    if round_about >= limits["rotating"] and even and window["steps"] >= limits["steps"]:
        found = not_one(rows, round_about, chance, limits)
        return Decision("found", f"no one rank is to blame: {found.title}", (found,))
    if share < limits["share"]:
        return Decision("clear", f"no rank's lateness costs {limits['share']:.0%} of the steps' time")
    return Decision(
        "clear",
        f"lateness goes round: rank {worst['rank']} is the latest in {worst['lead_steps']} of {window['steps']} {window['unit']}, which "
        f"could be chance (p = {chance:.2g})",
    )


def by_chance(rows: Sequence[Row], late: Row) -> float:
    """How likely one of so many alike ranks leads in as many steps, of those in which any does, as the late one.

    It is the worst of all, so each rank's binomial tail counts (Bonferroni; the counts crowd each other out, so at 0.05 that
    is at most 1.03 times the exact value). Mid-p (Lancaster 1961), since few steps have few p-values: without it a nominal
    5 % is 3.
    """
    led = sum(r["lead_steps"] for r in rows)
    more, equal = (f(late["lead_steps"], led, 1 / len(rows)) for f in (stats.binom.sf, stats.binom.pmf))
    return float(min(1.0, len(rows) * (more + equal / 2)))


def is_few(late: Row) -> bool:
    return bool(late["outlier_steps"] <= late["steps"] / 2)


def passes(late: Row, limits: Mapping[str, float]) -> bool:
    """Whether a rank's lateness is that of few steps: without them it would not be worth acting on."""
    return bool(late["own_ns"] - late["outlier_ns"] < limits["share"] * late["step_ns"])


def dominates(late: Row, rows: Sequence[Row]) -> bool:
    """Whether a rank's late steps cost twice those of any other: else lateness goes round."""
    others = max((r["outlier_ns"] or 0 for r in rows if r["rank"] != late["rank"]), default=0)
    return bool(late["outlier_ns"] >= 2 * others)


def standing_still(rows: Sequence[Row], limits: Mapping[str, float]) -> Row | None:
    """The rank that loses much in few steps, each time somewhere else, if that is no chance: its process was stopped."""
    late = max(rows, key=lambda r: r["lost_ns"] or 0)
    lost = sum(r["lost_steps"] for r in rows)
    chance = len(rows) * float(stats.binom.sf(late["lost_steps"] - 1, lost, 1 / len(rows)))
    if late["lost_steps"] < 2 or chance >= limits["chance"] or late["lost_steps"] > late["steps"] / 2:
        return None
    return {
        **late,
        "outlier_steps": late["lost_steps"],
        "steps_out": late["steps_lost"],
        "outlier_ns": late["lost_ns"],
        "outlier_work_ns": late["lost_work_ns"],
        "outlier_others_ns": late["lost_others_ns"],
        "outlier_phase": None,
        "outlier_layer": None,
    }


def found_passing(rows: Sequence[Row], transient: Sequence[Row], all_ns: int) -> Decision:
    reason = ", ".join(
        f"rank {r['rank']} late in {r['outlier_steps']} of {r['steps']} {r['unit']}" for r in transient
    )
    return Decision("found", reason, tuple(passing(rows, r, tail_of(r, all_ns)) for r in transient))


def nothing_to_compare(window: Row) -> tuple[Any, str]:
    if window["missing"]:
        return (
            "inconclusive",
            f"profiles of {window['present']} of {window['world_size']} ranks: the one that is waited for may be among the others",
        )
    if window["present"] < 2:
        if window["world_size"] == 1:
            return "clear", "one rank: nobody to wait for"
        return "no-data", RULE.missing
    if not window["collectives"]:
        return "no-data", RULE.missing
    return "inconclusive", "no collective is known on all its ranks: nothing to compare"


def slowdown(rank: Row, work_ns: Sequence[int]) -> float | None:
    """A rank's own work between collectives, against the median of the others' (`work_ns`)."""
    return rank["work_ns"] / median(work_ns) if work_ns and rank["work_ns"] else None


def ordinary(work_ns: Sequence[int], limits: Mapping[str, float]) -> float:
    """By how much a rank may be slower than the others, whose work `work_ns` is, and still be one of them."""
    if len(work_ns) < MANY_OTHERS:
        return limits["slower"]
    middle = median(work_ns)
    spread = median(abs(work - middle) for work in work_ns) / middle
    return float(min(limits["slower"], 1 + max(limits["share"], 5 * spread)))


def persistent(
    rows: Sequence[Row],
    late: Row,
    share: float,
    chance: float,
    tail: Part | None,
    limits: Mapping[str, float],
) -> Finding:
    others_ns = [r["work_ns"] for r in rows if r["rank"] != late["rank"] and r["work_ns"]]
    slower, usual = slowdown(late, others_ns), ordinary(others_ns, limits)
    stands_out = slower is not None and slower >= usual
    cause, why = cause_of(late)
    severity: Severity = "low"
    if stands_out and cause != "load":
        severity = severity_by(share, tail)
    evidence = [
        Evidence(
            f"the latest, by its own work, in {late['lead_steps']} of {late['steps']} {late['unit']} (by chance 1 in {len(rows)}; p = {chance:.2g}), last in "
            f"{late['last_rounds'] / late['rounds']:.0%} of {late['rounds']} collectives",
            {
                "lead_steps": late["lead_steps"],
                "steps": late["steps"],
                "p": chance,
                "last_rounds": late["last_rounds"],
                "rounds": late["rounds"],
            },
        ),
        *common_evidence(rows, late, share),
        *over_time(late),
    ]
    counter = why if cause == "load" else []
    evidence += [] if cause == "load" else why
    if slower is not None and not stands_out:
        text = f"its own work takes {slower:.2f} x the others': an ordinary difference between {len(rows)} ranks (below {usual:.2f})"
        counter.append(Evidence(text, {"slowdown": slower, "ordinary": usual}))
    elif slower is not None:
        evidence.insert(
            1,
            Evidence(
                f"its own work between collectives takes {slower:.2f} x the others'", {"slowdown": slower}
            ),
        )
    return finding(late, "persistent", where(late["phases"]), severity, tail, evidence, counter, cause, share)


def not_one(rows: Sequence[Row], share: float, chance: float, limits: Mapping[str, float]) -> Finding:
    """Steps are as slow as their slowest part, but without any one rank's lateness they would take about as long: another is
    as late. Either some ranks are late together, which a host or a switch may have in common, or it is each one's turn."""
    window = rows[0]
    work = {r["rank"]: r["work_ns"] for r in rows if r["work_ns"]}
    # The faster half says what is usual: if two of four are slow, the median of all is half-way.
    faster = sorted(work.values())[: (len(work) + 1) // 2] or [1]
    usual = median(faster)
    slower = sorted(rank for rank, ns in work.items() if ns >= ordinary(faster, limits) * usual)
    together = 1 < len(slower) <= len(rows) / 2
    leads = ", ".join(
        f"rank {r['rank']} in {r['lead_steps']}" for r in sorted(rows, key=lambda r: -r["lead_steps"])[:8]
    )
    evidence = [
        Evidence(
            f"if all ranks took in each place what the others take, {window['steps']} {window['unit']} would take "
            f"{ms(window['no_skew_ns'])} instead of {ms(window['replayed_ns'])}",
            {"no_skew_ns": window["no_skew_ns"], "replayed_ns": window["replayed_ns"]},
        ),
        Evidence(
            f"the latest of {window['steps']} {window['unit']}: {leads}; that could be chance (p = {chance:.2g})",
            {"p": chance},
        ),
    ]
    if together:
        who, pattern = ", ".join(map(str, slower)), "together"
        title = f"Ranks {who} come late together: without that {window['unit']} would take {share:.0%} less"
        ratio = min(work[rank] for rank in slower) / usual
        text = f"their own work takes {ratio:.2f} x the usual rank's and more; without one of them the others are as late"
        evidence.append(Evidence(text, {"slowdown": ratio}))
    elif max(r["lead_steps"] for r in rows) * len(rows) > 2 * sum(r["lead_steps"] for r in rows):
        # One leads more often than in turn, yet without it another is as late.
        who, pattern = "any", "together"
        title = f"Several ranks are late at once: without that {window['unit']} would take {share:.0%} less"
    else:
        who, pattern = "any", "rotating"
        title = f"Each step waits for another rank: without that {window['unit']} would take {share:.0%} less (rotating)"
    return Finding(
        rule=RULE.name,
        status="found",
        severity="low",
        basis="measured",
        title=title,
        culprit=Party("rank", who, {"world": window["world"], "pattern": pattern}),
        victims=(),
        share_of_tail=None,
        window_ns=(window["first_ns"], window["last_ns"]),
        evidence=tuple(evidence),
        remedies=RULE.remedies[:2],
        confirm_by=RULE.confirm_by,
    )


def passing(rows: Sequence[Row], late: Row, tail: Part | None) -> Finding:
    share = late["outlier_ns"] / late["step_ns"]
    steps = ", ".join(str(step) for step in late["steps_out"][:8])
    work, others = late["outlier_work_ns"] / 1e6, late["outlier_others_ns"] / 1e6
    evidence = [
        Evidence(
            f"late in {late['outlier_steps']} of {late['steps']} {late['unit']} ({steps}, counted from 0), {'each time in the same place' if late['outlier_phase'] else 'wherever it was'}: there its "
            f"work takes {work / late['outlier_steps']:.3g} ms, the others' {others / late['outlier_steps']:.3g} ms",
            {
                "steps": list(late["steps_out"]),
                "work_ns": late["outlier_work_ns"],
                "others_ns": late["outlier_others_ns"],
            },
        ),
        *common_evidence(rows, late, late["own_ns"] / late["step_ns"]),
    ]
    severity = severity_by(share, tail)
    place = place_of(
        late["outlier_phase"], [late["outlier_layer"]] if late["outlier_layer"] is not None else []
    )
    cause, why = cause_of(late)
    return finding(late, "transient", place, severity, tail, [*evidence, *why], [], cause, share)


def finding(
    late: Row,
    pattern: str,
    place: str,
    severity: Severity,
    tail: Part | None,
    evidence: list[Evidence],
    counter: list[Evidence],
    cause: str,
    share: float,
) -> Finding:
    waiting = late["waits"] or []
    counter += unprofiled(late)
    if late["unmatched"]:
        data = {"unmatched": late["unmatched"], "collectives": late["collectives"]}
        counter.append(Evidence(alone(late), data))
    victims = [
        Party(
            "rank",
            str(r["rank"]),
            {"wait_s": round(r["wait_ns"] / 1e9, 6), "waits_in": r["waits_in"]},
        )
        for r in waiting[:8]
    ]
    if tail:
        victims.append(tail.victim)
        evidence.append(tail.evidence("waiting for it"))
    return Finding(
        rule=RULE.name,
        status="found",
        severity=severity,
        basis="measured",
        title=f"Rank {late['rank']} comes late from {place}, and {others(waiting)} for it ({pattern})",
        culprit=Party(
            "rank",
            str(late["rank"]),
            {"world": late["world"], "pattern": pattern, "where": place, "cause": cause},
        ),
        victims=tuple(victims),
        share_of_tail=tail.share if tail else None,
        window_ns=(late["first_ns"], late["last_ns"]),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=remedies(cause, severity, late["phases"]),
        confirm_by=RULE.confirm_by,
        claims=WAITING,
        explains=tail.explains if tail else {},
        standing=share,
    )


def remedies(cause: str, severity: Severity, phases: Sequence[Row] | None) -> tuple[Remedy, ...]:
    """Those that fit: balancing only where a rank had more to do, nothing invasive for what is low."""
    look, bind, balance, spread, replace = RULE.remedies
    of_experts = not phases or phases[0]["phase"] == "expert"
    fitting = {
        "load": (balance if of_experts else spread,),
        "host": (bind, look),
        "compute and load": (look, bind, balance, replace),
    }.get(cause, (look, bind, replace))
    return fitting if severity != "low" else fitting[:2]


def tail_of(late: Row, all_ns: int) -> Part | None:
    """What of a class's tail is waiting for this rank: of the wait that all late ranks caused its part."""
    return part_of(late, late["own_ns"] / all_ns) if all_ns else None


RULE = Rule(
    name="straggler-rank",
    summary="One rank comes late to the collectives, and the others wait for it.",
    why=(
        "A collective ends when its last rank has come, so the slowest rank sets the pace of every step, while the others "
        "show up as slow in communication. Averages over ranks hide it, and clocks that differ by half a millisecond turn it round."
    ),
    needs=("profiles",),
    missing="needs torch profiler traces of at least two ranks of one world at one time",
    thresholds=(
        Threshold(
            "errors", 3, "x", "Below three times the clocks' error nothing is known of who came first."
        ),
        MATCHED,
        HEALTHY,
        Threshold(
            "agreement",
            0.5,
            "0-1",
            "The late rank has the shortest stay: where less of the wait agrees, clocks are off.",
        ),
        Threshold("chance", 0.01, "p", "A rank leads in so many steps by chance once in a hundred windows."),
        Threshold("steps", 5, "", "Fewer steps than five cannot reach that among two or three ranks."),
        SHARE,
        Threshold(
            "slower",
            1.5,
            "x",
            "Ranks of one healthy host were seen to differ by 1.24; two ranks do not show what is ordinary.",
        ),
        Threshold(
            "rotating",
            0.15,
            "0-1",
            "Of four healthy ranks whose work varies by a twentieth the last costs as much of the time; more is skew.",
        ),
        Threshold("rare", 0.01, "0-1", "What happens in fewer than one in a hundred steps moves no p99."),
        Threshold(
            "outlier",
            0.25,
            "x step",
            "A quarter of a usual step, lost in one place, is more than scheduling noise.",
        ),
    ),
    remedies=(
        Remedy(
            "Look at the rank's device and host: clocks, throttling, ECC errors, what else runs on its cores",
            "nvidia-smi -q -d PERFORMANCE,CLOCK,ECC; top on its host",
            "any",
            "none",
        ),
        Remedy(
            "Bind each worker to cores and memory of its own",
            "numactl --cpunodebind, VLLM_CPU_OMP_THREADS_BIND on CPU",
            "vLLM, all versions",
            "a restart",
        ),
        Remedy(
            "Where its experts get more tokens than others: balance them",
            "--enable-eplb --eplb-config '{\"num_redundant_experts\": 32}'",
            "vLLM with expert parallelism",
            "memory for the copies, and a pause each time they move",
        ),
        Remedy(
            "Where its engine gets more to prefill than others: spread prompts over the engines by their tokens",
            "a router that knows the DP ranks' load, or --data-parallel-hybrid-lb / --data-parallel-external-lb with one",
            "vLLM V1",
            "a router to configure",
        ),
        Remedy(
            "Take the device or host out and start the rank elsewhere",
            "CUDA_VISIBLE_DEVICES, the scheduler's drain",
            "any",
            "a restart, a spare device",
        ),
    ),
    confirm_by=(
        "Profile again with the late rank's device swapped with another's: lateness that moves with the device is hardware, "
        "lateness that stays is load or placement",
        "Watch the steps' time after the change: it should fall by what its lateness cost them",
    ),
    decide=decide,
    dashboard="ranks",
    alerts=(
        Alert(
            "Straggler",
            "warning",
            "5m",
            "Others wait for rank {{ $labels.rank }} of {{ $labels.server }} for {{ $value | humanizePercentage }} of the time of steps",
            (
                Signal(
                    "max by (server, rank) (tailscope_straggler_ratio)",
                    ">= $share",
                    _alerts.is_found("straggler-rank"),
                ),
            ),
            panel=Panel(
                "ranks",
                "Time that others wait for a rank",
                "percentunit",
                "{{server}} rank {{rank}}",
                "Share of the steps' time that the other ranks stand still until this one arrives: one rank above the rest is the straggler.",
            ),
        ),
    ),
)
