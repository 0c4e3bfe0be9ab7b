"""What the known users of torchdistx call, in our own words, through `import torchdistx`.

Each section names a client and makes the same calls it makes. FSDP has `test_fsdp.py`; the
optimizers of the Trainer have their own tests.
"""

from __future__ import annotations

import contextlib
import importlib.util

import pytest
import torch
from torch import nn

import torchcompat.deferred_init
import torchcompat.fake
import torchdistx
from tests.equality import assert_equal, both, materialize, raw, seed_all
from tests.zoo import language, vision
from tests.zoo.habits import Bag, tied_embedding_and_head
from torchdistx import deferred_init, fake


def eager_and_deferred(fn, *args, seed=1, **kwargs):
    """As `both`, by the names that clients use."""
    seed_all(seed)
    eager = fn(*args, **kwargs)
    seed_all(seed)
    return eager, deferred_init.deferred_init(fn, *args, **kwargs)


def test_the_modules_are_the_same_objects():
    assert fake is torchcompat.fake is torchdistx.fake
    assert deferred_init is torchcompat.deferred_init is torchdistx.deferred_init
    from torchdistx.deferred_init import deferred_init as function

    assert function is torchcompat.deferred_init.deferred_init
    assert callable(function)
    assert not callable(deferred_init)


# Torch FSDP1: what it relies on before and after materialising


def test_what_fsdp_asks_of_a_deferred_parameter():
    model = deferred_init.deferred_init(language.Llama)
    parameters = list(model.parameters())
    assert any(fake.is_fake(p) for p in parameters)
    ignored = set(parameters[:2])
    assert [p in ignored for p in parameters[:4]] == [True, True, False, False]
    for parameter in parameters:
        assert not parameter.is_meta
        assert parameter.device == torch.device("cpu")
        assert parameter.dtype is torch.float32
        assert parameter.numel() == parameter.nelement() > 0
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is None
        assert hash(parameter) == id(parameter)
    assert sum(p.numel() * p.element_size() for p in parameters) > 0
    assert {p.device for p in parameters} == {torch.device("cpu")}


def test_check_fn_false_on_a_module_does_not_stop_below_it():
    eager, model = eager_and_deferred(language.Llama)
    skipped = model.layers[0]
    deferred_init.materialize_module(model, check_fn=lambda module: module is not skipped)
    assert not deferred_init.is_deferred(model)  # its own tensors are in children
    assert_equal(eager, model)


def test_overlapping_and_repeated_calls_from_the_outside_in():
    eager, model = eager_and_deferred(language.GPT)
    deferred_init.materialize_module(model.h[0], check_fn=lambda module: True)
    first = dict(model.h[0].named_parameters())
    for module in (model, model.h, *model.h, model):
        deferred_init.materialize_module(module, check_fn=lambda module: True)
    assert all(p is first[name] for name, p in model.h[0].named_parameters())
    assert_equal(eager, model)


def test_module_of_modules_with_a_user_init_function():
    """torch's `test_fsdp_meta`: a function that materialises, called once for every module."""

    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    def build(device):
        return Wrapped(nn.Sequential(nn.Linear(3, 3, device=device), Wrapped(nn.Linear(3, 3))))

    eager, model = eager_and_deferred(build, device="cpu")
    for module in model.modules():
        deferred_init.materialize_module(module, check_fn=lambda k: not isinstance(k, Wrapped))
    assert_equal(eager, model)


# Torch_xla FSDP


def test_xla_as_a_device_of_the_constructor():
    def build(device):
        model = nn.Sequential(nn.Linear(4, 4, device=device), nn.LayerNorm(4, device=device))
        model.register_buffer("table", torch.zeros(4, device=device))
        return model

    model = deferred_init.deferred_init(build, device="xla")
    for tensor in [*model.parameters(), *model.buffers()]:
        assert fake.is_fake(tensor)
        assert tensor.device.type == "xla"
        assert not tensor.is_meta
    with pytest.raises(RuntimeError, match="(?i)xla"):
        deferred_init.materialize_module(model)


# Lightning


def test_lightning_finds_the_submodule():
    assert importlib.util.find_spec("torchdistx.deferred_init") is not None
    assert importlib.util.find_spec("torchdistx.fake") is not None
    assert importlib.util.find_spec("torchdistx.nonexistent") is None


def test_lightning_materialises_every_module_also_ordinary_ones():
    model = vision.ResNet()
    before = {name: (p, p._version, raw(p)) for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    assert not any(fake.is_fake(t) for t in [*model.parameters(), *model.buffers()])
    for _ in range(2):
        deferred_init.materialize_module(model)
    for name, parameter in model.named_parameters():
        old, version, data = before[name]
        assert parameter is old
        assert (parameter._version, raw(parameter)) == (version, data)
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


# AWS neuronx-distributed


def test_neuronx_stages_and_parameter_attributes():
    def build():
        model = language.Llama()
        for layer in model.layers:
            for name, parameter in layer.named_parameters():
                parameter.tensor_model_parallel = name.endswith("_proj.weight")
                parameter.partition_dim = 1 if "down" in name or "o_proj" in name else 0
                parameter.partition_stride = 1
        return model

    eager, model = eager_and_deferred(build)
    for parameter in model.parameters():
        assert fake.is_fake(parameter)
    stage = model.layers[1]
    deferred_init.materialize_module(stage)
    assert_equal(eager.layers[1], stage)
    assert all(p.partition_stride == 1 for p in stage.parameters())
    assert fake.is_fake(model.layers[0].self_attn.q_proj.weight)
    deferred_init.materialize_module(model)
    assert_equal(eager, model)


# SageMaker


def test_sagemaker_switches_recording_on_and_off():
    from torchdistx.deferred_init import _C

    seed_all(3)
    eager = Bag(layer=nn.Linear(3, 2))
    eager.loose = torch.randn(4)
    seed_all(3)
    _C.enable_deferred_init(True)
    try:
        model = Bag(layer=nn.Linear(3, 2))
        model.loose = torch.randn(4)
    finally:
        _C.enable_deferred_init(False)
    assert not fake.is_fake(torch.zeros(1))
    assert fake.is_fake(model.loose)
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            real = deferred_init.materialize_tensor(parameter).to(parameter.dtype)
            setattr(module, name, nn.Parameter(real))
    model.loose = deferred_init.materialize_tensor(model.loose).to(model.loose.dtype)
    assert_equal(eager, model)


def test_sagemaker_context_around_user_code():
    from torchdistx.deferred_init import _C

    @contextlib.contextmanager
    def delayed():
        _C.enable_deferred_init(True)
        try:
            yield
        finally:
            _C.enable_deferred_init(False)

    with pytest.raises(KeyError), delayed():
        assert fake.is_fake(nn.Linear(2, 2).weight)
        raise KeyError("user")
    assert not fake.is_fake(nn.Linear(2, 2).weight)
    seed_all(2)
    eager, after = nn.Linear(3, 3), torch.rand(3)
    seed_all(2)
    with delayed():
        model = nn.Linear(3, 3)
    assert_equal(after, torch.rand(3))
    assert_equal(eager, materialize(model))


def test_enter_and_leave_come_in_pairs():
    from torchdistx.deferred_init import _C

    _C.enter_deferred_init()
    try:
        _C.enter_deferred_init()
        first = torch.ones(2)
        _C.leave_deferred_init()
        second = torch.ones(2)
    finally:
        _C.leave_deferred_init()
    assert fake.is_fake(first)
    assert fake.is_fake(second)
    assert not fake.is_fake(torch.ones(2))
    _C.enter_fake_mode(False)
    try:
        third = torch.ones(2)
    finally:
        _C.leave_fake_mode()
    assert fake.is_fake(third)
    assert not fake.is_fake(torch.ones(2))
    assert _C.can_materialize(first)
    assert not _C.can_materialize(third)
    assert not _C.can_materialize(torch.ones(2))
    assert _C.is_fake(first)
    assert not _C.is_fake(torch.ones(2))
    assert _C.meta_like(first).is_meta


# VeScale


FACTORIES = {
    "ones": lambda: torch.ones(6, 4),
    "zeros": lambda: torch.zeros(6, 4, dtype=torch.float64),
    "empty, filled": lambda: torch.empty(6, 4).fill_(3),
    "full": lambda: torch.full((6, 4), 2.0),
    "rand": lambda: torch.rand(6, 4),
    "randn": lambda: torch.randn(6, 4),
    "arange": lambda: torch.arange(24.0).reshape(6, 4),
}
RANDOM = {"rand", "randn"}


@pytest.mark.parametrize("name", FACTORIES)
def test_vescale_defers_tensor_factories(name):
    from torchdistx.deferred_init import _C

    eager, tensor = eager_and_deferred(FACTORIES[name])
    assert deferred_init.is_deferred(tensor)
    assert fake.is_fake(tensor)
    assert _C.is_fake(tensor)
    if name != "arange":
        assert _C.is_gen_by_random_op(tensor) == (name in RANDOM)
    real = _C.materialize_tensor(tensor)
    assert_equal(eager, real)
    assert not deferred_init.is_deferred(real)


@pytest.mark.since((2, 0), "torch.device as a context")
def test_vescale_under_the_meta_device():
    tensor = deferred_init.deferred_init(torch.ones, 3)
    with torch.device("meta"):
        real = deferred_init.materialize_tensor(tensor)
    assert_equal(torch.ones(3), real)
    with torch.device("meta"):
        inner = deferred_init.deferred_init(torch.ones, 3)
        assert torch.ones(1).is_meta
    assert inner.shape == (3,)


@pytest.mark.parametrize("name", ["ones", "zeros", "full", "rand", "randn", "empty, filled"])
def test_vescale_materialises_a_local_shape(name):
    from torchdistx.deferred_init import _C

    tensor = deferred_init.deferred_init(FACTORIES[name])
    local = _C.materialize_tensor_with_local_shape(tensor, torch.Size([3, 4]), torch.device("cpu"))
    assert not fake.is_fake(local)
    assert local.shape == (3, 4)
    assert local.dtype == tensor.dtype
    if name not in RANDOM:
        assert torch.equal(local, FACTORIES[name]()[:3])


def test_vescale_allocates_the_local_shape_only():
    from torchdistx.deferred_init import _C

    huge = deferred_init.deferred_init(torch.ones, 1_000_000, 1_000_000)  # 4 TB
    local = _C.materialize_tensor_with_local_shape(huge, torch.Size([2, 5]), torch.device("cpu"))
    assert torch.equal(local, torch.ones(2, 5))


# Alpa


def test_alpa_leaves_meta_parameters():
    model = deferred_init.deferred_init(language.Llama)._apply(fake.meta_like)
    for parameter in model.parameters():
        assert parameter.is_meta
        assert isinstance(parameter, nn.Parameter)
    assert model.embed_tokens.weight.shape == (31, 16)
    model = deferred_init.deferred_init(language.Llama).to("meta")
    assert all(parameter.is_meta for parameter in model.parameters())


# TorchAcc, FlashModels, ATorch


def test_what_wrapping_left_over_is_materialised():
    eager, model = eager_and_deferred(language.GPT)
    for block in model.h:
        deferred_init.materialize_module(block)
    left = [name for name, p in model.named_parameters() if fake.is_fake(p)]
    assert sorted(left) == ["ln_f.bias", "ln_f.weight", "wpe.weight", "wte.weight"]
    for module in model.modules():
        if any(fake.is_fake(p) for p in module.parameters(recurse=False)):
            deferred_init.materialize_module(module)
    assert_equal(eager, materialize(model))


# Mup


def test_mup_compares_shapes_and_never_materialises():
    shapes = {}
    for width in (24, 48):
        model = deferred_init.deferred_init(language.MupMLP, width=width)
        shapes[width] = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert deferred_init.is_deferred(model)
        assert all(p.infshape for p in model.parameters())
    assert shapes[24] != shapes[48]
    real = language.MupMLP(24)
    assert shapes[24] == {name: tuple(p.shape) for name, p in real.named_parameters()}


# Compute-better-spent


def test_some_layers_are_swapped_for_real_ones():
    def build(depth):
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(depth)])
        for parameter in model.parameters():
            parameter.lr_mult = 1.0
        return model

    eager, model = eager_and_deferred(build, depth=4)
    real = nn.Linear(4, 4)
    for candidate in (eager, model):
        candidate[2] = real
        for parameter in candidate[1].parameters():
            parameter.lr_mult = 0.25
    deferred_init.materialize_module(model)
    assert model[2] is real
    assert [getattr(p, "lr_mult", None) for p in model.parameters()] == [
        1.0, 1.0, 0.25, 0.25, None, None, 1.0, 1.0,
    ]  # fmt: skip
    assert_equal(eager, model)


# Yanmtt


def test_a_real_checkpoint_inside_and_freezing_afterwards(tmp_path):
    path = tmp_path / "model.pt"
    torch.manual_seed(8)
    torch.save({"embed.weight": torch.randn(7, 4)}, path)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)

        @classmethod
        def from_pretrained(cls, path, config=None):
            model = cls()
            keywords = {"weights_only": True}
            model.load_state_dict(torch.load(path, **keywords), strict=False)
            model.config = config
            return model

    eager, model = eager_and_deferred(Model.from_pretrained, path, config={"a": 1})
    for candidate in (eager, model):
        candidate.embed.weight.requires_grad = False
        for parameter in candidate.head.parameters():
            parameter.requires_grad_(False)
        candidate.head.bias.requires_grad = True
    deferred_init.materialize_module(model)
    assert [p.requires_grad for p in model.parameters()] == [False, False, True]
    assert_equal(eager, model)


# XLA scripts of 2022


def test_is_deferred_and_one_level_at_a_time():
    eager, model = eager_and_deferred(language.Llama)
    assert deferred_init.is_deferred(model)
    for module in model.modules():
        deferred_init.materialize_module(module, recurse=False)
    assert not deferred_init.is_deferred(model)
    assert_equal(eager, model)


# Guards


def test_guards_that_ask_about_anything():
    guard = getattr(fake, "is_fake", None)
    subjects = [None, 0, "", [], nn.Linear(1, 1), torch.float32, torch.Size([1]), object, torch]
    assert not any(guard(subject) for subject in subjects)
    assert not guard(nn.UninitializedParameter())
    assert not guard(torch.empty(1, device="meta"))
    assert not guard(torch.eye(2).to_sparse())


def test_users_who_say_half_and_to():
    for change in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu")):
        eager, model = eager_and_deferred(tied_embedding_and_head)
        for candidate in (eager, model):
            change(candidate)
        deferred_init.materialize_module(model)
        assert_equal(eager, model)


def test_the_callable_may_be_anything():
    class Factory:
        def __call__(self, size, *, bias):
            return nn.Linear(size, size, bias=bias)

        def method(self, size):
            return nn.Linear(size, size)

    for fn, args, kwargs in (
        (Factory(), (3,), {"bias": False}),
        (Factory().method, (3,), {}),
        (lambda: nn.Linear(2, 2), (), {}),
        (nn.Linear, (3,), {"out_features": 2}),
        (torch.nn.Sequential, (nn.Identity(),), {}),
    ):
        eager, model = eager_and_deferred(fn, *args, **kwargs)
        deferred_init.materialize_module(model)
        assert_equal(eager, model)


def test_both_names_agree_on_a_model():
    pair = both(nn.Linear, 3, 2)
    assert fake.is_fake(pair.deferred.weight)
    deferred_init.materialize_module(pair.deferred)
    assert_equal(*pair)
