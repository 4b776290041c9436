"""Which engines to scrape: a list, files as Prometheus's file-based discovery reads them, names in DNS."""

from __future__ import annotations

import asyncio
import glob
import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tailscope.errors import UsageError
from tailscope.live.settings import Address, Scrape, address, url_of

#: Files and names are looked up again after this time.
REFRESH_S = 10.0
MOST_TARGETS = 10_000


@dataclass(frozen=True)
class Target:
    """An engine's page of metrics; rows of it belong to `instance`."""

    url: str
    instance: str


async def targets_of(scrape: Scrape) -> tuple[list[Target], list[str]]:
    """What there is to scrape now, each URL once, and what could not be looked up."""
    problems: list[str] = []
    found = [Target(url, _host(url)) for url in scrape.targets]
    for pattern in scrape.files:
        # A pattern that matches nothing is no error: files may come later.
        for path in sorted(glob.glob(pattern)):  # noqa: PTH207 (an absolute pattern)
            try:
                found += _of_file(Path(path), scrape)
            except UsageError as error:
                problems.append(str(error))
    for name in scrape.dns:
        try:
            found += await _of_dns(name, scrape)
        except (OSError, UnicodeError) as error:  # a name with a label of 64 letters is no text to DNS
            problems.append(f"{name}: cannot be looked up: {getattr(error, 'strerror', None) or error}")
    by_url = {target.url: target for target in found}
    return list(by_url.values())[:MOST_TARGETS], problems


def _of_file(path: Path, scrape: Scrape) -> list[Target]:
    """`[{"targets": ["HOST:PORT"], "labels": {…}}]` in JSON or, in a `.yml` or `.yaml`, the same in YAML. The labels `instance`,
    `__scheme__` and `__metrics_path__` count. Raises UsageError."""
    written = "YAML" if path.suffix in (".yml", ".yaml") else "JSON"
    try:
        text = path.read_bytes()
        groups = yaml.safe_load(text) if written == "YAML" else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"{path}: cannot be read as {written}: {error}") from error
    if not isinstance(groups, list):
        raise UsageError(f"{path}: must be a list of groups with targets")
    found = []
    for number, group in enumerate(groups, 1):
        place = f"{path}, group {number}"
        targets = group.get("targets") if isinstance(group, dict) else None
        labels = group.get("labels") or {} if isinstance(group, dict) else {}
        if not _texts(targets) or not isinstance(labels, dict) or not _texts(labels.values()):
            raise UsageError(f"{place}: must have targets, a list of HOST:PORT, and labels, strings by name")
        for target in targets or ():
            url = url_of(
                target,
                labels.get("__scheme__", scrape.scheme),
                labels.get("__metrics_path__", scrape.path),
                place,
            )
            found.append(Target(url, labels.get("instance") or _host(url)))
    return found


async def _of_dns(name: str, scrape: Scrape) -> list[Target]:
    """A target for each address of the name."""
    where = address(name, "dns")
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    hosts = sorted({info[4][0] for info in infos})
    places = [str(Address(str(host), where.port)) for host in hosts]
    return [Target(f"{scrape.scheme}://{place}{scrape.path}", place) for place in places]


def _texts(values: Iterable[Any] | None) -> bool:
    return isinstance(values, Iterable) and all(isinstance(value, str) for value in values)


def _host(url: str) -> str:
    return url.split("://", 1)[1].split("/", 1)[0]
