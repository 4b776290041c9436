"""What a page of a big trace costs: `python tests/benchmarks/report.py [--requests 1000000] [--told]`.

Seconds of the diagnosis and of the page beyond it, part by part; megabytes; seconds in Chromium from opening the file until
its text can be used and until its first chart is drawn. Printed, never asserted in tests.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from big_worlds import write_world

MADE = """
import json, sys, time
from pathlib import Path
from tailscope.align import Scope
from tailscope.config import Config
from tailscope.engine import diagnose
from tailscope.report import build
from tailscope.store import Trace

start = time.perf_counter()
with Trace(sys.argv[1], memory_limit=sys.argv[3]) as trace:
    diagnosis = diagnose(trace, Config(), Scope())
    diagnosed = time.perf_counter()
    parts = {}
    page = build.page(trace, diagnosis, Scope(), parts)
    made = time.perf_counter()
Path(sys.argv[2]).write_text(page, encoding="utf-8")
print(json.dumps({"diagnose": diagnosed - start, "page": made - diagnosed, "parts": parts}))
"""
#: When the page could be used, and when its first chart was there, by the browser's own clock.
WATCH = """
new MutationObserver(() => {
  if (document.documentElement?.dataset.ready) window.usable ??= performance.now();
  if (document.querySelector("[data-drawn]")) window.drawn ??= performance.now();
}).observe(document, { subtree: true, attributes: true });
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--told", action="store_true", help="with the schedule and token times")
    parser.add_argument("--memory-limit", default="3GB")
    parser.add_argument("--folder", type=Path, help="where to keep trace and page")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"world-{chosen.requests}-{chosen.told}.parquet"
        if not trace.exists():
            write_world(trace, chosen.requests, 4 * chosen.requests, told=chosen.told)
        measure(trace, folder / "report.html", chosen.memory_limit)


def measure(trace: Path, page: Path, memory_limit: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", MADE, str(trace), str(page), memory_limit],
        capture_output=True,
        text=True,
        check=True,
    )
    # DuckDB may have shown its progress before.
    told = json.loads(done.stdout.splitlines()[-1])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"diagnose          {told['diagnose']:.1f} s")
    print(f"page              {told['page']:.1f} s beyond that (limit 15 s), peak {peak:,.0f} MB")
    for name, seconds in sorted(told["parts"].items(), key=lambda item: -item[1]):
        print(f"  {name:16}{seconds:.2f} s")
    print(f"size              {page.stat().st_size / 1e6:.2f} MB (limit 5 MB)")
    usable, drawn = min(opened(page) for _ in range(3))
    print(f"Chromium          usable after {usable:.2f} s (limit 2 s), first chart after {drawn:.2f} s")


def opened(page: Path) -> tuple[float, float]:
    from playwright.sync_api import sync_playwright

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from chromium import CHROMIUM, until

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        tab.add_init_script(WATCH)
        tab.goto(page.absolute().as_uri())
        until(tab, "Boolean(window.usable && window.drawn)")
        usable, drawn = tab.evaluate("[window.usable, window.drawn]")
        browser.close()
    return usable / 1000, drawn / 1000


if __name__ == "__main__":
    main()
