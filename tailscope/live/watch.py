"""Continuous diagnosis: the rules over a sliding window, and findings that open, stay and close.

Each look is a `tailscope diagnose` of its own process, so that its memory is bounded and given back, and a look that
hangs harms nothing. A finding opens when two of the last three looks found it, and closes when none of them did:
one window on the edge of a threshold neither opens nor closes anything. What is open stays so over a restart.

What looks cost is bounded: they rest for twice the processor time they take, which is a third of a core, and where one takes too
long the next looks at half of the window.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tailscope.model import SEVERITIES

#: Looks that decide whether a finding is open, and in how many of them it must be found to open.
LOOKS, TO_OPEN = 3, 2
#: A look that takes longer is given up; after one that takes less than a quarter of it a shortened window grows again.
MOST_LOOK_S = 120.0
#: Times the processor time of a look there is none.
REST = 2.0
#: The window is never shortened further than to this part of it.
MOST_SHORTER = 64
MEMORY = "1GB"
#: A look gives way to receivers.
NICE = 10
#: Lines of history kept; the older half goes when there are twice as many. So many of the last are shown.
MOST_HISTORY, MOST_SHOWN = 10_000, 200
#: Findings that can be open at once, and characters of a party's id: both come from the trace.
MOST_FINDINGS, MOST_ID = 1_000, 200
#: What a look puts aside, below the trace; a look that is killed does not clear it away.
ASIDE = ".look"
#: Components that are others' prefill.
COUPLING = (
    "others_prefill_before",
    "others_prefill_in_prefill",
    "others_prefill_in_decode",
    "queue_budget",
)
UNEXPLAINED = "unexplained"

Key = tuple[str, str, str]
#: What every record of the history says.
RECORD = {"change", "time_s", "rule", "severity", "culprit", "victim", "title", "opened_s", "last_found_s"}


@dataclass
class OpenFinding:
    """A finding that is open, as it was found last; its severity is the highest of the last looks."""

    rule: str
    severity: str
    culprit: str
    victim: str
    title: str
    opened_s: float
    last_found_s: float


@dataclass
class Watched:
    """What is known now. `diagnosis` is the last good one, as `diagnose --format json` prints it."""

    diagnosis: Mapping[str, Any] | None = None
    diagnosed_s: float | None = None
    took_s: float | None = None
    outcomes: dict[str, int] = field(
        default_factory=lambda: {"good": 0, "failed": 0, "timeout": 0, "no-data": 0}
    )
    problem: str = ""
    open: dict[Key, OpenFinding] = field(default_factory=dict)


class Hysteresis:
    """Which findings are open, from look to look."""

    def __init__(self) -> None:
        self.open: dict[Key, OpenFinding] = {}
        #: Of the last looks at each: the severity it was found with, None where it was not.
        self._seen: dict[Key, list[str | None]] = {}

    def restore(self, history: Iterable[Mapping[str, Any]]) -> None:
        """Go on with what a history left open."""
        for record in history:
            finding = OpenFinding(**{name: record[name] for name in OpenFinding.__dataclass_fields__})
            key = finding.rule, finding.culprit, finding.victim
            if record["change"] == "closed":
                self.open.pop(key, None)
                self._seen.pop(key, None)
            else:
                self.open[key], self._seen[key] = finding, [finding.severity]

    def look(self, findings: Sequence[Mapping[str, Any]], now_s: float) -> list[dict[str, Any]]:
        """Take the findings of a look; says what opened, closed or changed its severity, as records of the history."""
        found: dict[Key, Mapping[str, Any]] = {}
        for finding in findings:
            if finding["status"] == "found":
                for victim in finding["victims"] or [None]:
                    key = (finding["rule"], _party(finding["culprit"]), _party(victim))
                    # Of two of one name the first is the more severe.
                    if len(found) < MOST_FINDINGS:
                        found.setdefault(key, finding)
        changes = []
        # In the order in which they are found, so that the worst is told of first.
        for key in list(dict.fromkeys([*found, *self._seen])):
            now = found.get(key)
            seen = [*self._seen.get(key, []), None if now is None else str(now["severity"])][-LOOKS:]
            self._seen[key] = seen
            known = [severity for severity in seen if severity is not None]
            if not known:
                del self._seen[key]
                if key in self.open:
                    changes.append(_record("closed", self.open.pop(key), now_s))
                continue
            severity = next(one for one in SEVERITIES if one in known)
            if key in self.open:
                opened = self.open[key]
                if now is not None:
                    opened.title, opened.last_found_s = now["title"], now_s
                if opened.severity != severity:
                    opened.severity = severity
                    changes.append(_record("changed", opened, now_s))
            elif now is not None and len(known) >= TO_OPEN:
                self.open[key] = OpenFinding(key[0], severity, key[1], key[2], now["title"], now_s, now_s)
                changes.append(_record("opened", self.open[key], now_s))
        return changes


class Watch:
    """Looks at the trace every `every_s` at the last `window_s`; history goes to `history`, JSON lines."""

    def __init__(
        self, trace: Path, config: Path | None, window_s: float, every_s: float, history: Path
    ) -> None:
        self.state = Watched()
        self._trace, self._config, self._window_s, self._every_s = trace, config, window_s, every_s
        self._history = history
        self._aside = trace / ASIDE
        self._shorter, self._cost_s = 1, 0.0
        records, self._lines, self._cut = _read(history)
        self._recent = deque(records[-MOST_SHOWN:], MOST_SHOWN)
        self._hysteresis = Hysteresis()
        self._hysteresis.restore(records)
        self.state.open = dict(self._hysteresis.open)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(max(self._every_s, REST * self._cost_s))
            await self.look()

    async def look(self) -> None:
        began, now_s = time.monotonic(), time.time()
        outcome, diagnosis, problem = await self._diagnose(now_s)
        self.state.outcomes[outcome] += 1
        self.state.problem = problem
        self.state.took_s = took_s = time.monotonic() - began
        if outcome == "timeout":
            self._shorter = min(2 * self._shorter, MOST_SHORTER)
        elif took_s < MOST_LOOK_S / 4:
            self._shorter = max(1, self._shorter // 2)
        if outcome == "failed" or outcome == "timeout":
            return  # findings stay as they are: nobody looked
        findings = [] if diagnosis is None else diagnosis["findings"]
        changes = self._hysteresis.look(findings, now_s)
        self.state.open = dict(self._hysteresis.open)
        self.state.diagnosis, self.state.diagnosed_s = diagnosis, now_s
        if changes:
            self._remember(changes)

    async def _diagnose(self, now_s: float) -> tuple[str, Mapping[str, Any] | None, str]:
        # Spans of the future, of a sender whose clock is wrong, are not in every window from now on.
        window_s = self._window_s / self._shorter
        since, until = (
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
            for time_s in (now_s - window_s, now_s + 1)
        )
        command = [sys.executable, "-P", "-m", "tailscope", "diagnose", os.fspath(self._trace)]
        command += ["--format", "json", "--from", since, "--to", until, "--memory-limit", MEMORY]
        if self._config is not None:
            command += ["--config", os.fspath(self._config)]
        try:
            status, output, errors = await self._run(command)
        except TimeoutError:
            return (
                "timeout",
                None,
                f"a look at {window_s:.0f} s took longer than {MOST_LOOK_S:g} s; the next looks at less",
            )
        except OSError as error:
            return "failed", None, f"a look cannot be started: {error.strerror or error}"
        if status == 0:
            try:
                return "good", json.loads(output), ""
            except ValueError:
                return "failed", None, "a look gave no diagnosis"
        last = (errors.decode("utf-8", "replace").strip().splitlines() or [f"exit status {status}"])[-1]
        # A trace without a row, or without one in the window, is no failure.
        if (status == 2 and "no such trace" in last) or "holds no table" in last:
            return "no-data", None, ""
        return "failed", None, last

    async def _run(self, command: list[str]) -> tuple[int | None, bytes, bytes]:
        """(status, output, errors). Raises OSError and TimeoutError."""
        before_s = _children_s()
        self._aside.mkdir(exist_ok=True)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "TMPDIR": os.fspath(self._aside.absolute())},
            )
            try:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
                async with asyncio.timeout(MOST_LOOK_S):
                    output, errors = await process.communicate()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            return process.returncode, output, errors
        finally:
            self._cost_s = _children_s() - before_s
            shutil.rmtree(self._aside, ignore_errors=True)

    def _remember(self, changes: list[dict[str, Any]]) -> None:
        self._recent.extend(changes)
        # ASCII, so that no text of a trace can end a line, or cannot be written.
        lines = [json.dumps(change) + "\n" for change in changes]
        try:
            with self._history.open("a", encoding="ascii") as file:
                file.writelines(["\n"] * self._cut + lines)
            self._cut = False
            self._lines += len(lines)
            if self._lines > 2 * MOST_HISTORY:
                kept = self._history.read_bytes().splitlines(keepends=True)[-MOST_HISTORY:]
                temporary = self._history.with_suffix(".tmp")
                temporary.write_bytes(b"".join(kept))
                temporary.rename(self._history)
                self._lines = len(kept)
        except OSError as error:
            self.state.problem = f"{self._history.name}: cannot be written: {error.strerror}"

    def history(self, most: int = MOST_SHOWN) -> list[dict[str, Any]]:
        """The last changes, oldest first."""
        return list(self._recent)[-most:]


def _children_s() -> float:
    """Processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read(history: Path) -> tuple[list[dict[str, Any]], int, bool]:
    """Records of a history, its lines, and whether the last one was being written when the power went."""
    try:
        text = history.read_bytes()
    except OSError:
        return [], 0, False
    records, lines = [], text.splitlines()
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.keys() >= RECORD:
                records.append(record)
    return records, len(lines), not text.endswith(b"\n") and bool(text)


def excess_of(diagnosis: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    """Seconds of the tail's excess by (class, metric, component)."""
    return {
        (row["class"], row["metric"].lower(), component): seconds
        for row in diagnosis["classes"]
        for component, seconds in (row["excess"] or {}).items()
    }


def ratios_of(
    excess: Mapping[tuple[str, str, str], float], components: tuple[str, ...]
) -> dict[tuple[str, str], float]:
    """Share of these components in each (class, metric)'s excess."""
    total: dict[tuple[str, str], float] = {}
    part: dict[tuple[str, str], float] = {}
    for (klass, metric, component), seconds in excess.items():
        key = (klass, metric)
        total[key] = total.get(key, 0.0) + max(0.0, seconds)
        if component in components:
            part[key] = part.get(key, 0.0) + max(0.0, seconds)
    return {key: part.get(key, 0.0) / whole for key, whole in total.items() if whole > 0}


def _party(party: Mapping[str, Any] | None) -> str:
    return "" if party is None else f"{party['kind']}:{party['id']}"[:MOST_ID]


def _record(change: str, finding: OpenFinding, now_s: float) -> dict[str, Any]:
    return {"change": change, "time_s": now_s, **asdict(finding)}
