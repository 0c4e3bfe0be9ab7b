"""Methods that C++ answers past the dispatcher: on a fake they give what eager gives, or its error.

Each is called on a fake inside ``deferred_init`` and on one it has returned. What needs memory that
is not there names the cure, and nothing takes the process down.
"""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from tests.equality import RELEASE, assert_equal, materialize
from torchcompat.deferred_init import deferred_init, is_deferred, materialize_module
from torchcompat.fake import is_fake

MAKE = {
    "matrix": lambda: torch.arange(4.0).reshape(2, 2) + 1,
    "image": lambda: torch.arange(16.0).reshape(1, 2, 2, 4) + 1,
    "number": lambda: torch.full((), 2),
    "parameter": lambda: nn.Parameter(torch.full((2, 2), 3.0)),
}
LAST = torch.channels_last
METHODS = {
    "cpu of a layout": ("image", lambda t: t.cpu(memory_format=LAST)),
    "to a layout": ("image", lambda t: t.to(memory_format=LAST)),
    "type": ("matrix", lambda t: t.type()),
    "type by name": ("matrix", lambda t: t.type("torch.DoubleTensor")),
    "type by class": ("matrix", lambda t: t.type(torch.DoubleTensor)),
    "type_as": ("matrix", lambda t: t.type_as(torch.ones(1).double())),
    "type_as a fake": ("matrix", lambda t: torch.ones(2).double().type_as(t)),
    "is_pinned": ("matrix", lambda t: t.is_pinned()),
    "is_shared": ("matrix", lambda t: t.is_shared()),
    "element_size": ("matrix", lambda t: t.element_size()),
    "copy": ("matrix", copy.copy),
    "copy of a parameter": ("parameter", copy.copy),
    "len": ("matrix", len),
    "len of a number": ("number", len),
    "iteration": ("matrix", list),
    "iteration of a number": ("number", list),
    "contains": ("matrix", lambda t: (2.0 in t, 9.0 in t, t[0, 0] in t)),
    "contains a word": ("matrix", lambda t: "a" in t),
    "format": ("number", lambda t: f"{t:5d}"),
    "format of many": ("matrix", lambda t: f"{t:5.1f}"),
    "format without a spec": ("number", lambda t: f"{t}"),
    "complex": ("number", complex),
    "complex of many": ("parameter", complex),
    "index": ("number", operator.index),
    "retain_grad": ("parameter", lambda t: (t.retain_grad(), (t * 2).retain_grad())),
    "retain_grad without grad": ("matrix", lambda t: t.retain_grad()),
    "hook without grad": ("matrix", lambda t: t.register_hook(print)),
    "hash": ("matrix", lambda t: hash(t) == id(t) and {t: 1}[t]),
    "weakref": ("matrix", lambda t: weakref.ref(t)() is t),
    "cuda interface": ("matrix", lambda t: t.__cuda_array_interface__),
    "array interface": ("matrix", lambda t: t.__array_interface__),
    "asarray": ("matrix", np.asarray),
    "array of a parameter": ("parameter", np.array),
    "numpy of a parameter": ("parameter", lambda t: t.numpy()),
    "dlpack": ("matrix", torch.from_dlpack),
    "dlpack of a parameter": ("parameter", torch.from_dlpack),
    "apply_": ("matrix", lambda t: t.apply_(lambda x: 2 * x)),
    "apply_ to a parameter": ("parameter", lambda t: t.apply_(abs)),
    "map_": ("matrix", lambda t: t.map_(torch.ones(2, 2), lambda a, b: a + b)),
    "detach_ of a view": ("matrix", lambda t: t[0].detach_()),
    "detach_ of a sum": ("parameter", lambda t: (t + 1).detach_()),
    "new": ("matrix", lambda t: (t.new([1, 2]), t.new(t), t.new(2, 3).shape, t.new().shape)),
    "new of a size": ("matrix", lambda t: (t.new(torch.Size([2])).shape, t.new(size=(2,)).shape)),
    "new of another dtype": ("matrix", lambda t: t.new(torch.ones(2).double())),
    "new_tensor of elements": ("matrix", lambda t: t.new_tensor([t[0, 0], t[0, 1]])),
}


def outcome(build):
    """Return what a call gives, or the class of what it raises."""
    try:
        return materialize(build())
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        return type(error)


@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True")
@pytest.mark.parametrize("name", METHODS)
def test_a_method_does_what_it_does_eagerly(name):
    kind, use = METHODS[name]
    expected = outcome(lambda: use(MAKE[kind]()))
    for build in (
        lambda: deferred_init(lambda: use(MAKE[kind]())),
        lambda: use(deferred_init(MAKE[kind])),
    ):
        found = outcome(build)
        assert_equal({"value": expected}, {"value": found})
        if not isinstance(expected, (torch.Tensor, tuple, list, np.ndarray)):
            assert found == expected


@pytest.mark.before((2, 0), why="from then on torch's own constructor serves")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_legacy_constructor_of_a_tensor(dtype):
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    made = deferred_init(lambda: torch.Tensor(parameter))
    assert (made.dtype, made.requires_grad, made.is_leaf) == (dtype, True, False)
    storage = torch.ones(3).storage()
    assert torch.equal(materialize(deferred_init(lambda: torch.Tensor(storage))), torch.ones(3))


class _Marked(nn.Parameter):
    pass


def test_a_class_may_be_assigned():
    def build():
        torch.manual_seed(0)
        first = nn.Linear(3, 3)
        first.weight.__class__ = _Marked
        second = copy.deepcopy(first)
        shifted = first.weight.detach() + 1
        return nn.ModuleDict({"first": first, "second": second}), shifted

    eager, shifted = build()
    made, later = deferred_init(build)
    made["second"].bias.__class__ = eager["second"].bias.__class__ = _Marked
    materialize_module(made)
    assert_equal(eager, made)
    assert_equal(shifted, materialize(later))
    assert type(made["first"].weight) is type(made["second"].bias) is _Marked
    made["first"](torch.ones(1, 3)).sum().backward()


def test_a_shallow_copy_shares_memory_and_attributes():
    def build():
        first = torch.zeros(3)
        if RELEASE >= (2, 0):  # before, a copy of the real one loses it
            first.mark = "m"
        return [first, copy.copy(first).add_(1)]

    first, second = materialize(deferred_init(build))
    assert_equal(build(), [first, second])
    assert first.data_ptr() == second.data_ptr()


@pytest.mark.parametrize(
    "use",
    [
        lambda m, path: torch.save(m, path / "m.pt"),
        lambda m, path: torch.save(m.state_dict(), path / "m.pt"),
        lambda m, path: pickle.dumps(m.weight),
        lambda m, path: m.share_memory(),
        lambda m, path: m.weight.untyped_storage(),
        lambda m, path: m.weight.data_ptr(),
    ],
)
def test_what_needs_memory_names_the_cure(use, tmp_path):
    module = deferred_init(nn.Linear, 2, 2)
    with pytest.raises(RuntimeError, match="Call materialize_tensor .* or materialize_module"):
        use(module, tmp_path)
    materialize_module(module)
    if RELEASE >= (2, 0):
        use(module, tmp_path)


@pytest.mark.since((2, 4), why="before, an address cannot be refused: it is null")
def test_what_asks_past_python_for_the_address_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(deferred_init(torch.ones, 2))


def test_a_scripted_module_is_given_its_values():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        eager = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
        torch.manual_seed(0)
        deferred = deferred_init(
            lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval())
        )
        assert is_deferred(deferred)
        materialize_module(deferred)
        assert not is_deferred(deferred)
        assert not any(is_deferred(t) for t in deferred.state_dict().values())
        x = torch.ones(3, 2)
        result = deferred(x)
        assert not is_fake(result)
        assert torch.equal(result, eager(x))


def test_containers_keep_their_kind_and_other_content():
    class Box(nn.Module):
        def __init__(self):
            super().__init__()
            shared = torch.ones(2)
            self.kept = {"pair": (shared, "text", [shared, 3]), "none": None}
            self.deep = [(1, (2, (shared,)))]

    box = deferred_init(Box)
    kept, pair_list = box.kept, box.kept["pair"][2]
    materialize_module(box)
    assert box.kept is kept
    assert kept["pair"][2] is pair_list
    shared = kept["pair"][0]
    assert torch.equal(shared, torch.ones(2))
    assert pair_list[0] is shared is box.deep[0][1][1][0]
    assert (kept["pair"][1], pair_list[1], kept["none"]) == ("text", 3, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a device that is not there")
def test_layouts_and_indices_on_a_device_that_is_not_there():
    def build():
        image = torch.ones(1, 2, 2, 4)
        last = image.cuda(memory_format=LAST)
        assert (last.device.index, last.stride()) == (0, (16, 1, 8, 2))
        assert last.cuda() is last.to("cuda", memory_format=LAST) is last
        assert last.to("cuda:0", memory_format=torch.contiguous_format).stride() == image.stride()
        assert last.to("cuda:0", torch.float16).stride() == last.stride()
        assert (image.cuda(1).device.index, last.cuda(1, True).device.index) == (1, 1)
        assert last.to("cuda:0", torch.float32, False, True) is not last
        assert image.xpu().device.type == "xpu"
        return last.cpu(memory_format=torch.contiguous_format)

    assert_equal(torch.ones(1, 2, 2, 4), materialize(deferred_init(build)))
