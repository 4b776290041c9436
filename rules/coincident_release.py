"""Requests that came one after the other get on at one moment: they waited for one thing, and a queue would have staggered them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from tailscope.model import (
    HIGH_SHARE,
    Decision,
    Evidence,
    Finding,
    Party,
    Remedy,
    Rows,
    Rule,
    Threshold,
    severity_of,
)
from tailscope.units import ms

from . import _pauses, _tails
from ._tails import BEYOND_BATCH, Row

UPSTREAM = "arrival"


def decide(rows: Rows, limits: Mapping[str, float]) -> Decision:
    if not rows or not rows[0]["requests"]:
        return Decision("no-data", RULE.missing)
    groups = [row for row in rows if row["kind"] is not None and by_chance(row) <= limits["chance"]]
    if not groups:
        return Decision("clear", "no requests that came apart were let go together")
    by_tail = by_ordinary_steps(groups, limits)
    known = [row for row in groups if (row["kind"] == UPSTREAM or is_unowned(row)) and row not in by_tail]
    untold = [row for row in groups if row not in known and row["kind"] != UPSTREAM and is_untold(row)]
    findings = [
        finding
        for told in (known, by_tail, untold)
        for _, members in groupby(told, key=lambda r: (r["kind"], r["instance"], r["engine_key"]))
        if (finding := judged(list(members), limits, told is by_tail)) is not None
    ]
    if any(f.status == "found" for f in findings):
        n = sum(row["n"] for row in known)
        return Decision(
            "found",
            f"{n} requests were let go together in {_tails.counted(len(known), 'group')}",
            tuple(findings),
        )
    if findings:
        return Decision(
            "inconclusive", "requests were let go together, but nothing says by what", tuple(findings)
        )
    owners = sorted(
        {row["owner"] for row in groups if row["owner"] and row not in known and row not in by_tail}
    )
    if not known and not by_tail and owners:
        return Decision(
            "clear",
            f"{_tails.counted(len(groups), 'group')} let go together, by what other rules judge: {', '.join(owners)}",
        )
    return Decision(
        "clear", f"{_tails.counted(len(groups), 'group')} let go together, which is no real part of a tail"
    )


def by_chance(row: Row) -> float:
    """How likely n requests lie as close together as they were let go, were they as far apart as they came: the range of n
    uniform points (Naus 1965, the scan statistic for all points in one window), for all idle times that were tried."""
    if not row["arrivals_ns"]:
        return 1.0
    w, n = (row["release_ns"] + 1e6) / row["arrivals_ns"], row["n"]
    if w >= 1:
        return 1.0
    return float(min(1.0, row["tried"] * (n * w ** (n - 1) - (n - 1) * w**n)))


def is_unowned(row: Row) -> bool:
    """Whether most of what they waited has no owner: neither others' prefill nor the cache, slots or ranks."""
    return bool(row["has_steps"] and row["booked_s"] and row["unowned_s"] >= row["booked_s"] / 2)


def is_untold(row: Row) -> bool:
    """Whether no steps say what they waited for."""
    return bool(row["booked_s"] and not row["has_steps"])


def by_ordinary_steps(groups: Sequence[Row], limits: Mapping[str, float]) -> list[Row]:
    """Those let go by the end of a step that nothing stands beside, and that is not apart from the tail of all steps of its
    engine: where steps have a long tail, its largest let go whoever came meanwhile."""
    found, apart = [], dict[int, set[int] | None]()
    for row in groups:
        if row["lane"] is None or row["reason"] or not is_unowned(row):
            continue
        if row["lane"] not in apart:
            named = {top["round"] for top in row["tops"] or () if top["reason"]}
            chance = limits["alone"] / row["lanes"]
            rounds, test = _pauses.those_apart(row["tops"], named, 1 + limits["times"], chance)
            apart[row["lane"]] = None if test is None else rounds
        rounds_apart = apart[row["lane"]]
        if rounds_apart is not None and row["round"] not in rounds_apart:
            found.append(row)
    return found


def judged(groups: Sequence[Row], limits: Mapping[str, float], by_tail: bool) -> Finding | None:
    """A finding for the groups of one place, where they are felt."""
    if groups[0]["kind"] == UPSTREAM:
        hurt = client_tails(groups)
    else:
        hurt = _tails.tails((row["hurt"] for row in groups), groups[0]["classes"])
    hurt = _tails.felt(hurt, limits["share"], limits["slowdown"])
    # Without steps no bill says what a wait was for, and so none of an excess is this.
    is_told = groups[0]["kind"] == UPSTREAM or is_unowned(groups[0])
    if is_told and not hurt:
        return None
    return finding(groups, hurt, is_told and not by_tail)


def client_tails(groups: Sequence[Row]) -> list[_tails.Tail]:
    """What holding requests back before the engine cost the clients' own tail: no class of the engine's has it."""
    sums: dict[str, tuple[float, Row]] = {}
    for part in (part for row in groups for part in row["client_hurt"] or ()):
        seconds = sums.get(part["klass"], (0.0, part))[0] + part["seconds"]
        sums[part["klass"]] = seconds, part
    found = []
    for klass, (seconds, part) in sums.items():
        if part["excess_s"] > 0:
            mean = part["tail_n"]
            found.append(
                _tails.Tail(
                    klass, "client TTFT", seconds / mean, part["excess_s"] / mean, False, part["p50_s"]
                )
            )
    return sorted(found, key=lambda tail: -tail.share)


def finding(groups: Sequence[Row], hurt: Sequence[_tails.Tail], is_known: bool) -> Finding:
    first = groups[0]
    is_upstream = first["kind"] == UPSTREAM
    worst = sorted(groups, key=lambda row: -row["n"])
    n = sum(row["n"] for row in groups)
    what = "reached the engine" if is_upstream else "had their first token"
    evidence = [
        Evidence(
            f"at {_pauses.clock(row['head_ns'])} {row['n']} requests that {'were sent' if is_upstream else 'came'} over {row['arrivals_ns'] / 1e9:.3g} s {what} "
            f"within {max(row['release_ns'] / 1e6, 0.001):.3g} ms of each other, after {row['idle_ns'] / 1e9:.3g} s in which none did: "
            f"p = {by_chance(row):.1g}",
            {k: row[k] for k in ("head_ns", "n", "arrivals_ns", "release_ns", "idle_ns", "tried", "waited_s")}
            | {"p_value": by_chance(row)},
        )
        for row in worst[:3]
    ]
    if len(groups) > 1:
        evidence.append(
            Evidence(f"{len(groups)} such groups, {n} requests", {"groups": len(groups), "requests": n})
        )
    steps = [row for row in worst if row["beyond_s"]]
    if steps:
        row = steps[0]
        evidence.append(
            Evidence(
                f"meanwhile a step from {_pauses.clock(row['step_ns'])} took {row['beyond_s']:.3g} s longer than its batch accounts for"
                + (f"; beside it in the log: {row['reason']}" if row["reason"] else ""),
                {k: row[k] for k in ("step_ns", "beyond_s", "reason")},
            )
        )
    elif is_known and not is_upstream:
        evidence.append(
            Evidence(
                f"{sum(r['unowned_s'] for r in groups) / sum(r['booked_s'] for r in groups):.0%} of their time to the first token is neither others' prefill "
                "nor cache, slots or ranks",
                {
                    "unowned_s": sum(r["unowned_s"] for r in groups),
                    "booked_s": sum(r["booked_s"] for r in groups),
                },
            )
        )
    if hurt:
        evidence.append(Evidence(_tails.sentence(hurt, "their wait")))
    counter = []
    if is_upstream:
        counter.append(
            Evidence(
                f"the clients' clock is known to {ms(first['error_ns'])}: what they sent within that may have come together",
                {"error_ns": first["error_ns"]},
            )
        )
    elif not is_known and steps:
        counter.append(
            Evidence(
                "steps of this engine have a long tail of their own: by how far apart the longest lie, this one may be of it"
            )
        )
    elif not is_known:
        longest, usual = max(row["longest_prompt"] or 0 for row in groups), first["usual_prompt"] or 0
        text = "no steps say what they waited for: a long prefill lets go all who wait for its step too"
        if longest >= 4 * usual > 0:
            text += f", and a prompt of {longest:,} tokens ({longest / usual:.0f}x the usual) is among them"
        counter.append(Evidence(text, {"longest_prompt": longest, "usual_prompt": usual}))
    else:
        counter.append(
            Evidence(
                "a step's end lets go all who are in it; here the step's own batch does not account for its length"
            )
            if steps
            else Evidence("no long step is seen meanwhile: what held them is outside of the engine's steps")
        )
    share = hurt[0].share if hurt else None
    return Finding(
        rule=RULE.name,
        status="found" if is_known else "inconclusive",
        severity=severity_of(share, any(tail.slo_broken for tail in hurt)) if is_known else "low",
        basis="inferred",
        title=f"{n} requests that came one after the other {what} together"
        + (
            ": something before the engine held them"
            if is_upstream
            else ": they waited for one thing"
            if is_known
            else ""
        ),
        culprit=culprit(groups, steps),
        victims=_tails.victims(hurt)
        or tuple(Party("class", name) for name in sorted({k for row in groups for k in row["klasses"]})),
        share_of_tail=share if is_known else None,
        window_ns=(
            min(row["first_begun_ns"] for row in groups),
            max(row["head_ns"] + row["release_ns"] for row in groups),
        ),
        evidence=tuple(evidence),
        counter_evidence=tuple(counter),
        remedies=remedies_for(groups, steps) if is_known else (),
        confirm_by=RULE.confirm_by,
        explains={} if is_upstream or not is_known else _tails.explains(hurt),
        claims=BEYOND_BATCH,
    )


def culprit(groups: Sequence[Row], steps: Sequence[Row]) -> Party:
    """Who held them: what stood beside the step, else the engine; the API server where they had not reached the engine."""
    first = groups[0]
    engine = None if first["engine_key"] < 0 else first["engine_key"]
    where = {"instance": first["instance"], "engine": engine}
    if first["kind"] == UPSTREAM:
        return Party("process", "gateway", {"instance": first["instance"]})
    known = _pauses.who_pauses(row["reason"] for row in steps if row["reason"])
    if known:
        return Party("process", " and ".join(sorted(known)), where)
    if (
        sum(row["frontend_s"] or 0 for row in groups)
        >= HIGH_SHARE * sum(row["booked_s"] or 0 for row in groups)
        and not steps
    ):
        return Party("process", "API server", where)
    return Party("engine", _tails.engine_name({**first, "engine": engine}), where)


def remedies_for(groups: Sequence[Row], steps: Sequence[Row]) -> tuple[Remedy, ...]:
    if groups[0]["kind"] == UPSTREAM:
        return GATEWAY
    return (
        _pauses.remedies_for(_pauses.who_pauses(row["reason"] for row in steps if row["reason"]))
        or RULE.remedies
    )


GATEWAY = (
    Remedy(
        "See what the gateway held at that time: a lock, a batch to fill, a health check that failed, a reload of its configuration",
        "gateway and router log about the time; queue metrics such as inference_extension_flow_control_queue_size",
        "any; that metric of llm-d's router",
        "Your time",
    ),
    Remedy(
        "Send on what has come instead of waiting for a batch to fill or a timer to end",
        "the gateway's batching and buffering settings, off for streamed requests",
        "any",
        "More, smaller sends",
    ),
)
RULE = Rule(
    name="coincident-release",
    summary="Requests that came apart got on together: all waited for one thing.",
    why=(
        "A queue lets requests go one after the other, as it serves them. Where many that came over seconds get on within "
        "milliseconds, they waited for one thing: the end of a pause, a lock, a cold start, a gateway that held them."
    ),
    needs=("joined",),
    missing="needs requests with their arrival and TTFT",
    thresholds=(
        Threshold("idle", 0.5, "s", "Shorter gaps between first tokens come by themselves, and release few."),
        Threshold("together", 0.1, "of the idle time", "Ten times closer together than the gap before."),
        Threshold("least", 4, "requests", "Two or three come together by chance."),
        Threshold("most", 500, "groups", "The largest are those that anybody felt."),
        _pauses.TIMES,
        _pauses.ALONE,
        Threshold(
            "chance",
            0.001,
            "",
            "Against requests let go as far apart as they came, for all gaps that were tried.",
        ),
        Threshold(
            "share", 0.3, "0-1", "A few are let go together now and then, which is not why the tail is long."
        ),
        _tails.SLOWDOWN,
    ),
    remedies=(
        Remedy(
            "See what held the engine core or the API server: its log, the node's, and other processes at that time",
            "server log about the time; py-spy dump --pid at the next time; VLLM_GC_DEBUG=1 for garbage collection",
            "any; the variable in vLLM V1, since about 0.11",
            "Your time",
        ),
        Remedy(
            "Where requests stand still in the API server, give it more processes",
            "--api-server-count 4",
            "vLLM V1, since 0.9",
            "A process each; the console's statistics are off",
        ),
        Remedy(
            "Let the router send new requests elsewhere while an engine gives no tokens",
            "router health check on vllm:generation_tokens_total standing still while vllm:num_requests_running > 0",
            "any router",
            "Some seconds of capacity at a false alarm",
        ),
    ),
    confirm_by=(
        "Plot arrival against first token: a horizontal line of points is a release, a slanted one is a queue",
        "Sample stacks (py-spy dump) while first tokens stand still: engine core, API server and gateway in turn",
    ),
    decide=decide,
)
