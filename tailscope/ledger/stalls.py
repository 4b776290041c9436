"""Time in which a request that had been started was given nothing: preempted, or left out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tailscope.ledger.engine_time import EngineTime
from tailscope.ledger.lines import Parts
from tailscope.ledger.membership import Absences, Membership
from tailscope.ledger.requests import Requests
from tailscope.ledger.steps import Place
from tailscope.ledger.unserved import Unserved
from tailscope.stats import Floats, Ints
from tailscope.store import Trace

#: At most this many preemptions of a request are placed in time.
MAX_PREEMPTIONS = 16
#: A gap between tokens of fewer steps is jitter of the client, not a preemption.
MIN_STALL_STEPS = 3


@dataclass(frozen=True)
class Gaps:
    """The longest gaps between preempted requests' tokens, one a preemption, on the engine's clock."""

    rid: Ints
    start_ns: Ints
    end_ns: Ints


def load_gaps(trace: Trace) -> Gaps:
    columns = trace.connection.execute(_GAPS, {"most": MAX_PREEMPTIONS}).fetchnumpy()
    return Gaps(*(np.asarray(columns[name], np.int64) for name in ("rid", "start_ns", "end_ns")))


#: The client has a token as much later as it had the first one.
_GAPS = """
WITH wanted AS (
    SELECT rid, client_key, preemptions,
           client_arrival_ns + client_ttft_ns - (arrival_ns + ttft_ns) AS delay_ns
    FROM joined WHERE preemptions > 0 AND client_key IS NOT NULL AND client_ttft_ns IS NOT NULL
),
gaps AS (
    SELECT w.rid, w.preemptions, w.delay_ns,
           lag(instant(t.time_ns)) OVER (PARTITION BY t.request_key ORDER BY t.seq) AS start_ns,
           instant(t.time_ns) AS end_ns
    FROM tokens t JOIN wanted w ON w.client_key = t.request_key
)
SELECT rid, start_ns - delay_ns AS start_ns, end_ns - delay_ns AS end_ns
FROM gaps WHERE start_ns IS NOT NULL AND end_ns > start_ns
QUALIFY row_number() OVER (PARTITION BY rid ORDER BY end_ns - start_ns DESC, start_ns) <= least(preemptions, $most)
"""


class Stalls:
    """How long each request was given nothing, and what of any other evidence lies in that time.

    Exactly where the schedule was recorded. Else only preemptions in its decode are known: from the gaps between the
    client's tokens where there are any; else from the steps in which the request must have been left out, which says
    how long but not when. `error_ns`: how far off the ends of steps are; None where it is not known that these requests ran
    on this engine, so that nothing can be said of steps that gave them no token.
    """

    def __init__(
        self,
        time: EngineTime,
        requests: Requests,
        gaps: Gaps,
        membership: Membership | None,
        error_ns: float | None = None,
    ) -> None:
        self._time, self._n = time, len(requests.rid)
        self._absences = None if membership is None else Absences(membership)
        told = np.zeros(self._n, bool) if membership is None else membership.complete
        order = np.argsort(requests.rid)
        position = np.clip(np.searchsorted(requests.rid[order], gaps.rid), 0, max(self._n - 1, 0))
        row = order[position] if self._n else np.zeros(len(gaps.rid), np.intp)
        mine = (requests.rid[row] == gaps.rid) & ~told[row] if self._n else np.zeros(len(gaps.rid), bool)
        start_ns, end_ns = gaps.start_ns[mine], gaps.end_ns[mine]
        start, end = Place(time.steps, start_ns), Place(time.steps, end_ns)
        long = time.between(time.count, start, end) >= MIN_STALL_STEPS
        self._row = row[mine][long]
        self._start = Place(time.steps, start_ns[long])
        self._end = Place(time.steps, np.maximum(start_ns, resumption_ns(time, end))[long])
        seen = np.zeros(self._n, bool)
        seen[row[mine]] = True
        self._unseen = np.flatnonzero((requests.preemptions > 0) & ~seen & ~told)
        first_ns = requests.arrival_ns + requests.ttft_ns
        _, _, prefill_ns, decode_ns = requests.phases()
        last_ns = first_ns + decode_ns
        self._unserved: Unserved | None = None
        if error_ns is not None:
            scheduled_ns = np.where(requests.phases_known, first_ns - prefill_ns, first_ns)
            # Who may have been preempted, and whose steps the schedule tells, is judged by neither count.
            preemptions = np.where(told | np.isnan(requests.preemptions), 1.0, requests.preemptions)
            self._unserved = Unserved(
                time, scheduled_ns, first_ns, last_ns, requests.output_tokens, preemptions, error_ns
            )
        self._first, self._last = (
            Place(time.steps, first_ns[self._unseen]),
            Place(time.steps, last_ns[self._unseen]),
        )
        steps = time.between(time.count, self._first, self._last)
        # A request that runs gets a token a step; the steps beyond those are the ones it was left out of.
        left_out = steps - (np.nan_to_num(requests.output_tokens[self._unseen]) - 1)
        self._share = np.where(
            left_out >= MIN_STALL_STEPS, np.clip(left_out / np.maximum(steps, 1.0), 0.0, 1.0), 0.0
        )

    def of(self, sums: Floats, *, decoding: bool) -> Floats:
        """What of a prefix sum lies in each request's stalls before, or after, its first token."""
        result = self._preempted(sums, decoding)
        return result + self._left_out(sums, decoding)

    def _left_out(self, sums: Floats, decoding: bool) -> Floats:
        result = np.zeros(self._n)
        if self._absences is not None:
            result += self._absences.of(sums, decoding=decoding, preempted=False)
        if self._unserved is not None:
            result += self._unserved.of(sums, decoding=decoding)
        return result

    def _preempted(self, sums: Floats, decoding: bool) -> Floats:
        result = np.zeros(self._n)
        if self._absences is not None:
            result += self._absences.of(sums, decoding=decoding, preempted=True)
        if decoding:
            np.add.at(result, self._row, self._time.between(sums, self._start, self._end))
            result[self._unseen] += self._share * self._time.between(sums, self._first, self._last)
        return result

    def parts(self, *, decoding: bool) -> Parts:
        """The stalls: where preempted divided among the classes by the KV cache they held meanwhile, where left out by the
        prefill in these steps."""
        time = self._time
        held = [self._preempted(sums, decoding) for sums in time.held_by]
        parts = by_holder("preempted", self._preempted(time.busy, decoding), held)
        left_out = self._left_out(time.busy, decoding)
        if left_out.any():
            by_class = [self._left_out(sums, decoding) for sums in time.tile_by]
            parts |= {("starved", c): seconds for c, seconds in enumerate(by_class)}
            parts["starved", None] = np.maximum(left_out - np.sum(by_class, axis=0), 0.0)
        return parts


def resumption_ns(time: EngineTime, end: Place) -> Ints:
    """Start of the step that ends at each place: in it a preempted request runs again."""
    last_step = np.clip(end.boundary() - 1, 0, len(time.steps.start_ns) - 1)
    return np.asarray(time.steps.start_ns[last_step])


def by_holder(component: str, seconds: Floats, held: list[Floats]) -> Parts:
    """`seconds` of waiting for KV or slots, divided among the classes in proportion to what they `held`."""
    total = np.sum(held, axis=0) if held else np.zeros(len(seconds))
    some = total > 1e-12
    share = seconds / np.where(some, total, 1.0)
    parts: Parts = {(component, c): np.where(some, share * amount, 0.0) for c, amount in enumerate(held)}
    parts[component, None] = np.where(some, 0.0, seconds)
    return parts
