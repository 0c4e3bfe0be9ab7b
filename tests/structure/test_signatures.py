"""The public functions, as clients call them: a change here is a change for every one of them."""

from __future__ import annotations

import importlib
import inspect

import pytest

PUBLIC = {
    "torchcompat.deferred_init": {
        "deferred_init": "(module_fn, *args, **kwargs)",
        "is_deferred": "(obj)",
        "materialize_tensor": "(tensor)",
        "materialize_module": "(module, buffers_only=False, check_fn=None, *, recurse=True,"
        " num_threads=None, progress=False)",
    },
    "torchcompat.fake": {
        "fake_mode": "(*, fake_cuda=False)",
        "is_fake": "(tensor)",
        "meta_like": "(fake)",
    },
}
OLD = {
    "enter_deferred_init",
    "leave_deferred_init",
    "enable_deferred_init",
    "can_materialize",
    "materialize_tensor",
    "is_fake",
    "meta_like",
    "enter_fake_mode",
    "leave_fake_mode",
    "is_gen_by_random_op",
    "materialize_tensor_with_local_shape",
}


def signature(function) -> str:
    """Return a signature without its annotations."""
    found = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return str(inspect.Signature(bare))


@pytest.mark.parametrize("name", PUBLIC)
def test_signatures(name):
    module = importlib.import_module(name)
    assert {each: signature(getattr(module, each)) for each in module.__all__} == PUBLIC[name]


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_function_is_documented(name):
    module = importlib.import_module(name)
    assert module.__doc__
    assert all(inspect.getdoc(getattr(module, each)) for each in module.__all__)


def test_what_old_clients_call():
    module = importlib.import_module("torchcompat._C")
    assert {name for name in OLD if not callable(getattr(module, name, None))} == set()
