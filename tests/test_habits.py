"""Habits worth asking for, held by a test: of every rule, every module, every file."""

from __future__ import annotations

import ast
import re
import sys
from importlib.resources import files
from types import ModuleType

import duckdb
import pytest
from tree import ROOT, source_files

from tailscope import registry
from tailscope.ledger.lines import COMPONENTS
from tailscope.model import Rule

RULES = registry.rules()
COLLECTORS = registry.collectors()
SENTENCE = re.compile(r"(?:[A-Z0-9`]|vLLM)[^\n]*\.")
PYTHON = [
    path for path in source_files("tailscope", "collectors", "rules", "examples") if path.suffix == ".py"
]


def module_of(rule: Rule) -> ModuleType:
    return sys.modules[rule.decide.__module__]


def stem(rule: Rule) -> str:
    return rule.decide.__module__.rpartition(".")[2]


@pytest.fixture(params=RULES, ids=[rule.name for rule, _ in RULES])
def rule_and_query(request: pytest.FixtureRequest) -> tuple[Rule, str]:
    found: tuple[Rule, str] = request.param
    return found


def test_rules_and_collectors_are_found() -> None:
    """The folders' modules, all of them: a parametrised test over nothing would pass."""
    assert {path.stem for path in source_files("rules") if path.suffix == ".py" and path.stem[0] != "_"} == {
        stem(rule) for rule, _ in RULES
    }
    assert {path.stem for path in source_files("collectors") if path.stem[0] != "_"} == {
        c.name for c in COLLECTORS
    }


def test_a_rule_is_named_as_its_file(rule_and_query: tuple[Rule, str]) -> None:
    rule, _ = rule_and_query
    assert rule.name == stem(rule).replace("_", "-")


def test_every_threshold_decides_something(rule_and_query: tuple[Rule, str]) -> None:
    rule, sql = rule_and_query
    source = files("tailscope.rules").joinpath(f"{stem(rule)}.py").read_text(encoding="utf-8")
    for threshold in rule.thresholds:
        used = re.search(rf"\${threshold.name}\b", sql) or f'limits["{threshold.name}"]' in source
        assert used, f"{rule.name}: threshold {threshold.name} is neither in the query nor in decide"
    assert len(rule.limits) == len(rule.thresholds)


def test_what_a_query_asks_for_is_a_threshold(rule_and_query: tuple[Rule, str]) -> None:
    rule, sql = rule_and_query
    assert set(re.findall(r"\$(\w+)", sql)) <= rule.limits.keys()


def test_a_rules_words_are_sentences(rule_and_query: tuple[Rule, str]) -> None:
    rule, _ = rule_and_query
    for text in (rule.summary, rule.why, *(threshold.why for threshold in rule.thresholds)):
        assert SENTENCE.fullmatch(text), f"{rule.name}: {text!r}"
    assert rule.missing.startswith("needs ")
    assert rule.missing[-1] != "."  # follows a colon
    assert len(rule.summary) < 90


def test_a_rule_says_what_to_change_and_how_to_check(rule_and_query: tuple[Rule, str]) -> None:
    rule, _ = rule_and_query
    assert len(rule.remedies) >= 2
    for remedy in rule.remedies:
        assert all((remedy.do, remedy.flag, remedy.versions, remedy.cost))
        assert remedy.do[0].isupper()
        assert remedy.do[-1] != "."  # followed by the flag
    assert rule.confirm_by
    assert all(text[0].isupper() for text in rule.confirm_by)


def test_a_query_is_one_select_and_says_what_a_row_is(rule_and_query: tuple[Rule, str]) -> None:
    _, sql = rule_and_query
    (statement,) = duckdb.extract_statements(sql)
    assert statement.type == duckdb.StatementType.SELECT
    assert sql.startswith("-- One row per ")


def test_the_core_names_no_rule_and_no_collector() -> None:
    names = {c.name for c in COLLECTORS} | {form for rule, _ in RULES for form in (rule.name, stem(rule))}
    names -= COMPONENTS.keys()  # a part of a bill may be called as the rule on it
    # A flag such as --otlp-traces-endpoint is not the collector `otlp`.
    word = re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(map(re.escape, names)))})(?![\w-])")
    for path in source_files("tailscope"):
        if path.parts[:2] == ("tailscope", "sim"):
            continue  # what it writes is what collectors read, so it must name them
        text = (ROOT / path).read_text(encoding="utf-8")
        found = [f"{path}:{number}" for number, line in enumerate(text.splitlines(), 1) if word.search(line)]
        assert not found, f"{found} names a rule or a collector; the core finds them through the registry"


@pytest.mark.parametrize("path", PYTHON, ids=str)
def test_a_module_says_what_it_is(path: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))


def test_the_top_level_holds_nothing_else() -> None:
    """What is made beside the work lands there first."""
    folders = {"tailscope", "collectors", "rules", "dashboards", "examples", "tests", "docs", ".ci"}
    files = {
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "Makefile",
        ".gitignore",
    }
    found = {path.parts[0] for path in source_files()}
    assert found <= folders | files, f"not of the repository: {sorted(found - folders - files)}"


def test_nothing_is_left_over() -> None:
    """No paths of the machine it was written on, no notes to self. (Spelled apart, or this file would be found.)"""
    unwanted = re.compile(r"/(?:work|root|home)/" + "|" + r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    found = []
    for path in source_files():
        try:
            text = (ROOT / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path}:{n}: {line[:100]}"
            for n, line in enumerate(text.splitlines(), 1)
            if unwanted.search(line)
        ]
    assert not found
