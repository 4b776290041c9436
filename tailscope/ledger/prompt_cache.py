"""When prompts stopped being found in the prefix cache, and what computing them again cost.

Requests alike (instance, tenant, class) are taken in blocks of time. Where in some blocks most find a common beginning in
the cache and in others few do, the cache lost something; where a share of them never finds anything, in whatever block,
these are prompts of their own. A cache that is still to be filled has lost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.special import bdtr
from scipy.stats import hypergeom

from tailscope.ledger.bills import Ledger
from tailscope.stats import Floats, Ints
from tailscope.store import Trace, floats, schema_of

#: Requests of a block, and most blocks of a group: shares of fewer say little, and more blocks are shorter than an episode.
BLOCK, MOST_BLOCKS = 40, 60
#: Groups of fewer requests have no two blocks.
LEAST = 2 * BLOCK
#: A request found the common beginning where it found half of what nearly all who found something did.
FOUND_SHARE, FOUND_QUANTILE = 0.5, 0.9
#: What is found in a good block: this quantile of the blocks' shares.
GOOD_QUANTILE = 0.85
#: A block is worse where chance makes one so bad this rarely, and the share fell by so much.
CHANCE, FALL = 1e-4, 0.2
#: From this share of their usual rate on those who find something come as ever, and others came on top of them. An episode is
#: longer than its worst blocks, in which by chance few came: those beside them count where the share fell by half as much.
AS_EVER, BESIDE = 0.75, FALL / 2
#: With so much of the cache in use what is not in use is soon thrown out.
PRESSED = 0.8
#: Parts of an instance's time in which the tokens lost are told.
PARTS = 400

LOST = schema_of(
    {
        "id": pa.int64(),
        "lost_tokens": pa.float64(),
        "good": pa.bool_(),
        "own_s": pa.float64(),
    }
)
GROUPS = schema_of(
    {
        "instance": pa.string(),
        "tenant": pa.string(),
        "klass": pa.string(),
        "n": pa.int64(),
        "good_share": pa.float64(),
        "bad_share": pa.float64(),
        "found_tokens": pa.float64(),
        "bad_requests": pa.int64(),
        "lost_tokens": pa.float64(),
        "episodes": pa.int64(),
        "to_the_end": pa.bool_(),
        "others_came": pa.bool_(),
        "good_kv": pa.float64(),
        "bad_kv": pa.float64(),
        "first_ns": pa.int64(),
        "last_ns": pa.int64(),
    }
)


@dataclass(frozen=True)
class Group:
    """Requests alike by arrival, arrays of one length. `kv`: share of the cache in use when each came, NaN if unknown."""

    rid: Ints
    arrival_ns: Ints
    prompt: Floats
    cached: Floats
    kv: Floats


def write_cache_losses(trace: Trace, ledger: Ledger) -> None:
    """Fill `cache_groups`, `cache_lost` and `cache_cost`. After bills.

    cache_groups: of requests alike, the share that finds a common beginning in good blocks and in bad ones.
    cache_lost: of each request in a group, whether it came in a good block, the prompt tokens that it computed and would
    have found there (expected, where not all do), and what computing them took.
    cache_cost: of every billed request, the seconds that computing lost tokens, its own and others', cost it before its
    first token and after it.
    """
    con = trace.connection
    trace.create("cache_groups", GROUPS.empty_table())
    trace.create("cache_lost", LOST.empty_table())
    con.execute(_KNOWN)
    names = con.execute(
        "SELECT instance, tenant, klass FROM cache_known GROUP BY ALL HAVING count(*) >= $least AND max(cached) > 0 ORDER BY ALL",
        {"least": LEAST},
    ).fetchall()
    for instance, tenant, klass in names:
        _write_group(trace, ledger, instance, tenant, klass)
    con.execute(_COST, {"parts": PARTS})


_KNOWN = """
CREATE OR REPLACE TEMP TABLE cache_known AS
WITH usage AS (SELECT instance, end_ns, kv_usage FROM steps WHERE kv_usage IS NOT NULL),
asked AS (
    SELECT rid, instance, tenant, klass, arrival_ns, prompt_tokens::DOUBLE AS prompt, least(cached_tokens, prompt_tokens)::DOUBLE AS cached
    FROM joined WHERE billed AND cached_tokens IS NOT NULL AND prompt_tokens > 0
)
SELECT a.*, u.kv_usage AS kv FROM asked a ASOF LEFT JOIN usage u ON u.instance = a.instance AND u.end_ns <= a.arrival_ns
"""
#: A request waits for all prefill that its steps hold: of it as much is due to tokens lost as they are of the tokens
#: computed in that part of the time.
_COST = """
CREATE OR REPLACE TEMP TABLE cache_cost AS
WITH span AS (
    SELECT instance, min(arrival_ns) AS first_ns, greatest(max(arrival_ns) - min(arrival_ns), 1) / $parts AS part_ns
    FROM cache_known GROUP BY instance
),
placed AS (
    SELECT k.instance, floor((k.arrival_ns - s.first_ns) / s.part_ns)::BIGINT AS part, k.prompt - k.cached AS computed,
           coalesce(l.lost_tokens, 0) AS lost
    FROM cache_known k JOIN span s USING (instance) LEFT JOIN cache_lost l ON l.id = k.rid
),
summed AS (
    SELECT instance, part, sum(lost) AS lost, sum(computed) AS computed FROM placed GROUP BY ALL
),
-- A part may hold the one request that waits for the one before it.
shares AS (
    SELECT instance, part, coalesce(sum(lost) OVER w / nullif(sum(computed) OVER w, 0), 0) AS share
    FROM summed WINDOW w AS (PARTITION BY instance ORDER BY part RANGE BETWEEN 1 PRECEDING AND CURRENT ROW)
),
waits AS (
    SELECT id, coalesce(sum(ns) FILTER (WHERE component IN ('others_prefill_before', 'others_prefill_in_prefill', 'queue_budget')), 0) / 1e9 AS before_s,
           coalesce(sum(ns) FILTER (WHERE component = 'others_prefill_in_decode'), 0) / 1e9 AS decode_s,
           coalesce(sum(ns) FILTER (WHERE component = 'own_prefill'), 0) / 1e9 AS own_s
    FROM bill_lines GROUP BY id
)
SELECT j.rid AS id, least(coalesce(l.own_s, 0), coalesce(w.own_s, 0)) + coalesce(h.share, 0) * coalesce(w.before_s, 0) AS before_s,
       coalesce(h.share, 0) * coalesce(w.decode_s, 0) AS decode_s, coalesce(l.lost_tokens, 0) AS lost_tokens,
       coalesce(l.good, true) AND coalesce(h.share, 0) = 0 AS good
FROM joined j
JOIN span s USING (instance)
LEFT JOIN cache_lost l ON l.id = j.rid
LEFT JOIN shares h ON h.instance = j.instance AND h.part = floor((j.arrival_ns - s.first_ns) / s.part_ns)::BIGINT
LEFT JOIN waits w ON w.id = j.rid
WHERE j.billed
"""


def _load(trace: Trace, instance: str, tenant: str | None, klass: str) -> Group:
    columns = trace.connection.execute(
        "SELECT rid, arrival_ns, prompt, cached, kv FROM cache_known WHERE instance = $instance "
        "AND tenant IS NOT DISTINCT FROM $tenant AND klass = $klass ORDER BY arrival_ns, rid",
        {"instance": instance, "tenant": tenant, "klass": klass},
    ).fetchnumpy()
    arrays: dict[str, Any] = {
        name: np.asarray(values, np.int64) if name in ("rid", "arrival_ns") else floats(values)
        for name, values in columns.items()
    }
    return Group(**arrays)


def _write_group(trace: Trace, ledger: Ledger, instance: str, tenant: str | None, klass: str) -> None:
    g = _load(trace, instance, tenant, klass)
    n = len(g.rid)
    usual = float(
        np.median(g.cached[g.cached >= FOUND_SHARE * np.quantile(g.cached[g.cached > 0], FOUND_QUANTILE)])
    )
    found = g.cached >= FOUND_SHARE * usual
    count = min(n // BLOCK, MOST_BLOCKS)
    block = np.arange(n) * count // n
    good_share, bad = bad_blocks(found, block)
    in_bad = bad[block]
    length = _lengths(g.arrival_ns, block)
    hits = np.bincount(block, weights=found, minlength=count).astype(np.float64)
    share_there = hits / np.bincount(block, minlength=count)
    others_came = False
    if bad.any():
        pressed = (_mean(g.kv[in_bad]) or 0.0) >= PRESSED
        episode = whole(bad, share_there <= good_share - BESIDE)
        # Where the cache is pressed then it may have lost what it had in spite of that.
        others_came = not pressed and as_ever(hits, length, episode)
    lost = np.zeros(n)
    if not others_came:
        # Of those who found nothing in a bad block some would not have in a good one either.
        blame = np.clip((good_share - share_there) / np.maximum(1 - share_there, 1e-9), 0.0, 1.0)
        missing = np.minimum(np.maximum(usual - g.cached, 0.0), g.prompt - g.cached)
        lost = np.where(in_bad & ~found, blame[block] * missing, 0.0)
    linear, square = _token_cost(ledger, instance)
    trace.insert(
        "cache_lost",
        pa.table(
            {
                "id": pa.array(g.rid),
                "lost_tokens": pa.array(lost),
                "good": pa.array(~in_bad),
                "own_s": pa.array(linear * lost + square * lost * lost / 2),
            }
        ),
    )
    where = np.flatnonzero(in_bad)
    episodes = int(bad[0]) + int((np.diff(bad.astype(int)) > 0).sum())
    trace.insert(
        "cache_groups",
        pa.Table.from_pylist(
            [
                {
                    "instance": instance,
                    "tenant": tenant,
                    "klass": klass,
                    "n": n,
                    "good_share": good_share,
                    "bad_share": float(found[in_bad].mean()) if in_bad.any() else None,
                    "found_tokens": usual,
                    "bad_requests": int(in_bad.sum()),
                    "lost_tokens": float(lost.sum()),
                    "episodes": episodes,
                    "to_the_end": bool(bad[-1]),
                    "others_came": others_came,
                    "good_kv": _mean(g.kv[~in_bad]),
                    "bad_kv": _mean(g.kv[in_bad]),
                    "first_ns": int(g.arrival_ns[where[0]]) if len(where) else None,
                    "last_ns": int(g.arrival_ns[where[-1]]) if len(where) else None,
                }
            ],
            schema=GROUPS,
        ),
    )


def bad_blocks(found: NDArray[np.bool_], block: Ints) -> tuple[float, NDArray[np.bool_]]:
    """The share that finds something in good blocks, and which blocks are worse than chance makes them.

    Those before the first good one are the cache's filling. A cache that is not yet full finds more from block to block, now
    and then less by chance: a bad block is worse than the good ones that came before it too, not only than those after it.
    """
    size = np.bincount(block)
    hits = np.bincount(block, weights=found).astype(np.float64)
    share = hits / size
    good = float(np.quantile(share, GOOD_QUANTILE))
    bad = _worse(hits, size, good)
    # The best blocks are so by chance too: those that are not worse are all as good as each other.
    good = float(hits[~bad].sum() / size[~bad].sum())
    bad = _worse(hits, size, good)
    first_good = int(np.argmax(~bad)) if (~bad).any() else len(bad)
    bad[:first_good] = False
    return good, bad & _fell(hits, size, bad)


def _worse(hits: Floats, size: Ints, good: float) -> NDArray[np.bool_]:
    # A share of 1 would make one miss a wonder.
    return np.asarray((bdtr(hits, size, min(good, 0.98)) < CHANCE) & (hits / size <= good - FALL))


def _fell(hits: Floats, size: Ints, bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Blocks that are worse than the good ones before them; the chance is Fisher's, since those may be few."""
    before_hits = np.cumsum(np.where(bad, 0, hits)) - np.where(bad, 0, hits)
    before = np.cumsum(np.where(bad, 0, size)) - np.where(bad, 0, size)
    chance = hypergeom.cdf(hits, size + before, hits + before_hits, size)
    return np.asarray((chance < CHANCE) & (hits / size <= before_hits / np.maximum(before, 1) - FALL))


def _lengths(arrival_ns: Ints, block: Ints) -> Floats:
    """How long each block lasts, in seconds: from its first arrival to the next block's."""
    starts = arrival_ns[np.flatnonzero(np.diff(block, prepend=-1))]
    return np.maximum(np.diff(np.append(starts, arrival_ns[-1] + 1)), 1) / 1e9


def whole(bad: NDArray[np.bool_], worse: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The blocks of `bad` with those next to them, and next to these, that are `worse`."""
    worse = worse | bad
    run = np.cumsum(np.diff(worse, prepend=False) & worse)
    return np.asarray(worse & np.isin(run, run[bad]))


def as_ever(hits: Floats, length_s: Floats, episode: NDArray[np.bool_]) -> bool:
    """Whether in the blocks of an episode those who find something come as often as in the others, so that others came on top
    of them. `hits`: how many found something, by block."""
    usual = hits[~episode].sum() / max(float(length_s[~episode].sum()), 1e-9)
    now = hits[episode].sum() / max(float(length_s[episode].sum()), 1e-9)
    return bool(now >= AS_EVER * usual)


def _mean(values: Floats) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _token_cost(ledger: Ledger, instance: str) -> tuple[float, float]:
    """Seconds that a prompt token costs on an instance, and that each token it attends to adds; 0 where no model is known."""
    costs = [
        t.cost.usual
        for (name, _), t in ledger.times.items()
        if name == instance and t.cost is not None and t.cost.usable
    ]
    if not costs:
        return 0.0, 0.0
    # Engines that step together have a fourth amount: the sum of their tokens.
    linear = float(np.mean([c.prefill[1] + (c.prefill[3] if len(c.prefill) > 3 else 0.0) for c in costs]))
    return linear, float(np.mean([c.prefill[2] for c in costs]))
