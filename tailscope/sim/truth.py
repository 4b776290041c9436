"""What each request's time truly went to, from who was in which step and what each step's parts cost.

The components are those of the diagnosis' own ledger (docs/components.md), so that the two can be held against each
other. Beside them: what the same world is without a cause, request by request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.sim.cost import prefill_seconds
from tailscope.sim.outcome import (
    BLOCKED_NAMES,
    DECODE,
    RECOMPUTE,
    EngineOutcome,
    Floats,
    Ints,
    Outcome,
    ns,
)
from tailscope.stats import prefix_sums

#: Component that takes what nothing else does, by place.
RESTS = {"wait": "frontend", "queue": "queue", "prefill": "unexplained", "decode": "unexplained"}


@dataclass(frozen=True)
class Bills:
    """Seconds of each request by (place, component, load that caused it or None): arrays as long as `Requests`.

    Only requests that had their whole answer have a bill (`billed`); the first three places sum to `ttft_s`, all four
    to `e2e_s`, the front end's measures.
    """

    billed: NDArray[np.bool_]
    ttft_s: Floats
    e2e_s: Floats
    lines: Mapping[tuple[str, str, int | None], Floats]

    def component(self, name: str, place: str | None = None) -> Floats:
        """Seconds of a component, whoever caused it."""
        parts = [s for (p, c, _), s in self.lines.items() if c == name and place in (None, p)]
        return np.sum(parts, axis=0) if parts else np.zeros(len(self.billed))


class _Tiles:
    """An engine's time as tiles [end of the step before, end], with prefix sums of what they hold."""

    def __init__(self, engine: EngineOutcome, lane: list[EngineOutcome], load_of: Ints, loads: int) -> None:
        s = engine.steps
        n = len(s)
        before = np.concatenate([[-np.inf], s.end_s[:-1]])
        # What runs straight on, runs on from the end before; a step after an idle time begins when it was made.
        self.start_s = np.maximum(before, np.minimum(s.scheduled_s, s.start_s))
        self.start_s = np.where(
            s.start_s - before > 1.0 + s.end_s - s.start_s, np.maximum(before, s.start_s), self.start_s
        )
        self.end_s = s.end_s
        self.made_s = s.scheduled_s
        host = s.start_s - self.start_s
        #: Prefill tokens of each step by load, and last those that are computed again after a preemption.
        self.tokens_by = np.zeros((loads + 1, n))
        self.requests, self.attention = np.zeros(n), np.zeros(n)
        for r in (other.runs for other in lane):
            prompt = (r.phase != DECODE) & (r.tokens > 0)
            step, tokens = r.first[prompt], r.tokens[prompt]
            kind = np.where(r.phase[prompt] == RECOMPUTE, loads, load_of[r.request[prompt]])
            np.add.at(self.tokens_by, (kind, step), tokens)
            np.add.at(self.requests, step, 1.0)
            np.add.at(self.attention, step, tokens * (r.computed_before[prompt] + tokens / 2))
        self.tokens = self.tokens_by.sum(axis=0)
        rate = s.prefill_s / np.maximum(self.tokens, 1.0)
        self.base = prefix_sums(s.base_s)
        self.prefill_by = [prefix_sums(rate * tokens) for tokens in self.tokens_by[:-1]]
        self.lost = {
            "recompute": prefix_sums(rate * self.tokens_by[-1]),
            "unexplained": prefix_sums(s.chance_s),
            "straggler_wait": prefix_sums(s.straggler_s),
            "slow_transfer": prefix_sums(s.transfer_s),
            "host_gap": prefix_sums(host),
            "pause": prefix_sums(s.pause_s),
        }
        self.whole = prefix_sums(self.end_s - self.start_s)

    def place(self, times: Floats) -> tuple[Ints, Floats]:
        """Tile and share of it that is over, of each instant; idle time belongs to the end of the tile before."""
        index = np.searchsorted(self.start_s, times, side="right") - 1
        inside = np.maximum(index, 0)
        length = np.maximum(self.end_s[inside] - self.start_s[inside], 1e-12)
        share = np.clip((times - self.start_s[inside]) / length, 0.0, 1.0)
        return inside, np.where(index < 0, 0.0, share)

    def between(self, sums: Floats, start: Floats, end: Floats) -> Floats:
        (i, a), (k, b) = self.place(start), self.place(end)
        width = np.diff(sums)
        return np.asarray(np.maximum(sums[k] + b * width[k] - sums[i] - a * width[i], 0.0))


def bills(outcome: Outcome) -> Bills:
    """The true bill of every request that was answered in full."""
    q = outcome.requests
    n, loads = len(q), len(outcome.scenario.loads)
    billed = np.isfinite(q.finished_s) & np.isfinite(q.first_token_s) & (q.engine >= 0)
    ttft, e2e = q.first_shown_s - q.arrival_s, q.last_shown_s - q.arrival_s
    lines: dict[tuple[str, str, int | None], Floats] = {}
    for place, engine in enumerate(outcome.engines):
        mine = np.flatnonzero(billed & (q.engine == place))
        if len(mine) and len(engine.steps):
            _Booked(outcome, engine, mine, loads, lines, n).book()
    spans = {
        "wait": ttft - (q.first_token_s - q.queued_s),
        "queue": q.scheduled_s - q.queued_s,
        "prefill": q.first_token_s - q.scheduled_s,
        "decode": e2e - ttft,
    }
    for where, whole in spans.items():
        given = np.sum([s for (p, _, _), s in lines.items() if p == where] or [np.zeros(n)], axis=0)
        rest = np.where(billed, whole - given, 0.0)
        key = (where, RESTS[where], None)
        lines[key] = lines.get(key, np.zeros(n)) + np.maximum(rest, 0.0)
        # Rounding of interpolated parts must not make more than there was.
        scale = np.where(rest < 0, whole / np.maximum(given, 1e-12), 1.0)
        for other in [k for k in lines if k[0] == where and k != key]:
            lines[other] = lines[other] * scale
    return Bills(billed, ttft, e2e, {key: s for key, s in lines.items() if s.any()})


class _Booked:
    """Books the requests `mine` of one engine into `lines`."""

    def __init__(
        self,
        outcome: Outcome,
        engine: EngineOutcome,
        mine: Ints,
        loads: int,
        lines: dict[tuple[str, str, int | None], Floats],
        n: int,
    ) -> None:
        self.q, self.engine, self.mine, self.loads, self.lines, self.n = (
            outcome.requests, engine, mine, loads, lines, n,
        )  # fmt: skip
        self.cost = outcome.scenario.cost
        lockstep = outcome.scenario.engine.moe
        lane = [e for e in outcome.engines if e is engine or (lockstep and e.instance == engine.instance)]
        self.tiles = _Tiles(engine, lane, self.q.load, loads)

    def add(self, place: str, component: str, culprit: int | None, requests: Ints, seconds: Floats) -> None:
        column = self.lines.setdefault((place, component, culprit), np.zeros(self.n))
        np.add.at(column, requests, seconds)

    def book(self) -> None:
        self._wait()
        self._queue()
        self._prefill()
        self._decode()

    def _wait(self) -> None:
        """From the engine's input queue to the scheduler's: behind the step that runs."""
        q, mine = self.q, self.mine
        self._spread("wait", "step_wait", "others_prefill_before", q.input_s[mine], q.queued_s[mine])

    def _spread(self, place: str, base: str, prefill: str, start: Floats, end: Floats) -> None:
        t = self.tiles
        self.add(place, base, None, self.mine, t.between(t.base, start, end))
        for load, sums in enumerate(t.prefill_by):
            self.add(place, prefill, load, self.mine, t.between(sums, start, end))
        for name, sums in t.lost.items():
            self.add(place, name, None, self.mine, t.between(sums, start, end))

    def _queue(self) -> None:
        """Its KV cache on the way; else what kept the head of the queue out, from each making of a batch to the next."""
        q, t, mine, s = self.q, self.tiles, self.mine, self.engine.steps
        next_s = np.concatenate([t.made_s[1:], [t.end_s[-1]]])
        length = np.maximum(next_s - t.made_s, 0.0)
        handed = np.isfinite(q.fetched_s[mine])
        for reason in ("budget", "kv", "slots"):
            blocked = np.isin(s.blocked, [i for i, name in enumerate(BLOCKED_NAMES) if name == reason])
            sums = prefix_sums(np.where(blocked, length, 0.0))

            def until(times: Floats, sums: Floats = sums) -> Floats:
                made = np.searchsorted(t.made_s, times, side="right") - 1
                return np.asarray(sums[np.clip(made, 0, None)])

            kept = until(q.scheduled_s[mine]) - until(q.queued_s[mine])
            kept -= np.where(handed, until(q.fetched_s[mine]) - until(q.fetch_s[mine]), 0.0)
            self.add("queue", f"queue_{reason}", None, mine, np.maximum(kept, 0.0))
        self.add("queue", "kv_handoff", None, mine[handed], (q.fetched_s - q.fetch_s)[mine[handed]])

    def _prefill(self) -> None:
        q, t, mine = self.q, self.tiles, self.mine
        last_tile = np.searchsorted(t.end_s, q.first_token_s[mine], side="left")
        chunks = self._chunks(last_tile)
        own_first = np.full(self.n, np.iinfo(np.int64).max)
        np.minimum.at(own_first, chunks.request, chunks.step)
        # Before its first chunk a request waits behind steps that were made before it.
        lead_end = np.minimum(
            t.start_s[np.minimum(own_first[mine], len(t.start_s) - 1)], q.first_token_s[mine]
        )
        self._spread(
            "prefill",
            "own_prefill",
            "others_prefill_in_prefill",
            q.scheduled_s[mine],
            np.maximum(lead_end, q.scheduled_s[mine]),
        )
        self._own(chunks)
        # Steps after its first chunk in which it was not: preempted, or left out.
        inside = np.zeros(self.n)
        np.add.at(inside, chunks.request, np.diff(t.whole)[chunks.step])
        out = q.first_token_s[mine] - np.maximum(lead_end, q.scheduled_s[mine]) - inside[mine]
        preempted = q.preemptions[mine] > 0
        self.add("prefill", "preempted", None, mine, np.where(preempted, np.maximum(out, 0.0), 0.0))
        self.add("prefill", "starved", None, mine, np.where(preempted, 0.0, np.maximum(out, 0.0)))

    def _chunks(self, last_tile: Ints) -> _Chunks:
        """The prefill chunks up to the first token."""
        r = self.engine.runs
        until = np.full(self.n, -1)
        until[self.mine] = last_tile
        chosen = (r.phase != DECODE) & (r.tokens > 0) & (r.first <= until[r.request])
        return _Chunks(r.request[chosen], r.first[chosen], r.tokens[chosen], r.computed_before[chosen])

    def _own(self, chunks: _Chunks) -> None:
        """In the steps of its own chunks: what they would have cost with its prefill alone, and what the others added."""
        t, s = self.tiles, self.engine.steps
        attention = chunks.tokens * (chunks.before + chunks.tokens / 2)
        alone = prefill_seconds(self.cost, chunks.tokens, 1, attention)
        step = chunks.step
        everyone = t.tokens[step]
        modelled = prefill_seconds(self.cost, everyone, t.requests[step], t.attention[step])
        own = np.minimum(s.prefill_s[step], s.prefill_s[step] * alone / np.maximum(modelled, 1e-15))
        others = s.prefill_s[step] - own
        self.add("prefill", "own_prefill", None, chunks.request, own + np.diff(t.base)[step])
        left = np.maximum(everyone - chunks.tokens, 1e-9)
        for kind, tokens_of in enumerate(t.tokens_by):
            mine = np.where(self.q.load[chunks.request] == kind, chunks.tokens, 0)
            part = others * np.minimum(np.maximum(tokens_of[step] - mine, 0.0) / left, 1.0)
            if kind < self.loads:
                self.add("prefill", "others_prefill_in_prefill", kind, chunks.request, part)
            else:
                self.add("prefill", "recompute", None, chunks.request, part)
        for name, sums in t.lost.items():
            if name != "recompute":
                self.add("prefill", name, None, chunks.request, np.diff(sums)[step])

    def _decode(self) -> None:
        """Steps it decoded in, or was computed again; the rest of its time between first and last token it was out: preempted,
        or left out."""
        q, t, r, mine = self.q, self.tiles, self.engine.runs, self.mine
        answering = np.full(self.n, np.iinfo(np.int64).max)
        answering[mine] = np.searchsorted(t.end_s, q.first_token_s[mine], side="left")
        chosen = (r.tokens > 0) & ((r.phase == DECODE) | (r.first > answering[r.request]))
        chosen &= answering[r.request] < np.iinfo(np.int64).max
        request, first, beyond = r.request[chosen], r.first[chosen], r.last[chosen] + 1
        self.add("decode", "decode", None, request, t.base[beyond] - t.base[first])
        for load, sums in enumerate(t.prefill_by):
            self.add("decode", "others_prefill_in_decode", load, request, sums[beyond] - sums[first])
        for name, sums in t.lost.items():
            self.add("decode", name, None, request, sums[beyond] - sums[first])
        inside = np.zeros(self.n)
        np.add.at(inside, request, t.whole[beyond] - t.whole[first])
        out = np.maximum(q.last_token_s[mine] - q.first_token_s[mine] - inside[mine], 0.0)
        zero = np.zeros(self.n, bool)
        zero[r.request[(r.tokens == 0) & (r.phase == DECODE)]] = True
        starved = zero[mine] & (q.preemptions[mine] == 0)
        self.add("decode", "starved", None, mine, np.where(starved, out, 0.0))
        self.add("decode", "preempted", None, mine, np.where(starved, 0.0, out))


@dataclass(frozen=True)
class _Chunks:
    request: Ints
    step: Ints
    tokens: Ints
    before: Ints


def table(outcome: Outcome, made: Bills) -> pa.Table:
    """The bills as rows (request_id, answer, place, component, culprit load, ns), lines of 0 left out."""
    names = [load.name for load in outcome.scenario.loads]
    ids = np.array(outcome.requests.id, dtype=object)
    answer = outcome.requests.answers()
    empty = pa.array([], pa.string())
    parts: list[pa.Table] = [
        pa.table(
            {
                "request_id": empty,
                "answer": pa.array([], pa.int64()),
                "place": empty,
                "component": empty,
                "culprit": empty,
                "ns": pa.array([], pa.int64()),
            }
        )
    ]
    for (place, component, culprit), seconds in made.lines.items():
        some = np.flatnonzero(np.round(seconds * 1e9) > 0)
        parts.append(
            pa.table(
                {
                    "request_id": pa.array(ids[some], pa.string()),
                    "answer": pa.array(answer[some]),
                    "place": pa.array([place] * len(some), pa.string()),
                    "component": pa.array([component] * len(some), pa.string()),
                    "culprit": pa.array(
                        [None if culprit is None else names[culprit]] * len(some), pa.string()
                    ),
                    "ns": pa.array(ns(seconds[some], 0)),
                }
            )
        )
    return pa.concat_tables(parts)
