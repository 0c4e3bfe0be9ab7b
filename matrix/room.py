"""Disk for the next environment: all seventeen together take more than many machines have.

uv hard-links what it installs from its cache, so an environment costs little until it is the last
user of a wheel. When disk is short, first the test environments that are not in use go, then those
wheels in uv's cache that no environment anywhere links to.
"""

from __future__ import annotations

import shutil
import subprocess
from importlib import import_module
from pathlib import Path

GIB = 2**30
KEPT_FREE = 10 * GIB
LARGEST_ENVIRONMENT = 8 * GIB


def make(environments: Path, keep: str) -> None:
    """Free disk until an environment fits with ``KEPT_FREE`` to spare; raise OSError if it cannot.

    ``environments`` is nox's folder and ``keep`` the name of the environment about to be used.
    """
    wanted = KEPT_FREE + LARGEST_ENVIRONMENT
    if _free(environments) >= wanted:
        return
    for path in environments.glob("*-*"):
        if path.name != keep and (path / "pyvenv.cfg").exists():
            shutil.rmtree(path, ignore_errors=True)
    if _free(environments) < wanted:
        _forget_unused_wheels()
    if _free(environments) < KEPT_FREE + GIB:
        raise OSError(f"{_free(environments) / GIB:.0f} GiB free; an environment needs more")


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def uv() -> str:
    """Return the uv that nox uses: one on the path, or else one where only Python looks."""
    return shutil.which("uv") or import_module("uv").find_uv_bin()


def _forget_unused_wheels() -> None:
    """Let uv forget the packages of which it keeps an unpacked wheel no environment links to.

    uv does it, by name: when folders of its cache are deleted by hand, its reference to a wheel
    from a local folder stays behind, and it cannot install that wheel again.
    """
    cache = subprocess.run([uv(), "cache", "dir"], check=True, capture_output=True, text=True)
    unused: set[str] = set()
    for archives in Path(cache.stdout.strip()).glob("archive-v*"):
        for wheel in archives.iterdir():
            links = (path.stat().st_nlink for path in wheel.rglob("*") if path.is_file())
            if all(count == 1 for count in links):
                unused.update(path.name.split("-")[0] for path in wheel.glob("*.dist-info"))
    if unused:
        subprocess.run([uv(), "cache", "clean", *sorted(unused)], check=True)
