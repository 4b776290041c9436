"""PromQL of panels: narrowed by the dashboard's variables, and spelled for every version of vLLM."""

from __future__ import annotations

import re

from tailscope import stock_metrics
from tailscope.alert_objectives import bucket_rates

#: Window of a mean or a quantile, which must be long enough to hold requests; rates of counters follow the panel's width.
WINDOW = "$window"
RATE = "$__rate_interval"

_METRIC = re.compile(r'(?<![\w:"])((?:vllm|sglang):\w+|tailscope[_:][\w:]+)(?:\{([^{}]*)\})?')
#: Metrics -> their labels and the variables that choose among them; the first that matches holds.
_FILTERS: tuple[tuple[str, dict[str, str]], ...] = (
    (r"vllm:admission_rejections_total", {"instance": "server", "model_name": "model_name"}),
    (r"vllm:.*", {"instance": "server", "model_name": "model_name", "engine": "engine"}),
    (r"sglang:eplb_gpu_physical_count_.*", {"instance": "server"}),
    (r"sglang:.*", {"instance": "server", "model_name": "model_name"}),
    (
        r"tailscope_(kv_cache_usage_ratio|requests_running|requests_waiting|preemptions_total)",
        {"server": "server", "engine": "engine"},
    ),
    (r"tailscope_(up|straggler_ratio)", {"server": "server"}),
    (r"tailscope_journal_.*", {}),
    (
        r"tailscope_((coupling|unexplained)_ratio|tail_excess_seconds|slo_seconds)|tailscope:slo_.*",
        {"class": "class"},
    ),
    (
        r"tailscope_(\w+_seconds_(bucket|sum|count)|requests_total|\w+_tokens_total|token_seconds_total)",
        {"class": "class", "tenant": "tenant", "model_name": "model_name", "server": "server"},
    ),
    (r"tailscope_.*", {}),
)


def narrowed(expr: str) -> str:
    """With matchers for the dashboard's variables at every series."""

    def with_matchers(found: re.Match[str]) -> str:
        name, inside = found[1], found[2] or ""
        labels = next(labels for pattern, labels in _FILTERS if re.fullmatch(pattern, name))
        own = [f'{label}=~"${variable}"' for label, variable in labels.items()]
        matchers = ",".join([inside, *own] if inside else own)
        return f"{name}{{{matchers}}}" if matchers else name

    return _METRIC.sub(with_matchers, expr)


def of_every_version(*exprs: str) -> str:
    """The first that there is, also by the names that vLLM had before 0.11: where several are, of each server the first one."""
    old: stock_metrics.Version = (0, 10)
    spelled = dict.fromkeys([*exprs, *(stock_metrics.spelled(expr, old) for expr in exprs)])
    return next(iter(spelled)) if len(spelled) == 1 else "\nor ".join(f"({expr})" for expr in spelled)


def quantile(q: float, histogram: str, label: str, offset: str = "") -> str:
    return f"histogram_quantile({q:g}, {bucket_rates(histogram, label, WINDOW, offset)})"


def mean(histogram: str, label: str) -> str:
    """Nothing where there was nobody."""
    total, count = (f"sum by ({label}) (rate({histogram}_{part}[{WINDOW}]))" for part in ("sum", "count"))
    return f"{total} / ({count} > 0)"


def correlation(x: str, y: str, over: str) -> str:
    """Pearson's, of two expressions with the same labels, over a window; nothing where one of them does not move."""
    span = f"[{over}:]"
    return (
        f"(avg_over_time((({x}) * ({y})){span}) - avg_over_time(({x}){span}) * avg_over_time(({y}){span}))\n"
        f"/ (stddev_over_time(({x}){span}) * stddev_over_time(({y}){span}) > 0)"
    )
