"""What a command writes with `-o`."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tailscope.errors import UsageError
from tailscope.output import no_folder, replacing


def test_a_file_is_replaced_as_a_whole_and_keeps_its_mode(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    output.write_text("before")
    output.chmod(0o640)
    (tmp_path / "page.html.part").write_text("somebody else's")
    with output.open() as reader, replacing(output) as part:
        part.write_text("after")
        assert output.read_text() == "before"
    assert output.read_text() == "after"
    assert reader.closed
    assert stat.S_IMODE(output.stat().st_mode) == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page.html", "page.html.part"]


def test_a_new_file_has_the_mode_that_others_have(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    with replacing(tmp_path / "new") as part:
        part.write_text("text")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_nothing_is_left_of_what_was_interrupted(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "page.html") as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("page.html", "before")]


def test_a_link_stays_one_and_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    with replacing(tmp_path / "link") as part:
        part.write_text("after")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "after"

    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    with replacing(tmp_path / "pipe") as part:
        part.write_text("through")
    reader.join(10)
    assert read == ["through"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_what_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="cannot be written: No such file"),
        replacing(tmp_path / "no" / "file"),
    ):
        pass
    for name, why in ((str(tmp_path), "is a folder; name a file"), ("-", "is no file; name one")):
        with pytest.raises(UsageError, match=why):
            no_folder(Path(name), "page.html")
