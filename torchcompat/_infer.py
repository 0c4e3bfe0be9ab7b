"""What an operator would return: its shapes, strides and dtypes, from running it on ``meta``.

Each value gets a shadow on the ``meta`` device when an operator first needs one; operators that keep
their first argument's shape, and plain factories, never do. Python meta kernels are slow and import
much, so in-place random operators must not come here.
"""

from __future__ import annotations

from typing import Any

import torch

from torchcompat import autograd_hooks, fake_tensor
from torchcompat._tape import Const, Geometry, Value, replace

_META = torch.device("meta")


def geometry_of(tensor: torch.Tensor, device: torch.device | None = None) -> Geometry:
    """Describe how a tensor lies in its memory."""
    return Geometry(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        tensor.storage_offset(),
        tensor.dtype,
        device or tensor.device,
    )


def contiguous(size: Any, dtype: torch.dtype, device: torch.device) -> Geometry:
    """Describe a contiguous tensor."""
    stride, step = [0] * len(size), 1
    for i in range(len(size) - 1, -1, -1):
        stride[i] = step
        step *= size[i] if size[i] > 1 else 1
    return Geometry(tuple(size), tuple(stride), 0, dtype, device)


def meta_tensor(g: Geometry) -> torch.Tensor:
    """Make a tensor on the ``meta`` device."""
    flat = torch.empty(g.reach, dtype=g.dtype, device=_META)
    return flat.as_strided(g.size, g.stride, g.offset)


def shadow(value: Value) -> torch.Tensor:
    """Return the ``meta`` tensor that stands for a value."""
    if value.meta is None:
        g, base = value.geometry, value.parent
        if base is None:
            value.meta = torch.empty_strided(g.size, g.stride, dtype=g.dtype, device=_META)
        elif base.geometry.dtype == g.dtype:
            value.meta = shadow(base).as_strided(g.size, g.stride, g.offset)
        else:
            value.meta = meta_tensor(g)
    return value.meta


def _shadow_of(item: Any) -> torch.Tensor:
    if isinstance(item, Value):
        return shadow(item).detach()
    assert isinstance(item, Const)
    t = item.tensor
    return t if t.device.type == "meta" else t.detach().to(_META)


def to_meta(arg: Any) -> Any:
    """Replace a tensor argument by its shadow."""
    if fake_tensor.is_fake(arg):
        return shadow(arg._value).detach()
    return arg.detach().to(_META) if isinstance(arg, torch.Tensor) else arg


def infer(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on shadows and return what it returns; raises what the meta kernel raises."""
    with autograd_hooks.quiet():
        args = [replace(a, _shadow_of) for a in args]
        kwargs = {k: replace(a, _shadow_of) for k, a in kwargs.items()}
        if kwargs.get("device") is not None:
            kwargs["device"] = _META
        if "generator" in kwargs:
            kwargs["generator"] = None
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


def common_device(items: Any) -> torch.device | None:
    """Return the device a result is on: that of the arguments, CPU scalars giving way."""
    found = None
    for item in items:
        if isinstance(item, Value):
            device, scalar = item.geometry.device, not item.geometry.size
        else:
            device, scalar = item.tensor.device, item.tensor.dim() == 0
        if found is None or (found.type == "cpu" and not scalar):
            found = device
    return found
