"""Disk is given back in the right order, and only what nobody uses."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile

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


class Uv:
    """uv with a cache of its own and a folder of wheels, each of one module ``NAME.py``."""

    def __init__(self, folder):
        self.wheels = folder / "wheels"
        self.archives = folder / "cache" / "archive-v0"
        self.wheels.mkdir()

    def add_wheel(self, name: str) -> None:
        info = f"{name}-1.0.dist-info"
        files = {
            f"{name}.py": "x = 1\n",
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
        with zipfile.ZipFile(self.wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            for path, text in files.items():
                wheel.writestr(path, text)

    def install(self, name: str, target) -> None:
        links = f"--find-links={self.wheels}"
        options = ("--no-index", links, "--link-mode=hardlink", f"--target={target}")
        subprocess.run([room.uv(), "pip", "install", *options, name], check=True)

    def cached(self) -> list[str]:
        return sorted(path.stem for path in self.archives.glob("*/*.py"))


@pytest.fixture
def cache(tmp_path, environments, monkeypatch):
    """uv's cache with one wheel that an environment links to and one that none does any more."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    uv = Uv(tmp_path)
    for name, target in (("used", environments / "tests-2-1"), ("unused", tmp_path / "gone")):
        uv.add_wheel(name)
        uv.install(name, target)
    shutil.rmtree(tmp_path / "gone")
    return uv


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
    assert cache.cached() == ["unused", "used"]


def test_other_environments_go_first(monkeypatch, environments, cache):
    free(monkeypatch, 15, 30)
    room.make(environments, "tests-2-1")
    assert names(environments) == ["not-one", "tests-2-1"]
    assert cache.cached() == ["unused", "used"]


def test_then_wheels_that_no_environment_links_to(monkeypatch, environments, cache, tmp_path):
    free(monkeypatch, 15, 15, 30)
    room.make(environments, "tests-2-1")
    assert cache.cached() == ["used"]
    cache.install("unused", tmp_path / "again")
    assert (tmp_path / "again" / "unused.py").exists()


def test_no_room_is_an_error(monkeypatch, environments, cache):
    free(monkeypatch, 9)
    with pytest.raises(OSError, match="9 GiB free"):
        room.make(environments, "tests-2-1")
