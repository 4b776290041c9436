from __future__ import annotations

import gzip
import os
from pathlib import Path

import pyarrow as pa
import pytest

from tailscope import source as module
from tailscope.source import HEAD, PIECE, Source, files_below

LINES = [b'{"row":%d,"hash":"%s"}' % (i, os.urandom(8).hex().encode()) for i in range(20_000)]
CONTENT = b"\n".join(LINES) + b"\n"


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


GZIP, ZSTD = gzip.compress(CONTENT), zstd(CONTENT)


def source(folder: Path, content: bytes, name: str = "file.jsonl") -> Source:
    path = folder / name
    path.write_bytes(content)
    return Source(path)


def lines(read: Source) -> list[bytes]:
    return [line for _, line in read.lines()]


# -- compression -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "x.json", "x.gz", "x.zst"])
@pytest.mark.parametrize("packed", [CONTENT, GZIP, ZSTD], ids=["plain", "gzip", "zstd"])
def test_content_and_not_the_name_says_how_a_file_is_packed(tmp_path: Path, name: str, packed: bytes) -> None:
    read = source(tmp_path, packed, name)
    assert lines(read) == LINES
    assert read.head() == CONTENT[:HEAD]
    assert read.read_all() == CONTENT
    assert not read.tally.rejected


def test_the_content_hash_is_that_of_the_content(tmp_path: Path) -> None:
    packings = [CONTENT, GZIP, ZSTD, gzip.compress(CONTENT, 1), b"\xef\xbb\xbf" + CONTENT]
    assert len({source(tmp_path, packed).content_hash() for packed in packings}) == 1
    assert source(tmp_path, CONTENT + b" ").content_hash() != source(tmp_path, CONTENT).content_hash()


def test_members_of_a_gzip_file_follow_each_other(tmp_path: Path) -> None:
    members = [gzip.compress(line + b"\n") for line in LINES[:5000]]
    read = source(tmp_path, b"".join(members))
    assert lines(read) == LINES[:5000]
    assert not read.tally.rejected


@pytest.mark.parametrize("padding", [1, 511, 32 << 10, 100_000])
def test_zeros_around_members_are_padding(tmp_path: Path, padding: int) -> None:
    read = source(tmp_path, GZIP + b"\0" * padding + GZIP + b"\0" * padding)
    assert lines(read) == LINES * 2
    assert not read.tally.rejected


def test_frames_of_a_zstd_file_follow_each_other(tmp_path: Path) -> None:
    read = source(tmp_path, ZSTD + zstd(b"") + ZSTD)
    assert lines(read) == LINES * 2
    assert not read.tally.rejected


@pytest.mark.parametrize("packed", [GZIP, ZSTD], ids=["gzip", "zstd"])
@pytest.mark.parametrize("left", [0.999, 0.6, 0.3])
def test_a_truncated_file_gives_what_it_holds(tmp_path: Path, packed: bytes, left: float) -> None:
    read = source(tmp_path, packed[: int(len(packed) * left)])
    content = read.read_all()
    assert CONTENT.startswith(content)
    # zstd gives its blocks whole, of up to 128 KiB.
    lost_at_most = PIECE if packed is GZIP else 128 << 10
    assert len(content) > len(CONTENT) * left * 0.95 - lost_at_most
    assert dict(read.tally.rejected) == {"compressed data ends early": 1}
    assert read.tally.first_seen == {
        "compressed data ends early": f"after {len(content):,} uncompressed bytes"
    }


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_file_cut_in_its_header_or_trailer_is_never_whole(tmp_path: Path, cut: int) -> None:
    for packed in (GZIP, ZSTD):
        for rest in (packed[:-cut], packed[: 4 + cut]):
            read = source(tmp_path, rest)
            assert CONTENT.startswith(read.read_all())
            assert read.tally.rejected.total() == 1


def test_a_truncated_second_member_leaves_the_first(tmp_path: Path) -> None:
    for packed in (GZIP, ZSTD):
        read = source(tmp_path, packed + packed[:12])
        assert len(CONTENT) - len(read.read_all()) < PIECE
        assert dict(read.tally.rejected) == {"compressed data ends early": 1}


@pytest.mark.parametrize("packed", [GZIP, ZSTD], ids=["gzip", "zstd"])
def test_damage_costs_what_comes_after_it(tmp_path: Path, packed: bytes) -> None:
    middle = len(packed) // 2
    read = source(tmp_path, packed[:middle] + bytes(64) + packed[middle + 64 :])
    content = read.read_all()
    assert content[: len(CONTENT) // 5] == CONTENT[: len(CONTENT) // 5]
    assert len(content) < len(CONTENT)
    assert dict(read.tally.rejected) == {"compressed data is damaged": 1}


@pytest.mark.parametrize("packed", [GZIP, ZSTD], ids=["gzip", "zstd"])
def test_a_wrong_end_costs_little(tmp_path: Path, packed: bytes) -> None:
    """A checksum that is wrong, or rubbish after the data."""
    for wrong in (packed[:-5] + bytes([packed[-5] ^ 255]) + packed[-4:], packed + b"rubbish, not a member"):
        if packed is ZSTD and not wrong.endswith(b"member"):
            continue  # no checksum
        read = source(tmp_path, wrong)
        assert len(CONTENT) - len(read.read_all()) <= PIECE
        assert dict(read.tally.rejected) == {"compressed data is damaged": 1}


def test_looking_at_the_head_and_hashing_count_nothing(tmp_path: Path) -> None:
    read = source(tmp_path, GZIP[:2000])
    read.head()
    read.content_hash()
    assert not read.tally.rejected


# -- lines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b" \t\r\n\n\x0c\n", b"\xef\xbb\xbf", gzip.compress(b"\n \n", mtime=0)],
    ids=["nothing", "newline", "space", "mark", "packed"],
)
def test_nothing_but_space_is_no_line(tmp_path: Path, content: bytes) -> None:
    read = source(tmp_path, content)
    assert lines(read) == []
    assert read.head().strip() == b""
    assert not read.tally.rejected


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    read = source(tmp_path, b"\xef\xbb\xbfone\r\n\n  three\x00 \nfour")
    assert list(read.lines()) == [(1, b"one"), (3, b"three\x00"), (4, b"four")]


def test_a_line_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 1000)
    monkeypatch.setattr(module, "CHUNK", 300)
    exact = b"e" * 999
    read = source(tmp_path, b"\n".join([b"first", b"x" * 1000, exact, b"y" * 5000, b"last", b"z" * 2000]))
    assert list(read.lines()) == [(1, b"first"), (3, exact), (5, b"last")]
    assert dict(read.tally.rejected) == {"line longer than 64 MiB": 3}
    assert read.tally.first_seen == {"line longer than 64 MiB": "line 2"}


def test_a_name_loses_only_what_says_how_it_is_packed(tmp_path: Path) -> None:
    for name, bare in (
        ("a.jsonl.gz", "a.jsonl"),
        ("a.pb.zst", "a.pb"),
        ("a.zstd", "a"),
        ("a.json", "a.json"),
    ):
        assert Source(tmp_path / name).name == bare


# -- files below -----------------------------------------------------------------------------------


def test_files_below_a_folder(tmp_path: Path) -> None:
    for name in (
        "b/2",
        "b/1",
        "a/x",
        ".hidden/x",
        "a/.hidden",
        "t.parquet/requests/part.parquet",
        "c.parquet",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "nothing").symlink_to("gone")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "file").symlink_to("a/x")
    found = [str(p.relative_to(tmp_path)) for p in files_below(tmp_path)]
    assert found == ["c.parquet", "file", "loop", "nothing", "a/x", "b/1", "b/2"]
    assert list(files_below(tmp_path / "a" / "x")) == [tmp_path / "a" / "x"]
