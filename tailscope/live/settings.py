"""`[serve]` of tailscope.toml: what a running server listens on, scrapes, keeps and looks at; every key checked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tailscope import config as configuration
from tailscope.config import Config, known_keys, table_at, tables_at, text_at
from tailscope.errors import UsageError

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)(B|kB|MB|GB|TB)")
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
#: Limits of limits: a century, what gRPC can take, series that Prometheus and our memory can.
MOST_S, MOST_MESSAGE, MOST_LABELS = 36_500 * 86_400.0, 10**9, 10_000
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^:\s/]+):([0-9]{1,5})")


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Scrape:
    """`[[serve.scrape]]`: engines of one kind. `targets` are URLs; `files` and `dns` are looked up again and again."""

    targets: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    dns: tuple[str, ...] = ()
    scheme: str = "http"
    path: str = "/metrics"
    every_s: float = 5.0
    timeout_s: float = 4.0
    bearer_token_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True)
class Serve:
    trace: Path = Path("trace.parquet")
    listen: Address | None = Address("127.0.0.1", 9464)
    otlp_grpc: Address | None = Address("127.0.0.1", 4317)
    otlp_http: Address | None = Address("127.0.0.1", 4318)
    scrapes: tuple[Scrape, ...] = ()
    retention_s: float | None = None
    retention_bytes: int | None = None
    #: Rules look at the last `window_s` of arrivals, every `every_s`.
    window_s: float = 300.0
    every_s: float = 30.0
    #: Largest export request, unpacked.
    max_message: int = 16_000_000
    #: Tenants and sets of labels that are told apart in /metrics; the rest is `other`.
    tenants: int = 50
    label_sets: int = 200
    hash_ids: bool = False
    bearer_token_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    config: Config = field(default_factory=Config)


def load(path: Path) -> Serve:
    """Read a configuration file. Raises UsageError naming file and key for anything that is not understood."""
    return configuration.read(path, lambda raw: parse(raw, path.parent))


def parse(raw: Mapping[str, Any], folder: Path = Path()) -> Serve:
    """Paths in it are relative to `folder`."""
    config = configuration.parse(raw)
    table = table_at(raw, "serve")
    keys = {
        "trace", "listen", "otlp_grpc", "otlp_http", "scrape", "retention", "retention_bytes", "window", "every",
        "max_message", "tenants", "label_sets", "hash_ids", "bearer_token_file", "tls_cert_file", "tls_key_file",
    }  # fmt: skip
    known_keys(table, keys, "[serve]")
    found: dict[str, Any] = {"config": config}
    for key in ("listen", "otlp_grpc", "otlp_http"):
        if key in table:
            found[key] = _address(table, key)
    for key, name in (("retention", "retention_s"), ("window", "window_s"), ("every", "every_s")):
        if key in table:
            found[name] = _duration(table, key, "[serve]")
    for key, most in (("retention_bytes", 10**18), ("max_message", MOST_MESSAGE)):
        if key in table:
            found[key] = _bytes(table, key, most)
    for key in ("tenants", "label_sets"):
        if key in table:
            found[key] = _count(table, key)
    if "hash_ids" in table:
        found["hash_ids"] = _yes_or_no(table, "hash_ids")
    for key in ("trace", "bearer_token_file", "tls_cert_file", "tls_key_file"):
        if key in table:
            found[key] = folder / text_at(table, key, "[serve]")
    if ("tls_cert_file" in found) != ("tls_key_file" in found):
        raise UsageError("[serve]: tls_cert_file and tls_key_file go together; one of them is missing")
    found["scrapes"] = tuple(
        _scrape(entry, i, folder) for i, entry in enumerate(tables_at(table, "scrape", "serve."), 1)
    )
    return Serve(**found)


def address(text: str, place: str) -> Address:
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[2]) > 65535:
        raise UsageError(f"{place}: must be HOST:PORT, for example 127.0.0.1:4317, not {text!r}")
    return Address(match[1].strip("[]"), int(match[2]))


def duration(text: object, place: str) -> float:
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None or not float(match[1]):
        raise UsageError(f"{place}: must be a time above 0 such as 500ms, 30s, 15m, 2h or 7d, not {text!r}")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MOST_S:
        raise UsageError(f"{place}: must be at most {MOST_S / 86400:.0f}d, not {text!r}")
    return seconds


def url_of(target: str, scheme: str, path: str, place: str) -> str:
    """`HOST:PORT` or a URL as the URL to scrape. Raises UsageError."""
    if "://" not in target:
        address(target, place)
        return f"{scheme}://{target}{path}"
    try:
        parts = urlsplit(target)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise UsageError(f"{place}: must be HOST:PORT or an http(s) URL, not {target!r}")
    if parts.username or parts.password:
        raise UsageError(f"{place}: a URL here has no user or password; use bearer_token_file")
    return target if parts.path else target + path


def _scrape(entry: Mapping[str, Any], number: int, folder: Path) -> Scrape:
    place = f"[[serve.scrape]] {number}"
    keys = {"targets", "files", "dns", "scheme", "path", "every", "timeout", "bearer_token_file", "ca_file"}
    known_keys(entry, keys, place)
    found: dict[str, Any] = {}
    for key in ("targets", "files", "dns"):
        values = entry.get(key, [])
        if not isinstance(values, list) or not all(isinstance(v, str) and v for v in values):
            raise UsageError(f"{place} {key}: must be a list of strings")
        found[key] = tuple(values)
    if not any(found.values()):
        raise UsageError(f"{place}: give targets, files or dns")
    if "scheme" in entry:
        found["scheme"] = text_at(entry, "scheme", place)
        if found["scheme"] not in ("http", "https"):
            raise UsageError(f"{place} scheme: must be http or https")
    if "path" in entry:
        found["path"] = text_at(entry, "path", place)
        if not found["path"].startswith("/"):
            raise UsageError(f"{place} path: must begin with /")
    scheme, path = found.get("scheme", "http"), found.get("path", "/metrics")
    found["targets"] = tuple(url_of(t, scheme, path, f"{place} targets") for t in found["targets"])
    for name in found["dns"]:
        address(name, f"{place} dns")
    found["files"] = tuple(str(folder / pattern) for pattern in found["files"])
    if "every" in entry:
        found["every_s"] = _duration(entry, "every", place)
        found["timeout_s"] = 0.8 * found["every_s"]
    if "timeout" in entry:
        found["timeout_s"] = _duration(entry, "timeout", place)
    if found.get("timeout_s", 4.0) > found.get("every_s", 5.0):
        raise UsageError(f"{place} timeout: must not be longer than every")
    for key in ("bearer_token_file", "ca_file"):
        if key in entry:
            found[key] = folder / text_at(entry, key, place)
    return Scrape(**found)


def _address(table: Mapping[str, Any], key: str) -> Address | None:
    """Where to listen; `false` turns a listener off."""
    if table[key] is False:
        return None
    return address(text_at(table, key, "[serve]"), f"[serve] {key}")


def _duration(table: Mapping[str, Any], key: str, place: str) -> float:
    return duration(table[key], f"{place} {key}")


def _bytes(table: Mapping[str, Any], key: str, most: int) -> int:
    value = table[key]
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or not float(match[1]):
        raise UsageError(f"[serve] {key}: must be a size above 0 such as 500MB or 50GB, not {value!r}")
    size = float(match[1]) * _BYTES[match[2]]
    if not 1 <= size <= most:
        raise UsageError(f"[serve] {key}: must be from 1B to {most // 10**9}GB, not {value!r}")
    return int(size)


def _count(table: Mapping[str, Any], key: str) -> int:
    value = table[key]
    if type(value) is not int or not 1 <= value <= MOST_LABELS:
        raise UsageError(f"[serve] {key}: must be a whole number from 1 to {MOST_LABELS}")
    return value


def _yes_or_no(table: Mapping[str, Any], key: str) -> bool:
    value = table[key]
    if not isinstance(value, bool):
        raise UsageError(f"[serve] {key}: must be true or false")
    return value
