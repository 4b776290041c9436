"""Recordings of SGLang's expert distribution recorder: how many tokens each expert got.

Modes `stat` and `stat_approx` write one file, tokens by step, layer and logical expert, summed over the ranks. Modes
`per_pass` and `per_token` write one a rank: what that rank counted in each forward pass by physical expert, and which
logical expert each was at the end. Token ids of prompts, which `per_token` records, are never stored.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tailscope.errors import BadInput
from tailscope.schema import EXPERT_LOAD, Table
from tailscope.source import Source

from ._torch_archive import LEGACY, ZIP, Refused, Tensor, TorchArchive

#: Rows of an Arrow table.
BATCH = 100_000
#: Of a packed file so much is unpacked, to a temporary file.
MOST_UNPACKED = 8 << 30
#: More of either no model has; a tensor of this size holds something else.
MOST_LAYERS, MOST_EXPERTS = 4_096, 65_536
#: Tokens of an expert in a layer: what a fast server counts in a century.
MOST_TOKENS = 1 << 44
#: Numbers of a tensor that are looked at together.
TOGETHER = 1 << 20
_FIRST_ENTRY = re.compile(rb"PK\x03\x04.{22}[\x01-\xff]\x00.{2}[^/\0]{1,200}/data\.pkl", re.DOTALL)
_OURS = (b"logical_count", b"gatherer_key", b"last_physical_to_logical_map")
_FILE = re.compile(r"expert_distribution_recorder_(\d{10}(?:\.\d{1,9})?)(?:_\d{1,6})?\.pt")
_COLUMNS = ("step", "rank", "layer", "expert", "slot", "tokens")

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SglangExperts:
    name: str = "sglang_experts"
    version: str = "1"
    reads: str = (
        "Files of SGLang's expert distribution recorder (`.pt`), of all its modes; read without torch, and nothing in "
        "them is run."
    )
    tables: tuple[Table, ...] = (EXPERT_LOAD,)

    def recognises(self, head: bytes, name: str) -> bool:
        begins = _FIRST_ENTRY.match(head) is not None or head.startswith(LEGACY)
        return begins and any(word in head for word in _OURS)

    def read(self, source: Source) -> Iterator[tuple[Table, pa.Table]]:
        with tempfile.TemporaryFile() as spool, source.open() as stream:
            file = stream if stream.seekable() else _unpacked(stream, spool, source)
            try:
                yield from _Reader(source, TorchArchive(_checked(file, source))).read()
            except Refused as error:
                todo = "Dump the recording again, in mode stat or per_pass"
                raise BadInput(str(error), path=source.display, todo=todo) from error


COLLECTOR = SglangExperts()


def _unpacked(stream: IO[bytes], spool: IO[bytes], source: Source) -> IO[bytes]:
    """An archive is read from its end, so a packed one is unpacked first."""
    size = 0
    while piece := stream.read(1 << 20):
        size += len(piece)
        if size > MOST_UNPACKED:
            raise BadInput(f"unpacks to more than {MOST_UNPACKED:,} bytes", path=source.display)
        spool.write(piece)
    spool.seek(0)
    return spool


def _checked(file: IO[bytes], source: Source) -> IO[bytes]:
    head = file.read(len(LEGACY))
    file.seek(0)
    if head.startswith(LEGACY):
        raise BadInput(
            "was written by torch.save in the form it had before torch 1.6",
            path=source.display,
            todo="Load it with the torch that wrote it and save it again",
        )
    if not head.startswith(ZIP):
        raise BadInput("is no archive of torch.save", path=source.display)
    return file


class _Reader:
    def __init__(self, source: Source, archive: TorchArchive) -> None:
        self.source, self.tally, self.archive = source, source.tally, archive
        self.waiting: list[dict[str, Ints | None]] = []
        self.rows = 0
        written = _FILE.fullmatch(source.name)
        self.recorded_ns = int(Decimal(written[1]) * 1_000_000_000) if written else None

    def read(self) -> Iterator[tuple[Table, pa.Table]]:
        root = self.archive.root
        if not isinstance(root, dict):
            raise Refused("holds no dictionary, so no recording of SGLang")
        if isinstance(root.get("logical_count"), Tensor):
            yield from self._sums(root["logical_count"])
        elif isinstance(root.get("records"), list):
            yield from self._passes(root["records"], root.get("last_physical_to_logical_map"))
        else:
            raise Refused("holds neither `logical_count` nor `records`, so no recording of SGLang")
        yield from self._flush(1)
        if self.recorded_ns is None:
            self.tally.note("its name does not say when it was written")

    def _sums(self, tensor: Tensor) -> Iterator[tuple[Table, pa.Table]]:
        counts = self.archive.array(tensor)
        if counts.ndim == 2:  # of one step, or of all
            counts = counts[None]
        _check(counts, 3)
        many = max(1, TOGETHER // (counts.shape[1] * counts.shape[2]))
        for first in range(0, len(counts), many):
            some = counts[first : first + many]
            self._take(np.arange(first, first + len(some)), None, some, None, by_slot=False)
            yield from self._flush(BATCH)

    def _passes(self, records: list[Any], places: Any) -> Iterator[tuple[Table, pa.Table]]:
        experts = self._experts(places)
        seen: set[int] = set()
        for number, record in enumerate(records):
            where = f"record {number}"
            # A pickle may name one object very many times.
            if id(record) in seen:
                self.tally.reject("record that is in the recording already", where)
                continue
            seen.add(id(record))
            counted = record.get("global_physical_count") if isinstance(record, dict) else None
            if not isinstance(counted, Tensor):
                self.tally.reject("record without tokens by expert", where)
                continue
            if "input_ids" in record:
                self.tally.skip("token ids of a pass")
            try:
                counts = self.archive.array(counted)
                _check(counts, 2)
            except Refused as error:
                self.tally.reject(str(error), where)
                continue
            step, rank = (self._number(record, key, where) for key in ("forward_pass_id", "rank"))
            steps = None if step is None else np.array([step])
            self._take(steps, rank, counts[None], experts, by_slot=True)
            yield from self._flush(BATCH)

    def _experts(self, places: Any) -> Ints | None:
        """layers x slots: the logical expert in each slot; None where nothing usable says."""
        if not isinstance(places, Tensor):
            self.tally.blank("nothing says which expert is in a slot")
            return None
        try:
            experts = self.archive.array(places)
            _check(experts, 2)
        except Refused as error:
            self.tally.blank(str(error))
            return None
        self.tally.note("experts are those that the slots had when the recording ended")
        return experts.astype(np.int64)

    def _number(self, record: Mapping[str, Any], key: str, where: str) -> int | None:
        value = record.get(key)
        if type(value) is int and 0 <= value < 1 << 62:
            return value
        self.tally.blank(f"{key} is not a number of one", where)
        return None

    def _take(
        self,
        steps: Ints | None,
        rank: int | None,
        counts: NDArray[Any],
        experts: Ints | None,
        *,
        by_slot: bool,
    ) -> None:
        """Rows of some steps. `counts`: steps x layers x experts, or x slots; layers without tokens hold no experts. `steps` are
        their numbers, None where that of the only one is unknown.

        Zeros are left out but for the last expert's, which says how many there are.
        """
        usable = self._usable(steps, counts)
        used = counts.any(axis=2) & usable[:, None]
        if idle := int(np.count_nonzero(usable & ~used.any(axis=1))):
            self.tally.skip("step without tokens", idle)
        kept = (counts > 0) & usable[:, None, None]
        kept[used, -1] = True
        which, layer, place = np.nonzero(kept)
        if not len(which):
            return
        expert: Ints | None = place.astype(np.int64)
        if by_slot:
            known = experts is not None and experts.shape == counts.shape[1:]
            if experts is not None and not known:
                where = "" if steps is None else f"step {steps[0]}"
                self.tally.blank("the slots' experts are of another shape than the tokens", where)
            expert = experts[layer, place] if experts is not None and known else None
        self.waiting.append(
            {
                "step": None if steps is None else steps[which],
                "rank": None if rank is None else np.full(len(layer), rank),
                "layer": layer.astype(np.int64),
                "expert": expert,
                "slot": place.astype(np.int64) if by_slot else None,
                "tokens": counts[which, layer, place].astype(np.int64),
            }
        )
        self.rows += len(layer)

    def _usable(self, steps: Ints | None, counts: NDArray[Any]) -> NDArray[np.bool_]:
        """Which steps' tokens can be true; the others are counted."""
        usable = np.ones(len(counts), bool)
        for reason, wrong in (
            ("tokens of an expert are negative", counts < 0),
            ("tokens of an expert are more than any server has", counts > MOST_TOKENS),
        ):
            bad = np.flatnonzero(wrong.any(axis=(1, 2)) & usable)
            if len(bad):
                where = "" if steps is None else f"step {steps[bad[0]]}"
                self.tally.reject(reason, where, len(bad))
                usable[bad] = False
        return usable

    def _flush(self, at_least: int) -> Iterator[tuple[Table, pa.Table]]:
        if self.rows < at_least:
            return
        steps, self.waiting, self.rows = self.waiting, [], 0
        columns = {name: pa.chunked_array([_column(s, name) for s in steps]) for name in _COLUMNS}
        rows = EXPERT_LOAD.batch({**columns, "recorded_ns": self.recorded_ns})
        for first in range(0, len(rows), BATCH):
            yield EXPERT_LOAD, rows.slice(first, BATCH)


def _column(step: Mapping[str, Ints | None], name: str) -> Any:
    values = step[name]
    layer = step["layer"]
    assert layer is not None
    if values is None:
        return pa.nulls(len(layer), pa.int64())
    # An expert that cannot be one is unknown.
    return pa.array(values, mask=(values < 0) | (values >= MOST_EXPERTS) if name == "expert" else None)


def _check(counts: NDArray[Any], dimensions: int) -> None:
    if counts.ndim != dimensions or counts.dtype.kind not in "iu":
        raise Refused(f"tokens by expert are not {dimensions} dimensions of whole numbers")
    layers, experts = counts.shape[-2:]
    if not (0 < layers <= MOST_LAYERS and 0 < experts <= MOST_EXPERTS):
        raise Refused(f"{layers:,} layers of {experts:,} experts are those of no model")
