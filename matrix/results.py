"""What the test sessions found, one file per session, and whether it still holds.

A result carries a hash of the package's source. Once the source has changed the result is stale,
and the table says so until the session has run again.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from matrix import HERE, ROOT

if TYPE_CHECKING:
    from pathlib import Path

PACKAGES = ("torchcompat", "torchdistx")


@dataclass(frozen=True)
class Result:
    """The outcome of one test session."""

    tree: str
    torch: str
    python: str
    platform: str
    date: str
    passed: int
    failed: int
    skipped: int
    seconds: float


def tree_hash(root: Path = ROOT) -> str:
    """Return 12 hex digits that change whenever a source file of the package does."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def from_junit(report: Path, tree: str, torch: str, python: str) -> Result:
    """Read pytest's JUnit report; expected failures count as skipped, as pytest writes them."""
    suites = ElementTree.parse(report).getroot().findall("testsuite")
    count = {
        key: sum(int(suite.get(key, 0)) for suite in suites)
        for key in ("tests", "failures", "errors", "skipped")
    }
    failed = count["failures"] + count["errors"]
    return Result(
        tree=tree,
        torch=torch,
        python=python,
        platform=f"{platform.system()} {platform.machine()}",
        date=suites[0].get("timestamp", "")[:10],
        passed=count["tests"] - failed - count["skipped"],
        failed=failed,
        skipped=count["skipped"],
        seconds=round(sum(float(suite.get("time", 0)) for suite in suites), 1),
    )


def write(session: str, result: Result, folder: Path = HERE / "results") -> None:
    """Save the result of a session such as ``2.1`` or ``2.1-py38``."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{session}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")


def load(folder: Path = HERE / "results") -> dict[str, Result]:
    """Return every saved result by session."""
    return {path.stem: Result(**json.loads(path.read_text())) for path in folder.glob("*.json")}
