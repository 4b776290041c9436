"""Fills the tables that say how a trace's experts are loaded, and how long the ranks worked in them.

`expert_sets`: a row per recording of experts' tokens (by instance), with how uneven they are by expert and by rank, how
fast that moves, and what another placement would give on later windows than those it was fitted to. `expert_rank_loads`:
each rank's load in each layer over an even share. `expert_work`: the ranks' work between dispatch and combine, and the
tokens it was for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from tailscope.align import Scope, sql_of
from tailscope.ranks.placement import (
    Floats,
    Gain,
    by_chance,
    max_over_mean,
    movement,
    scored_ahead,
    usual_by_chance,
)
from tailscope.store import Trace, schema_of

#: Windows of equally many steps that loads are followed over, at most, and the tokens an expert must have in each on
#: average: with 64 chance moves it by an eighth.
MOST_WINDOWS, TOKENS_A_WINDOW = 12, 64
#: More layers and experts than any model has; what is numbered higher is none.
MOST_LAYERS, MOST_EXPERTS = 512, 4_096
#: Tokens that are believed of one row, and of a sum: what is more cannot be counted one by one any more, or in a BIGINT.
MOST_TOKENS, MOST_SUM = 1 << 44, 1 << 53
#: Spare slots on each rank, beyond those there are, that a placement is tried with: each holds one more expert a layer.
MORE_SPARE = (0, 1, 2)
#: Routing that is even would look so uneven in fewer than one of a hundred recordings.
CHANCE = 0.01
#: Passes of which the spread by chance is computed.
MOST_PASSES = 2_000

_GAIN = schema_of(
    {
        "spare": pa.int64(),
        "before": pa.float64(),
        "after": pa.float64(),
        "after_age": pa.list_(pa.float64()),
    }
)
_SETS = schema_of(
    {
        "set": pa.int64(),
        "instance": pa.string(),
        "kind": pa.string(),
        "placement": pa.string(),
        "ranks_from": pa.string(),
        "experts": pa.int64(),
        "spare": pa.int64(),
        "layers": pa.int64(),
        "ranks": pa.int64(),
        "steps": pa.int64(),
        "windows": pa.int64(),
        "tokens": pa.int64(),
        "expert_ratio_median": pa.float64(),
        "expert_ratio": pa.float64(),
        "expert_by_chance": pa.float64(),
        "expert_layer": pa.int64(),
        "expert": pa.int64(),
        "rank_ratio": pa.float64(),
        "rank_ratio_worst": pa.float64(),
        "rank_by_chance": pa.float64(),
        "rank_layer": pa.int64(),
        "rank": pa.int64(),
        "pass_ratio": pa.float64(),
        "pass_by_chance": pa.float64(),
        "correlation": pa.list_(pa.float64()),
        "overlap": pa.list_(pa.float64()),
        "gains": pa.list_(pa.struct(list(_GAIN))),
    }
)
_RANK_LOADS = schema_of(
    {
        "instance": pa.string(),
        "layer": pa.int64(),
        "rank": pa.int64(),
        "load": pa.float64(),
    }
)

#: Tokens by step: counts by slot are of all forward passes in one numbering, sums of each recording in its own.
_COUNTS = f"""
CREATE OR REPLACE TEMP TABLE expert_counts AS
SELECT coalesce(instance, '') AS instance, slot IS NOT NULL AS by_slot, CASE WHEN slot IS NULL THEN recorded_ns END AS recording,
       step, rank AS counted_by, layer, expert, slot, tokens
FROM expert_load
WHERE tokens BETWEEN 0 AND {MOST_TOKENS} AND layer BETWEEN 0 AND {MOST_LAYERS - 1} AND ($instance IS NULL OR instance = $instance)
  AND coalesce(slot, expert) BETWEEN 0 AND {MOST_EXPERTS - 1} AND coalesce(expert, 0) BETWEEN 0 AND {MOST_EXPERTS - 1}
"""
_STEPS = """
CREATE OR REPLACE TEMP TABLE expert_steps AS
SELECT instance, by_slot, recording, step,
       row_number() OVER (PARTITION BY instance, by_slot ORDER BY recording, step) - 1 AS nth
FROM (SELECT DISTINCT instance, by_slot, recording, step FROM expert_counts)
"""
_FOUND = """
SELECT c.instance, c.by_slot, s.steps, max(c.layer) + 1 AS layers, max(c.expert) + 1 AS experts, max(c.slot) + 1 AS slots,
       sum(c.tokens) AS tokens, count(DISTINCT c.layer) AS used_layers, count(*) FILTER (WHERE c.expert IS NULL) AS unplaced,
       count(DISTINCT c.counted_by) AS counting, max(c.counted_by)::HUGEINT + 1 AS counting_to
FROM expert_counts c
JOIN (SELECT instance, by_slot, count(*) AS steps FROM expert_steps GROUP BY ALL) s USING (instance, by_slot)
GROUP BY ALL HAVING sum(c.tokens) > 0 ORDER BY c.instance, c.by_slot
"""
_IN_WINDOWS = """
SELECT s.nth * $windows // $steps AS part, c.layer, {place} AS place, sum(c.tokens) AS tokens
FROM expert_counts c JOIN expert_steps s
  ON s.instance = c.instance AND s.by_slot = c.by_slot AND s.recording IS NOT DISTINCT FROM c.recording
     AND s.step IS NOT DISTINCT FROM c.step
WHERE c.instance = $instance AND c.by_slot = $by_slot AND {place} IS NOT NULL
GROUP BY ALL
"""
_PASSES = """
SELECT sum(tokens)::DOUBLE AS tokens, max(tokens)::DOUBLE AS most
FROM (SELECT recording, step, layer, {place} // $each AS holder, sum(tokens) AS tokens FROM expert_counts
      WHERE instance = $instance AND by_slot = $by_slot GROUP BY ALL)
GROUP BY recording, step, layer HAVING sum(tokens) > 0
"""
#: `sglang:eplb_gpu_physical_count` is a histogram by its form alone: its buckets are the ranks, what they count is tokens.
_SCRAPED = """
WITH of_layers AS (
    SELECT DISTINCT series, TRY_CAST(labels['layer'] AS BIGINT) AS layer FROM series WHERE name = 'sglang:eplb_gpu_physical_count'
),
samples AS (
    SELECT coalesce(m.instance, '') AS instance, o.layer, m.series, m.time_ns, m.counts
    FROM metrics m JOIN of_layers o USING (series)
    WHERE m.counts IS NOT NULL AND o.layer BETWEEN 0 AND $most_layers AND len(m.counts) BETWEEN 3 AND $most_ranks
      AND ($instance IS NULL OR m.instance = $instance)
      AND ($from_ns IS NULL OR m.time_ns >= $from_ns) AND ($to_ns IS NULL OR m.time_ns < $to_ns)
)
SELECT instance, layer, series, len(arg_max(counts, time_ns)) AS buckets, count(*) AS samples, arg_max(counts, time_ns) AS last,
       arg_min(counts, time_ns) AS first
FROM samples GROUP BY instance, layer, series ORDER BY instance, layer, series
"""


@dataclass
class _Set:
    """Experts' tokens of one instance. `loads`: windows x layers x logical experts, `by_rank`: windows x layers x ranks."""

    row: dict[str, Any]
    loads: Floats | None = None
    by_rank: Floats | None = None


def write_expert_loads(trace: Trace, scope: Scope) -> None:
    """Fill the tables. Counts are added up in SQL, so what is in memory does not grow with the steps."""
    trace.connection.execute(_COUNTS, {"instance": scope.instance})
    trace.connection.execute(_STEPS)
    sets = [_recorded(trace, found) for found in trace.rows(_FOUND)] + _scraped(trace, scope)
    rows: list[dict[str, Any]] = []
    by_rank: list[dict[str, Any]] = []
    for number, one in enumerate(sets):
        rows.append({"set": number, **one.row, **_judged(one)})
        # Where slots and logical experts were both recorded, slots say more.
        if one.by_rank is not None and all(known["instance"] != one.row["instance"] for known in by_rank):
            by_rank += _rank_rows(one.row["instance"], one.by_rank.sum(axis=0))
    trace.create("expert_sets", pa.Table.from_pylist(rows, schema=_SETS))
    trace.create("expert_rank_loads", pa.Table.from_pylist(by_rank, schema=_RANK_LOADS))
    trace.connection.execute(sql_of(__package__, "expert_work"))
    trace.connection.execute("DROP TABLE expert_counts; DROP TABLE expert_steps")


def _recorded(trace: Trace, found: dict[str, Any]) -> _Set:
    """What one instance's rows of `expert_load` hold."""
    by_slot, slots = found["by_slot"], found["slots"]
    # With some slots' experts unknown, nothing is known of experts; with slots, of logical ones.
    experts = None if found["unplaced"] else found["experts"]
    places = slots if by_slot else found["experts"]
    fitting = int(found["tokens"]) // (found["used_layers"] * places * TOKENS_A_WINDOW)
    windows = max(1, min(fitting, MOST_WINDOWS, found["steps"]))
    key = {"instance": found["instance"], "by_slot": by_slot}
    parameters = {**key, "windows": windows, "steps": found["steps"]}

    def array(place: str, size: int) -> Floats:
        rows = trace.connection.execute(_IN_WINDOWS.format(place=f"c.{place}"), parameters).fetchnumpy()
        shape = (windows, int(found["layers"]), size)
        filled = np.zeros(shape)
        where = tuple(np.asarray(rows[name], np.int64) for name in ("part", "layer", "place"))
        filled[where] = np.asarray(rows["tokens"], np.float64)
        return filled

    loads = array("expert", experts) if experts else None
    in_slots = array("slot", slots) if by_slot else loads
    ranks, ranks_from = _ranks(trace, found, places)
    row: dict[str, Any] = {
        "instance": found["instance"],
        "kind": "slots" if by_slot else "experts",
        "experts": experts,
        "spare": slots - experts if by_slot and experts else 0 if experts else None,
        "layers": found["used_layers"],
        "ranks": ranks,
        "ranks_from": ranks_from,
        "placement": None if ranks is None else "recorded" if by_slot else "contiguous",
        "steps": found["steps"],
        "windows": windows,
        "tokens": int(found["tokens"]) if found["tokens"] <= MOST_SUM else None,
    }
    by_rank = None
    if ranks and in_slots is not None:
        by_rank = in_slots.reshape(*in_slots.shape[:2], ranks, -1).sum(axis=-1)
        passes = trace.connection.execute(
            _PASSES.format(place="slot" if by_slot else "expert"), {**key, "each": places // ranks}
        ).fetchnumpy()
        row |= _by_pass(
            np.asarray(passes["tokens"], np.float64), np.asarray(passes["most"], np.float64), ranks
        )
    return _Set(row, loads, by_rank)


def _ranks(trace: Trace, found: dict[str, Any], places: int) -> tuple[int | None, str | None]:
    """How many ranks the experts are on: those that counted, if all did, else those that the profiles show."""
    if found["by_slot"] and found["counting"] == found["counting_to"] and found["counting"] > 1:
        count, source = int(found["counting"]), "recorded"
    else:
        [told] = trace.rows(
            "SELECT max(greatest(coalesce(ep, 0)::HUGEINT + 1, coalesce(world_size, 0))) AS ranks FROM profiles "
            "WHERE coalesce(instance, '') = $instance",
            {"instance": found["instance"]},
        )
        count, source = told["ranks"] or 0, "profiles"
    return (count, source) if count > 1 and places % count == 0 else (None, None)


def _by_pass(tokens: Floats, most: Floats, ranks: int) -> dict[str, float]:
    """Busiest rank over the mean in each pass and layer, summed over all; and what chance alone makes of it."""
    if len(tokens) > MOST_PASSES:
        some = np.linspace(0, len(tokens) - 1, MOST_PASSES).astype(np.int64)
        tokens, most = tokens[some], most[some]
    usual = usual_by_chance(tokens, ranks) * tokens / ranks
    even = tokens.sum() / ranks
    return {"pass_ratio": float(most.sum() / even), "pass_by_chance": float(usual.sum() / even)}


def _scraped(trace: Trace, scope: Scope) -> list[_Set]:
    """Tokens by rank and layer that a server counts in its metrics: what was added between the first scrape and the last."""
    rows = trace.rows(
        _SCRAPED,
        {
            "instance": scope.instance,
            "from_ns": scope.from_ns,
            "to_ns": scope.to_ns,
            "most_layers": MOST_LAYERS - 1,
            "most_ranks": MOST_EXPERTS,
        },
    )
    sets = []
    for instance in dict.fromkeys(row["instance"] for row in rows):
        mine = [row for row in rows if row["instance"] == instance]
        ranks = max(row["buckets"] for row in mine) - 1  # the last bucket is +Inf
        tokens = np.zeros((1, max(row["layer"] for row in mine) + 1, ranks))
        for row in mine:
            if row["buckets"] - 1 == ranks:
                last, first = np.array(row["last"], np.float64), np.array(row["first"], np.float64)
                # A counter that fell was set to zero by a restart.
                since = last - first if row["samples"] > 1 and (last >= first).all() else last
                # What is no number, or beyond all counts, says nothing.
                if not (np.abs(since) <= MOST_TOKENS).all():
                    continue
                tokens[0, row["layer"]] += np.maximum(np.diff(since[:-1], prepend=0.0), 0.0)
        if tokens.sum() > 0:
            used = int((tokens.sum(axis=2) > 0).sum())
            row = {
                "instance": instance,
                "kind": "metrics",
                "layers": used,
                "ranks": ranks,
                "ranks_from": "recorded",
            }
            row |= {"placement": "recorded", "windows": 1, "tokens": int(tokens.sum())}
            sets.append(_Set(row, None, tokens))
    return sets


def _judged(one: _Set) -> dict[str, Any]:
    judged: dict[str, Any] = {}
    if one.loads is not None:
        total = one.loads.sum(axis=0)
        layer, expert = _hottest(total)
        ratios = max_over_mean(total)
        judged |= {
            "expert_ratio_median": float(np.nanmedian(ratios)),
            "expert_ratio": float(ratios[layer]),
            "expert_by_chance": _chance(total, layer),
            "expert_layer": layer,
            "expert": expert,
        }
        moved = movement(one.loads)
        if moved:
            judged |= {"correlation": list(moved.correlation), "overlap": list(moved.overlap)}
    if one.by_rank is not None:
        total = one.by_rank.sum(axis=0)
        layer, rank = _hottest(total)
        judged |= {
            "rank_ratio": float(total.max(axis=1).sum() / total.mean(axis=1).sum()),
            "rank_ratio_worst": float(max_over_mean(total)[layer]),
            "rank_by_chance": _chance(total, layer),
            "rank_layer": layer,
            "rank": rank,
        }
    if one.loads is not None and one.by_rank is not None:
        judged["gains"] = [
            {"spare": g.spare, "before": g.before, "after": g.after, "after_age": list(g.after_age)}
            for g in _gains(one.loads, one.by_rank, one.row["spare"])
        ]
    return judged


def _hottest(total: Floats) -> tuple[int, int]:
    """(layer, place) of the load furthest above its layer's mean."""
    layer = int(np.nanargmax(max_over_mean(total)))
    return layer, int(np.argmax(total[layer]))


def _chance(total: Floats, layer: int) -> float:
    layers = int((total.sum(axis=1) > 0).sum())
    return float(by_chance(total[layer].sum(), total.shape[1], CHANCE, layers))


def _gains(loads: Floats, by_rank: Floats, now: int) -> list[Gain]:
    """With the spare slots there are, at least those that spread the experts evenly, and with one and two more on each rank."""
    ranks, experts = by_rank.shape[2], loads.shape[2]
    least = max(now, 0) + -(experts + max(now, 0)) % ranks
    tried = (scored_ahead(loads, by_rank.max(axis=2), ranks, least + more * ranks) for more in MORE_SPARE)
    return [gain for gain in tried if gain]


def _rank_rows(instance: str, total: Floats) -> list[dict[str, Any]]:
    mean = total.mean(axis=1)
    return [
        {"instance": instance, "layer": layer, "rank": rank, "load": float(total[layer, rank] / mean[layer])}
        for layer in np.flatnonzero(mean > 0).tolist()
        for rank in range(total.shape[1])
    ]
