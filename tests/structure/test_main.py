"""``python -m torchcompat``."""

from __future__ import annotations

import importlib.machinery
import importlib.util

import pytest
import torch

from torchcompat import __main__ as main
from torchcompat import _gate


def test_it_says_what_serves_this_torch(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["torchcompat"])
    main.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"torch {torch.__version__}: a tested release"
    for rung in _gate.report():
        assert f"{rung.seam}.{rung.module}: {rung.reason}" in lines
    assert lines[-1] == "torchdistx: the alias of this package"


def test_it_says_that_a_newer_torch_is_not_tested(monkeypatch):
    monkeypatch.setattr(_gate, "NEWEST_TESTED", (1, 12))
    assert "not tested: the newest tested release is 1.12" in main.describe()


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "not on the path"),
        (
            importlib.machinery.ModuleSpec("torchdistx", None, origin="/x.py"),
            "another package, /x.py",
        ),
    ],
)
def test_it_says_whose_torchdistx_it_is(monkeypatch, found, text):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert main.alias() == text


def test_constraints():
    assert main.constraints("2.10").splitlines()[1:] == ["torch==2.10.0"]
    with pytest.raises(LookupError, match=r"torch 2\.99; there are for 1\.13, 2\.0.*2\.9, 2\.10"):
        main.constraints("2.99")


def test_an_unknown_minor_is_a_usage_error(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["torchcompat", "constraints", "2.99"])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert "no tested pins" in capsys.readouterr().err
