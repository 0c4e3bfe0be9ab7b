"""SlowMo on four gloo processes against the same arithmetic done plainly in this one.

``run_ranks`` starts the processes; what they find they leave in files, and the tests, one for each
promise, look at those. All scenarios share one start, since starting costs more than training.
"""

from __future__ import annotations

import copy
import faulthandler
import multiprocessing
import os
import time
import traceback
from multiprocessing import connection

import pytest
import torch
import torch.distributed as dist
from torch import nn

from torchcompat import _gate

RANKS, STEPS, FREQ = 4, 20, 4
LIMIT = 300  # seconds, of which a machine with nothing else to do needs ten
FSDP_ON_CPU = (2, 2)  # before it FSDP's streams and events are CUDA's own


def run_ranks(ranks, body, folder):
    """Run ``body(rank, folder)`` in that many processes with gloo; raise if one of them fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    processes = [
        context.Process(target=_join, args=(rank, ranks, body, folder)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    running, deadline = list(processes), time.monotonic() + LIMIT
    while running and time.monotonic() < deadline:
        connection.wait([process.sentinel for process in running], timeout=5)
        if any(process.exitcode for process in processes):
            break  # the others wait for the one that failed
        running = [process for process in running if process.exitcode is None]
    for process in processes:
        process.kill()
        process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    notes = [note.read_text() for note in sorted(folder.glob("failed-*"))]
    assert not failed, "\n".join([f"ranks {failed} failed or hung", *notes])


def _join(rank, ranks, body, folder):
    # The interface gloo would choose by the host's name may not exist in a container.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    note = folder / f"failed-{rank}"
    with note.open("w") as stacks:
        faulthandler.dump_traceback_later(LIMIT - 20, file=stacks)
        try:
            body(rank, folder)
            dist.barrier()
        except BaseException:
            note.write_text(traceback.format_exc())
            raise
        faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def load(file):
    """Load a file; before 2.4 ``weights_only`` knows too few types, dtypes among the unknown."""
    return torch.load(file, weights_only=_gate.running() >= (2, 4))


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    places = torch.randn(5, 6, generator=generator)
    return places, places[:, :3].sin()


def loss_of(net, rank, step):
    places, targets = batch(rank, step)
    return nn.functional.mse_loss(net(places), targets)


def make_adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.02, foreach=False)


def make_sgd(net):
    first, *others = net.parameters()
    groups = [{"params": [first], "lr": 0.2}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False)


def weights(net):
    return [parameter.detach().clone() for parameter in net.parameters()]


def wrap(optimizer, **options):
    from torchcompat.slowmo.slowmo_optimizer import SlowMomentumOptimizer

    settings = {"slowmo_freq": FREQ, "slowmo_factor": 0.4, "slowmo_lr": 0.8, **options}
    return SlowMomentumOptimizer(optimizer, **settings)


def train(net, optimizer, rank, steps, scheduler=None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def body(rank, folder):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    found = {
        "alone": train_ddp(rank, pair, make_sgd, sync_grads=False),
        "pairs": train_ddp(rank, pair, make_sgd),
        "adam": train_ddp(rank, pair, make_adam),
        "resumed": resume(rank, folder),
        "checks": check(rank, pair),
    }
    if _gate.running() >= FSDP_ON_CPU:
        found["fsdp"] = train_fsdp(rank, pair, use_orig_params=False)
        found["fsdp original parameters"] = train_fsdp(rank, pair, use_orig_params=True)
    torch.save(found, folder / f"found-{rank}")


def train_ddp(rank, group, make_optimizer, sync_grads=True):
    from torchcompat.slowmo import slowmo_comm

    net = make_net()
    replica = nn.parallel.DistributedDataParallel(net)
    state = slowmo_comm.SlowMoState(group, sync_grads=sync_grads)
    replica.register_comm_hook(state, slowmo_comm.slowmo_ddp_hook)
    optimizer = wrap(make_optimizer(net))
    places = [parameter.data_ptr() for parameter in net.parameters()]
    train(replica, optimizer, rank, range(STEPS))
    assert places == [parameter.data_ptr() for parameter in net.parameters()]
    return weights(net)


def train_fsdp(rank, group, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    from torchcompat.slowmo import slowmo_comm

    options = {
        "sharding_strategy": ShardingStrategy.NO_SHARD,
        "device_id": torch.device("cpu"),
        "use_orig_params": use_orig_params,
    }
    net = make_net()
    net[0] = FullyShardedDataParallel(net[0], **options)
    net = FullyShardedDataParallel(net, **options)
    net.register_comm_hook(slowmo_comm.SlowMoState(group), slowmo_comm.slowmo_hook)
    optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    train(net, optimizer, rank, range(STEPS))
    with FullyShardedDataParallel.summon_full_params(net):
        return weights(net)


def resume(rank, folder):
    """Train 20 steps, and 11 and 9 in another optimizer: return both ends and what was noticed."""
    ends = []
    for cut in (STEPS, 11):
        net = make_net()
        optimizer = wrap(make_adam(net))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        train(net, optimizer, rank, range(cut), scheduler)
        if cut < STEPS:
            file = folder / f"checkpoint-{rank}"
            parts = [part.state_dict() for part in (net, optimizer, scheduler)]
            torch.save(parts, file)
            parts = load(file)
            net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
            optimizer = wrap(make_adam(net), slowmo_freq=7, slowmo_factor=0.0, slowmo_lr=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            kept = copy.deepcopy(parts)
            for part, saved in zip((net, optimizer, scheduler), parts):
                part.load_state_dict(saved)
            train(net, optimizer, rank, range(cut, STEPS), scheduler)
            assert parts[1].keys() == kept[1].keys()
            for name, state in kept[1]["state"].items():
                assert state.keys() == parts[1]["state"][name].keys()
                assert all(torch.equal(state[k], parts[1]["state"][name][k]) for k in state)
        ends.append((weights(net), optimizer.state_dict()))
    return ends


def check(rank, pair):
    """Do what needs a process group but little training; return what the tests look at."""
    from torchcompat.slowmo import _machines, slowmo_comm

    found = {}
    grad = torch.full((3,), float(rank))
    slowmo_comm.slowmo_hook(slowmo_comm.SlowMoState(pair), grad)
    found["pair mean"] = grad.tolist()
    grad = torch.full((3,), float(rank))
    slowmo_comm.slowmo_hook(slowmo_comm.SlowMoState(pair, sync_grads=False), grad)
    found["not synchronised"] = grad.tolist()
    found["default group"] = dist.get_world_size(slowmo_comm.SlowMoState(None).subgroup)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    group = slowmo_comm.SlowMoState(None).subgroup
    found["launcher's group"] = [dist.get_global_rank(group, place) for place in range(2)]
    del os.environ["LOCAL_WORLD_SIZE"]
    with pytest.raises(ValueError, match="divided"):
        _machines.group_of_machine(3)
    others = [dist.new_group([0, 1]), dist.new_group([2, 3])][1 - rank // 2]
    with pytest.raises(ValueError, match="subgroup"):
        slowmo_comm.SlowMoState(others)
    found["missing gradient"] = average_without_gradient(rank)
    found["zero rate"] = slow_step_at_zero_rate(rank)
    found["late group"] = add_group(rank)
    check_arguments()
    check_optimizer_manners(rank)
    return found


def average_without_gradient(rank):
    """Rank 2 has no gradient for the second parameter, which has drifted apart all the same."""
    shared, drifted = (nn.Parameter(torch.full((2,), float(rank))) for _ in range(2))
    optimizer = wrap(torch.optim.SGD([shared, drifted], lr=1.0), slowmo_freq=1, slowmo_factor=0.0)
    shared.grad = torch.zeros(2)
    drifted.grad = None if rank == 2 else torch.zeros(2)
    optimizer.slowmo_lr = 1.0
    optimizer.step()
    return [shared.tolist(), drifted.tolist()]


def slow_step_at_zero_rate(rank):
    weight = nn.Parameter(torch.tensor([float(rank)]))
    optimizer = wrap(torch.optim.SGD([weight], lr=1.0), slowmo_freq=2)
    weight.grad = torch.ones(1)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    return weight.item()


def add_group(rank):
    first, late = (nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = wrap(torch.optim.SGD([first], lr=1.0), slowmo_freq=2, slowmo_factor=0.0)
    first.grad = torch.ones(1)
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.full((1,), float(rank))
    optimizer.step()
    assert len(optimizer.base_optim.param_groups) == 2
    return [first.item(), late.item()]


def check_arguments():
    base = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    for options in ({"slowmo_freq": 0}, {"slowmo_factor": -0.1}, {"slowmo_lr": -1.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            wrap(base, **options)
    with pytest.raises(ValueError, match="base_optim"):
        wrap(None)
    rateless = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    del rateless.param_groups[0]["lr"]
    with pytest.raises(ValueError, match="lr"):
        wrap(rateless)
    with pytest.raises(ValueError, match="slowmo_freq"):
        wrap(base).load_state_dict(base.state_dict())
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(wrap(base))


def check_optimizer_manners(rank):
    """Closures, hooks, schedulers, zero_grad: what an optimizer of this release does."""
    net = make_net()
    base = make_sgd(net)
    optimizer = wrap(base)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state

    def closure():
        optimizer.zero_grad()
        loss = loss_of(net, rank, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    optimizer.zero_grad()
    base.zero_grad()
    cleared = net[0].weight.grad
    torch.optim.SGD(net.parameters(), lr=0.1).zero_grad()
    assert (cleared is None) == (net[0].weight.grad is None)
    torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if _gate.running() >= (2, 0):
        seen = []
        optimizer.register_step_post_hook(lambda *_: seen.append("step"))
        optimizer.step()
        assert seen == ["step"]
    if _gate.running() >= (2, 1):
        optimizer.register_state_dict_post_hook(lambda *_: seen.append("saved"))
        optimizer.state_dict()
        assert seen == ["step", "saved"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slowmo")
    run_ranks(RANKS, body, folder)
    return [load(folder / f"found-{rank}") for rank in range(RANKS)]


def simulate(groups, make_optimizer, factor=0.4, slow_lr=0.8):
    """Train all ranks in this process; ranks of a group share their mean gradient each step."""
    nets = [make_net() for _ in range(RANKS)]
    optimizers = [make_optimizer(net) for net in nets]
    previous = [weight.double() for weight in weights(nets[0])]
    momenta = [torch.zeros_like(weight) for weight in previous]
    rates = [group["lr"] for group in optimizers[0].param_groups for _ in group["params"]]
    for step in range(STEPS):
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss_of(net, rank, step).backward()
        for group in groups:
            for same in zip(*(nets[rank].parameters() for rank in group)):
                mean = torch.stack([parameter.grad for parameter in same]).mean(0)
                for parameter in same:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % FREQ == 0:
            for place, same in enumerate(zip(*(net.parameters() for net in nets))):
                mean = torch.stack([parameter.detach().double() for parameter in same]).mean(0)
                lr = rates[place]
                momenta[place] = factor * momenta[place] + (previous[place] - mean) / lr
                previous[place] = previous[place] - slow_lr * lr * momenta[place]
                for parameter in same:
                    parameter.data.copy_(previous[place])
    return [weights(net) for net in nets]


PAIRS = [(0, 1), (2, 3)]
ALONE = [(0,), (1,), (2,), (3,)]
SCENARIOS = {
    "alone": (ALONE, make_sgd),
    "pairs": (PAIRS, make_sgd),
    "adam": (PAIRS, make_adam),
    "fsdp": (PAIRS, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)),
}


def assert_follows(found, name, scenario):
    for rank, expected in enumerate(simulate(*SCENARIOS[scenario])):
        got = torch.cat([weight.flatten() for weight in found[rank][name]])
        wanted = torch.cat([weight.flatten() for weight in expected])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["alone", "pairs", "adam"])
def test_ddp_equals_simulation(found, name):
    assert_follows(found, name, name)
    start = torch.cat([weight.flatten() for weight in weights(make_net())])
    end = torch.cat([weight.flatten() for weight in found[0][name]])
    assert (end - start).norm() > 0.1  # it did train


@pytest.mark.since(FSDP_ON_CPU, why="FSDP needs CUDA before it")
def test_fsdp_equals_simulation(found):
    for rank in found:
        flat = torch.cat([weight.flatten() for weight in rank["fsdp original parameters"]])
        by_flat_parameter = torch.cat([weight.flatten() for weight in rank["fsdp"]])
        torch.testing.assert_close(flat, by_flat_parameter, rtol=1e-4, atol=2e-6)
    assert_follows(found, "fsdp original parameters", "fsdp")


def test_resumed_equals_uninterrupted_bit_for_bit(found):
    for rank in found:
        (whole, whole_state), (resumed, resumed_state) = rank["resumed"]
        assert all(torch.equal(one, other) for one, other in zip(whole, resumed))
        for name, state in whole_state["state"].items():
            assert {"slowmo_previous", "slowmo_momentum", "exp_avg"} <= state.keys()
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(value), resumed_state["state"][name][key])
        settings = {k: v for k, v in whole_state.items() if k not in ("state", "param_groups")}
        assert settings == {k: resumed_state[k] for k in settings}
        assert settings == {"slowmo_freq": 4, "slowmo_factor": 0.4, "slowmo_lr": 0.8, "step": 20}


def test_hook_averages_inside_the_subgroup(found):
    checks = [rank["checks"] for rank in found]
    assert [check["pair mean"] for check in checks] == [[0.5] * 3] * 2 + [[2.5] * 3] * 2
    assert [check["not synchronised"] for check in checks] == [[float(r)] * 3 for r in range(4)]


def test_default_subgroup_is_the_machine(found):
    checks = [rank["checks"] for rank in found]
    assert [check["launcher's group"] for check in checks] == [[0, 1]] * 2 + [[2, 3]] * 2
    if not torch.cuda.is_available():
        assert [check["default group"] for check in checks] == [4] * 4


def test_parameters_without_gradient_are_averaged_too(found):
    for rank in found:
        assert rank["checks"]["missing gradient"] == [[1.5] * 2] * 2


def test_zero_learning_rate_only_averages(found):
    assert [rank["checks"]["zero rate"] for rank in found] == [0.5] * 4


def test_group_added_later_joins(found):
    for rank in found:
        # slowmo_lr is 0.8: of the way of the average, 0.8 is gone.
        assert rank["checks"]["late group"] == pytest.approx([1 - 0.8 * 2, 1 - 0.8 * 0.5 * 1.5])


def test_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        wrap(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))


def test_same_modules_through_torchdistx(run_python):
    run_python(
        "import torchdistx, torchcompat.slowmo as ours\n"
        "assert torchdistx.slowmo.slowmo_comm is ours.slowmo_comm\n"
        "from torchdistx.slowmo.slowmo_optimizer import SlowMomentumOptimizer\n"
        "assert SlowMomentumOptimizer is ours.slowmo_optimizer.SlowMomentumOptimizer\n"
    )
