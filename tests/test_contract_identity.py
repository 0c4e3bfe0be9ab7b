"""C3: ties stay ties, views share storage with their base, asking twice gives one object."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from tests.equality import assert_equal, both, in_threads, materialize, storage_pointer, verify
from tests.zoo import habits, language
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import is_fake


def test_asking_twice_gives_the_same_object():
    tensor = deferred_init(torch.randn, 5)
    real = materialize_tensor(tensor)
    assert materialize_tensor(tensor) is real
    assert materialize_tensor(real) is real
    assert not is_fake(real)
    assert not is_deferred(real)


def test_real_tensors_come_back_as_they_are():
    real = torch.randn(3)
    assert materialize_tensor(real) is real
    layer = nn.Linear(3, 2)
    before = dict(layer.named_parameters())
    values = {name: p.detach().clone() for name, p in before.items()}
    assert not is_deferred(layer)
    materialize_module(layer)
    materialize_module(layer, check_fn=lambda module: True)
    assert all(getattr(layer, name) is p for name, p in before.items())
    assert_equal(values, {name: p.detach() for name, p in layer.named_parameters()})


def test_materialising_a_module_twice_keeps_its_objects():
    layer = deferred_init(nn.Linear, 4, 3)
    materialize_module(layer)
    weight, bias = layer.weight, layer.bias
    materialize_module(layer)
    assert layer.weight is weight
    assert layer.bias is bias


def test_tie_across_separate_calls():
    for first, second in (("embed", "head"), ("head", "embed")):
        pair = both(habits.tied_embedding_and_head)
        materialize_module(getattr(pair.deferred, first))
        materialize_module(getattr(pair.deferred, second))
        assert pair.deferred.embed.weight is pair.deferred.head.weight
        materialize(pair.deferred)
        assert_equal(*pair)


def test_tie_made_after_deferral():
    pair = both(lambda: habits.Bag(embed=nn.Embedding(7, 4), head=nn.Linear(4, 7)))
    for model in pair:
        model.head.weight = model.embed.weight
    materialize(pair.deferred)
    assert_equal(*pair)


def test_tie_to_a_tensor_materialised_before():
    layer = deferred_init(nn.Linear, 4, 4)
    real = materialize_tensor(layer.weight)
    layer.register_parameter("again", layer.weight)
    materialize_module(layer)
    assert layer.weight is layer.again is real


def test_tensor_asked_for_before_its_module():
    pair = both(nn.Linear, 4, 3)
    real = materialize_tensor(pair.deferred.weight)
    materialize(pair.deferred)
    assert pair.deferred.weight is real
    assert_equal(*pair)


def test_views_share_storage_in_either_order():
    def build():
        base = torch.randn(4, 4)
        return base, base[1:3], base.t()

    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        tensors = deferred_init(build)
        real = [None, None, None]
        for index in order:
            real[index] = materialize_tensor(tensors[index])
        assert len({storage_pointer(t) for t in real}) == 1
        real[1].fill_(42)
        assert (real[0][1:3] == 42).all()
        assert (real[2][:, 1:3] == 42).all()


def test_view_of_a_dropped_base():
    def build():
        base = torch.randn(6, 4)
        return nn.Parameter(base[2:4]), base[3:]

    verify(build)


def test_write_to_a_real_base_shows_in_its_deferred_view():
    base, view = deferred_init(lambda: (lambda b: (b, b[1:]))(torch.zeros(4)))
    real = materialize_tensor(base)
    with torch.no_grad():
        real.fill_(3)
    assert_equal(torch.full((3,), 3.0), materialize_tensor(view).clone())


def test_different_tensors_never_share():
    model = deferred_init(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(4)))
    materialize_module(model)
    weights = [layer.weight for layer in model]
    assert len({storage_pointer(w) for w in weights}) == 4
    assert all(not torch.equal(a, b) for a, b in zip(weights, weights[1:]))


def test_threads_get_one_object():
    for _ in range(20):
        tensor = deferred_init(torch.randn, 64)
        results = in_threads([lambda: materialize_tensor(tensor)] * 4)
        assert all(result is results[0] for result in results)


def test_threads_materialise_one_module():
    for seed in range(5):
        pair = both(language.GPT, seed=seed)
        in_threads([lambda pair=pair: materialize_module(pair.deferred)] * 4)
        assert_equal(*pair)


def test_threads_ask_for_base_and_views():
    def build():
        base = torch.randn(8, 8)
        return [base, base[0], base.t(), base[2:4]]

    for seed in range(10):
        pair = both(build, seed=seed)
        real = in_threads([lambda t=t: materialize_tensor(t) for t in pair.deferred])
        assert_equal(pair.eager, real)


def test_overlapping_calls():
    model = both(language.Llama)
    for module in [model.deferred.layers, *model.deferred.modules(), model.deferred]:
        materialize(module)
    assert_equal(*model)


@pytest.mark.since((2, 3), "swap_tensors")
def test_the_deferred_object_itself_becomes_real():
    layer = deferred_init(nn.Linear, 4, 3)
    weight, bias = layer.weight, layer.bias
    names = {weight: "weight", bias: "bias"}
    materialize_module(layer)
    assert layer.weight is weight
    assert type(weight) is nn.Parameter
    assert names[layer.weight] == "weight"
    assert names[layer.bias] == "bias"
    tensor = deferred_init(torch.zeros, 3)
    assert materialize_tensor(tensor) is tensor


@pytest.mark.since((2, 3), "swap_tensors")
def test_where_the_swap_is_refused_the_module_still_gets_one_real_object():
    layer = deferred_init(nn.Linear, 4, 3)
    view, watch = layer.weight[0], weakref.ref(layer.bias)
    layer.register_parameter("again", layer.weight)
    materialize_module(layer)
    for entry in (layer.weight, layer.bias):
        assert type(entry) is nn.Parameter
    assert layer.again is layer.weight
    assert materialize_tensor(view).untyped_storage().data_ptr() == storage_pointer(layer.weight)
    assert watch() is None or materialize_tensor(watch()) is layer.bias


def test_dropping_a_deferred_model_frees_it():
    model = deferred_init(language.GPT)
    parameter, module = weakref.ref(model.wte.weight), weakref.ref(model)
    kept = model.ln_f.weight
    del model
    gc.collect()
    assert module() is None
    assert parameter() is None
    materialize_tensor(kept)


def test_check_fn_and_recursion():
    def build():
        return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    pair = both(build)
    asked = []

    def only_leaves(module):
        asked.append(module)
        return not isinstance(module, nn.Sequential) and module is not pair.deferred[0]

    materialize_module(pair.deferred, check_fn=only_leaves)
    assert set(asked) == set(pair.deferred.modules())
    assert is_deferred(pair.deferred[0])
    assert not is_deferred(pair.deferred[1])
    assert_equal(pair.eager[1], pair.deferred[1])
    materialize_module(pair.deferred, recurse=False)
    assert is_deferred(pair.deferred[0])
    materialize_module(pair.deferred[0], recurse=False)
    assert_equal(*pair)


def test_buffers_only():
    pair = both(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    materialize_module(pair.deferred, buffers_only=True)
    assert all(is_deferred(p) for p in pair.deferred.parameters())
    assert not any(is_deferred(b) for b in pair.deferred.buffers())
    assert_equal(list(pair.eager.buffers()), list(pair.deferred.buffers()))
    materialize(pair.deferred)
    assert_equal(*pair)


def test_check_fn_false_on_a_parent_still_reaches_its_children():
    pair = both(language.Llama)
    materialize_module(pair.deferred, check_fn=lambda module: module is not pair.deferred.layers[0])
    assert not is_deferred(pair.deferred.layers[0].self_attn)
    materialize(pair.deferred)
    assert_equal(*pair)
