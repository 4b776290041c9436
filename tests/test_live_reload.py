"""`serve` as a process: SIGHUP with a good, a wrong and an impossible configuration, and starts that cannot be."""

from __future__ import annotations

import http.server
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_live_kill import free_port

from tailscope.errors import UsageError
from tailscope.live import tail as tailing
from tailscope.live.access import Access, access_of
from tailscope.live.settings import parse
from tailscope.live.watch import RECORD, Watch

CONFIG = """
[serve]
trace = "t.parquet"
listen = "127.0.0.1:{port}"
otlp_grpc = false
otlp_http = false
{more}
"""


class Process:
    def __init__(self, folder: Path, port: int, more: str = "") -> None:
        self.path, self.port = folder / "tailscope.toml", port
        self.write(more)
        command = [sys.executable, "-P", "-m", "tailscope", "serve", "--config", str(self.path)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said: list[str] = []
        self._waited = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line.rstrip())

    def write(self, more: str, port: int | None = None) -> None:
        self.path.write_text(CONFIG.format(port=port or self.port, more=more))

    def reload(self, more: str, port: int | None = None) -> None:
        self.write(more, port)
        self.process.send_signal(signal.SIGHUP)

    def wait_said(self, text: str) -> None:
        """In a line after those that were waited for."""
        for _ in range(300):
            for number in range(self._waited, len(self.said)):
                if text in self.said[number]:
                    self._waited = number + 1
                    return
            time.sleep(0.1)
        raise AssertionError((text, self.said))

    def page(self) -> str:
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
                    return str(answer.read().decode())
            except OSError:
                time.sleep(0.1)
        raise AssertionError(self.said)

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self._reader.join(5)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


def test_a_configuration_with_an_error_leaves_the_old_one(tmp_path: Path) -> None:
    served = Process(tmp_path, free_port(), '[slo."<512"]\nttft_p99_s = 0.7')
    try:
        assert 'class="<512",metric="ttft",quantile="p99"} 0.7' in served.page()
        served.reload("tenants = 'many'")
        served.wait_said(
            "[serve] tenants: must be a whole number from 1 to 10000. The configuration stays as it was"
        )
        served.reload("= [")
        served.wait_said("tailscope.toml")
        served.reload('bearer_token_file = "missing"')
        served.wait_said("cannot read the bearer token")
        assert 'quantile="p99"} 0.7' in served.page()
        served.reload('[slo."<512"]\nttft_p99_s = 0.9')
        served.wait_said("configuration read again")
        assert 'quantile="p99"} 0.9' in served.page()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            # It can be read but not be run.
            served.reload("", taken.getsockname()[1])
            served.wait_said("cannot listen for /metrics and status")
            page = served.page()
        served.wait_said("/metrics and status on")
        assert 'quantile="p99"} 0.9' in page
        assert 'tailscope_config_reloads_total{outcome="error"} 4.0' in page
        assert 'tailscope_config_reloads_total{outcome="good"} 1.0' in page
    finally:
        assert served.end() == 0
    assert not [line for line in served.said if "Traceback" in line]


def test_ports_that_are_taken_end_the_start_with_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for keys in (f'otlp_grpc = "127.0.0.1:{port}"', f'otlp_grpc = false\notlp_http = "127.0.0.1:{port}"'):
            (tmp_path / "tailscope.toml").write_text(f'[serve]\nlisten = "127.0.0.1:0"\n{keys}\n')
            command = [
                sys.executable,
                "-P",
                "-m",
                "tailscope",
                "serve",
                "--config",
                str(tmp_path / "tailscope.toml"),
            ]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert ended.returncode == 2
            assert f"127.0.0.1:{port}: cannot listen" in ended.stderr.splitlines()[-1]
            assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("keys", "files", "problem"),
    [
        ({"bearer_token_file": "t"}, {}, "t: cannot read the bearer token"),
        ({"bearer_token_file": "t"}, {"t": b"\xff\xfe"}, "t: cannot read the bearer token"),
        ({"bearer_token_file": "t"}, {"t": b"two words"}, "t: must hold one bearer token"),
        ({"tls_cert_file": "c", "tls_key_file": "k"}, {"c": b"x", "k": b"y"}, "no certificate and key"),
        ({"tls_cert_file": "c", "tls_key_file": "k"}, {}, "no certificate and key"),
        ({"scrape": [{"targets": ["a:1"], "bearer_token_file": "t"}]}, {}, "t: cannot read the bearer token"),
        ({"scrape": [{"targets": ["a:1"], "ca_file": "c"}]}, {"c": b"x"}, "c: no certificates"),
    ],
)  # fmt: skip
def test_files_of_access_that_cannot_be_used_are_told_at_once(
    tmp_path: Path, keys: dict[str, Any], files: dict[str, bytes], problem: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        access_of(parse({"serve": keys}, tmp_path))


def test_a_key_with_a_password_does_not_ask_for_it(tmp_path: Path) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:secret", "-subj", "/CN=x"]
    command += ["-keyout", str(tmp_path / "k"), "-out", str(tmp_path / "c")]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl")
    with pytest.raises(UsageError, match="no certificate and key"):
        access_of(parse({"serve": {"tls_cert_file": "c", "tls_key_file": "k"}}, tmp_path))


def test_tokens_of_any_bytes_are_compared() -> None:
    access = Access("s3cret")
    assert not access.allows("Bearer \udcff")
    assert not access.allows(b"\xff")
    assert access.allows("Bearer s3cret")


def test_a_history_with_a_line_that_is_cut_off_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h"
    fields = dict.fromkeys(RECORD, 0) | dict.fromkeys(("rule", "severity", "culprit", "victim", "title"), "x")
    opened, closed = (json.dumps(fields | {"change": change}).encode() for change in ("opened", "closed"))
    path.write_bytes(opened + b'\n{"change":"clo\n\xff\xfe\n[]\n' + closed + b"\n")
    watch = Watch(tmp_path, None, 1.0, 1.0, path)
    assert [entry["change"] for entry in watch.history()] == ["opened", "closed"]


@contextmanager
def answering(answers: dict[str, list[bytes]]) -> Iterator[str]:
    """The last answer of a path is given again and again."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers[self.path]
            body = found.pop(0) if len(found) > 1 else found[0]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            # A thread that still polls a closed socket is told at once, again and again, that it is closed.
            server.shutdown()


def told(answers: dict[str, list[Any]], polls: int, monkeypatch: pytest.MonkeyPatch) -> str:
    turns = iter(range(polls))

    def sleep(_: float) -> None:
        if next(turns, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    console = Console(file=io.StringIO(), width=200)
    with answering(
        {path: [json.dumps(a).encode() for a in found] for path, found in answers.items()}
    ) as where:
        tailing.tail(where, None, None, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def change(number: int, time_s: float, title: str = "t") -> dict[str, Any]:
    return {
        "change": "opened",
        "time_s": time_s,
        "severity": "high",
        "rule": f"rule-{number}",
        "title": title,
    }


def test_tail_shows_all_changes_of_a_look_by_the_servers_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    old = [change(0, 5.0)]
    new = [*old, change(1, 6.0), change(2, 6.0)]
    text = told({"/api/diagnosis": [{"open": []}], "/api/history": [old, old, new]}, 3, monkeypatch)
    assert [f"rule-{i}" in text for i in range(3)] == [False, True, True]
    assert text.count("rule-1") == 1


def test_tail_prints_what_anybody_wrote_without_its_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hostile = "\x1b[2J\x1b]0;x\x07\u202e[red]"
    finding = change(1, 6.0, hostile) | {"severity": hostile, "opened_s": 1.0}
    answers: dict[str, list[Any]] = {
        "/api/diagnosis": [{"open": [finding]}],
        "/api/history": [[], [finding | {"change": hostile}]],
    }
    text = told(answers, 2, monkeypatch)
    assert text.count("[red]") >= 3
    assert not set("\x1b\x07\u202e") & set(text)


@pytest.mark.parametrize(
    "answer", [[], {}, {"open": 1}, {"open": [1]}, {"open": [{"opened_s": "x"}]}, None, "x"]
)
def test_tail_says_when_it_is_no_server_of_ours(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="is no tailscope serve"):
        told({"/api/diagnosis": [answer], "/api/history": [[]]}, 1, monkeypatch)
    with pytest.raises(UsageError, match="is no tailscope serve"):
        told({"/api/diagnosis": [{"open": []}], "/api/history": [answer or 1]}, 1, monkeypatch)
