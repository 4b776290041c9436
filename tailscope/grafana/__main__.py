"""Writes dashboards/; with `--check` writes nothing and exits with 1 where a file is out of date."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tailscope.grafana import classes, engine, fleet, pd, ranks
from tailscope.grafana.board import Board

COMMAND = "python -m tailscope.grafana"
FOLDER = Path("dashboards")


def boards() -> tuple[Board, ...]:
    return (fleet.board(), classes.board(), engine.board(), ranks.board(), pd.board())


def files() -> dict[str, str]:
    """Name in dashboards/ to content."""
    from tailscope.grafana.draw import to_json

    return {f"{board.name}.json": to_json(board) for board in boards()}


def out_of_date(folder: Path) -> list[str]:
    """Names of files that are not what the code makes, those included that it does not make any more."""
    made = files()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in made.keys() | there.keys() if made.get(name) != there.get(name))


def main(arguments: Sequence[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"usage: {COMMAND} [--check]", file=sys.stderr)
        return 2
    try:
        import grafana_foundation_sdk  # noqa: F401
    except ImportError:
        print("making dashboards needs grafana-foundation-sdk, which tailscope[dev] has", file=sys.stderr)
        return 2
    if arguments:
        stale = out_of_date(FOLDER)
        for name in stale:
            print(f"{FOLDER / name} is out of date; run: {COMMAND}", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    made = files()
    for path in FOLDER.glob("*.json"):
        if path.name not in made:
            path.unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
