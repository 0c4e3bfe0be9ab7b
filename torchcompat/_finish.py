"""Giving back: real tensors take the places of the fakes they belong to.

A fake that can become real in place does (torch 2.3 and later), so whoever holds it holds the real
tensor. Otherwise each place that holds it is given the same new object: parameters, buffers, plain
attributes and the lists, tuples and dictionaries in them. A tensor subclass that wraps a fake, such
as a DTensor with its local shard, keeps its identity and gets its inner tensor replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator

import torch

from torchcompat import _replay, autograd_hooks, fake_tensor

if TYPE_CHECKING:
    from torchcompat._tape import Value

_OWN = ("_parameters", "_buffers", "_modules")


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
        values = {}
        for tensor in _unwrapped(tensors):
            if waits(tensor):
                values[id(tensor._value)] = tensor._value
        if values:
            _replay.materialize(*values.values(), num_threads=num_threads, progress=progress)
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
        value.real = _dressed(tensor, value.real)
        value.finished = True
        value.real = autograd_hooks.become(tensor, value.real)
        if shared:
            value.storage.memory = value.real
    return value.real


def _dressed(fake: Any, real: torch.Tensor) -> torch.Tensor:
    """Give a real tensor the class, the flags and whatever was hung on its fake."""
    cls = fake_tensor.real_class(fake)
    grad = fake.requires_grad
    if type(real) is not cls:
        real = fake_tensor.subclass(cls, real, grad)
    elif fake.is_leaf and not real.is_leaf and not _foreign(fake):
        real = real.detach()
    if real.is_leaf and real.requires_grad != grad:
        with torch.inference_mode(real.is_inference()):
            real.requires_grad_(grad)
    autograd_hooks.hand_over(fake, real)
    own = vars(real)
    inner = [t for t in _held(list(own.values()), torch.Tensor) if waits(t)]
    if inner:
        new = {id(t): r for t, r in zip(inner, finish(inner))}
        for name, attribute in own.items():
            own[name] = _put(attribute, new.get, 0)
    if fake.is_leaf and fake.grad is not None:
        real.grad = finish([fake.grad])[0]
    return real


def _foreign(fake: Any) -> bool:
    """Tell whether a tensor comes from an operator whose graph autograd may see only inside."""
    return any(op.foreign for op in fake._value.storage.writers[-1:])


def modules_of(module: torch.nn.Module, recurse: bool) -> list[torch.nn.Module]:
    """List a module and, children first, its submodules, those in plain containers included."""
    seen: dict[int, torch.nn.Module] = {}

    def visit(m: torch.nn.Module) -> None:
        if id(m) in visiting:
            return
        visiting.add(id(m))
        if recurse:
            for child in m.children():
                visit(child)
            for held in _held(_attributes(m), torch.nn.Module):
                visit(held)
        seen[id(m)] = m

    visiting: set[int] = set()
    visit(module)
    return list(seen.values())


def _attributes(module: torch.nn.Module) -> list[Any]:
    return [a for name, a in vars(module).items() if name not in _OWN]


def _held(items: Any, kind: type, depth: int = 0) -> Iterator[Any]:
    """Yield what plain containers hold, to a depth of 8."""
    for item in items:
        if isinstance(item, kind):
            yield item
        elif depth < 8 and isinstance(item, (list, tuple)):
            yield from _held(item, kind, depth + 1)
        elif depth < 8 and isinstance(item, dict):
            yield from _held(list(item.values()), kind, depth + 1)


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield every tensor of a module and its submodules."""
    for m in modules_of(module, True):
        yield from _own_tensors(m, False)


def _own_tensors(module: torch.nn.Module, buffers_only: bool) -> Iterator[torch.Tensor]:
    if not buffers_only:
        yield from (t for t in module._parameters.values() if t is not None)
    yield from (t for t in module._buffers.values() if t is not None)
    if not buffers_only:
        yield from _held(_attributes(module), torch.Tensor)


def finish_modules(
    modules: list[torch.nn.Module],
    buffers_only: bool,
    num_threads: int | None = 1,
    progress: _replay.Progress | None = None,
) -> None:
    """Materialise the own tensors of modules together and put them in place."""
    fakes = _waiting(modules, buffers_only)
    if not fakes:
        return
    with _replay.lock:
        finished = finish(fakes, num_threads, progress)
        moved = {id(f): r for f, r in zip(fakes, finished) if f is not r}
        if moved:
            for module in modules:
                _exchange(module, moved, buffers_only)


def _waiting(modules: list[torch.nn.Module], buffers_only: bool) -> list[Any]:
    """List the own tensors of modules that wait to be materialised, each once."""
    waiting: dict[int, Any] = {}
    for module in modules:
        for tensor in _own_tensors(module, buffers_only):
            if waits(tensor):
                _require_hardware(module, tensor)
                waiting[id(tensor)] = tensor
    return list(waiting.values())


def _exchange(module: torch.nn.Module, moved: dict[int, Any], buffers_only: bool) -> None:
    """Put new objects in the places of old ones, by whose ids ``moved`` finds them."""
    places: list[dict[str, Any]] = [module._buffers]
    if not buffers_only:
        places.append(module._parameters)
    for place in places:
        for name, tensor in place.items():
            if id(tensor) in moved:
                place[name] = moved[id(tensor)]
    if not buffers_only:
        own = vars(module)
        for name in [n for n in own if n not in _OWN]:
            own[name] = _put(own[name], moved.get, 0)


def _require_hardware(module: torch.nn.Module, tensor: torch.Tensor) -> None:
    if fake_tensor.hardware(tensor.device.type):
        return
    names = [n for n, t in (*module._parameters.items(), *module._buffers.items()) if t is tensor]
    raise RuntimeError(
        f"{type(module).__name__}.{(names or ['attribute'])[0]}, size {tuple(tensor.shape)}, is on "
        f"{tensor.device}, and there is no such device here: it can be looked at, not materialised"
    )


def _put(item: Any, new: Callable[[int], Any], depth: int) -> Any:
    """Replace tensors in place in lists and dictionaries; rebuild tuples that hold some."""
    if isinstance(item, torch.Tensor):
        found = new(id(item))
        return item if found is None else found
    if depth < 8 and isinstance(item, list):
        item[:] = [_put(i, new, depth + 1) for i in item]
    elif depth < 8 and isinstance(item, dict):
        for key, held in item.items():
            item[key] = _put(held, new, depth + 1)
    elif depth < 8 and isinstance(item, tuple):
        parts = [_put(i, new, depth + 1) for i in item]
        if any(a is not b for a, b in zip(parts, item)):
            make = getattr(type(item), "_make", type(item))
            return make(parts)
    return item
