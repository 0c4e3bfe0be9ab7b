"""C1: whatever a constructor does with tensors, each comes out as eager, in any order of asking.

`CASES` are small constructors that return named tensors; every rotation and reversal of the names
is materialised, gradients are compared where there is a graph.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.equality import RELEASE, assert_equal, both, verify, verify_values
from torchcompat.deferred_init import deferred_init, is_deferred, materialize_tensor

# Views and in-place writes


def view_read_before_base_is_written():
    base = torch.zeros(4)
    early = base[:2] + 1
    view = base[1:3]
    base.fill_(5)
    return {"early": early, "view": view, "base": base}


def write_through_a_dropped_view():
    base = torch.randn(3, 4)
    base[1].mul_(3)
    base.t()[0].zero_()
    base.view(-1)[-1:].add_(7)
    return {"base": base}


def views_of_views():
    base = torch.arange(24.0).reshape(2, 3, 4)
    middle = base.permute(2, 0, 1)[1]
    inner = middle.flatten()[1:].view(-1)
    corner = base.as_strided((2, 2), (12, 1), 3)
    middle[0] = -1
    base.add_(0.5)
    corner.mul_(2)
    return {"base": base, "middle": middle, "inner": inner, "corner": corner}


def overwritten_between_reads():
    weight = torch.randn(6)
    first = weight * 1
    weight.normal_()
    second = weight * 1
    weight.uniform_()
    return {"first": first, "second": second, "weight": weight}


def half_overwritten():
    weight = torch.randn(8)
    weight[:4].fill_(1)
    weight[2:6] = torch.randn(4)
    return {"weight": weight}


def in_place_view_operators():
    turned = torch.randn(2, 3).t_()
    tall = torch.randn(3).unsqueeze_(1).add_(1)
    flat = torch.randn(1, 4, 1).squeeze_()
    swapped = torch.randn(2, 3, 4)
    row = swapped[0]
    swapped.transpose_(0, 2)
    swapped.mul_(2)
    return {"turned": turned, "tall": tall, "flat": flat, "swapped": swapped, "row": row}


def expanded_and_broadcast():
    column = torch.randn(3, 1)
    wide = column.expand(3, 4)
    grid = torch.broadcast_tensors(column, torch.zeros(4))[0]
    column.add_(1)
    return {"column": column, "wide": wide, "grid": grid, "copy": wide.contiguous()}


def dtype_views():
    floats = torch.randn(4)
    bits = floats.view(torch.int32)
    bits[0] = 0
    pairs = torch.randn(3, dtype=torch.complex64)
    reals = torch.view_as_real(pairs)
    reals[..., 1] = 2
    return {"floats": floats, "bits": bits, "pairs": pairs, "reals": reals, "imag": pairs.imag}


def conjugates_and_negatives():
    value = torch.randn(3, dtype=torch.complex64)
    conj = value.conj()
    value.mul_(1j)
    return {"value": value, "conj": conj, "negated": conj.imag, "physical": conj.resolve_conj()}


def splits_and_stacks():
    whole = torch.randn(6, 4)
    first, second = whole.split(3)
    parts = whole.chunk(2, dim=1)
    rows = torch.stack(list(whole.unbind(0))[::-1])
    second.detach().zero_()
    return {"whole": whole, "first": first, "part": parts[1], "rows": rows}


def window_views():
    line = torch.arange(10.0)
    windows = line.unfold(0, 4, 3)
    line[3:5] = -1
    diagonal = torch.randn(4, 4)
    diagonal.diagonal().fill_(9)
    diagonal.fill_diagonal_(8)
    return {"line": line, "windows": windows, "diagonal": diagonal}


def indexed_writes():
    table = torch.zeros(5, 3)
    table[torch.tensor([0, 2, 2])] = torch.randn(3, 3)
    table[:, [0, 2]] += 1
    table[table > 0.5] = -4.0
    table.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 3))
    table.scatter_(1, torch.tensor([[0], [1], [2], [0], [1]]), 6.0)
    table.masked_scatter_(torch.eye(5, 3, dtype=torch.bool), torch.randn(5))
    table.index_copy_(0, torch.tensor([4]), torch.full((1, 3), 0.25))
    torch.nn.init.constant_(table[3], 12)
    return {
        "table": table,
        "picked": table[torch.tensor([3, 0])],
        "taken": table.gather(0, torch.zeros(1, 3, dtype=torch.long)),
    }


# .data and set_


def data_assigned_then_changed():
    parameter = nn.Parameter(torch.zeros(3))
    fresh = torch.randn(3)
    parameter.data = fresh
    parameter.data.add_(1)
    return {"parameter": parameter, "fresh": fresh}


def data_of_other_shape_and_dtype():
    parameter = nn.Parameter(torch.randn(3))
    old = parameter.detach()
    parameter.data = torch.randn(2, 5, dtype=torch.float64)
    parameter.data[1].fill_(2)
    old.mul_(3)
    return {"parameter": parameter, "old": old}


def data_swapped():
    a, b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
    a.data, b.data = b.data, a.data
    a.data.mul_(2)
    return {"a": a, "b": b}


def data_of_a_view():
    parameter = nn.Parameter(torch.randn(4, 3))
    table = torch.arange(12.0)
    parameter.data = table.view(3, 4).t()
    table[0] = 99
    return {"parameter": parameter, "table": table}


def set_to_another_storage():
    target, source = torch.zeros(2), torch.randn(6)
    view = target[:1]
    target.set_(source[2:5])
    target.add_(1)
    view.fill_(4)
    return {"target": target, "source": source, "view": view}


def set_with_geometry():
    source, target = torch.randn(8), torch.empty(0)
    target.set_(source, 1, (2, 3), (3, 1)) if RELEASE >= (2, 0) else target.set_(source[1:7])
    return {"source": source, "target": target}


# Out= and foreach


def out_variants():
    left, right, out = torch.randn(3), torch.randn(3), torch.empty(3)
    torch.add(left, right, out=out)
    torch.mul(out, 2, out=left)
    values, places = torch.empty(2), torch.empty(2, dtype=torch.int64)
    torch.topk(right, 2, out=(values, places))
    filled = torch.arange(4, out=torch.empty(4))
    drawn = torch.randn(5, out=torch.empty(5))
    torch.cat([left, right], out=filled.resize_(6))
    return {
        "left": left,
        "out": out,
        "values": values,
        "places": places,
        "filled": filled,
        "drawn": drawn,
    }


def foreach():
    tensors = [torch.randn(3), torch.ones(2)]
    early = tensors[0].clone()
    torch._foreach_add_(tensors, 1.0)
    torch._foreach_mul_(tensors, [2.0, 3.0])
    torch._foreach_addcmul_(tensors, [t.clone() for t in tensors], tensors, 0.5)
    roots = torch._foreach_sqrt([t.abs() for t in tensors])
    return {"a": tensors[0], "b": tensors[1], "early": early, "root": roots[1]}


def written_by_a_fused_operator():
    mean, var = torch.zeros(3), torch.ones(3)
    nn.functional.batch_norm(torch.randn(4, 3), mean, var, training=True)
    table = torch.randn(5, 3) * 4
    nn.functional.embedding(torch.tensor([0, 3]), table, max_norm=1.0)
    return {"mean": mean, "var": var, "table": table}


# Autograd


def non_leaf_results():
    leaf = nn.Parameter(torch.randn(3, 3))
    middle = leaf * 2
    top = (middle @ leaf).tanh()
    return {"leaf": leaf, "middle": middle, "top": top, "cut": middle.detach() + 1}


def in_place_on_a_non_leaf():
    leaf = torch.randn(4, requires_grad=True)
    clone = leaf.clone()
    clone[1:3] *= 5
    clone.sigmoid_()
    return {"leaf": leaf, "clone": clone}


def graph_without_its_leaf():
    leaf = torch.randn(3, requires_grad=True)
    return {"square": leaf**2, "view": (leaf * 1)[:2]}


def requires_grad_turned_on_late():
    weight = torch.randn(3)
    before = weight * 2
    weight.requires_grad_()
    after = weight * 3
    with torch.no_grad():
        weight.add_(1)
        quiet = weight * 4
    return {"weight": weight, "before": before, "after": after, "quiet": quiet}


def frozen_and_thawed():
    layer = nn.Linear(3, 3)
    layer.weight.requires_grad = False
    fixed = layer.weight * 2
    layer.weight.requires_grad = True
    return {"layer": layer, "fixed": fixed, "free": layer.weight.sum()}


def detached_in_place():
    weight = (torch.randn(3, requires_grad=True) * 2).detach_()
    return {"weight": weight, "double": weight * 2}


def forward_inside_the_constructor():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3))
    output = model(torch.randn(5, 4))
    return {"model": model, "output": output}


def backward_inside_the_constructor():
    model = nn.Linear(4, 3)
    model(torch.randn(5, 4)).pow(2).mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return {"model": model}


def optimizer_step_inside_the_constructor():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"model": model}


# Modes


def modes():
    with torch.no_grad():
        quiet = nn.Linear(3, 2)
        made = quiet.weight * 2
    with torch.inference_mode():
        inferred = torch.randn(3) + 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = torch.randn(4, 4) @ torch.randn(4, 4)
    return {"quiet": quiet, "made": made, "inferred": inferred, "lowered": lowered}


def default_dtypes():
    found = {}
    try:
        for dtype in (torch.float64, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            number = len(found)
            found[f"layer {number}"] = nn.Linear(3, 2)
            found[f"half {number}"] = torch.arange(3) / 2
            found[f"tensor {number}"] = torch.tensor([0.1, 0.2])
            found[f"draw {number}"] = torch.randn(3)
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def every_dtype():
    names = (
        "float32 float64 float16 bfloat16 int8 uint8 int16 int32 int64 bool complex64 complex128"
    )
    made = {n: torch.arange(5).to(getattr(torch, n)) for n in names.split()}
    made["mixed"] = made["int32"] + made["float16"]
    made["scalar"] = torch.tensor(2.5, dtype=torch.float16) * made["int8"]
    return made


def layouts():
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    kept = torch.empty_like(image).normal_()
    strided = torch.empty_strided((3, 4), (1, 3)).uniform_()
    return {"image": image, "kept": kept, "strided": strided, "drawn": torch.rand_like(strided)}


def sparse():
    places = torch.tensor([[0, 1, 1], [2, 0, 2]])
    coo = torch.sparse_coo_tensor(places, torch.randn(3), (2, 3))
    return {"coo": coo, "dense": coo.to_dense() * 2, "back": torch.eye(3).to_sparse()}


def empty_things():
    return {
        "none": torch.zeros(0),
        "flat": torch.randn(0, 3),
        "layer": nn.Linear(3, 2),
        "one": torch.ones(()),
    }


# Legacy constructors


def legacy():
    like = torch.DoubleTensor([1, 2])
    return {
        "sized": torch.Tensor(3, 4).fill_(2),
        "size": torch.Tensor(torch.Size([2, 2])).normal_(),
        "listed": torch.Tensor([[1, 2], [3, 4]]),
        "typed": torch.FloatTensor(3).uniform_(),
        "half": torch.HalfTensor(2).zero_(),
        "int": torch.IntTensor([1, 2]),
        "bool": torch.BoolTensor([True, False]),
        "none": torch.Tensor(),
        "same": torch.Tensor(torch.ones(2)),
        "new": like.new(2, 2).fill_(1),
        "new_listed": like.new([3, 4]),
        "new_like": like.new(like),
        "new_size": like.new(torch.Size([3])).normal_(),
        "like": like,
    }


def legacy_as_parameters():
    weight = nn.Parameter(torch.Tensor(4, 3))
    bound = 1 / 3**0.5
    weight.data.uniform_(-bound, bound)
    other = nn.Parameter(weight.data.new(3).zero_())
    third = nn.Parameter(weight.new_empty(2, 2).normal_())
    return {"weight": weight, "other": other, "third": third}


CASES = [
    view_read_before_base_is_written,
    write_through_a_dropped_view,
    views_of_views,
    overwritten_between_reads,
    half_overwritten,
    in_place_view_operators,
    expanded_and_broadcast,
    dtype_views,
    conjugates_and_negatives,
    splits_and_stacks,
    window_views,
    indexed_writes,
    data_assigned_then_changed,
    data_of_other_shape_and_dtype,
    data_swapped,
    data_of_a_view,
    set_to_another_storage,
    set_with_geometry,
    out_variants,
    foreach,
    written_by_a_fused_operator,
    non_leaf_results,
    in_place_on_a_non_leaf,
    graph_without_its_leaf,
    requires_grad_turned_on_late,
    frozen_and_thawed,
    detached_in_place,
    forward_inside_the_constructor,
    backward_inside_the_constructor,
    optimizer_step_inside_the_constructor,
    modes,
    default_dtypes,
    every_dtype,
    layouts,
    sparse,
    empty_things,
    legacy,
    legacy_as_parameters,
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_equals_eager_in_any_order(build):
    verify_values(build)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_equals_eager_built_twice_in_a_row(build):
    """The second construction starts where the first left the generator, and materialises first."""
    verify(lambda: [build(), build()][::-1])


@pytest.mark.since((2, 0))
def test_device_as_a_context():
    def build():
        with torch.device("cpu"):
            return nn.Linear(3, 2)

    verify(build)
    with torch.device("cpu"):
        verify(nn.Linear, 3, 2)


@pytest.mark.since((2, 0))
def test_meta_tensors_stay_meta():
    def build():
        with torch.device("meta"):
            layer = nn.Linear(3, 2)
        return {"meta": layer, "filled": layer.weight.new_ones(2, device="cpu")}

    pair = both(build)
    assert pair.deferred["meta"].weight.is_meta
    verify(build)


@pytest.mark.since((2, 0))
def test_meta_module_brought_to_life():
    def build():
        layer = nn.Linear(3, 2, device="meta").to_empty(device="cpu")
        layer.reset_parameters()
        return layer

    verify(build)


@pytest.mark.since((2, 0))
def test_default_device_outside():
    torch.set_default_device("cpu")
    try:
        verify(nn.Linear, 3, 2)
    finally:
        torch.set_default_device(None)


def test_default_dtype_and_no_grad_outside():
    torch.set_default_dtype(torch.float64)
    try:
        verify(nn.LSTM, 3, 2)
        pair = both(nn.Linear, 3, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert materialize_tensor(pair.deferred.weight).dtype is torch.float64
    with torch.no_grad():
        pair = both(non_leaf_results)
    settled = {name: materialize_tensor(tensor) for name, tensor in pair.deferred.items()}
    assert_equal(pair.eager, settled)


def test_autocast_and_inference_mode_while_materialising_change_nothing():
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad()):
        pair = both(non_leaf_results)
        with context:
            settled = {name: materialize_tensor(tensor) for name, tensor in pair.deferred.items()}
        assert_equal(pair.eager, settled)


def test_whole_recording_under_inference_mode():
    with torch.inference_mode():
        verify(lambda: {"a": torch.randn(3) * 2, "b": torch.zeros(2)})


def test_reported_properties_before_materialising():
    def build():
        return {
            "parameter": nn.Parameter(torch.randn(4, 6)[:, ::2]),
            "turned": torch.empty(3, 2, dtype=torch.float16).t(),
            "long": torch.arange(5),
            "scalar": torch.tensor(1.5),
            "graph": nn.Parameter(torch.ones(2)) * 2,
        }

    pair = both(build)
    for name, real in pair.eager.items():
        fake = pair.deferred[name]
        assert is_deferred(fake)
        for query in (
            "shape dtype device layout requires_grad is_leaf is_meta is_cuda is_sparse itemsize"
        ).split():
            if RELEASE >= (2, 1) or query != "itemsize":
                assert getattr(fake, query) == getattr(real, query), (name, query)
        for query in (
            "numel dim size stride is_contiguous storage_offset element_size nelement type "
            "is_floating_point is_complex is_signed get_device is_inference"
        ).split():
            assert getattr(fake, query)() == getattr(real, query)(), (name, query)
        assert isinstance(fake, nn.Parameter) == isinstance(real, nn.Parameter)
        assert (len(fake) == len(real)) if real.dim() else True
        assert fake in {fake}
        assert "fake=True" in repr(fake)
        assert str(tuple(real.shape)).strip("()").rstrip(",") in repr(fake)


def test_functions_that_return_anything():
    assert deferred_init(lambda: None) is None
    assert deferred_init(lambda: 3) == 3
    single = deferred_init(torch.randn, 3, requires_grad=True)
    assert is_deferred(single)
    assert single.requires_grad
    verify(torch.randn, 3, requires_grad=True)
    verify(lambda: (torch.randn(3), [torch.ones(2), {"a": nn.Linear(2, 2)}]))
    verify(lambda a, *, b: torch.full((2,), a + b), 1, b=2.5)
