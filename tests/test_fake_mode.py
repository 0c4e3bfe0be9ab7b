"""`fake_mode`: tensors without memory and values, on devices that need not be there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.equality import in_threads
from tests.zoo import language, vision
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import fake_mode, is_fake, meta_like

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
ABSENT = (RuntimeError, AssertionError, NotImplementedError)


def test_factories_give_fakes():
    with fake_mode():
        made = [
            torch.empty(2, 3),
            torch.ones(2, 3),
            torch.randn(2, 3),
            torch.full((2, 3), 4.0),
            torch.arange(6.0).reshape(2, 3),
            torch.zeros(3, 2).t(),
        ]
    for fake in made:
        assert is_fake(fake)
        assert not is_deferred(fake)
        assert (fake.shape, fake.dtype, fake.device.type) == ((2, 3), torch.float32, "cpu")
        assert not fake.is_meta
        assert "fake=True" in repr(fake)
        assert "size=(2, 3)" in repr(fake)


def test_outside_everything_is_real():
    real = torch.ones(2)
    with fake_mode():
        fake = torch.ones(2)
    assert not is_fake(real)
    assert not is_fake(torch.ones(2))
    assert is_fake(fake)


def test_operations_on_fakes():
    with fake_mode():
        left, right = torch.ones(4, 1), torch.zeros(3, dtype=torch.float64)
        total = left + right
        product = torch.ones(2, 5) @ torch.ones(5, 7)
        views = total[1:, ::2], total.t(), total.expand(2, 4, 3), total.half()
        total.add_(1)
    assert (total.shape, total.dtype) == ((4, 3), torch.float64)
    assert product.shape == (2, 7)
    assert [v.shape for v in views] == [(3, 2), (3, 4), (2, 4, 3), (4, 3)]
    assert views[0].stride() == (3, 2)
    assert views[3].dtype is torch.float16
    assert is_fake(total * 2)


def test_shape_errors_are_raised():
    with fake_mode(), pytest.raises(RuntimeError):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_fake(torch.ones(1))


@pytest.mark.parametrize("build", [language.GPT, language.Llama, vision.ResNet, vision.UNet])
def test_models(build):
    real = build()
    with fake_mode():
        model = build()
    assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in model.named_parameters()] == [
        (n, p.shape, p.dtype, p.requires_grad) for n, p in real.named_parameters()
    ]
    for parameter in model.parameters():
        assert is_fake(parameter)
        assert isinstance(parameter, nn.Parameter)
    assert not is_deferred(model)


def test_forward_and_backward_of_shapes():
    with fake_mode():
        model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
        output = model(torch.ones(3, 5))
        output.sum().backward()
    assert output.shape == (3, 2)
    assert is_fake(output)
    assert model[0].weight.grad.shape == (4, 5)


def test_a_model_larger_than_any_machine():
    with fake_mode():
        layer = nn.Linear(10**6, 10**6, bias=False)
    assert layer.weight.numel() == 10**12
    assert layer.weight.element_size() == 4


def test_values_are_not_there():
    with fake_mode():
        fake = torch.ones(3)
    for read in (
        lambda: fake[0].item(),
        lambda: fake.tolist(),
        lambda: fake.numpy(),
        lambda: bool(fake[0]),
    ):
        with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError)):
            read()
    with pytest.raises((RuntimeError, ValueError)):
        materialize_tensor(fake)


def test_random_state_does_not_move():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with fake_mode():
        nn.Linear(30, 30)
        torch.randn(100)
    assert torch.equal(torch.rand(2), expected)


def test_meta_like():
    with fake_mode():
        fakes = [
            torch.ones(4, 6, dtype=torch.bfloat16)[:, ::2],
            torch.zeros(()),
            torch.ones(2, 3).t(),
        ]
    for fake in fakes:
        meta = meta_like(fake)
        assert meta.is_meta
        assert type(meta) is torch.Tensor or isinstance(meta, nn.Parameter)
        assert (meta.shape, meta.stride(), meta.dtype) == (fake.shape, fake.stride(), fake.dtype)
    for other in (torch.ones(2), torch.ones(2, device="meta")):
        with pytest.raises(ValueError, match="fake"):
            meta_like(other)


def test_deepcopy_of_a_fake_model():
    with fake_mode():
        model = nn.Linear(3, 2)
    other = copy.deepcopy(model)
    assert is_fake(other.weight)
    assert other.weight is not model.weight
    assert isinstance(other.weight, nn.Parameter)


def test_nested_and_repeated():
    with fake_mode():
        with fake_mode():
            inner = torch.ones(1)
        assert is_fake(inner)
        assert is_fake(torch.ones(1))
    assert not is_fake(torch.ones(1))
    for _ in range(3):
        with fake_mode():
            assert is_fake(torch.zeros(1))
    assert not is_fake(torch.ones(1))


def test_exception_inside():
    with pytest.raises(KeyError), fake_mode():
        torch.ones(1)
        raise KeyError("stop")
    assert not is_fake(torch.ones(1))


def test_other_threads_are_not_in_the_mode():
    with fake_mode():
        assert is_fake(torch.ones(1))
        made = in_threads([lambda: torch.ones(2)] * 3)
    assert not any(is_fake(tensor) for tensor in made)


def test_real_arguments_are_left_alone():
    real = torch.ones(3)
    with fake_mode():
        result = real + torch.ones(3)
        assert not is_fake(real)
    assert is_fake(result)
    assert torch.equal(real, torch.ones(3))


def test_real_module_of_an_outer_scope():
    layer = nn.Linear(3, 2)
    values = layer.weight.detach().clone()
    with fake_mode():
        output = layer(torch.ones(4, 3))
    assert output.shape == (4, 2)
    assert torch.equal(layer.weight, values)


def test_materialising_a_fake_module_is_refused_or_does_nothing():
    with fake_mode():
        layer = nn.Linear(3, 2)
    try:
        materialize_module(layer)
    except (ValueError, RuntimeError) as error:
        assert "fake" in str(error)
    assert is_fake(layer.weight)


def test_deferred_tensors_inside_fake_mode():
    model = deferred_init(nn.Linear, 3, 2)
    with fake_mode():
        inner = deferred_init(nn.Linear, 3, 2)
    assert is_fake(model.weight)
    materialize_module(model)
    assert not is_fake(model.weight)
    assert is_fake(inner.weight)


# CUDA without CUDA


@no_cuda
def test_without_fake_cuda_it_fails_as_outside():
    with pytest.raises(ABSENT) as outside:
        torch.ones(2, device="cuda")
    for make in (
        lambda: torch.ones(2, device="cuda"),
        lambda: nn.Linear(2, 2, device="cuda"),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).to("cuda"),
    ):
        with fake_mode(), pytest.raises(ABSENT):
            make()
        with pytest.raises(ABSENT):
            make()
    with fake_mode(), pytest.raises(type(outside.value)):
        torch.ones(2, device="cuda")


CUDA = {
    "factory": lambda: torch.ones(2, 3, device="cuda"),
    "index": lambda: torch.ones(2, 3, device="cuda:1").to("cuda:0"),
    "device object": lambda: torch.randn(2, 3, device=torch.device("cuda", 0)),
    "number": lambda: torch.zeros(2, 3, device=torch.device("cuda")),
    "cuda()": lambda: torch.ones(2, 3).cuda(),
    "cuda(0)": lambda: torch.ones(2, 3).cuda(0),
    "to": lambda: torch.ones(2, 3).to("cuda"),
    "to with dtype": lambda: torch.ones(2, 3, dtype=torch.float64).to("cuda", torch.float32),
    "to keyword": lambda: torch.ones(2, 3).to(device="cuda"),
    "to like": lambda: torch.ones(2, 3).to(torch.empty(0, device="cuda")),
    "tensor": lambda: torch.tensor([[1.0, 2, 3], [4, 5, 6]], device="cuda"),
    "as_tensor": lambda: torch.as_tensor([[1.0, 2, 3], [4, 5, 6]], device="cuda"),
    "like": lambda: torch.zeros_like(torch.ones(2, 3), device="cuda"),
    "new": lambda: torch.ones(1, device="cuda").new_zeros(2, 3),
    "new_tensor": lambda: torch.ones(1, device="cuda").new_tensor([[1.0, 2, 3], [4, 5, 6]]),
    "sum": lambda: torch.ones(2, 3, device="cuda") + torch.ones(3, device="cuda"),
    "scalar": lambda: torch.ones(2, 3, device="cuda") * torch.tensor(2.0),
    "view": lambda: torch.ones(6, device="cuda").view(2, 3),
    "index view": lambda: torch.ones(4, 2, 3, device="cuda")[1],
    "linear": lambda: nn.Linear(3, 2, device="cuda").weight,
    "module": lambda: nn.Linear(3, 2).cuda().weight,
    "module to": lambda: nn.Linear(3, 2).to("cuda").weight,
    "parameter": lambda: nn.Parameter(torch.randn(2, 3, device="cuda")),
    "batch norm": lambda: nn.BatchNorm1d(6, device="cuda").running_mean.view(2, 3),
    "lstm": lambda: nn.LSTM(3, 2, device="cuda").weight_ih_l0[:2],
    "data": lambda: nn.Linear(3, 2, device="cuda").weight.data,
    "in place": lambda: torch.ones(2, 3, device="cuda").add_(1).mul_(2),
    "filled": lambda: torch.empty(2, 3, device="cuda").normal_().clamp_(0, 1),
    "written": lambda: (lambda t: (t[0].fill_(1), t)[1])(torch.zeros(2, 3, device="cuda")),
    "matmul": lambda: torch.ones(2, 4, device="cuda") @ torch.ones(4, 3, device="cuda"),
}


@no_cuda
@pytest.mark.parametrize("name", CUDA)
def test_fake_cuda(name):
    with fake_mode(fake_cuda=True):
        fake = CUDA[name]()
    assert is_fake(fake)
    assert fake.device == torch.device("cuda", 0)
    assert fake.is_cuda
    assert not fake.is_meta
    assert fake.get_device() == 0
    assert fake.shape == (2, 3)
    assert fake.dtype is torch.float32
    with pytest.raises(ABSENT):
        torch.ones(1, device="cuda")


@no_cuda
@pytest.mark.parametrize("name", CUDA)
def test_cuda_while_deferring(name):
    fake = deferred_init(CUDA[name])
    assert is_deferred(fake)
    assert fake.is_cuda
    assert fake.shape == (2, 3)
    with pytest.raises(RuntimeError, match="(?i)cuda"):
        materialize_tensor(fake)
    with pytest.raises(ABSENT):
        torch.ones(1, device="cuda")


@no_cuda
def test_branches_on_is_cuda():
    def build():
        layer = nn.Linear(3, 2, device="cuda")
        layer.path = "cuda" if layer.weight.is_cuda else "cpu"
        return layer

    with fake_mode(fake_cuda=True):
        assert build().path == "cuda"
    assert deferred_init(build).path == "cuda"


BACKWARD = """
import torch
from torch import nn
from torchcompat.deferred_init import deferred_init
from torchcompat.fake import fake_mode

def step():
    model = nn.Sequential(nn.Linear(5, 4, device="cuda"), nn.Tanh())
    model(torch.ones(3, 5, device="cuda")).sum().backward()
    return model[0].weight.grad

with fake_mode(fake_cuda=True):
    grads = [step()]
grads.append(deferred_init(step))
assert all(grad.is_cuda and grad.shape == (4, 5) for grad in grads)
"""


@no_cuda
def test_backward_on_fake_cuda(run_python):
    """In a process of its own: torch aborts where a CUDA tensor without CUDA reaches its engine."""
    run_python(BACKWARD)


@no_cuda
def test_availability_is_not_claimed():
    with fake_mode(fake_cuda=True):
        assert not torch.cuda.is_available() or torch.cuda.device_count() >= 0
        torch.ones(1, device="cuda")
    assert not torch.cuda.is_available()


@no_cuda
def test_fake_cuda_ends_with_the_mode_also_after_an_error():
    with pytest.raises(KeyError), fake_mode(fake_cuda=True):
        torch.ones(1, device="cuda")
        raise KeyError("stop")
    with pytest.raises(ABSENT):
        torch.ones(1, device="cuda")
    with fake_mode(), pytest.raises(ABSENT):
        torch.ones(1, device="cuda")


@no_cuda
def test_mixing_devices_is_refused_as_on_real_ones():
    with fake_mode(fake_cuda=True):
        left, right = torch.ones(3, device="cuda"), torch.ones(3)
        with pytest.raises(RuntimeError, match="(?i)device"):
            left + right


@pytest.mark.since((2, 0), "torch.device as a context")
@no_cuda
def test_device_context():
    with fake_mode(fake_cuda=True), torch.device("cuda"):
        assert torch.ones(2).is_cuda
        assert nn.Linear(2, 2).weight.is_cuda


@pytest.mark.parametrize("device", ["xla", "mps", "xpu", "hpu"])
def test_other_devices(device):
    with fake_mode():
        layer = nn.Linear(3, 2, device=device)
        table = torch.arange(3, device=device) * 2
    for fake in (layer.weight, layer.bias, table):
        assert is_fake(fake)
        assert fake.device.type == device
        assert not fake.is_meta
