"""One operator call in general: its arguments encoded, its outputs made, its effects noted.

A call that cannot be recorded faithfully is run now (``run``): it writes real memory, or reads a
large tensor that the program may change. A call whose result is no tensor is answered (``answer``)
from values computed on scratch memory; what it read stays deferred.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

import torchcompat
from torchcompat import _infer, _replay, autograd_hooks, fake_tensor
from torchcompat._random import draws, streams
from torchcompat._tape import (
    SNAPSHOT_BYTES,
    Const,
    Geometry,
    Op,
    Storage,
    Value,
    replace,
    stamp,
)
from torchcompat._thread import thread

if TYPE_CHECKING:
    from torchcompat._plans import Plan

FakeTensor = fake_tensor.FakeTensor
aten = torch.ops.aten

_SKIPPED = tuple(f.rpartition("__init__")[0] for f in (torch.__file__, torchcompat.__file__))
_WITH_GENERATOR = {aten.randperm.default: aten.randperm.generator}
# Questions about metadata, which must not compute anything.
_METADATA = {"is_pinned": False, "is_coalesced": False, "is_same_size": None, "device": None}


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


def tensors(args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Collect the fake and the real tensors among a call's arguments."""
    fakes: list[Any] = []
    reals: list[Any] = []
    for arg in (*args, *kwargs.values()):
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
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


def fixed(arg: Any, in_graph: set[Value]) -> Any:
    """Replace values whose memory is already there by constants: it may be changed at any time."""

    def fix_one(item: Any) -> Any:
        if not isinstance(item, Value) or item in in_graph:
            return item
        if item.storage and item.storage.memory is not None:
            return Const(_replay.materialize(item))
        return item

    return replace(arg, fix_one)


def covers(value: Value) -> bool:
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
    dtypes = ((r, r.geometry.dtype) for r in results)
    results = [r for r, dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    graded = [t for t in inputs if t.requires_grad]
    if not results or not graded:
        return
    inputs = [f for f in graded if isinstance(f, FakeTensor)]
    op.graph = True
    for result in results:
        result.storage.graph = True  # type: ignore[union-attr]
    op.seen = [(s, stamp(s)) for s in {f._value.storage for f in inputs} if s.memory is not None]
    op.leaves = [(f._value, fake_tensor.real_class(f)) for f in inputs if f.is_leaf]
    for fake in inputs:
        fake._value.storage.dependents.extend(weakref.ref(r) for r in results)


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


def record(plan: Plan, args: Any, kwargs: dict[str, Any], fakes: list[Any]) -> Any:
    """Record an operator, or run it now where that is the only faithful thing."""
    written = plan.written(args, kwargs)
    real_memory = [
        t for t in written if not isinstance(t, FakeTensor) or t._value.storage.memory is not None
    ]
    if real_memory and not plan.views_metadata:
        return run(plan, args, kwargs)
    if not plan.tensors_only:
        return answer(plan, args, kwargs, fakes)
    if plan.views_metadata:
        return rebind(plan, args, kwargs)
    if all(r is None for r in plan.returns) and _all_real_and_large(fakes):
        return run(plan, args, kwargs)
    op = new_op(plan.func, (), {}, plan.name)
    from torchcompat._outputs import Outputs  # it needs this module

    return Outputs(plan, args, kwargs, op).build(written)


def _all_real_and_large(fakes: list[Any]) -> bool:
    """Tell whether an operator reads only memory that is there, and much of it."""
    if not fakes or any(f._value.storage.memory is None or f.requires_grad for f in fakes):
        return False
    return any(f._value.geometry.numel * f.element_size() > SNAPSHOT_BYTES for f in fakes)


def run(plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator for real now: fakes among its arguments are computed first."""
    written = plan.written(args, kwargs)
    fakes, reals = tensors(args, kwargs)
    inputs = (*fakes, *reals) if written and fakes and torch.is_grad_enabled() else ()
    graph = any(t.requires_grad for t in inputs)
    if graph:
        _refuse_graph(plan, written, fakes)
    lasting = fakes if graph or plan.name == "set_" else written
    made = {id(f): _real(f, graph, any(f is t for t in lasting)) for f in fakes}
    back = {id(made[id(f)]): f for f in fakes}

    def real(item: Any) -> Any:
        if isinstance(item, (list, tuple)):
            return [real(i) for i in item] if any(map(torch.is_tensor, item)) else item
        return made.get(id(item), item)

    real_args = [real(a) for a in args]
    real_kwargs = {k: real(a) for k, a in kwargs.items()}
    for fake in written:
        if isinstance(fake, FakeTensor):  # below autograd nothing counts the write
            fake._value.storage.changes += 1
    for tensor in plan.written(real_args, real_kwargs):
        Const.before_write(tensor)
    _expose(plan, kwargs, [*written, *fakes, *reals])
    if graph or any(t.is_inference() for t in reals):
        # Autograd has seen the fakes, and of inference tensors nothing: it sees this call.
        with autograd_hooks.above():
            result = plan.func(*real_args, **real_kwargs)
    else:
        result = plan.func(*real_args, **real_kwargs)
    if isinstance(result, torch.Tensor):
        return back.get(id(result), result)
    return result


def _real(fake: Any, graph: bool, lasting: bool) -> torch.Tensor:
    """Return a real tensor for a fake: as a leaf of a graph, as it will be given out, or a copy."""
    if graph and fake.requires_grad and fake.is_leaf:
        return _replay.leaf(fake._value, fake_tensor.real_class(fake))
    return _replay.materialize(fake._value) if lasting else _replay.compute(fake._value)


def _refuse_graph(plan: Plan, written: list[Any], fakes: list[Any]) -> None:
    """Refuse to let the graph of a real tensor lead to deferred ones."""
    real = any(not isinstance(t, FakeTensor) for t in written)
    if real and any(f.requires_grad for f in fakes):
        raise RuntimeError(
            f"{plan.name} writes a real tensor from a deferred one that requires grad: the graph "
            "would lead to the deferred tensor. Materialise it first, or use torch.no_grad()."
        )


def _expose(plan: Plan, kwargs: dict[str, Any], tensors: list[Any]) -> None:
    """Give the generators that an operator is about to draw from their true states."""
    generator = kwargs.get("generator")
    if plan.random and generator is None:
        device = next((t.device for t in tensors), kwargs.get("device") or torch.device("cpu"))
        generator = streams.default_generator(device)
    drawn = [generator] if plan.random and generator is not None else []
    for each in thread.generators.values() if plan.foreign else drawn:  # which may take any
        streams.expose(each)


def answer(plan: Plan, args: Any, kwargs: dict[str, Any], fakes: list[Any]) -> Any:
    """Compute a result that is no tensor."""
    if plan.name in _METADATA or plan.name.startswith("sym_"):
        if plan.name == "is_same_size":
            return args[0].shape == args[1].shape
        if plan.name == "device":
            return args[0].device
        if plan.name.startswith("sym_"):
            return _infer.infer(plan, [encode(a) for a in args], dict(kwargs))
        return _METADATA[plan.name]
    if any(f._value.storage is None for f in fakes):
        where = site()
        raise RuntimeError(
            f"{plan.name} reads the values of a tensor made by fake_mode, which has none"
            + (f" (called at {where[0]}:{where[1]})" if where else "")
        )
    return run(plan, args, kwargs)


def rebind(plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Serve an operator that changes the sizes or the memory of its first argument's handle."""
    fake = args[0]
    if not isinstance(fake, FakeTensor):
        return run(plan, args, kwargs)
    value = fake._value
    if plan.name == "set_" and len(args) > 1:
        source = args[1]
        if not isinstance(source, torch.Tensor):  # a storage: memory that exists
            if source.nbytes() and not source.data_ptr():
                raise RuntimeError("set_ to a deferred tensor's storage: pass the tensor itself")
            with autograd_hooks.quiet():
                made = torch.empty(0, dtype=fake.dtype, device="cpu")
                made = plan.func(made, *args[1:], **kwargs)
            return fix(fake, constant(made))
        if isinstance(source, FakeTensor):
            base = source._value
            return fix(fake, Value(base.storage, base.geometry, base))
        return fix(fake, constant(plan.func(torch.empty_like(source), *args[1:], **kwargs)))
    handle = _infer.shadow(value).detach()
    with autograd_hooks.quiet():
        handle = plan.func(handle, *(_infer.to_meta(a) for a in args[1:]), **kwargs)
    g = _infer.geometry_of(handle, value.geometry.device)
    if value.storage is None:
        return fix(fake, Value(None, g))
    if g.nbytes > value.storage.root.nbytes:
        return fix(fake, _grown(value, g))
    return fix(fake, strided(value, g.size, g.stride, g.offset))


def set_strided(fake: Any, source: Any, offset: int, size: Any, stride: Any = None) -> Any:
    """Serve ``fake.set_(source, offset, size, stride)``."""
    base = source._value
    stride = stride or _infer.contiguous(size, fake.dtype, fake.device).stride
    return fix(fake, strided(base, size, stride, offset + base.geometry.offset))


def fix(fake: Any, value: Value) -> Any:
    """Make ``fake`` stand for ``value`` from now on; to graphs it stays the leaf that it is."""
    old = fake._value
    if old.former is not None or (old.storage is not None and old.storage.dependents):
        value.former = old
    fake_tensor.refit(fake, value)
    return fake


def constant(tensor: torch.Tensor) -> Value:
    """Return a value whose memory is that of a real tensor."""
    storage = Storage(_infer.geometry_of(tensor))
    storage.memory = tensor.detach()
    return Value(storage, storage.root)


def strided(base: Value, size: Any, stride: Any, offset: int) -> Value:
    op = new_op(aten.as_strided.default, (base, list(size), list(stride), offset), {}, "as_strided")
    g = base.geometry
    geometry = Geometry(tuple(size), tuple(stride), offset, g.dtype, g.device)
    value = Value(base.storage, geometry, base, op)
    return value if op.grad else Value(base.storage, geometry, value)


def _grown(value: Value, g: Geometry) -> Value:
    """Give a handle a larger storage that begins with the old one's content."""

    def grow(old: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(g.size, g.stride, dtype=g.dtype, device=g.device)
        flat = made.as_strided((g.reach,), (1,))
        kept = old.as_strided((value.storage.root.reach,), (1,), 0)  # type: ignore[union-attr]
        flat[: kept.numel()].copy_(kept)
        return made

    storage = Storage(g)
    op = new_op(grow, (value,), {}, "resize_")
    op.reads, op.made = (value,), (storage,)
    storage.writers.append(op)
    return Value(storage, g)
