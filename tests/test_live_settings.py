"""`[serve]` of the configuration: what is understood, and what is said of the rest."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tailscope import config as configuration
from tailscope.errors import UsageError
from tailscope.live.settings import Address, Scrape, Serve, load, parse
from tailscope.live.targets import Target, targets_of


def of(**serve: Any) -> Serve:
    return parse({"serve": serve}, Path("/etc/ts"))


def test_defaults_listen_on_the_loopback_address_alone() -> None:
    found = of()
    assert {a.host for a in (found.listen, found.otlp_grpc, found.otlp_http) if a} == {"127.0.0.1"}
    assert found.retention_s is None


def test_everything_is_understood() -> None:
    found = of(
        trace="t.parquet", listen="[::1]:1", otlp_grpc=False, otlp_http="0.0.0.0:4318", retention="7d",
        retention_bytes="1.5GB", window="2m", every="10s", max_message="4MB", tenants=3, label_sets=9, hash_ids=True,
        bearer_token_file="token", tls_cert_file="c.pem", tls_key_file="/k.pem",
        scrape=[{"targets": ["a:1", "https://b/m"], "files": ["x/*.json"], "dns": ["n:2"], "every": "1s", "path": "/p"}],
    )  # fmt: skip
    assert found.trace == Path("/etc/ts/t.parquet")
    assert found.listen == Address("::1", 1)
    assert str(found.listen) == "[::1]:1"
    assert found.otlp_grpc is None
    assert (found.retention_s, found.retention_bytes, found.window_s, found.every_s) == (
        604_800,
        1_500_000_000,
        120,
        10,
    )
    assert (found.tls_cert_file, found.tls_key_file) == (Path("/etc/ts/c.pem"), Path("/k.pem"))
    assert found.scrapes == (
        Scrape(
            ("http://a:1/p", "https://b/m"),
            ("/etc/ts/x/*.json",),
            ("n:2",),
            path="/p",
            every_s=1,
            timeout_s=0.8,
        ),
    )


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        ({"liste": "a:1"}, "[serve] liste: unknown key; known are bearer_token_file, every"),
        ({"listen": "9464"}, "[serve] listen: must be HOST:PORT, for example 127.0.0.1:4317, not '9464'"),
        ({"listen": "a:99999"}, "[serve] listen: must be HOST:PORT"),
        ({"listen": True}, "[serve] listen: must be a string"),
        ({"retention": "7 days"}, "[serve] retention: must be a time above 0 such as 500ms, 30s, 15m, 2h or 7d, not '7 days'"),
        ({"window": "0s"}, "[serve] window: must be a time above 0"),
        ({"retention_bytes": 5}, "[serve] retention_bytes: must be a size above 0 such as 500MB or 50GB, not 5"),
        ({"tenants": 0}, "[serve] tenants: must be a whole number from 1"),
        ({"hash_ids": 1}, "[serve] hash_ids: must be true or false"),
        ({"tls_key_file": "k"}, "tls_cert_file and tls_key_file go together"),
        ({"scrape": {"targets": ["a:1"]}}, "serve.scrape: write it as [[serve.scrape]]"),
        ({"scrape": [{}]}, "[[serve.scrape]] 1: give targets, files or dns"),
        ({"scrape": [{"targets": "a:1"}]}, "[[serve.scrape]] 1 targets: must be a list of strings"),
        ({"scrape": [{"targets": ["a"]}]}, "[[serve.scrape]] 1 targets: must be HOST:PORT"),
        ({"scrape": [{"targets": ["ftp://a:1"]}]}, "[[serve.scrape]] 1 targets: must be HOST:PORT or an http(s) URL"),
        ({"scrape": [{"targets": ["http://u:p@a:1"]}]}, "a URL here has no user or password"),
        ({"scrape": [{"targets": ["a:1"], "every": "1s", "timeout": "2s"}]}, "timeout: must not be longer than every"),
        ({"scrape": [{"targets": ["a:1"], "scheme": "file"}]}, "scheme: must be http or https"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_its_place(serve: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        of(**serve)
    assert said in str(error.value)


def test_a_file_is_named_and_other_commands_leave_the_table_alone(tmp_path: Path) -> None:
    path = tmp_path / "tailscope.toml"
    path.write_text('[serve]\nlisten = "nowhere"\n')
    with pytest.raises(UsageError, match=r"tailscope\.toml: \[serve\] listen"):
        load(path)
    assert configuration.load(path) == configuration.Config()


def found_by(scrape: Scrape) -> tuple[list[Target], list[str]]:
    return asyncio.run(targets_of(scrape))


def test_files_as_prometheus_has_them(tmp_path: Path) -> None:
    groups = [
        {"targets": ["a:1", "b:2"], "labels": {"__metrics_path__": "/m", "job": "vllm"}},
        {"targets": ["c:3"], "labels": {"instance": "engine-c", "__scheme__": "https"}},
    ]
    (tmp_path / "t.json").write_text(json.dumps(groups))
    found, problems = found_by(Scrape(files=(str(tmp_path / "*.json"),)))
    assert problems == []
    assert found == [
        Target("http://a:1/m", "a:1"),
        Target("http://b:2/m", "b:2"),
        Target("https://c:3/metrics", "engine-c"),
    ]


def test_files_in_yaml_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "t.yml").write_text("- targets: [a:1, 'b:2']\n  labels: {instance: engine}\n")
    (tmp_path / "u.yaml").write_text("- targets: [c:3\n")
    (tmp_path / "v.yaml").write_text("!!python/object/apply:os.system [true]\n")
    found, problems = found_by(Scrape(files=(str(tmp_path / "*"),)))
    assert found == [Target("http://a:1/metrics", "engine"), Target("http://b:2/metrics", "engine")]
    assert [problem.split(": cannot be read as YAML: ")[0] for problem in problems] == [
        str(tmp_path / "u.yaml"),
        str(tmp_path / "v.yaml"),
    ]


@pytest.mark.parametrize(
    "text", ["", "{", "{}", '[{"targets": [1]}]', '[{"labels": {}}]', '[{"targets": ["a"]}]', "[1]"]
)
def test_a_broken_file_is_told_and_the_others_are_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json").write_text('[{"targets": ["b:2"]}]')
    found, problems = found_by(Scrape(files=(str(tmp_path / "*.json"),)))
    assert found == [Target("http://b:2/metrics", "b:2")]
    assert len(problems) == 1
    assert "a.json" in problems[0]


def test_names_give_a_target_an_address() -> None:
    found, problems = found_by(Scrape(dns=("localhost:80", "no.such.host.invalid:80")))
    assert Target("http://127.0.0.1:80/metrics", "127.0.0.1:80") in found
    assert len(problems) == 1
    assert problems[0].startswith("no.such.host.invalid:80: cannot be looked up")
