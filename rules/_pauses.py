"""What rules about an engine that stands still have in common: whether it does at a beat, who stops it, what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from tailscope import outliers, rhythm
from tailscope.model import Decision, Remedy, Rows, Threshold, summed_up
from tailscope.stats import Floats
from tailscope.units import clock as time_of_day

from . import _tails
from ._tails import Row

EPLB_NAME, PROFILER_NAME, JIT_NAME, SLEEP_NAME, UPDATE_NAME = (
    "EPLB",
    "the profiler",
    "JIT",
    "sleep mode",
    "a weight update",
)
TIMES = Threshold(
    "times", 2, "x the batch", "A step three times as long as its batch accounts for stood still."
)
ALONE = Threshold(
    "alone",
    0.003,
    "",
    "Against the largest of steps that have a long tail, for all engines.",
)
#: What may stand beside a pause -> who pauses.
KNOWN = {
    "eplb": EPLB_NAME,
    "rearrang": EPLB_NAME,
    "profil": PROFILER_NAME,
    "jit": JIT_NAME,
    "tun": JIT_NAME,
    "sleep": SLEEP_NAME,
    "weight update": UPDATE_NAME,
}


def by_lane(rows: Rows, judge: Callable[[Row, Sequence[Row]], Decision], missing: str) -> Decision:
    """What the long steps of each engine, or of those that step together, say: `judge` gets one's row and its long steps.
    A row without a step stands for none."""
    lanes = groupby(rows, key=lambda row: row["lane"])
    return summed_up([_of_lane(list(lane), judge) for _, lane in lanes], missing)


def _of_lane(rows: Sequence[Row], judge: Callable[[Row, Sequence[Row]], Decision]) -> Decision:
    lane = rows[0]
    if unknown := _tails.unknown_cost(lane):
        return unknown
    steps = [row for row in rows if row["round"] is not None]
    if not steps:
        return Decision("clear", f"none of {lane['steps']} steps takes much longer than its batch")
    return judge(lane, steps)


def those_apart(
    tops: Sequence[Row] | None, named: Collection[int], times: float, chance: float
) -> tuple[set[int], outliers.Outliers | None]:
    """The rounds of the steps of at least `times` what their batch takes that lie apart from the tail of all others of their
    engine, with the test of that; None where too few are known. `tops`: its longest steps; `named`: rounds beside which
    something stands, which are known without. Where steps have a long tail of their own its largest are no pauses."""
    tail = [top for top in tops or () if top["round"] not in named]
    test = outliers.beyond_tail(np.array([top["times"] for top in tail], np.float64), times)
    if test is None or test.p_value > chance:
        return set(), test
    return {top["round"] for top in tail[: test.count]}, test


def who_pauses(beside: Iterable[str]) -> set[str]:
    """Who stops the engine, by what is said beside its pauses."""
    return {who for reason in beside for word, who in KNOWN.items() if word in reason.lower()}


def best_rhythm(rows: Sequence[Row]) -> tuple[rhythm.Rhythm | None, str]:
    """The most regular period, in time or in steps; both count as tried."""
    size = np.array([row["beyond_s"] for row in rows])
    start_ns = rows[0]["first_ns"]
    # The pause came after what the batch takes, or in the middle of it.
    time = np.array([(row["end_ns"] - start_ns) / 1e9 - row["beyond_s"] for row in rows])
    order = np.argsort(time, kind="stable")
    numbers = np.array([row["step"] for row in rows], np.float64)
    if not all(row["numbered"] for row in rows) or (np.diff(numbers) <= 0).any():
        numbers = np.array([row["round"] for row in rows], np.float64)
    resolution = max(rows[0]["usual_s"], rows[0]["error_s"] or 0.0)
    by_time = rhythm.find(time[order], size[order], resolution)
    by_step = rhythm.find(numbers, size, 0.5)
    if by_time is not None:
        members = np.sort(order[by_time.members])
        by_time = rhythm.Rhythm(
            by_time.period, min(1.0, 2 * by_time.p_value), members, by_time.places, by_time.jitter
        )
        batch_s = np.array([(row["end_ns"] - row["start_ns"]) / 1e9 for row in rows]) - size
        by_time = seen_in_part(by_time, time, size, batch_s, resolution)
    if by_step is not None:
        p_value = min(1.0, 2 * by_step.p_value)
        by_step = rhythm.Rhythm(by_step.period, p_value, by_step.members, by_step.places, by_step.jitter)
    if by_time is None or (by_step is not None and by_step.p_value < by_time.p_value):
        return by_step, "steps"
    return by_time, "time"


def seen_in_part(
    found: rhythm.Rhythm, begun_s: Floats, length_s: Floats, batch_s: Floats, resolution: float
) -> rhythm.Rhythm:
    """With those that began late, at a place that has none, and ended no later than the longest would: an idle engine is
    stopped too, and the first request that comes sees what is left of it. In time; of all pauses `begun_s`, after what
    their batch takes, `length_s`, and `batch_s`, which a step takes once the engine goes on."""
    near = max(resolution, 3 * found.jitter * found.period)
    first_s = begun_s[found.members].min()
    place = np.floor((begun_s - first_s + near) / found.period)
    late_s = begun_s - first_s - place * found.period
    fits = late_s - batch_s + length_s <= length_s[found.members].max() + near
    taken = dict.fromkeys(np.round((begun_s[found.members] - first_s) / found.period))
    members = list(found.members)
    for i in np.argsort(late_s, kind="stable"):
        if fits[i] and place[i] not in taken:
            taken[place[i]] = None
            members.append(i)
    places = int(max(taken) - min(taken)) + 1
    return replace(found, members=np.array(sorted(members), np.intp), places=places)


def periods(members: Sequence[Row], found: rhythm.Rhythm, clock: str) -> tuple[float, float]:
    """The period in seconds and in steps: one is measured, the other the mean."""
    gaps = found.places - 1
    seconds = (members[-1]["start_ns"] - members[0]["start_ns"]) / 1e9 / gaps
    steps = (members[-1]["round"] - members[0]["round"]) / gaps
    return (found.period, steps) if clock == "time" else (seconds, found.period)


def remedies_for(by_whom: Iterable[str]) -> tuple[Remedy, ...]:
    """Those for what is known to stop the engine; none where nothing is."""
    return tuple(remedy for who in sorted(by_whom) for remedy in BY_WHOM[who])


EPLB = (
    Remedy(
        "Let EPLB move experts layer by layer beside the computation",
        "--eplb-config '{\"use_async\": true}'",
        "vLLM V1; the default since 0.25",
        "Moves take many steps, and some memory for the experts on their way",
    ),
    Remedy(
        "Rearrange experts less often",
        "--eplb-config '{\"step_interval\": 30000}' (3000 by default)",
        "vLLM V1 with --enable-eplb",
        "The placement follows a change of load more slowly",
    ),
)
PROFILER = (
    Remedy(
        "Stop what profiles the server over and over",
        "POST /stop_profile, and no --profiler-config in production",
        "vLLM V1",
        "No profiles",
    ),
)
JIT = (
    Remedy(
        "Have all shapes compiled before traffic comes",
        "requests of all lengths after each start, and a TRITON_CACHE_DIR and VLLM_CACHE_ROOT that outlive the container",
        "vLLM V1",
        "A longer start",
    ),
)
SLEEP = (
    Remedy(
        "Take an engine out of the router before it is put to sleep, and put it back once it is awake",
        "GET /is_sleeping as readiness probe (VLLM_SERVER_DEV_MODE=1 with --enable-sleep-mode)",
        "vLLM V1",
        "Capacity that others must have meanwhile",
    ),
)
UPDATE = (
    Remedy(
        "Drain the engine before its weights are replaced",
        "POST /pause?mode=wait, then update, then POST /resume",
        "vLLM V1; in 0.14 wait_for_inflight_requests=true instead of the mode",
        "Capacity that others must have meanwhile",
    ),
)
BY_WHOM = {EPLB_NAME: EPLB, PROFILER_NAME: PROFILER, JIT_NAME: JIT, SLEEP_NAME: SLEEP, UPDATE_NAME: UPDATE}


def clock(ns: int) -> str:
    """Time of day, to the second."""
    return f"{time_of_day(ns)} UTC"
