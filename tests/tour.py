"""Holds docs/tour.md to what the program says, and makes its pictures: `python tests/tour.py [--check]`.

Its commands are run in a folder of their own. A block of text shows some lines, in order, of what the last command before it
printed that prints anything like it; a picture's text is a sentence of the page it shows. With --check nothing is written.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from called import called

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "tour.md"
PICTURES = ROOT / "docs" / "tour"
#: Bytes of a picture: a repository keeps every version of it.
LARGEST = 150_000
WIDTH = 1000


class Picture(NamedTuple):
    """Of a page that the tour makes: the figure of a chart."""

    page: str
    chart: str


SHOWN = {
    "mixed-load-steps": Picture("mixed-load.html", "iterations"),
    "moe-straggler-ranks": Picture("moe-straggler.html", "ranks"),
    "moe-straggler-phases": Picture("moe-straggler.html", "phases"),
    "scheduled-request": Picture("scheduled.html", "waterfall"),
}
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```|!\[([^\]]*)\]\(tour/([^)]+)\.png\)", re.DOTALL | re.MULTILINE)


class Words(HTMLParser):
    """What a reader of a page reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.words.append(data)


def run(command: str, folder: Path) -> str:
    name, *args = shlex.split(command)
    assert name == "tailscope", command
    done = called(*args, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr.strip()}")
    return done.stdout


def stale(folder: Path) -> list[str]:
    """What the tour shows that is not so. `folder` is left with the traces and pages of its commands."""
    for name in ("examples", "tests"):
        (folder / name).symlink_to(ROOT / name)
    found: list[str] = []
    printed: list[str] = []
    pictures = []
    for kind, block, alt, picture in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if picture:
            pictures.append(picture)
            found += _of_picture(picture, alt, folder)
        elif kind == "sh":
            for command in block.splitlines():
                out = run(command, folder).splitlines()
                # A page or a file that is written says so in a line; what was diagnosed before is still spoken of.
                if len(out) > 3:
                    printed = [line.rstrip() for line in out]
        else:
            found += _of_text(block, printed)
    found += [f"no picture called {name}" for name in SHOWN if name not in pictures]
    return found


def _of_text(block: str, printed: list[str]) -> list[str]:
    at = 0
    for line in map(str.rstrip, block.splitlines()):
        if line == "…":
            continue
        try:
            at = printed.index(line, at) + 1
        except ValueError:
            return [f"not printed, or not there: {line}"]
    return []


def _of_picture(name: str, alt: str, folder: Path) -> list[str]:
    if name not in SHOWN:
        return [f"nothing says what {name}.png shows"]
    words = Words()
    words.feed((folder / SHOWN[name].page).read_text(encoding="utf-8"))
    said = " ".join("".join(words.words).split())
    problems = [] if alt in said else [f"{SHOWN[name].page} does not say: {alt}"]
    path = PICTURES / f"{name}.png"
    if not path.is_file():
        return [*problems, f"{path.name} is missing"]
    return (
        [*problems, f"{path.name} is larger than {LARGEST:,} bytes"]
        if path.stat().st_size > LARGEST
        else problems
    )


def take(folder: Path) -> None:
    """The pictures, of the pages that `stale` left."""
    from chromium import drawn, opened

    PICTURES.mkdir(exist_ok=True)
    for file in dict.fromkeys(picture.page for picture in SHOWN.values()):
        with opened(folder / file, width=WIDTH) as (page, said):
            drawn(page)
            # What stays at the top of the window would lie over the picture.
            page.evaluate(
                "document.querySelectorAll('header').forEach(e => { e.style.position = 'static'; })"
            )
            for name, picture in SHOWN.items():
                if picture.page == file:
                    figure = page.locator(f"figure:has([data-chart={picture.chart}])")
                    figure.screenshot(path=PICTURES / f"{name}.png")
            if said:
                raise SystemExit(f"{file}: {said}")


def main(args: list[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        found = stale(Path(name))
        if args != ["--check"]:
            take(Path(name))
            found = [problem for problem in found if not problem.endswith("is missing")]
    for problem in found:
        print(problem)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
