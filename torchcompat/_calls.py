"""Notes on one operator call: its arguments encoded, its graph and its draws, the line it is on."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, List, Tuple

import torch

import torchcompat
from torchcompat import _infer, fake_tensor
from torchcompat._random import draws, streams
from torchcompat._tape import (
    Const,
    Geometry,
    Op,
    Storage,
    Value,
    checksums,
    flat,
    stamp,
)
from torchcompat._thread import thread

if TYPE_CHECKING:
    from torchcompat._plans import Plan

FakeTensor = fake_tensor.FakeTensor
aten = torch.ops.aten

_SKIPPED = tuple(f.rpartition("__init__")[0] for f in (torch.__file__, torchcompat.__file__))
_WITH_GENERATOR = {aten.randperm.default: aten.randperm.generator}


Tensors = Tuple[List[Any], List[Any]]  # the fake and the real ones among a call's arguments


def site() -> tuple[str, int] | None:
    """Find the line outside torch and this package that the present call comes from."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_SKIPPED) and name[:1] != "<":
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def new_op(func: Any, args: Any, kwargs: Any, name: str) -> Op:
    """Start the record of a call with what is true of this thread now."""
    op = Op(func, args, kwargs)
    op.name = name
    op.site = site()
    op.grad = torch.is_grad_enabled()
    op.default_dtype = torch.get_default_dtype()
    if torch.is_inference_mode_enabled():
        op.inference = True
    return op


def tensors(args: Any, kwargs: dict[str, Any]) -> Tensors:
    """Collect the fake and the real tensors among a call's arguments."""
    fakes: list[Any] = []
    reals: list[Any] = []
    for arg in (*args, *kwargs.values()):
        for item in flat(arg) if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, torch.Tensor):
                (fakes if isinstance(item, FakeTensor) else reals).append(item)
    return fakes, reals


def encode(arg: Any, graph: bool = False) -> Any:
    """Replace tensors by values and constants; a graph needs the very tensors it starts from."""
    if isinstance(arg, FakeTensor):
        return arg._value
    if isinstance(arg, torch.Tensor):
        return Const(arg, graph and arg.requires_grad)
    if isinstance(arg, (list, tuple)) and any(isinstance(a, torch.Tensor) for a in arg):
        return [encode(a, graph) for a in arg]
    return arg


def replaces(value: Value) -> bool:
    """Tell whether an overwrite through a handle leaves nothing of what its storage held."""
    assert value.storage is not None
    return not value.storage.graph and _covers(value)


def _covers(value: Value) -> bool:
    """Tell whether a handle touches every element of its storage, each once."""
    assert value.storage is not None
    mine, root = value.geometry, value.storage.root
    if mine is root:
        return True
    same = mine.dtype == root.dtype and mine.numel == root.numel and mine.offset == root.offset
    if not same:
        return False
    return (mine.size, mine.stride) == (root.size, root.stride) or (dense(mine) and dense(root))


def dense(g: Geometry) -> bool:
    """Tell whether elements lie side by side, in whatever order of dimensions."""
    step = 1
    for stride, size in sorted((t, s) for s, t in zip(g.size, g.stride) if s != 1):
        if stride != step:
            return False
        step *= size
    return True


def note_graph(op: Op, inputs: Any, results: list[Value]) -> None:
    """Note that ``op`` extends the autograd graph, and from which leaves."""
    if not any(map(_in_graph, inputs)):
        return
    dtypes = ((r, r.geometry.dtype) for r in results)
    results = [r for r, dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if not results:
        return
    fakes = [f for f in inputs if isinstance(f, FakeTensor)]
    graded = [f for f in fakes if f.requires_grad]
    op.graph = True
    for result in results:
        result.storage.graph = True  # type: ignore[union-attr]
    there = {f._value.storage for f in graded if f._value.storage.memory is not None}
    op.seen = {s: (stamp(s), checksums(s.memory)) for s in there}
    op.leaves = [(f._value, fake_tensor.real_class(f)) for f in graded if f.is_leaf]
    found = [weakref.ref(r) for r in results]
    for fake in fakes:
        fake._value.storage.dependents.append((found, 0 if _in_graph(fake) else op.seq))
    if op.name == "clone":
        g = fakes[0]._value.geometry
        results[0].resolves = g.conj or g.neg


def _in_graph(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad or (isinstance(tensor, FakeTensor) and tensor._value.resolves)


def note_draws(plan: Plan, op: Op, args: Any, kwargs: Any, device: torch.device) -> None:
    """Note where in which stream a random operator starts, and move the stream past it."""
    generator = kwargs.get("generator")
    op.kwargs = {k: v for k, v in op.kwargs.items() if k != "generator"}
    op.func = _WITH_GENERATOR.get(plan.func, plan.func)
    op.takes_generator = plan.generator or op.func is not plan.func
    if generator is None:
        generator = streams.default_generator(device)
    if generator is None and fake_tensor.hardware(device.type):
        raise NotImplementedError(
            f"{op.describe()} draws on {device}, of which torch shows no generator, so that it can "
            "not be deferred. Pass a generator, or build on the CPU and move the result."
        )
    if generator is None:
        return
    spending = draws.predict(plan.func, args, kwargs) if device.type == "cpu" else None
    pass_generator(op, generator, spending)


def pass_generator(op: Op, generator: torch.Generator, spending: Any) -> None:
    """Note where ``op`` starts drawing, with the generator left where eager would leave it."""
    if thread.deferred:
        thread.generators[id(generator)] = generator
    streams.draw(op, generator, spending, bool(thread.deferred))


def fix(fake: Any, value: Value) -> Any:
    """Make ``fake`` stand for ``value`` from now on; to graphs it stays the leaf that it is."""
    old = fake._value
    dependents = old.storage.dependents if old.storage is not None else ()
    if old.former is not None or any(not seq for _, seq in dependents):
        value.former = old
    fake_tensor.refit(fake, value)
    return fake


def constant(tensor: torch.Tensor) -> Value:
    """Return a value whose memory is that of a real tensor."""
    storage = Storage(_infer.geometry_of(tensor))
    storage.memory = tensor.detach()
    return Value(storage, storage.root)


def strided(base: Value, size: Any, stride: Any, offset: int) -> Value:
    """Return a value that ``as_strided`` makes of another."""
    op = new_op(aten.as_strided.default, (base, list(size), list(stride), offset), {}, "as_strided")
    g = base.geometry
    geometry = Geometry(tuple(size), tuple(stride), offset, g.dtype, g.device)
    value = Value(base.storage, geometry, base, op)
    return value if op.grad else Value(base.storage, geometry, value)
