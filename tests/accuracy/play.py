"""Plays one world: simulates it with and without each cause, diagnoses it, and holds the two against each other."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from catalogue import FAMILIES
from numpy.typing import NDArray

from tailscope.config import Attributes, Config
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.model import Diagnosis
from tailscope.sim.emit.files import write_files
from tailscope.sim.emit.kineto import write_profiles
from tailscope.sim.engine import simulate
from tailscope.sim.outcome import Outcome
from tailscope.sim.scenario import Cause, Load, Scenario
from tailscope.sim.scenario_file import without
from tailscope.sim.truth import Bills, bills
from tailscope.sim.written import MIN_ANSWERS, costs, tables, write_trace
from tailscope.source import Options
from tailscope.store import Trace

#: Components that are told apart; what the ledger calls otherwise is the last.
GROUPS = {
    "others' prefill": (
        "others_prefill_before",
        "others_prefill_in_prefill",
        "others_prefill_in_decode",
        "queue_budget",
    ),
    "KV cache": ("queue_kv", "preempted", "recompute"),
    "slots": ("queue_slots",),
    "KV hand-off": ("kv_handoff",),
    "ranks": ("straggler_wait", "slow_transfer"),
    "pause or unexplained": ("pause", "unexplained"),
    "own work": ("own_prefill", "decode", "step_wait", "host_gap", "prefill_phase", "decode_phase"),
    "left out": ("starved",),
    "front end": ("frontend", "queue"),
}
GROUP_OF = {component: group for group, components in GROUPS.items() for component in components}
#: Spans tell tenants and priorities by attributes that a configuration names.
CONFIG = Config(attributes=Attributes(tenant="sim.tenant", priority="sim.priority"))
#: An excess below this share of the median is no tail whose parts anybody would ask for.
NOTABLE = 0.25
#: load -> metric -> seconds.
ByMetric = dict[str, dict[str, float]]


@dataclass
class Played:
    """One world's result. `cost`: the largest share by which a cause raises a class's p99, by rule, `suspects` the same of what
    only looks like one. `cost_p95`: by how much a p95, which is the tail of a class with too few requests for a p99; `tail_cost`:
    the mean of what lies above the p99."""

    family: str
    kind: str
    strength: float
    seed: int
    via: str
    labels: dict[str, str | None] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    cost_p95: dict[str, float] = field(default_factory=dict)
    tail_cost: dict[str, float] = field(default_factory=dict)
    suspects: dict[str, float] = field(default_factory=dict)
    verdict: str = ""
    findings: list[dict[str, Any]] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=dict)
    bill_errors: list[dict[str, Any]] = field(default_factory=list)
    blame: list[dict[str, Any]] = field(default_factory=list)
    #: A rank is slow and was profiled for a part of the time only: what it cost at other times nothing tells.
    part_profiled: bool = False
    seconds: float = 0.0


def play(family_name: str, strength: float, seed: int, via: str) -> dict[str, Any]:
    """Play a world, `via` tables, files or tables with a schedule, as a dictionary of Played."""
    began = time.perf_counter()
    family = next(f for f in FAMILIES if f.name == family_name)
    scenario = family.world(strength, seed)
    if via == "schedule":
        scenario = replace(scenario, telemetry=replace(scenario.telemetry, schedule=True))
    if via == "files" and scenario.telemetry.gateway:
        # No emitter writes a gateway's own view: without their clients' nothing would tell that requests waited there.
        scenario = replace(scenario, telemetry=replace(scenario.telemetry, client=True))
    result = _played(scenario, family.suspects, Played(family.name, family.kind, strength, seed, via))
    result.seconds = time.perf_counter() - began
    return asdict(result)


def _played(
    scenario: Scenario, suspects: Mapping[str, Callable[[Scenario], Scenario]], result: Played
) -> Played:
    outcome = simulate(scenario)
    slow = any(fault.kind == "slow-rank" for fault in scenario.faults)
    result.part_profiled = (
        slow and sum(seconds for _, seconds in scenario.telemetry.profile) < scenario.duration_s
    )
    played = {repr(cause.without): cause for cause in scenario.causes}
    worlds = {left_out: simulate(without(scenario, cause)) for left_out, cause in played.items()}
    others = {cause.rule: worlds[repr(cause.without)] for cause in scenario.causes}
    for cause in scenario.causes:
        result.labels[cause.rule] = _culprit(cause, outcome)
        result.cost[cause.rule] = _cost(outcome, others[cause.rule])
        result.cost_p95[cause.rule] = _cost(outcome, others[cause.rule], quantile=0.95)
        result.tail_cost[cause.rule] = _tail_cost(outcome, others[cause.rule])
    result.suspects = {
        rule: _cost(outcome, simulate(innocent(scenario)), scenario.loads[:1])
        for rule, innocent in suspects.items()
    }
    folder = Path(tempfile.mkdtemp(prefix="tailscope-accuracy-"))
    try:
        with Trace(str(_trace(outcome, folder, result.via)), threads=1) as trace:
            diagnosis = diagnose(trace, CONFIG)
            _note(result, diagnosis)
            members = _members(trace, outcome)
            result.bill_errors = _bill_errors(trace, diagnosis, members, bills(outcome))
            for cause in scenario.causes:
                result.blame += _blame(diagnosis, members, outcome, others[cause.rule], cause)
    finally:
        shutil.rmtree(folder)
    return result


def _trace(outcome: Outcome, folder: Path, via: str) -> Path:
    place = folder / "trace.parquet"
    if via != "files":
        write_trace(tables(outcome), place)
        return place
    raw = folder / "raw"
    raw.mkdir()
    write_files(outcome, raw)
    write_profiles(outcome, raw)
    ingest([raw], place, config=CONFIG, options=Options(attributes=CONFIG.attributes))
    return place


def _culprit(cause: Cause, outcome: Outcome) -> str | None:
    """A label's culprit; "class:long" stands for every class of prompts that the left-out loads have."""
    if cause.culprit != "class:long":
        return cause.culprit
    names = cause.without["loads"]
    loads = [i for i, load in enumerate(outcome.scenario.loads) if load.name in names]
    prompts = outcome.requests.prompt[np.isin(outcome.requests.load, loads)]
    edges, classes = np.array([512, 2_048, 8_192, 32_768]), np.array(["<512", "<2k", "<8k", "<32k", "≥32k"])
    return "class:" + "|".join(dict.fromkeys(classes[np.searchsorted(edges, np.sort(prompts), side="right")]))


def _cost(
    outcome: Outcome, other: Outcome, loads: Sequence[Load] | None = None, quantile: float = 0.99
) -> float:
    """By what share a p99 is higher than in another world, at most; of `loads` if given, else of all that both have."""
    names = {load.name for load in loads or outcome.scenario.loads}

    def of(values: NDArray[np.float64]) -> float:
        return float(np.quantile(values, quantile))

    seen = list(costs(outcome, other, quantile).items())
    seen += _beside(client_tails(outcome, of), client_tails(other, of))
    shares = [
        p99["with"] / p99["without"] - 1
        for load, metrics in seen
        for p99 in metrics.values()
        if load in names and p99["without"] > 0
    ]
    return max(shares, default=0.0)


def _tail_cost(outcome: Outcome, other: Outcome) -> float:
    """By what share the mean of the slowest hundredth is higher than in another world, at most: what hits fewer than one request
    in a hundred raises no p99, and is most of what lies above it."""
    seen = _beside(client_tails(outcome, _mean_above), client_tails(other, _mean_above))
    shares = [
        m["with"] / m["without"] - 1 for _, metrics in seen for m in metrics.values() if m["without"] > 0
    ]
    return max(shares, default=0.0)


def _mean_above(values: NDArray[np.float64]) -> float:
    return float(values[values >= np.quantile(values, 0.99)].mean())


def _beside(here: ByMetric, there: ByMetric) -> list[tuple[str, dict[str, dict[str, float]]]]:
    """(load, metric -> with and without) of loads that two worlds have."""
    return [
        (load, {m: {"with": here[load][m], "without": there[load][m]} for m in here[load]})
        for load in here.keys() & there.keys()
    ]


def client_tails(outcome: Outcome, of: Callable[[NDArray[np.float64]], float]) -> ByMetric:
    """load -> metric -> a quantile, or what else `of` makes of the latencies of answered requests, as their clients had them."""
    q, found = outcome.requests, {}
    network = outcome.scenario.telemetry.network_s
    for index, load in enumerate(outcome.scenario.loads):
        mine = (q.load == index) & np.isfinite(q.finished_s)
        if mine.sum() >= MIN_ANSWERS:
            ttft, e2e = (
                shown[mine] + network - q.sent_s[mine] for shown in (q.first_shown_s, q.last_shown_s)
            )
            found[load.name] = {"TTFT": of(ttft), "E2E": of(e2e)}
    return found


def _note(result: Played, diagnosis: Diagnosis) -> None:
    result.verdict = diagnosis.verdict.status
    result.checks = {check.rule: check.status for check in diagnosis.checks}
    result.findings = [
        {
            "rule": f.rule,
            "status": f.status,
            "severity": f.severity,
            "culprit": f"{f.culprit.kind}:{f.culprit.id}",
            "share": f.share_of_tail,
        }
        for f in diagnosis.findings
    ]


# -- bills -------------------------------------------------------------------------------------

#: (class, metric) -> requests of the outcome, their weights before the first token and in decode.
Members = dict[tuple[str, str], tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]]


def _members(trace: Trace, outcome: Outcome) -> Members:
    """Whom the diagnosis compares in each class and metric, as requests of the outcome."""
    rows = trace.connection.execute(
        "SELECT m.klass, m.metric, j.request_id, m.before_weight, m.decode_weight FROM members m JOIN joined j ON j.rid = m.id "
        "WHERE m.metric <> 'ITL' ORDER BY ALL"
    ).fetchall()
    place = {_own(name): i for i, name in enumerate(outcome.requests.id)}
    found: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for klass, metric, request_id, before, decode in rows:
        found.setdefault((klass, metric), []).append((place[_own(request_id)], before, decode))
    return {
        key: (
            np.array([i for i, _, _ in members], np.int64),
            np.array([b for _, b, _ in members]),
            np.array([d for _, _, d in members]),
        )
        for key, members in found.items()
    }


def _own(request_id: str) -> str:
    """The id as its client chose it: load and number."""
    load, number = request_id.removeprefix("cmpl-").removesuffix("-0").rsplit("-", 1)
    return f"{load}-{number}"


def _bill_errors(trace: Trace, diagnosis: Diagnosis, members: Members, true: Bills) -> list[dict[str, Any]]:
    """For each notable excess and group of components: what the ledger says and what is true, as shares of it."""
    errors = []
    for row in diagnosis.classes:
        if (
            not row.excess_s
            or row.excess_s < NOTABLE * (row.p50_s or np.inf)
            or (row.klass, row.metric) not in members
            # The truth's bills begin at the API server.
            or row.observer != "engine"
        ):
            continue
        requests, before, decode = members[row.klass, row.metric]
        said = dict.fromkeys(GROUPS, 0.0)
        for component, seconds in row.excess.items():
            said[GROUP_OF[component]] += seconds
        truth = dict.fromkeys(GROUPS, 0.0)
        for (place, part, _), spent in true.lines.items():
            weights = decode if place == "decode" else before
            truth[GROUP_OF[part]] += float(weights @ spent[requests])
        errors.append(
            {
                "klass": row.klass,
                "metric": row.metric,
                "excess_s": row.excess_s,
                "said": {group: said[group] / row.excess_s for group in GROUPS},
                "true": {group: truth[group] / row.excess_s for group in GROUPS},
            }
        )
    return errors


def _blame(
    diagnosis: Diagnosis, members: Members, outcome: Outcome, other: Outcome, cause: Cause
) -> list[dict[str, Any]]:
    """What a finding says its culprit costs, against what the same requests take in the world without the cause."""
    there = {name: i for i, name in enumerate(other.requests.id)}
    said: dict[tuple[str, str], float] = {}
    for finding in diagnosis.findings:
        if finding.rule == cause.rule and finding.status == "found":
            for key, seconds in finding.explains.items():
                klass, _, metric = key.partition("\t")
                said[klass, metric] = said.get((klass, metric), 0.0) + seconds
    ttft, rest = _phases(outcome)
    ttft_without, rest_without = _phases(other)
    found = []
    for (klass, metric), seconds in said.items():
        row = next((r for r in diagnosis.classes if (r.klass, r.metric) == (klass, metric)), None)
        if row is None:
            continue  # of the client's view, which is not compared
        if (
            (klass, metric) not in members
            or not row.excess_s
            or row.excess_s < NOTABLE * (row.p50_s or np.inf)
        ):
            continue
        here, before, decode = members[klass, metric]
        place = np.array([there.get(outcome.requests.id[i], -1) for i in here])
        if (place < 0).any():
            continue  # some would not have been there
        true = before @ (ttft[here] - ttft_without[place]) + decode @ (rest[here] - rest_without[place])
        found.append(
            {
                "rule": cause.rule,
                "klass": klass,
                "metric": metric,
                "said": seconds / row.excess_s,
                "true": float(true) / row.excess_s,
            }
        )
    return found


def _phases(outcome: Outcome) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    q = outcome.requests
    return q.first_shown_s - q.arrival_s, q.last_shown_s - q.first_shown_s
