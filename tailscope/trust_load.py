"""Whether a load, a scrape or a clock lets a p99 mean what it seems to: run with the other checks of trust.

A client that waits for answers, or that keeps requests back, measures a service that nobody else gets: when the service
stalls it sends less, so a stall counts once and not for everybody who would have come (coordinated omission).
"""

from __future__ import annotations

import numpy as np

from tailscope.load_shape import CLOSED, Loop, loop_of
from tailscope.model import Trust, TrustStatus
from tailscope.store import Trace

#: From this share of the time at its limit on a limit shows at times.
AT_TIMES = 0.05
#: By what factor a quantile from the intended instant lies above the one from sending: worth a warning, and misleading.
OMITTED_WARN, OMITTED_FAIL = 1.05, 1.5
#: Requests of one kind that are looked at: a load shows itself in fewer.
MOST_REQUESTS = 1_000_000
MOST_GROUPS = 20
#: Queues of steps that lasted so long are bursts; with fewer of them nothing is said.
BURST_NS, FEW_BURSTS = 100_000_000, 5
#: Share of the bursts that no scrape saw, or of scrapes with a frozen gauge, from which scrapes are too coarse.
UNSEEN = 0.5
FROZEN = 0.05
#: Without anything finer a longer interval than this hides what a p99 is made of.
COARSE_S = 5.0
#: Two clocks of one request may differ by so much, and a step of a clock moves more than this share of its latency.
CLOCK_NS, CLOCK_SHARE = 500_000_000, 0.1
MOST_NAMES = 3


def load_checks(trace: Trace) -> list[Trust]:
    loops = _loops(trace)
    return [
        *_closed_loop(loops),
        *_omission(trace, loops),
        *_scrapes(trace),
        *_averaged(trace),
        *_clock_steps(trace),
    ]


# -- open or closed -----------------------------------------------------------------------------------


def _loops(trace: Trace) -> list[tuple[str, Loop]]:
    """The view, client or engine, and signs of a loop of each client's file, or where there is none of each instance.

    Answers to one call count once. Requests without a known end are left out.
    """
    trace.connection.execute(_CALLS)
    groups = trace.rows(
        "SELECT view, name, count(*) AS n FROM calls GROUP BY ALL ORDER BY n DESC, view, name LIMIT $most",
        {"most": MOST_GROUPS},
    )
    found = []
    for group in groups:
        columns = trace.connection.execute(
            "SELECT arrival_ns, end_ns FROM calls WHERE view = $view AND name = $name ORDER BY arrival_ns LIMIT $most",
            {"view": group["view"], "name": group["name"], "most": MOST_REQUESTS},
        ).fetchnumpy()
        loop = loop_of(np.asarray(columns["arrival_ns"], np.int64), np.asarray(columns["end_ns"], np.int64))
        if loop.kind != "unknown":
            found.append((group["view"], loop))
    return found


_CALLS = """
CREATE OR REPLACE TEMP TABLE calls AS
WITH views AS (
    SELECT CASE WHEN view IN ('client', 'gateway') THEN 'client' ELSE view END AS view, instance, source, shared_id, request_key,
           arrival_ns, coalesce(finished_ns, arrival_ns + e2e_ns) AS end_ns
    FROM observed
),
seen AS (SELECT count(*) FILTER (WHERE view = 'client') AS clients, count(*) FILTER (WHERE view = 'front') AS fronts FROM views)
SELECT CASE WHEN clients > 0 THEN 'client' ELSE 'engine' END AS view,
       CASE WHEN clients > 0 THEN coalesce(source, '') ELSE instance END AS name, coalesce(shared_id, request_key) AS call,
       arrival_ns, max(end_ns) AS end_ns
FROM views, seen
WHERE end_ns >= arrival_ns AND view = CASE WHEN clients > 0 THEN 'client' WHEN fronts > 0 THEN 'front' ELSE 'core' END
GROUP BY ALL
"""

_OPEN = "vllm bench serve --request-rate without --max-concurrency, or any client that sends by a schedule"


def _closed_loop(loops: list[tuple[str, Loop]]) -> list[Trust]:
    if not loops:
        return []
    view, worst = max(loops, key=lambda entry: (entry[1].kind == "closed", entry[1].capped, entry[1].held))
    meaning = (
        "When the service stalls such a load sends less, so the p99 is lower than that of users who come whenever they like. "
        f"For those measure with an open load: {_OPEN}"
    )
    if worst.capped >= CLOSED:
        who = (
            "clients wait" if view == "client" else "by the engine's view clients, or a gateway's limit, wait"
        )
        text = (
            f"{who} for an answer before they send: in {worst.capped:.0%} of the time a request follows the end of another by "
            f"{_ms(worst.turnaround_s)}, with at most {worst.limit} in flight. {meaning}"
        )
        return [Trust("closed-loop", "warn", text)]
    if worst.held:
        text = (
            f"fewer requests come while more are in flight: their rate falls by {worst.held:.0%} with one standard deviation more "
            f"than the mean of {worst.mean_in_flight:.3g}, as of users that wait for answers. {meaning}"
        )
        return [Trust("closed-loop", "warn", text)]
    if worst.fewer:
        text = (
            f"while more than usual is in flight {worst.fewer:.0%} of the requests are missing that would come if they did not wait for "
            f"answers (mean {worst.mean_in_flight:.3g} in flight). {meaning}"
        )
        return [Trust("closed-loop", "warn", text)]
    n = sum(loop.n for _, loop in loops)
    return [
        Trust(
            "closed-loop", "pass", f"no sign in {n:,} requests that they are sent after the answers to others"
        )
    ]


def _omission(trace: Trace, loops: list[tuple[str, Loop]]) -> list[Trust]:
    [told] = trace.rows(
        """
        WITH sent AS (
            SELECT greatest(arrival_ns - intended_ns, 0) AS delay_ns, coalesce(e2e_ns, finished_ns - arrival_ns) AS e2e_ns
            FROM observed WHERE intended_ns IS NOT NULL
        )
        SELECT count(*) AS n, max(delay_ns) / 1e9 AS longest, quantile_cont(delay_ns, 0.99) / 1e9 AS delay99,
               quantile_cont(e2e_ns, [0.95, 0.99]) AS sent, quantile_cont(e2e_ns + delay_ns, [0.95, 0.99]) AS meant
        FROM sent WHERE e2e_ns >= 0
        """
    )
    if told["n"] >= 20:
        which = int(told["n"] >= 1000)
        sent, meant = told["sent"][which] / 1e9, told["meant"][which] / 1e9
        name = ("p95", "p99")[which]
        ratio = meant / sent if sent else 1.0
        if ratio < OMITTED_WARN:
            text = f"requests were sent when they were meant to be: {_ms(told['delay99'])} late at p99, which adds {ratio - 1:.1%} to the {name} of E2E"
            return [Trust("coordinated-omission", "pass", text)]
        status: TrustStatus = "fail" if ratio >= OMITTED_FAIL else "warn"
        text = (
            f"the client sent requests up to {_ms(told['longest'])} later than it meant to: the {name} of E2E is {_ms(sent)} from sending "
            f"and {_ms(meant)} from the intended instant, which is what a user waits. Judge by the latter; a client with more "
            "connections or a higher concurrency limit would not hold requests back"
        )
        return [Trust("coordinated-omission", status, text)]
    limited = [(view, loop) for view, loop in loops if AT_TIMES <= loop.capped < CLOSED]
    if limited:
        view, worst = max(limited, key=lambda entry: entry[1].capped)
        where = "the client" if view == "client" else "a gateway or the client"
        text = (
            f"in {worst.capped:.0%} of the time requests are sent only when one of {worst.limit} in flight ends: {where} has a limit and "
            "keeps them back. How long is in no latency here, so the p99 is too low; the client's intended send times would tell"
        )
        return [Trust("coordinated-omission", "warn", text)]
    return []


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


# -- scrapes ------------------------------------------------------------------------------------------


def _scrapes(trace: Trace) -> list[Trust]:
    """Whether scrapes are close enough together to see the queues that steps show."""
    if not trace.has("metrics"):
        return []
    trace.connection.execute(_SCRAPES)
    [about] = trace.rows(
        "SELECT count(*) AS n, median(gap_ns) / 1e9 AS interval_s FROM scrapes WHERE gap_ns IS NOT NULL"
    )
    if about["n"] < 2:
        return []
    every = f"/metrics is scraped every {about['interval_s']:.3g} s"
    [bursts] = trace.rows(_BURSTS, {"least": BURST_NS})
    if not trace.count("steps"):
        if about["interval_s"] <= COARSE_S:
            return []
        text = f"{every}: queues and KV peaks that are shorter do not show, and no step or request log tells of them"
        return [Trust("scrape-interval", "warn", text)]
    problems, cure = [], "Judge queues by steps and requests"
    if bursts["n"] >= FEW_BURSTS and bursts["unseen"] >= UNSEEN * bursts["n"]:
        problems.append(
            f"{bursts['unseen']:,} of {bursts['n']:,} times that requests queued (median {_ms(bursts['median_s'])}) "
            "lie between two scrapes"
        )
        cure += ", or scrape every second" if about["interval_s"] > 1 else ""
    if bursts["scrapes"] and bursts["frozen"] > FROZEN * bursts["scrapes"]:
        problems.append(
            f"{bursts['frozen']:,} of {bursts['scrapes']:,} scrapes fall into steps of more than 1 s, during which gauges "
            "stand still"
        )
    if not problems:
        return [Trust("scrape-interval", "pass", f"{every}, close enough for the queues that steps show")]
    text = f"{every}, but {' and '.join(problems)}: gauges say little of the p99. {cure}"
    return [Trust("scrape-interval", "warn", text)]


_SCRAPES = """
CREATE OR REPLACE TEMP TABLE scrapes AS
SELECT instance, time_ns, time_ns - lag(time_ns) OVER (PARTITION BY instance ORDER BY time_ns) AS gap_ns
FROM (SELECT DISTINCT coalesce(instance, '') AS instance, instant(time_ns) AS time_ns FROM metrics) WHERE time_ns IS NOT NULL
"""

#: Runs of steps with a queue, and whether a scrape lies in each; scrapes in the time of the steps, and in long ones.
_BURSTS = """
WITH marked AS (
    SELECT instance, engine, start_ns, end_ns, waiting > 0 AS queued,
           CASE WHEN (waiting > 0) IS DISTINCT FROM lag(waiting > 0) OVER w THEN 1 ELSE 0 END AS change
    FROM steps WHERE waiting IS NOT NULL WINDOW w AS (PARTITION BY instance, engine ORDER BY k)
),
numbered AS (
    SELECT *, sum(change) OVER (PARTITION BY instance, engine ORDER BY end_ns, start_ns ROWS UNBOUNDED PRECEDING) AS run FROM marked
),
runs AS (
    SELECT instance, engine, run, min(end_ns) AS start_ns, max(end_ns) AS end_ns FROM numbered
    WHERE queued GROUP BY ALL HAVING max(end_ns) - min(end_ns) >= $least
),
placed AS (
    SELECT r.*, s.time_ns FROM runs r ASOF LEFT JOIN scrapes s ON s.instance = r.instance AND s.time_ns <= r.end_ns
),
during AS (
    SELECT s.time_ns, t.end_ns, t.tile_ns FROM scrapes s ASOF JOIN steps t ON t.instance = s.instance AND t.start_ns <= s.time_ns
),
frozen AS (
    SELECT count(*) AS scrapes, count(*) FILTER (WHERE time_ns <= end_ns AND tile_ns > 1_000_000_000) AS frozen FROM during
)
SELECT count(placed.instance) AS n, count(placed.instance) FILTER (WHERE coalesce(time_ns < start_ns, true)) AS unseen,
       median(end_ns - start_ns) / 1e9 AS median_s, any_value(scrapes) AS scrapes, any_value(frozen) AS frozen
FROM frozen LEFT JOIN placed ON true
"""


def _averaged(trace: Trace) -> list[Trust]:
    """Series that hold a percentile or mean of latency: of other windows and replicas, so nothing can be made of them."""
    if not trace.has("series"):
        return []
    names = [
        row["name"]
        for row in trace.rows(
            r"""
            SELECT DISTINCT name FROM series
            WHERE regexp_matches(name, '(latency|ttft|itl|tpot|e2e|time_to|time_per|duration|_seconds|_ms)', 'i')
              AND NOT regexp_matches(name, '^(go|process|python|promhttp|prometheus|node)_')
              AND (list_contains(map_keys(labels), 'quantile')
                   OR regexp_matches(name, '(^|[_:.])(p[0-9]{2,3}|avg|mean|quantile|percentile)([_:.]|$)', 'i'))
            ORDER BY name
            """
        )
    ]
    smoothed = trace.rows(
        "SELECT 1 FROM series WHERE starts_with(name, 'sglang:inter_token_latency') LIMIT 1"
    )
    found = []
    if names:
        shown = ", ".join(names[:MOST_NAMES]) + (
            f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        )
        text = (
            f"{shown}: percentiles or means made elsewhere, which cannot be pooled over time or replicas; not used. Histograms "
            "or requests of the same service can"
        )
        found.append(Trust("averaged-percentiles", "warn", text))
    if smoothed:
        text = "SGLang spreads the time of a chunk evenly over its tokens: the p99 of its ITL histogram is too low. A client's chunk times tell"
        found.append(Trust("averaged-percentiles", "warn", text))
    return found


# -- clocks -------------------------------------------------------------------------------------------


def _clock_steps(trace: Trace) -> list[Trust]:
    """Durations that no request has: its clock was set while it ran."""
    [row] = trace.rows(
        """
        WITH timed AS (
            SELECT finished_ns - arrival_ns AS wall_ns, e2e_ns,
                   finished_ns < arrival_ns OR first_token_ns < arrival_ns OR last_token_ns < first_token_ns AS backwards
            FROM observed
        )
        SELECT count(*) FILTER (WHERE backwards) AS backwards,
               count(*) FILTER (WHERE abs(wall_ns - e2e_ns) > $least + $share * e2e_ns) AS apart,
               median(wall_ns - e2e_ns) FILTER (WHERE abs(wall_ns - e2e_ns) > $least + $share * e2e_ns) / 1e9 AS step_s
        FROM timed
        """,
        {"least": CLOCK_NS, "share": CLOCK_SHARE},
    )
    [negative] = trace.rows(
        "SELECT count(*) AS n FROM requests WHERE e2e_ns < 0 OR ttft_ns < 0 OR queue_ns < 0 OR prefill_ns < 0 OR decode_ns < 0"
    )
    parts = []
    if row["backwards"] or negative["n"]:
        parts.append(
            f"{max(row['backwards'], negative['n']):,} requests end or give a token before they begin"
        )
    if row["apart"]:
        parts.append(
            f"{row['apart']:,} last {abs(row['step_s']):.3g} s {'longer' if row['step_s'] > 0 else 'shorter'} by the wall clock than by the "
            "clock that measured them (median)"
        )
    if not parts:
        return []
    text = f"{' and '.join(parts)}: a clock was set meanwhile (NTP?), and a p99 may be made of that. Slew clocks, or measure with a monotonic one"
    return [Trust("clock-steps", "warn", text)]
