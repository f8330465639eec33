"""Files are written whole or not at all, and what could not be written is known before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from meshsys.errors import ConfigError
from meshsys.files import writable, write_whole


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_what_is_writable_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_whole(writable("new.txt", "--out"), "new é")
    write_whole(writable("new.txt", "--out"), "newer\n")
    assert content(tmp_path) == {"new.txt": "newer\n"}


def test_asking_changes_nothing(tmp_path):
    (tmp_path / "old.txt").write_text("old")
    for name in ("old.txt", "new.txt"):
        assert writable(str(tmp_path / name), "--out") == tmp_path / name
    assert content(tmp_path) == {"old.txt": "old"}


def test_home_and_links(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "link").symlink_to("file")
    write_whole(writable("~/link", "--out"), "text")
    assert (tmp_path / "link").is_symlink() and content(tmp_path) == {"link": "text", "file": "text"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(tmp_path):
    (tmp_path / "folder").mkdir(mode=0o555)
    (tmp_path / "file").touch(mode=0o444)
    for name, reason in (("folder/new", "cannot be written: Permission denied"), ("file", "is read-only")):
        with pytest.raises(ConfigError, match=f"^--out={tmp_path / name} {reason}; give another path"):
            writable(str(tmp_path / name), "--out")


@pytest.mark.parametrize(
    ("option", "words"),
    [(None, "^.*folder cannot be written: .*; make the folder"), ("--out", "^--out=.*folder cannot .*; give another")],
)
def test_a_write_that_fails_leaves_nothing(tmp_path, option, words):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=words):
        write_whole(tmp_path / "folder", "text", option)
    with pytest.raises(ConfigError, match="Not a directory"):
        write_whole(Path(__file__) / "file", "text")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
