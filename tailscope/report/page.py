"""One file: template, style, scripts and data. Nothing in it loads anything, and only its own scripts may run."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Any

import orjson

from tailscope import __version__
from tailscope.report.html import Html, el, text

#: In the order they run; one script, so that the policy names it by one hash.
SCRIPTS = ("core.js", "latency.js", "requests.js", "engine.js", "ranks.js", "main.js")


def assemble(name: str, sections: list[tuple[str, str, Html]], data: dict[str, Any]) -> str:
    """`sections`: id, short title for the navigation, and content."""
    script = "\n".join(_asset(part) for part in SCRIPTS)
    filled = {
        "policy": _policy(script),
        "version": text(__version__),
        "title": text(f"{name} · tailscope", 200),
        "name": text(name, 200),
        "style": _asset("page.css"),
        "nav": el(
            "ul", [el("li", el("a", title, href=f"#{place}")) for place, title, _ in sections if title]
        ),
        "main": Html("\n".join(content for _, _, content in sections)),
        "data": packed(orjson.dumps(data)),
        "plotly": _plotly()[0],
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filled[match[1]], _asset("page.html"))


def _policy(script: str) -> str:
    """Only this page's script and Plotly's may run, by their hashes, and nothing may be fetched."""
    allowed = " ".join(f"'sha256-{h}'" for h in (_sha256(script), _plotly()[1]))
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def packed(raw: bytes) -> str:
    """As a script that is none: base64 has no `<`."""
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode("ascii")


@cache
def _plotly() -> tuple[str, str]:
    """Plotly's script packed, and its hash."""
    source = (files("plotly") / "package_data" / "plotly.min.js").read_text("utf-8")
    raw = source.encode()
    return base64.b64encode(gzip.compress(raw, 9, mtime=0)).decode("ascii"), _sha256(source)


def _sha256(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")


@cache
def _asset(name: str) -> str:
    return (files("tailscope.report") / name).read_text("utf-8")
