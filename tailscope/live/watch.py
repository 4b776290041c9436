"""Continuous diagnosis: the rules over a sliding window, and findings that open, stay and close.

Each look is a `tailscope diagnose` of its own process, so that its memory is bounded and given back, and a look that
hangs harms nothing. A finding opens when two of the last three looks found it, and closes when none of them did:
one window on the edge of a threshold neither opens nor closes anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

#: Looks that decide whether a finding is open, and in how many of them it must be found to open.
LOOKS, TO_OPEN = 3, 2
#: A look that takes longer is given up.
MOST_LOOK_S = 120.0
MEMORY = "1GB"
#: A look gives way to receivers.
NICE = 10
#: Lines of history kept; the older half goes when there are twice as many.
MOST_HISTORY = 10_000
#: Components that are others' prefill.
COUPLING = (
    "others_prefill_before",
    "others_prefill_in_prefill",
    "others_prefill_in_decode",
    "queue_budget",
)
UNEXPLAINED = "unexplained"

Key = tuple[str, str, str]


@dataclass
class OpenFinding:
    """A finding that is open, as it was found last. `seen` says of the last looks whether they found it."""

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
        self._seen: dict[Key, list[bool]] = {}

    def look(self, findings: list[Mapping[str, Any]], now_s: float) -> list[dict[str, Any]]:
        """Take the findings of a look; says what opened and what closed, as records of the history."""
        found: dict[Key, Mapping[str, Any]] = {}
        for finding in findings:
            if finding["status"] == "found":
                for victim in finding["victims"] or [None]:
                    found.setdefault((finding["rule"], _party(finding["culprit"]), _party(victim)), finding)
        changes = []
        for key in found.keys() | self._seen.keys():
            seen = self._seen[key] = [*self._seen.get(key, []), key in found][-LOOKS:]
            if key in found:
                finding = found[key]
                if key in self.open:
                    self.open[key].severity = finding["severity"]
                    self.open[key].title, self.open[key].last_found_s = finding["title"], now_s
                elif sum(seen) >= TO_OPEN:
                    rule, culprit, victim = key
                    self.open[key] = OpenFinding(
                        rule, finding["severity"], culprit, victim, finding["title"], now_s, now_s
                    )
                    changes.append(_record("opened", self.open[key], now_s))
            elif not any(seen):
                del self._seen[key]
                if key in self.open:
                    changes.append(_record("closed", self.open.pop(key), now_s))
        return changes


class Watch:
    """Looks at the trace every `every_s` at the last `window_s`; history goes to `history`, JSON lines."""

    def __init__(
        self, trace: Path, config: Path | None, window_s: float, every_s: float, history: Path
    ) -> None:
        self.state = Watched()
        self._trace, self._config, self._window_s, self._every_s = trace, config, window_s, every_s
        self._history = history
        self._hysteresis = Hysteresis()
        self._lines: int | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self.look()

    async def look(self) -> None:
        began, now_s = time.monotonic(), time.time()
        outcome, diagnosis, problem = await self._diagnose(now_s)
        self.state.outcomes[outcome] += 1
        self.state.problem = problem
        self.state.took_s = time.monotonic() - began
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
        since, until = (
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
            for time_s in (now_s - self._window_s, now_s + 1)
        )
        command = [sys.executable, "-P", "-m", "tailscope", "diagnose", os.fspath(self._trace)]
        command += ["--format", "json", "--from", since, "--to", until, "--memory-limit", MEMORY]
        if self._config is not None:
            command += ["--config", os.fspath(self._config)]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            return "failed", None, f"a look cannot be started: {error.strerror}"
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        try:
            async with asyncio.timeout(MOST_LOOK_S):
                output, errors = await process.communicate()
        except TimeoutError:
            return "timeout", None, f"a look took longer than {MOST_LOOK_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if process.returncode == 0:
            return "good", json.loads(output), ""
        text = errors.decode("utf-8", "replace").strip().splitlines()
        # A trace without a row, or without one in the window, is no failure.
        if (process.returncode == 2 and text and "no such trace" in text[-1]) or "holds no table" in text[-1]:
            return "no-data", None, ""
        return "failed", None, text[-1] if text else f"exit status {process.returncode}"

    def _remember(self, changes: list[dict[str, Any]]) -> None:
        lines = [json.dumps(change, ensure_ascii=False) for change in changes]
        try:
            with self._history.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
            self._trim(len(lines))
        except OSError as error:
            self.state.problem = f"{self._history.name}: cannot be written: {error.strerror}"

    def _trim(self, added: int) -> None:
        if self._lines is None:
            with self._history.open("rb") as file:
                self._lines = sum(1 for _ in file)
        else:
            self._lines += added
        if self._lines > 2 * MOST_HISTORY:
            kept = self._history.read_text(encoding="utf-8").splitlines(keepends=True)[-MOST_HISTORY:]
            temporary = self._history.with_suffix(".tmp")
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.rename(self._history)
            self._lines = len(kept)

    def history(self, most: int = 200) -> list[dict[str, Any]]:
        """The last changes, oldest first."""
        try:
            with self._history.open("rb") as file:
                lines = file.readlines()[-most:]
        except OSError:
            return []
        found = []
        for line in lines:
            # A line of a process that died, or of a disk that was full, is cut off.
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return [entry for entry in found if isinstance(entry, dict)]


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
    return "" if party is None else f"{party['kind']}:{party['id']}"


def _record(change: str, finding: OpenFinding, now_s: float) -> dict[str, Any]:
    return {"change": change, "time_s": now_s, **asdict(finding)}
