"""The collectives of a layer, in the order in which its ranks come to them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailscope.sim.scenario import Scenario


@dataclass(frozen=True)
class Place:
    """A collective that every layer has: among all ranks or those of an engine, after work of a phase (None: at once)."""

    kind: str
    phase: str
    everyone: bool
    after: str | None


DENSE = (
    Place("all_reduce", "collective", True, "attention"),
    Place("all_reduce", "collective", True, "mlp"),
)
MOE = (
    Place("all_gather", "dispatch", True, "attention"),
    Place("reduce_scatter", "combine", True, "expert"),
)
#: With tensor parallelism the engines' own ranks meet first.
MOE_TP = (
    Place("all_reduce", "collective", False, "attention"),
    Place("all_gather", "dispatch", True, None),
    Place("reduce_scatter", "combine", True, "expert"),
)
ALL_TO_ALL = "all_to_all"


def places_of(scenario: Scenario) -> tuple[Place, ...]:
    """The collectives of a layer, in order."""
    if not scenario.engine.moe:
        return DENSE
    places = MOE_TP if scenario.ranks.tensor_parallel > 1 else MOE
    if scenario.ranks.exchange == "all-gather":
        return places
    return tuple(replace(p, kind=ALL_TO_ALL) if p.everyone else p for p in places)
