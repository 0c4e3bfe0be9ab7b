"""Which torch is running, and what a ladder offers it.

A seam is a package that absorbs what torch changed from release to release. Its ``LADDER`` lists,
oldest first, the releases that made a change necessary; each is a module, a rung, named after its
release, that holds only what that release changed. A name means what the highest rung that defines
it says, among the rungs not above the running torch. Releases are compared as ``(major, minor)``
integers, so 2.10 is above 2.9, a development build counts as the release it leads to, and a local
suffix such as ``+cpu`` counts for nothing. Gates are releases rather than ``hasattr``: they can be
searched for, tested on every minor and deleted when the floor rises.

This module imports torch only to ask for its version.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Tuple

from packaging.version import InvalidVersion, Version

Release = Tuple[int, int]
Ladder = Tuple[Release, ...]

FLOOR: Release = (1, 13)
NEWEST_TESTED: Release = (2, 15)
SEAMS = ("torchcompat.fake_tensor", "torchcompat.autograd_hooks")


class Rung(NamedTuple):
    """A rung that serves the running torch, and why it exists."""

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


def rungs(ladder: Ladder, running: Release) -> list[str]:
    """Return the module names of the rungs that serve ``running``, lowest first."""
    return [f"since_{since[0]}_{since[1]}" for since in ladder if since <= running]


def load(seam: str, ladder: Ladder) -> dict[str, Any]:
    """Return what a ladder offers the running torch, by name.

    Tables are merged, so that a rung can add, change or (with None) take back single entries.
    """
    offered: dict[str, Any] = {}
    for rung in rungs(ladder, running()):
        for name, value in vars(importlib.import_module(f"{seam}.{rung}")).items():
            if name[0] != "_":
                table = isinstance(value, dict)
                offered[name] = {**offered.get(name, {}), **value} if table else value
    return offered


def report() -> list[Rung]:
    """Return the rungs in use, with the first line of each one's docstring."""
    found = []
    for seam in SEAMS:
        for rung in rungs(importlib.import_module(seam).LADDER, running()):
            doc = importlib.import_module(f"{seam}.{rung}").__doc__ or ""
            found.append(Rung(seam, rung, doc.strip().partition("\n")[0]))
    return found
