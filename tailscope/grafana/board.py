"""What stands on a dashboard, in our own words: nothing here knows how Grafana is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: lines and stacked over time, or as a table of now, a heat map of a histogram's buckets, or states over time.
Kind = Literal["lines", "stacked", "table", "matrix", "heatmap", "timeline"]
#: How the name of a line ends that is an objective's limit.
LIMIT = ", limit"


@dataclass(frozen=True)
class Query:
    """PromQL, with variables of the dashboard, and the name of a line by its labels."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Limit:
    """From where on it is bad."""

    value: float
    severity: Literal["warning", "critical"] = "warning"


@dataclass(frozen=True)
class State:
    """What a value of a timeline means."""

    value: int
    text: str
    color: str


@dataclass(frozen=True)
class Column:
    """The numbers that one of a table's queries gives."""

    title: str
    unit: str
    limits: tuple[Limit, ...] = ()


@dataclass(frozen=True)
class Chart:
    """A panel. `shows` is one sentence: what to see in it.

    A table has a column for each query; a matrix has a row for each value of the first label of `by` and a column for
    each of the second. With `repeat` there is one for each value of that variable.
    """

    title: str
    unit: str
    shows: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    limits: tuple[Limit, ...] = ()
    states: tuple[State, ...] = ()
    columns: tuple[Column, ...] = ()
    by: tuple[str, str] = ("", "")
    repeat: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Row:
    title: str
    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Board:
    """A dashboard. `servers` is the series, and the label of it, whose values its variable `server` has."""

    name: str
    title: str
    text: str
    rows: tuple[Row, ...]
    servers: tuple[str, str] = ("tailscope_up", "server")
    #: Whether it shows when engines were started again and what people marked as a change.
    changes: bool = False

    @property
    def charts(self) -> tuple[Chart, ...]:
        return tuple(chart for row in self.rows for chart in row.charts)
