from __future__ import annotations

from pathlib import Path

import pytest

from tailscope.config import (
    DEFAULT_CLASSES,
    Attributes,
    Config,
    RequestClass,
    Slo,
    SourceRule,
    load,
    parse_slo,
)
from tailscope.errors import UsageError

EVERYTHING = """
[[class]]
name = "chat"
[class.where]
prompt_tokens = [0, 4096]
output_tokens = [1]
max_tokens = [1, 2]
priority = [-5, 5]
tenant = "acme"
model = ["a", "b"]
adapter = "x"
instance = ["i"]

[[class]]
name = "rest"

[slo.chat]
ttft_p99_s = 2
itl_p95_s = 0.1

[slo.rest]
e2e_p50_s = 60.5

[[source]]
path = "*/engine0/*"
instance = "engine0"

[attributes]
tenant = "app.tenant"
priority = "app.priority"
class = "app.class"
model = "app.model"
adapter = "app.adapter"
"""


def configuration(folder: Path, text: str) -> Path:
    path = folder / "t.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    assert load(configuration(tmp_path, EVERYTHING)) == Config(
        classes=(
            RequestClass(
                "chat",
                {
                    "prompt_tokens": (0, 4096),
                    "output_tokens": (1, None),
                    "max_tokens": (1, 2),
                    "priority": (-5, 5),
                },
                {"tenant": ("acme",), "model": ("a", "b"), "adapter": ("x",), "instance": ("i",)},
            ),
            RequestClass("rest"),
        ),
        slos=(
            Slo("chat", "TTFT", "p99", 2.0),
            Slo("chat", "ITL", "p95", 0.1),
            Slo("rest", "E2E", "p50", 60.5),
        ),
        sources=(SourceRule("*/engine0/*", "engine0"),),
        attributes=Attributes("app.tenant", "app.priority", "app.class", "app.model", "app.adapter"),
    )


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(None) == Config()
    assert load(configuration(tmp_path, "")).classes == DEFAULT_CLASSES
    Path("tailscope.toml").write_text('[[class]]\nname = "mine"\n')
    assert [c.name for c in load(None).classes] == ["mine"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clas = 1", "clas: unknown key; known are attributes, class, serve, slo, source"),
        ("class = 1", "class: write it as [[class]]"),
        ("[class]\nname = 'a'", "class: write it as [[class]]"),
        ("source = ['a']", "source: write it as [[source]]"),
        (
            "[[class]]\nname = 'a'\n[[class]]\nnam = 'b'",
            "[[class]] 2 nam: unknown key; known are name, where",
        ),
        ("[[class]]\nwhere = {}", "[[class]] 1 name: must be a string"),
        ("[[class]]\nname = ''", "[[class]] 1 name: must be a string"),
        ("[[class]]\nname = 'a'\n[[class]]\nname = 'a'", "[[class]]: two classes have the same name"),
        ("[[class]]\nname = 'a'\nwhere = 3", "[[class]] 1 where: must be a table"),
        (
            "[[class]]\nname = 'a'\nwhere = {colour = 'red'}",
            "[[class]] 1 where.colour: unknown; use one of prompt_tokens, output_tokens, max_tokens, priority, "
            "tenant, model, adapter, instance",
        ),
        *(
            (
                f"[[class]]\nname = 'a'\nwhere = {{prompt_tokens = {test}}}",
                "[[class]] 1 where.prompt_tokens: must be [min] or [min, max], whole numbers; max is exclusive",
            )
            for test in ("5", "[]", "[1, 2, 3]", "[1.5]", "['1']", "[true]", "{}")
        ),
        (
            "[[class]]\nname = 'a'\nwhere = {prompt_tokens = [5, 5]}",
            "[[class]] 1 where.prompt_tokens: max must be above min",
        ),
        *(
            (
                f"[[class]]\nname = 'a'\nwhere = {{tenant = {test}}}",
                "[[class]] 1 where.tenant: must be a string or a list of strings",
            )
            for test in ("5", "[1]", "[]", "{}")
        ),
        ("slo = 1", "slo: must be a table"),
        ("[slo]\nchat = 2", "[slo.chat]: must be a table such as { ttft_p99_s = 2.0 }"),
        (
            "[slo.chat]\nttft_p98_s = 2",
            "[slo.chat] ttft_p98_s: unknown; use one of e2e_p50_s, e2e_p95_s, e2e_p99_s, itl_p50_s, itl_p95_s, "
            "itl_p99_s, tpot_p50_s, tpot_p95_s, tpot_p99_s, ttft_p50_s, ttft_p95_s, ttft_p99_s",
        ),
        *(
            (
                f"[slo.chat]\nttft_p99_s = {limit}",
                "[slo.chat] ttft_p99_s: must be a positive number of seconds",
            )
            for limit in ("0", "-1", "nan", "inf", "true", "'2'", "1" + "0" * 400)
        ),
        ("[[source]]\npath = 'x'", "[[source]] 1 instance: must be a string"),
        ("[[source]]\npath = 1\ninstance = 'a'", "[[source]] 1 path: must be a string"),
        (
            "[[source]]\npath = 'x'\ninstance = 'a'\nengine = 3",
            "[[source]] 1 engine: unknown key; known are instance, path, rank",
        ),
        ("attributes = 1", "attributes: must be a table"),
        ("[attributes]\ntenant = 1", "[attributes] tenant: must be the name of a span attribute"),
        ("[attributes]\ntenant = ''", "[attributes] tenant: must be the name of a span attribute"),
        (
            "[attributes]\ntennant = 'a'",
            "[attributes] tennant: unknown key; known are adapter, class, model, priority, tenant",
        ),
    ],
)
def test_what_is_not_understood_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = configuration(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize("content", [b"= 1", b"\xff", b"a = " + b"[" * 100_000, b"a = 1\na = 2"])
def test_a_file_that_is_no_toml(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match="not valid TOML"):
        load(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.toml: cannot read the configuration: No such file"):
        load(tmp_path / "gone.toml")
    with pytest.raises(UsageError, match="cannot read the configuration: Is a directory"):
        load(tmp_path)


def test_objectives_on_the_command_line() -> None:
    assert parse_slo("<512:ttft_p99_s=2") == Slo("<512", "TTFT", "p99", 2.0)
    assert parse_slo("a:b: tpot_p50_s =1e-2") == Slo("a:b", "TPOT", "p50", 0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--slo '': write CLASS:METRIC=SECONDS, for example '<512:ttft_p99_s=2.0'"),
        (
            "ttft_p99_s=2",
            "--slo 'ttft_p99_s=2': write CLASS:METRIC=SECONDS, for example '<512:ttft_p99_s=2.0'",
        ),
        (
            ":ttft_p99_s=2",
            "--slo ':ttft_p99_s=2': write CLASS:METRIC=SECONDS, for example '<512:ttft_p99_s=2.0'",
        ),
        (
            "a:ttft_p99_s",
            "--slo 'a:ttft_p99_s': write CLASS:METRIC=SECONDS, for example '<512:ttft_p99_s=2.0'",
        ),
        ("a:ttft_p99_s=2s", "--slo 'a:ttft_p99_s=2s': '2s' is not a number of seconds"),
        ("a:ttft_p99_s=nan", "[slo.a] ttft_p99_s: must be a positive number of seconds"),
        ("a:ttft_p99_s=-1", "[slo.a] ttft_p99_s: must be a positive number of seconds"),
    ],
)
def test_an_objective_that_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_slo(text)
    assert str(caught.value) == message
