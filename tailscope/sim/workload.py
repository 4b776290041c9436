"""The requests of a scenario's loads: when each is sent and what it asks.

Each load draws from random streams of its own, made from the scenario's seed and the load's name: leaving a load out,
or moving it in the file, changes no request of the others. A longer world begins as the shorter one did.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from scipy.signal import lfilter

from tailscope.errors import BadInput
from tailscope.sim.outcome import Floats, Ints
from tailscope.sim.scenario import Load, Scenario, Sizes, end_s

#: Of the clients that leave, one in five does so before its first token; the rest spread evenly over the answer.
LEAVE_BEFORE_FIRST = 0.2
#: Grid points per correlation time of a burst process: fine enough that its staircase is not seen.
GRID_PER_BURST = 20
#: Closed loads draw so many requests at once, so that one costs a few hundred ns.
BLOCK = 1024
#: Arrivals are drawn in chunks of so many.
CHUNK = 4096
#: Tokens of one `hash_ids` entry of Mooncake's traces.
MOONCAKE_BLOCK = 512
#: Larger token counts in a trace are damage, and would not fit in an int64 after sums.
MOST_TOKENS = 1_000_000_000

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
OWN = ("arrival_s", "prompt_tokens", "output_tokens")
OWN_MORE = ("prefix", "prefix_tokens")

#: (prompt, output, prefix, prefix_tokens, timeout_s, abort_after), each as in `Workload`.
Shape = tuple[int, int, int, int, float, float]


@dataclass
class Workload:
    """Requests that are sent whatever the engines do (so none of closed loads), by time, ties in the loads' order.

    load: index of `Scenario.loads`; index: number within its load, from 0; intended_s: when it is sent; prompt,
    output, prefix_tokens: tokens; prefix: one number for each common beginning of the world, -1 for none; timeout_s:
    seconds until its client leaves, NaN for never; abort_after: the share of its output after which its client
    leaves, 0 or less for before its first token, NaN for never; n: answers that are asked for.
    """

    load: Ints
    index: Ints
    intended_s: Floats
    prompt: Ints
    output: Ints
    prefix: Ints
    prefix_tokens: Ints
    priority: Ints
    timeout_s: Floats
    abort_after: Floats
    n: Ints

    def __len__(self) -> int:
        return len(self.load)


@dataclass
class _Shapes:
    """What requests ask, as columns of `Workload`."""

    prompt: Ints
    output: Ints
    prefix: Ints
    prefix_tokens: Ints
    timeout_s: Floats
    abort_after: Floats

    def rows(self) -> Iterator[Shape]:
        return zip(*(getattr(self, field.name).tolist() for field in fields(self)), strict=True)


class Closed:
    """What the users of a closed load do next: each thinks, sends what `draw` gives, waits for the answer, and so on.

    Users begin with a think, so that they do not all send at once. How often and until when is up to the caller.
    """

    def __init__(self, source: _Source, think_s: float, random: np.random.Generator) -> None:
        self._source, self._think_s, self._random = source, think_s, random
        self._shapes: Iterator[Shape] = iter(())
        self._pauses: Iterator[float] = iter(())

    def draw(self) -> Shape:
        """The next request's (prompt, output, prefix, prefix_tokens, timeout_s, abort_after)."""
        for shape in self._shapes:
            return shape
        self._shapes = self._source.draw(BLOCK).rows()
        return next(self._shapes)

    def think(self) -> float:
        """Seconds between an answer and the user's next request: exponential about `think_s`."""
        for pause in self._pauses:
            return pause
        self._pauses = iter((self._random.standard_exponential(BLOCK) * self._think_s).tolist())
        return next(self._pauses)


def make(scenario: Scenario) -> tuple[Workload, dict[int, Closed]]:
    """All requests known beforehand, and by load number what goes on from answers. Raises BadInput for bad traces."""
    parts: list[Workload] = []
    closed: dict[int, Closed] = {}
    prefixes = 0
    for number, load in enumerate(scenario.loads):
        source = _Source(load, scenario, prefixes)
        times, shapes = _requests(load, scenario, source)
        prefixes += source.prefixes
        parts.append(_part(number, load, times, shapes))
        if load.arrivals == "closed":
            closed[number] = Closed(source, load.think_s, _stream(scenario.seed, load.name, "think"))
    return _merged(parts), closed


def _part(number: int, load: Load, times: Floats, shapes: _Shapes) -> Workload:
    def same(value: int) -> Ints:
        return np.full(len(times), value, np.int64)

    return Workload(
        load=same(number),
        index=np.arange(len(times)),
        intended_s=times,
        priority=same(load.priority),
        n=same(load.n),
        **vars(shapes),
    )


def _merged(parts: list[Workload]) -> Workload:
    columns = {
        field.name: np.concatenate([getattr(part, field.name) for part in parts])
        for field in fields(Workload)
    }
    order = np.argsort(columns["intended_s"], kind="stable")
    return Workload(**{name: column[order] for name, column in columns.items()})


def _requests(load: Load, scenario: Scenario, source: _Source) -> tuple[Floats, _Shapes]:
    """Times and shapes of a load's requests, in order of time."""
    if load.arrivals == "trace":
        trace = read_trace(Path(load.trace or ""))
        return _played(trace, load, scenario, source)
    if load.arrivals == "at":
        times = np.array(load.times_s, np.float64)
        order = _chosen(times, load, scenario)
        return times[order], source.listed(load, order)
    times = _arrivals(load, scenario)[: load.requests]
    return times, source.draw(len(times))


def _chosen(times: Floats, load: Load, scenario: Scenario) -> Ints:
    """Which of given instants a load sends at, in order of time."""
    order = np.argsort(times, kind="stable")
    inside = (times[order] >= load.from_s) & (times[order] < end_s(load, scenario.duration_s))
    chosen: Ints = order[inside][: load.requests]
    return chosen


# -- when ------------------------------------------------------------------------------------------------


def _stream(seed: int, name: str, purpose: str) -> np.random.Generator:
    """A purpose of its own, too: a load asked for more aborts still asks the same lengths."""
    key = hashlib.sha256(f"{purpose}\0{name}".encode()).digest()
    return np.random.default_rng([seed, int.from_bytes(key[:16], "big")])


def _arrivals(load: Load, scenario: Scenario) -> Floats:
    """Instants from `from_s` to the load's end; a regular load sends its first at `from_s`."""
    random = _stream(scenario.seed, load.name, "arrivals")
    length = end_s(load, scenario.duration_s) - load.from_s
    if length <= 0 or load.arrivals == "closed":
        return np.empty(0)
    if load.arrivals == "regular":
        times = np.arange(np.ceil(load.rate * length)) / load.rate
        return load.from_s + times[times < length]
    if load.arrivals == "bursty":
        return _bursty(load, scenario, random)
    return load.from_s + _unit_poisson(random, load.rate * length) / load.rate


def _unit_poisson(random: np.random.Generator, length: float) -> Floats:
    """Points of a Poisson process of rate 1 on [0, length)."""
    chunks: list[Floats] = []
    start = 0.0
    # In chunks of one size, so that a longer process begins with the very same floats.
    while start < length:
        chunks.append(start + np.cumsum(random.standard_exponential(CHUNK)))
        start = float(chunks[-1][-1])
    points = np.concatenate([np.empty(0), *chunks])
    return points[: np.searchsorted(points, length)]


def _bursty(load: Load, scenario: Scenario, random: np.random.Generator) -> Floats:
    """A Poisson process of rate 1, its time stretched where the rate is low: exact for a rate in stairs."""
    name, purpose = (load.common_load, "common load") if load.common_load else (load.name, "bursts")
    end = end_s(load, scenario.duration_s)
    step = load.burst_s / GRID_PER_BURST
    grid = np.arange(int(np.ceil(end / step)) + 1) * step
    x = load.burst_sigma * _ar1(_stream(scenario.seed, name, purpose), len(grid) - 1)
    # The mean of exp(x) is exp(sigma²/2): taken out, so that `rate` is the mean rate.
    expected = np.concatenate([[0.0], np.cumsum(load.rate * step * np.exp(x - load.burst_sigma**2 / 2))])
    first, last = np.interp([load.from_s, end], grid, expected)
    points = np.interp(first + _unit_poisson(random, last - first), expected, grid)
    times: Floats = np.clip(points, load.from_s, np.nextafter(end, 0.0))
    return times


def _ar1(random: np.random.Generator, count: int) -> Floats:
    """A stationary AR(1) process of variance 1 whose correlation falls to 1/e in GRID_PER_BURST steps."""
    a = np.exp(-1 / GRID_PER_BURST)
    shocks = random.standard_normal(count)
    shocks[1:] *= np.sqrt(1 - a * a)
    return np.asarray(lfilter([1.0], [1.0, -a], shocks), np.float64)


# -- what ------------------------------------------------------------------------------------------------


class _Source:
    """Draws what a load's requests ask. Common beginnings are numbered from `first_prefix`."""

    def __init__(self, load: Load, scenario: Scenario, first_prefix: int) -> None:
        self._load, self._most = load, scenario.engine.max_model_len
        self.first_prefix = first_prefix
        #: Common beginnings that are numbered; a trace may bring more.
        self.prefixes = load.prefixes if load.prefix_tokens else 0
        self._prompt, self._output, self._prefix, self._abort = (
            _stream(scenario.seed, load.name, purpose) for purpose in ("prompt", "output", "prefix", "abort")
        )

    def draw(self, count: int) -> _Shapes:
        return self.shaped(
            _sizes(self._prompt, self._load.prompt_tokens, count),
            _sizes(self._output, self._load.output_tokens, count),
        )

    def listed(self, load: Load, order: Ints) -> _Shapes:
        """Of a load with lists of its own, as far as it has them. Drawn for all, so that a cut changes no size."""
        count = len(load.times_s)
        drawn = self.draw(count)
        prompt = np.array(load.prompts, np.int64) if load.prompts else drawn.prompt
        output = np.array(load.outputs, np.int64) if load.outputs else drawn.output
        return self.shaped(prompt[order], output[order])

    def shaped(
        self, prompt: Ints, output: Ints, prefix: Ints | None = None, prefix_tokens: Ints | None = None
    ) -> _Shapes:
        """Requests of given lengths, cut to what the engine takes: a prompt leaves room for one token."""
        load, count = self._load, len(prompt)
        prompt = np.clip(prompt, 1, self._most - 1)
        output = np.clip(output, 1, self._most - prompt)
        if prefix is None or prefix_tokens is None:
            prefix = self.first_prefix + self._prefix.integers(load.prefixes, size=count)
            prefix_tokens = np.full(count, load.prefix_tokens, np.int64)
        # A prompt has a last token of its own: the engine must compute something to answer.
        prefix_tokens = np.where(prefix >= 0, np.minimum(prefix_tokens, prompt - 1), 0)
        return _Shapes(
            prompt=prompt,
            output=output,
            prefix=np.where(prefix_tokens > 0, prefix, -1),
            prefix_tokens=prefix_tokens,
            timeout_s=np.full(count, np.nan if load.timeout_s is None else load.timeout_s),
            abort_after=self._aborts(count),
        )

    def _aborts(self, count: int) -> Floats:
        leaves, when = self._abort.random((count, 2)).T
        before = LEAVE_BEFORE_FIRST / (1 - LEAVE_BEFORE_FIRST)
        return np.where(leaves < self._load.abort_share, when * (1 + before) - before, np.nan)


def _sizes(random: np.random.Generator, sizes: Sizes, count: int) -> Ints:
    if sizes.values:
        return random.choice(np.array(sizes.values, np.int64), count)
    lengths = sizes.median * np.exp(sizes.sigma * random.standard_normal(count))
    return np.round(np.clip(lengths, sizes.least, sizes.most)).astype(np.int64)


# -- traces ----------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Requests of a file, in its order. arrival_s: seconds since the trace began; prefix: numbered from 0, -1 none."""

    arrival_s: Floats
    prompt: Ints
    output: Ints
    prefix: Ints
    prefix_tokens: Ints


#: (arrival in s, prompt tokens, output tokens, common beginning or None, its tokens)
Row = tuple[float, int, int, Any, int]


def _played(trace: Trace, load: Load, scenario: Scenario, source: _Source) -> tuple[Floats, _Shapes]:
    times = load.from_s + trace.arrival_s / load.speed
    order = _chosen(times, load, scenario)
    if not len(order):
        until = f"{end_s(load, scenario.duration_s):g} s of the world"
        raise BadInput(
            f"no request of the trace arrives before {until}",
            path=load.trace or "",
            todo="Give a longer duration_s or to_s, or a higher speed.",
        )
    prompt, output = trace.prompt[order], trace.output[order]
    if not (trace.prefix >= 0).any():
        return times[order], source.shaped(prompt, output)
    source.prefixes = int(trace.prefix.max()) + 1
    prefix = np.where(trace.prefix >= 0, source.first_prefix + trace.prefix, -1)[order]
    return times[order], source.shaped(prompt, output, prefix, trace.prefix_tokens[order])


def read_trace(path: Path) -> Trace:
    """Azure's CSV, Mooncake's JSONL or a CSV with our own columns. Raises BadInput naming file and row.

    Azure's instants count from its earliest request, the others' are taken as they are. Lengths of 0 become 1 when
    played.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"cannot read the trace: {error.strerror}", path=str(path)) from error
    except UnicodeDecodeError as error:
        raise BadInput("not a text in UTF-8", path=str(path), where=f"byte {error.start}") from error
    rows = _mooncake(text, path) if text.lstrip().startswith("{") else _csv(text, path)
    if not rows:
        raise BadInput("the trace has no requests", path=str(path))
    arrival, prompt, output, labels, prefix_tokens = zip(*rows, strict=True)
    numbers: dict[Any, int] = {}
    prefix = [-1 if label is None else numbers.setdefault(label, len(numbers)) for label in labels]
    return Trace(
        np.array(arrival, np.float64),
        np.array(prompt, np.int64),
        np.array(output, np.int64),
        np.array(prefix, np.int64),
        np.array(prefix_tokens, np.int64),
    )


def _csv(text: str, path: Path) -> list[Row]:
    reader = csv.reader(io.StringIO(text, newline=""))
    rows: list[Row] = []
    try:
        header = [name.strip() for name in next(reader, [])]
        azure = set(AZURE) <= set(header)
        if not azure and not (set(OWN) <= set(header) <= {*OWN, *OWN_MORE}):
            raise BadInput(
                "not a trace we know",
                path=str(path),
                where="row 1",
                todo=f"The first row must be {','.join(AZURE)} or {','.join(OWN)}[,{','.join(OWN_MORE)}].",
            )
        for cells in reader:
            if any(cells):
                if len(cells) != len(header):
                    raise ValueError(f"{len(cells)} cells where the first row has {len(header)}")
                row = dict(zip(header, cells, strict=True))
                rows.append(_azure_row(row) if azure else _own_row(row))
    except (ValueError, csv.Error) as error:
        raise BadInput(str(error), path=str(path), where=f"row {reader.line_num}") from error
    first = min((row[0] for row in rows), default=0.0) if azure else 0.0
    return [(row[0] - first, *row[1:]) for row in rows]


def _azure_row(row: dict[str, str]) -> Row:
    try:
        stamp = datetime.fromisoformat(row["TIMESTAMP"].strip())
    except ValueError:
        raise ValueError(f"TIMESTAMP is {_quoted(row['TIMESTAMP'])}, not a date and time") from None
    # The trace of 2023 names no zone, that of 2024 UTC. Epoch seconds keep the microseconds of a float64.
    stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
    prompt, output = (_tokens(row[name], name) for name in AZURE[1:])
    return stamp.timestamp(), prompt, output, None, 0


def _own_row(row: dict[str, str]) -> Row:
    label = row.get("prefix", "").strip() or None
    tokens = _tokens(row.get("prefix_tokens", ""), "prefix_tokens") if label else 0
    prompt, output = (_tokens(row[name], name) for name in OWN[1:])
    try:
        return _seconds(float(row["arrival_s"])), prompt, output, label, tokens
    except ValueError:
        raise ValueError(
            f"arrival_s is {_quoted(row['arrival_s'])}, not a number of seconds from 0"
        ) from None


def _seconds(value: float) -> float:
    if not 0 <= value < MOST_TOKENS:
        raise ValueError("out of range")
    return value


def _tokens(value: object, name: str) -> int:
    """A number of tokens, from a cell's text or a JSON value."""
    number: Any = value
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
        number = int(value)
    if type(number) is not int or not 0 <= number <= MOST_TOKENS:
        raise ValueError(f"{name} is {_quoted(value)}, not a number of tokens")
    return number


def _mooncake(text: str, path: Path) -> list[Row]:
    """A request's common beginning is its longest run of first blocks that other requests have too.

    A hash stands for its block and all before it, so the last one of the run names it. Of two beginnings one may be
    part of the other; that is not told, so the cache finds somewhat less than it would have.
    """
    rows: list[tuple[float, int, int]] = []
    hashes: list[list[int]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            arrival, prompt, output, blocks = _mooncake_row(orjson.loads(line))
        except ValueError as error:
            raise BadInput(str(error), path=str(path), where=f"row {number}") from error
        rows.append((arrival, prompt, output))
        hashes.append(blocks)
    seen = Counter(block for blocks in hashes for block in set(blocks))
    result: list[Row] = []
    for row, blocks in zip(rows, hashes, strict=True):
        run = next((i for i, block in enumerate(blocks) if seen[block] < 2), len(blocks))
        result.append((*row, blocks[run - 1] if run else None, run * MOONCAKE_BLOCK))
    return result


def _mooncake_row(row: object) -> tuple[float, int, int, list[int]]:
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    stamp: Any = row.get("timestamp")
    blocks: Any = row.get("hash_ids", [])
    if type(stamp) not in (int, float) or not 0 <= stamp < MOST_TOKENS * 1000:
        raise ValueError(f"timestamp is {_quoted(stamp)}, not a number of milliseconds from 0")
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids is not a list of whole numbers")
    prompt, output = (_tokens(row.get(name), name) for name in ("input_length", "output_length"))
    return stamp / 1000, prompt, output, blocks


def _quoted(value: object) -> str:
    if value is None or value == "":
        return "missing"
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "…"
