"""What the page shows of ranks: who came late and who waited in which step, the phases of each layer, the steps replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tailscope.report.columns import Columns, columns, few_digits, shown_name
from tailscope.report.html import Html, el, table
from tailscope.report.parts import behind, chart, choice, lacking, section
from tailscope.store import Trace
from tailscope.units import clock, seconds

#: Windows of profiles on the page, the longest; ranks of each; columns of steps; layers.
MOST_WINDOWS, MOST_RANKS, MOST_STEPS, MOST_LAYERS = 6, 128, 200, 160


@dataclass
class Window:
    number: int
    about: dict[str, Any]
    ranks: list[dict[str, Any]] = field(default_factory=list)
    #: rank, x, and seconds: waited, alone (all others waited for it), own (of that, by its own work).
    steps: Columns = field(default_factory=dict)
    #: A column is so many steps, or rounds where no step is known.
    each: int = 1
    by_round: bool = False
    phases: Columns = field(default_factory=dict)
    step_count: int = 0
    replay: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        about = self.about
        return f"{about['world']}, {len(about['profiled'])} ranks, from {clock(about['first_ns'])} UTC"


def gather(trace: Trace) -> list[Window]:
    rows = trace.rows(
        'SELECT w."window" AS number, w.world, w.profiled, w.missing, w.first_ns, w.last_ns FROM windows w '
        'WHERE "window" IN (SELECT "window" FROM rank_rounds) ORDER BY last_ns - first_ns DESC, number LIMIT $most',
        {"most": MOST_WINDOWS},
    )
    return [_window(trace, row) for row in sorted(rows, key=lambda row: int(row["number"]))]


def _window(trace: Trace, about: dict[str, Any]) -> Window:
    window = Window(about["number"], about)
    known = {"window": window.number}
    [sizes] = trace.rows(
        "SELECT count(DISTINCT at_step) AS steps, max(round) + 1 AS rounds, max(at_step) + 1 AS beyond FROM rank_rounds "
        'WHERE "window" = $window',
        known,
    )
    window.by_round = not sizes["steps"]
    window.step_count = sizes["steps"]
    span = sizes["rounds"] if window.by_round else sizes["beyond"]
    window.each = max(1, -(-span // MOST_STEPS))
    window.ranks = trace.rows(_RANKS, {**known, "most": MOST_RANKS})
    window.steps = columns(
        trace,
        _STEPS.format(at="round" if window.by_round else "at_step"),
        {**known, "each": window.each, "most": MOST_RANKS},
    )
    window.phases = columns(trace, _PHASES, {**known, "ranks": MOST_RANKS, "layers": MOST_LAYERS})
    [window.replay] = trace.rows(
        "SELECT count(*) AS steps, avg(replayed_ns) / 1e9 AS replayed, avg(no_skew_ns) / 1e9 AS no_skew, avg(usual_transfers_ns) / 1e9 AS usual_transfers, "
        'avg(balanced_ns) / 1e9 AS balanced FROM step_replays WHERE "window" = $window',
        known,
    )
    return window


_RANKS = """
SELECT r.rank, any_value(c.host) AS host, count(*) AS rounds, count(*) FILTER (WHERE is_last) AS last, sum(wait_ns) / 1e9 AS waited, sum(caused_ns) / 1e9 AS alone,
       sum(own_ns) / 1e9 AS own, any_value(c.error_ns) / 1e9 AS clock_error,
       (SELECT sum(saved_ns) / 1e9 FROM rank_costs k WHERE k."window" = $window AND k.rank = r.rank) AS saved
FROM rank_rounds r LEFT JOIN rank_clocks c ON c."window" = r."window" AND c.rank = r.rank
WHERE r."window" = $window AND r.rank < $most GROUP BY r.rank ORDER BY r.rank
"""
_STEPS = """
SELECT rank, {at} // $each AS x, sum(wait_ns) / 1e9 AS waited, sum(caused_ns) / 1e9 AS alone, sum(own_ns) / 1e9 AS own
FROM rank_rounds WHERE "window" = $window AND {at} IS NOT NULL AND rank < $most GROUP BY ALL ORDER BY rank, x
"""
_PHASES = """
SELECT rank, layer, phase, sum(exposed_ns) / 1e9 AS s FROM rank_phases
WHERE "window" = $window AND rank < $ranks AND (layer IS NULL OR layer < $layers) AND step IS NOT NULL GROUP BY ALL ORDER BY phase, rank, layer
"""


def ranks_section(windows: list[Window]) -> Html:
    if not windows:
        return section(
            "ranks",
            "Ranks",
            None,
            lacking(
                "No two ranks were profiled at one time.",
                "torch profiler traces of all ranks (vllm serve --profiler-config, then POST /start_profile and /stop_profile) would show who comes late and who waits.",
            ),
        )
    worst = max(windows, key=lambda w: max((r["own"] or 0.0 for r in w.ranks), default=0.0))
    number = str(windows.index(worst))
    options = [(str(i), w.name) for i, w in enumerate(windows)]
    return section(
        "ranks",
        "Ranks",
        _lead(worst),
        el("div", choice("ranks-window", "Window of profiles", options, number), cls="controls")
        if len(windows) > 1
        else el("input", type="hidden", id="ranks-window", value="0"),
        chart(
            "ranks",
            "Who came late and who waited, by rank and step",
            _says(worst),
            choice(
                "ranks-what",
                "Show",
                [
                    ("waited", "waited for the last to come"),
                    ("alone", "all others waited for it"),
                    ("own", "of that, by its own work"),
                ],
                "waited",
            ),
            height=300,
        ),
        chart(
            "phases",
            "Phases by rank and layer",
            _phase_says(worst),
            choice("phases-what", "Phase", [(p, p) for p in _phases(windows)], _widest(worst)[0]),
            height=300,
        )
        if any(w.phases.get("s") for w in windows)
        else None,
        behind("Numbers behind these charts", [_table(w) for w in windows]),
    )


def _lead(window: Window) -> str:
    about = window.about
    span = seconds((about["last_ns"] - about["first_ns"]) / 1e9)
    steps = f"{window.step_count:,} steps" if window.step_count else "no annotated step"
    text = f"{len(about['profiled'])} ranks profiled for {span}, {steps}."
    if about["missing"]:
        text += f" {about['missing']:,} more ranks of this world were not profiled, and may be the ones that all wait for."
    replay = window.replay
    if replay["steps"] and replay["replayed"] and replay["no_skew"]:
        saved = 1 - replay["no_skew"] / replay["replayed"]
        text += (
            f" Replayed, a step takes {seconds(replay['replayed'])}; if no rank took longer than the others it would take "
            f"{seconds(replay['no_skew'])}, {saved:.0%} less."
        )
    return text


def _says(window: Window) -> str:
    if not window.ranks:
        return ""
    latest = max(window.ranks, key=lambda r: r["own"] or 0.0)
    waited = max(window.ranks, key=lambda r: r["waited"] or 0.0)
    each = (
        ""
        if window.each == 1
        else f" A column is {window.each:,} {'rounds' if window.by_round else 'steps'}."
    )
    if window.by_round:
        each = each or " Columns are collectives, as no step is annotated."
    return (
        f"Rank {waited['rank']} waited most, {seconds(waited['waited'])} in all; rank {latest['rank']} was late by its own work most, "
        f"{seconds(latest['own'])}, and came last in {latest['last'] / max(latest['rounds'], 1):.0%} of {latest['rounds']:,} collectives.{each}"
    )


def _phases(windows: list[Window]) -> list[str]:
    found = {p for w in windows for p in w.phases.get("phase", [])}
    return sorted(found - {"other"}) + (["other"] if "other" in found else [])


def _widest(window: Window) -> tuple[str, float, int]:
    """The phase, collectives apart, in which ranks differ most: its name, by how many seconds, and the rank above the others."""
    by: dict[str, dict[int, float]] = {}
    rows = window.phases
    for phase, rank, s in zip(rows.get("phase", []), rows.get("rank", []), rows.get("s", []), strict=True):
        if phase not in ("dispatch", "combine", "collective"):
            of = by.setdefault(phase, {})
            of[rank] = of.get(rank, 0.0) + (s or 0.0)
    best = ("", 0.0, 0)
    for phase, of in by.items():
        sizes = sorted(of.values())
        apart = sizes[-1] - sizes[len(sizes) // 2 - (len(sizes) % 2 == 0)]
        if apart >= best[1]:
            best = (phase, apart, max(of, key=lambda rank: of[rank]))
    return best


def _phase_says(window: Window) -> str:
    phase, apart, rank = _widest(window)
    base = "Time that a step waited for the phase (exposed), mean of a step."
    if not phase or not window.step_count:
        return base
    return f"{base} Ranks differ most in {phase}: rank {rank} spends {seconds(apart / window.step_count)} a step more in it than the median rank."


def _table(window: Window) -> Html:
    rows = [
        (
            f"rank {r['rank']}",
            r["host"] or "-",
            f"{r['rounds']:,}",
            f"{r['last'] / max(r['rounds'], 1):.0%}",
            seconds(r["waited"]),
            seconds(r["alone"]),
            seconds(r["own"]),
            seconds(r["saved"]),
            seconds(r["clock_error"]),
        )
        for r in window.ranks
    ]
    head = (
        "rank",
        "host",
        "collectives",
        "last",
        "waited",
        "others waited for it",
        "by its own work",
        "steps shorter without",
        "clock error",
    )
    return table(window.name, head, rows, numbers=2)


def data(windows: list[Window]) -> list[dict[str, Any]]:
    return [
        {
            "name": shown_name(w.name),
            "says": _says(w),
            "phase_says": _phase_says(w),
            "ranks": [r["rank"] for r in w.ranks],
            "steps": w.steps,
            "each": w.each,
            "by_round": w.by_round,
            "phases": w.phases,
            "step_count": max(w.step_count, 1),
            "clock_error": few_digits(max((r["clock_error"] or 0.0 for r in w.ranks), default=0.0)),
        }
        for w in windows
    ]
