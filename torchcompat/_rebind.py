"""Handles that change in place: to other sizes, or to other memory.

Limit: a handle that grows gets memory of its own, which older views do not see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchcompat import _eager, _infer, autograd_hooks, fake_tensor
from torchcompat._calls import constant, fix, new_op, strided
from torchcompat._tape import Geometry, Storage, Value

if TYPE_CHECKING:
    from torchcompat._plans import Plan

FakeTensor = fake_tensor.FakeTensor


def rebind(plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Serve an operator that changes the sizes or the memory of its first argument's handle."""
    fake = args[0]
    if not isinstance(fake, FakeTensor):
        return _eager.run(plan, args, kwargs)
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
            return fake if source is fake else fix(fake, source._value.alias(apart=True))
        return fix(fake, constant(plan.func(torch.empty_like(source), *args[1:], **kwargs)))
    handle = _infer.shadow(value).detach()
    with autograd_hooks.quiet():
        handle = plan.func(handle, *(_infer.to_meta(a) for a in args[1:]), **kwargs)
    return lay(fake, _infer.geometry_of(handle, value.geometry.device))


def lay(fake: Any, g: Geometry) -> Any:
    """Give a handle other sizes and strides, and more memory if they need it."""
    value = fake._value
    if value.storage is None:
        return fix(fake, Value(None, g))
    if not g.fits(value.storage.root):
        return fix(fake, _grown(value, g))
    return fix(fake, _laid(value, g.size, g.stride, g.offset))


def set_strided(fake: Any, source: Any, offset: int, size: Any, stride: Any = None) -> Any:
    """Serve ``fake.set_(source, offset, size, stride)``."""
    base = source._value.alias(apart=True)
    stride = stride or _infer.contiguous(size, fake.dtype, fake.device).stride
    return fix(fake, _laid(base, size, stride, offset + base.geometry.offset))


def _laid(base: Value, size: Any, stride: Any, offset: int) -> Value:
    """Return a value that lies otherwise in the memory of another, and is to autograd no view."""
    value = strided(base, size, stride, offset)
    value.apart = True
    return value


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
