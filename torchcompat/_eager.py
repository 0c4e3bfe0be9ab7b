"""What cannot be recorded faithfully runs now: it writes memory that is there, or answers Python.

Fakes among the arguments are computed on scratch memory and stay deferred, unless the operator
writes them, or extends a graph that will lead to them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchcompat import _infer, _replay, autograd_hooks, fake_tensor
from torchcompat._calls import constant, encode, fix, site, tensors
from torchcompat._random import streams
from torchcompat._tape import Const, flat
from torchcompat._thread import thread

if TYPE_CHECKING:
    from torchcompat._plans import Plan

FakeTensor = fake_tensor.FakeTensor

# Questions about metadata, which must not compute anything.
_METADATA: dict[str, Any] = {
    "is_pinned": lambda *_: False,
    "is_same_size": lambda a, b: a.shape == b.shape,
    "device": lambda a: a.device,
}


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
            return [real(i) for i in item] if any(map(torch.is_tensor, flat(item))) else item
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
    for fake in fakes:
        _resized(fake, made[id(fake)])
    if isinstance(result, torch.Tensor):
        return back.get(id(result), result)
    return result


def _resized(fake: Any, real: torch.Tensor) -> None:
    """Let a fake that an operator wrote have the size that it gave it."""
    if real.shape != fake.shape:
        fix(fake, constant(real))


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
    if plan.name in _METADATA:
        return _METADATA[plan.name](*args)
    if plan.name.startswith("sym_"):
        return _infer.infer(plan, [encode(a) for a in args], dict(kwargs))
    if any(f._value.storage is None for f in fakes):
        where = site()
        raise RuntimeError(
            f"{plan.name} reads the values of a tensor made by fake_mode, which has none"
            + (f" (called at {where[0]}:{where[1]})" if where else "")
        )
    return run(plan, args, kwargs)
