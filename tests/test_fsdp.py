"""torch's own FSDP takes the deferred path through `torchdistx` and ends where eager FSDP ends.

Two gloo processes on the CPU build each model twice, eagerly and deferred, wrap both alike, and
compare shards, forward and one training step. What torch itself can do on a CPU depends on the
release:

- 1.13 and 2.0 ask for CUDA while wrapping, so there the functions around the hook are called;
- in 2.0 the hook is dead (a generator is exhausted before it asks `is_fake`): users give
  `param_init_fn`;
- 2.1 wraps, but its forward fails in torch; from 2.2 on everything runs;
- `fully_shard` exists in its final place from 2.6 on, and its forward runs on a CPU from 2.7 on.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.equality import RELEASE, assert_equal, both, raw, seed_all
from tests.zoo import habits, language, vision
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import is_fake

FORWARD = RELEASE >= (2, 2)
ORIGINAL = (False, True) if RELEASE >= (2, 0) else (False,)

sharding = pytest.mark.skipif(
    RELEASE == (1, 13) and sys.version_info >= (3, 11),
    reason="torch 1.13 cannot import its sharding code on Python 3.11",
)


class Case:
    """A model, the modules FSDP wraps one by one, and arguments for a forward call."""

    def __init__(self, build, wrapped, inputs):
        self.build, self.wrapped, self.inputs = build, wrapped, inputs


CASES = {
    "llama": Case(language.Llama, {language.LlamaBlock}, language.tokens()),
    "gpt2, tied": Case(language.GPT, {language.GPTBlock}, language.tokens()),
    "vit": Case(vision.ViT, {vision.ViTBlock}, vision.image()),
    "attention": Case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
        ),
        {nn.TransformerEncoderLayer},
        language.numbers(2, 3, 8),
    ),
    "plain": Case(
        lambda: nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), {nn.Linear}, language.numbers(2, 7)
    ),
}


# Two processes


def join(rank, folder, works):
    """One rank: run every work in turn, and write down how each ended, up to the first failure."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # FSDP on a CPU has much to say; what it says is not under test
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=90),
    )
    endings = {}
    try:
        for work in works:
            work()
            endings[work.__name__] = ""
    except BaseException:
        endings[work.__name__] = traceback.format_exc()
    finally:
        Path(folder, f"{rank}.json").write_text(json.dumps(endings))
        os._exit(0)  # past gloo, which aborts a process whose peer has gone


@pytest.fixture(scope="module")
def endings(tmp_path_factory):
    """How each work ended on each of two gloo ranks; starting processes is what takes the time."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    works = [work for work, since in WORKS.items() if since <= RELEASE]
    torch.multiprocessing.spawn(join, args=(folder, works), nprocs=2, join=True)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


def assert_ended_well(endings, work):
    for rank, ending in enumerate(endings):
        text = ending.get(work.__name__, "not reached: an earlier one failed")
        assert not text, f"rank {rank}: {text}"


def wrap(case, model, **kwargs):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=case.wrapped)
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **kwargs
    )


class Watch:
    """Counts the calls that torch makes of `torchdistx.deferred_init.materialize_module`."""

    def __enter__(self):
        from torchdistx import deferred_init as module

        self.module, self.original, self.roots = module, module.materialize_module, []
        module.materialize_module = self._called
        return self

    def _called(self, module, *args, **kwargs):
        self.roots.append((module, "check_fn" in kwargs))
        return self.original(module, *args, **kwargs)

    def __exit__(self, *error):
        self.module.materialize_module = self.original


def compare(eager, deferred, when):
    """Same names, same bytes in this rank's shards, and nothing left to do."""
    left, right = list(eager.named_parameters()), list(deferred.named_parameters())
    assert [name for name, _ in left] == [name for name, _ in right]
    for (name, mine), (_, other) in zip(left, right):
        assert not is_fake(other), name
        assert mine.shape == other.shape, name
        assert raw(mine) == raw(other), f"{name} {when}"
    for (name, mine), (_, other) in zip(eager.named_buffers(), deferred.named_buffers()):
        assert not is_fake(other), name
        assert raw(mine) == raw(other), f"{name} {when}"


def train(case, models):
    outputs = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seed_all(5)
        output = model.train()(*case.inputs())
        output.float().pow(2).mean().backward()
        optimizer.step()
        outputs.append(output)
    assert raw(outputs[0]) == raw(outputs[1])


def through_the_hook():
    for name, case in CASES.items():
        for original in ORIGINAL:
            keywords = {"use_orig_params": original} if RELEASE >= (2, 0) else {}
            seed_all(7)
            eager = wrap(case, case.build(), **keywords)
            seed_all(7)
            model = deferred_init(case.build)
            assert all(is_fake(p) for p in model.parameters())
            with Watch() as watch:
                deferred = wrap(case, model, **keywords)
            assert watch.roots, f"{name}: torch did not take the deferred path"
            assert all(checked for _, checked in watch.roots)
            compare(eager, deferred, f"of {name} after wrapping")
            if FORWARD:
                train(case, (eager, deferred))
                compare(eager, deferred, f"of {name} after a step")


def through_param_init_fn():
    """As in torch's own meta-device tests: materialise module by module below FSDP instances."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    from torchdistx import deferred_init as module

    def init(part):
        module.materialize_module(
            part, check_fn=lambda k: not isinstance(k, FullyShardedDataParallel)
        )

    for name in ("llama", "gpt2, tied"):
        case = CASES[name]
        seed_all(9)
        eager = wrap(case, case.build())
        seed_all(9)
        deferred = wrap(case, deferred_init(case.build), param_init_fn=init)
        compare(eager, deferred, f"of {name} after wrapping")


def by_hand():
    """Inner modules wrapped first, some built eagerly and some deferred, one ignored."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

    cpu = torch.device("cpu")

    def build():
        return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.LayerNorm(5))

    models = []
    for call in (lambda fn: fn(), deferred_init):
        seed_all(3)
        model = call(build)
        real = nn.Linear(5, 4)
        model[0] = FSDP(model[0], device_id=cpu)
        materialize_module(model[2])
        models.append(FSDP(nn.Sequential(model, real), device_id=cpu, ignored_modules=[model[2]]))
    compare(*models, "after wrapping")
    if FORWARD:
        train(Case(None, None, language.numbers(2, 6)), models)
        compare(*models, "after a step")


@sharding
@pytest.mark.since((2, 1), "wraps on a CPU")
@pytest.mark.parametrize("work", [through_the_hook, through_param_init_fn, by_hand])
def test_fsdp(work, endings):
    assert_ended_well(endings, work)


# FSDP2


def shard(case, model, **kwargs):
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if type(module) in case.wrapped:
            fully_shard(module, **kwargs)
    return fully_shard(model, **kwargs)


def locals_of(model):
    return {name: parameter.to_local() for name, parameter in model.named_parameters()}


def fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))
    for name, case in CASES.items():
        seed_all(7)
        eager = shard(case, case.build(), mesh=mesh)
        seed_all(7)
        deferred = shard(case, deferred_init(case.build), mesh=mesh)
        for parameter in deferred.parameters():
            assert isinstance(parameter, DTensor)
            assert is_fake(parameter.to_local())
        materialize_module(deferred)
        for mine, other in zip(eager.parameters(), deferred.parameters()):
            assert type(mine) is type(other)
            assert mine.placements == other.placements
            assert mine.requires_grad == other.requires_grad
        wanted, got = locals_of(eager), locals_of(deferred)
        assert list(wanted) == list(got)
        for key, value in wanted.items():
            assert not is_fake(got[key])
            assert raw(value) == raw(got[key]), f"{name}: {key}"
        if RELEASE >= (2, 7):
            train(case, (eager, deferred))
            for key, value in locals_of(eager).items():
                assert raw(value) == raw(locals_of(deferred)[key]), f"{name}: {key} after a step"


@pytest.mark.since((2, 6), "fully_shard in torch.distributed.fsdp")
def test_fully_shard(endings):
    assert_ended_well(endings, fully_sharded)


def collectives():
    """What a collective writes in place is written, inside a construction and outside."""
    dist = torch.distributed
    rank = dist.get_rank()

    def build():
        total, first = torch.full((2,), rank + 1.0), torch.full((2,), float(rank))
        dist.all_reduce(total)
        dist.broadcast(first, 0)
        gathered = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(gathered, torch.full((1,), float(rank)))
        return [total, first, *gathered]

    assert [t.tolist() for t in build()] == [
        materialize_tensor(t).tolist() for t in deferred_init(build)
    ]
    torch.manual_seed(rank)
    eager = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    torch.manual_seed(rank)
    module = deferred_init(nn.Linear, 2, 2)
    deferred = nn.parallel.DistributedDataParallel(module)
    materialize_module(deferred)
    assert type(module.weight) is nn.Parameter
    assert torch.equal(module.weight, eager.module.weight)


def test_collectives(endings):
    assert_ended_well(endings, collectives)


WORKS = {
    collectives: (1, 13),
    through_the_hook: (2, 1),
    through_param_init_fn: (2, 1),
    by_hand: (2, 1),
    fully_sharded: (2, 6),
}


PUT_TOGETHER = """
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchcompat.deferred_init import deferred_init, materialize_module

warnings.simplefilter("ignore")

def build():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 12, bias=False))
    nn.init.orthogonal_(model[0].weight)
    nn.init.eye_(model[1].weight)
    nn.init.sparse_(model[2].weight, 0.4)
    model.conv = nn.Conv1d(4, 8, 3)
    nn.init.dirac_(model.conv.weight)
    return model

def rows(parameter):
    return Shard(0)

def columns(parameter):
    even = parameter.dim() > 1 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1 if even else 0)

torch.manual_seed(3)
eager = dict(build().named_parameters())
for world in (1, 2, 4):
    for place in (rows, columns):
        shards = {name: [] for name in eager}
        dims = {}
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            mesh = init_device_mesh("cpu", (world,))
            torch.manual_seed(3)
            model = fully_shard(deferred_init(build), mesh=mesh, shard_placement_fn=place)
            materialize_module(model)
            for name, parameter in model.named_parameters():
                shards[name].append(parameter.to_local().detach())
                dims[name] = parameter.placements[0].dim
            dist.destroy_process_group()
        for name, parts in shards.items():
            whole = torch.cat(parts, dims[name])
            assert torch.equal(whole, eager[name].detach()), (world, place.__name__, name)
"""


@pytest.mark.since((2, 6), "fully_shard in torch.distributed.fsdp")
def test_shards_of_all_ranks_put_together_are_the_eager_model(run_python):
    """Worlds of 1, 2 and 4 ranks, rows and columns, even and uneven, each rank built in turn."""
    run_python(PUT_TOGETHER)


# One process


@sharding
@pytest.mark.before((2, 1), "wrapping asks for CUDA there")
def test_the_functions_around_the_hook():
    """What torch calls before it asks for CUDA: find out, materialise, and find nothing left."""
    pair = both(language.Llama)
    for module in (pair.deferred.layers[0], pair.deferred):
        assert needs_materialising(module) == (False, RELEASE != (2, 0))
        materialise_as_torch_does(module)
        assert needs_materialising(module) == (False, False)
    assert not is_deferred(pair.deferred)
    assert_equal(*pair)


def needs_materialising(module):
    if RELEASE >= (2, 0):
        from torch.distributed.fsdp._init_utils import _need_to_materialize_module

        return _need_to_materialize_module(module, set(), *(({},) if RELEASE >= (2, 1) else ()))
    from torchdistx import fake

    is_meta = any(p.is_meta for p in module.parameters())
    return is_meta, not is_meta and any(fake.is_fake(p) for p in module.parameters())


def materialise_as_torch_does(module):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817

    from torchdistx import deferred_init as alias

    if RELEASE >= (2, 0):  # its own hook never says yes, so this is what users are told to pass
        for part in module.modules():
            alias.materialize_module(part, check_fn=lambda m: not isinstance(m, FSDP))
        return

    class Bare:
        """As much of an FSDP instance as the method of 1.13 looks at."""

        _get_orig_params = staticmethod(lambda module, ignored: module.parameters())

    with Watch() as watch:
        FSDP._materialize_module(Bare(), module, None, torch.device("cpu"))
    assert watch.roots == [(module, True)]


@sharding
def test_torch_found_the_alias():
    if RELEASE >= (2, 0):
        from torch.distributed.fsdp import _init_utils as user
    else:
        from torch.distributed.fsdp import fully_sharded_data_parallel as user
    import torchdistx

    assert user._TORCHDISTX_AVAIL
    assert user.fake is torchdistx.fake
    assert user.deferred_init is torchdistx.deferred_init


@sharding
@pytest.mark.since((2, 1), "the hook is alive")
def test_torch_asks_is_fake():
    from torch.distributed.fsdp._init_utils import _need_to_materialize_module

    for build in (language.Llama, habits.tied_embedding_and_head):
        model = deferred_init(build)
        assert _need_to_materialize_module(model, set(), set()) == (False, True)
        materialize_module(model)
        assert _need_to_materialize_module(model, set(), set()) == (False, False)
        assert _need_to_materialize_module(build(), set(), set()) == (False, False)
