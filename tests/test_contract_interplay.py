"""C1 and C6 where kernels, hooks, containers and collectives meet what is deferred.

Each program is run eagerly and deferred after the same seed. What is compared is what is left in
the end, and, by drawing once more, the layout that random numbers were drawn in.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from tests.equality import RELEASE, assert_equal, both, materialize, verify
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import fake_mode, is_fake

FLOAT8 = getattr(torch, "float8_e4m3fn", None)


def drawn_like(tensor):
    """Return a tensor with what depends on how it lies: a copy, draws, and a write to a reshape."""
    made = [copy.deepcopy(tensor.detach()), torch.randn_like(tensor), tensor]
    tensor.reshape(-1)[:2].zero_()
    return made


LAYOUTS = {
    "right singular vectors": lambda: torch.linalg.svd(torch.randn(4, 6), full_matrices=False)[2],
    "left singular vectors": lambda: torch.linalg.svd(torch.randn(6, 4), full_matrices=False)[0],
    "torch.svd": lambda: torch.svd(torch.randn(3, 5))[2],
    "batched": lambda: torch.linalg.svd(torch.randn(2, 3, 5))[2],
    "large": lambda: torch.linalg.svd(torch.randn(80, 90), full_matrices=False)[2],
    "eigenvectors": lambda: torch.linalg.eig(torch.randn(5, 5))[1],
    "many eigenvectors": lambda: torch.linalg.eig(torch.randn(70, 70))[1],
    "symmetric eigenvectors": lambda: torch.linalg.eigh(torch.eye(4) + torch.ones(4, 4))[1],
    "qr": lambda: torch.linalg.qr(torch.randn(4, 6))[0],
    "fft of a middle dimension": lambda: torch.fft.fft(torch.randn(2, 4, 6), dim=1),
    "fft of a large one": lambda: torch.fft.fft(torch.randn(20, 30, 40), dim=1),
    "rfft2": lambda: torch.fft.rfft2(torch.randn(4, 6)),
    "irfft2": lambda: torch.fft.irfft2(torch.randn(2, 4, 6, dtype=torch.complex64)),
    "hfft": lambda: torch.fft.hfft(torch.randn(2, 4, 6, dtype=torch.complex64), dim=1),
    "channels last": lambda: torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "cloned": lambda: torch.ones(2, 3, 4, 5).clone(memory_format=torch.channels_last),
    "a clone kept": lambda: torch.rand(4, 5).t().clone(memory_format=torch.preserve_format),
}


@pytest.mark.parametrize("build", LAYOUTS.values(), ids=LAYOUTS)
def test_results_lie_as_eager_lays_them(build):
    pair = both(lambda: drawn_like(build()))
    for eager, deferred in zip(*pair):
        assert deferred.stride() == eager.stride()
    assert_equal(pair.eager, materialize(pair.deferred))


ROUNDED = {
    "spectral norm": lambda w: torch.linalg.matrix_norm(w, 2),
    "by name": lambda w: torch.linalg.matrix_norm(input=w, ord="nuc"),
    "by default": lambda w: torch.linalg.matrix_norm(w),
    "by default and more": lambda w: torch.linalg.matrix_norm(w, keepdim=True),
    "norm": lambda w: w / torch.linalg.norm(w, 2),
    "norm, smallest": lambda w: torch.linalg.norm(w, ord=-2, dim=(0, 1), keepdim=True),
    "norm, fro": lambda w: torch.linalg.norm(w, "fro"),
    "vector norm": torch.linalg.norm,
    "condition": torch.linalg.cond,
    "condition, nuc": lambda w: torch.linalg.cond(w, "nuc"),
    "nuclear": lambda w: torch.norm(w, p="nuc"),
    "nuclear of dims": lambda w: w.norm("nuc", dim=(0, 1), keepdim=True),
    "singular values": torch.linalg.svdvals,
    "singular values by name": lambda w: torch.linalg.svdvals(A=w),
    "rank": torch.linalg.matrix_rank,
}


@pytest.mark.parametrize("function", ROUNDED.values(), ids=ROUNDED)
@pytest.mark.parametrize("kind", ["deferred", "parameter", "real"])
def test_singular_values_are_rounded_as_eagerly(function, kind):
    if kind == "real" and RELEASE < (2, 0):
        pytest.skip("torch 1.13 computes vectors, too, wherever a mode is active")
    real = torch.linspace(-1, 2, 64).sin().reshape(8, 8)

    def build(seed):
        torch.manual_seed(seed)
        if kind == "real":
            return function(real)
        with torch.no_grad():
            w = torch.randn(8, 8)
            return function(nn.Parameter(w) if kind == "parameter" else w)

    verify(lambda: [build(seed) for seed in range(8)])


def test_a_norm_with_a_graph():
    def build():
        weight = nn.Parameter(torch.randn(3, 3))
        return weight, torch.linalg.matrix_norm(weight, 2), torch.norm(weight, p="nuc")

    verify(build)


def test_results_that_a_kernel_leaves_out():
    def build():
        lstm = nn.LSTM(8, 4)
        with torch.no_grad():
            scale = lstm(torch.randn(5, 2, 8))[0].std()
        return lstm, scale, torch.full((2,), scale.item())

    verify(build)


NUMBERS = {
    "or": lambda: torch.ones(3, dtype=torch.long) | 4,
    "xor": lambda: torch.arange(3) ^ 4,
    "in place": lambda: torch.arange(6).bitwise_or_(8).bitwise_xor_(3),
    "mask": lambda: torch.zeros(3, dtype=torch.bool) | True,
    "augmented": lambda: torch.arange(3).__ior__(4),
    "polynomial": lambda: torch.special.legendre_polynomial_p(torch.randn(3), 3),
}


@pytest.mark.parametrize("build", NUMBERS.values(), ids=NUMBERS)
def test_numbers_in_place_of_tensors(build):
    verify(build)


def test_places_to_split_at_may_be_deferred():
    verify(lambda: torch.randn(8).tensor_split(torch.tensor([1, 3])))
    verify(lambda: torch.tensor_split(torch.randn(8), torch.arange(2) + 2))

    def pieces_of_what_is_named(name):
        whole = torch.randn(8)
        pieces = torch.tensor_split(**{name: whole}, tensor_indices_or_sections=torch.arange(2) + 2)
        whole.zero_()
        return [whole, *pieces]

    for name in ("input", "a", "x", "x1"):  # torch takes numpy's names, too
        verify(lambda name=name: pieces_of_what_is_named(name))


def test_data_may_be_passed_by_name():
    verify(lambda: torch.tensor(data=[torch.randn(2)[0], 3.0]))
    verify(lambda: torch.as_tensor(data=(torch.randn(2)[0], torch.randn(2)[1])))
    if RELEASE >= (2, 1):  # before, torch shows modes no call of it
        verify(lambda: torch.asarray(obj=[torch.randn(2)[0]]))
    verify(lambda: torch.nn.functional.one_hot(input=torch.arange(3), num_classes=4))


def test_splits_that_are_unsafe_share_memory():
    def build():
        whole = torch.zeros(6)
        first, _ = torch.unsafe_chunk(whole, 2)
        first.add_(1)
        torch.unsafe_split(whole, 2)[1].add_(3)
        torch.unsafe_split_with_sizes(whole, [5, 1])[1].add_(5)
        return whole

    verify(build)


@pytest.mark.skipif(FLOAT8 is None, reason="this release has no float8")
def test_float8_may_be_zeroed():
    def build():
        made = torch.rand(3).to(FLOAT8)
        return [torch.zeros(3, dtype=FLOAT8), torch.zeros_like(made), made.zero_()]

    eager, deferred = both(build)
    assert_equal([t.float() for t in eager], [materialize_tensor(t).float() for t in deferred])


def test_an_operator_that_resizes_what_it_writes():
    def build():
        observer = torch.ao.quantization.get_default_qat_qconfig("fbgemm").weight()
        observer(torch.randn(4, 3))
        return [observer, copy.deepcopy(observer)]

    eager, deferred = both(build)
    assert deferred[0].scale.shape == deferred[1].scale.shape == (4,)
    for one, other in zip(eager, deferred):
        materialize_module(other)
        assert_equal(dict(one.state_dict()), dict(other.state_dict()))


def hooked():
    weight = nn.Parameter(torch.ones(3))
    double = weight * 2
    removed = double.register_hook(lambda grad: grad * 5)
    double.register_hook(lambda grad: grad + 1)
    triple = double * 3
    double.mul_(2)
    removed.remove()
    return weight, triple, double


def hooked_view():
    weight = nn.Parameter(torch.ones(4))
    part = (weight * 2)[1:]
    part.register_hook(lambda grad: grad * 5)
    return weight, part * 3, part


@pytest.mark.parametrize("build", [hooked, hooked_view])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_hooks_on_results_of_a_graph(build, order):
    weight, *results = build()
    sum(r.sum() for r in results).backward()
    deferred = deferred_init(build)
    real = {i: materialize_tensor(deferred[i]) for i in order}
    (real[1].sum() + real[2].sum()).backward()
    assert torch.equal(real[0].grad, weight.grad)


def test_gradients_of_results_are_retained():
    def build():
        result = nn.Parameter(torch.ones(3)) * 3
        result.retain_grad()
        return result

    result = materialize_tensor(deferred_init(build))
    result.sum().backward()
    assert torch.equal(result.grad, torch.ones(3))


def test_gradients_of_parameters_that_were_real_before():
    model = deferred_init(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    materialize_module(model[0])
    model(torch.ones(1, 2)).sum().backward()
    materialize_module(model)
    assert not any(is_fake(p.grad) for p in model.parameters())


def test_objects_of_plain_data():
    @dataclasses.dataclass
    class Table:
        rows: torch.Tensor

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.prior = torch.distributions.Normal(torch.zeros(3), torch.rand(3))
            self.bound = torch.distributions.Independent(self.prior, 1)
            self.table = Table(torch.rand(2))
            self.space = types.SimpleNamespace(inner=[torch.rand(2)])
            self.space.itself = [self.space] * 9

    eager, deferred = both(Model)
    assert is_deferred(deferred)
    materialize_module(deferred)
    for read in (
        lambda m: m.prior.scale,
        lambda m: m.bound.log_prob(m.layer(torch.ones(3))),
        lambda m: m.table.rows,
        lambda m: m.space.inner[0],
    ):
        assert not is_fake(read(deferred))
        assert_equal(read(eager).detach(), read(deferred).detach())


@pytest.mark.skipif(
    RELEASE < (2, 10) and sys.version_info >= (3, 14),
    reason="torch 2.9 cannot script a module on Python 3.14",
)
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_module_is_loaded():
    file = io.BytesIO()
    saved = torch.jit.script(nn.Linear(2, 2))
    torch.jit.save(saved, file)
    file.seek(0)
    loaded = deferred_init(torch.jit.load, file)
    materialize_module(loaded)
    assert torch.equal(loaded.weight, saved.weight)
    assert torch.equal(loaded(torch.ones(2)), saved(torch.ones(2)))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_function_called_often():
    @torch.jit.script
    def curve(x: torch.Tensor):
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

    eager = 0.5 + torch.zeros(64)
    eager = eager * (1 + torch.tanh(0.79788456 * torch.full((64,), 1 + 0.044715)))
    for _ in range(4):
        made = materialize_tensor(deferred_init(lambda: curve(torch.ones(64))))
        assert torch.allclose(made, eager)


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # torch's own has no copy
def test_an_array_that_is_a_copy():
    def build():
        made = torch.zeros(3)
        np.array(made)[1] = 4
        np.array(made, dtype=np.float64)[2] = 1
        np.asarray(made)[0] = 2
        return made

    verify(build)


def test_like_a_deferred_tensor_but_meta():
    weight = deferred_init(nn.Linear, 2, 2).weight
    for make in (torch.empty_like, torch.zeros_like, torch.rand_like):
        assert not is_fake(make(weight, device="meta"))
        assert make(weight, device="meta").is_meta
    assert weight.new_empty(2, device="meta").is_meta
    model = deferred_init(nn.Linear, 2, 2).to_empty(device="meta")
    assert model.weight.is_meta
    assert not is_deferred(model)


@pytest.mark.since((2, 3), "swap_tensors")
def test_swapped_with_a_real_tensor():
    model, other = deferred_init(nn.Linear, 2, 2), nn.Linear(2, 2)
    values = other.weight.detach().clone()
    torch.utils.swap_tensors(model.weight, other.weight)
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight, values)
    assert is_deferred(other.weight)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = deferred_init(nn.Linear, 2, 2)
        model.load_state_dict({"weight": values, "bias": values[0].clone()}, assign=True)
        materialize_module(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model.weight, values)


def test_a_module_that_is_a_dataclass():
    @dataclasses.dataclass(eq=False)
    class Scale(nn.Module):
        size: int = 2

        def __post_init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(self.size))

    model = deferred_init(nn.Sequential, nn.Linear(1, 1), deferred_init(Scale))
    materialize_module(model, recurse=False)
    assert is_deferred(model[1])
    materialize_module(model)
    assert not is_deferred(model[1])


def test_norms_of_fakes_without_a_tape():
    with fake_mode():
        matrix = torch.ones(3, 3)
        for norm in (torch.linalg.norm, torch.linalg.svdvals, torch.linalg.cond, torch.norm):
            assert is_fake(norm(matrix))
        assert torch.norm(matrix, p="nuc").shape == ()
