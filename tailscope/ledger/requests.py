"""Requests and steps of an engine as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.recompute import recomputed, steps_of_preemptions
from tailscope.ledger.steps import BLOCKERS, Prefills, Steps
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, floats


@dataclass(frozen=True)
class Requests:
    """Requests that have a bill, arrays of one length; unknown is NaN. `culprit` is the index of each one's class."""

    rid: Ints
    arrival_ns: Ints
    ttft_ns: Ints
    e2e_ns: Ints
    queue_ns: Floats
    prefill_ns: Floats
    prompt_tokens: Floats
    cached_tokens: Floats
    output_tokens: Floats
    preemptions: Floats
    #: When it began to wait for its KV cache from another engine and when that was there, 0 where nothing tells; how long that
    #: took by its emitter; whether another engine is known to have done its prefill.
    fetch_ns: Ints
    fetched_ns: Ints
    kv_transfer_ns: Floats
    elsewhere: NDArray[np.bool_]
    culprit: NDArray[np.intp]

    def phases(self) -> tuple[Ints, Ints, Ints, Ints]:
        """wait, queue, prefill, decode in ns, each at least 0: the first three sum to TTFT, all to E2E.

        The parts are on the engine's clock and TTFT on the front end's: where the parts exceed it they are scaled
        down. Without parts, all of TTFT counts as prefill.
        """
        return phases(self.ttft_ns, self.e2e_ns, self.queue_ns, self.prefill_ns)

    @property
    def phases_known(self) -> NDArray[np.bool_]:
        return parts_known(self.queue_ns, self.prefill_ns)

    def select(self, chosen: NDArray[np.bool_]) -> Requests:
        return Requests(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    def covered(self, first_ns: int, last_ns: int) -> NDArray[np.bool_]:
        """Which requests have their time to the first token at least partly in [first_ns, last_ns]."""
        return np.asarray((self.arrival_ns + self.ttft_ns > first_ns) & (self.arrival_ns < last_ns))

    def inside(self, steps: Steps) -> NDArray[np.bool_]:
        """Which prefills lie in the steps' time, and have a known size."""
        wait, queue, _, _ = self.phases()
        scheduled, first_token = self.arrival_ns + wait + queue, self.arrival_ns + self.ttft_ns
        within = (first_token > steps.start_ns[0]) & (scheduled < steps.end_ns[-1])
        return np.asarray(within & np.isfinite(self.prompt_tokens))

    def recompute_steps(self) -> float:
        """In how many steps those of them that were preempted can have been computed again; NaN if unknown."""
        tokens = self.prompt_tokens + np.nan_to_num(self.output_tokens)
        return steps_of_preemptions(self.preemptions, tokens)

    def prefills(self, steps: Steps, share: float = 1.0) -> Prefills:
        """The prefills inside the steps' time; `share` of each is expected to have run on this engine."""
        chosen = self.inside(steps)
        wait, queue, _, _ = self.phases()
        cached = np.nan_to_num(self.cached_tokens)
        return Prefills(
            scheduled_ns=(self.arrival_ns + wait + queue)[chosen],
            first_token_ns=(self.arrival_ns + self.ttft_ns)[chosen],
            last_ns=(self.arrival_ns + self.e2e_ns)[chosen],
            computed_tokens=share * np.maximum(self.prompt_tokens - cached, 1.0)[chosen],
            cached_tokens=cached[chosen],
            held_tokens=share * (self.prompt_tokens + np.nan_to_num(self.output_tokens) / 2)[chosen],
            culprit=self.culprit[chosen],
        )


def parts_known(queue_ns: Floats, prefill_ns: Floats) -> NDArray[np.bool_]:
    known = np.isfinite(queue_ns) & np.isfinite(prefill_ns)
    return np.asarray(known & (np.nan_to_num(queue_ns) >= 0) & (np.nan_to_num(prefill_ns) >= 0))


def phases(ttft: Ints, e2e: Ints, queue_ns: Floats, prefill_ns: Floats) -> tuple[Ints, Ints, Ints, Ints]:
    """As `Requests.phases`."""
    known = parts_known(queue_ns, prefill_ns)
    queue = np.where(known, np.nan_to_num(queue_ns), 0.0)
    prefill = np.where(known, np.nan_to_num(prefill_ns), ttft)
    parts = queue + prefill
    scale = np.where(parts > ttft, ttft / np.maximum(parts, 1.0), 1.0)
    queued = np.minimum(np.floor(queue * scale).astype(np.int64), ttft)
    prefilled = np.minimum(np.floor(prefill * scale).astype(np.int64), ttft - queued)
    return ttft - queued - prefilled, queued, prefilled, np.maximum(e2e - ttft, 0)


def culprit_classes(trace: Trace) -> tuple[str, ...]:
    """The classes that can be blamed: those with most prompt tokens to compute, the rest as `other`."""
    most = 7
    names = [
        row["klass"]
        for row in trace.rows(
            "SELECT klass FROM joined WHERE billed GROUP BY klass "
            "ORDER BY sum(greatest(prompt_tokens - coalesce(cached_tokens, 0), 1)) DESC NULLS LAST, klass"
        )
    ]
    return tuple(names) if len(names) <= most else (*names[: most - 1], "other")


def load_requests(trace: Trace, instance: str, engine: int | None, culprits: tuple[str, ...]) -> Requests:
    columns = trace.connection.execute(
        "SELECT rid, arrival_ns, ttft_ns, e2e_ns, queue_ns, prefill_ns, prompt_tokens, cached_tokens, output_tokens, "
        "preemptions, klass, kv_transfer_ns, coalesce(h.fetch_ns, 0) AS fetch_ns, coalesce(h.fetched_ns, 0) AS fetched_ns, "
        "coalesce(h.elsewhere, false) AS elsewhere FROM joined LEFT JOIN handoffs h USING (rid) WHERE billed AND ttft_ns >= 0 AND e2e_ns >= ttft_ns "
        "AND instance = $instance AND engine IS NOT DISTINCT FROM $engine ORDER BY rid",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    index = {name: i for i, name in enumerate(culprits)}
    names, inverse = np.unique(np.asarray(columns.pop("klass")).astype(str), return_inverse=True)
    of_name = np.array([index.get(str(name), len(culprits) - 1) for name in names], dtype=np.intp)
    exact = ("rid", "arrival_ns", "ttft_ns", "e2e_ns", "fetch_ns", "fetched_ns")
    arrays: dict[str, Any] = {name: np.asarray(columns.pop(name), np.int64) for name in exact}
    elsewhere = np.asarray(columns.pop("elsewhere"), bool)
    arrays |= {name: floats(values) for name, values in columns.items()}
    return Requests(
        **arrays, elsewhere=elsewhere, culprit=of_name[inverse] if len(names) else np.empty(0, dtype=np.intp)
    )


def load_steps(
    trace: Trace, instance: str, engine: int | None, most_recompute_steps: float = np.nan
) -> Steps:
    """An engine's steps. `most_recompute_steps`: in how many of them preempted requests can have been computed again."""
    told = "NULL AS told", ""
    if trace.connection.execute("SELECT 1 FROM told_recompute LIMIT 1").fetchall():
        told = (
            "t.tokens AS told",
            "LEFT JOIN told_recompute t ON t.instance = s.instance AND t.engine IS NOT DISTINCT FROM s.engine "
            "AND t.end_ns = s.end_ns ",
        )
    columns = trace.connection.execute(
        # An engine that counts from the start again has been started again; receipts may change places.
        "SELECT sum((iteration < before / 2)::INT) OVER (ORDER BY k) AS epoch, * EXCLUDE (k, iteration, before) FROM ("
        "SELECT s.k, iteration, lag(iteration) OVER (ORDER BY s.k) AS before, s.start_ns, s.end_ns, prefill_requests, prefill_tokens, decode_requests, decode_tokens, running, waiting, deferred, "
        f"kv_usage, late_ns, e.caused_ns, slow_ns, g.inside_ns AS host_ns, g.before_ns, CASE WHEN p.k IS NULL THEN 0 ELSE 1 END AS paused, s.preempted, "
        f"list_position({list(BLOCKERS)}, s.blocked) - 1 AS blocked, {told[0]} "
        f"FROM steps s LEFT JOIN step_evidence e ON e.k = s.k LEFT JOIN pauses p ON p.k = s.k LEFT JOIN host_gaps g ON g.k = s.k {told[1]}"
        "WHERE s.instance = $instance AND s.engine IS NOT DISTINCT FROM $engine) ORDER BY k",
        {"instance": instance, "engine": engine},
    ).fetchnumpy()
    arrays: dict[str, Any] = {
        name: np.asarray(columns.pop(name), np.int64) for name in ("start_ns", "end_ns")
    }
    arrays |= {name: floats(values) for name, values in columns.items()}
    again = recomputed(
        arrays["decode_requests"],
        arrays["decode_tokens"],
        arrays.pop("preempted"),
        arrays.pop("told"),
        most_recompute_steps,
    )
    arrays["epoch"] = np.nan_to_num(arrays["epoch"])
    return Steps(**arrays, recompute_tokens=again, own=np.ones(len(again)))
