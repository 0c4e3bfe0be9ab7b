"""The sessions: ``nox -l`` lists them, plain ``nox`` runs the default set.

No torch version stands here: ``matrix/torch.toml`` names them, and each of its rows becomes a
session such as ``tests-2.1``. nox compares session names as parsed Python, in which ``tests-2.1``
and ``tests-2.10`` are equal, so a session's Python is given as a list and spelt ``python3.11``: its
signature ``tests-2.1-python3.11`` does not parse and is compared as text.
"""

# /// script
# dependencies = ["nox[uv]>=2025.5.1", "python-discovery"]
# ///

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import nox
from python_discovery import get_interpreter

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

import matrix
from matrix import __main__ as generated
from matrix import results, room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# pyenv hides all Pythons but the selected one unless it is told of the others.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
RUNNING = ".".join(map(str, sys.version_info[:2]))
if PYENV.is_dir():
    installed = sorted(PYENV.iterdir(), key=lambda path: not path.name.startswith(RUNNING))
    os.environ["PYENV_VERSION"] = ":".join(path.name for path in installed)

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False

IN_CI = bool(os.environ.get("CI"))
MATRIX = matrix.read()
PYPROJECT = nox.project.load_toml("pyproject.toml")


def group(name: str) -> list[str]:
    """Return a dependency group of pyproject.toml."""
    return list(nox.project.dependency_groups(PYPROJECT, name))


def install(session: nox.Session, row: matrix.Row, *requirements: str) -> None:
    """Install a row's torch, ``requirements``, and the package built from this tree."""
    environment = Path(session.virtualenv.location)
    room.make(environment.parent, environment.name)
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    session.install(
        *(f"--find-links={link}" for link in links),
        f"--constraint={row.constraints}",
        "--reinstall-package=torchdistx-compat",
        "--refresh-package=torchdistx-compat",
        ".",
        f"torch=={row.torch}",
        *requirements,
    )


VERSIONS = "import platform, torch; print(torch.__version__, platform.python_version())"


def run_tests(session: nox.Session, name: str) -> None:
    """Run pytest; save a run of all the tests as a result, except in CI, which commits nothing.

    There is a process per core, each with one thread; one that crashes costs only its test.
    """
    report = Path(session.create_tmp(), "report.xml")
    tree = results.tree_hash()
    options = (f"--junitxml={report}", "--timeout=600", "-n=auto", "--dist=worksteal")
    try:
        session.run("pytest", *options, *session.posargs, env={"OMP_NUM_THREADS": "1"})
    finally:
        if report.exists() and not (session.posargs or IN_CI):
            torch, python = str(session.run("python", "-c", VERSIONS, silent=True)).split()[-2:]
            results.write(name, results.from_junit(report, tree, torch, python))
            generated.generate()
        if IN_CI:  # nothing uses the environment twice there: give its disk back
            shutil.rmtree(session.virtualenv.location, ignore_errors=True)


def python_for(row: matrix.Row, wanted: str) -> str:
    """Return the Python to use: the running one where the row's own is missing and it will do."""
    if wanted == row.python != RUNNING and row.covers(RUNNING) and not get_interpreter(wanted):
        return RUNNING
    return wanted


def each(
    kind: str, sessions: Iterable[tuple[str, matrix.Row, str]], default: Iterable[str] = ()
) -> Callable[[Callable[[nox.Session, matrix.Row, str], None]], None]:
    """Register a session per (name, row, Python); the function's docstring describes them all."""

    def register(function: Callable[[nox.Session, matrix.Row, str], None]) -> None:
        for name, row, wanted in sessions:
            python = python_for(row, wanted)

            def session(session: nox.Session, row: matrix.Row = row, name: str = name) -> None:
                function(session, row, name)

            session.__doc__ = (function.__doc__ or "").format(torch=row.torch, python=python)
            nox.session(
                name=f"{kind}-{name}",
                python=[f"python{python}"],
                default=name in default,
            )(session)

    return register


def rows(minors: Iterable[str]) -> list[tuple[str, matrix.Row, str]]:
    """Return the sessions of these minors on the Python each is tested with."""
    return [(minor, MATRIX.rows[minor], MATRIX.rows[minor].python) for minor in minors]


@each(
    "tests",
    [(name, row, python) for row in MATRIX.rows.values() for name, python in row.sessions.items()],
    default=MATRIX.default,
)
def tests(session: nox.Session, row: matrix.Row, name: str) -> None:
    """Run the tests with torch {torch} on Python {python}."""
    install(session, row, *group("tests"))
    run_tests(session, name)


@each("fuzz", rows(MATRIX.fuzz))
def fuzz_one(session: nox.Session, row: matrix.Row, name: str) -> None:
    """Compare 10,000 random programs, run eagerly and deferred, with torch {torch}."""
    install(session, row, *group("tests"))
    session.run("python", "-m", "tests.fuzz", *(session.posargs or ("--programs", "10000")))


@each("bench", rows(MATRIX.bench))
def bench_one(session: nox.Session, row: matrix.Row, name: str) -> None:
    """Measure time and memory with torch {torch}."""
    install(session, row, *group("tests"))
    for script in sorted({*Path("benchmarks").glob("*.py")} - {Path("benchmarks/demo.py")}):
        session.run("python", str(script), *session.posargs)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Defer a Llama of 65 billion parameters and materialise a block of it."""
    install(session, MATRIX.rows[MATRIX.demo], "numpy")  # without it torch warns
    session.run("python", "benchmarks/demo.py", *session.posargs)


@nox.session(default=False)
@nox.parametrize("transformers", ["4", "5"], ids=["v4", "v5"])
def trainer(session: nox.Session, transformers: str) -> None:
    """Run the tests of a client, the Hugging Face Trainer."""
    row = MATRIX.rows[MATRIX.trainer[transformers]]
    install(session, row, *group("tests"), *group(f"trainer-{transformers}"))
    session.run("pytest", "tests/test_trainer_client.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, that private torch names stay inside the seams, and what Python 3.7 lacks."""
    session.install(*group("lint"))
    packages = ("torchcompat", "torchdistx", "tests")
    session.run("vermin", "--target=3.7-", "--no-tips", "--violations", *packages)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, MATRIX.rows[MATRIX.types], *group("types"))
    session.run("mypy")


@nox.session(python=False, default=False)
def fuzz(session: nox.Session) -> None:
    """Run the long fuzz session on each release it is meant for."""
    for minor in MATRIX.fuzz:
        session.notify(f"fuzz-{minor}")


@nox.session(python=False, default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks on each release they are meant for."""
    for minor in MATRIX.bench:
        session.notify(f"bench-{minor}")


@nox.session(name="all-minors", python=False, default=False)
def all_minors(session: nox.Session) -> None:
    """Test every torch minor, one after another, within the disk there is."""
    for minor in MATRIX.rows:
        session.notify(f"tests-{minor}")


@nox.session(name="all-pythons", python=False, default=False)
def all_pythons(session: nox.Session) -> None:
    """Test every torch minor on the oldest and the newest Python it has wheels for."""
    for row in MATRIX.rows.values():
        for name in row.sessions:
            session.notify(f"tests-{name}")


@nox.session(name="github-matrix", python=False, default=False)
def github_matrix(session: nox.Session) -> None:
    """Print the job matrix of the GitHub workflow."""
    print(generated.github(MATRIX))
