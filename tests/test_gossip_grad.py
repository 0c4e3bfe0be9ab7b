"""GossipGraD on four and eight gloo processes against a simulation of all ranks in this one.

The simulation knows the algorithm only: who is paired with whom it works out from the shuffles with
arithmetic of its own, and it averages lists of tensors.
"""

from __future__ import annotations

import math
import os
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.test_slowmo import FSDP_ON_CPU, load, loss_of, make_net, run_ranks, weights
from torchcompat import _gate
from torchcompat.gossip_grad import (
    GossipGraDState,
    Topology,
    get_num_modules,
    gossip_grad_ddp_hook,
    gossip_grad_hook,
    shuffles,
)

STEPS, MODULES = 20, 3
SIZES = (4, 7, 1)  # of the gradients of the modules of the simulated model


def gradients(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(size, generator=generator) for size in SIZES]


def partners(nodes, step, topology, seed=2403):
    """Return for each node the one it hears from in a step, or None."""
    if nodes == 1:
        return [None]
    period = math.ceil(math.log2(nodes))
    order = shuffles(nodes, seed)[step // period % nodes]
    heard = [None] * nodes
    for place, node in enumerate(order):
        power = 2 ** (step % period)
        if topology is Topology.DISSEMINATION:
            heard[node] = order[(place + nodes - power) % nodes]
        elif (place ^ power) < nodes:
            heard[node] = order[place ^ power]
    return heard


def mix(found, per_node, step, topology):
    """Return what each rank has after gossip, given what each had: lists of tensors by rank."""
    nodes = len(found) // per_node
    means = []
    for node in range(nodes):
        ranks = found[node * per_node : (node + 1) * per_node]
        means.append([torch.stack(same).double().mean(0) for same in zip(*ranks)])
    heard = partners(nodes, step, topology)
    mixed = [
        own if heard[node] is None else [(a + b) / 2 for a, b in zip(own, means[heard[node]])]
        for node, own in enumerate(means)
    ]
    return [mixed[rank // per_node] for rank in range(len(found))]


def gossip(state, rank, steps=range(STEPS)):
    """Call the hook as FSDP does, module by module, and return the gradients of each step."""
    history = []
    for step in steps:
        found = gradients(rank, step)
        for gradient in found:
            gossip_grad_hook(state, gradient)
        history.append(found)
    return history


def on_four(rank, folder):
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found = {"1 cube": gossip(GossipGraDState(MODULES, Topology.CUBE), rank)}
    found["1 dissemination"] = gossip(GossipGraDState(MODULES), rank)
    del os.environ["LOCAL_WORLD_SIZE"]
    found["2 cube"] = gossip(GossipGraDState(MODULES, Topology.CUBE, proc_per_node=2), rank)
    found["4 dissemination"] = gossip(GossipGraDState(MODULES), rank)  # one node alone
    found["4 cube"] = gossip(GossipGraDState(MODULES, Topology.CUBE), rank)
    found["interleaved"] = gossip(interleaved_state(rank), rank)
    found["resumed"] = resume(rank)
    found["ddp"] = train_ddp(rank)
    if _gate.running() >= FSDP_ON_CPU:
        found["fsdp"] = train_fsdp(rank)
    check_arguments(rank)
    torch.save(found, folder / f"found-{rank}")


def interleaved_state(rank):
    """Two nodes of the even and of the odd ranks, in groups that the caller has made."""
    nodes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    masters = dist.new_group([0, 1])
    return GossipGraDState(
        MODULES,
        Topology.CUBE,
        local_process_group=nodes[rank % 2],
        num_nodes=2,
        master_process_group=masters,
    )


def resume(rank):
    whole = gossip(GossipGraDState(MODULES, proc_per_node=1, random_seed=7), rank)
    state = GossipGraDState(MODULES, proc_per_node=1, random_seed=7)
    first = gossip(state, rank, range(11))
    again = GossipGraDState(MODULES, proc_per_node=1)
    again.load_state_dict(state.state_dict())
    return whole, first + gossip(again, rank, range(11, STEPS))


def train_ddp(rank):
    """Train with several buckets, whose number DDP changes after the first step."""
    net = make_wide_net()
    replica = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0001)
    state = GossipGraDState(1, proc_per_node=1)
    calls = []

    def count(state, bucket):
        calls.append(bucket.is_last())
        return gossip_grad_ddp_hook(state, bucket)

    if rank % 2:  # the same hook, once under its own name and annotations
        replica.register_comm_hook(state, count)
    else:
        replica.register_comm_hook(state, gossip_grad_ddp_hook)
    take_steps(replica, rank)
    assert state.step == STEPS
    assert rank % 2 == 0 or len(calls) > STEPS
    return weights(net)


def train_fsdp(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    ends = []
    for use_orig_params in (False, True):
        options = {
            "sharding_strategy": ShardingStrategy.NO_SHARD,
            "device_id": torch.device("cpu"),
            "use_orig_params": use_orig_params,
        }
        net = make_net()
        net[0], net[2] = (
            FullyShardedDataParallel(net[0], **options),
            FullyShardedDataParallel(net[2], **options),
        )
        net = FullyShardedDataParallel(
            net, **options
        )  # has no parameters of its own, so no hook call
        assert get_num_modules(net) == 2
        assert get_num_modules(net[0]) == 1
        state = GossipGraDState(get_num_modules(net), proc_per_node=1)
        net.register_comm_hook(state, gossip_grad_hook)
        take_steps(net, rank)
        assert state.step == STEPS
        with FullyShardedDataParallel.summon_full_params(net):
            ends.append(weights(net))
    frozen = nn.Sequential(
        FullyShardedDataParallel(nn.Linear(2, 2).requires_grad_(False), **options), nn.Linear(2, 2)
    )
    assert get_num_modules(FullyShardedDataParallel(frozen, **options)) == 1
    with pytest.raises(ValueError, match="Sequential"):
        get_num_modules(frozen)
    return ends


def take_steps(net, rank):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, rank, step).backward()
        optimizer.step()


def check_arguments(rank):
    with pytest.raises(ValueError, match="num_modules"):
        GossipGraDState(0)
    with pytest.raises(ValueError, match="divided"):
        GossipGraDState(1, proc_per_node=3)
    with pytest.raises(ValueError, match="ring"):
        GossipGraDState(1, topology="ring")
    with pytest.raises(ValueError, match="even number of nodes, not 3"):
        GossipGraDState(1, Topology.CUBE, num_nodes=3, proc_per_node=2)
    nodes = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    masters = dist.new_group([0, 2])
    if rank in (1, 3):
        with pytest.raises(ValueError, match="consecutive"):
            GossipGraDState(1, local_process_group=nodes[1])
    else:
        GossipGraDState(1, local_process_group=nodes[0])
    if rank == 1:
        with pytest.raises(ValueError, match="master_process_group"):
            GossipGraDState(1, local_process_group=nodes[1], master_process_group=masters)


def on_eight(rank, folder):
    found = {}
    for topology in Topology:
        state = GossipGraDState(MODULES, topology, proc_per_node=2)
        found[f"2 {topology.value}"] = gossip(state, rank)
    torch.save(found, folder / f"found-{rank}")


def start(ranks, body, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gossip")
    run_ranks(ranks, body, folder)
    return [load(folder / f"found-{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return start(4, on_four, tmp_path_factory)


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return start(8, on_eight, tmp_path_factory)


def assert_gossip(found, name, order=None):
    """Compare the gradients of all ranks in all steps; ``order`` lists the ranks node by node."""
    order = range(len(found)) if order is None else order
    per_node, topology = name.split()
    for step in range(STEPS):
        given = [gradients(rank, step) for rank in order]
        wanted = mix(given, int(per_node), step, Topology(topology))
        for rank, expected in zip(order, wanted):
            for got, want in zip(found[rank][step], expected):
                torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", ["1 cube", "1 dissemination", "2 cube", "4 dissemination", "4 cube"]
)
def test_four_ranks_equal_simulation(four, name):
    assert_gossip([rank[name] for rank in four], name)


@pytest.mark.parametrize("name", ["2 cube", "2 dissemination"])
def test_four_nodes_of_two_equal_simulation(eight, name):
    assert_gossip([rank[name] for rank in eight], name)


def test_groups_of_the_caller(four):
    assert_gossip([rank["interleaved"] for rank in four], "2 cube", order=[0, 2, 1, 3])


def test_resumed_equals_uninterrupted_bit_for_bit(four):
    for rank in four:
        whole, resumed = rank["resumed"]
        for one, other in zip(whole, resumed):
            assert all(torch.equal(a, b) for a, b in zip(one, other))


def make_wide_net():
    """A net that does not fit into DDP's first bucket, which may be of 1 MiB whatever is asked."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3)]
    return nn.Sequential(*layers)


def simulated_training(make):
    nets = [make() for _ in range(4)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    for step in range(STEPS):
        found = []
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss_of(net, rank, step).backward()
            found.append([parameter.grad for parameter in net.parameters()])
        mixed = mix(found, 1, step, Topology.DISSEMINATION)
        for net, optimizer, grads in zip(nets, optimizers, mixed):
            for parameter, grad in zip(net.parameters(), grads):
                parameter.grad = grad.float()
            optimizer.step()
    return [torch.cat([weight.flatten() for weight in weights(net)]) for net in nets]


def test_ddp_training_equals_simulation(four):
    for rank, wanted in zip(four, simulated_training(make_wide_net)):
        got = torch.cat([weight.flatten() for weight in rank["ddp"]])
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.since(FSDP_ON_CPU, why="FSDP needs CUDA before it")
def test_fsdp_training_equals_simulation(four):
    for rank, wanted in zip(four, simulated_training(make_net)):
        for end in rank["fsdp"]:
            got = torch.cat([weight.flatten() for weight in end])
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def bare_state(nodes, topology, modules=1):
    """A state without process groups, for what it works out by itself."""
    state = object.__new__(GossipGraDState)
    state.num_modules, state.num_nodes, state.topology = modules, nodes, topology
    state.topologies, state.step, state._calls = shuffles(nodes, 2403), 0, 0
    return state


@pytest.mark.parametrize("topology", list(Topology))
@pytest.mark.parametrize("nodes", [1, 2, 4, 6, 8, 10, 16])
def test_peers_fit_together(nodes, topology):
    state = bare_state(nodes, topology)
    for step in range(60):
        state.step = step
        wanted = partners(nodes, step, topology)
        for node in range(nodes):
            peers = state.peers(node)
            assert (None if peers is None else peers.source) == wanted[node]
            if peers is not None:
                assert state.peers(peers.to).source == node
                assert node not in peers


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 13])
def test_a_period_reaches_every_node(nodes):
    state = bare_state(nodes, Topology.DISSEMINATION)
    known = [{node} for node in range(nodes)]
    for step in range(state.period):
        state.step = step
        known = [known[node] | known[state.peers(node).source] for node in range(nodes)]
    assert known == [set(range(nodes))] * nodes


def test_topology_changes_once_a_period():
    state = bare_state(4, Topology.CUBE, modules=3)
    seen = []
    for _ in range(2 * state.period * 4):
        for _ in range(state.num_modules):
            seen.append(tuple(state.current_topology))
            state.count_call()
    calls = state.num_modules * state.period
    wanted = [tuple(order) for order in shuffles(4, 2403) for _ in range(calls)]
    assert seen == wanted * 2  # after num_nodes shuffles it begins again


def test_shuffles_leave_the_global_generator_alone():
    random.seed(1)
    before = random.getstate()
    one = shuffles(6, 2403)
    assert random.getstate() == before
    random.seed(2)
    assert shuffles(6, 2403) == one
    assert shuffles(6, 1) != one
    assert all(sorted(order) == list(range(6)) for order in one)


def test_same_module_through_torchdistx(run_python):
    run_python(
        "import torchdistx, torchcompat.gossip_grad as ours\n"
        "assert torchdistx.gossip_grad is ours\n"
        "from torchdistx.gossip_grad import GossipGraDState\n"
        "assert GossipGraDState is ours.GossipGraDState\n"
    )
