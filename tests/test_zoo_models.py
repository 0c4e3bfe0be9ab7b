"""Whole models equal eager construction, materialised in every order, and compute the same."""

from __future__ import annotations

import os

import pytest
import torch

from tests.equality import (
    ORDERS,
    RELEASE,
    assert_all_deferred,
    assert_equal,
    both,
    in_a_fork,
    materialize,
    verify,
)
from tests.zoo import audio, habits, language, vision
from torchcompat.deferred_init import deferred_init

MODELS = [
    pytest.param(
        model, id=model.name, marks=[pytest.mark.filterwarnings(w) for w in model.warnings]
    )
    for model in language.MODELS + vision.MODELS + audio.MODELS + habits.MODELS
    if model.since <= RELEASE
]
CALLABLE = [parameters for parameters in MODELS if parameters.values[0].inputs]
STILL = [parameters for parameters in MODELS if not parameters.values[0].reads]


@pytest.fixture
def one_thread():
    """A forked process has one, and kernels that reduce may round otherwise with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model", MODELS)
def test_equals_eager(model, order):
    verify(model.build, order=order, seed=11)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("model", MODELS)
def test_a_forked_process_materialises_it(model, one_thread):
    pair = both(model.build)
    assert in_a_fork(pair) == 0
    assert_equal(pair.eager, materialize(pair.deferred))


@pytest.mark.parametrize("model", STILL)
def test_nothing_is_computed_while_recording(model):
    assert_all_deferred(deferred_init(model.build))


@pytest.mark.parametrize("model", CALLABLE)
def test_computes_the_same_and_takes_the_same_step(model):
    pair = both(model.build)
    materialize(pair.deferred)
    outputs = []
    for module in pair:
        torch.manual_seed(5)
        output = module(*model.inputs())
        if any(p.requires_grad for p in module.parameters()):
            output.float().pow(2).mean().backward()
            torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.5).step()
        outputs.append(output)
    assert torch.equal(*outputs)
    assert_equal(*pair)


def test_builds_one_after_another_share_one_stream():
    """Two models from one seed: the second sees the generator where the first one left it."""
    torch.manual_seed(7)
    eager = [language.GPT(), vision.ResNet(), torch.rand(3)]
    torch.manual_seed(7)
    first, second = deferred_init(language.GPT), deferred_init(vision.ResNet)
    rest = torch.rand(3)
    materialize(second)
    materialize(first)
    assert_equal(eager, [first, second, rest])
