"""The example of a comment on a pull request: its steps run, here against a `gh` that only writes down what it is asked."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from real import EXAMPLE, ROOT

FILE = ROOT / "examples" / "pull-request" / "tailscope.yml"
WORKFLOW: dict[Any, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in WORKFLOW["jobs"]["compare"]["steps"] if "name" in step}

#: Keeps one comment in a file, as GitHub would: lists it, makes it, changes it.
GH = """#!{python}
import json, pathlib, sys
args = sys.argv[1:]
calls = pathlib.Path("calls.json")
known = json.loads(calls.read_text()) if calls.exists() else []
method = args[args.index("--method") + 1] if "--method" in args else "GET"
path = next(a for a in args if a.startswith("repos/"))
if method == "GET":
    if known:
        print(7)
else:
    body = args[args.index("-F") + 1]
    assert body.startswith("body=@")
    known.append([method, path, pathlib.Path(body[6:]).read_text()])
    calls.write_text(json.dumps(known))
    print("{{}}")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two runs lie, and what is said of them once they are compared."""
    place = tmp_path_factory.mktemp("place")
    tools = place / "bin"
    tools.mkdir()
    for name, text in {
        "gh": GH.format(python=sys.executable),
        "tailscope": f'#!/bin/sh\nexec {sys.executable} -P -m tailscope "$@"\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    for side in ("before", "after"):
        (place / side).symlink_to(EXAMPLE)
    done = run(place, "Compare")
    assert done.returncode == 0, done.stderr
    return place


def run(place: Path, step: str) -> subprocess.CompletedProcess[str]:
    # As the runner does.
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[step]["run"]],
        cwd=place,
        env={
            "PATH": f"{place / 'bin'}:{os.environ['PATH']}",
            "HOME": str(place),
            "GITHUB_STEP_SUMMARY": str(place / "summary.md"),
            "GITHUB_REPOSITORY": "someone/something",
            "PULL_REQUEST": "12",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_comment_is_made_once_and_then_kept_up_to_date(place: Path) -> None:
    comment = (place / "comment.md").read_text()
    assert comment.startswith("<!-- tailscope -->\n## Tail latency\n\n**")
    assert len(comment) < 65_536
    summary = (place / "summary.md").read_text()
    assert summary.startswith(comment) and "### 1. HIGH: KV cache ran out" in summary
    for _ in range(2):
        done = run(place, "Comment")
        assert done.returncode == 0, done.stderr
    calls = json.loads((place / "calls.json").read_text())
    assert [call[:2] for call in calls] == [
        ["POST", "repos/someone/something/issues/12/comments"],
        ["PATCH", "repos/someone/something/issues/comments/7"],
    ]
    assert all(call[2] == comment for call in calls)


def test_the_gate_prints_annotations_and_its_status_is_the_comparisons(place: Path) -> None:
    done = run(place, "Gate")
    # Of one trace compared with itself nothing is slower; 4 where it is too short to test anything.
    assert done.returncode in (0, 4), done.stderr
    lines = done.stdout.splitlines()
    assert lines and all(line.startswith(("::notice title=", "::warning title=")) for line in lines)


def test_values_reach_scripts_by_the_environment_only() -> None:
    for step in STEPS.values():
        assert "${{" not in step["run"]
    assert [name for name, step in STEPS.items() if "GH_TOKEN" in step.get("env", {})] == ["Comment"]
