"""Archives of torch.save made by hand: nothing in them is run, nothing makes the reader fall over."""

from __future__ import annotations

import io
import os
import pickle
import random
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailscope import registry
from tailscope.errors import BadInput
from tailscope.schema import EXPERT_LOAD
from tailscope.source import Source

COLLECTOR = next(c for c in registry.collectors() if EXPERT_LOAD in c.tables)
CASES = Path(__file__).parent / "collectors" / COLLECTOR.name
WRITTEN = ["stat", "per-pass", "per-token", "view-of-a-tensor"]


def read(path: Path) -> tuple[Source, list[dict[str, Any]]]:
    source = Source(path, display=path.name)
    return source, [row for _, rows in COLLECTOR.read(source) for row in rows.to_pylist()]


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", pickled)
        file.writestr("a/byteorder", "little")
        for key, content in (storages or {}).items():
            file.writestr(f"a/data/{key}", content)
    return path


def with_code(callable_: Any, *arguments: Any) -> bytes:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return callable_, arguments

    return pickle.dumps({"rank": 0, "logical_count": Runs()}, protocol=2)


@pytest.mark.parametrize(
    "pickled",
    [
        with_code(os.mkdir, "executed"),
        with_code(eval, "__import__('os').mkdir('executed')"),
        with_code(getattr, "", "format"),
        with_code(pickle.loads, b"cos\nmkdir\n(X\x08\x00\x00\x00executedtR."),
        # The name is put together only when it is read.
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93\x8c\x08executed\x85R.",
        b"cos\nmkdir\n(S'executed'\ntR.",
        b"(S'executed'\nios\nmkdir\n.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(cos\nmkdir\ntR.",
        b"\x80\x02ccollections\nOrderedDict.__init__.__globals__\n.",
    ],
)
def test_nothing_is_run(pickled: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput):
        read(archive(tmp_path / "x.pt", pickled))
    assert not (tmp_path / "executed").exists()


def doubled(times: int) -> bytes:
    """Pairs of the same object, inside each other: few bytes, very many ways through them."""
    return b"K\x01" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(times))


def alike(count: int) -> bytes:
    """Numbers as keys that Python's dictionaries cannot tell apart quickly."""
    prime = (1 << 61) - 1
    return b"".join(b"\x8a\x0a" + (prime * n).to_bytes(10, "little") + b"N" for n in range(1, count))


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(b"\x80\x02Nr\xff\xff\xff\xff0.", id="position"),
        pytest.param(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", id="bytes"),
        pytest.param(b"\x80\x02X\xff\xff\xff\x7f.", id="text"),
        pytest.param(b"\x80\x02\x8b\xff\xff\xff\x7f.", id="number"),
        pytest.param(b"\x80\x04\x95" + b"\xff" * 8 + b"N.", id="frame"),
        pytest.param(b"\x80\x02" + b"(" * 1_000_000 + b".", id="depth"),
        pytest.param(b"\x80\x02]" + b"2" * 1_000_000 + b".", id="copies"),
        pytest.param(b"\x80\x02}(" + b"K\x01" * 3 + b"u.", id="odd pairs"),
        pytest.param(b"\x80\x02}]NsN.", id="key that cannot be one"),
        pytest.param(b"\x80\x02})" + b"\x85" * 300_000 + b"Ns.", id="deep key"),
        pytest.param(b"\x80\x02}" + doubled(60) + b"Ns.", id="key of copies"),
        pytest.param(b"\x80\x02}(" + alike(80_000) + b"u.", id="keys that seem equal"),
        pytest.param(
            b"\x80\x02ccollections\nOrderedDict\n](" + doubled(60) + b"K\x01\x86e\x85R.", id="items"
        ),
        pytest.param(b"\x80\x02" + b"]" * 100 + b"a" * 99 + b".", id="lists inside each other"),
        pytest.param(b"\x80\x02}q\x01h\x07Ns.", id="object that is not there"),
        pytest.param(b"\x80\x02s.", id="nothing to take"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\x80\x02", id="no end"),
    ],
)
def test_a_pickle_that_asks_for_much_is_refused(pickled: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadInput):
        read(archive(tmp_path / "x.pt", pickled))


def test_too_many_operations_are_refused_before_they_are_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        type(COLLECTOR).read.__globals__["TorchArchive"].__init__.__globals__, "MOST_OPERATIONS", 1_000
    )
    with pytest.raises(BadInput, match=r"more than 1,000 operations.*per_pass"):
        read(archive(tmp_path / "x.pt", b"\x80\x02(" + b"K\x01" * 2_000 + b"t."))


def test_a_directory_that_promises_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    elements = 1 << 28
    path = archive(
        tmp_path / "x.pt", pickled_counts("IntStorage", elements, (1, 2, 2), (4, 2, 1)), {"0": b"\0" * 16}
    )
    content = bytearray(path.read_bytes())
    entry = content.index(b"PK\x01\x02", content.rindex(b"a/data/0") - 60)
    content[entry + 20 : entry + 28] = (elements * 4).to_bytes(4, "little") * 2
    path.write_bytes(bytes(content))
    with pytest.raises(BadInput, match="larger than"):
        read(path)


def damaged(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(rng.randint(1, 6)):
        match rng.randint(0, 3):
            case 0:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            case 1:
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            case 2:
                at = rng.randrange(len(changed))
                del changed[at : at + rng.randint(1, 64)]
            case _:
                at = rng.randrange(len(changed))
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(changed)


def pieces(content: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        for entry in file.infolist():
            yield entry.filename, file.read(entry)


@pytest.mark.parametrize("case", WRITTEN)
@pytest.mark.parametrize("inside", [False, True], ids=["archive", "pickle"])
def test_damage_of_any_kind_is_bad_input(case: str, inside: bool, tmp_path: Path) -> None:
    rng = random.Random(case)
    content = (CASES / case / "input.pt").read_bytes()
    path = tmp_path / "x.pt"
    ended = 0
    for _ in range(300):
        if inside:
            with zipfile.ZipFile(path, "w") as file:
                for name, data in pieces(content):
                    file.writestr(name, damaged(data, rng) if name.endswith(".pkl") else data)
        else:
            path.write_bytes(damaged(content, rng))
        try:
            read(path)
        except BadInput:
            ended += 1
    assert ended > 100


def test_a_recording_of_usual_size_is_read_in_batches(tmp_path: Path) -> None:
    """58 layers of 256 experts, as torch lays them out: int32, steps x layers x experts."""
    shape = (40, 58, 256)
    counts = np.random.default_rng(1).poisson(20, shape).astype("<i4")
    stride = (58 * 256, 256, 1)
    pickled = pickled_counts("IntStorage", counts.size, shape, stride)
    path = archive(
        tmp_path / "expert_distribution_recorder_1795000000.25.pt", pickled, {"0": counts.tobytes()}
    )
    source = Source(path)
    assert COLLECTOR.recognises(source.head(), source.name)
    batches = [rows for _, rows in COLLECTOR.read(source)]
    assert max(len(rows) for rows in batches) <= 100_000
    tokens = sum(int(np.sum(rows["tokens"].to_numpy())) for rows in batches)
    assert tokens == counts.sum()
    assert batches[0]["recorded_ns"][0].as_py() == 1_795_000_000_250_000_000


def pickled_counts(storage: str, elements: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """A pickle as torch writes it, of `{"rank": 0, "logical_count": tensor}`."""

    def number(value: int) -> bytes:
        return b"J" + value.to_bytes(4, "little")

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    pid = (
        b"("
        + text("storage")
        + f"ctorch\n{storage}\n".encode()
        + text("0")
        + text("cpu")
        + number(elements)
        + b"t"
    )
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"Q" + number(0) + numbers(shape) + numbers(stride)
        + b"\x89ccollections\nOrderedDict\n)RtR"
    )  # fmt: skip
    return b"\x80\x02}(" + text("rank") + number(0) + text("logical_count") + tensor + b"u."


def test_every_plain_storage_can_be_read(tmp_path: Path) -> None:
    for storage, kind in {
        "LongStorage": "<i8",
        "IntStorage": "<i4",
        "ShortStorage": "<i2",
        "CharStorage": "i1",
    }.items():
        counts = np.array([[3, 0], [0, 5]], kind)
        path = archive(
            tmp_path / storage, pickled_counts(storage, 4, (2, 2), (2, 1)), {"0": counts.tobytes()}
        )
        _, rows = read(path)
        assert [(r["layer"], r["expert"], r["tokens"]) for r in rows] == [(0, 0, 3), (0, 1, 0), (1, 1, 5)]
    path = archive(tmp_path / "b", pickled_counts("BFloat16Storage", 4, (2, 2), (2, 1)), {"0": b"\0" * 8})
    with pytest.raises(BadInput, match="BFloat16Storage is not read"):
        read(path)


def test_keys_may_be_names_and_some_small_numbers(tmp_path: Path) -> None:
    numbered = b"}(" + b"".join(b"M" + n.to_bytes(2, "little") + b"N" for n in range(1_000)) + b"u"
    pickled = b"\x80\x02}(X\x07\0\0\0recordsq\x01](" + numbered + b"}h\x01Nseu."
    source, rows = read(archive(tmp_path / "x.pt", pickled))
    assert not rows
    assert dict(source.tally.rejected) == {"record without tokens by expert": 2}
    many = b"".join(b"J" + n.to_bytes(4, "little") + b"N" for n in range(100_001))
    with pytest.raises(BadInput, match="very many numbers"):
        read(archive(tmp_path / "y.pt", b"\x80\x02}(" + many + b"u."))


@pytest.mark.parametrize("shape", [(0, 1 << 30, 1 << 30), (1 << 30, 1 << 30, 0), (1 << 30, 0, 1 << 30)])
def test_an_empty_tensor_of_impossible_size_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", pickled_counts("LongStorage", 1, shape, (1, 1, 1)), {"0": b"\0" * 8})
    with pytest.raises(BadInput, match="impossible size"):
        read(path)


def pass_counts(memo: bytes = b"") -> bytes:
    """The tensor of `pickled_counts`, one layer of 64 slots, as it stands in a pickle."""
    whole = pickled_counts("ByteStorage", 64, (1, 64), (64, 1))
    return whole[whole.index(b"ctorch") : -2] + memo


def test_an_object_that_is_named_often_is_read_once(tmp_path: Path) -> None:
    counted = b"X\x15\0\0\0global_physical_count"
    record = b"}" + counted + pass_counts() + b"sq\x05"
    pickled = b"\x80\x02}X\x07\0\0\0records](" + record + b"h\x05" * 30_000 + b"es."
    source, rows = read(archive(tmp_path / "x.pt", pickled, {"0": b"\1" * 64}))
    assert len(rows) == 64
    assert source.tally.rejected == {"record that is in the recording already": 30_000}
    # Other records, the same tensor.
    record = b"}q\x05" + counted + b"q\x06" + pass_counts(b"q\x07") + b"s"
    pickled = b"\x80\x02}X\x07\0\0\0records](" + record + b"}h\x06h\x07s" * 30_000 + b"es."
    path = archive(tmp_path / "y.pt", pickled, {"0": b"\1" * 64})
    source, rows = read(path)
    assert len(rows) < 2 * path.stat().st_size
    [(reason, count)] = source.tally.rejected.items()
    assert reason == "the tensors are more than the archive holds: they share the same numbers"
    assert count + len(rows) / 64 == 30_001


def test_many_small_steps_are_read_together(tmp_path: Path) -> None:
    steps = 200_000
    counts = np.ones((steps, 1, 1), "u1")
    counts[7] = 0
    path = archive(
        tmp_path / "x.pt", pickled_counts("ByteStorage", steps, counts.shape, (1, 1, 1)), {"0": counts.tobytes()}
    )  # fmt: skip
    began = time.process_time()
    source = Source(path)
    numbers = np.concatenate([rows["step"].to_numpy() for _, rows in COLLECTOR.read(source)])
    assert time.process_time() - began < 3
    assert numbers.tolist() == [n for n in range(steps) if n != 7]
    assert source.tally.skipped == {"step without tokens": 1}


def test_tokens_that_no_server_has_are_counted_and_left_out(tmp_path: Path) -> None:
    counts = np.array([[[1, 2]], [[1 << 62, 1]], [[-1, 1]], [[(1 << 44) + 1, 0]], [[3, 1 << 44]]], "<i8")
    path = archive(
        tmp_path / "x.pt", pickled_counts("LongStorage", 10, counts.shape, (2, 2, 1)), {"0": counts.tobytes()}
    )
    source, rows = read(path)
    assert [(row["step"], row["tokens"]) for row in rows] == [(0, 1), (0, 2), (4, 3), (4, 1 << 44)]
    assert source.tally.rejected == {
        "tokens of an expert are negative": 1,
        "tokens of an expert are more than any server has": 2,
    }
