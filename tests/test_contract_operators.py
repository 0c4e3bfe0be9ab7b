"""Operators that torch calls in a way of its own: generators by place, lazy fallbacks, files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.equality import assert_equal, both, materialize, verify, verify_values
from torchcompat.deferred_init import deferred_init, materialize_module
from torchcompat.fake import fake_mode, is_fake

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature.*:UserWarning")

# Generators that need not be named.

DRAWN = {
    "poisson": lambda g: torch.poisson(torch.full((40,), 5.0), generator=g),
    "binomial": lambda g: torch.binomial(torch.full((40,), 9.0), torch.full((40,), 0.3), g),
    "gamma": lambda g: torch._standard_gamma(torch.ones(9), generator=g),
    "dirichlet": lambda g: torch._sample_dirichlet(torch.ones(3, 4), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(9), 4, generator=g),
    "multinomial replaced": lambda g: torch.multinomial(torch.ones(9), 4, True, generator=g),
    "leaky": lambda g: torch.ops.aten.rrelu_with_noise(
        torch.randn(40, generator=g), torch.ones(40), 0.1, 0.5, True, g
    ),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("kept", [True, False])
def test_a_generator_given_by_place_draws_what_eager_draws(draw, kept):
    def build():
        generator = torch.Generator().manual_seed(7)
        drawn = draw(generator)
        return [*([drawn] if kept else []), torch.rand(3, generator=generator), torch.rand(2)]

    verify(build)


def test_a_generator_from_outside_is_left_where_eager_leaves_it():
    def states(deferred):
        generator = torch.Generator().manual_seed(7)

        def build():
            return torch.poisson(torch.full((40,), 5.0), generator=generator)

        made = materialize(deferred_init(build)) if deferred else build()
        return made, generator.get_state()

    for eager, ours in zip(states(False), states(True)):
        assert torch.equal(eager, ours)


@pytest.mark.parametrize("named", [True, False])
def test_generators_are_right_after_an_operator_that_fails_at_the_end(named):
    """What such an operator draws is asked for when the recording ends: eager failed there."""

    def after(deferred):
        torch.manual_seed(0)
        own = torch.Generator().manual_seed(3)
        generator = own if named else None

        def build():
            torch.rand(3), torch.randn(2, generator=own)
            return torch.randperm(3000, dtype=torch.half, generator=generator)

        with pytest.raises(RuntimeError, match="Half"):
            deferred_init(build) if deferred else build()
        return torch.rand(4), torch.rand(4, generator=own)

    for eager, ours in zip(after(False), after(True)):
        assert torch.equal(eager, ours)


# Conjugates and negatives, which torch resolves below autograd for operators that know none.

RESOLVED = {
    "times": lambda w: (w.conj() * 2).abs().sum(),
    "plus": lambda w: (w + w.conj()).abs().sum(),
    "sum": lambda w: w.conj().sum().abs(),
    "imaginary": lambda w: (w.conj().imag * 3).sum(),
    "joined": lambda w: torch.cat([w.conj(), w]).abs().sum(),
    "shaped": lambda w: (w.conj().reshape(3, 1) * w).abs().sum(),
    "adjoint": lambda w: (w.mH.clone() + 1).abs().sum() if w.dim() > 1 else w.abs().sum(),
    "negative": lambda w: (torch._neg_view(w.real) * torch.rand(3)).sum(),
    "in place": lambda w: (w * 1).conj().mul_(2).add_(w).abs().sum(),
    "detached": lambda w: (w.conj().detach() * 2 + w).abs().sum(),
}


@pytest.mark.parametrize("compute", RESOLVED.values(), ids=RESOLVED)
def test_graphs_lead_through_conjugates_and_negatives(compute):
    def build():
        w = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        return {"w": w, "out": compute(w)}

    verify_values(build)


def test_a_graph_extended_after_the_recording_leads_through_conjugates():
    def build():
        return nn.Parameter(torch.randn(3, dtype=torch.complex64))

    pair = both(build)
    eager, ours = ((w, (w.conj() * 2).abs().sum()) for w in pair)
    ours = materialize(list(ours))
    assert_equal(list(eager), ours)
    for out in (eager[1], ours[1]):
        out.backward()
    assert torch.equal(eager[0].grad, ours[0].grad)


# Views of parameters that were taken without a graph.


class Sliced(nn.Module):
    """Keeps views of its weight, as fused projections do, and fills the weight afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3))
        with torch.no_grad():
            self.query, self.key = self.weight.chunk(2)
        nn.init.normal_(self.weight)


def test_a_view_taken_without_a_graph_of_what_is_written_later():
    pair = both(Sliced)
    materialize_module(pair.deferred)
    for name in ("weight", "query", "key"):
        eager, ours = getattr(pair.eager, name), getattr(pair.deferred, name)
        assert eager.tolist() == ours.tolist()
        assert eager.requires_grad == ours.requires_grad
    with torch.no_grad():
        pair.deferred.weight.zero_()
    assert not pair.deferred.query.any()


def test_a_view_taken_and_written_after_the_recording():
    module = deferred_init(nn.Linear, 3, 3)
    with torch.no_grad():
        row = module.weight[0]
        module.weight.mul_(2)
        row.fill_(1)
    materialize_module(module)
    assert module.weight[0].tolist() == [1, 1, 1]


# Lazy parameters and buffers keep their class through casts.


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())


@pytest.mark.parametrize(
    "cast", [nn.Module.double, lambda m: m.to(torch.float64), lambda m: m.to("cpu")]
)
@pytest.mark.parametrize("inside", [True, False])
def test_lazy_modules_are_cast_before_they_know_their_shapes(cast, inside):
    pair = both((lambda: cast(lazy())) if inside else lazy)
    for module in pair:
        torch.manual_seed(5)
        cast(module)
        data = torch.ones(3, 6)
        module(data.to(module[0].weight.dtype))
    materialize_module(pair.deferred)
    assert_equal(pair.eager, pair.deferred)


def test_lazy_modules_are_cast_copied_and_materialised():
    module = deferred_init(lambda: lazy().double())
    other = copy.deepcopy(module)
    materialize_module(module)
    for each in (module, other):
        assert type(each[0].weight).__name__ == "UninitializedParameter"
        assert type(each[1].running_mean).__name__ == "UninitializedBuffer"
        each(torch.ones(3, 6).double())
        assert each[1].running_mean.dtype == torch.float64


def test_lazy_modules_in_fake_mode():
    with fake_mode():
        module = lazy().double()
        module(torch.ones(3, 6).double())
        assert is_fake(module[1].running_mean)
        assert module[1].running_mean.shape == (4,)


def test_lazy_parameters_refuse_what_they_refuse_eagerly():
    def refused():
        weight = nn.parameter.UninitializedParameter()
        for ask in (weight.requires_grad_, weight.numel):
            with pytest.raises(ValueError, match="uninitialized parameter"):
                ask()

    refused()
    deferred_init(refused)


# Containers.


class Irreps(tuple):
    """Refuses what a tuple can do, as e3nn's does."""

    __slots__ = ()

    def _refuse(self, *_):
        raise NotImplementedError

    __len__ = count = index = __contains__ = _refuse


def test_a_tuple_without_a_length_among_the_attributes():
    class Keeps(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.irreps = Irreps((1, 2))
            self.parts = Irreps((torch.randn(2), torch.ones(1)))

    module = deferred_init(Keeps)
    materialize_module(module)
    for each in (module.weight, *iter(module.parts)):
        assert not is_fake(each)
    assert type(module.parts) is Irreps


# Files.


def test_a_file_is_read_when_the_constructor_reads_it(tmp_path):
    path = str(tmp_path / "weights")
    torch.arange(8.0).numpy().tofile(path)
    kept = deferred_init(lambda: [torch.from_file(path, size=8), torch.from_file(path, size=8) * 2])
    Path(path).unlink()
    assert_equal([torch.arange(8.0), torch.arange(8.0) * 2], materialize(kept))


def test_a_shared_file_is_written_when_the_constructor_writes_it(tmp_path):
    path = str(tmp_path / "weights")
    torch.arange(8.0).numpy().tofile(path)
    deferred_init(lambda: torch.from_file(path, shared=True, size=8).fill_(3))
    assert torch.from_file(path, size=8).tolist() == [3.0] * 8


# Errors.


def test_what_is_no_tensor_cannot_be_data():
    with pytest.raises(TypeError, match="got int"):
        deferred_init(lambda: setattr(torch.ones(2), "data", 3))


@pytest.mark.parametrize("call", [torch.bucketize, torch.searchsorted])
def test_boundaries_of_a_wrong_shape_are_refused_while_recording(call):
    def build():
        values, sorted_ = torch.ones(3), torch.ones(2, 2)
        with pytest.raises(RuntimeError, match="boundaries"):
            call(values, sorted_) if call is torch.bucketize else call(sorted_, values)

    build()
    deferred_init(build)
