"""Requests on a timeline: lanes for each instance and class, and in each request its queue, prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tailscope.export.lanes import stacked
from tailscope.export.span import Span
from tailscope.export.timeline import BATCH, Inner, Names, Slices, Tracks, arrow, ints
from tailscope.ledger.requests import parts_known, phases
from tailscope.safe import printable
from tailscope.stats import Ints
from tailscope.store import Trace, floats

#: What a bill calls the parts of a request's life, in order.
PLACES = ("wait", "queue", "prefill", "decode")
#: How the timeline does. The front end's part is before the engine queued it.
SHOWN_AS = ("front end", "queue", "prefill", "decode")
#: Where nobody says what of the time to the first token was queue.
NOT_PARTED = "to first token"
#: Requests by how they ended.
ENDED = ("ok", "error", "timeout", "rejected", "aborted", "unfinished")

_ARGS = (
    "shown(j.request_id) AS request, shown(j.tenant) AS tenant, shown(j.adapter) AS adapter, j.engine, j.priority, j.prompt_tokens, "
    "j.cached_tokens, j.output_tokens, j.preemptions, shown(j.status) AS status"
)


@dataclass
class Requests:
    """Requests in the order of their lanes' groups and starts. `edges`: begin of each place, and the end; equal where it has none."""

    rid: Ints
    track: Ints
    edges: Ints
    name: Ints
    parted: Ints

    def edges_of(self, rids: Ints) -> tuple[Ints, Ints]:
        """Track and edges of some of them."""
        order = np.argsort(self.rid)
        place = order[np.searchsorted(self.rid, rids, sorter=order)]
        return self.track[place], self.edges[place]


def place(trace: Trace, span: Span, tracks: Tracks, names: Names, instances: dict[str, int]) -> Requests:
    """Give each request of the span its lane. `instances`: their tracks, made here where they are missing."""
    con = trace.connection
    groups = trace.rows(
        f"SELECT instance, klass FROM joined WHERE {span.requests} GROUP BY ALL ORDER BY instance, klass",
        span.parameters,
    )
    columns = con.execute(
        "SELECT dense_rank() OVER (ORDER BY instance, klass) - 1 AS grp, rid, arrival_ns AS start_ns, "
        "greatest(coalesce(e2e_ns, ttft_ns, 0), 0) AS e2e_ns, "
        "CASE WHEN ttft_ns BETWEEN 0 AND coalesce(e2e_ns, ttft_ns) THEN ttft_ns ELSE -1 END AS ttft_ns, queue_ns, prefill_ns, "
        f"coalesce(list_position({list(ENDED)}, status), 1) - 1 AS ended "
        f"FROM joined WHERE {span.requests} ORDER BY grp, arrival_ns, rid",
        span.parameters,
    ).fetchnumpy()
    start, e2e, ttft = (ints(columns[name]) for name in ("start_ns", "e2e_ns", "ttft_ns"))
    queue, prefill = floats(columns["queue_ns"]), floats(columns["prefill_ns"])
    lane, group_of_lane = stacked(ints(columns["grp"]), start, start + e2e)
    of_lane = []
    for group in group_of_lane:
        instance, klass = groups[group]["instance"], groups[group]["klass"]
        if instance not in instances:
            instances[instance] = tracks.add(f"instance {printable(instance, 60)}")
        of_lane.append(tracks.add(f"requests {printable(klass, 40)}", instances[instance]))
    timed = ttft >= 0
    lengths = phases(np.maximum(ttft, 0), e2e, queue, prefill)
    edges = start[:, None] + np.cumsum([np.zeros_like(start), *lengths], axis=0).T
    # Without a time to the first token nothing is known of the parts.
    edges[~timed, :] = start[~timed, None]
    outer = np.array([names.of("request" if end == "ok" else f"request: {end}") for end in ENDED], np.int64)
    return Requests(
        ints(columns["rid"]),
        np.asarray(of_lane, np.int64)[lane] if len(lane) else lane,
        np.column_stack([edges, start + e2e]),
        outer[ints(columns["ended"])],
        parts_known(queue, prefill).astype(np.int64),
    )


def slices(trace: Trace, requests: Requests, names: Names) -> Iterator[Slices]:
    """In batches, each request with its parts."""
    con = trace.connection
    con.register("placed_requests", arrow(place=np.arange(len(requests.rid)), rid=requests.rid))
    shown = np.array([names.of(name) for name in SHOWN_AS], np.int64)
    not_parted = names.of(NOT_PARTED)
    reader = con.sql(
        f"SELECT {_ARGS} FROM placed_requests p JOIN joined j ON j.rid = p.rid ORDER BY p.place"
    ).to_arrow_reader(BATCH)
    at = 0
    for batch in reader:
        rows = slice(at, at + len(batch))
        at += len(batch)
        edges = requests.edges[rows]
        inner = []
        for i, name in enumerate(shown):
            start, end = edges[:, i], edges[:, i + 1]
            named = np.full(len(batch), name)
            if PLACES[i] == "prefill":
                named = np.where(requests.parted[rows] > 0, named, not_parted)
            inner.append(Inner(named, start, end, end > start))
        yield Slices(
            requests.track[rows],
            requests.name[rows],
            edges[:, 0],
            edges[:, -1],
            dict(zip(batch.schema.names, batch.columns, strict=True)),
            inner,
        )
    con.unregister("placed_requests")
