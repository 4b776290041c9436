"""Boards as Grafana's dashboards, by its own builder library, which only making them needs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from grafana_foundation_sdk.builders import common as common_build
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import heatmap, prometheus, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from tailscope.grafana.board import LIMIT, Board, Chart, Limit, Query
from tailscope.grafana.queries import RATE, narrowed

DATASOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
GRAFANA = common.DataSourceRef(type_val="grafana", uid="-- Grafana --")
TAG, CHANGE_TAG = "tailscope", "tailscope-change"
COLORS = {"warning": "orange", "critical": "red"}
#: Width of a dashboard in Grafana's units, and sizes of panels in it.
WIDTH, HEIGHT = 24, 8
#: Windows that can be chosen, the first is where one begins.
WINDOWS = {
    "window": ("Window of quantiles and means", "5m,15m,30m,1h"),
    "span": ("Time to look back to", "1h,6h,1d,7d"),
}
#: Variables that narrow queries, and the label's values among which they choose.
FILTERS = {
    "class": "label_values(tailscope_requests_total, class)",
    "tenant": "label_values(tailscope_requests_total, tenant)",
    "model_name": "label_values({__name__=~'tailscope_requests_total|vllm:num_requests_running'}, model_name)",
    "server": "label_values(SERIES, LABEL)",
    "engine": "label_values({__name__=~'tailscope_requests_running|vllm:num_requests_running'}, engine)",
}


def to_json(board: Board) -> str:
    return str(JSONEncoder(sort_keys=True, indent=2).encode(draw(board))) + "\n"


def draw(board: Board) -> dashboard.Dashboard:
    made = (
        build.Dashboard(board.title)
        .uid(f"tailscope-{board.name}")
        .description(board.text)
        .tags([TAG])
        .timezone("browser")
        .refresh("30s")
        .time("now-3h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(
            build.DashboardLink("tailscope")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    for variable in _variables(board):
        made.with_variable(variable)
    if board.changes:
        made.annotation(_marked()).annotation(_restarted())
    numbers, y = itertools.count(1), 0
    for row in board.rows:
        made.with_row(build.Row(row.title).id(next(numbers)).grid_pos(_at(0, y, WIDTH, 1)))
        y += 1
        for line in _lined_up(row.charts):
            height = max(_height(chart) for chart in line)
            width = WIDTH // len(line)
            for place, chart in enumerate(line):
                made.with_panel(
                    _panel(chart).id(next(numbers)).grid_pos(_at(place * width, y, width, height))
                )
            y += height
    return made.build()


def _lined_up(charts: Iterable[Chart]) -> Iterator[tuple[Chart, ...]]:
    """Charts that stand beside each other: three or two, or one that is wide or left over."""
    for wide, group in itertools.groupby(charts, key=lambda chart: chart.wide):
        some = tuple(group)
        most = 1 if wide else 2 if len(some) % 3 else 3
        yield from (some[n : n + most] for n in range(0, len(some), most))


def _height(chart: Chart) -> int:
    return 2 * HEIGHT if chart.kind == "matrix" else HEIGHT


def _at(x: int, y: int, width: int, height: int) -> dashboard.GridPos:
    return dashboard.GridPos(x=x, y=y, w=width, h=height)


# -- variables and annotations -----------------------------------------------------------------------


def _variables(board: Board) -> Iterator[Any]:
    yield build.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
    texts = [narrowed(query.expr) for chart in board.charts for query in chart.queries]
    used = set(re.findall(r"\$(\w+)", " ".join(texts)))
    series, label = board.servers
    for name, query in FILTERS.items():
        if name in used:
            yield _filter(name, query.replace("SERIES", series).replace("LABEL", label))
    for name, (title, values) in WINDOWS.items():
        if name in used:
            first = values.partition(",")[0]
            yield build.IntervalVariable(name).label(title).values(values).current(_option(first, first))


def _filter(name: str, query: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(name)
        .datasource(DATASOURCE)
        .query({"qryType": 1, "query": query, "refId": "values"})
        .definition(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.NATURAL_ASC)
        .multi(True)
        .include_all(True)
        # What has no such label, or an empty one, belongs to all.
        .all_value(".*")
        .current(_option("All", "$__all"))
    )


def _option(text: str, value: str) -> dashboard.VariableOption:
    return dashboard.VariableOption(selected=True, text=text, value=value)


def _marked() -> build.AnnotationQuery:
    target = build.AnnotationTarget().limit(100).match_any(False).tags([CHANGE_TAG]).type("tags")
    return (
        build.AnnotationQuery()
        .name("Changes")
        .datasource(GRAFANA)
        .enable(True)
        .hide(False)
        .icon_color("blue")
        .type("tags")
        # The library has this target for Grafana's own annotations, and does not count it among the ones of queries.
        .target(target)  # type: ignore[arg-type]
    )


def _restarted() -> build.AnnotationQuery:
    """Flags of an engine change with a restart only, and its counters begin again."""
    expr = f"sum by (instance) (resets(vllm:prompt_tokens_total[{RATE}])) > 0"
    return (
        build.AnnotationQuery()
        .name("Engine restarts")
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color("purple")
        .expr(expr)
        .title_format("{{instance}} was started again")
        .step("60s")
    )


# -- panels ------------------------------------------------------------------------------------------


def _panel(chart: Chart) -> Any:
    draw_one = {
        "lines": _lines,
        "stacked": _lines,
        "table": _table,
        "matrix": _matrix,
        "heatmap": _heatmap,
        "timeline": _timeline,
    }[chart.kind]
    made = draw_one(chart).title(chart.title).description(chart.shows).unit(chart.unit).datasource(DATASOURCE)
    if chart.repeat:
        made.repeat(chart.repeat).repeat_direction("h").max_per_row(3)
    return made


def _targets(chart: Chart, panel: Any, format_: PromQueryFormat, instant: bool = False) -> Any:
    for number, query in enumerate(chart.queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + number)).datasource(DATASOURCE).format(format_)
        target = target.instant() if instant else target.range()
        panel.with_target(target.expr(narrowed(query.expr)).legend_format(_legend(query)))
    return panel


def _legend(query: Query) -> str:
    return query.legend or "__auto"


def _lines(chart: Chart) -> Any:
    panel = (
        timeseries.Panel()
        .axis_soft_min(0)
        .legend(
            common_build.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(
            common_build.VizTooltipOptions()
            .mode(common.TooltipDisplayMode.MULTI)
            .sort(common.SortOrder.DESCENDING)
        )
        .thresholds(_thresholds(chart.limits))
        .thresholds_style(
            common_build.GraphThresholdsStyleConfig().mode(
                common.GraphThresholdsStyleMode.DASHED
                if chart.limits
                else common.GraphThresholdsStyleMode.OFF
            )
        )
    )
    if chart.kind == "stacked":
        panel.stacking(
            common_build.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
        ).fill_opacity(30)
    # Objectives stand in the same panel as what they are the limits of.
    if any(query.legend.endswith(LIMIT) for query in chart.queries):
        dashed = {"fill": "dash", "dash": [10, 10]}
        panel.override_by_regexp(f"/{LIMIT}$/", [_property("custom.lineStyle", dashed)])
    return _targets(chart, panel, PromQueryFormat.TIME_SERIES)


def _timeline(chart: Chart) -> Any:
    options = {
        str(state.value): dashboard.ValueMappingResult(text=state.text, color=state.color, index=place)
        for place, state in enumerate(chart.states)
    }
    panel = (
        statetimeline.Panel()
        .mappings([dashboard.ValueMap(options=options)])
        .thresholds(_thresholds(()))
        .show_value(common.VisibilityMode.NEVER)
        .row_height(0.8)
        .merge_values(True)
    )
    return _targets(chart, panel, PromQueryFormat.TIME_SERIES)


def _heatmap(chart: Chart) -> Any:
    panel = (
        heatmap.Panel()
        # Prometheus's format makes of cumulative buckets those of each band.
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .steps(64)
            .exponent(0.5)
        )
        .y_axis(heatmap.YAxisConfig().unit(chart.unit))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .cell_gap(1)
        .show_legend()
    )
    return _targets(chart, panel, PromQueryFormat.HEATMAP)


def _table(chart: Chart) -> Any:
    panel = table.Panel().filterable(True).thresholds(_thresholds(()))
    several = len(chart.queries) > 1
    names, hidden = {}, {"Time": True}
    for number, column in enumerate(chart.columns):
        came = f"Value #{chr(ord('A') + number)}" if several else "Value"
        if not column.title:
            hidden[came] = True
            continue
        names[came] = column.title
        properties = [_property("unit", column.unit)]
        if column.limits:
            steps = _thresholds(column.limits).build()
            properties += [
                _property("thresholds", steps),
                _property("custom.cellOptions", {"type": "color-text"}),
            ]
        panel.override_by_name(column.title, properties)
    if several:
        panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    organized = {"excludeByName": hidden, "indexByName": {}, "renameByName": names}
    panel.with_transformation(dashboard.DataTransformerConfig(id_val="organize", options=organized))
    return _targets(chart, panel, PromQueryFormat.TABLE, instant=True)


def _matrix(chart: Chart) -> Any:
    """A row for each value of one label, a column for each of the other, coloured by the number."""
    rows, columns = chart.by
    [column] = chart.columns
    corner = f"{rows}\\{columns}"
    panel = (
        table.Panel()
        .min(0)
        .max(1)
        .thresholds(_thresholds(()))
        .color_scheme(build.FieldColor().mode(dashboard.FieldColorModeId.CONTINUOUS_GR_YL_RD))
        .cell_options(common.TableColoredBackgroundCellOptions())
    )
    matrix = {"rowField": rows, "columnField": columns, "valueField": "Value", "emptyValue": "null"}
    numbers = {"conversions": [{"destinationType": "number", "targetField": rows}], "fields": {}}
    for id_, options in (
        ("convertFieldType", numbers),
        ("sortBy", {"fields": {}, "sort": [{"field": rows}]}),
        ("groupingToMatrix", matrix),
        ("organize", {"excludeByName": {}, "indexByName": {}, "renameByName": {corner: column.title}}),
    ):
        panel.with_transformation(dashboard.DataTransformerConfig(id_val=id_, options=options))
    plain = [_property("unit", column.unit), _property("custom.cellOptions", {"type": "auto"})]
    panel.override_by_name(column.title, plain)
    return _targets(chart, panel, PromQueryFormat.TABLE, instant=True)


def _property(id_: str, value: object) -> dashboard.DynamicConfigValue:
    return dashboard.DynamicConfigValue(id_val=id_, value=value)


def _thresholds(limits: tuple[Limit, ...]) -> build.ThresholdsConfig:
    steps = [dashboard.Threshold(value=None, color="green")]
    steps += [
        dashboard.Threshold(value=limit.value, color=COLORS[limit.severity])
        for limit in sorted(limits, key=lambda limit: limit.value)
    ]
    return build.ThresholdsConfig().mode(dashboard.ThresholdsMode.ABSOLUTE).steps(steps)
