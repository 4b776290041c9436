"""Time in which a request of a decode engine waits for its KV cache from the engine that did its prefill.

vLLM counts it as queueing. A schedule that was recorded says from when to when; some emitters say how long. Else it follows
where the request's prefill is known to have been another engine's: while all who queue are deferred, and nobody waits for
room, it can have been for nothing else; and where some are deferred and some wait, it is one of those with the chance that
their numbers give. Deferred requests of an engine of which that is not known may wait for other things, and are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailscope.ledger.engine_time import EngineTime
from tailscope.ledger.requests import Requests
from tailscope.ledger.steps import Place
from tailscope.stats import Floats, Ints, prefix_sums
from tailscope.store import Trace

#: Two engines' clocks may be so far apart.
SLACK_NS = 1_000_000_000
#: A prefill that ended longer ago was another request's.
LONGEST_NS = 60_000_000_000
#: More requests of one id identify nothing.
MOST_SHARED = 64


def write_handoffs(trace: Trace) -> None:
    """Fill `handoffs`: of requests of which that is known, when they began to wait for their KV cache and when it was there
    (a schedule's), and whether another instance did their prefill and nothing but it."""
    known = {"slack": SLACK_NS, "longest": LONGEST_NS, "most": MOST_SHARED}
    for sql in (_ELSEWHERE, _HANDOFFS, "DROP TABLE prefilled_elsewhere"):
        trace.connection.execute(sql, known if "$slack" in sql else {})


#: The other instance was asked for one token, and had it before this one had its first.
_ELSEWHERE = r"""
CREATE OR REPLACE TEMP TABLE prefilled_elsewhere AS
WITH seen AS (
    SELECT instance, shared_id, arrival_ns, finished_ns, output_tokens, max_tokens FROM observed
    WHERE view IN ('front', 'core') AND shared_id IS NOT NULL
),
once AS (SELECT shared_id FROM seen GROUP BY shared_id HAVING count(DISTINCT instance) > 1 AND count(*) <= $most),
prefills AS (
    SELECT * FROM seen SEMI JOIN once USING (shared_id)
    WHERE coalesce(max_tokens, output_tokens) = 1 AND coalesce(output_tokens, 1) <= 1 AND finished_ns IS NOT NULL
)
SELECT DISTINCT j.rid
FROM joined j JOIN prefills p ON p.shared_id = regexp_replace(j.request_id, '^(cmpl-.*)-[0-9]+$', '\1') AND p.instance <> j.instance
WHERE j.engine_saw AND coalesce(j.max_tokens, j.output_tokens) > 1
  AND p.arrival_ns <= j.arrival_ns + $slack AND p.finished_ns <= j.arrival_ns + j.ttft_ns + $slack
  AND p.finished_ns >= j.arrival_ns - $longest
"""
_HANDOFFS = """
CREATE OR REPLACE TEMP TABLE handoffs AS
WITH told AS (
    SELECT rid, arg_min(fetch_ns, (k_first, fetch_ns, fetched_ns)) AS fetch_ns,
           arg_min(fetched_ns, (k_first, fetch_ns, fetched_ns)) AS fetched_ns FROM scheduled
    WHERE rid IS NOT NULL AND fetch_ns IS NOT NULL AND fetched_ns >= fetch_ns GROUP BY rid
)
SELECT rid, fetch_ns, fetched_ns, e.rid IS NOT NULL AS elsewhere
FROM told FULL JOIN (SELECT rid, rid AS found FROM prefilled_elsewhere) e USING (rid)
"""


@dataclass(frozen=True)
class Handoff:
    """Of each request queued from `queued` to `scheduled` on one engine: the seconds of its hand-off, and what of other sums
    over the steps lies in the rest of its queueing."""

    time: EngineTime
    queued: Place
    scheduled: Place
    seconds: Floats
    #: Where and when a schedule told of it; else the share of the queueing that was told, or is inferred, step by step.
    told: NDArray[np.bool_]
    away: tuple[Place, Place]
    share: Floats
    inferred: NDArray[np.bool_]

    @classmethod
    def of(cls, time: EngineTime, r: Requests, queued_ns: Ints, scheduled_ns: Ints) -> Handoff:
        queued, scheduled = Place(time.steps, queued_ns), Place(time.steps, scheduled_ns)
        spent = (scheduled_ns - queued_ns) / 1e9
        told = r.fetched_ns > 0
        began = np.where(told, np.clip(r.fetch_ns, queued_ns, scheduled_ns), queued_ns)
        known = np.where(told, np.clip(r.fetched_ns, began, scheduled_ns), queued_ns)
        seconds = (known - began) / 1e9
        measured = ~told & np.isfinite(r.kv_transfer_ns)
        seconds = np.where(measured, np.minimum(np.nan_to_num(r.kv_transfer_ns) / 1e9, spent), seconds)
        inferred = r.elsewhere & ~told & ~measured
        if inferred.any():
            idle = spent - time.between(time.busy, queued, scheduled)
            seconds = np.where(
                inferred, np.maximum(idle, 0.0) + time.between(time.deferred, queued, scheduled), seconds
            )
        share = np.where(measured, seconds / np.maximum(spent, 1e-12), 0.0)
        away = Place(time.steps, began), Place(time.steps, known)
        return cls(time, queued, scheduled, np.minimum(seconds, spent), told, away, share, inferred)

    def rest(self, sums: Floats) -> Floats:
        """What of prefix sums over the steps lies in the queueing, but not in the hand-off."""
        time = self.time
        found = time.between(sums, self.queued, self.scheduled)
        if self.told.any():
            found = np.maximum(found - np.where(self.told, time.between(sums, *self.away), 0.0), 0.0)
        found = found * (1.0 - self.share)
        if self.inferred.any():
            waiting = prefix_sums(np.diff(sums) * (1.0 - time.deferred_share))
            found = np.where(self.inferred, time.between(waiting, self.queued, self.scheduled), found)
        return found
