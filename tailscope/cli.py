"""The commands: each reads its arguments, makes one call and prints. Heavy imports wait until a command runs."""

from __future__ import annotations

import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tailscope.cli_alerts import alerts
from tailscope.cli_dashboards import dashboards
from tailscope.cli_export import app as export
from tailscope.cli_options import (
    ClassOption,
    ConfigOption,
    FromOption,
    InstanceOption,
    LastOption,
    MemoryOption,
    SloOption,
    ToOption,
    TracePath,
)
from tailscope.cli_report import report
from tailscope.errors import BadInput, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from tailscope.align import Scope
    from tailscope.compare.untested import Untested
    from tailscope.config import Config
    from tailscope.ingest import Outcome
    from tailscope.model import Diagnosis
    from tailscope.store import Trace

T = TypeVar("T")

app = typer.Typer(
    help="Says who is slow in an LLM inference fleet, who waits for it, and what to change.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


#: Columns where there is no terminal to ask.
PIPE_WIDTH = 140


class Format(StrEnum):
    text = "text"
    json = "json"


class ReportFormat(StrEnum):
    text = "text"
    json = "json"
    markdown = "markdown"
    github = "github"


class DiagnosisFormat(StrEnum):
    text = "text"
    json = "json"
    markdown = "markdown"
    github = "github"
    html = "html"


class TableFormat(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"


class FailOn(StrEnum):
    high = "high"
    medium = "medium"
    low = "low"


ReportFormatOption = Annotated[
    ReportFormat,
    typer.Option(
        help="text for people, json for programs, markdown for tickets and pull requests, github for annotations."
    ),
]


@app.command()
def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Files and folders of telemetry, plain, gz or zstd.", metavar="PATH..."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Trace to write or add to.")] = Path(
        "trace.parquet"
    ),
    instance: Annotated[str | None, typer.Option(help="Instance all of it belongs to.")] = None,
    log_tz: Annotated[
        str | None,
        typer.Option("--log-tz", help="Time zone of log lines and local dates, e.g. Europe/Paris."),
    ] = None,
    hash_ids: Annotated[
        bool, typer.Option("--hash-ids", help="Store hashes of request ids, to share the trace.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Rank of torch profiles that do not say theirs.")
    ] = None,
    python_stacks: Annotated[
        bool,
        typer.Option(
            "--python-stacks", help="Keep the Python stack frames of torch profiles; they are most of them."
        ),
    ] = False,
    map_: Annotated[
        Path | None,
        typer.Option(
            "--map", help="What the columns mean, if the files are tables of requests (docs/request-logs.md)."
        ),
    ] = None,
    guess_map: Annotated[
        bool,
        typer.Option("--guess-map", help="Print a mapping for such a table to begin with; read nothing."),
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Read telemetry into a trace: OTLP spans, vLLM logs and stat-logger records, torch profiles, /metrics, client logs."""
    from rich.console import Console
    from rich.progress import Progress

    from tailscope import config as configuration
    from tailscope import mapping as mappings
    from tailscope.ingest import ingest as run
    from tailscope.render.ingested import render
    from tailscope.source import Options

    if guess_map:
        print(_guessed_map(paths, map_), end="")
        return
    settings = configuration.load(config)
    options = Options(
        attributes=settings.attributes,
        log_tz=_zone(log_tz),
        hash_ids=hash_ids,
        rank=rank,
        python_stacks=python_stacks,
        mapping=None if map_ is None else mappings.load(map_),
    )
    progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with progress:
        task = progress.add_task("ingest", total=None)

        def report(outcome: Outcome, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=Path(outcome.path).name[-40:])

        outcomes = run(paths, output, config=settings, options=options, instance=instance, report=report)
    render(outcomes, str(output), _console(), base=_folder_of_all(outcomes))
    if not any(o.status in ("ingested", "known") for o in outcomes):
        if any(o.status == "failed" for o in outcomes):
            raise UsageError("nothing was ingested: see what is said of each file above")
        raise UsageError(
            "nothing was ingested: no file is telemetry that tailscope reads (see docs/collectors.md)"
        )


@app.command()
def diagnose(
    trace: TracePath,
    format: Annotated[
        DiagnosisFormat,
        typer.Option(
            help="text for people, json for programs, markdown for tickets and pull requests, github for annotations, html for a page."
        ),
    ] = DiagnosisFormat.text,
    config: ConfigOption = None,
    slo: SloOption = None,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit with 3 when a finding is at least this severe.")
    ] = None,
    memory_limit: MemoryOption = "3GB",
    from_: FromOption = None,
    to: ToOption = None,
    last: LastOption = None,
    instance: InstanceOption = None,
    klass: ClassOption = None,
) -> None:
    """Say who is slow, who waits for it, and what to change."""
    filters = (from_, to, last, instance, klass)
    if format is DiagnosisFormat.html:
        from tailscope.report.build import report as with_page

        diagnosis, page = on_trace(with_page, trace, config, slo or [], memory_limit, filters)
        # The page says that it is UTF-8, whatever the terminal speaks.
        sys.stdout.buffer.write(page.encode())
    else:
        diagnosis = _diagnose(trace, config, slo or [], memory_limit, filters)
        _print_diagnosis(diagnosis, ReportFormat(format))
    if fail_on is not None:
        order = list(FailOn)
        severe = order[: order.index(fail_on) + 1]
        if any(f.status == "found" and f.severity in severe for f in diagnosis.findings):
            raise typer.Exit(3)


@app.command()
def whatif(
    trace: TracePath,
    config: ConfigOption = None,
    format: Annotated[Format, typer.Option(help="text for people, json for programs.")] = Format.text,
    memory_limit: MemoryOption = "3GB",
    from_: FromOption = None,
    to: ToOption = None,
    last: LastOption = None,
    instance: InstanceOption = None,
    klass: ClassOption = None,
) -> None:
    """Say what profiled steps, and token gaps, would take without skew, without one rank's lateness, with balanced experts."""
    from tailscope.render import what_if as render
    from tailscope.what_if import what_if

    filters = (from_, to, last, instance, klass)
    windows = on_trace(what_if, trace, config, [], memory_limit, filters)
    if format is Format.json:
        print(render.as_json(trace, windows))
    else:
        render.as_text(windows, _console())


@app.command()
def compare(
    traces: Annotated[
        list[str],
        typer.Argument(
            help="BEFORE and AFTER; with more, a sweep over load in any order.",
            metavar="BEFORE AFTER [MORE...]",
        ),
    ],
    format: ReportFormatOption = ReportFormat.text,
    config: ConfigOption = None,
    slo: SloOption = None,
    fail_on_regression: Annotated[
        str | None,
        typer.Option(
            "--fail-on-regression",
            help="Exit with 3 when a quantile is called slower by so much or more, e.g. 5%; with 4 when none could be tested.",
            metavar="PERCENT",
        ),
    ] = None,
    memory_limit: MemoryOption = "3GB",
    instance: InstanceOption = None,
    klass: ClassOption = None,
) -> None:
    """Say whether a change helped: the same load? who got faster, by how much, what of the bill shrank; or where the knee is."""
    from tailscope import config as configuration
    from tailscope.compare.pair import compare as compare_two
    from tailscope.compare.read import read
    from tailscope.compare.sweep import sweep
    from tailscope.render import compare as render

    size = None if fail_on_regression is None else _percent("--fail-on-regression", fail_on_regression)
    if len(traces) < 2:
        raise UsageError("compare needs two traces, one before and one after a change, or more for a sweep")
    if size is not None and len(traces) > 2:
        raise UsageError("--fail-on-regression needs two traces, one before and one after a change")
    settings = _with_slos(configuration.load(config), slo or [])
    filters = (None, None, None, instance, klass)
    sides = [on_trace(read, path, None, [], memory_limit, filters, settings) for path in traces]
    if len(sides) > 2:
        found = sweep(sides)
        _print_report(
            format,
            lambda: render.sweep_parts(found),
            lambda: render.sweep_json(found),
            lambda github: github.of_sweep(found),
        )
        return
    compared = compare_two(sides[0], sides[1], settings)
    regressions = compared.regressions(size or 0.0)
    _print_report(
        format,
        lambda: render.comparison_parts(compared),
        lambda: render.comparison_json(compared, regressions),
        lambda github: github.of_comparison(compared),
    )
    if size is not None and regressions:
        raise typer.Exit(3)
    if size is not None and compared.untested:
        _say_untested(compared.untested, compared.tested)
        if not compared.tested:
            raise typer.Exit(4)


def _say_untested(entries: Sequence[Untested], tested: bool) -> None:
    """On stderr, so that a gate's log says what a status of 0 is no all-clear for."""
    from tailscope.compare.untested import told
    from tailscope.safe import printable

    print(
        "tailscope: " + ("not tested for regressions:" if tested else "nothing was tested for regressions:"),
        file=sys.stderr,
    )
    for line in told(entries):
        print(f"  {printable(line, 400)}", file=sys.stderr)


@app.command()
def query(
    trace: TracePath,
    sql: Annotated[
        str, typer.Argument(help="One SELECT over the trace's tables (docs/tables.md).", metavar="SQL")
    ],
    format: Annotated[TableFormat, typer.Option(help="How to print the rows.")] = TableFormat.table,
    memory_limit: Annotated[str, typer.Option("--memory-limit", help="Memory for the query.")] = "2GB",
    timeout: Annotated[float, typer.Option(help="Seconds after which the query is stopped.")] = 60.0,
    config: ConfigOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    last: LastOption = None,
    instance: InstanceOption = None,
    klass: ClassOption = None,
) -> None:
    """Run one SELECT on a trace; nothing else can be run and nothing else can be read."""
    from tailscope import config as configuration
    from tailscope import query as module
    from tailscope.store import Trace

    with Trace(trace) as opened:
        scope = _scope(opened, from_, to, last, instance, klass)
    wanted = {k: v for k, v in {**scope.parameters, "klass": scope.klass}.items() if v is not None}
    table = module.run(
        trace,
        sql,
        memory_limit=memory_limit,
        timeout_s=timeout,
        scope=wanted,
        config=configuration.load(config),
    )
    module.write(table, format.value, sys.stdout)


@app.command()
def rules(
    name: Annotated[str | None, typer.Argument(help="Explain this rule.", metavar="[NAME]")] = None,
) -> None:
    """List the rules, or explain one."""
    from tailscope import registry
    from tailscope.render.rules import explain, listing

    known = {rule.name: rule for rule, _ in registry.rules()}
    console = _console()
    if name is None:
        console.print(listing(list(known.values())))
    elif name in known:
        console.print(explain(known[name]))
    else:
        raise UsageError(f"no rule {name!r}; rules are {', '.join(known)}")


app.command()(alerts)
app.command()(dashboards)
app.add_typer(export, name="export")
app.command()(report)


class Example(StrEnum):
    mixed_load = "mixed-load"
    moe_straggler = "moe-straggler"


@app.command()
def demo(
    example: Annotated[
        Example | None, typer.Argument(help="The capture to diagnose; without one, all of them.")
    ] = None,
    format: Annotated[Format, typer.Option(help="text for people, json for programs.")] = Format.text,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Instead: three minutes of `tailscope serve` beside a simulated fleet (docs/serve.md).",
        ),
    ] = False,
    healthy: Annotated[
        bool, typer.Option("--healthy", help="With --live: a neighbour that is busy and harms nobody.")
    ] = False,
    scenario: Annotated[
        Path | None, typer.Option(help="With --live: a scenario of your own.", metavar="FILE")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="With --live: keep trace, configuration and logs.")
    ] = False,
) -> None:
    """Ingest and diagnose the captures of a real vLLM that ship with tailscope, or show it live."""
    if not live and (healthy or scenario or keep):
        raise UsageError("--healthy, --scenario and --keep go with --live")
    if live:
        from importlib import import_module

        if example is not None or (healthy and scenario):
            raise UsageError(
                "--live goes without the name of a capture, and with --healthy or --scenario, not both"
            )
        tryout = import_module("tailscope.examples.live.tryout")
        if not tryout.main(scenario, healthy, keep, lambda text: print(text, flush=True)):
            raise typer.Exit(1)
        return
    for chosen in [example] if example else Example:
        _demo(chosen.value, ReportFormat(format))


def _demo(name: str, format: ReportFormat) -> None:
    import tempfile
    from dataclasses import replace
    from importlib.resources import as_file, files

    from tailscope.config import Config
    from tailscope.ingest import ingest as run
    from tailscope.source import Options

    with (
        as_file(files("tailscope.examples").joinpath(name)) as capture,
        tempfile.TemporaryDirectory() as folder,
    ):
        trace = Path(folder) / f"{name}.parquet"
        outcomes = run([capture], trace, config=Config(), options=Options())
        if format is ReportFormat.text:
            from tailscope.render.ingested import render

            render(outcomes, trace.name, _console(), base=capture)
        diagnosis = _diagnose(str(trace), None, [], "2GB", (None,) * 5, Config())
        _print_diagnosis(replace(diagnosis, trace={**diagnosis.trace, "path": trace.name}), format)


@app.command()
def sim(
    scenario: Annotated[
        Path, typer.Argument(help="What there is, in TOML (docs/scenarios.md).", metavar="SCENARIO")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Trace to write.")] = None,
    raw: Annotated[
        Path | None, typer.Option(help="Folder for the files that the emitters would write.", metavar="DIR")
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the truth: what was injected, each request's true bill.", metavar="DIR"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Instead of the scenario's own.", min=0, max=2**63 - 1)
    ] = None,
) -> None:
    """Simulate a world whose every nanosecond is known: a trace, the emitters' files, and the truth."""
    from dataclasses import replace

    from tailscope import registry
    from tailscope.sim.engine import simulate
    from tailscope.sim.scenario_file import load
    from tailscope.sim.written import check_places, write

    if output is None and raw is None and truth is None:
        raise UsageError(
            "nothing to write: name a trace (-o), a folder for raw files (--raw) or for the truth (--truth)"
        )
    check_places(output=output, raw=raw, truth=truth)
    world = load(scenario)
    if seed is not None:
        world = replace(world, seed=seed)
    known = {rule.name for rule, _ in registry.rules()}
    for cause in world.causes:
        if cause.rule not in known:
            print(f"note: no rule is called {cause.rule!r}; rules are {', '.join(sorted(known))}")
    outcome = simulate(world)
    for line in write(outcome, trace=output, raw=raw, truth=truth):
        print(line)


@app.command()
def serve(
    config: Annotated[
        Path, typer.Option("--config", help="Configuration with [serve] (docs/serve.md).")
    ] = Path("tailscope.toml"),
) -> None:
    """Run beside a fleet: receive spans, scrape engines, keep the trace, export metrics by class, say what is found."""
    from tailscope.live import settings
    from tailscope.live.run import serve as run

    run(settings.load(config), config, None, _say)


@app.command()
def tail(
    server: Annotated[
        str, typer.Argument(help="Where `tailscope serve` shows its metrics.", metavar="[HOST:PORT]")
    ] = "127.0.0.1:9464",
    token: Annotated[
        Path | None, typer.Option("--bearer-token-file", help="File with the server's token.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca-file", help="Certificate to trust; makes it https.")
    ] = None,
) -> None:
    """Follow what a running `tailscope serve` finds: findings as they open and close."""
    from tailscope.live.tail import tail as run

    run(server, token, ca, _console())


@app.command()
def record(
    output: Annotated[Path, typer.Option("-o", "--output", help="Trace to write or add to.")] = Path(
        "trace.parquet"
    ),
    scrape: Annotated[
        list[str] | None,
        typer.Option(help="Engine to scrape, URL or HOST:PORT; may be given often.", metavar="URL"),
    ] = None,
    otlp_grpc: Annotated[
        str | None, typer.Option("--otlp-grpc", help="Where to take spans by gRPC.", metavar="HOST:PORT")
    ] = None,
    otlp_http: Annotated[
        str | None, typer.Option("--otlp-http", help="Where to take spans by HTTP.", metavar="HOST:PORT")
    ] = None,
    every: Annotated[str, typer.Option(help="Time between scrapes.")] = "5s",
    for_: Annotated[
        str | None, typer.Option("--for", help="How long, e.g. 60s; without it, until Ctrl-C.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Record a fleet for a while: spans that come in, engines that are scraped, into a trace."""
    from tailscope.live.record import record as run

    run(output, scrape or [], otlp_grpc, otlp_http, every, for_, config, _say)


def _say(text: str) -> None:
    from tailscope.safe import printable

    # Names of engines and what they answer are anybody's text.
    print(printable(text, 2000), file=sys.stderr, flush=True)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from tailscope import __version__

        print(__version__)
        raise typer.Exit


def _diagnose(
    path: str,
    config_path: Path | None,
    slos: list[str],
    memory_limit: str,
    filters: tuple[str | None, ...],
    settings: Config | None = None,
) -> Diagnosis:
    from tailscope.engine import diagnose as run

    return on_trace(run, path, config_path, slos, memory_limit, filters, settings)


def on_trace(
    use: Callable[[Trace, Config, Scope], T],
    path: str,
    config_path: Path | None,
    slos: list[str],
    memory_limit: str,
    filters: tuple[str | None, ...],
    settings: Config | None = None,
) -> T:
    """What `use` makes of a trace, and one clear message where the trace cannot be read."""
    import duckdb

    from tailscope import config as configuration
    from tailscope.scan import first_line
    from tailscope.store import Trace

    settings = _with_slos(settings or configuration.load(config_path), slos)
    try:
        since_ns = _instant("--from", filters[0])
        with Trace(path, memory_limit=memory_limit, since_ns=since_ns) as trace:
            return use(trace, settings, _scope(trace, *filters))
    except duckdb.OutOfMemoryException as error:
        raise UsageError(
            f"--memory-limit {memory_limit} is too small for this trace; give it more"
        ) from error
    except duckdb.Error as error:
        # A Parquet file that breaks off or does not decompress; anything else is a bug of ours.
        if type(error) not in (duckdb.Error, duckdb.InvalidInputException, duckdb.IOException):
            raise
        what = f"cannot be read: {first_line(error)}"
        raise BadInput(
            what, path=path, todo="A part of the trace is damaged: ingest its source again"
        ) from error


def _with_slos(settings: Config, slos: list[str]) -> Config:
    """The configuration with objectives from the command line, which take the place of its own."""
    from dataclasses import replace

    from tailscope import config as configuration

    given = tuple(configuration.parse_slo(text) for text in slos)
    overridden = {(s.klass, s.metric, s.quantile) for s in given}
    kept = tuple(s for s in settings.slos if (s.klass, s.metric, s.quantile) not in overridden)
    return replace(settings, slos=kept + given)


def _percent(option: str, text: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*%?", text.strip())
    if not match:
        raise UsageError(f"{option} {text!r}: write a percentage, for example 5%")
    return float(match[1]) / 100


def _print_diagnosis(diagnosis: Diagnosis, format: ReportFormat) -> None:
    from tailscope.render import text
    from tailscope.render.as_json import render as render_json

    _print_report(
        format,
        lambda: text.parts(diagnosis),
        lambda: render_json(diagnosis),
        lambda github: github.of_diagnosis(diagnosis),
    )


def _print_report(
    format: ReportFormat,
    parts: Callable[[], Iterator[RenderableType]],
    as_json: Callable[[], str],
    as_github: Callable[[Any], str],
) -> None:
    if format is ReportFormat.json:
        print(as_json())
    elif format is ReportFormat.github:
        from tailscope.render import github

        print(as_github(github))
    elif format is ReportFormat.markdown:
        from tailscope.render import markdown

        print(markdown.render(parts()), end="")
    else:
        console = _console()
        for part in parts():
            console.print(part)


def _console() -> Console:
    from rich.console import Console

    if "COLUMNS" in os.environ and not sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    # Without a terminal to ask, rich would fold lines at 80.
    return Console(
        highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, emoji=False
    )


def _scope(
    trace: Any, from_: str | None, to: str | None, last: str | None, instance: str | None, klass: str | None
) -> Scope:
    from tailscope.align import Scope

    if last is not None and (from_ or to):
        raise UsageError("--last goes without --from and --to")
    from_ns, to_ns = _instant("--from", from_), _instant("--to", to)
    if from_ns is not None and to_ns is not None and from_ns >= to_ns:
        raise UsageError("--from must be before --to")
    if last is not None:
        [(end,)] = trace.connection.execute(
            "SELECT coalesce((SELECT max(coalesce(finished_ns, arrival_ns)) FROM requests), "
            "(SELECT max(end_ns) FROM iterations), (SELECT max(last_ns) FROM profiles))"
        ).fetchall()
        from_ns = None if end is None else max(end - _duration_ns(last), 0)
    if instance is not None:
        names = [
            r["instance"]
            for r in trace.rows(
                "SELECT DISTINCT instance FROM requests UNION SELECT instance FROM iterations"
            )
        ]
        if instance not in names:
            raise UsageError(
                f"--instance {instance!r}: not in the trace; it has {', '.join(map(str, sorted(names)[:10])) or 'none'}"
            )
    return Scope(from_ns, to_ns, instance, klass)


def _instant(option: str, text: str | None) -> int | None:
    from datetime import UTC, datetime

    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{option} {text!r}: write it as 2026-11-29T14:40:00, or with a zone: ...+01:00"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    whole = moment.replace(microsecond=0)
    return int(whole.timestamp()) * 1_000_000_000 + moment.microsecond * 1000


def _duration_ns(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,9})?)\s*(s|m|h|d)", text.strip())
    if not match:
        raise UsageError(f"--last {text!r}: write 30s, 15m, 2h or 1d")
    return int(float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]] * 1e9)


def _guessed_map(paths: list[Path], mapping: Path | None) -> str:
    """A mapping for the one table that is named."""
    from tailscope import registry
    from tailscope.mapping_guess import guess
    from tailscope.source import Source

    if mapping is not None:
        raise UsageError("--guess-map makes a mapping and --map uses one; give one of the two")
    if len(paths) > 1 or not paths[0].is_file():
        raise UsageError("--guess-map: name one file, of those that are alike")
    try:
        collector = registry.table_collector()
        table = collector.table_of(Source(paths[0])) if collector else None
    except OSError as error:
        raise UsageError(f"{paths[0]}: cannot be read: {error.strerror or error}") from error
    if table is None:
        raise UsageError(
            f"{paths[0]}: not a table: give CSV with a header, one JSON object a line, or Parquet"
        )
    return guess(table, paths[0].name)


def _folder_of_all(outcomes: list[Outcome]) -> Path | None:
    """The folder that all files are in, from which they are named; None where there is none, or some paths are absolute and
    some are not: then they keep the names they were given by."""
    try:
        return Path(os.path.commonpath([Path(outcome.path).parent for outcome in outcomes]))
    except ValueError:
        return None


def _zone(name: str | None) -> Any:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

    if name is None:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, IsADirectoryError):
        raise UsageError(f"--log-tz {name!r}: no such time zone; write for example Europe/Paris") from None
