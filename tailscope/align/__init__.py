"""From raw tables to aligned ones: observers of a request joined, steps in order, coverage of both.

Leaves temporary tables in the trace's connection: `observed`, `steps`, `joined`, `client_clock`, `gateway_clock`,
`coverage`, `scheduled`, `configured`, `counters`, `histograms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from tailscope.config import Config, RequestClass
from tailscope.scan import quote
from tailscope.store import Trace

#: How far outside the client's view of a request the engine's may lie, once the clocks' offset is taken off.
SLACK_NS = 1_000_000_000
#: An id that more rows share on both sides identifies nothing, and joining on it would be quadratic.
MOST_SHARED = 64
#: How far apart two ends count as that are not both known.
FAR_NS = 86_400_000_000_000
#: Clocks step or drift where fewer of the requests than this agree on one offset; odd ids are rarer.
AGREEING = 0.95
#: Whose rows are the client's: a gateway is the client where no other is known.
CLIENT_SIDE = """
(view = 'client' OR view = 'gateway' AND instance NOT IN (SELECT instance FROM observed WHERE view = 'client'))
"""
#: The class of a row of `requests`, by the macro that `class_macro` makes.
CLASS_SQL = (
    "coalesce(klass, class_of(prompt_tokens, CASE WHEN status IN ('unfinished', 'aborted') "
    "THEN coalesce(max_tokens, output_tokens) ELSE output_tokens END, "
    "max_tokens, priority, tenant, model, adapter, instance), 'unknown')"
)
#: What a value must be to be one: an instant before 2096, a duration of at most some years, a number of things.
#: Others are as good as unknown, and their sums would overflow.
BELIEVABLE = """
CREATE OR REPLACE TEMP MACRO instant(ns) AS CASE WHEN ns BETWEEN 0 AND 4_000_000_000_000_000_000 THEN ns END;
CREATE OR REPLACE TEMP MACRO duration(ns) AS CASE WHEN ns BETWEEN 0 AND 100_000_000_000_000_000 THEN ns END;
CREATE OR REPLACE TEMP MACRO number(n) AS CASE WHEN n BETWEEN 0 AND 1_000_000_000_000 THEN n END;
"""


@dataclass(frozen=True)
class Scope:
    """What part of a trace is looked at: arrivals in [from_ns, to_ns), one instance, one class."""

    from_ns: int | None = None
    to_ns: int | None = None
    instance: str | None = None
    klass: str | None = None

    @property
    def parameters(self) -> dict[str, int | str | None]:
        return {"from_ns": self.from_ns, "to_ns": self.to_ns, "instance": self.instance}


def sql_of(package: str, name: str) -> str:
    return files(package).joinpath(f"{name}.sql").read_text(encoding="utf-8")


def align(trace: Trace, config: Config, scope: Scope) -> None:
    """Build the aligned tables. Cost is linear (hash and sort joins) in requests and iterations."""
    con = trace.connection
    con.execute(BELIEVABLE)
    con.execute(class_macro(config.classes))
    con.execute(sql_of(__name__, "observed"), scope.parameters)
    con.execute(sql_of(__name__, "steps"), {"instance": scope.instance})
    _clock(trace, "client_clock", CLIENT_SIDE)
    _clock(trace, "gateway_clock", "view = 'gateway'")
    _pair(trace, "core_pairs", "request_id", "view = 'front'", "view = 'core'", None)
    engine_rows = "(view = 'front' OR view = 'core' AND oid NOT IN (SELECT b FROM core_pairs))"
    _pair(trace, "client_pairs", "shared_id", "view = 'client'", engine_rows, "client_clock")
    _pair(trace, "gateway_pairs", "shared_id", "view = 'gateway'", engine_rows, "gateway_clock")
    # What no engine saw may have been refused by the gateway.
    alone = "view = 'client' AND oid NOT IN (SELECT a FROM client_pairs)"
    refused = "view = 'gateway' AND oid NOT IN (SELECT a FROM gateway_pairs)"
    _pair(trace, "edge_pairs", "shared_id", alone, refused, "client_clock")
    con.execute(sql_of(__name__, "joined"))
    con.execute(sql_of(__name__, "coverage"))
    con.execute(sql_of(__name__, "scheduled"))
    con.execute(sql_of(__name__, "configured"))
    con.execute(sql_of(__name__, "counters"), scope.parameters)
    con.execute(sql_of(__name__, "histograms"), scope.parameters)


def class_macro(classes: tuple[RequestClass, ...]) -> str:
    """SQL for `class_of(...)`: the first class of the configuration whose tests all hold, else NULL."""
    cases = []
    for request_class in classes:
        tests = []
        for column, (low, high) in request_class.ranges.items():
            tests += [f"{column} >= {low}"] if low is not None else []
            tests += [f"{column} < {high}"] if high is not None else []
            tests.append(f"{column} IS NOT NULL")
        for column, values in request_class.values.items():
            tests.append(f"{column} IN ({', '.join(quote(v) for v in values)})")
        cases.append(f"WHEN {' AND '.join(tests) or 'true'} THEN {quote(request_class.name)}")
    columns = "prompt_tokens, output_tokens, max_tokens, priority, tenant, model, adapter, instance"
    return f"CREATE OR REPLACE TEMP MACRO class_of({columns}) AS CASE {' '.join(cases)} ELSE NULL END"


def _pair(trace: Trace, name: str, key: str, left: str, right: str, clock: str | None) -> None:
    """Pair rows of `observed` that share an id and overlap in time, closest ends first, each row once.

    `name` gets (a, b): a from `left`, b from `right`; `name`_crowded the ids that were left out because too
    many rows share them. `clock` has the offset of the right's clock by instance. Answers to one call (n > 1) end in one order for all observers. Rounds, because
    where other requests share an id two may be closest to the same other; those equally close pair in order.
    """
    con = trace.connection
    offset = "coalesce(clock.offset_ns, 0)" if clock else "0"
    place = f"""
        row_number() OVER (same ORDER BY finished_ns, oid) AS nth, count(*) OVER same AS many,
        max(arrival_ns) OVER same - min(arrival_ns) OVER same <= {SLACK_NS} AS together
    """
    same = f"WINDOW same AS (PARTITION BY instance, {key})"
    crowd = f"GROUP BY instance, {key} HAVING count(*) > {MOST_SHARED}"
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE {name}_crowded AS
        SELECT instance, {key} AS id FROM observed WHERE {left} AND {key} IS NOT NULL {crowd}
        INTERSECT SELECT instance, {key} FROM observed WHERE {right} {crowd}
        """
    )
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE candidates AS
        WITH identified AS (
            FROM observed
            WHERE {key} IS NOT NULL AND (instance, {key}) NOT IN (SELECT (instance, id) FROM {name}_crowded)
        ),
        lefts AS MATERIALIZED (SELECT *, {place} FROM identified WHERE {left} {same}),
        rights AS MATERIALIZED (SELECT *, {place} FROM identified WHERE {right} {same})
        SELECT a.oid AS a, b.oid AS b, abs(a.nth - b.nth) AS apart,
               CASE WHEN apart = 0 AND a.many = b.many AND a.together AND b.together THEN -1
                    ELSE coalesce(abs(a.finished_ns - (b.finished_ns - {offset})), {FAR_NS})
                         + abs(coalesce(a.e2e_ns - b.e2e_ns, 0)) END AS distance
        FROM lefts a JOIN rights b ON a.instance = b.instance AND a.{key} = b.{key}
        LEFT JOIN {clock or "client_clock"} clock ON clock.instance = a.instance
        WHERE b.arrival_ns - {offset} <= coalesce(a.finished_ns, a.arrival_ns) + {SLACK_NS}
          AND coalesce(b.finished_ns, b.arrival_ns) - {offset} >= a.arrival_ns - {SLACK_NS}
        """
    )
    con.execute(f"CREATE OR REPLACE TEMP TABLE {name}(a BIGINT, b BIGINT)")
    for _ in range(MOST_SHARED):
        if not trace.count("candidates"):
            break
        con.execute(
            f"""
            INSERT INTO {name}
            SELECT a, b FROM (SELECT a, arg_min(b, (distance, apart, b)) AS b FROM candidates GROUP BY a)
            JOIN (SELECT b, arg_min(a, (distance, apart, a)) AS a FROM candidates GROUP BY b) USING (a, b)
            """
        )
        gone = f"a IN (SELECT a FROM {name}) OR b IN (SELECT b FROM {name})"
        con.execute(f"DELETE FROM candidates WHERE {gone}")
    con.execute("DROP TABLE candidates")


def _clock(trace: Trace, name: str, outer: str) -> None:
    """client_clock, gateway_clock: per instance, bounds of (engine's clock - its clock) from the requests both saw.

    A request cannot arrive before it was sent (upper bound) nor be answered after the answer was had (lower
    bound): Paxson-style one-way bounds (SIGMETRICS 1998), of all requests of an id together. The bounds are
    those that most ids agree on (Marzullo 1984): an id that was used twice does not spoil them. The offset is
    0 where 0 lies between, else the middle. Crossed: so few agree that a clock must have stepped or drifted.
    """
    trace.connection.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE {name} AS
        WITH sides AS (
            SELECT instance, shared_id, view IN ('client', 'gateway') AS is_client,
                   -- The core's times are those of its record, which comes late.
                   coalesce(min(arrival_ns) FILTER (WHERE view <> 'core'), min(arrival_ns)) AS arrival_ns,
                   coalesce(max(finished_ns) FILTER (WHERE view <> 'core'), max(finished_ns)) AS finished_ns
            FROM observed
            WHERE shared_id IS NOT NULL AND (status = 'ok' OR status IS NULL)
              AND (view IN ('front', 'core') OR {outer}) GROUP BY ALL
        ),
        pairs AS (
            SELECT instance, e.finished_ns - c.finished_ns AS low_ns, e.arrival_ns - c.arrival_ns AS high_ns
            FROM sides c JOIN sides e USING (instance, shared_id)
            WHERE c.is_client AND NOT e.is_client
              -- What lasted longer for the engine than for the client, but for noise, was not one request.
              AND low_ns - high_ns <= {SLACK_NS}
        ),
        edges AS (
            SELECT instance, least(low_ns, high_ns) AS at_ns, 1 AS change FROM pairs
            UNION ALL
            SELECT instance, greatest(low_ns, high_ns), -1 FROM pairs
        ),
        sweep AS (
            SELECT instance, at_ns AS low_ns, lead(at_ns) OVER w AS high_ns, sum(change) OVER w AS agreeing
            FROM edges
            WINDOW w AS (PARTITION BY instance ORDER BY at_ns, change DESC ROWS UNBOUNDED PRECEDING)
        )
        SELECT instance, pairs, low_ns, high_ns,
               CASE WHEN low_ns <= 0 AND high_ns >= 0 THEN 0 ELSE (low_ns + high_ns) // 2 END AS offset_ns,
               (high_ns - low_ns) // 2 AS error_ns,
               agreeing < {AGREEING} * pairs AS crossed
        FROM sweep JOIN (SELECT instance, count(*) AS pairs FROM pairs GROUP BY instance) USING (instance)
        QUALIFY row_number() OVER (
            PARTITION BY instance ORDER BY agreeing DESC, abs(low_ns + high_ns), low_ns) = 1
        """
    )
