"""What fakes and patches ask of the recorder, apart from operators.

These are the things that reach Python without the dispatcher: reading and assigning ``.data``,
giving memory to numpy, copying, and recording a Python function as one operator.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch

from torchcompat import _calls, _rebind, _record, _replay, autograd_hooks, fake_tensor
from torchcompat._plans import plan_for
from torchcompat._random import draws, streams
from torchcompat._tape import Value
from torchcompat._thread import faked, thread
from torchcompat.autograd_hooks import paused

__all__ = ["alias", "dispatch", "paused"]

aten = torch.ops.aten
dispatch = _record.dispatch
alias = _record.alias
set_strided = _rebind.set_strided


def real_data(data: Any) -> Any:
    """Compute the fakes in nested sequences of data that a tensor is to be made of."""
    if isinstance(data, (list, tuple)):
        return [real_data(d) for d in data]
    return compute(data) if fake_tensor.is_fake(data) else data


def whole(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record an operator as it was called, not as torch decomposes it for tensor subclasses."""
    with paused():
        return _record.record(plan_for(func), args, kwargs, _calls.tensors(args, kwargs))


def recording() -> bool:
    """Tell whether this thread is inside ``deferred_init``."""
    return bool(thread.deferred) and not thread.pure


def fakes_hardware(kind: str) -> bool:
    """Tell whether devices of a kind that is not there may be named on this thread."""
    return bool(thread.modes) and faked(kind)


def expose_generator(generator: torch.Generator) -> None:
    """Give a generator its true state, if it holds a placeholder of ours."""
    if thread.deferred:
        with paused():
            streams.expose(generator)


def true_state(generator: torch.Generator) -> torch.Tensor:
    """Compute the state of a generator that may hold another thread's placeholder."""
    with paused():
        position = streams.placed(generator)
        return position.state() if position else streams.get_state(generator)


def assign(fake: Any, source: torch.Tensor) -> None:
    """Serve ``fake.data = source``: the fake stands for the source's memory from now on."""
    if fake_tensor.is_fake(source):
        _calls.fix(fake, source._value.alias(apart=True))
    elif (
        isinstance(source, torch.Tensor)
        and source.device.type != "meta"
        and (source.layout == torch.strided)
    ):
        _calls.fix(fake, _calls.constant(source))
    else:  # torch says why not
        torch.Tensor.data.__set__(fake, source)  # type: ignore[attr-defined]


def compute(fake: Any) -> torch.Tensor:
    """Compute the values of a fake; it stays deferred."""
    return _replay.compute(_recorded(fake))


def expose(fake: Any) -> torch.Tensor:
    """Give a fake its memory, which somebody outside is going to see."""
    return _replay.materialize(_recorded(fake))


def _recorded(fake: Any) -> Value:
    value: Value = fake._value
    if value.storage is None:
        raise RuntimeError(f"{fake!r} was made by fake_mode: it has no values and never will")
    return value


def deepcopy(fake: Any, memo: dict[int, Any]) -> Any:
    """Copy a fake with its storage, attributes and class, as ``Tensor.__deepcopy__`` does."""
    if not fake.is_leaf:
        raise RuntimeError(
            "Only Tensors created explicitly by the user (graph leaves) support the deepcopy "
            "protocol at the moment"
        )
    if id(fake) in memo:
        return memo[id(fake)]
    value = fake._value
    parameter = isinstance(fake, torch.nn.Parameter)
    with torch.no_grad():
        if parameter:  # torch clones it, and leaves attributes and gradient behind
            copied = aten.clone.default(fake_tensor.wrap(value))._value
        else:
            copied = _copied(value, memo)
        made = fake_tensor.wrap(copied)
    made.requires_grad_(fake.requires_grad)
    made.__class__ = type(fake)
    memo[id(fake)] = made
    if parameter:
        return made
    if fake.grad is not None:
        made.grad = copy.deepcopy(fake.grad, memo)
    for name, attribute in vars(fake).items():
        if name != "_value":
            setattr(made, name, copy.deepcopy(attribute, memo))
    return made


def _copied(value: Value, memo: dict[int, Any]) -> Value:
    """Return a handle like ``value`` on a copy of its storage, one copy per ``memo``."""
    storage, g = value.storage, value.geometry
    if storage is None:
        return Value(None, g)
    if id(storage) not in memo:
        root = Value(storage, storage.root)
        flat = _calls.strided(root, (storage.root.reach,), (1,), 0)
        memo[id(storage)] = aten.clone.default(fake_tensor.wrap(flat))._value
        memo.setdefault(id(memo), []).append(storage)
    base = memo[id(storage)]
    if base.geometry.dtype != g.dtype:
        base = dispatch(aten.view.dtype, (fake_tensor.wrap(base), g.dtype), {})._value
    return _calls.strided(base, g.size, g.stride, g.offset)


def keep_hooks(fake: Any) -> None:
    """Record that a result of a graph has hooks, which are called with its gradients."""
    value, hooks = fake._value, fake._backward_hooks
    if any(op.name == "register_hook" and value in op.reads for op in value.storage.writers):
        return  # all are in one table

    def call(grad: torch.Tensor) -> torch.Tensor:
        for hook in list(hooks.values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad

    def register(tensor: torch.Tensor) -> None:
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(call)  # type: ignore[no-untyped-call]

    op = _calls.new_op(register, (value,), {}, "register_hook")
    op.reads = op.writes = (value,)
    value.storage.writers.append(op)


def composite(function: Any, fake: Any, args: Any, generator: Any, like: Any) -> Any:
    """Record a Python function that fills a tensor as one operator.

    ``like`` is an overload and its scalar arguments that draw exactly as much, if there is one.
    """
    value = fake._value
    if value.storage is None:
        return fake
    if value.storage.memory is not None:
        expose_generator(generator or torch.default_generator)
        function(_replay.materialize(value), *args, generator=generator)
        return fake
    op = _calls.new_op(function, (value, *args), {}, function.__name__.replace("_no_grad_", ""))
    op.grad = False
    op.takes_generator = True
    op.writes = (value,)
    op.overwrites = _calls.replaces(value)
    op.reads = () if op.overwrites else (value,)
    generator = generator or streams.default_generator(value.geometry.device)
    if generator is not None:
        with paused():  # no operator is being dispatched: what is measured must not be recorded
            spending = like and draws.predict(like[0], (fake, *like[1]), {})
            _calls.pass_generator(op, generator, spending)
    value.storage.writers.append(op)
    return fake


def filled_as(fake: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Make a tensor of another shape with the operators that filled ``fake``."""
    storage = fake._value.storage
    with autograd_hooks.quiet():
        made = torch.empty(shape, dtype=fake.dtype, device=device)
        for op in storage.writers:
            if len(op.writes) != 1 or op.made or op.kwargs:
                raise ValueError(f"{op.describe()} is no fill: values depend on the whole shape")
            extra = {}
            if op.position is not None:
                extra["generator"] = streams.Cursor(device).seek(op.position)
            op.func(made, *op.args[1:], **extra)
    return made.requires_grad_(fake.requires_grad)


fake_tensor.connect(sys.modules[__name__])
