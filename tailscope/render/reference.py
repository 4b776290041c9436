"""The reference pages in `docs/`, made from the tables, rules and collectors themselves.

`python -m tailscope.render.reference` writes them; with `--check` it writes nothing and exits with 1 where a
page is out of date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args, get_type_hints

from tailscope import registry
from tailscope.ledger.lines import COMPONENTS
from tailscope.model import Collector, Rule
from tailscope.render.rules import alert_name, alerts_of, where
from tailscope.scan import SQL_TYPES
from tailscope.schema import TABLES, Table
from tailscope.sim import scenario
from tailscope.sim.outcome import START_NS

COMMAND = "python -m tailscope.render.reference"
FOLDER = Path("docs")
TRUTH_SECTION = f"""## What `--truth` writes

Simulated worlds begin at {datetime.fromtimestamp(START_NS / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC; seconds in a scenario and in `truth.json` count from then.

| file | holds |
| --- | --- |
| `truth.json` | what was injected; for each `[[cause]]` the p99 of every load that is in both worlds, `with` it and `without` it, by metric; pauses and refusals as `events` |
| `requests.parquet` | every request as it was: load, status, tokens, preemptions, and its instants. `intended_ns`: when its client would have sent it, `sent_ns`: when it did, `left_ns`: when the client gave up |
| `bills.parquet` | the parts of each request's latency, by place (wait, queue, prefill, decode) and [component](components.md); they sum to `finished_ns - arrival_ns`. `culprit` is the load whose prefill it was; waiting for a limit (`queue_*`) has none |

`request_id` there is LOAD-NUMBER. In a trace the client knows the same request as `cmpl-LOAD-NUMBER` and the engine as
`cmpl-LOAD-NUMBER-0`; `answer` tells the answers of a call with `n` above 1 apart. The diagnosis speaks of classes, not of
loads: give each load a `tenant` and make classes of tenants in tailscope.toml where lengths do not tell them apart.
`diagnose` does not read causes: they are labels, for you and for `make accuracy`.
"""
#: Sections of the page on scenarios: how a table is written in TOML, and what reads it.
SCENARIO_TABLES = {
    "`[[load]]`": scenario.Load,
    "Sizes: a number, or a table": scenario.Sizes,
    "`[engine]`": scenario.Engine,
    "`[cost]`": scenario.Cost,
    "`[ranks]`": scenario.Ranks,
    "`[gateway]`": scenario.Gateway,
    "`[[fault]]`": scenario.Fault,
    "`[telemetry]`": scenario.Telemetry,
    "`[[cause]]`": scenario.Cause,
}


def pages() -> dict[str, str]:
    """Every generated page: file name in `docs/` to its content."""
    collectors = registry.collectors()
    return {
        "tables.md": tables_page(TABLES, collectors),
        "rules.md": rules_page([rule for rule, _ in registry.rules()]),
        "collectors.md": collectors_page(collectors),
        "components.md": components_page(COMPONENTS),
        "scenarios.md": scenarios_page(),
    }


def out_of_date(folder: Path) -> list[str]:
    """Names of pages that are missing in `folder` or say something else."""
    return [name for name, text in pages().items() if _read(folder / name) != text]


def tables_page(tables: Sequence[Table], collectors: Sequence[Collector]) -> str:
    parts = [
        _head("Tables of a trace", "tailscope/schema.py"),
        "A trace is a folder of Parquet files, one sub-folder a table. Times are nanoseconds since the Unix "
        "epoch, durations nanoseconds. Unknown is NULL, never 0. Types are DuckDB's.\n",
        '```sh\ntailscope query trace.parquet "SELECT status, count(*) FROM requests GROUP BY status"\n```\n',
    ]
    parts += [_table_section(table, collectors) for table in tables]
    return "\n".join(parts)


def _table_section(table: Table, collectors: Sequence[Collector]) -> str:
    filled = [f"`{c.name}`" for c in collectors if table in c.tables]
    by = "`ingest` itself" if table.name == "sources" else ", ".join(filled)
    rows = [(f"`{c.name}`", SQL_TYPES[str(c.type)], c.unit, c.doc) for c in table.columns]
    return "\n".join(
        [
            f"## {table.name}\n",
            f"One row per {table.row}. {f'Filled by {by}' if by else 'No collector fills it yet'}. "
            f"Sorted by {', '.join(table.sort)}.\n",
            _grid(("column", "type", "unit", "meaning"), rows),
        ]
    )


def rules_page(rules: Sequence[Rule]) -> str:
    parts = [
        _head("Rules", "rules/"),
        "`tailscope diagnose` runs every rule. Each says of a trace: *found*, *clear*, *inconclusive*, "
        "*no-data* or *failed*, and why. `tailscope rules NAME` prints one of these sections.\n",
        _grid(("rule", "what it looks for"), [(f"[{r.name}](#{r.name})", r.summary) for r in rules]),
    ]
    return "\n".join([*parts, *(_rule_section(rule) for rule in rules)])


def scenarios_page() -> str:
    """Every table and key of a scenario, from the dataclasses that read it."""
    parts = [
        _head("Scenarios", "tailscope/sim/scenario.py"),
        "`tailscope sim` plays a world of clients, engines and ranks whose every nanosecond is known, and writes it as a trace "
        "(`-o`), as the files that real emitters would leave (`--raw`), and the truth beside them (`--truth`): what was "
        "injected, what it costs each class against the same world without it, and the true bill of every request.\n",
        "```sh\ntailscope sim examples/scenarios/long-prefills.toml -o trace.parquet --truth truth\n"
        "tailscope diagnose trace.parquet\n```\n",
        "A scenario is one TOML file. Times are seconds, sizes tokens; everything but a load has a default. The same file and "
        "seed give the same world. Leaving out a load or a fault changes nothing of the others' requests.\n",
        "Not simulated: speculative decoding, LoRA, multimodal input, pipeline parallelism, KV offload to a second tier, and "
        "the slowing down that a profiler itself causes. A client's whole answer is its plan: there is no early stop.\n",
    ]
    parts.append(TRUTH_SECTION)
    top = [
        f for f in fields(scenario.Scenario) if f.name in ("name", "seed", "duration_s", "model", "tolerated")
    ]
    parts.append("## Top level\n\n" + _keys(scenario.Scenario, top))
    for title, table in SCENARIO_TABLES.items():
        text = inspect.cleandoc(table.__doc__ or "")
        parts.append(f"## {title}\n\n{text}\n\n" + _keys(table, fields(table)))
    return "\n".join(parts)


def _keys(table: type, listed: Iterable[Field[Any]]) -> str:
    hints = get_type_hints(table)
    rows = []
    for key in listed:
        type_ = str(hints[key.name]) if get_args(hints[key.name]) else hints[key.name].__name__
        for long, short in (("typing.", ""), ("tailscope.sim.scenario.", ""), (", ...]", ", …]")):
            type_ = type_.replace(long, short)
        default = "" if key.default is MISSING else repr(key.default)
        rows.append((f"`{key.name}`", f"`{type_}`", f"`{default}`" if default else "none"))
    return _grid(("key", "type", "default"), rows)


def _rule_section(rule: Rule) -> str:
    thresholds = [(f"`{t.name}`", f"{t.value:g}", t.unit, t.why) for t in rule.thresholds]
    remedies = [
        f"{number}. {r.do}: {r.flag}. Exists in: {r.versions}. Cost: {r.cost}."
        for number, r in enumerate(rule.remedies, 1)
    ]
    return "\n".join(
        [
            f"## {rule.name}\n",
            f"{rule.summary}\n",
            f"**Why it hurts.** {rule.why}\n",
            f"**Needs.** {_sentence(rule.missing.removeprefix('needs '))}\n",
            "**Decides by.**\n",
            _grid(("threshold", "value", "unit", "why this value"), thresholds),
            "**Remedies**, the least invasive first.\n",
            *remedies,
            "\n**Would confirm it.**\n",
            *(f"- {_sentence(text)}" for text in rule.confirm_by),
            *_alerts(rule),
            "",
        ]
    )


def _alerts(rule: Rule) -> list[str]:
    """What of a rule Prometheus can tell; nothing of most rules."""
    rows = [
        (
            f"`{alert_name(alert, signal)}`",
            where(signal),
            f"`{' '.join(signal.query(rule.limits_of(alert)).split())}`",
            alert.hold,
            " ".join(t.why for t in alert.thresholds),
        )
        for alert, signal in alerts_of(rule)
    ]
    if not rows:
        return []
    header = ("alert", "metrics of", "when", "for", "why these values, where they are not the rule's")
    return ["\n**Alerts** that `tailscope alerts` writes.\n", _grid(header, rows)]


def collectors_page(collectors: Sequence[Collector]) -> str:
    rows = [
        (f"`{c.name}`", c.reads, ", ".join(f"[{t.name}](tables.md#{t.name})" for t in c.tables))
        for c in collectors
    ]
    return "\n".join(
        [
            _head("Collectors", "collectors/"),
            "`tailscope ingest` takes files and folders, plain, gzip or zstd, and recognises each file by its "
            "content, not by its name. A file that no collector recognises is skipped, which is said; records "
            "that cannot be used are counted, with the reason.\n",
            _grid(("collector", "reads", "fills"), rows),
        ]
    )


def components_page(components: Mapping[str, str]) -> str:
    rows = [(f"`{name}`", _sentence(meaning)) for name, meaning in components.items()]
    text = (
        "A request's bill books every nanosecond of its latency to one of these, in the order of its life. `wait`, "
        "queue and prefill make TTFT; with decode they make E2E. `diagnose` shows, for each class, the mean bill of the "
        "slow requests minus that of typical ones: where the excess went.\n"
    )
    return "\n".join(
        [
            _head("Components of a latency", "tailscope/ledger/lines.py"),
            text,
            _grid(("component", "time spent"), rows),
        ]
    )


def _head(title: str, origin: str) -> str:
    return f"<!-- Made from {origin} by `{COMMAND}`. Do not edit. -->\n\n# {title}\n"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


def _grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _read(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def main(arguments: Sequence[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"usage: {COMMAND} [--check]", file=sys.stderr)
        return 2
    if arguments:
        stale = out_of_date(FOLDER)
        for name in stale:
            print(f"{FOLDER / name} is out of date; run: {COMMAND}", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
