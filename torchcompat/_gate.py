"""Which torch is running, and which rung of a ladder serves it.

A seam is a package that absorbs what torch changed from release to release. Its ``LADDER`` is a
tuple of ``(release, module name)``, oldest first; the running torch is served by the highest rung
that is not above it. Releases are compared as ``(major, minor)`` integers, so 2.10 is above 2.9, a
development build counts as the release it leads to, and a local suffix such as ``+cpu`` counts for
nothing. Gates are releases rather than ``hasattr``: they can be searched for, tested on every minor
and deleted when the floor rises.

This module imports torch only to ask for its version.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple, Tuple

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from types import ModuleType

Release = Tuple[int, int]
Ladder = Tuple[Tuple[Release, str], ...]

FLOOR: Release = (1, 13)
NEWEST_TESTED: Release = (2, 15)
SEAMS = ("torchcompat.fake_tensor", "torchcompat.autograd_hooks")


class Rung(NamedTuple):
    """One seam's choice for the running torch, and why that rung exists."""

    seam: str
    module: str
    reason: str


def release(version: str) -> Release:
    """Return ``(major, minor)`` of a version string; raise ImportError if it is not a version."""
    try:
        parsed = Version(str(version))
    except InvalidVersion:
        raise ImportError(f"torchcompat cannot read the torch version {version!r}") from None
    return parsed.major, parsed.minor


def running() -> Release:
    """Return the release of the installed torch; raise ImportError below the floor."""
    import torch

    found = release(torch.__version__)
    if found < FLOOR:
        raise ImportError(
            f"torchcompat needs torch {spell(FLOOR)} or newer; this is torch {torch.__version__}"
        )
    return found


def spell(release: Release) -> str:
    """Write a release the way people do: ``(2, 10)`` is ``2.10``."""
    return f"{release[0]}.{release[1]}"


def choose(ladder: Ladder, running: Release) -> str:
    """Return the module name of the highest rung not above ``running``."""
    fitting = [name for since, name in ladder if since <= running]
    if not fitting:
        lowest = spell(ladder[0][0])
        raise ImportError(f"no rung serves torch {spell(running)}: the lowest is for {lowest}")
    return fitting[-1]


def load(seam: str, ladder: Ladder) -> ModuleType:
    """Import and return the rung of ``seam`` that serves the running torch."""
    return importlib.import_module(f"{seam}.{choose(ladder, running())}")


def report() -> list[Rung]:
    """Return, for each seam, the rung in use and the first line of its docstring."""
    rungs = []
    for seam in SEAMS:
        module = load(seam, importlib.import_module(seam).LADDER)
        reason = (module.__doc__ or "").strip().partition("\n")[0]
        rungs.append(Rung(seam, module.__name__.rpartition(".")[2], reason))
    return rungs
