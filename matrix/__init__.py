"""The tested torch releases: ``torch.toml`` read into rows, and the sessions that follow from them.

Edited by hand: ``torch.toml``. Generated from it by ``python -m matrix``: ``constraints/`` and the
support table in README. Written by the test sessions: ``results/``. Needs Python 3.11 and nothing
installed, so that a workflow can call it first.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "matrix"


@dataclass(frozen=True)
class Row:
    """One torch minor: what is installed to test it, and on which Pythons."""

    minor: str
    torch: str
    python: str
    pythons: tuple[str, str]
    pins: tuple[str, ...] = ()

    @property
    def constraints(self) -> Path:
        """The file for ``pip install -c``."""
        return HERE / "constraints" / f"torch-{self.minor}.txt"

    @property
    def sessions(self) -> dict[str, str]:
        """What to call each session of this row, and the Python it runs on."""
        others = [python for python in self.pythons if python != self.python]
        return {
            self.minor: self.python,
            **{f"{self.minor}-py{python.replace('.', '')}": python for python in others},
        }

    def covers(self, python: str) -> bool:
        """Tell whether this release has wheels for a Python such as ``3.11``."""
        oldest, newest = map(numbers, self.pythons)
        return oldest <= numbers(python) <= newest


@dataclass(frozen=True)
class Matrix:
    """All rows, oldest first, and which of them the sessions use that need not run on all."""

    rows: dict[str, Row]
    default: tuple[str, ...]
    fuzz: tuple[str, ...]
    bench: tuple[str, ...]
    demo: str
    types: str
    trainer: dict[str, str]


def numbers(version: str) -> tuple[int, ...]:
    """Return ``(2, 10)`` for ``2.10``, so that versions compare as versions."""
    return tuple(map(int, version.split(".")))


def read(path: Path = HERE / "torch.toml") -> Matrix:
    """Read the table."""
    table = tomllib.loads(path.read_text())
    minors = [key for key, value in table.items() if isinstance(value, dict) and "torch" in value]
    rows = {minor: _row(minor, **table.pop(minor)) for minor in sorted(minors, key=numbers)}
    default, fuzz, bench = (tuple(table.pop(key)) for key in ("default", "fuzz", "bench"))
    return Matrix(rows, default, fuzz, bench, **table)


def _row(
    minor: str, torch: str, python: str, pythons: tuple[str, str], pins: tuple[str, ...] = ()
) -> Row:
    oldest, newest = pythons
    return Row(minor, torch, python, (oldest, newest), tuple(pins))
