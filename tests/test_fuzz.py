"""A modest number of random programs; the long session is `python -m tests.fuzz`."""

from __future__ import annotations

import copy
import random
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.equality import verify_values
from tests.fuzz import programs


@pytest.fixture(autouse=True, scope="module")
def _strict():
    with programs.every_warning_an_error():
        yield


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(st.randoms(use_true_random=False))
def test_programs_come_out_as_eager(rnd):
    program = programs.write(rnd, size=10)
    reason = programs.fails(program)
    assert not reason, f"{reason}\n{program}"


@pytest.mark.parametrize("series", range(4))
def test_longer_programs_come_out_as_eager(series):
    for number in range(40):
        program = programs.write(random.Random(f"test {series} {number}"), size=24)
        reason = programs.fails(program)
        assert not reason, f"{reason}\n{programs.shrink(program)}"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda construct: [
            v * 1.5 if isinstance(v, programs.torch.Tensor) else v for v in construct()
        ],
        lambda construct: (construct(), programs.torch.rand(1))[0],
    ],
    ids=["values", "generator"],
)
def test_a_wrong_implementation_is_found_and_cut_down(monkeypatch, wrong):
    monkeypatch.setattr(programs, "deferred_init", wrong)
    monkeypatch.setattr(programs, "materialize_tensor", lambda tensor: tensor)
    monkeypatch.setattr(programs, "materialize_module", lambda module: None)
    found = [programs.write(random.Random(f"wrong {n}")) for n in range(60)]
    found = [program for program in found if programs.fails(program)]
    assert len(found) >= 10
    small = programs.shrink(found[0])
    assert programs.fails(small)
    assert len(small.inside) + len(small.after) <= 2


def test_programs_use_the_whole_grammar():
    text = "\n".join(str(programs.write(random.Random(f"use {n}"), size=30)) for n in range(150))
    for used in (
        "nn.Linear",
        ".data = ",
        "deepcopy",
        ".item()",
        "manual_seed",
        "no_grad",
        ".set_(",
        "except",
    ):
        assert used in text, used


# Programs that once came out different, cut down. Each returns what is compared, by name.


def _data_of_a_copy_then_a_write():
    weight, other = torch.randn(3, requires_grad=True), torch.empty(3)
    other.data = weight.clone()
    filled = weight.masked_fill(weight > 0, 0.5)
    with torch.no_grad():
        weight.fill_(7)
    return {"filled": filled}


def _overwritten_through_a_view():
    value = torch.randn(3, 3, requires_grad=True) * 2
    with torch.no_grad():
        value.view(3, 3).copy_(torch.ones(3, 3))
    return {"value": value}


def _overwritten_through_an_alias():
    value = torch.randn(3, 3, requires_grad=True) * 2
    value.detach().normal_()
    return {"value": value}


def _overwritten_by_a_composite():
    value = torch.randn(3, 3, requires_grad=True) * 2
    nn.init.trunc_normal_(value, std=0.02)
    return {"value": value}


def _array_of_a_parameter_without_grad_mode():
    weight = nn.Parameter(torch.randn(2))
    with torch.no_grad():
        return {"copied": torch.from_numpy(weight.numpy().copy()), "weight": weight}


def _fills_of_nothing():
    places = torch.zeros(4, 4).nonzero()
    places.random_(0, 20)
    return {"places": places}


def _view_of_a_leaf_filled_twice():
    view = nn.Parameter(torch.randn(3, 3)).squeeze()
    nn.init.uniform_(view)
    nn.init.uniform_(view)
    return {"view": view}


def _foreach_on_a_list_with_and_without_grad():
    weight, plain = torch.randn(3, requires_grad=True), torch.ones(3)
    torch._foreach_mul_([plain], [weight])
    return {"weight": weight, "plain": plain}


def _a_refused_copy_changes_nothing():
    linear = nn.Linear(16, 2)
    picked = linear.weight.t()[torch.tensor([0, -1])]
    with pytest.raises(RuntimeError):
        linear.weight.data.copy_(picked)
    return {"picked": picked}


def _graph_through_a_list_of_mixed_tensors():
    weight = torch.randn(2, requires_grad=True)
    return {"scaled": torch._foreach_mul([torch.zeros(2), weight], 2.0)[0], "weight": weight}


def _graph_from_a_write_into_given_memory():
    linear = nn.Linear(3, 1, bias=False)
    known = torch.tensor([[1.0, 2.0, 3.0]])
    known.sub_(linear.weight, alpha=0.5)
    return {"known": known, "linear": linear}


def _graph_from_a_write_into_a_view_of_given_memory():
    scale, base = nn.Parameter(torch.rand(3)), torch.randn(2, 3)
    base.numpy()
    base[0].mul_(scale)
    return {"base": base, "scale": scale}


def _data_write_is_no_version():
    weight = torch.randn(4, 4, requires_grad=True)
    product = weight @ weight
    weight.data[0] = 2
    return {"product": product, "weight": weight}


def _data_write_into_what_a_graph_saved():
    factor, weight = torch.rand(3), torch.rand(3, requires_grad=True)
    product = factor * weight
    factor.data.bernoulli_(0.5)
    return {"product": product, "weight": weight}


def _leaf_that_data_moved():
    weight = nn.Parameter(torch.randn(3, 2))
    before = weight * 2
    weight.data = torch.rand(3, 2)
    after = weight * 3
    return {"before": before, "after": after, "weight": weight}


def _leaf_that_became_half():
    linear = nn.Linear(2, 3)
    before = linear.bias.exp()
    linear.half()
    after = linear.bias[:2]
    return {"linear": linear, "before": before, "after": after}


def _leaf_that_changed_shape():
    weight = torch.randn(2, 3, requires_grad=True)
    flat = weight.flatten() * 2
    with torch.no_grad():
        weight.unsqueeze_(0)
    return {"flat": flat, "weight": weight}


def _view_that_became_a_leaf():
    base = torch.rand(3)
    leaf = base[0].requires_grad_()
    base[0] = leaf
    return {"leaf": leaf, "base": base}


def _frozen_after_a_graph():
    weight = torch.full((3, 3), -0.75).requires_grad_()
    lower = weight.tril()
    weight.requires_grad_(False)
    weight[0] = 1e-3
    return {"lower": lower}


def _copied_under_a_graph():
    base = torch.randn(2, 2)
    copied = copy.deepcopy(base)
    copied *= nn.Parameter(torch.randn(2, 2))
    return {"copied": copied}


def _squeezed_view_of_complex_numbers():
    parts = torch.view_as_real(torch.ones((), dtype=torch.complex64))
    parts.squeeze_()
    return {"parts": parts}


def _layout_of_nothing():
    turned = torch.zeros(0, 2).T
    return {"turned": torch.zeros_like(turned), "drawn": torch.rand_like(turned)}


def _output_that_cannot_be_resized():
    narrow = torch.zeros(1)
    with pytest.raises(RuntimeError):
        torch.add(narrow, torch.ones(35), out=narrow)
    return {"narrow": narrow}


def _checks_that_know_the_dimensions():
    torch.ones(2, 2).tril_()
    with pytest.raises((IndexError, RuntimeError)):
        torch.ones(2).tril_()
    with pytest.raises(RuntimeError):
        torch.zeros(4, dtype=torch.bool).copy_(torch.zeros(2, 4))
    return {"wide": torch.ones(2, 2, 3).expand(3, 2, 2, 3).clone()}


def _dropout_in_inference_mode():
    real, nothing = torch.rand(8), torch.empty(0, 2)
    with torch.inference_mode():
        dropped, same = (nn.functional.dropout(t, 0.5) for t in (real, nothing))
        detached = torch.randint(0, 9, (2,))
    detached.detach_()
    return {"dropped": dropped, "same": same, "nothing": nothing, "row": detached[None]}


def _view_of_what_a_list_wrote():
    real, written = torch.tensor(3.0, requires_grad=True), torch.rand(3, 2)
    row, empty = written[0], torch.empty(2, 0)
    column = empty[0]
    torch._foreach_mul_([written, empty], [real, real])
    return {"real": real, "written": written, "row": row, "column": column}


def _inference_tensors_that_data_made_plain():
    made = {}
    for size in (0, 3):
        with torch.inference_mode():
            made[f"leaf {size}"] = leaf = torch.randn(size, 2, requires_grad=True)
            made[f"plain {size}"] = plain = torch.randn(size, 2)
        leaf.data = leaf.clone()
        plain.data = torch.ones(size, 2)
    return made


def _leaf_that_became_integers():
    module = nn.LayerNorm(4)
    module.weight.data.copy_(module.weight)
    module.requires_grad_(False)
    module.weight.data = torch.full((2, 2), 7)
    return {"weight": module.weight}


def _detached_in_place():
    a, b = (nn.Parameter(torch.rand(4)) for _ in range(2))
    cut, again = a * b, a + b
    row = cut[None]
    for tensor in (cut, again):
        tensor.detach_()
    again.mul_(b)
    return {"a": a, "b": b, "cut": cut, "row": row, "product": b * cut, "again": again}


def _history_and_graph_of_given_memory():
    given = torch.bernoulli(torch.full((3,), 0.5))
    ordered, filled = given.sort(-1)[0], torch.zeros(3)
    doubled = filled * 2
    for tensor in (given, filled):
        tensor.numpy()[...] = 2
        tensor.requires_grad_()
    joined = torch.cat([ordered, given]) + torch.cat([doubled, filled])
    return {"joined": joined, "ordered": ordered, "given": given, "filled": filled}


def _leaf_that_a_view_moves():
    module = nn.LayerNorm(4)
    module.weight.data = torch.full((1,), 0.5)
    scalar = module.weight.squeeze()
    module.half()
    return {"module": module, "scalar": scalar, "product": module.weight * scalar}


def _views_of_one_alias():
    base = torch.randn(6)
    inner = base.data.view(-1)[1:5]
    square = inner.view(2, 2)
    base.requires_grad_()
    square.add_(base[5])
    return {"inner": inner, "square": square, "base": base}


def _one_of_several_views():
    base = torch.rand(6, 3)
    first, second = base.split(3)
    weight = nn.Parameter(torch.rand(6, 3))
    upper, _ = weight.split(3)
    with torch.no_grad():
        upper.fill_(-1)
        first.fill_(2)
    return {"base": base, "first": first, "second": second, "weight": weight}


def _set_to_itself():
    base = torch.rand(3, 4)
    wide = base.expand(3, 3, 4)
    base.set_(base)
    base.sub_(nn.Parameter(torch.rand(4)))
    return {"wide": wide}


def _set_to_what_is_written_later():
    weight, source, empty = nn.Parameter(torch.rand(3)), torch.rand(3), torch.empty(())
    part = torch.empty(())
    empty.set_(source)
    part.set_(source, 1, (2,), (1,))
    product = weight * empty + weight[:2].sum() * part.sum()
    source.tanh_()
    return {"weight": weight, "product": product, "empty": empty, "part": part}


def _sizes_of_nothing():
    with torch.no_grad():
        out = torch.randn(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # out= of another size
            torch.mul(torch.rand(3, 2).t(), 2, out=out)
    column = torch.empty(0, 2)[:, 1]
    column.unsqueeze_(0)
    return {"out": out, "column": column}


def _leaf_that_was_squeezed():
    leaf = torch.full((3,), 3.25)
    leaf.squeeze_()
    leaf.requires_grad_()
    wide = leaf.expand(3, 3)
    with torch.no_grad():
        wide.fill_(2)
    return {"wide": wide, "mean": leaf.mean(-1, keepdim=True), "leaf": leaf}


def _views_of_inference_tensors():
    with torch.inference_mode():
        tensor = torch.rand(17)
    part = tensor.view(17)[2:4]
    part.detach_()
    with torch.inference_mode():
        plain = torch.rand(3)[None].clone()
    return {"part": part, "row": tensor[None], "plain": plain.squeeze(0)}


class _Named(torch.Tensor):
    pass


def _classes_in_a_graph():
    weight, frozen = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(3), requires_grad=False)
    frozen.mul_(weight)
    named = (weight * 2).as_subclass(_Named)
    return {"weight": weight, "frozen": frozen, "named": named}


@pytest.mark.parametrize(
    "construct",
    [
        _data_of_a_copy_then_a_write,
        _overwritten_through_a_view,
        _overwritten_through_an_alias,
        _overwritten_by_a_composite,
        _array_of_a_parameter_without_grad_mode,
        _fills_of_nothing,
        _view_of_a_leaf_filled_twice,
        _foreach_on_a_list_with_and_without_grad,
        _a_refused_copy_changes_nothing,
        pytest.param(
            _graph_through_a_list_of_mixed_tensors,
            marks=pytest.mark.since((2, 1), "_foreach_mul has no derivative"),
        ),
        _graph_from_a_write_into_given_memory,
        _graph_from_a_write_into_a_view_of_given_memory,
        _data_write_is_no_version,
        _data_write_into_what_a_graph_saved,
        _leaf_that_data_moved,
        _leaf_that_became_half,
        _leaf_that_changed_shape,
        _view_that_became_a_leaf,
        _frozen_after_a_graph,
        _copied_under_a_graph,
        _squeezed_view_of_complex_numbers,
        _layout_of_nothing,
        _output_that_cannot_be_resized,
        _checks_that_know_the_dimensions,
        _dropout_in_inference_mode,
        pytest.param(
            _view_of_what_a_list_wrote,
            marks=pytest.mark.since((2, 1), "_foreach_mul has no derivative"),
        ),
        _inference_tensors_that_data_made_plain,
        _leaf_that_became_integers,
        _detached_in_place,
        _history_and_graph_of_given_memory,
        _leaf_that_a_view_moves,
        _views_of_one_alias,
        _one_of_several_views,
        _set_to_itself,
        _set_to_what_is_written_later,
        _sizes_of_nothing,
        _classes_in_a_graph,
        _leaf_that_was_squeezed,
        _views_of_inference_tensors,
    ],
    ids=lambda construct: construct.__name__.strip("_"),
)
def test_once_different(construct):
    verify_values(construct)
