"""From raw tables to aligned ones: observers of a request joined, steps in order, coverage of both.

Leaves temporary tables in the trace's connection: `observed`, `steps`, `joined`, `client_clock`, `coverage`,
`counters`, `histograms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from tailscope.config import Config, RequestClass
from tailscope.store import Trace

#: How far outside the client's view of a request the engine's may lie, once the clocks' offset is taken off.
SLACK_NS = 1_000_000_000
#: Requests with one id are told apart by the time they ended; each round pairs the closest ones still alone.
PAIRING_ROUNDS = 8


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
    con.execute(class_macro(config.classes))
    con.execute(sql_of(__name__, "observed"), scope.parameters)
    con.execute(sql_of(__name__, "steps"), {"instance": scope.instance})
    _client_clock(trace)
    _pair(trace, "core_pairs", "a.view = 'front'", "b.view = 'core'", with_clock=False)
    engine_rows = "(b.view = 'front' OR b.view = 'core' AND b.oid NOT IN (SELECT b FROM core_pairs))"
    _pair(trace, "client_pairs", "a.view IN ('client', 'gateway')", engine_rows, with_clock=True)
    con.execute(sql_of(__name__, "joined"))
    con.execute(sql_of(__name__, "coverage"))
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
            tests.append(f"{column} IN ({', '.join(_quote(v) for v in values)})")
        cases.append(f"WHEN {' AND '.join(tests) or 'true'} THEN {_quote(request_class.name)}")
    columns = "prompt_tokens, output_tokens, max_tokens, priority, tenant, model, adapter, instance"
    return f"CREATE OR REPLACE TEMP MACRO class_of({columns}) AS CASE {' '.join(cases)} ELSE NULL END"


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _pair(trace: Trace, name: str, left: str, right: str, *, with_clock: bool) -> None:
    """Pair rows of `observed` that share an id and overlap in time, closest ends first, each row once.

    `name` gets (a, b): a from `left`, b from `right`. Rounds, because where several requests have one id
    (n > 1, or a client that repeats ids) two of them may be closest to the same other.
    """
    con = trace.connection
    offset = "coalesce(clock.offset_ns, 0)" if with_clock else "0"
    con.execute(
        f"""
        CREATE OR REPLACE TEMP TABLE candidates AS
        SELECT a.oid AS a, b.oid AS b,
               abs(a.finished_ns - (b.finished_ns - {offset})) + abs(coalesce(a.e2e_ns - b.e2e_ns, 0)) AS distance
        FROM observed a
        JOIN observed b ON a.instance = b.instance AND a.shared_id = b.shared_id
        LEFT JOIN client_clock clock ON clock.instance = a.instance
        WHERE {left} AND {right} AND a.identifying AND b.identifying
          AND b.arrival_ns - {offset} <= coalesce(a.finished_ns, a.arrival_ns) + {SLACK_NS}
          AND coalesce(b.finished_ns, b.arrival_ns) - {offset} >= a.arrival_ns - {SLACK_NS}
        """
    )
    con.execute(f"CREATE OR REPLACE TEMP TABLE {name}(a BIGINT, b BIGINT)")
    for _ in range(PAIRING_ROUNDS):
        before = trace.count(name)
        con.execute(
            f"""
            INSERT INTO {name}
            SELECT a, b FROM candidates
            WHERE a NOT IN (SELECT a FROM {name}) AND b NOT IN (SELECT b FROM {name})
            QUALIFY row_number() OVER (PARTITION BY a ORDER BY distance, b) = 1
                AND row_number() OVER (PARTITION BY b ORDER BY distance, a) = 1
            """
        )
        if trace.count(name) == before:
            break
    con.execute("DROP TABLE candidates")


def _client_clock(trace: Trace) -> None:
    """client_clock: per instance, bounds of (engine's clock - client's clock) from requests with a unique id.

    A request cannot arrive before it was sent (upper bound) nor be answered after the answer was had (lower
    bound): Paxson-style one-way bounds (SIGMETRICS 1998). The offset is 0 where 0 lies between, else the
    middle. Crossed bounds mean that a clock stepped or drifted.
    """
    trace.connection.execute(
        """
        CREATE OR REPLACE TEMP TABLE client_clock AS
        WITH single AS (
            SELECT instance, shared_id, view IN ('client', 'gateway') AS is_client,
                   any_value(arrival_ns) AS arrival_ns, any_value(finished_ns) AS finished_ns
            FROM observed
            WHERE shared_id IS NOT NULL AND view <> 'core' AND (status = 'ok' OR status IS NULL)
            GROUP BY ALL HAVING count(*) = 1
        ),
        bounds AS (
            SELECT instance, count(*) AS pairs,
                   max(e.finished_ns - c.finished_ns) AS low_ns, min(e.arrival_ns - c.arrival_ns) AS high_ns
            FROM single c JOIN single e USING (instance, shared_id)
            WHERE c.is_client AND NOT e.is_client
            GROUP BY instance
        )
        SELECT *,
               CASE WHEN low_ns <= 0 AND high_ns >= 0 THEN 0 ELSE (low_ns + high_ns) // 2 END AS offset_ns,
               abs(high_ns - low_ns) // 2 AS error_ns,
               low_ns > high_ns AS crossed
        FROM bounds
        """
    )
