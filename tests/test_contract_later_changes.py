"""C5: what the program does to a deferred model before materialising it counts, as in eager."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tests.equality import ORDERS, RELEASE, assert_equal, both, materialize, settle
from tests.zoo import habits, language
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)


def small():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Embedding(6, 3, padding_idx=0))
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    return model


def rescale(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
        parameter.data[0] += 1


def normalise(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.mean()).div_(2)


def assign_data(model):
    model[0].weight.data = torch.arange(20.0).reshape(4, 5) / 3
    model[0].bias.data = model[0].bias.data.exp()
    model[2].weight.data = model[2].weight.data[1:4]


def initialise_again(model):
    torch.manual_seed(33)
    nn.init.orthogonal_(model[0].weight)
    nn.init.trunc_normal_(model[2].weight, std=0.02)
    model[1].reset_parameters()


def rebuild(model):
    model[0].weight = nn.Parameter(model[0].weight[:2].clone())
    model[0].bias = None
    model.register_buffer("new", model[2].weight.detach() * 2)
    model.extra = nn.Linear(2, 2)
    del model.table


CHANGES = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "half and back": lambda model: model.half().float(),
    "double, then float16": lambda model: model.double().to(torch.float16),
    "channels_last": lambda model: model.to(memory_format=torch.preserve_format),
    "cpu": lambda model: model.cpu().to("cpu"),
    "requires_grad": lambda model: model.requires_grad_(False)[0].requires_grad_(True),
    "freeze": lambda model: [setattr(p, "requires_grad", False) for p in model.parameters()],
    "apply": lambda model: model.apply(lambda m: getattr(m, "reset_parameters", int)()),
    "eval": lambda model: model.eval(),
    "share": lambda model: model[0].register_parameter("bias", model[1].bias),
    "rescale": rescale,
    "normalise": normalise,
    "assign data": assign_data,
    "initialise again": initialise_again,
    "rebuild": rebuild,
}


@pytest.mark.parametrize("order", ["whole", "shuffled", "by child"])
@pytest.mark.parametrize("change", CHANGES)
def test_change_after_deferral(change, order):
    pair = both(small)
    for model in pair:
        torch.manual_seed(5)
        CHANGES[change](model)
    assert is_deferred(pair.deferred)
    settle(pair, order)


@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
def test_reported_dtype_is_the_one_given(change):
    pair = both(small)
    for model in pair:
        CHANGES[change](model)
    for real, fake in zip(pair.eager.state_dict().values(), pair.deferred.state_dict().values()):
        assert (fake.dtype, fake.shape, fake.device) == (real.dtype, real.shape, real.device)


@pytest.mark.parametrize("change", CHANGES)
def test_change_after_one_part_is_real(change):
    """The first layer is materialised, the rest is not, then the whole model is changed."""
    pair = both(small)
    materialize(pair.deferred[0])
    for model in pair:
        torch.manual_seed(5)
        CHANGES[change](model)
    settle(pair, "whole")


def test_several_changes_in_a_row():
    pair = both(language.GPT)
    for model in pair:
        model.half()
        model.lm_head.weight.data[1:3] = 7
        model.float().requires_grad_(False)
        model.wpe.weight.requires_grad_()
    settle(pair, "shuffled")


def test_to_after_tie_keeps_the_tie():
    pair = both(habits.tied_embedding_and_head)
    for model in pair:
        model.to(torch.float64)
    materialize(pair.deferred)
    assert_equal(*pair)


def test_deepcopy_of_the_deferred_model():
    pair = both(small)
    copies = [copy.deepcopy(model) for model in pair]
    with torch.no_grad():
        for model in copies:
            model[0].weight.add_(1)
        for model in pair:
            model[0].bias.zero_()
    assert is_deferred(copies[1])
    materialize(copies[1])
    assert is_deferred(pair.deferred)
    materialize(pair.deferred)
    assert_equal(*pair)
    assert_equal(*copies)
    shared = {id(p) for p in pair.deferred.parameters()} & {id(p) for p in copies[1].parameters()}
    assert not shared


def test_deepcopy_draws_nothing_and_treats_ties_and_attributes_as_eager():
    pair = both(habits.tied_embedding_and_head)
    for model in pair:
        model.embed.weight.mark = [1]
    state = torch.get_rng_state()
    copies = [copy.deepcopy(model) for model in pair]
    assert torch.equal(torch.get_rng_state(), state)
    materialize(copies[1])
    assert copies[1].embed.weight is copies[1].head.weight
    assert_equal(*copies)


def test_deepcopy_of_a_tensor_and_of_its_view():
    def build():
        base = torch.randn(4, 3)
        return [base, base[1:]]

    pair = both(build)
    copies = [copy.deepcopy(values) for values in pair]
    assert_equal(copies[0], materialize(copies[1]))


def test_shallow_copy_shares_tensors():
    model = deferred_init(nn.Linear, 3, 2)
    other = copy.copy(model)
    materialize_module(model)
    materialize_module(other)
    assert other.weight is model.weight or torch.equal(other.weight, model.weight)


def test_pickle_works_or_says_why_not():
    for build in (lambda: torch.randn(3), lambda: nn.Linear(3, 2)):
        pair = both(build)
        try:
            data = pickle.dumps(pair.deferred)
        except (TypeError, RuntimeError, NotImplementedError, ValueError) as error:
            assert "materializ" in str(error).lower()  # the way out
        else:
            assert_equal(pair.eager, materialize(pickle.loads(data)))


# Loading


def saved():
    torch.manual_seed(123)
    return {name: value.clone() + 1 for name, value in small().state_dict().items()}


ASSIGN = [False, True] if RELEASE >= (2, 1) else [False]


def load(model, state, assign, **kwargs):
    return model.load_state_dict(state, **kwargs, **({"assign": True} if assign else {}))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("assign", ASSIGN)
def test_load_state_dict(assign, order):
    pair = both(small)
    state = saved()
    for model in pair:
        load(model, {k: v.clone() for k, v in state.items()}, assign)
    settle(pair, order)


@pytest.mark.parametrize("assign", ASSIGN)
def test_missing_keys_keep_their_eager_values(assign):
    pair = both(small)
    state = {name: value for name, value in saved().items() if name not in ("0.bias", "2.weight")}
    answers = [
        load(model, {k: v.clone() for k, v in state.items()}, assign, strict=False)
        for model in pair
    ]
    assert answers[0] == answers[1]
    assert sorted(answers[1].missing_keys) == ["0.bias", "2.weight"]
    settle(pair, "shuffled")


def test_strict_loading_refuses_as_eager_does():
    pair = both(small)
    state = saved()
    del state["0.bias"]
    state["2.weight"] = torch.zeros(1, 1)
    messages = []
    for model in pair:
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(state)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    settle(pair, "whole")


@pytest.mark.parametrize("assign", ASSIGN)
@pytest.mark.parametrize(
    "keys", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")]
)
def test_load_into_a_tied_model(keys, assign):
    pair = both(habits.tied_embedding_and_head)
    value = torch.arange(28.0).reshape(7, 4)
    for model in pair:
        load(model, {key: value.clone() for key in keys}, assign, strict=False)
    materialize(pair.deferred)
    assert_equal(*pair)


def test_checkpoint_changed_after_loading():
    """The values at loading count, or an error says that they are gone; never the changed ones."""
    pair = both(nn.Linear, 5, 4)
    for size in (1, 100):
        state = {"weight": torch.full((4, 5), 2.0), "bias": torch.full((4,), 3.0)}
        pair = both(nn.Linear, 5, 4)
        for model in pair:
            model.load_state_dict(state)
        for value in state.values():
            value.mul_(size)
        try:
            materialize(pair.deferred)
        except RuntimeError as error:
            assert "changed" in str(error) or "modified" in str(error)
        else:
            assert_equal(pair.eager, pair.deferred)


def test_loading_from_a_deferred_model():
    """A deferred state dict goes into a real module at once, and into a deferred one when asked."""
    pair = both(small)
    torch.manual_seed(1)
    targets = [small(), small(), deferred_init(small)]
    targets[0].load_state_dict(pair.eager.state_dict())
    targets[1].load_state_dict(pair.deferred.state_dict())
    targets[2].load_state_dict(pair.deferred.state_dict())
    assert not is_deferred(targets[1])
    materialize(targets[2])
    for target in targets:
        assert_equal(pair.eager.state_dict(), dict(target.state_dict()))


def test_real_and_deferred_tensors_meet_outside():
    torch.manual_seed(0)
    eager = nn.Linear(3, 3)
    torch.manual_seed(0)
    layer = deferred_init(nn.Linear, 3, 3)
    results = []
    for model in (eager, layer):
        real = torch.ones(3)
        product = model.weight.detach() @ real
        real.add_(model.bias.detach())
        target = torch.zeros(3, 3)
        target[0] = model.weight.detach()[1]
        target.copy_(model.weight.detach())
        results.append({"product": product, "real": real, "target": target})
    assert type(results[1]["real"]) is torch.Tensor
    assert not is_deferred(results[1]["target"])
    assert_equal(results[0], materialize(results[1]))


def test_forward_of_a_deferred_model_computes_what_eager_computes():
    pair = both(language.GPT)
    inputs = torch.arange(6).reshape(1, 6)
    outputs = [model.eval()(inputs) for model in pair]
    assert_equal(outputs[0].detach(), materialize_tensor(outputs[1]).detach())
    materialize(pair.deferred)
    assert_equal(*pair)


def test_parameters_moved_between_models():
    def build():
        return nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    pair = both(build)
    for model in pair:
        model[0].weight, model[1].weight = model[1].weight, model[0].weight
        model.append(copy.deepcopy(model[0]))
        model[1] = nn.Identity()
    settle(pair, "whole")


def test_materialised_module_changes_like_any_other():
    pair = both(small)
    materialize(pair.deferred)
    for model in pair:
        rescale(model.half().float())
        rebuild(model)
    materialize_module(pair.deferred)
    assert [p.shape for p in pair.eager.parameters()] == [
        p.shape for p in pair.deferred.parameters()
    ]
