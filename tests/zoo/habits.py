"""Small constructors, one habit of public model code each.

Every function builds one module; together they cover ties, re-registration, wrappers that rewrite
parameters, legacy constructors, branches on values, seeds and generators inside the constructor.
"""

from __future__ import annotations

import copy
import math
import random

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.zoo import Model
from tests.zoo.language import numbers

WEIGHT_NORM_GONE = ("ignore:.*weight_norm.*is deprecated",)


class Bag(nn.Module):
    """A module to hang tensors on."""

    def __init__(self, **entries):
        super().__init__()
        for name, value in entries.items():
            setattr(self, name, value)


# Ties


def tied_embedding_and_head():
    bag = Bag(embed=nn.Embedding(7, 4), body=nn.Linear(4, 4), head=nn.Linear(4, 7, bias=False))
    bag.head.weight = bag.embed.weight
    return bag


def tied_in_module_list():
    tables = nn.ModuleList([nn.Embedding(7, 4), nn.Embedding(7, 4), nn.Embedding(7, 4)])
    tables[2].weight = tables[0].weight
    return Bag(tables=tables, head=nn.Linear(4, 2))


def one_layer_many_times():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(4, 4), layer)


def tie_then_delete_one_name():
    bag = tied_embedding_and_head()
    del bag.embed.weight
    bag.embed.weight = bag.head.weight
    del bag.head.weight
    bag.head.register_parameter("weight", bag.embed.weight)
    return bag


def parameters_on_one_storage():
    flat = torch.randn(24)
    bag = Bag(first=nn.Parameter(flat[:12].view(3, 4)), second=nn.Parameter(flat[8:20]))
    bag.register_buffer("whole", flat)
    flat.mul_(2)
    return bag


def big_draw_split_in_three():
    q, k, v = (nn.Parameter(part) for part in torch.randn(9, 4).split(3))
    return Bag(q=q, k=k, v=v)


def transposed_view_as_parameter():
    base = nn.Linear(3, 5)
    base.turned = nn.Parameter(base.weight.data.t())
    base.register_buffer("row", base.weight.data[1, ::2])
    nn.init.uniform_(base.weight, 2, 3)
    return base


# Data moves


def clone_before_change():
    weight = torch.randn(3, 4)
    before = weight.clone()
    weight.add_(1)
    return Bag(before=nn.Parameter(before), part=nn.Parameter(weight[:, :2].clone()))


def data_chains():
    layer = nn.Linear(4, 3)
    layer.weight.data = torch.ones(3, 4)
    layer.weight.data.add_(torch.randn(3, 4))
    layer.weight.data[0].zero_()
    layer.bias.data = layer.bias.data.double().exp()
    layer.bias.data.mul_(0.5)
    return layer


def set_through_detach():
    layer = nn.Linear(4, 3)
    view = layer.weight.detach()
    early = view[0].clone()
    view.copy_(torch.arange(12.0).reshape(3, 4))
    layer.register_buffer("early", early)
    return layer


def out_and_foreach():
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        torch.add(layer.weight, 1, out=layer.weight)
        torch._foreach_mul_([layer.weight, layer.bias], 0.5)
        scaled = torch._foreach_add([layer.weight, layer.bias], 2.0)
    layer.register_buffer("scaled", scaled[0])
    return layer


def default_dtype_inside():
    torch.set_default_dtype(torch.float64)
    try:
        layer = nn.Linear(4, 3)
        layer.register_buffer("table", torch.arange(3) / 2)
        layer.scale = nn.Parameter(torch.tensor(0.1))
        return layer
    finally:
        torch.set_default_dtype(torch.float32)


def mixed_dtypes():
    model = nn.Sequential(nn.Linear(20, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).half()
    model[1].float()
    model[2].double().requires_grad_(False)
    return model


def flattened_and_back():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach() * 0.5, model.parameters())
    return model


def memory_formats():
    conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
    conv.weight = nn.Parameter(conv.weight.detach().permute(1, 0, 2, 3))
    conv.register_buffer("wide", torch.randn(3, 1).expand(3, 4))
    conv.register_buffer("strided", torch.empty_strided((2, 3), (1, 2)).normal_())
    return conv


def load_one_part_into_another():
    source, target = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    target[0].load_state_dict(source.state_dict())
    target.load_state_dict({"1.bias": torch.tensor([3.0, 4.0])}, strict=False)
    return target


# Wrappers that rewrite parameters


def old_weight_norm():
    return nn.utils.weight_norm(nn.Linear(4, 3))


def old_spectral_norm():
    return nn.utils.spectral_norm(nn.Conv1d(4, 3, 2), n_power_iterations=2)


def removed_weight_norm():
    return nn.utils.remove_weight_norm(old_weight_norm())


def new_weight_norm():
    return parametrizations.weight_norm(nn.Linear(4, 3))


def new_spectral_norm():
    return parametrizations.spectral_norm(nn.Linear(4, 3))


def orthogonal():
    return nn.ModuleList(
        parametrizations.orthogonal(nn.Linear(*shape), orthogonal_map=name)
        for shape in ((4, 3), (3, 3))
        for name in ("matrix_exp", "householder")
    )


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x):
        return x.triu()


def own_parametrization():
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    layer.weight = torch.arange(16.0).reshape(4, 4) + torch.randn(4, 4)
    return layer


def pruned():
    layer = nn.Linear(6, 4)
    prune.l1_unstructured(layer, "weight", amount=0.4)
    prune.random_unstructured(layer, "bias", amount=2)
    conv = nn.Conv2d(3, 4, 2)
    prune.ln_structured(conv, "weight", amount=0.5, n=2, dim=0)
    prune.remove(conv, "weight")
    return nn.ModuleList([layer, conv])


def moving_average_copy():
    online = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    target = copy.deepcopy(online)
    for parameter in target.parameters():
        parameter.requires_grad = False
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters()):
            slow.data.mul_(0.9).add_(fast.data + 1, alpha=0.1)
    return Bag(online=online, target=target, swa=torch.optim.swa_utils.AveragedModel(online))


def low_rank_adapter():
    base = nn.Linear(6, 4)
    base.weight.requires_grad_(False)
    base.lora_a = nn.Parameter(base.weight.new_zeros((2, 6)))
    base.lora_b = nn.Parameter(base.weight.new_zeros((4, 2)))
    nn.init.kaiming_uniform_(base.lora_a, a=math.sqrt(5))
    base.weight.data += base.lora_b @ base.lora_a * 0.5
    return base


def quantized_weights():
    layer = nn.Linear(6, 4)
    scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
    layer.register_buffer("scale", scale)
    layer.register_buffer("codes", (layer.weight.detach() / scale).round().to(torch.int8))
    del layer.weight
    layer.register_parameter("weight", None)
    return layer


# Initialisers and legacy constructors


def every_initialiser():
    bag, init = Bag(), nn.init
    calls = {
        "uniform": lambda t: init.uniform_(t, -1, 2),
        "normal": init.normal_,
        "constant": lambda t: init.constant_(t, 0.3),
        "eye": init.eye_,
        "xavier_uniform": init.xavier_uniform_,
        "xavier_normal": lambda t: init.xavier_normal_(t, gain=init.calculate_gain("relu")),
        "kaiming_uniform": init.kaiming_uniform_,
        "kaiming_normal": lambda t: init.kaiming_normal_(t, mode="fan_out"),
        "trunc_normal": lambda t: init.trunc_normal_(t, std=0.5, a=-1.0, b=0.8),
        "orthogonal": init.orthogonal_,
        "sparse": lambda t: init.sparse_(t, sparsity=0.4),
    }
    for name, call in calls.items():
        for rows, columns in ((3, 5), (6, 4), (1, 16)):
            tensor = torch.empty(rows, columns)
            call(tensor)
            setattr(bag, f"{name}_{rows}", nn.Parameter(tensor))
    bag.dirac = nn.Parameter(init.dirac_(torch.empty(4, 2, 3), groups=2))
    return bag


def legacy_constructors():
    bag = Bag(
        a=nn.Parameter(torch.Tensor(3, 4)),
        b=nn.Parameter(torch.FloatTensor(3)),
        c=nn.Parameter(torch.Tensor([1.5, 2.5])),
        d=nn.Parameter(torch.DoubleTensor(2, 2).zero_()),
    )
    nn.init.xavier_uniform_(bag.a)
    bag.b.data.uniform_(-1, 1)
    bag.register_buffer("e", torch.LongTensor([3, 1, 2]))
    bag.register_buffer("f", bag.a.data.new(2, 3).fill_(4))
    bag.register_buffer("g", bag.a.new_tensor([1.0, 2.0]))
    bag.register_buffer("h", torch.ByteTensor(2).fill_(1))
    bag.register_buffer("i", torch.Tensor(torch.ones(3)))
    bag.register_buffer("j", bag.a.data.new([5.0, 6.0]))
    return bag


def uninitialised_then_filled():
    layer = nn.utils.skip_init(nn.Linear, 4, 3)
    with torch.no_grad():
        layer.weight.normal_().mul_(0.1)
        layer.bias.zero_()
    return layer


def masks():
    bag, size = Bag(), 5
    causal = (torch.triu(torch.ones(size, size)) == 1).transpose(0, 1)
    causal = causal.float().masked_fill(causal == 0, float("-inf")).masked_fill(causal == 1, 0.0)
    bag.register_buffer("causal", causal)
    tail = torch.arange(size)[None, :] >= torch.tensor([2, 5])[:, None]
    bag.register_buffer("tail", tail, persistent=False)
    local = torch.ones(size, size, dtype=torch.bool).tril(1).triu(-1)
    local[0, :] = True
    local[:, 0] = True
    bag.register_buffer("local", ~local)
    alibi = torch.tensor([2 ** (-8 * (h + 1) / 2) for h in range(2)])
    distance = torch.arange(size)[None, None, :] - torch.arange(size)[None, :, None]
    bag.register_buffer("alibi", alibi[:, None, None] * distance.float())
    blocks = torch.zeros(size, size)
    for number in range(0, size, 2):
        blocks[number : number + 2, number : number + 2] = number + 1
    blocks[blocks == 3] = -1
    bag.register_buffer("blocks", blocks)
    bag.proj = nn.Linear(3, 3)
    return bag


def constants():
    bag = Bag(eps=nn.Parameter(torch.tensor(1e-3)), flags=nn.Parameter(torch.eye(3)[1]))
    bag.register_buffer("mean", torch.tensor([0.48, 0.45, 0.4]).view(-1, 1, 1))
    bag.register_buffer("std", torch.as_tensor((0.2, 0.3)))
    bag.register_buffer("empty", torch.zeros(0, 3))
    bag.register_buffer("absent", None)
    bag.register_buffer("table", torch.tensor([[1, 2], [3, 4]]).repeat(2, 1))
    return bag


# Values read by the constructor


def depth_by_lot():
    depth = 1 + int(torch.rand(1).item() * 4)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(depth)])


def shuffled_connections():
    order = torch.randperm(6).tolist()
    layer = nn.Linear(6, 6)
    layer.register_buffer("order", torch.tensor(order))
    layer.layers = nn.ModuleList(nn.Linear(1 + n % 3, 2) for n in order)
    return layer


def branches_on_values():
    layer = nn.Linear(16, 4)
    noise = torch.randn(20)
    if bool((noise > 1).any()):
        layer.extra = nn.Linear(4, int((noise > 0).sum()))
    noise[noise < 0] = 0.0
    layer.register_buffer("noise", noise)
    layer.register_buffer("found", noise.nonzero())
    layer.register_buffer("kept", noise[noise > 0.5])
    layer.register_buffer("distinct", torch.unique(torch.randint(0, 5, (12,))))
    layer.total, layer.values = float(noise.sum()), noise[:3].numpy().tolist()
    layer.parts = [round(float(x), 3) for x in noise[:4]]
    return layer


def reads_its_own_weight():
    first, second = nn.Linear(4, 3), nn.Linear(4, 3)
    norm = first.weight.norm().item()
    second.weight.data.div_(norm)
    first.scale = norm
    return nn.ModuleList([first, second])


def layer_dropout_by_python_random():
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(6) if random.random() > 0.4)


# Seeds and generators


def seeds_inside():
    first = nn.Linear(4, 3)
    torch.manual_seed(99)
    second = nn.Linear(4, 3)
    state = torch.get_rng_state()
    third = nn.Linear(4, 3)
    torch.set_rng_state(state)
    fourth = nn.Linear(4, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        fifth = nn.Linear(4, 3)
    return nn.ModuleList([first, second, third, fourth, fifth, nn.Linear(4, 3)])


def own_generator():
    generator = torch.Generator().manual_seed(42)
    layer = nn.Linear(20, 3)
    layer.weight.data.normal_(0, 0.1, generator=generator)
    layer.register_buffer("noise", torch.rand(5, generator=generator))
    layer.register_buffer("order", torch.randperm(7, generator=generator))
    layer.register_buffer("again", torch.randn(33, generator=generator) + torch.randn(33))
    return layer


def dropped_draws():
    torch.randn(7)
    layer = nn.Linear(3, 5)
    torch.randn(50, 50).sum()
    layer.noise = nn.Parameter(torch.randn(17))
    torch.bernoulli(torch.full((9,), 0.5))
    layer.tail = nn.Parameter(torch.rand(3, dtype=torch.float64))
    return layer


def every_random_op():
    bag = Bag()
    draws = {
        "rand": torch.rand(5),
        "randn": torch.randn(31),
        "randint": torch.randint(0, 100, (7,)),
        "wide": torch.randint(-(2**40), 2**40, (3,)),
        "randperm": torch.randperm(9),
        "normal": torch.normal(torch.arange(4.0), 0.5),
        "normal_both": torch.normal(torch.zeros(20), torch.arange(20.0)),
        "bernoulli": torch.bernoulli(torch.full((5,), 0.3)),
        "bernoulli_": torch.empty(6).bernoulli_(0.4),
        "exponential": torch.empty(6).exponential_(2.0),
        "geometric": torch.empty(6).geometric_(0.3),
        "log_normal": torch.empty(6).log_normal_(),
        "cauchy": torch.empty(6).cauchy_(),
        "random": torch.empty(6).random_(),
        "random_to": torch.empty(6, dtype=torch.int64).random_(3, 20),
        "like": torch.rand_like(torch.empty(3, 2, dtype=torch.float64)),
        "randn_like": torch.randn_like(torch.empty(4, 5)),
        "complex": torch.randn(5, dtype=torch.complex64),
        "multinomial": torch.multinomial(torch.tensor([0.1, 0.2, 0.7]), 5, replacement=True),
        "dropout": torch.nn.functional.dropout(torch.ones(12), 0.5),
        "rrelu": torch.nn.functional.rrelu(-torch.ones(6), training=True),
        "poisson": torch.poisson(torch.full((4,), 3.0)),
        "gamma": torch._standard_gamma(torch.full((3,), 2.0)),
        "last": torch.randn(3),
    }
    for name, value in draws.items():
        bag.register_buffer(name, value)
    return bag


# Where tensors are kept


def plain_attributes():
    layer = nn.Linear(3, 2)
    layer.loose = torch.randn(4)
    layer.listed = [torch.zeros(2), torch.randn(2), "text"]
    layer.named = {"a": torch.ones(3), "b": [torch.randn(1)], "n": 3}
    layer.pair = (torch.randn(2), layer.weight)
    layer.weight.tag, layer.bias.note = "kept", torch.ones(2)
    return layer


def reregistered():
    layer = nn.Linear(3, 2)
    layer.weight.partition = 1
    kernel = layer.weight
    del layer.weight
    layer.register_parameter("kernel", kernel)
    layer.kernel.also = [1, 2]
    return layer


def mixture_of_experts():
    expert = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
    experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(3)])
    for block in experts[1:]:
        block.apply(lambda m: m.reset_parameters() if hasattr(m, "reset_parameters") else None)
    stacked = torch.stack([e[0].weight.detach() for e in experts])
    return Bag(experts=experts, stacked=nn.Parameter(stacked), gate=nn.Linear(4, 3, bias=False))


MODELS = [
    Model("tied embedding and head", tied_embedding_and_head),
    Model("tied in a ModuleList", tied_in_module_list),
    Model("one layer many times", one_layer_many_times, numbers(2, 4)),
    Model("tie, then one name deleted", tie_then_delete_one_name),
    Model("parameters on one storage", parameters_on_one_storage),
    Model("one draw split in three", big_draw_split_in_three),
    Model("views as parameters", transposed_view_as_parameter, numbers(2, 3)),
    Model("clone before a change", clone_before_change),
    Model("chains of data", data_chains),
    Model("set through detach", set_through_detach, numbers(2, 4)),
    Model("out and foreach", out_and_foreach, numbers(2, 4)),
    Model("default dtype inside", default_dtype_inside),
    Model("mixed dtypes", mixed_dtypes),
    Model("flattened and back", flattened_and_back, numbers(2, 4)),
    Model("memory formats", memory_formats),
    Model("one part loaded into another", load_one_part_into_another, numbers(2, 4)),
    Model("weight_norm", old_weight_norm, numbers(2, 4), warnings=WEIGHT_NORM_GONE),
    Model("spectral_norm", old_spectral_norm, numbers(2, 4, 5)),
    Model("weight_norm removed", removed_weight_norm, numbers(2, 4), warnings=WEIGHT_NORM_GONE),
    Model("weight_norm as a parametrization", new_weight_norm, numbers(2, 4), since=(2, 1)),
    Model("spectral_norm as a parametrization", new_spectral_norm, numbers(2, 4)),
    Model("orthogonal parametrizations", orthogonal),
    Model("own parametrization", own_parametrization, numbers(2, 4)),
    Model("pruned", pruned),
    Model("moving average copy", moving_average_copy),
    Model("low-rank adapter", low_rank_adapter, numbers(2, 6)),
    Model("quantized weights", quantized_weights),
    Model("every initialiser", every_initialiser),
    Model("legacy constructors", legacy_constructors),
    Model("skip_init", uninitialised_then_filled, numbers(2, 4)),
    Model("masks", masks),
    Model("constants", constants),
    Model("depth by lot", depth_by_lot, numbers(2, 3)),
    Model("shuffled connections", shuffled_connections, numbers(2, 6)),
    Model("branches on values", branches_on_values, numbers(2, 16), reads=True),
    Model("reads its own weight", reads_its_own_weight, reads=True),
    Model("layers by Python's random", layer_dropout_by_python_random),
    Model("seeds inside", seeds_inside),
    Model("own generator", own_generator, numbers(2, 20)),
    Model("dropped draws", dropped_draws, numbers(2, 3)),
    Model("every random op", every_random_op, reads=True),
    Model("plain attributes", plain_attributes, numbers(2, 3)),
    Model("registered again", reregistered),
    Model("mixture of experts", mixture_of_experts),
]
