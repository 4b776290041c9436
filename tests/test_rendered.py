"""The pages in docs/ are what the code says, and the hand-written ones keep to what the code does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer.main
from real import EXAMPLE, ROOT

import tailscope
from tailscope import query, registry
from tailscope.cli import app
from tailscope.config import DEFAULT_CLASSES, Config, parse
from tailscope.engine import diagnose
from tailscope.ingest import ingest
from tailscope.render import reference
from tailscope.sim import scenario_file, written
from tailscope.sim.engine import simulate
from tailscope.source import Options
from tailscope.store import Trace

README = (ROOT / "README.md").read_text(encoding="utf-8")
WRITTEN = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"),
    *(
        "docs/joining.md",
        "docs/request-logs.md",
        "docs/compare.md",
        "docs/ranks.md",
        "docs/experts.md",
        "docs/steps.md",
        "docs/alerts.md",
        "docs/dashboards.md",
        "docs/report.md",
        "docs/export.md",
        "docs/tour.md",
        "examples/pull-request/README.md",
    ),
]
PAGES = [*WRITTEN, *(f"docs/{name}" for name in reference.pages())]
COMMANDS = vars(typer.main.get_command(app))["commands"]


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def without_demo(text: str) -> str:
    return re.sub(r"<!-- demo -->.*?<!-- /demo -->", "", text, flags=re.DOTALL)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the README's line of a client log, and the example's spans."""
    folder = tmp_path_factory.mktemp("rendered")
    (line,) = fenced(README, "json")
    (folder / "client.jsonl").write_text(line, encoding="utf-8")
    output = folder / "trace.parquet"
    paths = [folder / "client.jsonl", EXAMPLE / "otlp"]
    ingest(paths, output, config=Config(), options=Options())
    return output


@pytest.mark.parametrize("name", sorted(reference.pages()))
def test_generated_pages_are_fresh(name: str) -> None:
    path = ROOT / "docs" / name
    written = path.read_text(encoding="utf-8") if path.is_file() else None
    assert written == reference.pages()[name], f"docs/{name} is out of date; run: {reference.COMMAND}"


def test_reference_writes_and_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    (tmp_path / "docs" / "rules.md").write_text("old", encoding="utf-8")
    assert reference.out_of_date(tmp_path / "docs") == ["rules.md"]
    assert reference.main(["--other"]) == 2


def test_a_cell_cannot_break_its_table() -> None:
    assert reference._grid(("a", "b"), [("x|y", "z")]).splitlines()[2] == r"| x\|y | z |"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = without_demo((ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            assert f"\n## {anchor}\n" in path.read_text(encoding="utf-8"), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_exist_with_their_options(page: str) -> None:
    text = without_demo((ROOT / page).read_text(encoding="utf-8"))
    blocks = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    code = [block for language, block in blocks.findall(text) if language == "sh"]
    code += re.findall(r"`([^`\n]+)`", blocks.sub("", text))
    call = re.compile(r"(?:^|&& |--from \. )tailscope ([a-z]\w*)((?:[^\n\\]|\\\n)*)", re.MULTILINE)
    named = [found for piece in code for found in call.findall(piece)]
    for name, rest in named:
        assert name in COMMANDS, f"{page}: tailscope {name}"
        command = COMMANDS[name]
        if subcommands := vars(command).get("commands"):
            command = subcommands[rest.split()[0]]
        known = {option for parameter in command.params for option in parameter.opts}
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest.split("#")[0]):
            assert option in known, f"{page}: tailscope {name} {option}"
        if name == "rules" and (rule := re.match(r" ([a-z][a-z-]+)", rest)):
            assert rule[1] in {r.name for r, _ in registry.rules()}
    assert named or page not in ("README.md", "docs/joining.md", "examples/README.md")


def test_the_readme_shows_what_the_demo_prints() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tailscope", "demo"],
        capture_output=True,
        text=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "140"},
        timeout=120,
        check=True,
    )
    printed = {line.rstrip() for line in done.stdout.splitlines()}
    (block,) = re.findall(r"<!-- demo -->\n```text\n(.*?)```\n<!-- /demo -->", README, re.DOTALL)
    stale = [line for line in block.splitlines() if line.strip() != "…" and line not in printed]
    assert not stale, "the README's example is out of date; paste from: NO_COLOR=1 tailscope demo | cat"


def test_the_readme_names_every_command_and_collector() -> None:
    for name in COMMANDS:
        assert f"`tailscope {name}" in README
    for collector in registry.collectors():
        assert f"`{collector.name}`" in README


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_make_targets_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(
        re.findall(r"(?:^|`|\d )make ([a-z]+)", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: make {target}"


def test_the_configuration_of_the_readme_is_valid() -> None:
    _, example = fenced(README, "toml")
    config = parse(tomllib.loads(example))
    assert [c.name for c in config.classes] == ["chat", "batch"]
    assert len(config.slos) == 2
    assert config.sources[0].instance == "host-a"
    assert config.attributes.klass == "acme.class"
    defaults = [c.name for c in DEFAULT_CLASSES]
    assert defaults[0] == "reasoning"
    assert ", ".join(defaults[1:]) in example


def test_the_incident_of_the_readme_is_diagnosed_as_it_says(tmp_path: Path) -> None:
    incident, _ = fenced(README, "toml")
    scenario = scenario_file.parse(tomllib.loads(incident), tmp_path, "README.md")
    written.write_trace(written.tables(simulate(scenario)), tmp_path / "trace.parquet")
    with Trace(str(tmp_path / "trace.parquet")) as opened:
        first = diagnose(opened, Config()).findings[0]
    [cause] = scenario.causes
    assert (first.rule, f"{first.culprit.kind}:{first.culprit.id}") == (cause.rule, cause.culprit)


def test_the_client_log_of_the_readme_is_read(trace: Path) -> None:
    (line,) = fenced(README, "json")
    with tailscope.open(trace) as opened:
        rows = opened.rows("SELECT * FROM requests WHERE observer = 'client'")
        assert opened.count("tokens") == 3
        assert opened.rows("SELECT sum(rows_rejected + values_blanked) AS n FROM sources") == [{"n": 0}]
    assert [row["request_id"] for row in rows] == [json.loads(line)["response_id"]]


def test_a_trace_opens_as_the_readme_says(trace: Path) -> None:
    with tailscope.open(trace) as opened:
        assert {"request_id", "ttft_ns"} <= set(opened.requests.df().columns)


def test_scrapes_as_the_readme_takes_them_are_read(tmp_path: Path) -> None:
    loop = next(text for text in fenced(README, "sh") if "SCRAPE" in text)
    (mark,) = re.findall(r"printf '(.*?)\\n'", loop)
    scrapes = "".join(
        f"{mark % (1795963213000000000 + n)}\n# TYPE vllm:num_requests_running gauge\n"
        f'vllm:num_requests_running{{engine="0",model_name="m"}} {n}.0\n'
        for n in range(2)
    )
    (tmp_path / "metrics.txt").write_text(scrapes, encoding="utf-8")
    (outcome,) = ingest([tmp_path / "metrics.txt"], tmp_path / "t", config=Config(), options=Options())
    assert outcome.stored.rows["metrics"] == 2
    assert not outcome.tally.rejected
    assert not outcome.tally.notes


@pytest.mark.parametrize("page", ["docs/joining.md", "docs/tables.md", "examples/README.md"])
def test_queries_run(trace: Path, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    statements = re.findall(r'tailscope query trace\.parquet (?:\\\n\s*)?"(.*?)"', text, re.DOTALL)
    assert statements
    for statement in statements:
        query.run(str(trace), statement)
