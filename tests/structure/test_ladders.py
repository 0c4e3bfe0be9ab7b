"""Releases compare as numbers, and every ladder is what ``_gate`` and a reader take it to be."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

import torchcompat
from torchcompat import _gate

PACKAGE = Path(torchcompat.__file__).parent
SEAMS = [seam.rpartition(".")[2] for seam in _gate.SEAMS]
LADDER = (((1, 13), "since_1_13"), ((2, 4), "since_2_4"), ((2, 12), "since_2_12"))


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.1.0", (2, 1)),
        ("2.1.0+cpu", (2, 1)),
        ("2.10.0", (2, 10)),
        ("1.13.1+cu117", (1, 13)),
        ("2.16.0.dev20261101+cu130", (2, 16)),
        ("2.2.0a0+git6c8c5ad", (2, 2)),
        ("2.15.0rc2", (2, 15)),
        ("2.0.0.post200", (2, 0)),
        ("3", (3, 0)),
    ],
)
def test_release(version, release):
    assert _gate.release(version) == release


def test_release_of_no_version():
    with pytest.raises(ImportError, match="parrot"):
        _gate.release("parrot")


def test_running_is_the_installed_torch():
    assert _gate.spell(_gate.running()) == ".".join(torch.__version__.split(".")[:2])


@pytest.mark.parametrize(
    ("running", "rung"),
    [
        ((1, 13), "since_1_13"),
        ((2, 3), "since_1_13"),
        ((2, 4), "since_2_4"),
        ((2, 10), "since_2_4"),
        ((2, 12), "since_2_12"),
        ((9, 0), "since_2_12"),
    ],
)
def test_choose(running, rung):
    assert _gate.choose(LADDER, running) == rung


def test_choose_below_the_ladder():
    with pytest.raises(ImportError, match=r"1\.12.*1\.13"):
        _gate.choose(LADDER, (1, 12))


def test_report_names_a_rung_and_a_reason_per_seam():
    assert [rung.seam for rung in _gate.report()] == list(_gate.SEAMS)
    assert all(rung.module.startswith("since_") and rung.reason for rung in _gate.report())


def faults(seam: Path) -> list[str]:
    """Return what is wrong with the ladder in the folder ``seam``."""
    ladder = _ladder(seam / "__init__.py")
    offered = set(re.findall(r"\b_?rung\.(\w+)", (seam / "__init__.py").read_text()))
    found = []
    if [since for since, _ in ladder] != sorted({since for since, _ in ladder}):
        found.append("not in the order of releases")
    if ladder[0][0] != _gate.FLOOR:
        found.append("does not begin at the floor")
    if {name for _, name in ladder} != {path.stem for path in seam.glob("since_*.py")}:
        found.append("the ladder and the files differ")
    if not offered:
        found.append("offers nothing")
    signatures: dict[str, list[str]] = {}
    for since, name in ladder:
        if name != f"since_{since[0]}_{since[1]}":
            found.append(f"{name} is not named after its release")
        path = seam / f"{name}.py"
        if path.exists():
            found += _faults_of_rung(path, offered, signatures, since > _gate.FLOOR)
    return found


def _ladder(path: Path) -> tuple[tuple[tuple[int, int], str], ...]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "LADDER":
            return ast.literal_eval(node.value)
    raise AssertionError(f"no LADDER in {path}")


def _faults_of_rung(path, offered, signatures, above_floor) -> list[str]:
    tree = ast.parse(path.read_text())
    doc = ast.get_docstring(tree) or ""
    found = []
    if not doc.partition("\n")[0].strip():
        found.append(f"{path.stem} gives no reason")
    if above_floor and not re.search(r"\w+#\d+", doc):
        found.append(f"{path.stem} names no upstream change")
    bound = set()
    for node in tree.body:
        bound |= set(_names(node))
        if isinstance(node, ast.FunctionDef) and node.name in offered:
            arguments = [argument.arg for argument in ast.walk(node.args) if _is_arg(argument)]
            if signatures.setdefault(node.name, arguments) != arguments:
                found.append(f"{path.stem}.{node.name} has another signature than below")
    missing = offered - bound
    return found + [f"{path.stem} lacks {name}" for name in sorted(missing)]


def _is_arg(node: ast.AST) -> bool:
    return isinstance(node, ast.arg)


def _names(node: ast.stmt):
    """Yield the names a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


@pytest.mark.parametrize("seam", SEAMS)
def test_ladder(seam):
    assert faults(PACKAGE / seam) == []


def test_every_ladder_is_a_seam():
    found = {path.parent.name for path in PACKAGE.glob("*/*.py") if "\nLADDER" in path.read_text()}
    assert found == set(SEAMS)


GOOD = {
    "__init__.py": 'LADDER: X = (((1, 13), "since_1_13"), ((2, 4), "since_2_4"))\nf = _rung.f\n',
    "since_1_13.py": '"""The floor."""\ndef f(a, *, b): ...\n',
    "since_2_4.py": '"""Changed by pytorch#1."""\ndef f(a, *, b): ...\n',
}


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("since_2_4.py", '"""pytorch#1."""\ndef f(a, b, c): ...\n', "another signature"),
        ("since_2_4.py", '"""Changed."""\ndef f(a, *, b): ...\n', "no upstream change"),
        ("since_2_4.py", "def f(a, *, b): ...\n", "no reason"),
        ("since_2_4.py", '"""pytorch#1."""\n', "lacks f"),
        ("since_2_5.py", '"""pytorch#1."""\n', "files differ"),
        (
            "__init__.py",
            'LADDER: X = (((2, 4), "since_2_4"),)\nf = _rung.f\n',
            "begin at the floor",
        ),
        ("__init__.py", GOOD["__init__.py"].replace("(2, 4)", "(2, 3)"), "named after"),
        ("__init__.py", GOOD["__init__.py"].replace("(1, 13)", "(2, 13)"), "order"),
        ("__init__.py", GOOD["__init__.py"].replace("f = _rung.f", ""), "offers nothing"),
    ],
)
def test_the_ladder_test_can_fail(tmp_path, name, text, fault):
    for path, good in GOOD.items():
        (tmp_path / path).write_text(good)
    assert faults(tmp_path) == []
    (tmp_path / name).write_text(text)
    assert any(fault in found for found in faults(tmp_path))
