"""``python -m torchcompat`` says how this torch is served; ``constraints 2.1`` prints its pins."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import torch

from torchcompat import __version__, _gate

# In a wheel the constraints files lie in the package, in a checkout beside it.
PACKAGE = Path(__file__).resolve().parent
FOLDERS = (PACKAGE / "constraints", PACKAGE.parent / "matrix" / "constraints")


def describe() -> str:
    """Say which torch runs, which rungs serve it and why, and whose torchdistx it is."""
    newest = _gate.spell(_gate.NEWEST_TESTED)
    tested = _gate.running() <= _gate.NEWEST_TESTED
    verdict = "a tested release" if tested else f"not tested: the newest tested release is {newest}"
    lines = [
        f"torchcompat {__version__}",
        f"torch {torch.__version__}: {verdict}",
        *(f"{rung.seam}.{rung.module}: {rung.reason}" for rung in _gate.report()),
        f"torchdistx: {alias()}",
    ]
    return "\n".join(lines)


def alias() -> str:
    """Say whether ``import torchdistx`` gives this package's alias, without importing it."""
    found = importlib.util.find_spec("torchdistx")
    if found is None:
        return "not on the path"
    ours = found.origin == str(PACKAGE.parent / "torchdistx" / "__init__.py")
    return "the alias of this package" if ours else f"another package, {found.origin}"


def constraints(minor: str) -> str:
    """Return the constraints file of a torch minor; raise LookupError for one that has none."""
    files = [path for folder in FOLDERS for path in folder.glob("torch-*.txt")]
    known = {path.stem[len("torch-") :]: path for path in files}
    if minor not in known:
        minors = sorted(known, key=_gate.release)
        raise LookupError(f"no tested pins for torch {minor}; there are for {', '.join(minors)}")
    return known[minor].read_text().rstrip()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m torchcompat", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["constraints"], help="print tested pins")
    parser.add_argument("minor", nargs="?", help="the torch minor they are for, such as 2.1")
    chosen = parser.parse_args()
    try:
        print(constraints(chosen.minor) if chosen.command else describe())
    except LookupError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
