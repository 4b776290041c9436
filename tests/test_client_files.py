"""Client files with values that are none: whatever stands in them, good rows are kept and nothing breaks."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tailscope import registry
from tailscope.errors import BadInput
from tailscope.source import INT64_MAX, Source

COLLECTORS = {c.name: c for c in registry.collectors()}
NAMES = ("aiperf", "guidellm", "inference_perf", "genai_bench", "client_log")
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1e308 * 10, float("nan"), -5.5, "", "x", [], {}, [None], {"a": 1}, 10**30, "1790000000",
    [[]], INT64_MAX + 1, 1e18, "\ud800", [1, "a", None],
)  # fmt: skip
ROUNDS = 12


def cases() -> Iterator[Path]:
    for name in NAMES:
        for case in sorted(Path(__file__).parent.joinpath("collectors", name).iterdir()):
            if name != "client_log" or case.name.startswith(("sglang", "bench")):
                yield case


def documents(path: Path) -> list[Any]:
    raw = path.read_bytes()
    raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    found = []
    for text in raw.splitlines() if ".jsonl" in path.name else [raw]:
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def spots(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in `value` with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from spots(inner)


@pytest.mark.parametrize("case", list(cases()), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_no_value_in_a_clients_file_can_stop_its_ingest(case: Path, tmp_path: Path) -> None:
    (given,) = case.glob("input.*")
    chance = random.Random(case.name)
    for _ in range(ROUNDS):
        found = documents(given)
        for _ in range(chance.randint(1, 3)):
            places = list(spots(found))
            if places:
                container, key = chance.choice(places)
                container[key] = chance.choice(HOSTILE)
        path = tmp_path / "file"
        path.write_text("\n".join(map(json.dumps, found)))
        try:
            for table, batch in COLLECTORS[case.parent.name].read(Source(path)):
                assert batch.schema == table.arrow
                times = [c for c in batch.column_names if c.endswith("_ns")]
                values = [v for c in times for v in batch[c].to_pylist() if v is not None]
                assert all(value >= 0 for value in values)
        except BadInput:
            continue
