"""Which ranks share a machine, and a process group for them.

Ranks are laid out machine by machine, as every launcher of torch does it. Before torch 2.2
``torch.distributed.new_subgroups`` refuses to work without CUDA, whatever it is asked for, so the
groups are made here, the same way on every release.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def ranks_per_machine() -> int:
    """Return what the launcher says, else the number of GPUs here, else that all ranks are here."""
    said = os.environ.get("LOCAL_WORLD_SIZE")
    if said:
        return int(said)
    gpus = torch.cuda.device_count()
    return min(gpus, dist.get_world_size()) if gpus else dist.get_world_size()


def group_of_machine(size: int | None = None) -> dist.ProcessGroup:
    """Make one process group for each machine, on every rank alike, and return this rank's.

    Args:
        size: ranks on a machine; by default ``ranks_per_machine()``.

    Raises:
        ValueError: the ranks cannot be divided into machines of that size.
    """
    size = ranks_per_machine() if size is None else size
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"{world} ranks cannot be divided into machines of {size}")
    groups: list[dist.ProcessGroup] = [
        dist.new_group(range(first, first + size)) for first in range(0, world, size)
    ]
    return groups[dist.get_rank() // size]


def average(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace a tensor by its mean over a group.

    Dividing before adding up keeps float16 sums from overflowing, as torch's own hook does.
    """
    members = dist.get_world_size(group)
    if members > 1:
        tensor.div_(members)
        dist.all_reduce(tensor, group=group)
