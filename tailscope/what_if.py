"""What the profiled steps of a trace, and the token gaps in them, would take if something were otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import prepare
from tailscope.stats import allows_quantile
from tailscope.store import Trace


@dataclass(frozen=True)
class Gaps:
    """Token gaps of a class in the profiled steps: as they are and as they would be, seconds; p99 None where n is too small."""

    klass: str
    n: int
    p50_s: float
    p50_without_s: float
    p99_s: float | None
    p99_without_s: float | None


@dataclass(frozen=True)
class Otherwise:
    """Of a window's steps the mean under a scenario (`rank` where it is about one), and the token gaps."""

    scenario: str
    rank: int | None
    step_s: float
    saved: float
    gaps: tuple[Gaps, ...]


@dataclass(frozen=True)
class OnPath:
    """Share of the steps' critical paths that is a rank's work of a phase, or (rank None) transfers."""

    rank: int | None
    phase: str
    share: float


@dataclass(frozen=True)
class InPhase:
    """Time of a phase in a step of one rank, mean of ranks and steps, seconds: what the step waited for, and what hid behind
    other work."""

    phase: str
    exposed_s: float
    hidden_s: float


@dataclass(frozen=True)
class WindowWhatIf:
    window: int
    world: str
    ranks: tuple[int, ...]
    missing: int
    first_ns: int
    last_ns: int
    steps: int
    step_s: float
    otherwise: tuple[Otherwise, ...]
    path: tuple[OnPath, ...]
    phases: tuple[InPhase, ...]


def what_if(trace: Trace, config: Config, scope: Scope) -> list[WindowWhatIf]:
    """Each window of profiles whose ranks' collectives were found on all of them. Savings are upper bounds: the replay leaves
    out that other batches would have been scheduled."""
    prepare(trace, config, scope)
    windows = trace.rows(
        'FROM windows JOIN (SELECT "window", count(*) AS steps, sum(replayed_ns)::DOUBLE AS replayed, '
        "sum(no_skew_ns)::DOUBLE AS no_skew, sum(usual_transfers_ns)::DOUBLE AS usual, sum(balanced_ns)::DOUBLE AS balanced, "
        'sum(transfer_ns)::DOUBLE AS transfer FROM step_replays GROUP BY "window") USING ("window") ORDER BY "window"'
    )
    return [_window(trace, row) for row in windows if row["replayed"] > 0]


def _window(trace: Trace, row: dict[str, Any]) -> WindowWhatIf:
    number, steps, replayed = {"number": row["window"]}, row["steps"], row["replayed"]
    saved: list[tuple[str, int | None, float]] = [
        ("no skew", None, replayed - row["no_skew"]),
        ("usual transfers", None, replayed - row["usual"]),
        ("balanced experts", None, replayed - row["balanced"]),
    ]
    ranks = trace.rows(
        'SELECT rank, sum(saved_ns)::DOUBLE AS saved FROM rank_costs WHERE "window" = $number GROUP BY rank ORDER BY saved DESC, rank',
        number,
    )
    saved += [("without rank", r["rank"], r["saved"]) for r in ranks]
    gaps: dict[tuple[str, int | None], list[Gaps]] = {}
    for g in trace.rows('FROM what_if WHERE "window" = $number ORDER BY scenario, rank, klass', number):
        enough = allows_quantile(0.99, g["gaps"])
        p99 = (g["p99_s"], g["p99_without_s"]) if enough else (None, None)
        one = Gaps(g["klass"], g["gaps"], g["p50_s"], g["p50_without_s"], *p99)
        gaps.setdefault((g["scenario"], g["rank"]), []).append(one)
    path = trace.rows('FROM rank_path WHERE "window" = $number ORDER BY work_ns DESC, rank, phase', number)
    on_path = [OnPath(p["rank"], p["phase"], p["work_ns"] / replayed) for p in path]
    on_path.append(OnPath(None, "transfer", row["transfer"] / replayed))
    phases = trace.rows(
        "SELECT phase, sum(exposed_ns) / any_value(n.steps) / 1e9 AS exposed_s, sum(hidden_ns) / any_value(n.steps) / 1e9 AS hidden_s "
        'FROM rank_phases, (SELECT count(DISTINCT (rank, step)) AS steps FROM rank_phases WHERE "window" = $number AND step IS NOT NULL) n '
        'WHERE "window" = $number AND step IS NOT NULL GROUP BY phase ORDER BY exposed_s DESC, phase',
        number,
    )
    return WindowWhatIf(
        phases=tuple(InPhase(p["phase"], p["exposed_s"], p["hidden_s"]) for p in phases),
        window=row["window"],
        world=row["world"],
        ranks=tuple(row["profiled"]),
        missing=row["missing"],
        first_ns=row["first_ns"],
        last_ns=row["last_ns"],
        steps=steps,
        step_s=replayed / steps / 1e9,
        otherwise=tuple(
            Otherwise(
                scenario,
                rank,
                (replayed - ns) / steps / 1e9,
                ns / replayed,
                tuple(gaps.get((scenario, rank), ())),
            )
            for scenario, rank, ns in saved
        ),
        path=tuple(sorted(on_path, key=lambda p: -p.share)),
    )
