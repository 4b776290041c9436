"""`tailscope tail`: follows the findings of a running server in a terminal."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tailscope.errors import UsageError
from tailscope.live.access import read_token
from tailscope.live.settings import Address, address
from tailscope.safe import printable

POLL_S, TIMEOUT_S = 2.0, 5.0
STYLES = {"high": "red", "medium": "yellow", "low": "cyan"}


def tail(server: str, token: Path | None, ca: Path | None, console: Console) -> None:
    """Print what is open, then each change, until interrupted. Raises UsageError where nobody answers at first."""
    where = address(server, "tail")
    headers = {} if token is None else {"Authorization": f"Bearer {read_token(token)}"}
    context = None if ca is None else ssl.create_default_context(cafile=ca)
    try:
        # By the server's clock; changes of one look have one time.
        shown = max(
            (change["time_s"] for change in _get(where, "/api/history", headers, context)), default=0.0
        )
        for finding in _get(where, "/api/diagnosis", headers, context)["open"]:
            console.print(_line("open", finding["opened_s"], finding))
        silent = False
        while True:
            time.sleep(POLL_S)
            try:
                changes = _get(where, "/api/history", headers, context)
            except UsageError as error:
                if not silent:
                    console.print(Text(f"{error}; trying again", style="dim"))
                silent = True
                continue
            if silent:
                console.print(Text(f"{where} answers again", style="dim"))
                silent = False
            for change in [change for change in changes if change["time_s"] > shown]:
                console.print(_line(change["change"], change["time_s"], change))
                shown = change["time_s"]
    except KeyboardInterrupt:
        return


def _line(change: str, time_s: float, finding: dict[str, Any]) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(time_s))
    severity = str(finding["severity"])
    return Text.assemble(
        f"{clock} {change:<7} ",
        (f"{severity:<7}", STYLES.get(severity, "")),
        f" {printable(str(finding['rule']))}: {printable(str(finding['title']))}",
    )


def _get(where: Address, path: str, headers: dict[str, str], context: ssl.SSLContext | None) -> Any:
    if context is None:
        connection = http.client.HTTPConnection(where.host, where.port, timeout=TIMEOUT_S)
    else:
        connection = http.client.HTTPSConnection(where.host, where.port, timeout=TIMEOUT_S, context=context)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise UsageError(f"{where}: no answer: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise UsageError(f"{where}: answers {response.status} {response.reason}")
    try:
        return json.loads(body)
    except ValueError as error:
        raise UsageError(f"{where}: is no tailscope serve") from error
