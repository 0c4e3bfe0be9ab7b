"""The table of releases is consistent, what is made from it is current, names are unique."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import ROOT
from torchcompat import _gate

if sys.version_info < (3, 11):
    pytest.skip("matrix/ and the noxfile need Python 3.11", allow_module_level=True)

import matrix
from matrix import __main__ as generated
from matrix import results

MATRIX = matrix.read()
SESSIONS = [f"tests-{name}" for row in MATRIX.rows.values() for name in row.sessions]


def test_the_gate_and_the_table_agree():
    releases = [_gate.release(minor) for minor in MATRIX.rows]
    assert (releases[0], releases[-1]) == (_gate.FLOOR, _gate.NEWEST_TESTED)
    assert releases == sorted(set(releases))


@pytest.mark.parametrize("row", MATRIX.rows.values(), ids=MATRIX.rows)
def test_row(row):
    assert _gate.spell(_gate.release(row.torch)) == row.minor
    assert row.covers(row.python)
    assert all(row.covers(python) for python in row.pythons)
    assert len(set(row.sessions.values())) == len(row.sessions)
    assert any("numpy<2" in pin for pin in row.pins) == (matrix.numbers(row.minor) < (2, 3))


def test_covers_compares_numbers():
    row = MATRIX.rows["2.1"]
    assert row.covers("3.10")
    assert not row.covers("3.1")
    assert not row.covers("3.12")


def test_the_default_set_has_the_ends_and_every_rung():
    default = {_gate.release(minor) for minor in MATRIX.default}
    assert {_gate.FLOOR, _gate.NEWEST_TESTED} <= default
    every = [_gate.release(minor) for minor in MATRIX.rows]
    for seam in _gate.SEAMS:
        ladder = importlib.import_module(seam).LADDER
        served = {_gate.rungs(ladder, release)[-1] for release in every}
        assert {_gate.rungs(ladder, release)[-1] for release in default} == served, seam


def test_every_named_minor_is_a_row():
    named = {*MATRIX.default, *MATRIX.fuzz, *MATRIX.bench, MATRIX.demo, MATRIX.types}
    assert named <= set(MATRIX.rows)


def test_constraints_are_current():
    expected = {row.constraints: generated.constraints(row) for row in MATRIX.rows.values()}
    found = {path: path.read_text() for path in (ROOT / "matrix" / "constraints").iterdir()}
    assert found == expected, "run `python -m matrix`"


def test_readme_table_is_what_the_results_say():
    readme = (ROOT / "README.md").read_text()
    tree = readme.partition("Package tree `")[2].partition("`")[0]
    expected = generated.table(MATRIX, results.load(), tree)
    assert generated.insert(readme, expected) == readme, "run `python -m matrix`"


def result(tree: str, failed: int = 0) -> results.Result:
    return results.Result(tree, "2.1.2", "3.11.7", "Linux", "2026-12-01", 5, failed, 1, 2.0)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "not run"),
        (result("old"), "stale"),
        (result("new"), "5 passed, 1 skipped"),
        (result("new", failed=2), "**2 failed**, 5 passed, 1 skipped"),
    ],
)
def test_cell(found, text):
    assert generated.cell(found, "new") == text


def test_a_change_of_the_package_changes_its_hash(tmp_path):
    for package in results.PACKAGES:
        (tmp_path / package / "part").mkdir(parents=True)
        (tmp_path / package / "part" / "a.py").write_text("x = 1\n")
    before = results.tree_hash(tmp_path)
    assert results.tree_hash(tmp_path) == before
    (tmp_path / "torchdistx" / "part" / "a.py").write_text("x = 2\n")
    assert results.tree_hash(tmp_path) != before
    assert len(results.tree_hash()) == 12


def test_a_result_is_read_from_a_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2" time="3.25"'
        ' timestamp="2026-12-01T09:00:00"></testsuite></testsuites>'
    )
    found = results.from_junit(report, "abc", torch="2.1.2+cu121", python="3.11.7")
    assert (found.passed, found.failed, found.skipped, found.seconds) == (5, 2, 2, 3.2)
    assert (found.torch, found.python, found.date) == ("2.1.2+cu121", "3.11.7", "2026-12-01")
    results.write("2.1", found, tmp_path)
    assert results.load(tmp_path) == {"2.1": found}


def listed(*arguments: str) -> list[dict[str, str]]:
    pytest.importorskip("nox")
    command = (sys.executable, "-m", "nox", "--script-mode", "none", "--list", "--json")
    done = subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def sessions() -> list[dict[str, str]]:
    return listed("-k", "not nothing")


def test_there_is_a_session_per_row_and_python(sessions):
    assert [each["name"] for each in sessions if each["name"].startswith("tests-")] == SESSIONS


def test_each_name_selects_exactly_one_session(sessions):
    from nox.manifest import _normalized_session_match

    known = [SimpleNamespace(name=each["name"], signatures=[each["session"]]) for each in sessions]
    per_row = [each for each in sessions if each["name"].startswith(("tests-", "fuzz-", "bench-"))]
    for name in (each[key] for each in per_row for key in ("name", "session")):
        selected = [each.name for each in known if _normalized_session_match(name, each)]
        assert len(selected) == 1, (name, selected)


@pytest.mark.parametrize(
    "name", ["tests-2.1", "tests-2.10", "tests-2.1-python3.11", "tests-2.1-py38", "fuzz-2.1"]
)
def test_nox_runs_one_session_for(name):
    assert len(listed("-s", name)) == 1


def test_no_version_stands_in_the_noxfile():
    source = (ROOT / "noxfile.py").read_text().partition("from __future__")[2]
    assert [row.torch for row in MATRIX.rows.values() if row.torch in source] == []
    assert [minor for minor in MATRIX.rows if f'"{minor}"' in source] == []


def test_github_matrix_has_every_session():
    jobs = json.loads(generated.github(MATRIX))["include"]
    assert [job["session"] for job in jobs] == SESSIONS
    assert all(set(job) == {"session", "python"} for job in jobs)
    done = subprocess.run(
        [sys.executable, "-m", "matrix", "github"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == f"matrix={generated.github(MATRIX)}\n"
