"""Private names of torch stay inside the seams: ruff refuses them; this finds what it misses."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchcompat
from torchcompat import _gate

PACKAGE = Path(torchcompat.__file__).parent
SEAMS = [PACKAGE / seam.rpartition(".")[2] for seam in _gate.SEAMS]


def private_names(source: str) -> set[str]:
    """Return the dotted names under ``torch`` in ``source`` that have a private part."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(_dotted(node))
    return {name for name in names if name.split(".")[0] == "torch" and _is_private(name)}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _is_private(name: str) -> bool:
    if name.startswith("torch.ops."):  # an operator's schema is public whatever its name
        return False
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def test_none_outside_the_seams():
    found = {
        str(path): names
        for path in [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "torchdistx").rglob("*.py")]
        if path.parent not in SEAMS
        for names in [private_names(path.read_text())]
        if names
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch import _C",
        "from torch.utils._pytree import tree_map",
        "import torch\ndef f(x):\n    return torch.Tensor._make_subclass(x)",
        "import torch\nx = torch._C._get_tracing_state()",
    ],
)
def test_they_are_noticed(source):
    assert private_names(source)
    assert "TID251" in _ruff(source)


def test_public_names_are_not():
    source = "from torch import nn\nimport torch\nx = torch.Tensor.__add__, nn.Linear\n"
    assert private_names(source) == set()
    assert "TID251" not in _ruff(source)


def test_ruff_knows_each_one_that_the_seams_use():
    used = set().union(
        *(private_names(path.read_text()) for seam in SEAMS for path in seam.glob("*.py"))
    )
    assert used, "the seams exist to use private names"
    lines = [f"from {name.rpartition('.')[0]} import {name.rpartition('.')[2]}" for name in used]
    missed = [line for line in lines if "TID251" not in _ruff(f"{line}\n")]
    assert missed == [], "add them to banned-api in pyproject.toml"


def _ruff(source: str) -> str:
    """Return what ruff says of a module of the package outside the seams."""
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed")
    root = PACKAGE.parent
    done = subprocess.run(
        [ruff, "check", "--no-cache", "--stdin-filename", str(root / "torchcompat" / "probe.py")],
        input=source,
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode in (0, 1), done.stdout
    return done.stdout
