"""Plays labelled worlds of ranks at clock offsets from 0 to 20 ms and scores who is named: `python tests/accuracy/ranks.py [--short]`.

The full form writes `docs/accuracy-ranks.json` and the page made from it. Even seeds report; odd ones (`--odd`) are for
tuning. Exit status 1 where the worlds played say that a bar is broken, 95 % sure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bars
import rank_page
import rank_score
from rank_families import FAMILIES, OFFSETS_MS
from rank_play import play
from suite import REPORTS_FROM, Job, run_job

ROOT = Path(__file__).parents[2]
STORED, PAGE = ROOT / "docs" / "accuracy-ranks.json", ROOT / "docs" / "accuracy-ranks.md"

#: Worlds of each kind as tables and as files.
FULL, FULL_FILES = 500, 20
SHORT, SHORT_FILES = 2, 0
#: Worlds listed of a kind that were not judged right.
LISTED = 10


def jobs(worlds: int, files: int, odd: bool, families: list[str]) -> Iterator[Job]:
    first = 1 if odd else REPORTS_FROM
    for number in range(worlds + files):
        via = "tables" if number < worlds else "files"
        # Few worlds of each kind are of all offsets too.
        for kind, family in enumerate(FAMILIES):
            if family.name in families:
                offset_ms = OFFSETS_MS[(number + kind) % len(OFFSETS_MS)]
                yield play, (family.name, offset_ms, first + 2 * number, via)


def run_all(todo: list[Job], processes: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results of the worlds, in an order of their own, and what failed."""
    played: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    began = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for number, (name, result) in enumerate(pool.imap_unordered(run_job, todo, chunksize=4), 1):
            (played if name == play.__name__ else failed).append(result)
            if sys.stderr.isatty() and number % 20 == 0:
                left = (time.monotonic() - began) / number * (len(todo) - number)
                print(f"\r{number} of {len(todo)}, {left:.0f} s left ", end="", file=sys.stderr)
    return sorted(played, key=lambda w: (w["family"], w["via"], w["offset_ms"], w["seed"])), failed


def scored(
    worlds: list[dict[str, Any]], failed: list[dict[str, Any]], seconds: float, full: bool
) -> dict[str, Any]:
    return {
        "form": "full" if full else "short",
        "seconds": round(seconds),
        "worlds": len(worlds),
        "by_files": sum(w["via"] == "files" for w in worlds),
        "bars": rank_score.bars(worlds),
        "rows": rank_score.rows(worlds),
        "files": rank_score.rows([w for w in worlds if w["via"] == "files"]),
        "not_right": rank_score.not_right(worlds, LISTED),
        "failed": failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="two worlds of each kind, nothing stored")
    parser.add_argument("--odd", action="store_true", help="the seeds for tuning")
    parser.add_argument("--worlds", type=int, help=f"worlds of each kind as tables, {FULL} if not given")
    parser.add_argument("--files", type=int, help=f"worlds of each kind as files, {FULL_FILES} if not given")
    parser.add_argument("--family", action="append", help="only this kind; may be given again")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="store the result here instead of in docs/")
    parser.add_argument("--raw", type=Path, help="store what was said of every world here, a line each")
    arguments = parser.parse_args()
    known = [family.name for family in FAMILIES]
    if unknown := set(arguments.family or ()) - set(known):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    worlds, files = (SHORT, SHORT_FILES) if arguments.short else (FULL, FULL_FILES)
    worlds = worlds if arguments.worlds is None else arguments.worlds
    files = files if arguments.files is None else arguments.files
    began = time.monotonic()
    # What runs at every change must not be what the page reports.
    odd = arguments.odd or arguments.short
    todo = list(jobs(worlds, files, odd, arguments.family or known))
    played, failed = run_all(todo, arguments.processes)
    whole = not (arguments.short or arguments.odd or arguments.family)
    full = whole and worlds >= FULL and files >= FULL_FILES
    result = scored(played, failed, time.monotonic() - began, full)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if arguments.raw is not None:
        lines = [json.dumps(world, ensure_ascii=False) + "\n" for world in played]
        arguments.raw.write_text("".join(lines), encoding="utf-8")
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    elif whole:
        STORED.write_text(text, encoding="utf-8")
        PAGE.write_text(rank_page.render(result), encoding="utf-8")
    print(rank_page.render(result))
    for failure in failed:
        print(f"{failure['job']} failed:\n{failure['error']}", file=sys.stderr)
    return 1 if failed or bars.broken(result) else 0


if __name__ == "__main__":
    sys.exit(main())
