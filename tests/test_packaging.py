"""What a user installs: the wheel holds every file it should and nothing else, and works away from the checkout."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest
from tree import ROOT, source_files

import tailscope
from tailscope import registry

#: Folder of the checkout -> where it is installed.
INSTALLED = {
    "tailscope": "tailscope",
    "collectors": "tailscope/collectors",
    "dashboards": "tailscope/dashboards",
    "rules": "tailscope/rules",
    "examples": "tailscope/examples",
}
#: What an import is called where it is not called like its distribution.
DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "opentelemetry": "opentelemetry-proto",
    "prometheus_client": "prometheus-client",
    "yaml": "PyYAML",
}
#: What only makes files of the repository.
FOR_MAKING = {"grafana_foundation_sdk": "grafana-foundation-sdk"}
#: Imported by a dependency of ours for us: `trace.requests.df()` is DuckDB's, and needs it.
FOR_OTHERS = {"pandas"}
#: Read as a file, not imported: its script goes into pages.
READ = {"plotly"}
#: Its modules are `google.rpc`, as protobuf's are `google.protobuf`.
IN_A_SHARED_PACKAGE = {"googleapis-common-protos"}
NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|Temporary failure in name resolution|"
    r"Network is unreachable|Connection refused|No route to host"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env.update(NO_COLOR="1", COLUMNS="140")
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, which is built from a copy: setuptools would leave folders beside the sources."""
    folder = tmp_path_factory.mktemp("packaging")
    checkout = folder / "check out"
    for path in source_files():
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, checkout / path)
    built = run(sys.executable, "-P", "-m", "build", "--outdir", folder / "dist", cwd=checkout)
    output = built.stdout + built.stderr
    if built.returncode and NO_NETWORK.search(output):
        pytest.skip("the package index is not reachable, and the build needs setuptools from it")
    assert built.returncode == 0, output
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    (found,) = (folder / "dist").glob("*.whl")
    return found


@pytest.mark.packaging
def test_the_wheel_holds_the_sources_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    metadata = {name for name in names if re.match(r"tailscope-[^/]+\.dist-info/", name)}
    expected = {
        f"{INSTALLED[path.parts[0]]}/{path.relative_to(path.parts[0]).as_posix()}"
        for path in source_files(*INSTALLED)
    }
    assert names - metadata == expected
    assert any(name.endswith("/LICENSE") for name in metadata)


@pytest.mark.packaging
def test_the_wheel_works_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    made = run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    assert made.returncode == 0, made.stdout + made.stderr
    python = environment / "bin" / "python"
    installed = run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    # The dependencies come from this environment. Its own .pth files are not read, so not its editable tailscope.
    (own,) = environment.glob("lib/python*/site-packages")
    shared = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (own / "shared.pth").write_text("\n".join(shared) + "\n", encoding="utf-8")

    where = run(python, "-c", "import tailscope; print(tailscope.__file__)", cwd=empty)
    assert Path(where.stdout.strip()).is_relative_to(environment), where.stdout + where.stderr
    command = environment / "bin" / "tailscope"
    shown = run(command, "--help", cwd=empty)
    assert "diagnose" in shown.stdout, shown.stderr
    listed = run(command, "rules", cwd=empty)
    for rule, _ in registry.rules():
        assert rule.name in listed.stdout, listed.stderr
    demo = run(command, "demo", cwd=empty)
    assert demo.returncode == 0, demo.stderr
    assert "FOUND" in demo.stdout
    assert not list(empty.iterdir())


def test_the_running_package_sees_rules_collectors_and_examples() -> None:
    assert registry.rules()
    assert registry.collectors()
    assert (files("tailscope.examples") / "mixed-load" / "client.jsonl.gz").is_file()
    assert (files("tailscope") / "py.typed").is_file()


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == tailscope.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## \[(Unreleased|\d+\.\d+\.\d+)\]", changelog, re.MULTILINE)


def test_dependencies_are_what_is_imported() -> None:
    imported = {
        DISTRIBUTIONS.get(name, name)
        for path in source_files("tailscope", "collectors", "rules")
        if path.suffix == ".py"
        for name in _imports(ROOT / path)
        if name not in sys.stdlib_module_names and name != "tailscope" and name not in FOR_MAKING
    }
    listed = {re.split(r"[<>=!~\[; ]", entry)[0] for entry in PROJECT["project"]["dependencies"]}
    assert listed == imported | FOR_OTHERS | READ | IN_A_SHARED_PACKAGE
    for_developers = {
        re.split(r"[<>=!~\[; ]", entry)[0] for entry in PROJECT["project"]["optional-dependencies"]["dev"]
    }
    assert set(FOR_MAKING.values()) <= for_developers


def test_every_folder_of_code_is_a_package() -> None:
    """The list in pyproject.toml is explicit: setuptools would drop a folder it does not name without a word."""
    # What examples hold is for others to run, but for the try-out, which is a command.
    code = [
        path for path in source_files(*INSTALLED) if path.suffix == ".py" and path.parts[:1] != ("examples",)
    ]
    folders = {path.parent for path in code} | {Path("examples"), Path("examples/live")}
    names = {
        "/".join((INSTALLED[folder.parts[0]], *folder.parts[1:])).replace("/", ".") for folder in folders
    }
    assert names == set(PROJECT["tool"]["setuptools"]["packages"])


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").partition(".")[0])
    return names
