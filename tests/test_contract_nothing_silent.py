"""C7: what cannot be deferred is computed at once or refused by name; no value is ever wrong."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tests.equality import assert_equal, both, materialize, verify, verify_values
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import fake_mode, is_fake, meta_like

# Operators without a meta kernel

UNCOMMON = {
    "multinomial": lambda: torch.multinomial(torch.tensor([0.2, 0.8]), 6, replacement=True),
    "polar": lambda: torch.polar(torch.ones(3), torch.arange(3.0)),
    "searchsorted": lambda: torch.searchsorted(torch.arange(5.0), torch.randn(4)),
    "bucketize": lambda: torch.bucketize(torch.randn(4), torch.arange(3.0)),
    "poisson": lambda: torch.poisson(torch.full((5,), 3.0)),
    "gamma": lambda: torch._standard_gamma(torch.full((5,), 2.0)),
    "dirichlet": lambda: torch._sample_dirichlet(torch.full((2, 3), 0.5)),
    "binomial": lambda: torch.binomial(torch.full((5,), 10.0), torch.full((5,), 0.4)),
    "nonzero": lambda: torch.randn(9).gt(0).nonzero(),
    "masked_select": lambda: torch.randn(9).masked_select(torch.arange(9) > 4),
    "unique": lambda: torch.unique(torch.randint(0, 4, (9,))),
    "histc": lambda: torch.histc(torch.randn(20), bins=4),
    "bincount": lambda: torch.bincount(torch.randint(0, 4, (9,))),
    "qr": lambda: torch.linalg.qr(torch.randn(4, 3))[0],
    "svd": lambda: torch.linalg.svdvals(torch.randn(4, 3)),
    "eigvalsh": lambda: torch.linalg.eigvalsh(torch.eye(3) * torch.rand(3)),
    "inverse": lambda: torch.linalg.inv(torch.eye(3) + torch.rand(3, 3) / 9),
    "matrix_exp": lambda: torch.matrix_exp(torch.randn(3, 3)),
    "cholesky": lambda: torch.linalg.cholesky(torch.eye(3) * 2 + 0.1),
    "fft": lambda: torch.fft.rfft(torch.randn(8)),
    "rrelu": lambda: nn.functional.rrelu(torch.randn(8), training=True),
    "unfold": lambda: nn.functional.unfold(torch.randn(1, 2, 4, 4), 2),
    "interpolate": lambda: nn.functional.interpolate(torch.randn(1, 2, 3, 3), scale_factor=2.0),
    "grid_sample": lambda: nn.functional.grid_sample(
        torch.randn(1, 2, 3, 3), torch.zeros(1, 2, 2, 2), align_corners=False
    ),
    "kthvalue": lambda: torch.randn(9).kthvalue(3)[0],
    "median": lambda: torch.randn(9).median(),
    "cdist": lambda: torch.cdist(torch.randn(3, 2), torch.randn(4, 2)),
    "block_diag": lambda: torch.block_diag(torch.randn(2, 2), torch.ones(1, 3)),
    "combinations": lambda: torch.combinations(torch.arange(4)),
    "tril_indices": lambda: torch.tril_indices(3, 3),
    "hann_window": lambda: torch.hann_window(6),
    "vander": lambda: torch.vander(torch.randn(3)),
    "repeat_interleave": lambda: torch.repeat_interleave(torch.randn(3), torch.tensor([1, 0, 2])),
    "sobol": lambda: torch.quasirandom.SobolEngine(2, scramble=True, seed=3).draw(3),
    "quantize": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8).dequantize(),
    "one_hot": lambda: nn.functional.one_hot(torch.tensor([0, 2, 1])),
    "distribution": lambda: torch.distributions.Normal(torch.zeros(3), torch.ones(3)).sample(),
    "beta distribution": lambda: torch.distributions.Beta(torch.ones(2), torch.ones(2)).sample(),
}


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*")
@pytest.mark.parametrize("name", UNCOMMON)
def test_uncommon_operator(name):
    """Equal in value, and so is what is drawn and built after it."""

    def build():
        before = torch.randn(3)
        value = UNCOMMON[name]()
        doubled = value * 2
        return {"before": before, "value": value, "doubled": doubled, "after": torch.randn(20)}

    verify_values(build)


def test_operator_without_meta_kernel_in_place_on_a_parameter():
    def build():
        layer = nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.copy_(torch.linalg.qr(layer.weight)[0])
            layer.bias.copy_(torch.histc(layer.weight.flatten(), bins=4))
            layer.bias.geometric_(0.4)
        return layer

    verify(build)


# Real tensors as arguments

MARKERS = ("changed", "modified", "written")


def change_in_place(real):
    real.add_(100)


def change_through_numpy(real):
    real.numpy()[...] = -5


def change_through_data(real):
    real.data.fill_(-7)


def change_data(real):
    real.data = torch.full_like(real, 9)


def change_through_a_view(real):
    real.view(-1)[0] = 44


def change_by_resizing(real):
    real.resize_(0)


CHANGES = [
    change_in_place,
    change_through_numpy,
    change_through_data,
    change_data,
    change_through_a_view,
    change_by_resizing,
]

USES = {
    "copied": lambda real: torch.zeros_like(real).copy_(real),
    "added": lambda real: torch.ones(real.shape) + real,
    "parameter": lambda real: nn.Parameter(torch.zeros(real.shape) + real * 2),
    "indexed": lambda real: torch.zeros(real.shape).add_(real[0]),
    "stacked": lambda real: torch.stack([real, torch.zeros(real.shape)]),
    "cloned": lambda real: real.clone() * torch.ones(()),
    "assigned": lambda real: torch.zeros(3, *real.shape).index_put_((torch.tensor([1]),), real),
}


@pytest.mark.parametrize("size", [(4,), (300, 300)], ids=["small", "large"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_argument_changed_after_the_construction(change, use, size):
    """The value at construction, or an error that says what happened; never the changed value."""
    eager = USES[use](torch.linspace(0, 1, 4 if len(size) == 1 else 90_000).reshape(size))
    real = torch.linspace(0, 1, 4 if len(size) == 1 else 90_000).reshape(size)
    deferred = deferred_init(USES[use], real)
    change(real)
    try:
        result = materialize_tensor(deferred)
    except RuntimeError as error:
        assert any(word in str(error) for word in MARKERS), error
        assert __file__.rpartition("/")[2] in str(error), "the error does not name the user's line"
    else:
        assert_equal(eager, result)


@pytest.mark.parametrize("use", USES)
def test_argument_left_alone(use):
    for shape in ((4,), (300, 300)):
        real = torch.linspace(0, 1, torch.Size(shape).numel()).reshape(shape)
        verify(USES[use], real)
        assert torch.equal(real, torch.linspace(0, 1, real.numel()).reshape(shape))


def test_argument_may_be_dropped():
    pair = both(lambda: torch.zeros(300, 300) + CONSTANTS[0])
    CONSTANTS.append(CONSTANTS.pop().clone())
    assert_equal(pair.eager, materialize_tensor(pair.deferred))


CONSTANTS = [torch.linspace(0, 1, 90_000).reshape(300, 300)]


def test_real_tensor_kept_as_it_is():
    real, parameter = torch.randn(3), nn.Parameter(torch.randn(2))

    def build():
        layer = nn.Linear(3, 2)
        layer.register_buffer("real", real)
        layer.bias = parameter
        return layer

    pair = both(build)
    assert pair.deferred.bias is parameter
    materialize(pair.deferred)
    assert pair.deferred.real is real
    assert pair.deferred.bias is parameter


def test_in_place_on_a_real_tensor_with_deferred_arguments():
    def build(real):
        drawn = torch.randn(4)
        real.add_(drawn)
        real[1] = drawn[0]
        real[2:].copy_(drawn[:2] * 2)
        real.mul_(torch.rand(()))
        torch.add(drawn[:1], 1, out=real[:1])
        seen = real * 1
        return {"seen": seen, "after": torch.randn(3)}

    reals = [torch.ones(4), torch.ones(4)]
    torch.manual_seed(0)
    eager = build(reals[0])
    torch.manual_seed(0)
    deferred = deferred_init(build, reals[1])
    assert type(reals[1]) is torch.Tensor
    assert torch.equal(*reals)
    assert_equal(eager, materialize(deferred))


def test_in_place_on_a_real_parameter():
    reals = [nn.Linear(3, 2), nn.Linear(3, 2)]
    reals[1].load_state_dict(reals[0].state_dict())

    def build(layer):
        with torch.no_grad():
            layer.weight.copy_(nn.init.xavier_uniform_(torch.empty(2, 3)))
            layer.bias.add_(torch.ones(2))
        return nn.Linear(2, 2)

    torch.manual_seed(0)
    build(reals[0])
    torch.manual_seed(0)
    deferred_init(build, reals[1])
    assert_equal(*reals)


def test_in_place_init_of_a_real_module_inside():
    reals = [nn.Linear(3, 2), nn.Linear(3, 2)]
    for call, layer in zip((lambda fn: fn(), deferred_init), reals):
        torch.manual_seed(0)
        call(lambda layer=layer: [nn.init.normal_(layer.weight), layer.reset_parameters()])
    assert not is_deferred(reals[1])
    assert_equal(*reals)


def test_foreach_over_real_and_deferred_tensors():
    def build(real):
        mixed = [real, torch.randn(3)]
        torch._foreach_mul_(mixed, 2.0)
        torch._foreach_add_(mixed, [torch.ones(3), real])
        return mixed[1]

    reals = [torch.ones(3), torch.ones(3)]
    torch.manual_seed(0)
    eager = build(reals[0])
    torch.manual_seed(0)
    deferred = deferred_init(build, reals[1])
    assert_equal(reals[0], reals[1])
    assert_equal(eager, materialize_tensor(deferred))


# Errors

BROKEN = {
    "matmul": lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
    "broadcast": lambda: torch.zeros(2, 3) + torch.zeros(4),
    "reshape": lambda: torch.zeros(6).view(4, 2),
    "view of transposed": lambda: torch.zeros(2, 3).t().view(6),
    "index": lambda: torch.zeros(2)[5],
    "dimension": lambda: torch.zeros(2).sum(3),
    "concatenate": lambda: torch.cat([torch.zeros(2, 2), torch.zeros(2, 3, 1)]),
    "leaf in place": lambda: nn.Parameter(torch.zeros(2)).add_(1),
    "leaf filled": lambda: nn.Parameter(torch.zeros(2)).normal_(),
    "copy": lambda: torch.zeros(3).copy_(torch.zeros(4)),
    "expanded": lambda: torch.zeros(1).expand(3).add_(1),
    "integer gradient": lambda: torch.zeros(2, dtype=torch.int64).requires_grad_(),
    "integer parameter": lambda: nn.Parameter(torch.zeros(2, dtype=torch.int64)),
    "linear": lambda: nn.Linear(3, 2)(torch.zeros(1, 4)),
    **{
        f"negative size, {make.__name__}": lambda make=make: make(2, -1)
        for make in (torch.zeros, torch.ones, torch.empty, torch.rand, torch.randn, torch.eye)
    },
    "negative size, full": lambda: torch.full((-1,), 2.0),
    "negative size, randint": lambda: torch.randint(3, (-1,)),
    "negative size, new": lambda: torch.ones(2).new_empty(-1),
    "negative size, randperm": lambda: torch.randperm(-1),
    "negative size, linspace": lambda: torch.linspace(0, 1, -1),
    "negative size, window": lambda: torch.hann_window(-1),
    "deepcopy of non-leaf": lambda: __import__("copy").deepcopy(nn.Parameter(torch.ones(2)) * 2),
    "cast in place": lambda: torch.zeros(2, dtype=torch.int64).add_(0.5),
    "item of many": lambda: torch.zeros(2).item(),
    "bool of many": lambda: bool(torch.zeros(2)),
    "numpy of a parameter": lambda: nn.Parameter(torch.zeros(2)).numpy(),
    "fan of a vector": lambda: nn.init.xavier_uniform_(torch.zeros(2)),
    "singular": lambda: torch.linalg.cholesky(torch.ones(3, 3)),
    "inverse": lambda: torch.inverse(torch.zeros(2, 2)),
    "solve": lambda: torch.linalg.solve(torch.zeros(2, 2), torch.ones(2)),
    "class out of range": lambda: nn.functional.one_hot(torch.tensor([5]), 3),
    "index out of range": lambda: torch.randn(5, 3)[torch.tensor([1, 7])],
    "word out of range": lambda: nn.Embedding(4, 2)(torch.tensor([9])),
    "set_ shape": lambda: torch.zeros(2).data.as_strided((3,), (1,)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_program_fails_where_eager_fails(name):
    """The same kind of error, raised while recording."""
    with pytest.raises(Exception) as eager:  # noqa: PT011
        BROKEN[name]()
    with pytest.raises(type(eager.value)):
        deferred_init(BROKEN[name])


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 3


def test_graph_of_a_function_is_refused_not_lost():
    def build():
        weight = nn.Parameter(torch.ones(3))
        return {"weight": weight, "scaled": _Scaled.apply(weight) + 1}

    made = deferred_init(build)
    with pytest.raises(RuntimeError, match="_Scaled"):
        materialize_tensor(made["scaled"])
    assert_equal(build()["weight"], materialize_tensor(made["weight"]))

    def without_graph():
        with torch.no_grad():
            return build()

    verify_values(without_graph)


def _array_under_a_parameter():
    array = np.ones(4, dtype="float32")
    doubled = nn.Parameter(torch.from_numpy(array)) * 2
    array[1] = 7
    return doubled


def _array_of_a_parameter():
    weight = nn.Parameter(torch.ones(4))
    array = weight.detach().numpy()
    doubled = weight * 2
    array[:] = 1.5
    return doubled


@pytest.mark.parametrize("build", [_array_under_a_parameter, _array_of_a_parameter])
def test_memory_in_a_graph_changed_through_numpy(build):
    """An error, since the value at construction is gone."""
    made = deferred_init(build)
    with pytest.raises(RuntimeError, match="materialised and then changed"):
        materialize_tensor(made)


def test_argument_errors():
    for wrong in (3, None, "x", [torch.zeros(1)]):
        with pytest.raises(ValueError, match="(?i)tensor.*module|module.*tensor"):
            is_deferred(wrong)
        with pytest.raises(TypeError):
            materialize_tensor(wrong)
        with pytest.raises(TypeError):
            materialize_module(wrong)
    for real in (torch.zeros(2), nn.Parameter(torch.zeros(2))):
        with pytest.raises(ValueError, match="fake"):
            meta_like(real)
    with pytest.raises(TypeError):
        deferred_init(3)
    with pytest.raises(TypeError):
        deferred_init()
    with pytest.raises(TypeError):
        materialize_module(nn.Linear(2, 2), False, None, True)


def test_fakes_of_fake_mode_do_not_mix_into_a_recording():
    with fake_mode():
        fake = torch.ones(3)
    assert is_fake(fake)
    assert not is_deferred(fake)
    with pytest.raises(ValueError, match="fake_mode"):
        deferred_init(lambda: torch.zeros(3) + fake)
    with pytest.raises(ValueError, match="fake_mode"):
        deferred_init(lambda: torch.zeros(3).copy_(fake))
    tensor = deferred_init(torch.zeros, 3)
    with pytest.raises(ValueError, match="fake_mode"):
        tensor + fake
    assert_equal(torch.zeros(3), materialize_tensor(tensor))


def test_values_of_a_fake_are_refused():
    with fake_mode():
        fake = torch.ones(3)
    for use in (lambda: fake.tolist(), lambda: fake[0].item(), lambda: fake.numpy()):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            use()
    with pytest.raises((ValueError, RuntimeError)):
        materialize_tensor(fake)


def test_replay_error_names_operator_and_line():
    """An index that is only wrong in value cannot be seen while recording."""

    def build():
        table = torch.zeros(3)
        places = torch.full((1,), 7, dtype=torch.int64)
        return table.index_select(0, places)  # the line to be named

    with pytest.raises((RuntimeError, IndexError)) as error:
        materialize_tensor(deferred_init(build))
    text = _with_causes(error.value)
    assert "index_select" in text
    assert "test_contract_nothing_silent.py" in text


def _with_causes(error):
    parts = []
    while error is not None:
        parts.append(str(error) + " ".join(getattr(error, "__notes__", ())))
        error = error.__cause__ or error.__context__
    return "\n".join(parts)


def test_failed_replay_can_be_repeated_and_leaves_the_rest_alone():
    def build():
        layer = nn.Linear(3, 2)
        layer.bad = torch.zeros(3).index_select(0, torch.full((1,), 7, dtype=torch.int64))
        return layer

    torch.manual_seed(0)
    layer = deferred_init(build)
    torch.manual_seed(0)
    eager = nn.Linear(3, 2)
    for _ in range(2):
        with pytest.raises((RuntimeError, IndexError)):
            materialize_tensor(layer.bad)
    assert_equal(eager.weight, materialize_tensor(layer.weight))
    assert_equal(eager.bias, materialize_tensor(layer.bias))


# Custom operators


@pytest.fixture(scope="module")
def custom():
    """Operators of a library: one without a meta kernel, one without an autograd formula."""
    library = torch.library.Library("torchcompat_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x + torch.rand_like(x), "CPU")
    library.define("bump_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("bump_", lambda x: x.add_(1), "CPU")
    library.define("half(Tensor x) -> Tensor")
    library.impl("half", lambda x: x.clone() / 2, "CPU")
    library.impl("half", lambda x: torch.empty_like(x), "Meta")
    yield torch.ops.torchcompat_tests
    del library


def test_custom_operators(custom):
    def build():
        weight = torch.randn(3)
        return {
            "twice": custom.twice(weight),
            "half": custom.half(weight),
            "weight": weight,
            "after": torch.randn(3),
        }

    verify_values(build)


def test_custom_operator_that_writes(custom):
    def build():
        weight = torch.randn(3)
        view = weight[:2]
        custom.bump_(weight)
        return {"weight": weight, "view": view}

    verify_values(build)


def test_custom_operator_that_draws(custom):
    def build():
        first = torch.randn(2)
        noisy = custom.noise(torch.zeros(5))
        return {"first": first, "noisy": noisy, "after": torch.randn(4)}

    verify_values(build)


def test_custom_operator_without_autograd_formula(custom):
    """Forward and backward do exactly what eager does on that torch, warning included."""
    results = []
    for call in (lambda fn: fn(), deferred_init):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            weight, out = call(
                lambda: (lambda w: (w, custom.twice(w)))(nn.Parameter(torch.randn(3)))
            )
            weight, out = materialize_tensor(weight), materialize_tensor(out)
            grad = _backward(weight, out)
            results.append(
                (out, weight, grad, {str(w.message).partition("\n")[0][:60] for w in caught})
            )
    eager, deferred = results
    assert_equal(eager[:2], deferred[:2])
    assert type(eager[2]) is type(deferred[2])
    assert eager[3] == deferred[3]


def _backward(weight, out):
    try:
        return torch.autograd.grad(out.sum(), weight, allow_unused=True)[0]
    except RuntimeError as error:
        return error


# Devices that are not there


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_deferred_on_cuda_without_cuda():
    def build():
        layer = nn.Linear(3, 2, device="cuda")
        layer.branch = layer.weight.is_cuda
        layer.register_buffer("mask", torch.ones(3, device="cuda:1"))
        layer.norm = nn.BatchNorm1d(2).cuda()
        layer.lstm = nn.LSTM(2, 3, device="cuda")
        layer.scale = nn.Parameter(torch.tensor([1.0, 2.0], device="cuda"))
        layer.bias.data.normal_()
        layer.row = layer.weight[0].detach() + 1
        return layer

    layer = deferred_init(build)
    assert layer.branch
    assert layer.weight.device == torch.device("cuda", 0)
    assert layer.mask.device == torch.device("cuda", 1)
    for parameter in layer.parameters():
        assert parameter.is_cuda
        assert not parameter.is_meta
    assert layer.row.is_cuda
    with pytest.raises(RuntimeError, match="(?i)cuda") as error:
        materialize_module(layer)
    assert "weight" in str(error.value) or "size" in str(error.value)
    with pytest.raises((RuntimeError, AssertionError, NotImplementedError)):
        torch.ones(1, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_then_back_to_cpu():
    """Moved to CUDA after deferral and back before materialising: eager values, on the CPU."""
    torch.manual_seed(0)
    deferred = deferred_init(nn.Linear, 3, 2)
    torch.manual_seed(0)
    eager = nn.Linear(3, 2)
    deferred = deferred_init(lambda: deferred.to("cuda").to("cpu"))
    materialize_module(deferred)
    assert_equal(eager, deferred)


@pytest.mark.parametrize("device", ["xla", "mps", "xpu", "hpu"])
def test_deferred_on_other_devices(device):
    def build():
        layer = nn.Linear(3, 2, device=device)
        layer.register_buffer("table", torch.arange(3, device=device).float() * 2)
        layer.bias.data.zero_()
        return layer.requires_grad_(False)

    layer = deferred_init(build)
    assert {t.device.type for t in (layer.weight, layer.bias, layer.table)} == {device}
    assert layer.weight.shape == (2, 3)
    with pytest.raises((RuntimeError, NotImplementedError), match=f"(?i){device}"):
        materialize_module(layer)


def test_meta_like():
    layer = deferred_init(nn.Linear, 3, 2)
    meta = meta_like(layer.weight)
    assert meta.is_meta
    assert (meta.shape, meta.dtype) == ((2, 3), torch.float32)
    assert not is_fake(meta)
    assert is_deferred(layer.weight)
    strided = deferred_init(lambda: torch.randn(4, 3, dtype=torch.float64).t()[:, ::2])
    assert meta_like(strided).stride() == strided.stride()
    assert meta_like(strided).dtype is torch.float64


def test_is_fake_never_raises():
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("hands off")

    for anything in (None, 3, "x", nn.Linear(2, 2), np.zeros(2), torch.zeros(2), type, object()):
        assert is_fake(anything) is False
    assert is_fake(torch.zeros(2).as_subclass(Odd)) is False
    assert is_fake(torch.empty(2, device="meta")) is False
    assert is_fake(nn.UninitializedParameter()) is False
    assert is_fake(deferred_init(torch.zeros, 2)) is True
