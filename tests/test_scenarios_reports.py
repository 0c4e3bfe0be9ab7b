"""Situations from public bug reports, one test for each row of the list the project starts from.

The reports are named where they are restated; the code is ours. Where a whole kind is tested
elsewhere (`test_contract_*`), the row here is the case as it was reported.
"""

from __future__ import annotations

import copy
import io
import json
import warnings

import pytest
import torch
from torch import nn

from tests.equality import (
    ORDERS,
    assert_equal,
    both,
    in_threads,
    materialize,
    settle,
    verify,
    verify_orders,
    walk,
)
from tests.zoo import habits, language, vision
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import is_fake

Bag = habits.Bag


# torchdistx#10, accelerate#3668


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", [habits.tied_embedding_and_head, habits.tied_in_module_list])
def test_shared_weight_is_one_object_before_and_after(build, order):
    pair = both(build)
    if build is habits.tied_in_module_list:
        assert pair.deferred.tables[2].weight is pair.deferred.tables[0].weight
    else:
        assert pair.deferred.embed.weight is pair.deferred.head.weight
    settle(pair, order)


def test_shared_weight_materialised_by_separate_calls():
    pair = both(habits.tied_in_module_list)
    for table in reversed(pair.deferred.tables):
        materialize_module(table)
    assert pair.deferred.tables[2].weight is pair.deferred.tables[0].weight
    materialize(pair.deferred)
    assert_equal(*pair)


# torchdistx#11


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_cast_of_the_deferred_module(cast):
    pair = both(language.GPT)
    for model in pair:
        getattr(model, cast)()
    dtypes = {name: value.dtype for name, value in pair.deferred.state_dict().items()}
    materialize(pair.deferred)
    assert {name: value.dtype for name, value in pair.deferred.state_dict().items()} == dtypes
    assert_equal(*pair)


# torchdistx#12, Lightning#19067


@pytest.mark.since((2, 3), "swap_tensors")
def test_optimizer_and_name_table_built_early_hold_live_parameters():
    pair = both(vision.ResNet)
    names = {parameter: name for name, parameter in pair.deferred.named_parameters()}
    steps = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in pair]
    materialize(pair.deferred)
    assert [names[p] for _, p in pair.deferred.named_parameters()] == list(names.values())
    for model, step in zip(pair, steps):
        model(*vision.MODELS[4].inputs()).pow(2).sum().backward()
        step.step()
    assert_equal(*pair)
    held = [p for group in steps[1].param_groups for p in group["params"]]
    assert all(a is b for a, b in zip(held, pair.deferred.parameters()))


@pytest.mark.before((2, 3))
def test_before_swap_tensors_the_optimizer_is_built_after_materialising():
    pair = both(vision.ResNet)
    materialize(pair.deferred)
    for model in pair:
        step = torch.optim.SGD(model.parameters(), lr=0.1)
        model(*vision.MODELS[4].inputs()).pow(2).sum().backward()
        step.step()
    assert_equal(*pair)


# torchdistx#50


def test_expanded_position_ids():
    def build():
        module = Bag(embed=nn.Embedding(512, 2))
        module.register_buffer("position_ids", torch.arange(512).expand((1, -1)))
        zeros = torch.zeros(module.position_ids.size(), dtype=torch.long)
        module.register_buffer("token_type_ids", zeros, persistent=False)
        return module

    pair = verify(build)
    assert pair.deferred.position_ids.shape == (1, 512)
    assert pair.deferred.position_ids.stride() == pair.eager.position_ids.stride()


# pytorch#78534


def test_callable_that_returns_a_tensor():
    pair = both(torch.ones, 10, 10)
    assert is_deferred(pair.deferred)
    assert is_fake(pair.deferred)
    assert pair.deferred.shape == (10, 10)
    assert_equal(pair.eager, materialize_tensor(pair.deferred))


# transformers#43957 and its family


def test_drop_path_rates_by_item():
    pair = both(vision.ViT, 6)
    rates = [[block.drop_path.rate for block in model.blocks] for model in pair]
    assert rates[0] == rates[1]
    assert all(is_deferred(p) for p in pair.deferred.parameters())
    settle(pair, "shuffled")


@pytest.mark.parametrize(
    "build",
    [
        habits.depth_by_lot,
        habits.shuffled_connections,
        habits.branches_on_values,
        habits.reads_its_own_weight,
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_values_decide_the_structure(build, seed):
    verify(build, seed=seed, order="by child")


# transformers#48892


def test_non_persistent_buffer_is_not_in_the_checkpoint():
    def build():
        module = Bag(proj=nn.Linear(8, 8))
        inv_freq = 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))
        module.register_buffer("inv_freq", inv_freq, persistent=False)
        return module

    checkpoint = {"proj.weight": torch.eye(8), "proj.bias": torch.full((8,), 2.0)}
    pair = both(build)
    for model in pair:
        model.load_state_dict({k: v.clone() for k, v in checkpoint.items()})
    materialize(pair.deferred)
    assert_equal(*pair)
    assert torch.equal(pair.deferred.proj.weight, torch.eye(8))


# transformers#44291


def test_attribute_set_before_registration_and_under_another_name():
    def build():
        weight = nn.Parameter(torch.randn(3))
        weight._is_hf_initialized = True
        module = Bag(first=weight)
        del module.first
        module.register_parameter("second", weight)
        return module

    pair = both(build)
    assert pair.deferred.second._is_hf_initialized
    materialize(pair.deferred)
    assert pair.deferred.second._is_hf_initialized is True
    assert_equal(*pair)


# pytorch#188346


@pytest.mark.since((2, 1), "load_state_dict(assign=)")
@pytest.mark.parametrize("keys", [("embed", "head"), ("embed",), ("head",)])
def test_assigning_a_checkpoint_to_a_tied_model(keys):
    pair = both(habits.tied_embedding_and_head)
    value = torch.arange(28.0).reshape(7, 4)
    state = {f"{key}.weight": value for key in keys}
    for model in pair:
        model.load_state_dict(state, assign=True, strict=False)
    materialize(pair.deferred)
    assert_equal(*pair)


@pytest.mark.parametrize("keys", [("embed", "head"), ("embed",), ("head",)])
def test_copying_a_checkpoint_into_a_tied_model_keeps_the_tie(keys):
    pair = both(habits.tied_embedding_and_head)
    value = torch.arange(28.0).reshape(7, 4)
    for model in pair:
        model.load_state_dict({f"{key}.weight": value for key in keys}, strict=False)
    materialize(pair.deferred)
    assert pair.deferred.embed.weight is pair.deferred.head.weight
    assert torch.equal(pair.deferred.embed.weight, value)
    assert_equal(*pair)


# Lightning#17627


@pytest.mark.parametrize("order", ORDERS)
def test_checkpoint_that_misses_keys(order):
    pair = both(language.Llama)
    state = {
        k: torch.zeros_like(v) for k, v in pair.eager.state_dict().items() if "layers.1" not in k
    }
    for model in pair:
        model.load_state_dict({k: v.clone() for k, v in state.items()}, strict=False)
    settle(pair, order)


# DeepSpeed#2650, transformers#43847, transformers#43596


@pytest.mark.parametrize("through_data", [True, False])
def test_parent_that_ends_with_apply(through_data):
    verify_orders(language.GPT, through_data=through_data)


def test_padding_row_is_zero():
    pair = both(language.Llama)
    materialize(pair.deferred.embed_tokens)
    assert not pair.deferred.embed_tokens.weight[0].any()
    assert pair.deferred.embed_tokens.weight[1].all()
    materialize(pair.deferred)
    assert_equal(*pair)


# pytorch#90465, pytorch#104187


def test_nested_wrappers_and_overlapping_calls():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.randn(1))

    def build():
        return Wrapper(Wrapper(Wrapper(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))))

    for order in ORDERS:
        pair = both(build)
        outermost = pair.deferred
        materialize_module(outermost.inner, check_fn=lambda m: not isinstance(m, Wrapper))
        materialize_module(outermost.inner.inner)
        kept = dict(outermost.named_parameters())
        settle(pair, order)
        assert all(
            p is kept[name] for name, p in outermost.named_parameters() if not is_fake(kept[name])
        )


# Megatron-LM#6799


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor.*:UserWarning")
@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.MultiheadAttention(8, 2),
        lambda: nn.Transformer(8, 2, 1, 1, 16),
        lambda: nn.LSTM(4, 4, 2),
        lambda: Bag(scale=nn.Parameter(torch.rand(3)), inner=habits.masks()),
    ],
    ids=["attention", "transformer", "lstm", "no reset_parameters"],
)
def test_modules_without_reset_parameters_one_by_one(build):
    """As FSDP calls it: once for every module, each time with a check."""
    pair = both(build)
    for module in pair.deferred.modules():
        materialize_module(module, check_fn=lambda m: True)
    assert_equal(*pair)


# torchtitan#3106


def test_layers_of_one_shape_differ():
    pair = both(lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    materialize(pair.deferred)
    weights = [layer.weight for layer in pair.deferred]
    assert all(not torch.equal(weights[i], weights[j]) for i in range(4) for j in range(i))
    assert_equal(*pair)


# ColossalAI lazy init


@pytest.mark.parametrize(
    "build",
    [
        habits.clone_before_change,
        habits.data_chains,
        habits.big_draw_split_in_three,
        pytest.param(
            habits.old_weight_norm,
            marks=pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated"),
        ),
        habits.old_spectral_norm,
        habits.orthogonal,
        habits.parameters_on_one_storage,
    ],
)
def test_lazy_init_cases(build):
    verify_orders(build)


# ColossalAI#5004


def test_tensors_in_plain_attributes_and_a_forward_that_rewrites_its_weight():
    class Rewriting(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.loose = torch.randn(3)
            self.cache = {"keys": [torch.zeros(2), (torch.randn(2),)]}

        def forward(self, x):
            self.weight = nn.Parameter(self.weight.detach() * 0.9 + self.loose)
            return nn.functional.linear(x, self.weight, self.bias)

    pair = both(Rewriting)
    materialize(pair.deferred)
    assert_equal(*pair)
    assert not any(is_fake(found.tensor) for found in walk(pair.deferred).values())
    outputs = [model(torch.ones(2, 3)) for model in pair]
    assert torch.equal(*outputs)
    assert_equal(*pair)


# pytorch#99000, pytorch#82616


def test_deepcopy_inside_and_after():
    verify_orders(habits.moving_average_copy)
    verify_orders(habits.mixture_of_experts)
    pair = both(vision.ViT)
    copies = [copy.deepcopy(model) for model in pair]
    settle(pair, "reversed")
    assert_equal(copies[0], materialize(copies[1]))


# transformers#38066, yanmtt


def save_checkpoint(path):
    torch.manual_seed(50)
    torch.save({"weight": torch.randn(3, 4), "scale": torch.ones(2)}, path)
    return path


@pytest.mark.parametrize("copying", [True, False], ids=["copied", "used as it is"])
def test_checkpoint_loaded_in_the_constructor(tmp_path, copying):
    path = save_checkpoint(tmp_path / "state.pt")

    def build():
        layer = nn.Linear(4, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # 2.4 and 2.5 announce weights_only
            state = torch.load(path)
        if copying:
            layer.load_state_dict({"weight": state["weight"]}, strict=False)
        else:
            layer.weight = nn.Parameter(state["weight"])
        layer.register_buffer("scale", state["scale"] * 2)
        layer.tail = nn.Parameter(torch.randn(3))
        return layer

    pair = both(build)
    path.unlink()
    assert is_deferred(pair.deferred.tail)
    settle(pair, "shuffled")


@pytest.mark.since((2, 1), "torch.load(mmap=)")
def test_mapped_checkpoint_in_the_constructor(tmp_path):
    path = save_checkpoint(tmp_path / "state.pt")

    def build():
        layer = nn.Linear(4, 3)
        state = torch.load(str(path), mmap=True, weights_only=True)
        layer.load_state_dict({"weight": state["weight"]}, strict=False)
        return layer

    verify(build)


def test_checkpoint_in_memory_with_modules_inside():
    stream = io.BytesIO()
    torch.manual_seed(3)
    torch.save(nn.Linear(3, 3).state_dict(), stream)

    def build():
        stream.seek(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model[1].load_state_dict(torch.load(stream, map_location="cpu"))
        return model

    verify_orders(build)


def test_checkpoint_read_from_raw_bytes(tmp_path):
    """The layout of safetensors: a JSON header, then the bytes of each tensor."""
    torch.manual_seed(4)
    values = {"weight": torch.randn(3, 4), "bias": torch.randn(3)}
    header, blob = {}, b""
    for name, value in values.items():
        data = value.numpy().tobytes()
        header[name] = {
            "shape": list(value.shape),
            "data_offsets": [len(blob), len(blob) + len(data)],
        }
        blob += data
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)

    def build():
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        state = {}
        for name, row in json.loads(raw[8:start]).items():
            low, high = row["data_offsets"]
            whole = torch.frombuffer(raw, dtype=torch.uint8, offset=start + low, count=high - low)
            state[name] = whole.clone().view(torch.float32).reshape(row["shape"])
        model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
        model[0].load_state_dict(state)
        return model

    pair = both(build)
    path.unlink()
    settle(pair, "whole")
    assert torch.equal(pair.deferred[0].weight, values["weight"])


# torchdistx docs


def test_real_tensor_changed_between_construction_and_materialising():
    real = torch.ones(3)
    tensor = deferred_init(lambda: torch.zeros(3) + real)
    real.fill_(7)
    try:
        result = materialize_tensor(tensor)
    except RuntimeError as error:
        assert "add" in str(error)
    else:
        assert torch.equal(result, torch.ones(3))


# torchdistx#79


def test_custom_operator_without_autograd_formula_on_parameters():
    library = torch.library.Library("torchcompat_scenario", "DEF")
    library.define("shift(Tensor x) -> Tensor")
    library.impl("shift", lambda x: x + 1, "CPU")
    results = []
    for call in (lambda fn: fn(), deferred_init):

        def build():
            layer = nn.Linear(3, 2)
            layer.moved = torch.ops.torchcompat_scenario.shift(layer.weight)
            return layer

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            layer = call(build)
            materialize_module(layer)
            try:
                layer.moved.sum().backward()
                ending = "ran"
            except RuntimeError as error:
                ending = str(error).partition("\n")[0]
        told = {str(w.message)[:50] for w in caught if "autograd" in str(w.message)}
        results.append((layer, ending, told))
    assert results[0][1:] == results[1][1:]
    assert_equal(results[0][0], results[1][0])


# what torchdistx gets wrong (DESIGN section 11)


@pytest.mark.parametrize(
    "build", [language.GPT, language.Llama, vision.ResNet, vision.Swin, vision.ViT]
)
def test_models_that_initialise_twice(build):
    for seed in range(2):
        verify(build, seed=seed, order="by child")


def test_one_module_from_several_threads():
    for seed in range(3):
        pair = both(vision.ResNet, seed=seed)
        in_threads([lambda pair=pair: materialize_module(pair.deferred)] * 8)
        assert_equal(*pair)


def test_two_parameters_on_one_storage_one_by_one():
    for names in (("first", "second"), ("second", "first")):
        pair = both(habits.parameters_on_one_storage)
        for name in names:
            setattr(pair.deferred, name, materialize_tensor(getattr(pair.deferred, name)))
        materialize(pair.deferred)
        assert_equal(*pair)
