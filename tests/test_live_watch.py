"""Continuous diagnosis: when findings open, change and close, and what a look that goes wrong does."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as text_format
from rich.console import Console

from tailscope.live import tail as tails
from tailscope.live import watch as module
from tailscope.live.pages import WatchMetrics
from tailscope.live.watch import LOOKS, Hysteresis, Watch


def finding(
    culprit: str = "long", severity: str = "low", victims: tuple[str, ...] = ("short",), **more: Any
) -> dict[str, Any]:
    return {
        "rule": "hol-coupling",
        "status": "found",
        "severity": severity,
        "title": f"{culprit} is waited for",
        "culprit": {"kind": "class", "id": culprit},
        "victims": [{"kind": "class", "id": victim} for victim in victims],
    } | more


def changes_of(looks: list[list[dict[str, Any]]]) -> list[tuple[int, str, str]]:
    """(number of the look, change, severity)."""
    hysteresis = Hysteresis()
    return [
        (number, change["change"], change["severity"])
        for number, findings in enumerate(looks, 1)
        for change in hysteresis.look(findings, float(number))
    ]


def pattern(text: str) -> list[list[dict[str, Any]]]:
    """Looks: `.` found nothing, l, m, h found it with that severity."""
    words = {"l": "low", "m": "medium", "h": "high"}
    return [[] if letter == "." else [finding(severity=words[letter])] for letter in text]


@pytest.mark.parametrize(
    ("looks", "changes"),
    [
        ("l", []),
        ("ll", [(2, "opened", "low")]),
        ("l.l", [(3, "opened", "low")]),
        ("l..l..l..", []),
        ("l..ll", [(5, "opened", "low")]),
        ("ll...", [(2, "opened", "low"), (5, "closed", "low")]),
        ("ll..l..l..", [(2, "opened", "low")]),
        ("ll...ll", [(2, "opened", "low"), (5, "closed", "low"), (7, "opened", "low")]),
        # Severity rises at once, and falls when none of the last looks was as severe.
        ("llhlll", [(2, "opened", "low"), (3, "changed", "high"), (6, "changed", "low")]),
        ("hllh", [(2, "opened", "high")]),
        ("hm...", [(2, "opened", "high"), (4, "changed", "medium"), (5, "closed", "medium")]),
    ],
)
def test_findings_open_change_and_close(looks: str, changes: list[tuple[int, str, str]]) -> None:
    assert changes_of(pattern(looks)) == changes


def test_whatever_looks_find_opens_and_closes_take_turns() -> None:
    chance = random.Random(5)
    hysteresis = Hysteresis()
    is_open: set[str] = set()
    for number in range(2_000):
        found = [finding(name) for name in "abc" if chance.random() < 0.4]
        for change in hysteresis.look(found, float(number)):
            if change["change"] == "opened":
                assert change["culprit"] not in is_open
                is_open.add(change["culprit"])
            else:
                is_open.remove(change["culprit"])
        assert {key[1] for key in hysteresis.open} == is_open


def test_each_victim_is_told_apart_and_what_is_not_found_is_none() -> None:
    hysteresis = Hysteresis()
    both = [finding(victims=("a", "b")), finding("other", status="inconclusive"), finding("none", victims=())]
    hysteresis.look(both, 1.0)
    hysteresis.look(both, 2.0)
    assert sorted(hysteresis.open) == [
        ("hol-coupling", "class:long", "class:a"),
        ("hol-coupling", "class:long", "class:b"),
        ("hol-coupling", "class:none", ""),
    ]


def test_a_finding_of_no_culprit_and_one_twice() -> None:
    twice = [{**finding(severity=severity), "culprit": None} for severity in ("high", "low")]
    hysteresis = Hysteresis()
    hysteresis.look(twice, 1.0)
    [change] = hysteresis.look(twice, 2.0)
    assert (change["culprit"], change["severity"]) == ("", "high")


def test_many_findings_and_long_names_are_cut() -> None:
    hysteresis = Hysteresis()
    many = [finding("x" * 10_000, victims=tuple(map(str, range(5_000))))]
    for number in range(2):
        hysteresis.look(many, float(number))
    assert len(hysteresis.open) == module.MOST_FINDINGS
    assert max(len(party) for key in hysteresis.open for party in key) <= module.MOST_ID


# -- looks -----------------------------------------------------------------------------------------


class Looks(Watch):
    """A watch whose looks are done by a program of the test's own."""

    program = ""

    async def _run(self, command: list[str]) -> tuple[int | None, bytes, bytes]:
        self.command = command
        return await super()._run([sys.executable, "-c", self.program])

    def see(self, program: str) -> None:
        self.program = program
        asyncio.run(self.look())

    def find(self, *findings: dict[str, Any]) -> None:
        self.see(f"print({json.dumps({'findings': findings, 'classes': []})!r})")


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Looks]:
    yield Looks(tmp_path, None, 300.0, 30.0, tmp_path / "history.jsonl")
    assert not (tmp_path / module.ASIDE).exists()


FAILS = {
    "raise SystemExit('what it says')": ("failed", "what it says"),
    "import os; os.kill(os.getpid(), 9)": ("failed", "exit status -9"),
    "print('no JSON')": ("failed", "a look gave no diagnosis"),
    "import sys; sys.stderr.buffer.write(b'\\xff'); sys.exit(1)": ("failed", "�"),
}


@pytest.mark.parametrize("program", FAILS)
def test_a_look_that_fails_changes_nothing(watch: Looks, program: str) -> None:
    watch.find(finding())
    watch.find(finding())
    for _ in range(LOOKS + 1):
        watch.see(program)
    outcome, problem = FAILS[program]
    assert watch.state.problem == problem
    assert watch.state.outcomes == {"good": 2, "failed": 0, "timeout": 0, "no-data": 0, outcome: LOOKS + 1}
    assert len(watch.state.open) == 1
    assert watch.state.diagnosis is not None
    watch.find()
    assert watch.state.problem == ""


def test_a_look_that_cannot_be_started_is_told(watch: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: Any, **__: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", none)
        watch.find()
    assert watch.state.problem == "a look cannot be started: Resource temporarily unavailable"


def test_a_look_that_takes_too_long_is_ended_and_the_next_looks_at_less(
    watch: Looks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def window_s() -> float:
        since = watch.command[watch.command.index("--from") + 1]
        return (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()

    with monkeypatch.context() as patch:
        patch.setattr(module, "MOST_LOOK_S", 0.2)
        watch.see("import time, pathlib, tempfile; tempfile.mkdtemp(); time.sleep(60)")
    assert watch.state.outcomes["timeout"] == 1
    assert "took longer than 0.2 s" in watch.state.problem
    assert 299 < window_s() < 303
    watch.find()
    assert 149 < window_s() < 153
    watch.find()
    assert 299 < window_s() < 303


def test_no_rows_are_no_failure(watch: Looks) -> None:
    watch.find(finding())
    watch.find(finding())
    for _ in range(LOOKS):
        watch.see("import sys; print('t: holds no table', file=sys.stderr); sys.exit(2)")
    assert watch.state.outcomes["no-data"] == LOOKS
    assert not watch.state.open


def test_looks_rest_longer_than_they_work(watch: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise asyncio.CancelledError

    async def look() -> None:
        watch._cost_s = [1.0, 100.0][len(slept) - 1]

    monkeypatch.setattr("tailscope.live.watch.asyncio.sleep", sleep)
    monkeypatch.setattr(watch, "look", look)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch.run())
    assert slept == [30.0, 30.0, 200.0]


def test_the_cost_of_a_look_is_its_processor_time(watch: Looks) -> None:
    watch.see('import time; time.sleep(1); print(\'{"findings": [], "classes": []}\')')
    assert watch.state.took_s is not None
    assert watch.state.took_s > 1 > watch._cost_s > 0


# -- history ---------------------------------------------------------------------------------------

HOSTILE = [
    "line\nbreak\r\x0b\x0c\x1c\x85\u2028\u2029",
    '"},{"change": "closed"',
    "\x1b[31m\u202egnp.exe",
    "\ud800",
    "\0",
]


def test_hostile_names_are_kept_as_they_are_and_break_nothing(
    watch: Looks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_HISTORY", 2)
    for name in HOSTILE:
        watch.find(finding(name))
        watch.find(finding(name))
    again = Looks(tmp_path, None, 300.0, 30.0, tmp_path / "history.jsonl")
    told = [(change["change"], change["culprit"]) for change in again.history()]
    assert told == [(change["change"], change["culprit"]) for change in watch.history()][-len(told) :]
    assert ("opened", f"class:{HOSTILE[-1]}") in told
    assert {name for _, name in told} <= {f"class:{name}" for name in HOSTILE}
    lines = (tmp_path / "history.jsonl").read_bytes().split(b"\n")
    assert all(json.loads(line) for line in lines if line)


def test_hostile_names_are_labels(watch: Looks) -> None:
    for _ in range(2):
        watch.find(*map(finding, (name for name in HOSTILE if name != "\ud800")))
    registry = CollectorRegistry()
    registry.register(WatchMetrics(watch.state))
    [family] = [f for f in text_format(generate_latest(registry).decode()) if f.name == "tailscope_finding"]
    assert len(family.samples) == len(HOSTILE) - 1


def test_the_history_is_trimmed_and_its_last_lines_are_shown(
    watch: Looks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_HISTORY", 20)
    hysteresis = watch._hysteresis
    for number in range(100):
        for _ in range(2):
            watch._remember(hysteresis.look([finding(str(number))], float(number)))
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert 20 <= len(lines) <= 40
    assert json.loads(lines[-1]) == watch.history()[-1]
    assert len(watch.history()) == len(watch.history(module.MOST_SHOWN)) <= module.MOST_SHOWN
    assert len(watch.history(5)) == 5


def test_a_restart_goes_on_with_what_is_open(watch: Looks, tmp_path: Path) -> None:
    for _ in range(2):
        watch.find(finding("a"), finding("b", "high"))
    for _ in range(LOOKS):
        watch.find(finding("b", "high"))
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"change": "opened", "ru')  # the power goes
    again = Looks(tmp_path, None, 300.0, 30.0, tmp_path / "history.jsonl")
    [(key, kept)] = again.state.open.items()
    assert (key[1], kept.severity) == ("class:b", "high")
    again.find(finding("b", "high"))
    assert [change["change"] for change in again.history()] == ["opened", "opened", "closed"]
    for _ in range(LOOKS):
        again.find()
    third = Looks(tmp_path, None, 300.0, 30.0, tmp_path / "history.jsonl")
    assert [change["change"] for change in third.history()][-1] == "closed"
    assert not third.state.open


def test_a_history_that_cannot_be_written_is_told(watch: Looks, tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").mkdir()
    watch.find(finding())
    watch.find(finding())
    assert watch.state.problem.startswith("history.jsonl: cannot be written")
    assert len(watch.history()) == 1


def test_tail_shows_all_changes_of_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"change": "opened", "time_s": 9.0, "severity": "low", "rule": "r", "title": "before"}
    now = [{**before, "time_s": 10.0, "title": title} for title in ("one", "other")]
    answers = [[before], {"open": []}, [before, *now], [before, *now]]

    def get(*_: Any) -> Any:
        if not answers:
            raise KeyboardInterrupt
        return answers.pop(0)

    monkeypatch.setattr(tails, "_get", get)
    monkeypatch.setattr(tails, "POLL_S", 0.0)
    console = Console(width=100, record=True)
    tails.tail("127.0.0.1:1", None, None, console)
    shown = console.export_text()
    assert (shown.count("one"), shown.count("other"), shown.count("before")) == (1, 1, 0)
