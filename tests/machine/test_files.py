"""Files that are read whole only if they are regular and small, and written whole or not at all."""

import os
from pathlib import Path

import pytest

from jaxmem.errors import UserError
from jaxmem.machine.files import atomic_file, read_file, write_file


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    assert read_file(tmp_path / "link", 7) == b"content"


def test_pipes_devices_and_large_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    for name, reason in (("pipe", "is not a regular"), ("zero", "is not a regular"), ("sparse", "the limit of 16 MiB")):
        with pytest.raises(UserError, match=f"{name}: .*{reason}"):
            read_file(tmp_path / name, 16 << 20)


def test_a_file_is_replaced_and_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("kept")
    (tmp_path / "x").symlink_to(tmp_path / "elsewhere")
    write_file(tmp_path / "x", "new")
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert (tmp_path / "x").read_text() == "new"
    write_file(tmp_path / "y", "")
    (tmp_path / "z").touch()
    assert (tmp_path / "y").stat().st_mode == (tmp_path / "z").stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "x", "y", "z"}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "x", "old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "x", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_two_writers_of_a_file_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "x") as first:
        first.write_text("first")
        with atomic_file(tmp_path / "x") as second:
            second.write_text("second")
        assert (tmp_path / "x").read_text() == "second"
    assert (tmp_path / "x").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_missing_directory_is_created(tmp_path: Path) -> None:
    write_file(tmp_path / "new" / "folder" / "x", "text")
    assert (tmp_path / "new" / "folder" / "x").read_text() == "text"
