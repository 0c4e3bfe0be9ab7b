"""Releases compare as numbers; each ladder offers, on every release, what its floor promises."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import torchcompat
from torchcompat import _gate, autograd_hooks

PACKAGE = Path(torchcompat.__file__).parent
SEAMS = [seam.rpartition(".")[2] for seam in _gate.SEAMS]
LADDER = ((1, 13), (2, 4), (2, 12))


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
    ("running", "count"),
    [((1, 13), 1), ((2, 3), 1), ((2, 4), 2), ((2, 10), 2), ((2, 12), 3), ((9, 0), 3)],
)
def test_rungs(running, count):
    assert _gate.rungs(LADDER, running) == ["since_1_13", "since_2_4", "since_2_12"][:count]


def test_report_names_a_reason_for_every_rung_in_use():
    assert {rung.seam for rung in _gate.report()} == set(_gate.SEAMS)
    assert all(rung.module.startswith("since_") and rung.reason for rung in _gate.report())


def test_the_highest_rung_that_defines_a_name_wins(tmp_path, monkeypatch):
    (tmp_path / "seam").mkdir()
    for release, text in {
        (1, 13): "def f(): return 1\ndef g(): return 1\nTABLE = {1: f, 2: g}\n_private = 1",
        (2, 4): "def f(): return 2\nTABLE = {2: None, 3: f}",
        (2, 12): "raise AssertionError('a rung above the running torch is not imported')",
    }.items():
        (tmp_path / "seam" / f"since_{release[0]}_{release[1]}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_gate, "running", lambda: (2, 10))
    offered = _gate.load("seam", LADDER)
    assert set(offered) == {"f", "g", "TABLE"}
    assert (offered["f"](), offered["g"]()) == (2, 1)
    assert {key: value and value() for key, value in offered["TABLE"].items()} == {
        1: 1,
        2: None,
        3: 2,
    }


def faults(seam: Path) -> list[str]:
    """Return what is wrong with the ladder in the folder ``seam``."""
    ladder = _ladder(seam / "__init__.py")
    found = []
    if list(ladder) != sorted(set(ladder)):
        found.append("not in the order of releases")
    if ladder[0] != _gate.FLOOR:
        found.append("does not begin at the floor")
    names = _gate.rungs(ladder, (99, 0))
    if set(names) != {path.stem for path in seam.glob("since_*.py")}:
        return [*found, "the ladder and the files differ"]
    floor = _offered(seam / f"{names[0]}.py")
    if not floor:
        found.append("offers nothing")
    for name in names:
        path = seam / f"{name}.py"
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        if not doc.partition("\n")[0].strip():
            found.append(f"{name} gives no reason")
        if name != names[0]:
            found += _faults_of_change(path, doc, floor)
    return found


def _ladder(path: Path) -> tuple[tuple[int, int], ...]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "LADDER":
            return ast.literal_eval(node.value)
    raise AssertionError(f"no LADDER in {path}")


def _faults_of_change(path: Path, doc: str, floor: dict[str, list[str]]) -> list[str]:
    """Return what is wrong with a rung above the floor: it may only change what the floor offers.

    Then every release is offered all of it, with the signatures of the floor.
    """
    found = [] if re.search(r"\w+#\d+", doc) else [f"{path.stem} names no upstream change"]
    offered = _offered(path)
    if not offered:
        found.append(f"{path.stem} changes nothing")
    for name, arguments in offered.items():
        if name not in floor:
            found.append(f"{path.stem}.{name} is not offered by the floor")
        elif floor[name] != arguments:
            found.append(f"{path.stem}.{name} has another signature than below")
    return found


def _offered(path: Path) -> dict[str, list[str]]:
    """Return the public names that a rung defines, with the arguments of its functions."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)]
        elif isinstance(node, ast.ClassDef):
            found[node.name] = []
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update({target.id: [] for target in targets if isinstance(target, ast.Name)})
    return {name: arguments for name, arguments in found.items() if name[0] != "_"}


@pytest.mark.parametrize("seam", SEAMS)
def test_ladder(seam):
    assert faults(PACKAGE / seam) == []


@pytest.mark.parametrize("seam", SEAMS)
def test_what_the_package_asks_of_a_seam_is_offered(seam):
    module = importlib.import_module(f"torchcompat.{seam}")
    sources = [path.read_text() for path in PACKAGE.rglob("*.py")]
    asked = set(re.findall(rf"\b{seam}\.(\w+)", "\n".join(sources)))
    asked = {name for name in asked if not name.startswith("since_")}
    assert asked, "somebody uses the seam"
    assert {name for name in asked if not hasattr(module, name)} == set()


def test_every_patch_takes_the_original_and_the_recorder():
    builders = [build for build in autograd_hooks.PATCHES.values() if build is not None]
    assert len(builders) >= 4
    for build in builders:
        assert list(inspect.signature(build).parameters) == ["original", "recorder"]


def test_every_ladder_is_a_seam():
    found = {path.parent.name for path in PACKAGE.glob("*/*.py") if "\nLADDER" in path.read_text()}
    assert found == set(SEAMS)


GOOD = {
    "__init__.py": "LADDER: X = ((1, 13), (2, 4))\n",
    "since_1_13.py": '"""The floor."""\ndef f(a, *, b): ...\ndef g(): ...\nT: X = {}\n',
    "since_2_4.py": '"""Changed by pytorch#1."""\ndef f(a, *, b): ...\nT = {1: 2}\n',
}


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("since_2_4.py", '"""pytorch#1."""\ndef f(a, b, c): ...\n', "another signature"),
        ("since_2_4.py", '"""Changed."""\ndef f(a, *, b): ...\n', "no upstream change"),
        ("since_2_4.py", "def f(a, *, b): ...\n", "no reason"),
        ("since_2_4.py", '"""pytorch#1."""\n', "changes nothing"),
        ("since_2_4.py", '"""pytorch#1."""\ndef h(): ...\n', "not offered by the floor"),
        ("since_2_5.py", '"""pytorch#1."""\n', "files differ"),
        ("since_1_13.py", '"""The floor."""\n', "offers nothing"),
        ("__init__.py", "LADDER: X = ((2, 4),)\n", "begin at the floor"),
        ("__init__.py", "LADDER: X = ((1, 13), (2, 3))\n", "files differ"),
        ("__init__.py", "LADDER: X = ((2, 4), (1, 13))\n", "order"),
    ],
)
def test_the_ladder_test_can_fail(tmp_path, name, text, fault):
    for path, good in GOOD.items():
        (tmp_path / path).write_text(good)
    assert faults(tmp_path) == []
    (tmp_path / name).write_text(text)
    assert any(fault in found for found in faults(tmp_path))
