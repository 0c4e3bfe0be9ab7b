"""From a schedule to real tensors: run, release, give out.

What a target lies on becomes permanent. Groups of operators that share no memory may run on several
threads, each with a generator of its own that is moved to where every operator starts drawing.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

import torch

from torchcompat import autograd_hooks
from torchcompat._random import streams
from torchcompat._run import Run, as_leaf, leaf_of, move
from torchcompat._schedule import Schedule, components, written_by
from torchcompat._tape import Op, Storage, Value, itemsize, now, stamp

# One thread plans and gives out tensors at a time, so that two callers get one object.
lock = threading.RLock()

Progress = Callable[[int, int], None]

_KNOWN_BYTES = 1 << 20
_PARALLEL = 1 << 20  # elements below which threads cost more than they bring


def compute(value: Value) -> torch.Tensor:
    """Compute a value's present content on scratch memory; nobody may write to the result."""
    storage = value.storage
    assert storage is not None
    with lock, autograd_hooks.quiet():
        schedule = Schedule()
        run = Run(schedule, keep=storage)
        if storage.memory is not None:
            run.roots[storage] = storage.memory.detach()
        elif storage.known is not None and storage.known_at == len(storage.writers):
            run.roots[storage] = storage.known
        else:
            schedule.scratch(value)
            run.run(schedule.order())
            root = run.root(storage)
            if root.numel() * root.element_size() <= _KNOWN_BYTES:
                storage.known, storage.known_at = root.detach(), len(storage.writers)
        return run.handle(value).detach()


def leaf(value: Value, cls: type) -> torch.Tensor:
    """Give a value its real tensor, as a leaf that a graph can start from."""
    with lock, autograd_hooks.quiet(graphs=True):
        return as_leaf(value, cls, materialize(value))[0]


def materialize(
    *values: Value, num_threads: int | None = 1, progress: Progress | None = None
) -> torch.Tensor:
    """Give values their real tensors, for good; return the first one's."""
    with lock, autograd_hooks.quiet(graphs=True):
        wanted = [v for v in values if v.real is None]
        if wanted:
            schedule = Schedule(wanted)
            runs = _run_all(schedule, num_threads, progress)
            _give_out(schedule, runs)
        assert values[0].real is not None
        return values[0].real


def _run_all(
    schedule: Schedule, num_threads: int | None, progress: Progress | None
) -> dict[Storage, Run]:
    """Run a schedule, on several threads where that is safe and pays; say who made what."""
    ordered = schedule.order()
    report = _reporter(schedule, progress)
    main = Run(schedule)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    made = sum(s.root.numel for s in schedule.permanent)
    parts = components(schedule, ordered) if threads > 1 and made >= _PARALLEL else []
    serial = [p for p in parts if not all(map(_runs_anywhere, p))]
    chunks = _chunks([p for p in parts if all(map(_runs_anywhere, p))], threads)
    if len(chunks) < 2:
        main.run(ordered, report)
        return dict.fromkeys(schedule.permanent, main)
    for op in ordered:  # what has to run to know where another starts runs here, under the lock
        if op.position is not None:
            op.position.origin.state()
    main.run([op for part in serial for op in part], report)  # some change what all threads see
    jobs = [(Run(schedule), chunk) for chunk in chunks]

    def work(job: tuple[Run, list[Op]]) -> None:
        with autograd_hooks.quiet():
            job[0].run(job[1], report)

    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(work, job) for job in jobs]
        for future in running:
            future.result()
    owners = dict.fromkeys(schedule.permanent, main)
    for run, _ in jobs:
        owners.update({s: run for s in run.roots if s in schedule.permanent})
    return owners


def _runs_anywhere(op: Op) -> bool:
    """Tell whether an operator needs nothing of the process, but memory and its generator."""
    alone = op.position is not None and not op.takes_generator
    return not alone and not op.graph and op.default_dtype == torch.get_default_dtype()


def _chunks(parts: list[list[Op]], threads: int) -> list[list[Op]]:
    """Join neighbouring groups into a few runs of like size for each thread."""
    sizes = [sum(s.root.numel for op in part for s in written_by(op)) for part in parts]
    share = sum(sizes) / (threads * 4) if parts else 0
    chunks: list[list[Op]] = []
    filled = share
    for part, size in zip(parts, sizes):
        if filled >= share:
            chunks.append([])
            filled = 0
        chunks[-1].extend(part)
        filled += size
    return chunks


def _reporter(schedule: Schedule, progress: Progress | None) -> Callable[[Storage], None] | None:
    """Count the bytes of finished targets and pass them on."""
    if progress is None:
        return None
    sizes = {s: s.root.numel * itemsize(s.root.dtype) for s in schedule.permanent}
    total, done, counting = sum(sizes.values()), 0, threading.Lock()

    def report(storage: Storage) -> None:
        nonlocal done
        with counting:
            done += sizes.pop(storage, 0)
            progress(done, total)

    return report


def _give_out(schedule: Schedule, owners: dict[Storage, Run]) -> None:
    """Make what a schedule computed permanent."""
    for made, run in owners.items():
        root = run.root(made)
        made.memory = root
        made.known = None
        made.since = now()
    rest = Run(schedule, outside=True)
    for value in sorted(schedule.targets, key=lambda v: v.op.seq if v.op else 0):
        storage = value.storage
        assert storage is not None
        assert storage.memory is not None
        if value.real is None:
            value.real = owners.get(storage, rest).handle(value)
        storage.version = stamp(storage)
    ends: dict[torch.Tensor, torch.Tensor] = {}
    for run in {id(r): r for r in (*owners.values(), rest)}.values():
        ends.update(run.moved)
        run.remember_graphs()
    for value in schedule.targets:
        latest = leaf_of(value.former)
        if latest is not None:
            assert value.storage is not None
            ends[latest] = owners.get(value.storage, rest).handle(value)
            value.real = latest
    for leaf, memory in ends.items():  # only now: handles of old memory may start from a leaf
        move(leaf, memory)


def state_after(op: Op) -> torch.Tensor:
    """Run an operator on scratch memory to learn the generator state it leaves."""
    with lock, autograd_hooks.quiet():
        schedule = Schedule(sink=op)
        run = Run(schedule)
        run.run(schedule.order())  # ends with the latest operator recorded, which is this one
        assert run.final_state is not None
        return run.final_state


streams.run_for_state = state_after
