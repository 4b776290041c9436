"""The repository's own files, as a commit of the working tree would hold them."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Left out where there is no git to ask, as in an unpacked sdist.
IGNORED = {"build", "dist", "__pycache__"}


def source_files(*folders: str) -> list[Path]:
    """Files below `folders` (all without any), relative to the root: tracked ones and new ones not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        found = {Path(name) for name in listed.split("\0") if name}
    except (OSError, subprocess.CalledProcessError):
        found = {
            path.relative_to(ROOT)
            for folder in folders or (".",)
            for path in (ROOT / folder).rglob("*")
            if not any(_ignored(part) for part in path.relative_to(ROOT).parts)
        }
    return sorted(path for path in found if (ROOT / path).is_file())


def _ignored(name: str) -> bool:
    return name in IGNORED or name.startswith(".") or name.endswith(".egg-info")
