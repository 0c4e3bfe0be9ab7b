"""Recording: a dispatch mode, and the fakes' own dispatch, write the tape.

Every operator on a fake comes here, inside ``deferred_init`` or not; factories come here inside. An
operator is, in this order: run for real if no fake takes part; served by a short path if it is a
plain factory or keeps its tensor's shape; run for real if it writes real memory; answered if its
result is no tensor; and recorded otherwise. Recording an operator means: its outputs' geometry is
inferred, the writes are noted with the storages, its draws with the generator's stream.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from torchcompat import _calls, _eager, _infer, _outputs, _rebind, autograd_hooks, fake_tensor
from torchcompat._calls import Tensors, new_op, note_draws, note_graph, replaces
from torchcompat._plans import Plan, plan_for, plans
from torchcompat._tape import SNAPSHOT_BYTES, Geometry, Storage, Value
from torchcompat._thread import require_devices, thread

FakeTensor = fake_tensor.FakeTensor
aten = torch.ops.aten

_CPU = torch.device("cpu")
_META = torch.device("meta")
_DENSE = (None, torch.strided)
_OPTIONS = {"dtype", "layout", "device", "pin_memory", "memory_format"}


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record one operator, or run it, and return what the caller gets."""
    plan = plans.get(func) or plan_for(func)
    args, kwargs = _adapted(plan, args, kwargs) if plan.adapts else (args, kwargs)
    first = args[0] if args else None
    if isinstance(first, FakeTensor):
        if plan.fills and _is_fill(first, args):
            return _fill(plan, first, args, kwargs)
        if func is aten.detach.default:
            return alias(first)
    elif plan.sized and thread.devices and not thread.pure and not isinstance(first, torch.Tensor):
        return _factory(plan, args, kwargs)
    if plan.composite:
        with thread.modes[-1] if thread.modes else contextlib.nullcontext():
            return autograd_hooks.decompose(func, args, kwargs)
    fakes, reals = _calls.tensors(args, kwargs)
    if not fakes:
        return _without_fakes(plan, args, kwargs, reals)
    if kwargs.get("device") == _META and plan.name != "_to_copy":
        # Where its hardware is not there, a fake's device is meta to the kernels that pass it on.
        device = fakes[0].device
        kwargs = kwargs if fake_tensor.hardware(device.type) else {**kwargs, "device": device}
    pure = [f._value.storage is None for f in fakes]
    if any(pure) and not (plan.is_like and all(pure)):
        allowed = all(pure) and (thread.pure or not thread.deferred)
        return _pure(plan, args, kwargs, (fakes, reals), allowed)
    if plan.is_like:
        return _factory(plan, args, kwargs, fakes[0])
    return record(plan, args, kwargs, (fakes, reals))


def _adapted(plan: Plan, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make tensors of numbers that the overload itself would not take; name the generator."""
    for i in plan.numbers:
        if i < len(args) and isinstance(args[i], (int, float, complex)):
            args = (*args[:i], torch.tensor(args[i], device=_CPU), *args[i + 1 :])
    at = plan.generator_at
    if at is not None and len(args) > at:
        args, kwargs = args[:at], {**kwargs, "generator": args[at]}
    return args, kwargs


def _is_fill(fake: Any, args: Any) -> bool:
    """Tell whether an in-place call writes deferred memory and reads no other tensor."""
    storage = fake._value.storage
    if storage is not None and storage.memory is not None:
        return False
    for arg in args[1:]:  # noqa: SIM110 - any() with a generator takes twice the time
        if isinstance(arg, (torch.Tensor, list)):
            return False
    return True


# Short paths: most of what a constructor does.


def _fill(plan: Plan, fake: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an in-place operator whose other arguments are no tensors."""
    value = fake._value
    storage = value.storage
    if storage is None:
        return fake
    _infer.check_fill(plan, value.geometry, args, kwargs)
    op = new_op(plan.func, (value, *args[1:]), kwargs, plan.name)
    op.writes = (value,)
    if plan.overwrites and replaces(value):
        op.overwrites = True
    else:
        op.reads = (value,)
    if op.grad and (fake.requires_grad or value.resolves):
        note_graph(op, (fake,), [value])
    if plan.random:
        note_draws(plan, op, args, kwargs, value.geometry.device)
    storage.writers.append(op)
    return fake


def alias(fake: Any, apart: bool = False) -> Any:
    """Make a fake on the same memory, outside the graph; ``apart``: writes are not counted."""
    return fake_tensor.wrap(fake._value.alias(apart))


def _factory(plan: Plan, args: Any, kwargs: dict[str, Any], like: Any = None) -> Any:
    """Record a factory as new memory and, where it has contents, one in-place operator on it."""
    device = kwargs.get("device") or (like.device if like is not None else _CPU)
    if device.type == "meta":
        return plan.func(*map(_infer.to_meta, args), **kwargs)
    geometry = _sized(plan, args, kwargs, device, like)
    if geometry is None:
        result = _infer.infer(*_shaping(plan, args, kwargs))
        if result.layout != torch.strided:
            return _eager.run(plan, args, kwargs)  # a tape is of dense memory
        geometry = _infer.geometry_of(result, fake_tensor.indexed(device))
    if kwargs.get("pin_memory"):
        torch.empty(0, device="cpu").pin_memory()  # fails where eager fails
    if thread.pure or (fake_tensor.is_fake(like) and like._value.storage is None):
        return fake_tensor.wrap(Value(None, geometry))
    storage = Storage(geometry)
    fake = fake_tensor.wrap(Value(storage, geometry))
    if plan.fill is not None:
        func, names = plan.fill
        low = 0 if "low" in names else None
        values = [plan.argument(n, args, kwargs, low) if isinstance(n, str) else n for n in names]
        extra = {"generator": kwargs["generator"]} if kwargs.get("generator") else {}
        with torch.no_grad():
            _fill(plan_for(func), fake, (fake, *values), extra)
    return fake


def _shaping(plan: Plan, args: Any, kwargs: dict[str, Any]) -> tuple[Plan, Any, dict[str, Any]]:
    """Return a call that makes memory of the same shape and draws nothing."""
    if plan.name.endswith("_like"):
        kwargs = {k: v for k, v in kwargs.items() if k in _OPTIONS}
        plan, args = plan_for(aten.empty_like.default), args[:1]
    return plan, [_calls.encode(a) for a in args], dict(kwargs)


def _sized(plan: Plan, args: Any, kwargs: dict[str, Any], device: Any, like: Any) -> Any:
    """Describe what a factory makes if its arguments say it all; None if its kernel is to say."""
    if kwargs.get("memory_format") or kwargs.get("layout") not in _DENSE:
        return None
    device, dtype = fake_tensor.indexed(device), kwargs.get("dtype")
    if plan.name.endswith("_like"):
        if (
            like.layout != torch.strided
            or like.numel() == 0
            or not _calls.dense(_infer.geometry_of(like))
        ):
            return None
        return Geometry(tuple(like.shape), like.stride(), 0, dtype or like.dtype, device)
    if not plan.sized:
        return None
    size = plan.argument("size", args, kwargs)
    if size and min(size) < 0:
        torch.empty(size, device=_CPU)  # fails where eager fails
    if dtype is None and like is not None:
        dtype = like.dtype
    elif dtype is None and plan.name == "full":
        dtype = torch.full((), plan.argument("fill_value", args, kwargs), device=_CPU).dtype
    elif dtype is None:
        dtype = torch.int64 if plan.name == "randint" else torch.get_default_dtype()
    return _infer.contiguous(size, dtype, device)


# The general path.


def _without_fakes(plan: Plan, args: Any, kwargs: dict[str, Any], reals: list[Any]) -> Any:
    """Serve an operator that no fake takes part in: a factory, or one on real tensors only."""
    device = kwargs.get("device")
    if device is not None:
        require_devices(device.type)
    if plan.name in ("lift_fresh", "lift"):
        return _lifted(args[0])
    if device is not None and device.type == "meta":
        return plan.func(*args, **kwargs)
    if reals:
        moved = device is not None and not fake_tensor.hardware(device.type)
        scalar = plan.name == "new_empty" and not args[1]  # how a real tensor begins its deepcopy
        if plan.is_like and not plan.writes and not scalar:
            return _factory(plan, args, kwargs, reals[0])
        if not moved:
            return _eager.run(plan, args, kwargs)
        return record(plan, args, kwargs, ([], reals))
    if plan.is_like and not plan.writes:
        return _factory(plan, args, kwargs)
    if not plan.tensors_only or (plan.name == "from_file" and not thread.pure):  # which may change
        return _eager.run(plan, args, kwargs)
    if thread.pure:
        return _pure(plan, args, kwargs, ([], []), True)
    return record(plan, args, kwargs, ([], []))


def _lifted(tensor: torch.Tensor) -> torch.Tensor:
    """Serve ``torch.tensor(...)`` and its like: a fake on memory that exists, and may be shared."""
    if thread.pure:
        return fake_tensor.wrap(Value(None, _infer.geometry_of(tensor)))
    return fake_tensor.wrap(_calls.constant(tensor))


def _pure(plan: Plan, args: Any, kwargs: dict[str, Any], tensors: Tensors, allowed: bool) -> Any:
    """Serve an operator on fakes that have no tape."""
    if not allowed:
        raise ValueError(
            f"{plan.name} mixes a tensor made by fake_mode into a recording: it can have no values."
            " Make it inside deferred_init, or use fake_mode for all of them."
        )
    return _outputs.Outputs(plan, args, kwargs, tensors, None).build()


def record(plan: Plan, args: Any, kwargs: dict[str, Any], tensors: Tensors) -> Any:
    """Record an operator, or run it now where that is the only faithful thing."""
    fakes, _ = tensors
    written = plan.written(args, kwargs)
    real_memory = [
        t for t in written if not isinstance(t, FakeTensor) or t._value.storage.memory is not None
    ]
    if real_memory and not plan.views_metadata:
        return _eager.run(plan, args, kwargs)
    if not plan.tensors_only or plan.checks:
        return _eager.answer(plan, args, kwargs, fakes)
    if plan.views_metadata:
        return _rebind.rebind(plan, args, kwargs)
    if all(r is None for r in plan.returns) and _all_real_and_large(fakes):
        return _eager.run(plan, args, kwargs)
    op = new_op(plan.func, (), {}, plan.name)
    return _outputs.Outputs(plan, args, kwargs, tensors, op).build(written)


def _all_real_and_large(fakes: list[Any]) -> bool:
    """Tell whether an operator reads only memory that is there, and much of it."""
    if not fakes or any(f._value.storage.memory is None or f.requires_grad for f in fakes):
        return False
    return any(f._value.geometry.numel * f.element_size() > SNAPSHOT_BYTES for f in fakes)
