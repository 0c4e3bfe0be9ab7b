"""Every class of torch.nn, deferred and materialised in every order, equals its eager self."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from tests.equality import assert_all_deferred, assert_equal, both, materialize, verify_orders
from tests.zoo.nn_classes import ABSTRACT, CASES, LAZY_INPUTS
from torchcompat.deferred_init import deferred_init, materialize_module

# Constructors that build from real tensors, warn about themselves, or ask for hardware.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*NLLLoss2d.*"),
    pytest.mark.filterwarnings("ignore:.*nn.Container.*"),
    pytest.mark.filterwarnings("ignore:Lazy modules are a new feature.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*enable_nested_tensor.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:The module .* is deprecated"),
]

RUNNING = {
    name: cls
    for name, cls in vars(nn).items()
    if isinstance(cls, type) and issubclass(cls, nn.Module) and name not in ABSTRACT
}
BUILDS = [
    pytest.param(cls, build, id=f"{name}-{number}")
    for name, cls in sorted(RUNNING.items())
    for number, build in enumerate(CASES.get(name, ()))
]
LAZY = [name for name in sorted(LAZY_INPUTS) if name in RUNNING]


def test_table_is_complete():
    assert sorted(set(RUNNING) - set(CASES)) == []
    assert sorted(n for n in RUNNING if n.startswith("Lazy")) == LAZY


@pytest.mark.parametrize(("cls", "build"), BUILDS)
def test_equals_eager_in_every_order(cls, build):
    verify_orders(build, cls)


@pytest.mark.parametrize(("cls", "build"), BUILDS)
def test_nothing_is_computed_while_recording(cls, build):
    module = deferred_init(build, cls)
    if isinstance(module, nn.Module):
        assert_all_deferred(module)


@pytest.mark.parametrize("name", LAZY)
def test_lazy_module_is_completed_by_a_forward_inside_the_constructor(name):
    def build():
        module = CASES[name][0](RUNNING[name])
        module(torch.ones(LAZY_INPUTS[name]))
        return module

    verify_orders(build)


@pytest.mark.parametrize("name", LAZY)
def test_lazy_module_stays_lazy_until_its_first_forward(name):
    pair = both(CASES[name][0], RUNNING[name])
    materialize(pair.deferred)
    assert_equal(pair.eager, pair.deferred)
    lazies = [p for p in pair.deferred.parameters() if isinstance(p, UninitializedTensorMixin)]
    for module in pair:
        torch.manual_seed(3)
        module(torch.ones(LAZY_INPUTS[name]))
    assert_equal(pair.eager, pair.deferred)
    assert not any(isinstance(p, UninitializedTensorMixin) for p in pair.deferred.parameters())
    assert lazies or "InstanceNorm" in name


@pytest.mark.parametrize("name", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("number", range(4))
def test_flat_weights_are_the_parameters(name, number):
    pair = both(CASES[name][number], RUNNING[name])
    materialize(pair.deferred)
    module = pair.deferred
    assert all(w is p for w, p in zip(module._flat_weights, module.parameters()))
    inputs = torch.linspace(0, 1, 24, dtype=module.weight_ih_l0.dtype).reshape(2, 3, 4)
    assert torch.equal(module.eval()(inputs)[0], pair.eager.eval()(inputs)[0])


@pytest.mark.parametrize("name", ["Linear", "LSTM", "Transformer", "BatchNorm2d", "Embedding"])
def test_deepcopy_before_and_after_materialising(name):
    for build in CASES[name]:
        pair = both(build, RUNNING[name])
        early = copy.deepcopy(pair.deferred)
        materialize_module(pair.deferred)
        materialize_module(early)
        assert_equal(pair.eager, early)
        assert_equal(pair.eager, copy.deepcopy(pair.deferred))
        originals = {id(p) for p in pair.deferred.parameters()}
        assert originals.isdisjoint(id(p) for p in early.parameters())
