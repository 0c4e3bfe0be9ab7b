"""C6: constructors that look at values work: what they need is computed, and only that."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from tests.equality import RELEASE, both, settle, verify, verify_values
from torchcompat.deferred_init import deferred_init, is_deferred

READS = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t[1] * 10),
    "complex": lambda t: complex(t[0]),
    "bool": lambda t: bool((t > 0.5).any()),
    "if": lambda t: 1 if t.mean() > 0 else 2,
    "tolist": lambda t: t.tolist(),
    "nested tolist": lambda t: t.reshape(2, -1).tolist(),
    "iteration": lambda t: [float(x) for x in t],
    "unpacking": lambda t: [x.item() for x in (lambda a, *b: (a, b[0]))(*t)],
    "numpy": lambda t: t.numpy().tolist(),
    "numpy of a view": lambda t: t[1:3].numpy().tolist(),
    "numpy of detached": lambda t: t.detach().cpu().numpy().sum(),
    "np.asarray": lambda t: np.asarray(t).tolist(),
    "np.array": lambda t: np.array(t, dtype=np.float64).tolist(),
    "numpy function": lambda t: float(np.sqrt(np.abs(t.numpy())).sum()),
    "list of tensors": lambda t: torch.tensor([t[0], t[1]]).tolist(),
    "math": lambda t: math.exp(t[0]),
    "range": lambda t: list(range((t > 0).sum())),
    "index": lambda t: [10, 20, 30][(t > 100).sum()],
    "format": lambda t: f"{t[0]:.3f}",
    "equal": lambda t: (torch.equal(t, t.clone()), torch.equal(t, t + 1)),
    "allclose": lambda t: torch.allclose(t, t * 1),
    "is_nonzero": lambda t: torch.is_nonzero(t[0]),
    "in": lambda t: t[2].item() in t,
    "max": lambda t: max(t).item(),
    "sorted": lambda t: [x.item() for x in sorted(t)],
    "comparison chain": lambda t: bool(0 < t.abs().max() < 100),
    "shape of nonzero": lambda t: (t > 0).nonzero().shape[0],
    "mask size": lambda t: t[t > 0].numel(),
    "unique": lambda t: torch.unique(t.round()).tolist(),
    "where": lambda t: [len(x) for x in torch.where(t > 0)],
    "argmax": lambda t: t.argmax().item(),
    "all": lambda t: (t == t).all().item(),
}


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
@pytest.mark.parametrize("name", READS)
def test_value_read_by_the_constructor(name):
    def build():
        bias = nn.Linear(4, 4)
        drawn = torch.randn(6)
        model = nn.Sequential(bias, nn.Linear(4, 4))
        model.read = READS[name](drawn)
        model.register_buffer("drawn", drawn)
        model.register_buffer("tail", torch.randn(3))
        return model

    pair = both(build)
    assert repr(pair.deferred.read) == repr(pair.eager.read)
    assert all(is_deferred(parameter) for parameter in pair.deferred.parameters())
    assert is_deferred(pair.deferred.tail)
    settle(pair, "shuffled")


@pytest.mark.parametrize("name", ["item", "tolist", "numpy", "bool", "iteration", "mask size"])
def test_value_read_after_deferral(name):
    pair = both(torch.randn, 6)
    assert repr(READS[name](pair.deferred)) == repr(READS[name](pair.eager))
    settle(pair, "whole")


@pytest.mark.parametrize("name", ["item", "tolist", "numpy", "mask size"])
def test_written_after_it_was_read(name):
    """What was computed for a read goes on being updated."""

    def build():
        drawn = torch.randn(6)
        view = drawn[2:]
        first = READS[name](drawn)
        drawn.mul_(2)
        view[0] = 5
        second = READS[name](drawn)
        drawn.normal_()
        return {"drawn": drawn, "view": view, "copy": drawn.clone(), "read": [first, second]}

    pair = verify(build)
    assert repr(pair.deferred["read"]) == repr(pair.eager["read"])


def test_array_shares_memory_with_its_tensor():
    def build():
        tensor = torch.zeros(4)
        array = tensor.numpy()
        array[0] = 1
        tensor.add_(1)
        array[1] *= 10
        view = tensor[1:]
        view.mul_(3)
        return {"tensor": tensor, "seen": torch.tensor(array.tolist())}

    verify_values(build)


def test_tensors_made_from_arrays():
    def build():
        layer = nn.Linear(3, 2)
        table = np.arange(6, dtype=np.float32).reshape(2, 3)
        layer.register_buffer("shared", torch.from_numpy(table))
        layer.register_buffer("cast", torch.as_tensor(np.ones(2), dtype=torch.float32))
        layer.register_buffer("copied", torch.tensor(table * 2))
        layer.weight.data.copy_(torch.from_numpy(table))
        layer.bias = nn.Parameter(torch.from_numpy(np.array([1.0, 2.0], dtype=np.float32)))
        layer.weight.data[0] = torch.from_numpy(table)[1]
        return layer

    verify(build)


def test_bytes_turned_into_tensors():
    def build():
        data = bytearray(np.arange(4, dtype=np.float32).tobytes())
        layer = nn.Linear(2, 2)
        layer.weight.data.copy_(torch.frombuffer(data, dtype=torch.float32).reshape(2, 2))
        return layer

    verify(build)


def test_drop_path_rates():
    def build():
        rates = [x.item() for x in torch.linspace(0, 0.1, 5)]
        model = nn.ModuleList(nn.Linear(4, 4) for _ in rates)
        model.rates = rates
        return model

    pair = both(build)
    assert pair.deferred.rates == pair.eager.rates
    assert all(is_deferred(parameter) for parameter in pair.deferred.parameters())
    settle(pair, "reversed")


def test_structure_decided_by_a_draw():
    def build():
        layers = [nn.Linear(4, 4)]
        while torch.rand(1).item() < 0.8 and len(layers) < 12:
            layers.append(nn.Linear(4, int(torch.randint(1, 6, ()))))
        order = torch.randperm(len(layers)).tolist()
        return nn.ModuleList(layers[k] for k in order)

    for seed in range(6):
        verify(build, seed=seed, order="shuffled")


def test_search_for_a_good_draw():
    """Drawn again until the values please: rejection sampling by hand."""

    def build():
        weight = torch.randn(4, 4)
        while weight.abs().max() > 1.8:
            weight.normal_()
        layer = nn.Linear(4, 4)
        layer.weight.data = weight
        return layer

    for seed in range(4):
        verify(build, seed=seed)


def test_scaling_by_a_measured_norm():
    """The second layer is scaled by what the first one does to data, as in LSUV."""

    def build():
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
        data = torch.randn(32, 6)
        with torch.no_grad():
            for layer in model:
                data = layer(data)
                if isinstance(layer, nn.Linear):
                    deviation = data.std().item()
                    layer.weight.data /= deviation
                    data = data / deviation
        return model

    verify(build)


def test_only_what_is_read_is_computed():
    def build():
        big = nn.Linear(100_000, 100_000, bias=False)  # 40 GB if it were computed
        small = nn.Linear(4, 4)
        small.scale = small.weight.norm().item()
        small.big = big
        return small

    model = deferred_init(build)
    assert model.scale > 0
    assert is_deferred(model.big.weight)
    assert model.big.weight.numel() == 10**10


def test_reading_what_a_later_write_overwrites():
    def build():
        weight = torch.randn(5)
        double = weight * 2
        weight.zero_()
        total = double.sum().item()
        return {"weight": weight, "double": double, "total": torch.tensor(total)}

    verify_values(build)


def test_masked_writes_need_no_read():
    def build():
        weight = torch.randn(5, 5)
        weight[weight > 1] = 1.0
        weight[torch.eye(5, dtype=torch.bool)] = 0.0
        weight.masked_fill_(weight < -1, -1.0)
        return {"weight": weight, "kept": torch.where(weight > 0, weight, torch.zeros(()))}

    verify_values(build)


def test_representation_of_a_deferred_tensor_computes_nothing():
    tensor = deferred_init(torch.randn, 4, 5)
    assert "size=(4, 5)" in repr(tensor)
    assert "fake=True" in str(tensor)
    assert is_deferred(tensor)
    layer = deferred_init(nn.Linear, 4, 5)
    assert "in_features=4" in repr(layer)
    assert "requires_grad=True" in repr(layer.weight)
    assert is_deferred(layer)


def test_storage_queries_name_the_cure():
    tensor = deferred_init(torch.randn, 4)
    queries = [lambda: tensor.data_ptr(), lambda: tensor.share_memory_()]
    if RELEASE >= (2, 0):
        queries.append(lambda: tensor.untyped_storage())
    queries.append(lambda: tensor.storage())
    for query in queries:
        with pytest.raises(RuntimeError, match="(?i)materializ"):
            query()
