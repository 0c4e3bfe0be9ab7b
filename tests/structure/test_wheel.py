"""What is installed is complete: both packages, their type markers, and the tested pins."""

from __future__ import annotations

import subprocess
import sys

import pytest

metadata = pytest.importorskip("importlib.metadata", reason="needs Python 3.8")


@pytest.fixture
def files():
    try:
        found = metadata.files("torchdistx-compat")
    except metadata.PackageNotFoundError:
        pytest.skip("the wheel is not installed: nox installs it")
    return {str(path) for path in found}


def test_both_packages_are_in_it(files, root):
    for package in ("torchcompat", "torchdistx"):
        sources = (path for path in (root / package).rglob("*") if path.suffix in (".py", ".typed"))
        assert {path.relative_to(root).as_posix() for path in sources} <= files


def test_nothing_else_is(files):
    tops = {path.partition("/")[0] for path in files if "site-packages" not in path}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"torchcompat", "torchdistx"}


def test_requirements(files):
    required = metadata.requires("torchdistx-compat")
    assert sorted(line for line in required if "extra ==" not in line) == [
        "packaging",
        "torch>=1.13",
    ]


def test_it_prints_the_pins_away_from_the_checkout(files, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "torchcompat", "constraints", "2.1"],
        cwd=str(tmp_path),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "torch==2.1.2\nnumpy<2\n" in done.stdout
