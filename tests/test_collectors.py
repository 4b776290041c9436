"""Every case folder through its collector: `tests/collectors/NAME/CASE/`.

A case holds one `input.*` (read by the collector NAME), what it must give as `TABLE.csv` (only the columns
named in the header are compared, in order of appearance; an empty cell is NULL) and `tally.json` with
`rejected`, `skipped`, `blanked` (reason -> count) and, where they matter, `notes`, `clock`. A case whose collector raises has
`error.txt`, the message without the path. `options.json` may set `log_tz`, `hash_ids`, `attributes`,
`rank` and `python_stacks`; `mapping.toml` is the mapping of a table.
"""

from __future__ import annotations

import csv
import json
import time
import tomllib
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from tailscope import mapping, registry
from tailscope.config import Attributes
from tailscope.errors import BadInput
from tailscope.schema import BY_NAME
from tailscope.source import Options, Source

CASES = sorted(p for p in Path(__file__).parent.joinpath("collectors").glob("*/*") if p.is_dir())
COLLECTORS = {c.name: c for c in registry.collectors()}


def options(case: Path) -> Options:
    file, map_file = case / "options.json", case / "mapping.toml"
    raw: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return Options(
        attributes=Attributes(**raw.get("attributes", {})),
        log_tz=ZoneInfo(raw["log_tz"]) if "log_tz" in raw else None,
        hash_ids=raw.get("hash_ids", False),
        rank=raw.get("rank"),
        python_stacks=raw.get("python_stacks", False),
        mapping=mapping.parse(tomllib.loads(map_file.read_text())) if map_file.exists() else None,
    )


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, dict)):
        return json.dumps(value)
    return str(value)


@pytest.mark.parametrize("case", CASES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_case(case: Path) -> None:
    collector = COLLECTORS[case.parent.name]
    (path,) = case.glob("input.*")
    source = Source(path, display=path.name, options=options(case))
    expected_error = case / "error.txt"
    if expected_error.exists():
        with pytest.raises(BadInput) as caught:
            list(collector.read(source))
        assert str(caught.value) == expected_error.read_text().strip()
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    for table, batch in collector.read(source):
        assert table in collector.tables
        assert batch.schema == table.arrow
        rows.setdefault(table.name, []).extend(batch.to_pylist(maps_as_pydicts="strict"))
    for name in rows.keys() | {p.stem for p in case.glob("*.csv")} - {"input"}:
        expected = case / f"{name}.csv"
        assert name in BY_NAME
        assert expected.exists(), f"{case.name} gives {len(rows[name])} rows of {name}, and has no {name}.csv"
        with expected.open(newline="") as file:
            reader = csv.reader(file)
            columns = next(reader)
            wanted = list(reader)
        assert [[cell(row[c]) for c in columns] for row in rows.get(name, [])] == wanted
    tally = json.loads((case / "tally.json").read_text())
    assert dict(source.tally.rejected) == tally.get("rejected", {})
    assert dict(source.tally.skipped) == tally.get("skipped", {})
    assert dict(source.tally.blanked) == tally.get("blanked", {})
    if "notes" in tally:
        assert source.tally.notes == tally["notes"]
    if "clock" in tally:
        assert source.clock == tally["clock"]


@pytest.mark.parametrize("case", CASES, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_every_case_is_recognised_by_its_collector_alone(case: Path) -> None:
    (path,) = case.glob("input.*")
    source = Source(path)
    recognising = [c.name for c in COLLECTORS.values() if c.recognises(source.head(), source.name)]
    assert recognising in ([case.parent.name], [])  # [] is right for a damaged or an empty file


def is_bad(tally: dict[str, Any]) -> bool:
    return bool(tally.get("rejected") or tally.get("blanked"))


@pytest.mark.parametrize("name", sorted(COLLECTORS))
def test_half_of_a_collectors_cases_are_bad_input(name: str) -> None:
    cases = [c for c in CASES if c.parent.name == name]
    bad = [
        c for c in cases if (c / "error.txt").exists() or is_bad(json.loads((c / "tally.json").read_text()))
    ]
    assert cases, f"collector {name} has no cases"
    assert 2 * len(bad) >= len(cases)


def test_collector_values_are_complete() -> None:
    for collector in COLLECTORS.values():
        assert collector.reads.endswith("."), f"{collector.name}: `reads` is a sentence"
        assert collector.version
        assert collector.tables


def test_a_line_made_to_be_slow_costs_no_more_than_others(tmp_path: Path) -> None:
    began = "[2026-01-01 10:00:00 TP0] [Expert Balancedness] "
    path = tmp_path / "sglang.log"
    path.write_text(began + "current_pass_balancedness=1 " * 40_000 + "\n" + began + "x" * 1_000_000 + "\n")
    source = Source(path)
    started = time.process_time()
    assert not list(COLLECTORS["sglang_log"].read(source))
    assert time.process_time() - started < 2
    assert source.tally.rejected == {"balancedness line cannot be read": 2}
