"""C9: recording needs no memory for values, and long programs neither crash nor crawl.

The bars of speed are measured by `benchmarks/`; here stand the limits no machine should miss.
"""

from __future__ import annotations

import gc
import resource
import sys
import time

import pytest
import torch
from torch import nn

from tests.equality import RELEASE, assert_equal, both, materialize
from tests.zoo import language
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)

MIB = 1 << 20


def resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * resource.getpagesize()


needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@needs_proc
def test_a_model_of_a_terabyte_is_recorded_in_megabytes():
    deferred_init(nn.Linear, 3, 2)
    before, start = resident(), time.process_time()
    model = deferred_init(
        lambda: nn.ModuleList(nn.Linear(200_000, 200_000, bias=False) for _ in range(8))
    )
    assert sum(p.numel() for p in model.parameters()) * 4 > 1e12
    assert resident() - before < 64 * MIB
    assert time.process_time() - start < 20
    assert is_deferred(model)


@needs_proc
def test_one_part_of_a_large_model_costs_that_part():
    def build():
        return nn.ModuleDict(
            {"small": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "large": nn.Linear(20_000, 20_000)}
        )

    torch.manual_seed(0)
    eager = nn.Linear(8, 8)
    torch.manual_seed(0)
    model = deferred_init(build)
    before = resident()
    materialize_module(model["small"])
    materialize_module(model["norm"])
    assert_equal(eager, model["small"])
    assert resident() - before < 64 * MIB
    assert is_deferred(model["large"])


@needs_proc
def test_casting_never_holds_both_models():
    """Sixteen float32 tensors of 4 MiB cast to bfloat16: the float32 model is never whole."""
    model = deferred_init(
        lambda: nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))
    )
    model.to(torch.bfloat16)
    gc.collect()
    before = resident()
    peak = _peak(lambda: materialize_module(model))
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    assert peak - before < 80 * MIB  # 96 with both


def _peak(action) -> int:
    """The highest resident size seen while `action` runs, by looking often from another thread."""
    import threading

    highest, stop = [resident()], threading.Event()

    def watch():
        while not stop.wait(0.002):
            highest[0] = max(highest[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    stop.set()
    watcher.join()
    return max(highest[0], resident())


def test_dead_writes_are_forgotten_in_long_chains():
    """A hundred thousand in-place operations on one tensor; torchdistx overflows the stack here."""

    def build():
        tensor = torch.zeros(4)
        for _ in range(100_000):
            tensor.add_(1)
        return tensor

    tensor = deferred_init(build)
    assert_equal(torch.full((4,), 100_000.0), materialize_tensor(tensor))


def test_long_chain_of_results():
    def build():
        tensor = torch.zeros(2)
        for _ in range(20_000):
            tensor = tensor + 1
        return tensor

    tensor = deferred_init(build)
    assert_equal(torch.full((2,), 20_000.0), materialize_tensor(tensor))


def test_long_chain_that_is_dropped():
    """Freeing the record of a long chain must not recurse through it either."""

    def build():
        tensor = torch.zeros(2)
        for _ in range(50_000):
            tensor = tensor + 1
        return tensor

    tensor = deferred_init(build)
    del tensor
    gc.collect()


def test_views_of_views_of_views():
    def build():
        tensor = torch.zeros(2)
        for _ in range(1_000):
            tensor = tensor.view(2)
            tensor.add_(1)
        return tensor

    assert_equal(torch.full((2,), 1_000.0), materialize_tensor(deferred_init(build)))


def test_many_writes_to_many_views():
    def build():
        table = torch.zeros(300, 3)
        for number in range(300):
            table[number] = number
            table[number, 1:].mul_(2)
        return table

    pair = both(build)
    materialize_tensor(pair.deferred)
    assert_equal(pair.eager, materialize_tensor(pair.deferred))


@needs_proc
@pytest.mark.skipif(
    RELEASE < (2, 10) and sys.version_info >= (3, 14),
    reason="torch 2.9 on Python 3.14 never frees what any tensor has as an attribute",
)
def test_recording_again_and_again_leaks_nothing():
    def once():
        model = deferred_init(language.Llama)
        materialize_module(model.layers[0])
        del model

    for _ in range(10):
        once()
    gc.collect()
    objects, before = len(gc.get_objects()), resident()
    for _ in range(30):
        once()
    gc.collect()
    assert len(gc.get_objects()) - objects < 500
    assert resident() - before < 16 * MIB


def test_cycles_are_not_needed_to_free_a_recording():
    """Dropping the last reference is enough; no garbage collection has to come by."""
    import weakref

    tensor = deferred_init(torch.randn, 1000)
    watch = weakref.ref(tensor)
    gc.disable()
    try:
        del tensor
        assert watch() is None
    finally:
        gc.enable()


def test_recording_is_not_slower_than_meta_by_much():
    """A coarse guard, so that a machine in use does not fail it; the bar is in benchmarks."""
    if not hasattr(torch, "set_default_device"):
        pytest.skip("torch 1.13 cannot build a whole model on the meta device")

    def on_meta():
        with torch.device("meta"):
            return language.Llama(depth=8)

    def timed(fn):
        start = time.process_time()
        fn()
        return time.process_time() - start

    timed(on_meta), timed(lambda: deferred_init(language.Llama, 8))
    meta = min(timed(on_meta) for _ in range(5))
    deferred = min(timed(lambda: deferred_init(language.Llama, 8)) for _ in range(5))
    assert deferred < 5 * meta + 0.05


def test_materialised_models_equal_after_all_of_this():
    pair = both(language.Llama)
    materialize(pair.deferred)
    assert_equal(*pair)
