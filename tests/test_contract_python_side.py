"""C4: classes, attributes and hooks on tensors survive, set inside the constructor or after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.equality import RELEASE, assert_equal, both, materialize, verify, verify_orders
from torchcompat.deferred_init import deferred_init, materialize_module, materialize_tensor


class Scaled(nn.Parameter):
    """A Parameter subclass with its own `__new__` and state, as sharding libraries write them."""

    def __new__(cls, data=None, requires_grad=True, scale=1.0):
        if data is None:
            data = torch.zeros(0)
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.scale = scale
        return self

    def scaled(self):
        return self * self.scale


class Marked(nn.Parameter):
    """A Parameter subclass that only adds behaviour."""

    @property
    def is_marked(self):
        return True


class Named(torch.Tensor):
    """A plain Tensor subclass."""


class Tagged(Marked):
    """A subclass of a subclass, whose `__new__` calls its parent's."""

    def __new__(cls, data, tag="none"):
        self = super().__new__(cls, data)
        self.tag = tag
        return self


def test_parameter_subclass_with_new():
    def build():
        layer = nn.Linear(3, 2)
        layer.weight = Scaled(torch.randn(2, 3), scale=0.5)
        layer.bias = Scaled(layer.bias.data * 2, requires_grad=False)
        return layer

    verify_orders(build)
    layer = deferred_init(build)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, Scaled)
    materialize_module(layer)
    assert type(layer.weight) is Scaled
    assert layer.weight.scale == 0.5
    assert torch.equal(layer.weight.scaled(), layer.weight * 0.5)


def test_parameter_subclasses_of_several_kinds():
    def build():
        return nn.ParameterList(
            [Marked(torch.randn(3)), Tagged(torch.ones(2), tag="x"), nn.Parameter(torch.rand(2))]
        )

    verify_orders(build)
    model = deferred_init(build)
    materialize_module(model)
    assert model[0].is_marked
    assert model[1].is_marked
    assert model[1].tag == "x"
    assert not isinstance(model[2], Marked)


def test_an_ordinary_parameter_is_no_subclass_of_it():
    layer = deferred_init(nn.Linear, 3, 2)
    assert isinstance(layer.weight, nn.Parameter)
    assert isinstance(layer.weight, torch.Tensor)
    if RELEASE >= (2, 5):  # before, any object with _is_param was an instance of every subclass
        assert not isinstance(layer.weight, Scaled)
    assert not isinstance(deferred_init(torch.zeros, 2), nn.Parameter)


def test_parameter_of_a_parameter_and_of_a_subclass():
    verify(lambda: nn.Parameter(nn.Parameter(torch.randn(3)), requires_grad=False))
    verify(lambda: nn.Parameter(Scaled(torch.randn(3), scale=2.0).data))


def test_tensor_subclass_by_as_subclass():
    pair = verify(lambda: {"named": torch.randn(3).as_subclass(Named), "plain": torch.randn(3)})
    assert type(pair.deferred["named"]) is Named


def test_uninitialized_and_lazy_parameters():
    def build():
        parameter = nn.UninitializedParameter()
        parameter.note = "kept"
        buffer = nn.UninitializedBuffer()
        done = nn.UninitializedParameter()
        done.materialize((2, 3))
        with torch.no_grad():
            nn.init.normal_(done)
        return [parameter, buffer, done]

    pair = verify(build)
    assert type(pair.deferred[2]) is nn.Parameter


@pytest.mark.since((2, 5), "nn.Buffer")
def test_buffers_as_a_class():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = nn.Buffer(torch.randn(3))
            self.dropped = nn.Buffer(torch.ones(2), persistent=False)
            self.kept.note = 1

    pair = both(Model)
    assert isinstance(pair.deferred.kept, nn.Buffer)
    assert not isinstance(pair.deferred.kept, nn.Parameter)
    assert list(pair.deferred.state_dict()) == ["kept"]
    materialize(pair.deferred)
    assert_equal(*pair)
    verify_orders(Model)


def test_attributes_set_inside_and_after():
    def build():
        layer = nn.Linear(3, 2)
        layer.weight.partition_dim = 1
        layer.bias.table = {"a": [1, 2]}
        layer.weight.other = layer.bias
        return layer

    pair = both(build)
    for layer in pair:
        layer.weight.lr_mult = 0.5
        del layer.weight.partition_dim
        layer.bias.companion = torch.ones(2)
    materialize(pair.deferred)
    assert_equal(*pair)
    assert pair.deferred.weight.other is pair.deferred.bias
    assert pair.deferred.bias.table == {"a": [1, 2]}


def test_attributes_that_hold_deferred_tensors():
    def build():
        layer = nn.Linear(3, 2)
        layer.weight.main_grad = torch.zeros_like(layer.weight)
        layer.weight.shards = [torch.randn(2)]
        return layer

    pair = both(build)
    materialize(pair.deferred)
    assert_equal(*pair)


def test_attribute_before_registration_and_another_name_after():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            weight = nn.Parameter(torch.randn(2, 2))
            weight.is_expert = True
            self.weight = weight
            self._parameters["kernel"] = self._parameters.pop("weight")

    pair = verify(Model)
    assert pair.deferred.kernel.is_expert


@pytest.mark.parametrize("late", [False, True], ids=["inside", "after"])
def test_gradient_hooks(late):
    calls = []

    def hook(grad):
        calls.append(grad.shape)
        return grad * 10

    def build():
        layer = nn.Linear(3, 2)
        if not late:
            layer.handle = layer.weight.register_hook(hook)
        return layer

    pair = both(build)
    if late:
        for layer in pair:
            layer.handle = layer.weight.register_hook(hook)
    materialize(pair.deferred)
    assert_equal(*pair)
    for layer in pair:
        layer(torch.ones(2, 3)).sum().backward()
    assert_equal(*pair)
    assert calls == [(2, 3), (2, 3)]
    for layer in pair:
        layer.handle.remove()
        layer.zero_grad()
        layer(torch.ones(2, 3)).sum().backward()
    assert len(calls) == 2
    assert_equal(*pair)


@pytest.mark.since((2, 1), "register_post_accumulate_grad_hook")
@pytest.mark.parametrize("late", [False, True], ids=["inside", "after"])
def test_post_accumulate_hooks(late):
    calls = []

    def hook(parameter):
        calls.append(parameter)
        parameter.data.add_(parameter.grad)
        parameter.grad = None

    def build():
        layer = nn.Linear(3, 2)
        if not late:
            layer.handle = layer.weight.register_post_accumulate_grad_hook(hook)
        return layer

    pair = both(build)
    if late:
        for layer in pair:
            layer.handle = layer.weight.register_post_accumulate_grad_hook(hook)
    materialize(pair.deferred)
    for layer in pair:
        layer(torch.ones(2, 3)).sum().backward()
    assert_equal(*pair)
    assert [p is layer.weight for p, layer in zip(calls, pair)] == [True, True]
    pair.deferred.handle.remove()
    pair.deferred(torch.ones(2, 3)).sum().backward()
    assert len(calls) == 2


def test_module_hooks_and_a_module_that_counts():
    class Counting(nn.Module):
        made = 0

        def __init__(self):
            super().__init__()
            type(self).made += 1
            self.weight = nn.Parameter(torch.randn(2))
            self.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
            self._register_load_state_dict_pre_hook(lambda *args: None)

        def forward(self, x):
            return x * self.weight

    pair = verify(Counting)
    assert Counting.made == 2
    assert torch.equal(pair.eager(torch.ones(2)), pair.deferred(torch.ones(2)))


def test_gradients_given_before_materialising():
    pair = both(nn.Linear, 3, 2)
    for layer in pair:
        layer.weight.grad = torch.full((2, 3), 0.5)
    materialize(pair.deferred)
    assert_equal(*pair)


@pytest.mark.since((2, 3), "swap_tensors")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizer_built_before_materialising_is_live(optimizer):
    pair = both(lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    optimizers = [optimizer(model.parameters(), lr=0.1) for model in pair]
    names = {parameter: name for name, parameter in pair.deferred.named_parameters()}
    materialize(pair.deferred)
    assert [names[p] for p in pair.deferred.parameters()] == list(names.values())
    for model, step in zip(pair, optimizers):
        for _ in range(2):
            step.zero_grad()
            model(torch.ones(5, 4)).pow(2).sum().backward()
            step.step()
    assert_equal(*pair)
    assert not torch.equal(pair.eager[0].weight, both(nn.Linear, 4, 3).eager.weight)


def test_optimizer_built_after_materialising():
    pair = both(nn.Linear, 4, 3)
    materialize(pair.deferred)
    for model in pair:
        step = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(5, 4)).pow(2).sum().backward()
        step.step()
    assert_equal(*pair)


def test_a_materialised_tensor_is_an_ordinary_tensor(tmp_path):
    layer = deferred_init(nn.Linear, 4, 3)
    materialize_module(layer)
    assert type(layer.weight) is nn.Parameter
    assert vars(layer.weight) == {}
    tensor = materialize_tensor(deferred_init(torch.randn, 3))
    assert type(tensor) is torch.Tensor
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    assert_equal(
        dict(layer.state_dict()), dict(torch.load(tmp_path / "state.pt", weights_only=True))
    )
    assert tensor.numpy().shape == (3,)
    assert tensor.data_ptr()
    tensor.share_memory_()
