"""What an operator would return: its shapes, strides and dtypes.

From torch 2.1 on most meta kernels are written in Python: they cost 50 to 300 us, and the first one
imports sympy and torch._dynamo, seconds that a recording has no use for. Kernels for views are
C++ everywhere. So, in this order:
- operators that keep sizes, on contiguous tensors: sizes by broadcasting, the dtype from one run
  on single elements, kept per kinds of arguments;
- operators on little memory whose result's shape depends on shapes alone: a trial on real zeros;
- everything else: the operator on shadows, tensors on the ``meta`` device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchcompat import autograd_hooks, fake_tensor
from torchcompat._tape import Const, Geometry, Value, flat, replace, tensors_in

if TYPE_CHECKING:
    from torchcompat._plans import Plan

_CPU = torch.device("cpu")
_META = torch.device("meta")
_TRIAL = 1 << 20  # elements that a trial may touch
# Operators whose CPU kernels choose other strides than those for ``meta``, on some releases. (Not
# all operators are tried: of some, kernels write past the end on zeros.)
_LAID_BY_CPU = {"_linalg_svd", "linalg_eig", "_fft_r2c", "_fft_c2r", "_fft_c2c"}
_SHRUNK = 1 << 12  # elements beyond which a trial for strides is made on smaller tensors,
_KEPT = 8  # and the largest size that is kept there
_dtypes: dict[Any, torch.dtype] = {}


def geometry_of(tensor: torch.Tensor, device: torch.device | None = None) -> Geometry:
    """Describe how a tensor lies in its memory."""
    offset: Any = tensor.storage_offset()  # a plain number: nothing symbolic is inferred here
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    g = Geometry(size, stride, offset, tensor.dtype, device or tensor.device)
    g.conj, g.neg = tensor.is_conj(), tensor.is_neg()
    return g


def located(result: Any, device: torch.device) -> Geometry:
    """Describe an inferred result as lying on ``device``."""
    if isinstance(result, Geometry):
        return Geometry(result.size, result.stride, result.offset, result.dtype, device)
    return geometry_of(result, device)


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


_accepted: set[Any] = set()


def check_fill(plan: Plan, geometry: Geometry, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise what torch raises for an in-place operator with these scalars on such a tensor."""
    kind = (geometry.dtype, len(geometry.size), 0 in geometry.size)
    key = (plan.func, *kind, *args[1:], *kwargs.items())
    size = [min(s, 2) for s in geometry.size]
    apart = [1 if t == 0 else s for t, s in zip(geometry.stride, size)]
    overlapping = 0 not in size and apart != size
    try:
        if key in _accepted and not overlapping:
            return
    except TypeError:
        return
    with autograd_hooks.quiet():
        one = torch.zeros(apart if overlapping else size, dtype=geometry.dtype, device=_CPU)
        one = one.expand(size) if overlapping else one
        named = {**kwargs, "generator": torch.Generator()} if plan.generator else kwargs
        try:
            plan.func(one, *args[1:], **named)
        except NotImplementedError:
            if geometry.device.type == "cpu":
                raise
    if len(_accepted) < 4096:
        _accepted.add(key)


def infer(plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return what a call returns, as tensors without content; raises what torch raises."""
    with autograd_hooks.quiet():
        if plan.keeps_sizes:
            found = _keeping_sizes(plan, args, kwargs)
            if found is not None:
                return found
        failed = None
        if plan.by_shape and _little(plan, args):
            try:
                return call_on(plan.func, args, kwargs, _zeros_like, _CPU)
            except Exception as error:  # on the CPU it fails so, elsewhere it may not
                failed = error
        if failed is not None and _all_on_cpu(args):
            raise failed
        result = call_on(plan.func, args, kwargs, _shadow_of, _META)
        if plan.name in _LAID_BY_CPU and not plan.foreign and _all_on_cpu(args):
            return _laid_by_cpu(plan.func, args, kwargs, result)
        return result


def _all_on_cpu(args: Any) -> bool:
    return all(_geometry(i).device == _CPU for i in tensors_in(args))


def _laid_by_cpu(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """Give results on ``meta`` the strides that the CPU kernel chooses, which may be others.

    The kernel is tried on zeros; in place of large tensors on small ones, whose sizes compare to
    each other as the true ones do. Where it cannot be tried, the strides stay as they are.
    """
    geometries = [_geometry(i) for i in tensors_in((*args, *kwargs.values()))]
    numbers = [n for a in (*args, *kwargs.values()) for n in flat(a) if isinstance(n, int)]
    reach = max(g.reach for g in geometries)
    shrink = reach > _SHRUNK and all(abs(n) < _KEPT for n in numbers)
    if reach > _TRIAL and not shrink:
        return result
    large = sorted({s for g in geometries for s in g.size if s > _KEPT})
    sizes = {s: _KEPT + 1 + i for i, s in enumerate(large)}

    def small(item: Any) -> torch.Tensor:
        g = _geometry(item)
        size = [sizes.get(s, s) for s in g.size]
        made = torch.zeros(size, dtype=g.dtype, device=_CPU)
        made = made.as_strided(size, _ordered(size, g.stride))
        return made[tuple(slice(0, 1) if t == 0 else slice(None) for t in g.stride)].expand(size)

    try:
        tried = call_on(func, args, kwargs, small if shrink else _zeros_like, _CPU)
    except Exception:
        return result
    return _laid_as(result, tried)


def _laid_as(result: Any, tried: Any) -> Any:
    """Return a tensor on ``meta`` with strides in the order of those of a dense tried one."""
    if isinstance(result, (list, tuple)):
        return type(result)(map(_laid_as, result, tried))
    plain = isinstance(result, torch.Tensor) and result.layout == tried.layout == torch.strided
    if not plain or result.dim() != tried.dim() or 0 in (result.numel(), tried.numel()):
        return result
    stride = tried.stride()
    if stride == result.stride():
        return result
    if result.shape != tried.shape:
        if stride != tuple(_ordered(tried.shape, stride)):
            return result
        stride = _ordered(result.shape, stride)
    return torch.empty_strided(result.shape, stride, dtype=result.dtype, device=_META)


def _ordered(size: Any, like: Any) -> list[int]:
    """Return the strides of a dense tensor whose dimensions lie in the order of other strides."""
    stride, step = [0] * len(size), 1
    for i in sorted(range(len(size)), key=lambda i: (like[i], -i)):
        stride[i] = step
        step *= max(size[i], 1)
    return stride


def call_on(func: Any, args: Any, kwargs: dict[str, Any], stand_in: Any, device: Any) -> Any:
    """Call an operator with stand-ins; a tensor that is passed twice has one."""
    made: dict[Any, torch.Tensor] = {}

    def one(item: Any) -> torch.Tensor:
        key = item if isinstance(item, Value) else id(item)
        if key not in made:
            made[key] = stand_in(item)
        return made[key]

    args = [replace(a, one) for a in args]
    kwargs = {k: replace(a, one) for k, a in kwargs.items()}
    if kwargs.get("device") is not None:
        kwargs["device"] = device
    if "generator" in kwargs:
        kwargs["generator"] = None if device == _META else torch.Generator()
    kwargs.pop("pin_memory", None)
    return func(*args, **kwargs)


def _geometry(item: Any) -> Geometry:
    return item.geometry if isinstance(item, Value) else geometry_of(item.tensor)


def _zeros_like(item: Any) -> torch.Tensor:
    """Make zeros, or return indices that are there: they may be out of range."""
    g = _geometry(item)
    real = item.tensor if isinstance(item, Const) else item.storage and item.storage.memory
    if real is not None and g.dtype == torch.int64 and g.device == _CPU:
        return real.as_strided(g.size, g.stride, g.offset).clone()
    flat = torch.zeros(g.reach, dtype=g.dtype, device=_CPU)
    return flat.as_strided(g.size, g.stride, g.offset)


def _little(plan: Plan, args: Any) -> bool:
    """Tell whether a call's arguments, and so its result, are small, and masks no part of it."""
    total: float = 1
    indexing = plan.name.startswith("index")
    for item in tensors_in(args):
        total = max(total, _geometry(item).reach)
        if indexing and _geometry(item).dtype in (torch.bool, torch.uint8):
            return False
    for arg in args:
        for number in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(number, (int, float)) and number > 1:
                total *= number
    return total <= _TRIAL


def _keeping_sizes(plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Infer an operator that keeps sizes, on contiguous tensors; None if that is not the case."""
    items = [a for a in args if isinstance(a, (Value, Const))]
    if not items or (plan.elementwise and any(isinstance(a, list) for a in args)):
        return None
    if any(isinstance(a, (Value, Const)) for a in kwargs.values()):
        return None
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        return None
    size = _joined(plan, items)
    if size is None or 0 in size:
        return None
    if plan.inplace and not (isinstance(args[0], Value) and size == args[0].geometry.size):
        return None
    kinds = (_kind(a, plan.elementwise) for a in args)
    key = (plan.func, torch.get_default_dtype(), *kinds, *kwargs.items())
    try:
        dtype = _dtypes.get(key)
    except TypeError:
        return None
    if dtype is None:
        result = call_on(plan.func, args, kwargs, _one_like, _CPU)
        if not isinstance(result, torch.Tensor):
            return None
        dtype = _dtypes[key] = result.dtype
    return contiguous(size, dtype, _META)


def _joined(plan: Plan, items: list[Any]) -> tuple[int, ...] | None:
    """Return the sizes that arguments broadcast to; None if one of them is not contiguous."""
    size: tuple[int, ...] | None = ()
    for item in items:
        g = _geometry(item)
        if not plan.inplace and contiguous(g.size, g.dtype, g.device).stride != g.stride:
            return None
        size = _broadcast(size, g.size)
        if size is None:
            return None
    return size


def _kind(arg: Any, elementwise: bool) -> Any:
    if isinstance(arg, (Value, Const)):
        g = _geometry(arg)
        return g.dtype, len(g.size)
    if elementwise:
        return type(arg)
    return tuple(arg) if isinstance(arg, list) else arg


def _one_like(item: Any) -> torch.Tensor:
    g = _geometry(item)
    return torch.ones((1,) * len(g.size), dtype=g.dtype, device=_CPU)


def _broadcast(a: Any, b: Any) -> tuple[int, ...] | None:
    if a == b:
        return tuple(a)
    if len(a) < len(b):
        a, b = b, a
    b = (1,) * (len(a) - len(b)) + tuple(b)
    size = []
    for m, n in zip(a, b):
        if m != n and m != 1 and n != 1:
            return None
        size.append(n if m == 1 else m)
    return tuple(size)


def common_device(items: Any, one: bool) -> torch.device | None:
    """Return the device a result is on: that of the arguments, CPU scalars giving way.

    If the operator wants ``one`` device for all, tensors on two are refused as torch refuses them.
    """
    found, placed = None, False
    for item in items:
        g = _geometry(item)
        scalar = not g.size
        if found is None or (not placed and not scalar) or (scalar and found.type == "cpu"):
            found = g.device if found is None or not placed else found
        elif one and not scalar and g.device != found:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{found} and {g.device}!"
            )
        placed = placed or not scalar
    return found
