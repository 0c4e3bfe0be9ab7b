"""Disk is given back in the right order, and only what nobody uses."""

from __future__ import annotations

import os
import stat
import sys

import pytest

if sys.version_info < (3, 11):
    pytest.skip("matrix/ needs Python 3.11", allow_module_level=True)

from matrix import room


@pytest.fixture
def environments(tmp_path):
    """Two environments and another folder, as nox leaves them."""
    folder = tmp_path / "nox"
    for name in ("tests-2-1", "tests-2-2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "pyvenv.cfg").touch()
    (folder / "not-one").mkdir()
    return folder


@pytest.fixture
def cache(tmp_path, environments, monkeypatch):
    """A cache with one wheel that an environment links to and one that none does."""
    folder = tmp_path / "cache" / "archive-v0"
    for name in ("used", "unused"):
        (folder / name).mkdir(parents=True)
        (folder / name / "code.py").write_text("x = 1\n")
    os.link(folder / "used" / "code.py", environments / "tests-2-1" / "code.py")
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\n[ "$2" = dir ] && echo {folder.parent} || touch {tmp_path}/pruned\n')
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{uv.parent}{os.pathsep}{os.environ['PATH']}")
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def free(monkeypatch, *gib: float) -> None:
    """Let the disk report these amounts in turn, the last one for ever."""
    left = list(gib)
    monkeypatch.setattr(
        room, "_free", lambda path: (left.pop(0) if len(left) > 1 else left[0]) * room.GIB
    )


def test_nothing_goes_while_there_is_room(monkeypatch, environments, cache):
    free(monkeypatch, 30)
    room.make(environments, "tests-2-1")
    assert names(environments) == ["not-one", "tests-2-1", "tests-2-2"]
    assert names(cache) == ["unused", "used"]


def test_other_environments_go_first(monkeypatch, environments, cache):
    free(monkeypatch, 15, 30)
    room.make(environments, "tests-2-1")
    assert names(environments) == ["not-one", "tests-2-1"]
    assert names(cache) == ["unused", "used"]


def test_then_wheels_that_no_environment_links_to(monkeypatch, environments, cache, tmp_path):
    free(monkeypatch, 15, 15, 30)
    room.make(environments, "tests-2-1")
    assert names(cache) == ["used"]
    assert (tmp_path / "pruned").exists()


def test_no_room_is_an_error(monkeypatch, environments, cache):
    free(monkeypatch, 9)
    with pytest.raises(OSError, match="9 GiB free"):
        room.make(environments, "tests-2-1")
