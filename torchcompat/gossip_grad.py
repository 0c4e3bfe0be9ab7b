"""GossipGraD: nodes average their gradients with one peer a step instead of with all.

Daily et al. ("GossipGraD: Scalable Deep Learning using Gossip Communication based Asynchronous
Gradient Descent", arXiv 1803.05880) replace the all-reduce between nodes, whose cost grows with
their number, by one exchange a step whose partner changes, so that after log2(nodes) steps, a
period, what one node found has reached all. A step:

1. the ranks of a node average their gradients;
2. the first rank of each node, its master, averages with the master of this step's peer;
3. the master broadcasts inside its node.

The peer follows from the step alone. Let ``d = 2 ** (step % ceil(log2(nodes)))``. In a cube the
node at place ``p`` exchanges with place ``p XOR d``, and skips the step if there is none; by
dissemination it sends to place ``p + d`` and receives from ``p - d`` around the ring. Which node
stands at which place is a shuffle of the nodes, and after each period the next of ``num_nodes``
shuffles takes over, so that with time every node meets all others directly.

FSDP calls its hook once a step for each module that has gradients, DDP for each bucket; all of them
belong to one step here, and have the same peer.
"""

from __future__ import annotations

import random
from enum import Enum
from typing import Any, NamedTuple, get_type_hints

import torch
import torch.distributed as dist

from torchcompat.slowmo._machines import average, group_of_machine, ranks_per_machine

__all__ = [
    "GossipGraDState",
    "Topology",
    "get_num_modules",
    "gossip_grad_ddp_hook",
    "gossip_grad_hook",
]


class Topology(Enum):
    """How the nodes of a step are paired."""

    CUBE = "cube"
    DISSEMINATION = "dissemination"


class Peers(NamedTuple):
    """The nodes that one node sends to and receives from in a step."""

    to: int
    source: int


class GossipGraDState:
    """What a GossipGraD communication hook knows: the groups, the topology and the step.

    Constructing it may create process groups, which is a collective call: every rank must make it
    with the same arguments.

    Args:
        num_modules: hook calls in one step, ``get_num_modules(model)`` for FSDP; DDP tells by
            itself which bucket is the last, so 1 will do there.
        topology: by default dissemination. A cube needs an even number of nodes.
        local_process_group: the ranks of this node; by default groups of ``proc_per_node``
            consecutive ranks are made.
        num_nodes: number of nodes; by default all ranks divided by ``proc_per_node``.
        master_process_group: the first rank of each local group; by default a group is made of
            every ``proc_per_node``-th rank.
        proc_per_node: ranks on a node; by default the size of the local group, or
            ``LOCAL_WORLD_SIZE``, the number of GPUs, or all ranks, whichever is known first.
        random_seed: seed of the shuffles, the same on all ranks.

    Raises:
        ValueError: an argument is out of its range, the groups and numbers contradict each other,
            or a cube of an odd number of nodes (other than one node alone) is asked for.
    """

    def __init__(
        self,
        num_modules: int,
        topology: Topology | None = None,
        local_process_group: dist.ProcessGroup | None = None,
        num_nodes: int | None = None,
        master_process_group: dist.ProcessGroup | None = None,
        proc_per_node: int | None = None,
        random_seed: int = 2403,
    ) -> None:
        if num_modules < 1:
            raise ValueError(f"num_modules must be at least 1, not {num_modules}")
        self.num_modules = num_modules
        self.topology = Topology.DISSEMINATION if topology is None else Topology(topology)
        if proc_per_node is None and local_process_group is not None:
            proc_per_node = dist.get_world_size(local_process_group)
        self.proc_per_node = ranks_per_machine() if proc_per_node is None else proc_per_node
        if local_process_group is None:
            local_process_group = group_of_machine(self.proc_per_node)
        self.local_process_group = local_process_group
        self.num_nodes = dist.get_world_size() // self.proc_per_node
        if num_nodes is not None:
            self.num_nodes = num_nodes
        if self.topology is Topology.CUBE and self.num_nodes % 2 and self.num_nodes > 1:
            raise ValueError(f"a cube needs an even number of nodes, not {self.num_nodes}")
        self._join_masters(master_process_group)
        self.random_seed = random_seed
        self.topologies = shuffles(self.num_nodes, random_seed)
        self.step = 0
        self._calls = 0

    def _join_masters(self, group: dist.ProcessGroup | None) -> None:
        """Find this node's master; a master also finds its node's number and all other masters."""
        self.master_rank = dist.get_global_rank(self.local_process_group, 0)
        self.is_master = dist.get_rank() == self.master_rank
        if group is None:
            first_ranks = range(0, dist.get_world_size(), self.proc_per_node)
            group = dist.new_group(first_ranks)
            if self.master_rank not in first_ranks:
                raise ValueError("the nodes are not consecutive ranks: give master_process_group")
        self.master_process_group = group
        self.node, self.masters = -1, []
        if self.is_master:
            self.node = dist.get_rank(group)
            if self.node < 0:
                raise ValueError("the first rank of a node must be in master_process_group")
            found = dist.get_world_size(group)
            if found != self.num_nodes:
                raise ValueError(f"there are {found} masters for {self.num_nodes} nodes")
            self.masters = [dist.get_global_rank(group, node) for node in range(found)]
        self._connected = len(self.masters) < 2

    def connect(self, device: torch.device) -> None:
        """Let all masters communicate once, as NCCL wants it before some of them do."""
        if not self._connected:
            dist.all_reduce(torch.zeros(1, device=device), group=self.master_process_group)
            self._connected = True

    @property
    def period(self) -> int:
        """Steps until every node has heard of every other: log2 of their number, rounded up."""
        return (self.num_nodes - 1).bit_length()

    @property
    def current_topology(self) -> list[int]:
        """The node at each place, in this period."""
        periods = self.step // self.period if self.period else 0
        return self.topologies[periods % len(self.topologies)]

    def peers(self, node: int) -> Peers | None:
        """Return with which nodes a node exchanges in this step; None if with none."""
        if self.num_nodes == 1:
            return None
        order = self.current_topology
        place = order.index(node)
        distance = 1 << self.step % self.period
        if self.topology is Topology.CUBE:
            partner = place ^ distance
            return Peers(order[partner], order[partner]) if partner < len(order) else None
        return Peers(order[(place + distance) % len(order)], order[place - distance])

    def count_call(self, last: bool | None = None) -> None:
        """Note that the hook has run; a step ends with its last call, else after num_modules."""
        self._calls += 1
        if self._calls >= self.num_modules if last is None else last:
            self._calls = 0
            self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the seed: all that a resumed run needs to meet the same peers."""
        return {"step": self.step, "random_seed": self.random_seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at the step of a dict that ``state_dict`` returned, between two steps."""
        self.step, self.random_seed = state_dict["step"], state_dict["random_seed"]
        self.topologies = shuffles(self.num_nodes, self.random_seed)
        self._calls = 0


def shuffles(num_nodes: int, seed: int) -> list[list[int]]:
    """Return ``num_nodes`` shuffles of the nodes, equal on all ranks; global random is not used."""
    generator = random.Random(seed)
    nodes = list(range(num_nodes))
    return [generator.sample(nodes, num_nodes) for _ in nodes]


def get_num_modules(fsdp_module: torch.nn.Module) -> int:
    """Count how often FSDP calls a communication hook in one backward pass of a model.

    That is once for each FSDP module with trainable parameters of its own: a wrapper whose
    parameters all belong to FSDP modules inside it has no gradient to communicate.

    Args:
        fsdp_module: the outermost FSDP module.

    Raises:
        ValueError: it is not an FSDP module.
    """
    # FSDP itself imports torchdistx, so that it is not to be imported from here at import.
    from torch.distributed.fsdp import FullyShardedDataParallel

    if not isinstance(fsdp_module, FullyShardedDataParallel):
        raise ValueError(f"not a FullyShardedDataParallel module: {type(fsdp_module).__name__}")
    count = 0
    for unit in FullyShardedDataParallel.fsdp_modules(fsdp_module):
        inner = [
            module for module in FullyShardedDataParallel.fsdp_modules(unit) if module is not unit
        ]
        elsewhere = {id(param) for module in inner for param in module.parameters()}
        own = [param for param in unit.parameters() if id(param) not in elsewhere]
        count += any(param.requires_grad for param in own)
    return count


def gossip_grad_hook(state: GossipGraDState, grad: torch.Tensor) -> None:
    """Average a gradient inside the node and with this step's peer, in place: for FSDP.

    Register it with ``register_comm_hook`` on FSDP with ``ShardingStrategy.NO_SHARD``.

    Args:
        state: the groups, the topology and the step; the hook counts the steps.
        grad: the whole, flat gradient of one FSDP module.
    """
    _gossip(state, grad)
    state.count_call()


def gossip_grad_ddp_hook(
    state: GossipGraDState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients inside the node and with this step's peer: for DDP.

    Args:
        state: the groups, the topology and the step; a step ends with DDP's last bucket.
        bucket: the flat gradients of one bucket.

    Returns:
        A future that already has the averaged bucket.
    """
    gradients = bucket.buffer()
    _gossip(state, gradients)
    state.count_call(last=bucket.is_last())
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


# DDP compares a hook's annotations with the classes themselves and would refuse their names.
gossip_grad_ddp_hook.__annotations__ = get_type_hints(gossip_grad_ddp_hook)


def _gossip(state: GossipGraDState, grad: torch.Tensor) -> None:
    """Do the communication of one hook call."""
    average(grad, state.local_process_group)
    if state.is_master:
        state.connect(grad.device)
        peers = state.peers(state.node)
        if peers is not None:
            _exchange(state, grad, peers)
    if dist.get_world_size(state.local_process_group) > 1:
        dist.broadcast(grad, src=state.master_rank, group=state.local_process_group)


def _exchange(state: GossipGraDState, grad: torch.Tensor, peers: Peers) -> None:
    """Send a gradient to one node's master and average it with what comes from another's."""
    group = state.master_process_group
    sent = grad.contiguous()
    received = torch.empty_like(sent)
    # NCCL would wait for ever if the two were not handed over together.
    transfers = [
        dist.P2POp(dist.isend, sent, state.masters[peers.to], group=group),
        dist.P2POp(dist.irecv, received, state.masters[peers.source], group=group),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    grad.add_(received).div_(2)
