"""What every test can lean on.

* ``WARNINGS``: what torch itself warns about, by release; any other warning fails a test.
* ``@pytest.mark.since((2, 3))`` and ``@pytest.mark.before((2, 3))`` skip by release.
* Every test starts from the same random state and must leave torch as it found it.
* ``run_python(code)`` runs code in a fresh process that imports the package under test.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchcompat
from torchcompat import _gate

ROOT = Path(__file__).resolve().parent.parent

# (first release, first release without it, pytest filter, and below it who is to blame)
WARNINGS = (
    # torch's own load, deepcopy and sharing code still calls the storage class it deprecated.
    ((2, 0), (9, 0), "ignore:TypedStorage is deprecated:UserWarning"),
)


def pytest_configure(config: pytest.Config) -> None:
    running = _gate.running()
    for since, until, line in WARNINGS:
        if since <= running < until:
            config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    running = _gate.running()
    for item in items:
        for mark in item.iter_markers("since"):
            _skip_unless(item, running >= mark.args[0], "needs torch {}{}", mark)
        for mark in item.iter_markers("before"):
            _skip_unless(item, running < mark.args[0], "only before torch {}{}", mark)


def _skip_unless(item: pytest.Item, fits: bool, reason: str, mark: pytest.Mark) -> None:
    if not fits:
        why = mark.kwargs.get("why", "".join(mark.args[1:]))
        text = reason.format(_gate.spell(mark.args[0]), f": {why}" if why else "")
        item.add_marker(pytest.mark.skip(reason=text))


def pytest_report_header() -> str:
    rungs = ", ".join(f"{rung.seam.rpartition('.')[2]} {rung.module}" for rung in _rungs())
    return f"torch {torch.__version__}; {rungs}; package {Path(torchcompat.__file__).parent}"


def _rungs() -> list[_gate.Rung]:
    try:
        return _gate.report()
    except (ImportError, AttributeError):  # a seam that is broken or not written yet
        return []


@pytest.fixture(autouse=True)
def _same_start_clean_end():
    """Give each test the same random state; fail one that leaves torch's settings changed."""
    torch.manual_seed(0)
    random.seed(0)
    before = _settings()
    yield
    after = _settings()
    torch.set_default_dtype(before["default dtype"])
    torch.set_grad_enabled(before["grad mode"])
    assert after == before


def _settings() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "factory device": torch.empty(0).device,
        "factory type": type(torch.empty(0)),
        "start of cuda": torch.cuda._lazy_init,
        "patched classes": [
            *(getattr(torch.Tensor, name) for name in ("__new__", "__repr__", "data", "new")),
            *(getattr(torch.Generator, name) for name in ("get_state", "manual_seed")),
        ],
        "autocast": torch.is_autocast_enabled(),
    }


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture
def run_python(tmp_path):
    """Run code, or python arguments, in a fresh process that sees the package under test."""

    def run(code: str = "", *, args=(), check: bool = True) -> subprocess.CompletedProcess[str]:
        paths = [str(Path(torchcompat.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths)))
        command = [sys.executable, *(args or ("-c", code))]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if check and done.returncode:
            pytest.fail(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
        return done

    return run
