"""Giving back: real tensors take the places of the fakes they belong to.

A fake that can become real in place does (torch 2.3 and later), so whoever holds it holds the real
tensor. Otherwise each place that holds it is given the same new object: parameters, buffers, plain
attributes and the containers, dataclasses, distributions and optimizers in them. A tensor subclass
that wraps a fake, such as a DTensor with its local shard, keeps its identity and gets its inner
tensor replaced.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from typing import TYPE_CHECKING, Any, Callable, Iterator, Tuple

import torch

from torchcompat import _replay, autograd_hooks, fake_tensor

if TYPE_CHECKING:
    from torchcompat._tape import Value

# Beside dataclasses: objects whose attributes are what they are made of.
_PLAIN = (
    torch.distributions.Distribution,
    torch.distributions.Transform,
    torch.optim.Optimizer,
    types.SimpleNamespace,
)
Slot = Tuple[Any, Callable[[Any], None]]  # what a place holds, and how to put something else there


def _content(item: Any) -> Any:
    """Return what holds the tensors of a container or of an object of plain data, or None."""
    if isinstance(item, (dict, list, tuple, collections.deque)):
        return item
    if isinstance(item, (type, torch.Tensor, torch.nn.Module)):
        return None
    plain = isinstance(item, _PLAIN) or dataclasses.is_dataclass(item)
    return getattr(item, "__dict__", None) if plain else None


def _slots(
    holder: Any,
    put: Callable[[Any], None] | None = None,
    depth: int = 0,
    seen: set[int] | None = None,
) -> Iterator[Slot]:
    """Yield the places of a container and of the plain containers in it, to a depth of 8.

    A tuple is put together anew, in its own place; others are visited once.
    """
    seen = set() if seen is None else seen
    # Some tuples (e3nn's) have no length, so theirs is not asked.
    parts = [*tuple.__iter__(holder)] if isinstance(holder, tuple) else holder

    def replace(key: Any, new: Any) -> None:
        if parts[key] is new:
            return
        parts[key] = new
        if put is not None and parts is not holder:
            put(getattr(type(holder), "_make", type(holder))(parts))

    pairs = parts.items() if hasattr(parts, "items") else enumerate(parts)
    for key, item in list(pairs):
        here = functools.partial(replace, key)
        content = _content(item) if depth < 9 else None
        if content is None:
            yield item, here
        elif isinstance(content, tuple) or id(content) not in seen:
            seen.add(id(content))
            yield from _slots(content, here, depth + 1, seen)


def _places(module: torch.nn.Module) -> Iterator[Slot]:
    """Yield the places of a module's own tensors and modules."""
    yield from _slots(vars(module))
    if isinstance(module, torch.jit.ScriptModule):  # keeps them in C++
        for held in (module._parameters, module._buffers, module._modules):
            yield from _slots(held)
    for parameter in module._parameters.values():  # a backward may have reached real ones
        grad = getattr(parameter, "grad", None)
        if grad is not None and waits(grad) and not fake_tensor.is_fake(parameter):
            yield grad, functools.partial(setattr, parameter, "grad")


def _waiting(slots: Iterator[Slot]) -> list[Slot]:
    return [slot for slot in slots if isinstance(slot[0], torch.Tensor) and waits(slot[0])]


def waits(tensor: Any) -> bool:
    """Tell whether a tensor is a fake with a tape, or wraps one."""
    if fake_tensor.is_fake(tensor):
        return tensor._value.storage is not None
    return any(map(waits, _inner(tensor).values()))


def _inner(tensor: Any) -> dict[str, Any]:
    """Return the tensors that a wrapper subclass holds, by attribute."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not hasattr(
        type(tensor), "__tensor_flatten__"
    ):
        return {}
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def finish(
    tensors: list[Any], num_threads: int | None = 1, progress: _replay.Progress | None = None
) -> list[Any]:
    """Materialise tensors together; return what stands for each."""
    with _replay.lock:
        values = {t._value: None for t in _unwrapped(tensors) if waits(t)}
        if values:
            _replay.materialize(*values, num_threads=num_threads, progress=progress)
        return [_finished(t) for t in tensors]


def _unwrapped(tensors: Any) -> Iterator[Any]:
    for tensor in tensors:
        if fake_tensor.is_fake(tensor):
            yield tensor
        else:
            yield from _unwrapped(_inner(tensor).values())


def _finished(tensor: Any) -> Any:
    """Return the real object of a tensor whose value has been materialised."""
    if not fake_tensor.is_fake(tensor):
        for name, inner in _inner(tensor).items():
            if waits(inner):
                setattr(tensor, name, _finished(inner))
        return tensor
    value: Value = tensor._value
    if value.storage is None:
        return tensor
    assert value.real is not None
    if not value.finished:
        shared = value.real is value.storage.memory
        made = _dressed(tensor, value.real)
        value.finished = True
        value.real = autograd_hooks.become(tensor, made)
        if shared:
            value.storage.memory = value.real
        former = value.former
        while former is not None and former.real is made:
            former.real, former = value.real, former.former
    return value.real


def _dressed(fake: Any, real: torch.Tensor) -> torch.Tensor:
    """Give a real tensor the class, the flags and whatever was hung on its fake."""
    cls = fake_tensor.real_class(fake)
    grad = fake.requires_grad
    if type(real) is not cls and not (_is_leaf(fake) or _is_leaf(real)):
        real.__class__ = cls
    elif type(real) is not cls:
        real = fake_tensor.subclass(cls, real, grad)
    elif not _is_leaf(real) and _is_leaf(fake) and not _foreign(fake):
        real = real.detach()
    if grad and _is_leaf(real) and not _is_leaf(fake):
        _refuse_functions(fake)
    if _is_leaf(real) and real.requires_grad != grad:
        with torch.inference_mode(real.is_inference()):
            real.requires_grad_(grad)
    autograd_hooks.hand_over(fake, real)
    _fill(_waiting(_slots(vars(real))))
    if not _is_leaf(fake) and not _is_leaf(real) and fake.retains_grad:
        real.retain_grad()
    if _is_leaf(fake) and fake.grad is not None:
        real.grad = finish([fake.grad])[0]
    return real


def _refuse_functions(fake: Any) -> None:
    """Refuse to lose a graph that leads through a ``torch.autograd.Function``."""
    try:
        nodes = [fake.grad_fn]
    except RuntimeError:  # of a view that was written to, torch cannot say
        return
    for node in nodes:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise RuntimeError(
                f"a tensor of size {tuple(fake.shape)} comes from a torch.autograd.Function "
                f"({type(node).__name__}), whose graph cannot be deferred. Make it after "
                "materialising, or under torch.no_grad()."
            )
        nodes.extend(n for n, _ in node.next_functions if n is not None and n not in nodes)


def _is_leaf(tensor: Any) -> bool:
    try:
        return bool(tensor.is_leaf)
    except Exception:  # of some views that were written to, or whose base was, torch cannot say
        return False


def _foreign(fake: Any) -> bool:
    """Tell whether a tensor comes from an operator whose graph autograd may see only inside."""
    return any(op.foreign for op in fake._value.storage.writers[-1:])


def _fill(
    slots: list[Slot], num_threads: int | None = 1, progress: _replay.Progress | None = None
) -> None:
    """Materialise what waits in some places together, and put it there."""
    waiting = {id(tensor): tensor for tensor, _ in slots}
    if not waiting:
        return
    with _replay.lock:
        real = dict(zip(waiting, finish(list(waiting.values()), num_threads, progress)))
        for tensor, put in slots:
            put(real[id(tensor)])


def modules_of(module: torch.nn.Module, recurse: bool) -> list[torch.nn.Module]:
    """List a module and, children first, its submodules, those in plain containers included."""
    found: list[torch.nn.Module] = []
    visited: set[int] = set()

    def visit(m: torch.nn.Module) -> None:
        visited.add(id(m))
        for held, _ in _places(m) if recurse else ():
            if isinstance(held, torch.nn.Module) and id(held) not in visited:
                visit(held)
        found.append(m)

    visit(module)
    return found


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield every tensor of a module and its submodules."""
    held = (slot[0] for m in modules_of(module, True) for slot in _places(m))
    return (item for item in held if isinstance(item, torch.Tensor))


def finish_modules(
    modules: list[torch.nn.Module],
    buffers_only: bool,
    num_threads: int | None = 1,
    progress: _replay.Progress | None = None,
) -> None:
    """Materialise the own tensors of modules together and put them in place."""
    slots = []
    for module in modules:
        mine = _waiting(_slots(module._buffers) if buffers_only else _places(module))
        for tensor, _ in mine:
            _require_hardware(module, tensor)
        slots += mine
    _fill(slots, num_threads, progress)


def _require_hardware(module: torch.nn.Module, tensor: torch.Tensor) -> None:
    if fake_tensor.hardware(tensor.device.type):
        return
    names = [n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is tensor]
    raise RuntimeError(
        f"{type(module).__name__}.{(names or ['attribute'])[0]}, size {tuple(tensor.shape)}, is on "
        f"{tensor.device}, and there is no such device here: it can be looked at, not materialised"
    )
