"""The communication of SlowMo's inner loop: gradients are averaged inside a subgroup only.

The subgroup is usually the ranks of one machine, where communication is fast; between machines
nothing is sent until ``SlowMomentumOptimizer`` averages the parameters. ``slowmo_hook`` is for FSDP
with ``ShardingStrategy.NO_SHARD`` (the sharded strategies reduce over all ranks by construction, so
FSDP calls their hooks with a third argument, which this one does not take), ``slowmo_ddp_hook`` for
DistributedDataParallel.
"""

from __future__ import annotations

from typing import get_type_hints

import torch
import torch.distributed as dist

from torchcompat.slowmo._machines import average, group_of_machine

__all__ = ["SlowMoState", "slowmo_ddp_hook", "slowmo_hook"]


class SlowMoState:
    """What a SlowMo communication hook needs to know.

    Args:
        subgroup: the process group to average gradients in. None makes one group for each machine
            (``LOCAL_WORLD_SIZE`` ranks, else as many as there are GPUs, else all ranks); that is a
            collective call, so every rank must make it.
        sync_grads: average gradients at all; without it every rank trains alone between two
            averages of the parameters.

    Raises:
        ValueError: this rank is not in the subgroup, or the ranks cannot be divided into machines.
    """

    def __init__(self, subgroup: dist.ProcessGroup | None = None, sync_grads: bool = True) -> None:
        self.subgroup = group_of_machine() if subgroup is None else subgroup
        if dist.get_rank(self.subgroup) < 0:
            raise ValueError("the subgroup of SlowMoState must contain the rank that uses it")
        self.sync_grads = sync_grads


def slowmo_hook(state: SlowMoState, grad: torch.Tensor) -> None:
    """Average a gradient inside the subgroup, in place: FSDP's ``register_comm_hook``.

    Args:
        state: the subgroup, and whether to average.
        grad: the whole, flat gradient of one FSDP module.
    """
    if state.sync_grads:
        average(grad, state.subgroup)


def slowmo_ddp_hook(
    state: SlowMoState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients inside the subgroup: DDP's ``register_comm_hook``.

    Args:
        state: the subgroup, and whether to average.
        bucket: the flat gradients of one bucket.

    Returns:
        A future of the averaged bucket, so that DDP goes on with backward meanwhile.
    """
    gradients = bucket.buffer()
    members = dist.get_world_size(state.subgroup)
    if not state.sync_grads or members == 1:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(gradients)
        return done
    gradients.div_(members)
    work = dist.all_reduce(gradients, group=state.subgroup, async_op=True)
    reduced: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return reduced.then(lambda found: found.value()[0])


# DDP compares a hook's annotations with the classes themselves and would refuse their names.
slowmo_ddp_hook.__annotations__ = get_type_hints(slowmo_ddp_hook)
