"""Plays the labelled worlds, scores the diagnosis, prints and stores the result: `python tests/accuracy/suite.py [--short]`.

The full form writes `docs/accuracy.json` and the page made from it. Even seeds report; odd ones (`--odd`) are for
tuning. Exit status 1 where the worlds played say that a bar is broken, 95 % sure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import bars
import nulls
import page
import score
from catalogue import FAMILIES
from play import play

ROOT = Path(__file__).parents[2]
STORED, PAGE = ROOT / "docs" / "accuracy.json", ROOT / "docs" / "accuracy.md"

#: How worlds are told: as tables, as the emitters' files, as tables with a schedule.
VIAS = ("tables", "files", "schedule")
#: Worlds a strength by how they are told, and null worlds a test.
FULL = {"fault": (12, 6, 6), "pair": (8, 8, 6), "decoy": (16, 16, 8)}
#: Of the largest strength only.
SHORT = {"fault": (1, 0, 0), "pair": (1, 0, 0), "decoy": (1, 0, 0)}
FULL_NULLS, SHORT_NULLS = 2_000, 12
#: Of the seeds that report: lower ones have been looked at while rules were changed.
REPORTS_FROM = 3_300

Job = tuple[Callable[..., Any], tuple[Any, ...]]


def jobs(
    counts: Mapping[str, Sequence[int]],
    null_worlds: int,
    odd: bool,
    short: bool,
    tests: Sequence[str],
    families: Sequence[str],
) -> Iterator[Job]:
    first = 1 if odd else REPORTS_FROM
    for family in FAMILIES:
        if family.name not in families:
            continue
        vias = [via for via, count in zip(VIAS, counts[family.kind], strict=True) for _ in range(count)]
        for strength in family.strengths[-1:] if short else family.strengths:
            for number, via in enumerate(vias):
                yield play, (family.name, strength, first + 2 * number, via)
    for test in nulls.TESTS:
        for number in range(null_worlds if test.__name__ in tests else 0):
            yield test, (first + 2 * number,)


def run_job(job: Job) -> tuple[str, Any]:
    function, arguments = job
    try:
        return function.__name__, function(*arguments)
    except Exception:
        return "failed", {"job": f"{function.__name__}{arguments}", "error": traceback.format_exc()}


def run_all(todo: list[Job], processes: int) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {}
    began = time.monotonic()
    # Long ones among short ones, so that both halves of a machine end together.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for number, (name, result) in enumerate(pool.imap_unordered(run_job, todo, chunksize=4), 1):
            results.setdefault(name, []).append(result)
            if sys.stderr.isatty() and number % 20 == 0:
                left = (time.monotonic() - began) / number * (len(todo) - number)
                print(f"\r{number} of {len(todo)}, {left:.0f} s left ", end="", file=sys.stderr)
    return results


def scored(
    results: dict[str, list[Any]], seconds: float, form: str, null_rows: list[Any] | None
) -> dict[str, Any]:
    """The result to store. `null_rows`: those to keep of null worlds that were not played."""
    failed = list(results.get("failed", []))
    try:
        played = nulls.summarise([r for test in nulls.TESTS for r in results.get(test.__name__, [])])
        names = {row["name"] for row in played}
        null_rows = played + [row for row in null_rows or [] if row["name"] not in names]
    except ValueError as error:
        null_rows = []
        failed.append({"job": "nulls.summarise", "error": str(error)})
    worlds = sorted(results.get("play", []), key=lambda w: (w["family"], w["strength"], w["via"], w["seed"]))
    return {
        "form": form,
        "seconds": round(seconds),
        "worlds": len(worlds),
        "by_files": sum(w["via"] == "files" for w in worlds),
        "by_schedule": sum(w["via"] == "schedule" for w in worlds),
        "bars": score.bars(worlds),
        "rules": score.by_rule(worlds),
        "families": score.by_family(worlds),
        "confusion": score.confusion(worlds),
        "bills": score.bill_errors(worlds, told=False),
        "bills_told": score.bill_errors(worlds, told=True),
        "bills_part_profiled": score.bill_errors(worlds, part_profiled=True),
        "unexplained": score.unexplained(worlds),
        "blame": score.blame_errors(worlds),
        "nulls": null_rows,
        "not_right": [
            {k: w[k] for k in ("family", "strength", "seed", "via")} | {"outcome": score.verdict_of(w)}
            for w in worlds
            if score.verdict_of(w) not in ("right", "quiet", "not felt")
        ],
        "failed": failed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few worlds of each kind, nothing stored")
    parser.add_argument("--odd", action="store_true", help="the seeds for tuning")
    parser.add_argument(
        "--nulls",
        metavar="TEST,…",
        help="play these tests' null worlds only, and keep what is stored of the others: they test the statistics alone, "
        "whatever the rules say",
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="play so many times the worlds, at least one of each kind"
    )
    parser.add_argument(
        "--decoy-share", type=float, help="likewise of decoys alone: false alarms are to be rarer than misses"
    )
    parser.add_argument("--family", action="append", help="only this kind; may be given again")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--raw", type=Path, help="store what was said of every world here, a line each")
    parser.add_argument("--output", type=Path, help="store the result here instead of in docs/")
    arguments = parser.parse_args()
    known = [family.name for family in FAMILIES]
    if unknown := set(arguments.family or ()) - set(known):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    counts: Mapping[str, Sequence[int]] = SHORT
    null_worlds = SHORT_NULLS
    if not arguments.short:
        shares = dict.fromkeys(FULL, arguments.share) | {"decoy": arguments.decoy_share or arguments.share}
        counts = {kind: [max(1, round(shares[kind] * n)) for n in each] for kind, each in FULL.items()}
        null_worlds = FULL_NULLS
    tests = [test.__name__ for test in nulls.TESTS]
    kept = None
    if arguments.family:
        tests = []
    if arguments.nulls is not None:
        kept, tests = json.loads(STORED.read_text(encoding="utf-8"))["nulls"], arguments.nulls.split(",")
    began = time.monotonic()
    # What runs at every change must not be what the page reports.
    odd = arguments.odd or arguments.short
    todo = list(jobs(counts, null_worlds, odd, arguments.short, tests, arguments.family or known))
    results = run_all(todo, arguments.processes)
    form = "short" if arguments.short else "full" if arguments.share >= 1 else "reduced"
    result = scored(results, time.monotonic() - began, form, kept)
    if arguments.raw is not None:
        lines = [json.dumps(world, ensure_ascii=False) + "\n" for world in results.get("play", ())]
        arguments.raw.write_text("".join(lines), encoding="utf-8")
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")
    elif not (arguments.short or arguments.odd or arguments.family):
        STORED.write_text(text, encoding="utf-8")
        PAGE.write_text(page.render(result), encoding="utf-8")
    print(page.render(result))
    for failure in result["failed"]:
        print(f"{failure['job']} failed:\n{failure['error']}", file=sys.stderr)
    return 1 if result["failed"] or bars.broken(result) else 0


if __name__ == "__main__":
    sys.exit(main())
