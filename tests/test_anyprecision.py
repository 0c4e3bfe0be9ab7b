"""AnyPrecisionAdamW: torch's AdamW where nothing is narrowed, and what narrowing and Kahan do.

The oracle is the running release's own ``torch.optim.AdamW(foreach=False)``, compared bit for bit;
where state is narrow, a float32 run of the same small training problem.
"""

from __future__ import annotations

import copy
import io
import math
import socket

import pytest
import torch
from torch import nn

from tests.test_slowmo import load, run_ranks
from torchcompat import _gate
from torchcompat.optimizers import AnyPrecisionAdamW, anyprecision_optimizer

# fully_shard is public from 2.6 on; without CUDA it fails there and forgets to divide before 2.9.
FSDP2 = (2, 9)
FLOAT32 = {"momentum_dtype": torch.float32, "variance_dtype": torch.float32}


def train(parameters, optimizer, steps, seed=1, scheduler=None):
    """Take steps on gradients drawn from a seed, of widely different sizes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in parameters:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 10.0 ** torch.randint(-4, 3, (), generator=generator)
            parameter.grad = (noise * scale).to(parameter.dtype)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def make_parameters(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(33, 65), (7,), (1,), (), (4, 3, 5), (20, 30)]
    values = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]
    values[-1] = values[-1][:, ::2].t()  # strides with gaps
    return [nn.Parameter(value) for value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-3, "weight_decay": 0.0},
        {"lr": 3e-2, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-6},
        {"lr": 0.0, "weight_decay": 0.5},
        {"lr": 1e-3, "betas": (0.0, 0.0), "weight_decay": 0.01},
    ],
)
def test_bit_equal_to_torch_adamw(options, dtype):
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    optimizer = AnyPrecisionAdamW(ours, momentum_dtype=dtype, variance_dtype=dtype, **options)
    reference = torch.optim.AdamW(theirs, foreach=False, **options)
    for parameters, used in ((ours, optimizer), (theirs, reference)):
        decay = torch.optim.lr_scheduler.ExponentialLR(used, 0.99)
        train(parameters, used, 200, scheduler=decay)
    for our, their in zip(ours, theirs):
        assert torch.equal(our, their)
        assert our.stride() == their.stride()
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[our][key], reference.state[their][key])


def test_complex_parameters_equal_torch_adamw():
    values = torch.randn(5, 3, dtype=torch.complex64)
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    optimizer = AnyPrecisionAdamW([ours], weight_decay=0.1, **FLOAT32)
    reference = torch.optim.AdamW([theirs], foreach=False, weight_decay=0.1)
    for _ in range(10):
        ours.grad = torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


def test_state_has_its_dtypes():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW(
        [weight],
        use_kahan_summation=True,
        momentum_dtype="bfloat16",
        variance_dtype="torch.float32",
        compensation_buffer_dtype=torch.float16,
    )
    train([weight], optimizer, 1)
    dtypes = {key: value.dtype for key, value in optimizer.state[weight].items()}
    assert dtypes == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.float32,
        "compensation": torch.float16,
    }
    assert weight.dtype == torch.bfloat16


def test_defaults():
    optimizer = AnyPrecisionAdamW([nn.Parameter(torch.zeros(1))])
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    ours = {key: options[key] for key in anyprecision_optimizer._OPTIONS}
    assert ours == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "use_kahan_summation": False,
        "momentum_dtype": torch.float32,
        "variance_dtype": torch.bfloat16,
        "compensation_buffer_dtype": torch.bfloat16,
    }


def test_options_by_group():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "variance_dtype": "float32", "lr": 0.5}]
    optimizer = AnyPrecisionAdamW(groups, lr=0.25)
    train([first, second], optimizer, 1)
    assert optimizer.state[first]["exp_avg_sq"].dtype == torch.bfloat16
    assert optimizer.state[second]["exp_avg_sq"].dtype == torch.float32
    # The first step of Adam is one learning rate long, whatever the gradient.
    assert (1 - first).abs().tolist() == pytest.approx([0.25, 0.25], rel=1e-3)
    assert (1 - second).abs().tolist() == pytest.approx([0.5, 0.5], rel=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": math.nan},
        {"eps": -1e-8},
        {"betas": (1.0, 0.999)},
        {"betas": (0.9, -0.1)},
        {"betas": (0.9,)},
        {"weight_decay": -0.1},
        {"momentum_dtype": "int32"},
        {"variance_dtype": "bfloat17"},
        {"compensation_buffer_dtype": 16},
    ],
)
def test_bad_options_raise(options):
    parameters = [nn.Parameter(torch.zeros(1))]
    (name,) = options
    with pytest.raises(ValueError, match=name):
        AnyPrecisionAdamW(parameters, **options)
    with pytest.raises(ValueError, match=name):
        AnyPrecisionAdamW([{"params": parameters, **options}])
    optimizer = AnyPrecisionAdamW(parameters)
    with pytest.raises(ValueError, match=name):
        optimizer.add_param_group({"params": nn.Parameter(torch.zeros(1)), **options})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradient_is_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(RuntimeError, match="sparse"):
        AnyPrecisionAdamW(embedding.parameters()).step()
    assert torch.equal(embedding.weight, before)


def test_step_returns_the_closures_loss():
    weight = nn.Parameter(torch.tensor([3.0]))
    optimizer = AnyPrecisionAdamW([weight])

    def closure():
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    assert optimizer.step() is None
    assert optimizer.step(closure).item() == 9.0
    assert weight.item() < 3.0


def test_parameter_without_gradient_is_left_alone():
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = AnyPrecisionAdamW([used, unused], weight_decay=0.5)
    train([used], optimizer, 2)
    assert torch.equal(unused, torch.ones(2))
    assert unused not in optimizer.state


def narrow(parameters):
    return AnyPrecisionAdamW(
        parameters,
        weight_decay=0.1,
        use_kahan_summation=True,
        momentum_dtype=torch.float32,
        variance_dtype=torch.float16,
        compensation_buffer_dtype=torch.float32,
    )


def test_resumed_equals_uninterrupted_bit_for_bit():
    whole = make_parameters(torch.bfloat16)
    optimizer = narrow(whole)
    train(whole, optimizer, 10, seed=1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed = [nn.Parameter(parameter.detach().clone()) for parameter in whole]
    train(whole, optimizer, 10, seed=2)

    again = AnyPrecisionAdamW(resumed)  # the saved options replace the defaults
    again.load_state_dict(load(file))
    train(resumed, again, 10, seed=2)
    for one, other in zip(whole, resumed):
        assert torch.equal(one, other)
        for key, value in optimizer.state[one].items():
            assert again.state[other][key].dtype == value.dtype
            assert torch.equal(again.state[other][key], value)
    assert again.param_groups[0]["variance_dtype"] == torch.float16


def test_loading_keeps_dtypes_and_leaves_the_dict_alone():
    parameters = make_parameters(torch.bfloat16)
    optimizer = narrow(parameters)
    train(parameters, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(saved)
    others = make_parameters(torch.bfloat16)
    other = narrow(others)
    other.load_state_dict(saved)
    assert_same(other.state_dict(), kept)
    train(others, other, 2)
    assert_same(saved, kept)


def assert_same(one, other):
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, state in one["state"].items():
        for key, value in state.items():
            assert value.dtype == other["state"][index][key].dtype
            assert torch.equal(value, other["state"][index][key])


@pytest.mark.since((2, 1), why="load hooks came with it")
def test_load_hooks_have_the_say():
    parameters = make_parameters()
    optimizer = AnyPrecisionAdamW(parameters)
    train(parameters, optimizer, 1)

    def halve(_, given):
        state = {i: {**s, "exp_avg": s["exp_avg"] / 2} for i, s in given["state"].items()}
        return {**given, "state": state}

    momentum = optimizer.state[parameters[0]]["exp_avg"].clone()
    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.load_state_dict(optimizer.state_dict())
    assert torch.equal(optimizer.state[parameters[0]]["exp_avg"], momentum / 2)


def test_takes_over_from_torch_adamw():
    ours, theirs = make_parameters(), make_parameters()
    reference = torch.optim.AdamW(theirs, foreach=False, weight_decay=0.1)
    train(theirs, reference, 5)
    optimizer = AnyPrecisionAdamW(ours)
    for our, their in zip(ours, theirs):
        our.data.copy_(their.data)
    optimizer.load_state_dict(reference.state_dict())
    train(theirs, reference, 5, seed=9)
    train(ours, optimizer, 5, seed=9)
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs))


@pytest.mark.parametrize(
    ("buffer", "error"), [("float32", 1e-7), ("float16", 1e-4), ("bfloat16", 5e-4)]
)
def test_kahan_keeps_what_rounding_loses(buffer, error):
    """500 steps of 1e-4 on weights near 1, where bfloat16 has neighbours at 0.0039 and 0.0078.

    A buffer that holds up to half of that rounds small steps itself, the more the shorter it is.
    """
    plain, kept = (nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2))
    kahan = {"use_kahan_summation": True, "compensation_buffer_dtype": buffer}
    optimizers = [
        AnyPrecisionAdamW([plain], lr=1e-4, **FLOAT32),
        AnyPrecisionAdamW([kept], lr=1e-4, **FLOAT32, **kahan),
    ]
    for _ in range(500):
        plain.grad, kept.grad = (torch.ones_like(plain) for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(plain, torch.ones(64, dtype=torch.bfloat16))
    exact = kept.detach().double() + optimizers[1].state[kept]["compensation"].double()
    assert (exact - 0.95).abs().max() < error
    assert (kept.detach().double() - exact).abs().max() <= 0.002  # half a unit at 0.95


def test_bfloat16_variance_stalls_as_documented():
    """The limit that the module states: rounding swallows changes below half a unit."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = AnyPrecisionAdamW([weight])
    variance = []
    for size in (1.0, 0.0):
        for _ in range(3000):
            weight.grad = torch.full_like(weight, size)
            optimizer.step()
        variance.append(optimizer.state[weight]["exp_avg_sq"].item())
    assert variance == [0.25, 0.25]


def test_kahan_keeps_weight_decay():
    decay = 1 - 1e-3 * 0.1
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = AnyPrecisionAdamW([weight], weight_decay=0.1, use_kahan_summation=True)
    for _ in range(1000):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert weight.detach().float().tolist() == pytest.approx([decay**1000] * 8, abs=0.003)


def spirals(points=256):
    """Return two interleaved spirals in the plane, with labels."""
    generator = torch.Generator().manual_seed(5)
    turn = torch.rand(points, generator=generator).sqrt() * 3 * math.pi
    label = torch.arange(points) % 2
    angle = turn + math.pi * label
    place = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 6
    return place, label


def classify(dtype, steps=400, **options):
    """Train a small network on the spirals; return its float32 losses and final weights."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))
    net.to(dtype)
    places, labels = spirals()
    optimizer = AnyPrecisionAdamW(net.parameters(), lr=2e-3, weight_decay=0.01, **options)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(places.to(dtype)).float(), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([p.detach().float().flatten() for p in net.parameters()])


def test_kahan_tracks_float32_training():
    losses, weights = classify(torch.float32, **FLOAT32)
    narrow_losses, narrow_weights = classify(torch.bfloat16, **FLOAT32)
    kahan_losses, kahan_weights = classify(torch.bfloat16, use_kahan_summation=True, **FLOAT32)
    assert losses[-1] < 0.5 * losses[0]

    def loss_gap(others):
        return sum(abs(a - b) for a, b in zip(losses, others)) / len(losses)

    def weight_gap(others):
        return ((others - weights).norm() / weights.norm()).item()

    assert weight_gap(kahan_weights) < 0.03
    assert weight_gap(kahan_weights) < weight_gap(narrow_weights) / 3
    assert loss_gap(kahan_losses) < 0.01
    assert loss_gap(kahan_losses) < loss_gap(narrow_losses) / 3


def test_import_does_not_import_distributed(run_python):
    run_python(
        "import sys, torch; before = 'torch.distributed.distributed_c10d' in sys.modules\n"
        "import torchdistx; torchdistx.optimizers.AnyPrecisionAdamW\n"
        "assert before or 'torch.distributed.distributed_c10d' not in sys.modules"
    )


def test_examples_of_the_documentation(root, run_python):
    """The examples run one after another as they stand, those for torchrun as its only rank."""
    parts = (root / "docs" / "optimizers.md").read_text().split("```python\n")[1:]
    # Each with a store of its own: old releases wait for ever on one that was used before.
    examples = [f"{rank_variables()}\n{part.partition('```')[0]}" for part in parts]
    done = run_python("\n".join(examples))
    lines = done.stdout.splitlines()  # among which gloo's own, on some releases
    assert any("'exp_avg_sq': torch.float32" in line for line in lines)
    assert "12" in lines
    assert "1 nodes after step 12 None" in lines


def rank_variables():
    """Return code that sets what torchrun would set for a single rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return f"import os; os.environ.update({rank})"


def update_shards(rank, folder):
    """Train DTensors on two ranks and leave the whole weights and state of rank 0 in a file."""
    if _gate.running() >= (2, 5):
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    else:
        from torch.distributed._tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for name, placement in (("shard", Shard(0)), ("replicate", Replicate())):
        wholes = make_parameters()[:2]
        split = [nn.Parameter(distribute_tensor(w.detach(), mesh, [placement])) for w in wholes]
        optimizer = AnyPrecisionAdamW(split, use_kahan_summation=True, weight_decay=0.1)
        for step in range(4):
            if step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = AnyPrecisionAdamW(split)
                optimizer.load_state_dict(saved)
            for seed, parameter in enumerate(split):
                generator = torch.Generator().manual_seed(10 * step + seed)
                grad = torch.randn(parameter.shape, generator=generator)
                # A gradient may arrive laid out differently from its parameter.
                parameter.grad = distribute_tensor(grad, mesh, [Shard(0)])
            optimizer.step()
        assert all(hasattr(optimizer.state[p]["exp_avg_sq"], "placements") for p in split)
        results[name] = [parameter.detach().full_tensor() for parameter in split]
    results["fsdp"] = train_fsdp(use_orig_params=False)
    results["fsdp original parameters"] = train_fsdp(use_orig_params=True)
    if _gate.running() >= FSDP2:
        results["fsdp2"] = train_fsdp2(mesh)
    if rank == 0:
        torch.save(results, folder / "weights")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def train_net(net, steps=5):
    """Train with Kahan summation, on the same data on each rank: averaging changes nothing."""
    optimizer = AnyPrecisionAdamW(net.parameters(), use_kahan_summation=True, weight_decay=0.1)
    generator = torch.Generator().manual_seed(4)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(4, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def train_fsdp(use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    cpu = torch.device("cpu")
    net = FullyShardedDataParallel(make_net(), device_id=cpu, use_orig_params=use_orig_params)
    train_net(net)
    with FullyShardedDataParallel.summon_full_params(net):
        return [parameter.detach().clone() for parameter in net.module.parameters()]


def train_fsdp2(mesh):
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    fully_shard(net, mesh=mesh)
    train_net(net)
    return [parameter.detach().full_tensor() for parameter in net.parameters()]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    run_ranks(2, update_shards, folder)
    return load(folder / "weights")


@pytest.mark.since((2, 2), why="init_device_mesh and full_tensor are new there")
def test_dtensor_equals_plain_tensor(shards):
    wholes = make_parameters()[:2]
    optimizer = AnyPrecisionAdamW(wholes, use_kahan_summation=True, weight_decay=0.1)
    for step in range(4):
        for seed, parameter in enumerate(wholes):
            generator = torch.Generator().manual_seed(10 * step + seed)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    for name in ("shard", "replicate"):
        assert all(torch.equal(one, other) for one, other in zip(shards[name], wholes))


@pytest.mark.since((2, 2), why="FSDP needs CUDA before it")
@pytest.mark.parametrize(
    "name",
    [
        "fsdp",
        "fsdp original parameters",
        pytest.param("fsdp2", marks=pytest.mark.since(FSDP2, why="wrong on gloo before")),
    ],
)
def test_fsdp_equals_plain_training(shards, name):
    net = make_net()
    train_net(net)
    got = torch.cat([weight.flatten() for weight in shards[name]])
    wanted = torch.cat([weight.detach().flatten() for weight in net.parameters()])
    assert torch.equal(got[: len(wanted)], wanted)
