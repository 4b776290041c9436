"""What the page shows of experts: their tokens by layer, the ranks' load by layer, and the ranks' work in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tailscope.ranks.experts import MOST_TOKENS
from tailscope.report.columns import few_digits, shown_name
from tailscope.report.html import Html, table
from tailscope.report.parts import behind, chart, choice, lacking, section
from tailscope.store import Trace
from tailscope.units import amount, seconds

MOST_GRIDS, MOST_LAYERS, MOST_PLACES = 12, 160, 512


@dataclass
class Grid:
    """A number for each layer and expert, or layer and rank."""

    name: str
    #: expert or rank.
    of: str
    unit: str
    layers: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    #: By layer, then place; None where nothing was counted.
    z: list[list[Any]] = field(default_factory=list)

    @property
    def hottest(self) -> tuple[float, int, int]:
        """(value, layer, place)."""
        cells = [
            (value, self.layers[i], self.places[j])
            for i, row in enumerate(self.z)
            for j, value in enumerate(row)
            if value is not None
        ]
        return max(cells, default=(0.0, 0, 0))


LOAD = "times an even share"


def gather(trace: Trace) -> list[Grid]:
    """Loads over an even share of the layer, and work in seconds. Of experts both by slot and by number, by number."""
    grids = []
    for row in trace.rows(
        "SELECT DISTINCT coalesce(instance, '') AS instance FROM expert_load ORDER BY 1 LIMIT 4"
    ):
        cells = trace.rows(
            """
            WITH counted AS (
                SELECT layer, expert AS place, sum(tokens)::DOUBLE AS tokens FROM expert_load
                WHERE coalesce(instance, '') = $instance AND layer BETWEEN 0 AND $layers AND expert BETWEEN 0 AND $places
                  AND tokens BETWEEN 0 AND $most AND (slot IS NULL) = NOT EXISTS (
                      FROM expert_load WHERE coalesce(instance, '') = $instance AND slot IS NOT NULL AND expert IS NOT NULL)
                GROUP BY ALL
            )
            SELECT layer, place, tokens / nullif(sum(tokens) OVER (PARTITION BY layer), 0) * (SELECT max(place) + 1 FROM counted) AS value
            FROM counted ORDER BY layer, place
            """,
            {
                "instance": row["instance"],
                "layers": MOST_LAYERS - 1,
                "places": MOST_PLACES - 1,
                "most": MOST_TOKENS,
            },
        )
        grids.append(_grid(f"experts of {row['instance'] or 'the trace'}", "expert", LOAD, cells))
    loads = trace.rows(
        "SELECT instance, layer, rank AS place, load AS value FROM expert_rank_loads WHERE layer < $layers AND rank < $places ORDER BY ALL",
        {"layers": MOST_LAYERS, "places": MOST_PLACES},
    )
    for instance in dict.fromkeys(row["instance"] for row in loads):
        mine = [row for row in loads if row["instance"] == instance]
        grids.append(_grid(f"ranks of {instance or 'the trace'}", "rank", LOAD, mine))
    work = trace.rows(
        'SELECT "window" AS number, layer, rank AS place, sum(tokens)::DOUBLE AS tokens, median(work_ns) / 1e9 AS s, bool_or(recorded) AS recorded '
        "FROM expert_work WHERE layer IS NOT NULL AND layer < $layers AND rank < $places GROUP BY ALL ORDER BY ALL",
        {"layers": MOST_LAYERS, "places": MOST_PLACES},
    )
    for number in dict.fromkeys(row["number"] for row in work):
        mine = [row for row in work if row["number"] == number]
        told = [row for row in mine if row["tokens"] and not row["recorded"]]
        sums: dict[int, float] = {}
        for row in told:
            sums[row["layer"]] = sums.get(row["layer"], 0.0) + row["tokens"]
        ranks = len({row["place"] for row in told})
        shares = [
            {**row, "value": row["tokens"] / sums[row["layer"]] * ranks} for row in told if sums[row["layer"]]
        ]
        if shares:
            grids.append(_grid(f"ranks by their dispatches, window {number}", "rank", LOAD, shares))
        grids.append(
            _grid(
                f"ranks' expert work, window {number}",
                "rank",
                "s",
                [{**row, "value": row["s"]} for row in mine],
            )
        )
    return [grid for grid in grids if grid.z][:MOST_GRIDS]


def _grid(name: str, of: str, unit: str, cells: list[dict[str, Any]]) -> Grid:
    layers = sorted({c["layer"] for c in cells})
    places = (
        list(range(max((c["place"] for c in cells), default=-1) + 1))
        if of == "expert"
        else sorted({c["place"] for c in cells})
    )
    row_of, column_of = {n: i for i, n in enumerate(layers)}, {n: i for i, n in enumerate(places)}
    # A load of nothing is left out of recordings.
    empty = 0 if unit == LOAD else None
    z: list[list[Any]] = [[empty] * len(places) for _ in layers]
    for c in cells:
        z[row_of[c["layer"]]][column_of[c["place"]]] = (
            None if c["value"] is None else few_digits(c["value"], 3)
        )
    return Grid(name, of, unit, layers, places, z)


def experts_section(grids: list[Grid]) -> Html:
    how = (
        "A recording of experts' tokens (SGLang's expert distribution recorder, ingested as .pt) would show each expert's load; "
        "profiles of ranks that dispatch tokens to experts would show each rank's."
    )
    if not grids:
        return section(
            "experts",
            "Experts",
            None,
            lacking("Nothing tells how experts are loaded, or the model has none.", how),
        )
    by_expert = any(g.of == "expert" for g in grids)
    return section(
        "experts",
        "Experts",
        "In a layer of experts the busiest sets the pace: an even share is 1.",
        chart(
            "experts",
            "Load by layer",
            _says(grids[0]),
            choice("experts-grid", "Show", [(str(i), g.name) for i, g in enumerate(grids)], "0"),
            height=320,
        ),
        None if by_expert else lacking("Nothing tells the load of single experts.", how),
        behind("Numbers behind this chart", [_table(g) for g in grids]),
    )


def _says(grid: Grid) -> str:
    value, layer, place = grid.hottest
    if grid.unit == "s":
        return f"{grid.of.capitalize()} {place} takes longest in layer {layer}: {seconds(value)} (median of its rounds)."
    return f"{grid.of.capitalize()} {place} of layer {layer} has most: {amount(value)} times an even share."


def _shown(grid: Grid, value: float) -> str:
    return seconds(value) if grid.unit == "s" else amount(value)


def _table(grid: Grid) -> Html:
    rows = []
    for i, layer in enumerate(grid.layers):
        told = [(v, grid.places[j]) for j, v in enumerate(grid.z[i]) if v is not None]
        if not told:
            continue
        most, place = max(told)
        least, idlest = min(told)
        rows.append(
            (
                f"layer {layer}",
                f"{grid.of} {place}",
                _shown(grid, most),
                f"{grid.of} {idlest}",
                _shown(grid, least),
            )
        )
    unit = "" if grid.unit == "s" else f", {grid.unit}"
    return table(f"{grid.name}: most and least{unit}", ("layer", "most", "", "least", ""), rows, numbers=9)


def data(grids: list[Grid]) -> list[dict[str, Any]]:
    return [
        {
            "name": shown_name(g.name),
            "of": g.of,
            "unit": g.unit,
            "layers": g.layers,
            "places": g.places,
            "z": g.z,
            "says": _says(g),
        }
        for g in grids
    ]
