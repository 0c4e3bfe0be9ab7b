"""A modest number of random programs; the long session is `python -m tests.fuzz`."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import programs


@pytest.fixture(autouse=True, scope="module")
def _strict():
    with programs.every_warning_an_error():
        yield


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False))
def test_programs_come_out_as_eager(rnd):
    program = programs.write(rnd, size=10)
    reason = programs.fails(program)
    assert not reason, f"{reason}\n{program}"


@pytest.mark.parametrize("series", range(4))
def test_longer_programs_come_out_as_eager(series):
    for number in range(40):
        program = programs.write(random.Random(f"test {series} {number}"), size=24)
        reason = programs.fails(program)
        assert not reason, f"{reason}\n{programs.shrink(program)}"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda construct: [
            v * 1.5 if isinstance(v, programs.torch.Tensor) else v for v in construct()
        ],
        lambda construct: (construct(), programs.torch.rand(1))[0],
    ],
    ids=["values", "generator"],
)
def test_a_wrong_implementation_is_found_and_cut_down(monkeypatch, wrong):
    monkeypatch.setattr(programs, "deferred_init", wrong)
    monkeypatch.setattr(programs, "materialize_tensor", lambda tensor: tensor)
    monkeypatch.setattr(programs, "materialize_module", lambda module: None)
    found = [programs.write(random.Random(f"wrong {n}")) for n in range(60)]
    found = [program for program in found if programs.fails(program)]
    assert len(found) >= 10
    small = programs.shrink(found[0])
    assert programs.fails(small)
    assert len(small.inside) + len(small.after) <= 2


def test_programs_use_the_whole_grammar():
    text = "\n".join(str(programs.write(random.Random(f"use {n}"), size=30)) for n in range(150))
    for used in (
        "nn.Linear",
        ".data = ",
        "deepcopy",
        ".item()",
        "manual_seed",
        "no_grad",
        ".set_(",
        "except",
    ):
        assert used in text, used
