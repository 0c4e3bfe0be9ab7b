"""C8: whatever ends a construction, torch is afterwards as it was, on every thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from tests.equality import assert_equal, both, in_threads, materialize, verify
from tests.zoo import language
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import fake_mode, is_fake

# What must be the same objects before and after; patched attributes show here.
WATCHED = {
    torch: (
        "tensor as_tensor manual_seed get_rng_state set_rng_state Tensor FloatTensor empty zeros"
    ).split(),
    torch.Tensor: (
        "data __new__ __deepcopy__ numpy tolist cuda to new __repr__ _make_subclass"
    ).split(),
    torch.cuda: ["_lazy_init", "is_available"],
    torch.nn.init: ["trunc_normal_", "normal_", "orthogonal_"],
    nn.Parameter: ["__new__", "__deepcopy__", "__instancecheck__"],
    nn.UninitializedParameter: ["__new__", "materialize"],
    nn.Module: ["__setattr__", "register_buffer", "_apply", "__getattr__"],
    torch.Generator: ["manual_seed", "get_state", "set_state"],
    torch.random: ["manual_seed", "get_rng_state", "fork_rng"],
}
MISSING = object()


def snapshot():
    found = {
        (owner, name): getattr(owner, name, MISSING)
        for owner, names in WATCHED.items()
        for name in names
    }
    own = {(owner, name): name in vars(owner) for owner, names in WATCHED.items() for name in names}
    return found, own, torch.empty(0).device, torch.get_default_dtype(), type(torch.zeros(1))


class Stop(BaseException):
    """Not an Exception: an interrupt, as from the keyboard."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, Stop, StopIteration])
def test_exception_in_the_constructor(error):
    before = snapshot()

    def build():
        layer = nn.Linear(3, 2)
        torch.randn(3)
        raise error(layer.weight.shape)

    with pytest.raises(error):
        deferred_init(build)
    assert snapshot() == before
    assert not is_fake(torch.zeros(2))
    assert not is_fake(nn.Linear(2, 2).weight)
    verify(nn.Linear, 3, 2)


def test_ordinary_exit_and_materialising_leave_nothing():
    before = snapshot()
    model = deferred_init(language.GPT)
    assert snapshot() == before
    materialize_module(model)
    assert snapshot() == before


def test_the_error_is_the_users_own():
    def build():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        deferred_init(build)
    assert error.value.__cause__ is None
    assert error.traceback[-1].name == "build"


def test_tensors_of_a_failed_construction_work_on():
    kept = []

    def build():
        kept.append(nn.Linear(3, 2))
        raise ValueError

    torch.manual_seed(1)
    eager = nn.Linear(3, 2)
    torch.manual_seed(1)
    with pytest.raises(ValueError):  # noqa: PT011
        deferred_init(build)
    assert is_deferred(kept[0])
    materialize_module(kept[0])
    assert_equal(eager, kept[0])


def test_error_in_a_nested_construction():
    def inner():
        nn.Linear(2, 2)
        raise ValueError("inner")

    def outer():
        first = nn.Linear(3, 3)
        with pytest.raises(ValueError, match="inner"):
            deferred_init(inner)
        second = nn.Linear(3, 2)
        assert is_deferred(second)
        return nn.Sequential(first, second)

    def plain():
        first = nn.Linear(3, 3)
        nn.Linear(2, 2)
        return nn.Sequential(first, nn.Linear(3, 2))

    torch.manual_seed(0)
    eager = plain()
    torch.manual_seed(0)
    deferred = deferred_init(outer)
    materialize(deferred)
    assert_equal(eager, deferred)
    assert not is_fake(torch.zeros(1))


def test_nested_construction_returns_to_the_outer_one():
    def build():
        first = deferred_init(nn.Linear, 3, 3)
        assert is_deferred(first)
        second = nn.Linear(3, 3)
        assert is_deferred(second)
        return nn.Sequential(first, second)

    deferred = deferred_init(build)
    assert not is_fake(torch.zeros(1))
    materialize_module(deferred)


def test_other_threads_see_nothing_of_a_recording():
    inside, done = threading.Event(), threading.Event()
    seen = []

    def build():
        inside.set()
        assert done.wait(20)
        return nn.Linear(3, 2)

    def watch():
        assert inside.wait(20)
        seen.extend(
            [torch.zeros(3), nn.Linear(2, 2).weight, torch.tensor([1.0]), torch.Tensor(2, 2)]
        )
        done.set()

    worker = threading.Thread(target=watch)
    worker.start()
    model = deferred_init(build)
    worker.join()
    assert is_deferred(model)
    assert [is_fake(t) for t in seen] == [False] * 4
    assert type(seen[1]) is nn.Parameter


def test_threads_record_at_once():
    """They share the visible generator, so the values depend on the race; all else must not."""
    before = snapshot()
    models = in_threads([lambda: deferred_init(language.GPT)] * 4)
    assert snapshot() == before
    for model in models:
        assert all(is_deferred(p) for p in model.parameters())
        materialize_module(model)
        assert not is_deferred(model)
        assert torch.isfinite(model(torch.zeros(1, 2, dtype=torch.int64))).all()


def test_threads_record_with_their_own_generators():
    def build(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(20, generator=generator), torch.rand(3, generator=generator)]

    deferred = in_threads([lambda seed=seed: deferred_init(build, seed) for seed in range(6)])
    for seed in range(6):
        assert_equal(build(seed), materialize(deferred[seed]))


def test_a_thread_started_by_the_constructor_makes_real_tensors():
    made = []

    def build():
        worker = threading.Thread(target=lambda: made.append(torch.ones(3)))
        worker.start()
        worker.join()
        return nn.Linear(3, 2).register_buffer("made", made[0]) or made[0] * torch.ones(3)

    tensor = deferred_init(build)
    assert not is_fake(made[0])
    assert_equal(torch.ones(3), materialize_tensor(tensor))


def test_recording_inside_user_modes():
    with torch.no_grad():
        pair = both(nn.Linear, 3, 2)
        assert not torch.is_grad_enabled()
    materialize(pair.deferred)
    assert_equal(*pair)

    def leaves_grad_off():
        torch.set_grad_enabled(False)
        return torch.nn.Parameter(torch.randn(3))

    try:
        pair = both(leaves_grad_off)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert_equal(pair.eager, materialize_tensor(pair.deferred))


def test_settings_made_by_the_constructor_stay_as_in_eager():
    def build():
        torch.set_default_dtype(torch.float64)
        return torch.randn(3)

    try:
        pair = both(build)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert_equal(pair.eager, materialize_tensor(pair.deferred))


def test_inside_other_dispatch_modes():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            type(self).seen += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        model = deferred_init(nn.Linear, 3, 2)
    materialize_module(model)
    assert type(model.weight) is nn.Parameter
    with Counting():
        assert type(torch.zeros(2)) is torch.Tensor


@pytest.mark.since((2, 0), "TorchFunctionMode")
def test_inside_a_function_mode():
    from torch.overrides import TorchFunctionMode

    class Passing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Passing():
        pair = both(language.GPT)
    materialize(pair.deferred)
    assert_equal(*pair)


def test_fake_mode_inside_and_around_deferral():
    def build():
        with fake_mode():
            fake = torch.ones(3)
        assert is_fake(fake)
        assert not is_deferred(fake)
        return nn.Linear(3, 2)

    model = deferred_init(build)
    assert is_deferred(model)
    materialize_module(model)
    assert not is_fake(torch.zeros(1))


def test_generator_function_left_half_way():
    """A constructor that stops in a `with` block of its own still cleans up."""

    def build():
        with torch.no_grad():
            for _ in range(3):
                yield nn.Linear(2, 2)

    steps = build()
    model = deferred_init(lambda: next(steps))
    steps.close()
    assert is_deferred(model)
    assert torch.is_grad_enabled()
    assert not is_fake(torch.zeros(1))
