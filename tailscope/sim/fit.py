"""What a step of a real engine costs, fitted from its trace: `Scenario(loads, cost=fit_cost(trace))` is one's own engine.

The trace has to tell of each step what was in its batch: vLLM does with --enable-logging-iteration-details, and a stat
logger adds the instants, which its log has to the second only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailscope import stats
from tailscope.errors import UsageError
from tailscope.sim.scenario import Cost
from tailscope.stats import Floats, Ints
from tailscope.store import Trace

#: Fewer steps say too little about six coefficients.
LEAST_STEPS = 30
#: More do not change them.
FIT_STEPS = 40_000
ROUNDS = 40
#: A step takes some time, whatever the fit says.
LEAST_STEP_S = 1e-6
#: A step so many sigmas longer than its like was paused; that is no noise.
PAUSE_SIGMAS = 3.0
#: Share of requests that met no step in flight: what they waited before the queue is the front end alone.
UNDELAYED = 0.05
#: How far known decodes may be scaled to the number the engine tells; aborted requests leave no row.
SCALE = (0.5, 2.0)


#: Columns of a query by name: instants as int64 ns, all else as float64.
Columns = dict[str, Any]


@dataclass(frozen=True)
class Features:
    """Steps of one engine, arrays of one length: how long each took, and what of `scenario.Cost` was in it.

    seconds: from the end of the step before to its own. context_tokens: of all decoding requests together;
    attention: token², the sum over prefill tokens of the tokens before them.
    """

    seconds: Floats
    decode_requests: Floats
    context_tokens: Floats
    prefill_tokens: Floats
    prefill_requests: Floats
    attention: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def matrix(self) -> Floats:
        """A row a step, columns in the order of `Cost`'s coefficients."""
        columns = (
            np.ones(len(self)),
            self.decode_requests,
            self.context_tokens,
            self.prefill_tokens,
            self.prefill_requests,
            self.attention,
        )
        return np.column_stack(columns)

    def taken(self, chosen: NDArray[np.bool_] | NDArray[np.intp]) -> Features:
        """The chosen steps only."""
        return Features(**{name: values[chosen] for name, values in vars(self).items()})


def fit_cost(
    trace: Trace,
    from_ns: int | None = None,
    to_ns: int | None = None,
    instance: str | None = None,
    engine: int | None = None,
) -> Cost:
    """The cost of a step of a real engine: from its steps that ended in [from_ns, to_ns), Unix ns, and their requests.

    `instance` and `engine` may be left out where the trace has one only. The gaps between steps are part of the
    fitted steps, so `host_gap` is 0; what requests wait before they are queued gives `frontend`. Raises UsageError
    where the trace has too few steps that can be fitted.
    """
    instance, engine = _which(trace, instance, engine)
    cost = cost_of(features_of(trace, from_ns, to_ns, instance, engine))
    waits = _queue_waits(trace, from_ns, to_ns, instance, engine)
    if not len(waits):
        return cost
    return replace(cost, frontend=max(float(np.quantile(waits, UNDELAYED)) - cost.output, 0.0))


def cost_of(steps: Features) -> Cost:
    """Fit a linear cost by robust non-negative least squares, and its noise from what is left.

    Residuals are weighed by the root of the duration: long steps count more, but not as their square. Raises
    UsageError below LEAST_STEPS steps.
    """
    if len(steps) < LEAST_STEPS:
        what = f"{len(steps)} steps of known batch and duration are too few to fit a cost to"
        raise UsageError(
            f"{what}: {LEAST_STEPS} are needed. vLLM tells them with --enable-logging-iteration-details"
        )
    steps = _thinned(steps)
    features, seconds = steps.matrix, steps.seconds
    coefficients = stats.robust_fit(features, seconds, 1 / np.sqrt(seconds), ROUNDS)
    modelled = np.maximum(features @ coefficients, 1e-9)
    # The noise of a step that does nothing else; that of longer ones is smaller by the root of their length.
    coefficients[0] = max(coefficients[0], LEAST_STEP_S)
    shrink = np.sqrt(coefficients[0] / np.maximum(modelled, coefficients[0]))
    noise = _spread(np.log(seconds / modelled) / shrink)
    # Noise is skewed, and a robust fit follows the usual step; what it misses of the time is in no feature.
    longest = modelled * np.exp(PAUSE_SIGMAS * noise * shrink)
    missed = np.minimum(seconds, longest).mean() - (modelled * np.exp((noise * shrink) ** 2 / 2)).mean()
    coefficients[0] = max(coefficients[0] + missed, LEAST_STEP_S)
    step, decode, context, prefill, request, attention = (float(c) for c in coefficients)
    return Cost(
        step=step,
        decode_request=decode,
        context_token=context,
        prefill_token=prefill,
        prefill_request=request,
        attention=attention,
        noise=noise,
        host_gap=0.0,
    )


def features_of(
    trace: Trace, from_ns: int | None, to_ns: int | None, instance: str | None, engine: int | None
) -> Features:
    """The steps that can be fitted: those that followed another without a break, and whose tokens are known.

    Steps with more decode tokens than decoding requests are left out: drafts, or a preempted request computed again
    in a batch whose telemetry does not say how much of it.
    """
    steps = _steps(trace, instance, engine)
    requests = _requests(trace, instance, engine)
    end = steps["end_ns"]
    before, left_over = np.roll(end, 1), np.roll(steps["left_over"], 1)
    context, attention = _context(steps, requests), _attention(steps, requests)
    usable = (end > before) & (left_over > 0) & (steps["decode_tokens"] <= steps["decode_requests"])
    usable &= (end >= (from_ns or 0)) & (end < (to_ns or np.iinfo(np.int64).max))
    usable[:1] = False
    return Features(
        seconds=(end - before) / 1e9,
        decode_requests=steps["decode_requests"],
        context_tokens=context,
        prefill_tokens=steps["prefill_tokens"],
        prefill_requests=steps["prefill_requests"],
        attention=attention,
    ).taken(usable)


# -- the fit -----------------------------------------------------------------------------------


def _spread(logarithms: Floats) -> float:
    """Half the width that holds the middle 68 %: the sigma of a log-normal, whatever its tails."""
    low, high = np.quantile(logarithms, [0.16, 0.84])
    return float(high - low) / 2


def _thinned(steps: Features) -> Features:
    """At most FIT_STEPS of them, evenly spaced; half the places are for those with prefill, which are fewer."""
    prefill = np.flatnonzero(steps.prefill_tokens > 0)
    decode = np.flatnonzero(steps.prefill_tokens <= 0)
    chosen = [part[:: max(1, -(-len(part) // (FIT_STEPS // 2)))] for part in (prefill, decode)]
    return steps.taken(np.sort(np.concatenate(chosen)))


# -- what was in a step ------------------------------------------------------------------------


def _context(steps: Columns, requests: Columns) -> Floats:
    """Tokens of context of each step's decoding requests.

    A request decodes from its first token's step to its last token's, a token a step; one that was preempted, or left
    out, is there for a share of the steps. So its context is linear in the step's number, and two prefix sums do.
    """
    end, n = steps["end_ns"], len(steps["end_ns"])
    first, last = _nearest(end, requests["first_token_ns"]), _nearest(end, requests["last_token_ns"])
    length = np.maximum(last - first, 1)
    share = np.clip((requests["output_tokens"] - 1) / length, 0.0, 1.0) * (last > first)
    start = requests["prompt_tokens"] + 1 - share * (first + 1)
    slope = stats.active(first + 1, last + 1, share * share, n)
    context = stats.active(first + 1, last + 1, share * start, n) + slope * np.arange(n)
    known = stats.active(first + 1, last + 1, share, n)
    scale = np.where(known > 0.5, steps["decode_requests"] / np.maximum(known, 0.5), 0.0)
    return np.asarray(np.maximum(context * np.clip(scale, *SCALE), 0.0))


def _attention(steps: Columns, requests: Columns) -> Floats:
    """For each step, the sum over its prefill tokens of the tokens before them, token².

    Prompts are computed in the order of admission, one after the other: laid end to end in that order, they cover
    the steps' prefill tokens laid end to end. Each is held to its own first and last step, so that a request nobody
    saw shifts its neighbours only.
    """
    n = len(steps["end_ns"])
    token_sum = np.concatenate([[0.0], np.cumsum(steps["prefill_tokens"])])
    start, computed, cached = _laid_out(steps["end_ns"], token_sum, requests)
    cuts = np.unique(np.concatenate([token_sum, start, start + computed]))
    at, length = cuts[:-1], np.diff(cuts)
    step = np.searchsorted(token_sum, at, side="right") - 1
    before = np.zeros(len(at))
    if len(start):
        owner = np.maximum(np.searchsorted(start, at, side="right") - 1, 0)
        inside = (at >= start[owner]) & (at < start[owner] + computed[owner])
        before = np.where(inside, cached[owner] + at - start[owner], 0.0)
    seen = (step >= 0) & (step < n)
    attention = np.bincount(step[seen], (length * (before + length / 2))[seen], minlength=n)
    return np.asarray(attention[:n], np.float64)


def _laid_out(end: Ints, token_sum: Floats, requests: Columns) -> tuple[Floats, Floats, Floats]:
    """Where each request's computed prompt begins on the row of all prefill tokens: (start, computed, cached)."""
    n = len(end)
    first = np.clip(_nearest(end, requests["scheduled_ns"]) + 1, 0, n - 1)
    last = _nearest(end, requests["first_token_ns"])
    order = np.lexsort((requests["queued_ns"], first))
    cached = requests["cached_tokens"][order]
    computed = requests["prompt_tokens"][order] - cached
    earliest, latest = token_sum[first[order]], token_sum[last[order] + 1] - computed
    start, beyond = np.zeros(len(order)), -np.inf
    for i in range(len(order)):
        start[i] = min(max(earliest[i], beyond), latest[i])
        beyond = start[i] + computed[i]
    sort = np.argsort(start, kind="stable")
    return start[sort], computed[sort], cached[sort]


def _nearest(end: Ints, times: Ints) -> NDArray[np.intp]:
    """The step whose end is nearest to each instant."""
    after = np.clip(np.searchsorted(end, times), 1, max(len(end) - 1, 1))
    nearer = np.abs(end[np.minimum(after, len(end) - 1)] - times) <= np.abs(end[after - 1] - times)
    return np.asarray(np.where(nearer, np.minimum(after, len(end) - 1), after - 1))


# -- reading the trace -------------------------------------------------------------------------

_MINE = "instance IS NOT DISTINCT FROM $instance AND (engine IS NOT DISTINCT FROM $engine OR engine IS NULL)"

# Several sources may tell of the same step, a log beside a stat logger: the one that knows the instant counts.
_STEPS = f"""
SELECT end_ns, prefill_tokens, coalesce(prefill_requests, 0) AS prefill_requests, decode_requests,
       coalesce(decode_tokens, decode_requests) AS decode_tokens,
       coalesce(running, 0) + coalesce(waiting, 0) + coalesce(deferred, 0) AS left_over
FROM iterations
WHERE rank IS NULL AND end_ns IS NOT NULL AND prefill_tokens IS NOT NULL AND decode_requests IS NOT NULL
  AND NOT coalesce(is_dummy, false) AND {_MINE}
QUALIFY time_error_ns IS NULL OR NOT bool_or(time_error_ns IS NULL) OVER ()
ORDER BY end_ns, iteration
"""

# And of the same request, a span beside a stat logger: only that one knows of cached tokens.
_REQUESTS = f"""
SELECT coalesce(queued_ns, scheduled_ns) AS queued_ns, scheduled_ns, first_token_ns, last_token_ns,
       prompt_tokens, coalesce(cached_tokens, 0) AS cached_tokens, output_tokens
FROM requests
WHERE observer = 'engine' AND scheduled_ns IS NOT NULL AND first_token_ns IS NOT NULL AND last_token_ns IS NOT NULL
  AND prompt_tokens IS NOT NULL AND output_tokens IS NOT NULL AND {_MINE}
QUALIFY cached_tokens IS NOT NULL OR NOT bool_or(cached_tokens IS NOT NULL) OVER ()
ORDER BY scheduled_ns, request_key
"""

_WAITS = f"""
SELECT (queued_ns - arrival_ns) / 1e9 AS wait FROM requests
WHERE observer = 'engine' AND queued_ns IS NOT NULL AND {_MINE}
  AND arrival_ns >= coalesce($from_ns, arrival_ns) AND arrival_ns < coalesce($to_ns, arrival_ns + 1)
QUALIFY cached_tokens IS NOT NULL OR NOT bool_or(cached_tokens IS NOT NULL) OVER ()
"""

# What names no engine tells of the only one.
_ENGINES = """
SELECT DISTINCT instance, engine
FROM (FROM iterations WHERE rank IS NULL
      QUALIFY engine IS NOT NULL OR NOT bool_or(engine IS NOT NULL) OVER (PARTITION BY instance))
ORDER BY ALL
"""


def _which(trace: Trace, instance: str | None, engine: int | None) -> tuple[str | None, int | None]:
    """The engine meant: as named, or the only one whose steps the trace tells."""
    found = trace.connection.execute(_ENGINES).fetchall()
    chosen = [
        (name, number) for name, number in found if instance in (None, name) and engine in (None, number)
    ]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(f"{name} engine {number}" for name, number in found) or "none"
    raise UsageError(f"{len(chosen)} engines match; the trace has steps of: {names}")


def _steps(trace: Trace, instance: str | None, engine: int | None) -> Columns:
    return _columns(trace, _STEPS, {"instance": instance, "engine": engine})


def _requests(trace: Trace, instance: str | None, engine: int | None) -> Columns:
    return _columns(trace, _REQUESTS, {"instance": instance, "engine": engine})


def _queue_waits(
    trace: Trace, from_ns: int | None, to_ns: int | None, instance: str | None, engine: int | None
) -> Floats:
    """Seconds from a request's arrival to its being queued, of those that arrived in the window."""
    where = {"instance": instance, "engine": engine, "from_ns": from_ns, "to_ns": to_ns}
    waits: Floats = _columns(trace, _WAITS, where)["wait"]
    return waits


def _columns(trace: Trace, query: str, parameters: dict[str, Any]) -> Columns:
    rows = trace.connection.execute(query, parameters).fetchnumpy()
    return {
        name: np.asarray(values, np.int64 if name.endswith("_ns") else np.float64)
        for name, values in rows.items()
    }
