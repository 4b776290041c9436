"""Prometheus metrics of an inference server: text as scraped, or Prometheus's answers to queries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from tailscope.schema import METRICS, SERIES, Table
from tailscope.source import Options, Source, Tally

from ._vllm_metrics_json import read_json
from ._vllm_metrics_text import Pages, read_text

_TYPES = rb"counter|gauge|histogram|gaugehistogram|summary|untyped|unknown|info|stateset"
_COMMENT = re.compile(rb'# (?:(?:HELP|UNIT) [a-zA-Z_:"]\S* .|TYPE [a-zA-Z_:"]\S* (?:' + _TYPES + rb")\Z)")
_SAMPLE = re.compile(
    rb"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{.*\}[ \t]*|[ \t]+)"
    rb"(?:[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?|[+-]?Inf|NaN)(?:[ \t]|\Z)"
)
_OURS = re.compile(rb"(?:ray_)?vllm[:_]|sglang[:_]|trtllm_|inference_|dynamo_|llm_d_|http_request")
_MARKED = re.compile(rb"^#@SCRAPE unix_ns=[0-9]", re.MULTILINE)

_RESULT = re.compile(rb'\s*\{.{0,1000}?"resultType"\s*:\s*"(?:matrix|vector|scalar|string)"', re.DOTALL)
#: The same with its keys sorted, and promtool's bare list.
_ELEMENTS = re.compile(rb'\s*(?:\{.{0,1000}?"result"\s*:\s*)?\[\s*\{\s*"metric"\s*:\s*\{', re.DOTALL)
_ERROR = re.compile(rb'\s*\{\s*"status"\s*:\s*"error"\s*,\s*"errorType"\s*:')


@dataclass(frozen=True)
class VllmMetrics:
    name: str = "vllm_metrics"
    version: str = "1"
    reads: str = (
        "Prometheus or OpenMetrics text of vLLM (V1, V0, through Ray), SGLang and their gateways, as one "
        "scrape or as many, each after a `#@SCRAPE unix_ns=…` line; and Prometheus's JSON answers to queries."
    )
    tables: tuple[Table, ...] = (METRICS, SERIES)

    def recognises(self, head: bytes, name: str) -> bool:
        if _is_json(head):
            return any(form.match(head) for form in (_RESULT, _ELEMENTS, _ERROR))
        if _MARKED.search(head):
            return True
        lines = head.split(b"\n")
        lines = [line.strip() for line in lines[: max(1, len(lines) - 1)]]  # the head may cut the last
        comments = sum(1 for line in lines if _COMMENT.match(line))
        samples = [line for line in lines if _SAMPLE.match(line)]
        if not comments and not any(_OURS.match(line) for line in samples):
            return False
        return 2 * (comments + len(samples)) >= sum(1 for line in lines if line)

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        return read_json(source) if _is_json(source.head()) else read_text(source)

    def pages(self, options: Options, tally: Tally) -> Pages:
        return Pages(options, tally)


def _is_json(head: bytes) -> bool:
    return head.lstrip()[:1] in (b"{", b"[")


COLLECTOR = VllmMetrics()
