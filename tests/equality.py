"""Deferred equals eager: the one comparison that every equality test of this suite goes through.

`both` builds the same thing twice after the same seed, plainly and under `deferred_init`; an
entry of `ORDERS` materialises the deferred one in some order; `assert_equal` then finds every
tensor that can be reached on either side and compares what the contract (DESIGN section 2, C1 to
C4) promises: bytes, layout, class, sharing, autograd and Python attributes. Rules:

- values are compared as bytes, so NaN equals NaN and -0.0 differs from 0.0;
- nothing here knows how torchcompat works; only its public functions are called;
- materialising through this module also checks that the visible generator does not move.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from torchcompat import _gate
from torchcompat.deferred_init import (
    deferred_init,
    is_deferred,
    materialize_module,
    materialize_tensor,
)
from torchcompat.fake import is_fake

RELEASE = _gate.running()

_OWN_DICTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Pair(NamedTuple):
    """The eagerly built object and its deferred twin."""

    eager: Any
    deferred: Any


class Found(NamedTuple):
    """A tensor and the role it plays where it was found."""

    tensor: torch.Tensor
    role: str


# Building both


def seed_all(seed: int) -> None:
    """Seed torch and Python, the two sources a constructor of this suite draws from."""
    torch.manual_seed(seed)
    random.seed(seed)


def both(fn: Callable[..., Any], *args: Any, seed: int = 0, **kwargs: Any) -> Pair:
    """Call `fn` plainly and deferred after the same seed; the generators must agree."""
    seed_all(seed)
    eager = fn(*args, **kwargs)
    state, python_state = torch.get_rng_state(), random.getstate()
    seed_all(seed)
    deferred = deferred_init(fn, *args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state), "generator not where eager leaves it (C2)"
    assert random.getstate() == python_state, "the constructor did not run exactly once"
    return Pair(eager, deferred)


@contextlib.contextmanager
def still_generator() -> Iterator[None]:
    """Fail if the visible generator moves within the block."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "materialising moved the generator (C2)"


# Finding tensors


def walk(obj: Any) -> dict[str, Found]:
    """Every tensor reachable from modules, containers and tensor attributes, by path, in order."""
    found: dict[str, Found] = {}
    _walk(obj, "", "value", found, set())
    return found


def _walk(obj: Any, path: str, role: str, found: dict[str, Found], seen: set) -> None:
    if isinstance(obj, torch.Tensor):
        found[path] = Found(obj, role)
        if id(obj) not in seen:
            seen.add(id(obj))
            for key, value in vars(obj).items():
                _walk(value, f"{path}@{key}", "tensor attribute", found, seen)
    elif isinstance(obj, nn.Module):
        if id(obj) not in seen:
            seen.add(id(obj))
            for suffix, value, inner in _entries(obj):
                _walk(value, f"{path}.{suffix}" if path else suffix, inner, found, seen)
    elif isinstance(obj, dict):
        for key, value in obj.items():
            _walk(value, f"{path}[{key!r}]", role, found, seen)
    elif isinstance(obj, (list, tuple)):
        for index, value in enumerate(obj):
            _walk(value, f"{path}[{index}]", role, found, seen)


def _entries(module: nn.Module) -> Iterator[tuple[str, Any, str]]:
    for name, parameter in module._parameters.items():
        yield name, parameter, "parameter"
    for name, buffer in module._buffers.items():
        kept = name not in module._non_persistent_buffers_set
        yield name, buffer, "buffer" if kept else "non-persistent buffer"
    for name, value in vars(module).items():
        if name not in _OWN_DICTS and not isinstance(value, nn.Module):
            yield name, value, "attribute"
    for name, child in module._modules.items():
        yield name, child, "module"


def shapes_of_modules(obj: Any) -> list[tuple[str, str, bool, Any]]:
    """Name, class, training flag and plain Python settings of every module, in order."""
    rows: list[tuple[str, str, bool, Any]] = []
    if isinstance(obj, nn.Module):
        for name, module in obj.named_modules():
            settings = {k: _plain(v) for k, v in vars(module).items() if k not in _OWN_DICTS}
            # parametrize makes a class for each module, so classes go by name
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            rows.append((name, kind, module.training, settings))
    elif isinstance(obj, (list, tuple)):
        for value in obj:
            rows.extend(shapes_of_modules(value))
    elif isinstance(obj, dict):
        for value in obj.values():
            rows.extend(shapes_of_modules(value))
    return rows


def _plain(value: Any) -> Any:
    """A comparable stand-in: numbers and text themselves, containers by element, else the class."""
    if isinstance(value, (bool, int, str, torch.dtype, torch.device, type(None))):
        return value
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):  # hooks are kept under running numbers, which no two modules share
        named = all(isinstance(key, str) for key in value)
        return {k: _plain(v) for k, v in (value.items() if named else enumerate(value.values()))}
    return "tensor" if isinstance(value, torch.Tensor) else type(value).__qualname__


# Comparing


def raw(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order as bytes."""
    t = tensor.detach()
    if t.layout is torch.sparse_coo:
        return raw(t._indices()) + raw(t._values())
    if t.layout is not torch.strided:
        return raw(t.to_dense())
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    t = t.resolve_neg().contiguous()
    if t.dtype is torch.bfloat16:
        t = t.view(torch.int16)
    elif "float8" in str(t.dtype):
        t = t.view(torch.uint8)
    return t.numpy().tobytes()


def storage_pointer(tensor: torch.Tensor) -> int:
    """Address of the memory behind a strided tensor, 0 for none."""
    if tensor.layout is not torch.strided:
        return 0
    storage = tensor.untyped_storage() if RELEASE >= (2, 0) else tensor.storage()
    return storage.data_ptr()


def traits(tensor: torch.Tensor) -> dict[str, Any]:
    """What the contract compares of one tensor, apart from its values and ties."""
    row: dict[str, Any] = {
        "class": type(tensor),
        "is Parameter": isinstance(tensor, nn.Parameter),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "has grad_fn": tensor.grad_fn is not None,
        "attributes": {k: _plain(v) for k, v in vars(tensor).items()},
        "hooks": len(tensor._backward_hooks or ()),
    }
    if RELEASE >= (2, 1):
        row["post-accumulate hooks"] = len(tensor._post_accumulate_grad_hooks or ())
    if isinstance(tensor, UninitializedTensorMixin):
        return row
    row["layout"] = tensor.layout
    row["shape"] = tuple(tensor.shape)
    row["is_inference"] = tensor.is_inference()
    if tensor.layout is torch.strided:
        row["stride"] = tensor.stride()
        row["storage_offset"] = tensor.storage_offset()
    return row


def ties(found: dict[str, Found]) -> list[tuple[str, list[str]]]:
    """Groups of paths that are one object, and groups of paths that share one storage."""
    objects: dict[int, list[str]] = {}
    storages: dict[int, list[str]] = {}
    for path, (tensor, _) in found.items():
        objects.setdefault(id(tensor), []).append(path)
        if not isinstance(tensor, UninitializedTensorMixin):
            pointer = storage_pointer(tensor)
            if pointer:
                storages.setdefault(pointer, []).append(path)
    groups = [("one object", paths) for paths in objects.values() if len(paths) > 1]
    groups += [("one storage", paths) for paths in storages.values() if len(paths) > 1]
    return groups


def differences(eager: Any, deferred: Any) -> list[str]:
    """Everything in which a materialised object differs from the eager one, in words."""
    left, right = walk(eager), walk(deferred)
    waiting = [path for path, f in right.items() if is_fake(f.tensor) or is_deferred(f.tensor)]
    if waiting:
        return [f"still deferred: {', '.join(waiting)}"]
    wrong = []
    if [(p, f.role) for p, f in left.items()] != [(p, f.role) for p, f in right.items()]:
        return [f"other tensors: {_roles(left)} in eager, {_roles(right)} deferred"]
    for here, there in zip(shapes_of_modules(eager), shapes_of_modules(deferred)):
        if here != there:
            wrong.append(f"module {_rest(here, there)} in eager, {_rest(there, here)} deferred")
    for path, (tensor, _) in left.items():
        wrong.extend(f"{path or 'value'}: {text}" for text in _apart(tensor, right[path].tensor))
    if ties(left) != ties(right):
        wrong.append(f"ties {ties(left)} in eager, {ties(right)} deferred")
    return wrong


def _rest(row: tuple[str, str, bool, Any], other: tuple[str, str, bool, Any]) -> Any:
    """Name, class, and the settings in which a module differs from another."""
    return (*row[:3], {k: v for k, v in row[3].items() if other[3].get(k, "absent") != v})


def _roles(found: dict[str, Found]) -> str:
    return ", ".join(f"{path} ({f.role})" for path, f in found.items())


def _apart(eager: torch.Tensor, deferred: torch.Tensor) -> Iterator[str]:
    here, there = traits(eager), traits(deferred)
    for key, value in here.items():
        if there.get(key, "absent") != value:
            yield f"{key} {value} in eager, {there.get(key, 'absent')} deferred"
    if "shape" not in here or here["shape"] != there.get("shape") or eager.dtype != deferred.dtype:
        return
    if eager.device.type != "meta" and raw(eager) != raw(deferred):
        yield f"values {eager.detach()} in eager, {deferred.detach()} deferred"
    if eager.is_leaf and deferred.is_leaf:
        if (eager.grad is None) != (deferred.grad is None):
            yield f"grad {eager.grad} in eager, {deferred.grad} deferred"
        elif eager.grad is not None:
            yield from (f"grad: {text}" for text in _apart(eager.grad, deferred.grad))


def assert_equal(eager: Any, deferred: Any) -> None:
    """Fail with a list unless `deferred`, materialised, is `eager` in all the contract names."""
    wrong = differences(eager, deferred)
    assert not wrong, "deferred differs from eager:\n  " + "\n  ".join(wrong[:20])


def assert_all_deferred(obj: Any) -> None:
    """Fail unless every parameter and buffer of `obj` still waits for its values."""
    ready = [p for p, f in walk(obj).items() if f.role != "attribute" and not is_deferred(f.tensor)]
    assert not ready, f"computed while recording: {', '.join(ready)}"


# Materialising in an order

Step = Callable[[], Any]


def materialize(obj: Any) -> Any:
    """Materialise a module in place, or the tensors of a container, and give back the result."""
    with still_generator():
        return _materialize(obj)


def _materialize(obj: Any) -> Any:
    if isinstance(obj, torch.Tensor):
        return materialize_tensor(obj)
    if isinstance(obj, nn.Module):
        materialize_module(obj)
        return obj
    if isinstance(obj, dict):
        return {key: _materialize(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return type(obj)(_materialize(value) for value in obj)
    return obj


def _slots(module: nn.Module) -> list[tuple[dict[str, torch.Tensor | None], str]]:
    slots = []
    for child in module.modules():
        for entries in (child._parameters, child._buffers):
            slots.extend((entries, name) for name, value in entries.items() if value is not None)
    return slots


def _fill(entries: dict[str, torch.Tensor | None], name: str) -> None:
    with still_generator():
        real = materialize_tensor(entries[name])
        assert materialize_tensor(entries[name]) is real, "a second call gave another object (C3)"
    entries[name] = real


def _whole(pair: Pair, rnd: random.Random) -> None:
    materialize(pair.deferred)


def _tensors_reversed(pair: Pair, rnd: random.Random) -> None:
    for entries, name in reversed(_slots(pair.deferred)):
        _fill(entries, name)


def _tensors_shuffled(pair: Pair, rnd: random.Random) -> None:
    slots = _slots(pair.deferred)
    rnd.shuffle(slots)
    for entries, name in slots:
        _fill(entries, name)


def _children_shuffled(pair: Pair, rnd: random.Random) -> None:
    children = list(pair.deferred.modules())[1:]
    rnd.shuffle(children)
    for child in children:
        materialize(child)


def _one_child(pair: Pair, rnd: random.Random) -> None:
    """Only one module: it is equal, and what it shares no storage with is still deferred."""
    paths = [
        p for p, m in pair.eager.named_modules() if p and next(_tensors_of(m), None) is not None
    ]
    if not paths:
        return
    path = rnd.choice(paths)
    waiting = {p for p, f in walk(pair.deferred).items() if is_deferred(f.tensor)}
    materialize(pair.deferred.get_submodule(path))
    assert_equal(pair.eager.get_submodule(path), pair.deferred.get_submodule(path))
    touched = {storage_pointer(t) for t in _tensors_of(pair.eager.get_submodule(path))}
    after = walk(pair.deferred)
    for other, found in walk(pair.eager).items():
        apart = not isinstance(found.tensor, UninitializedTensorMixin) and (
            storage_pointer(found.tensor) not in touched
        )
        if apart and found.role != "attribute" and other in waiting:
            assert is_deferred(after[other].tensor), f"{path} also materialised {other}"


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    for found in walk(module).values():
        if not isinstance(found.tensor, UninitializedTensorMixin) and found.tensor.numel():
            yield found.tensor


def _interleaved(pair: Pair, rnd: random.Random) -> None:
    """Seeds and draws between the parts, as in a program that does other things too."""
    slots = _slots(pair.deferred)
    rnd.shuffle(slots)
    for entries, name in slots:
        torch.manual_seed(rnd.randrange(1000))
        torch.rand(rnd.randrange(1, 40))
        _fill(entries, name)
        torch.randn(rnd.randrange(1, 40))


def _threads(pair: Pair, rnd: random.Random) -> None:
    """Four threads, each with its share of the modules, all at once."""
    children = list(pair.deferred.modules())[1:]
    rnd.shuffle(children)
    in_threads([_share(children[k::4]) for k in range(4)])


def _share(modules: list[nn.Module]) -> Step:
    return lambda: [materialize_module(module) for module in modules]


def in_threads(steps: list[Step]) -> list[Any]:
    """Run all steps at once, each on its own thread; give results, or raise the first error."""
    results: list[Any] = [None] * len(steps)
    errors: list[BaseException] = []
    start = threading.Barrier(len(steps))

    def work(index: int) -> None:
        try:
            start.wait()
            results[index] = steps[index]()
        except BaseException as error:  # handed over to the caller's thread below
            errors.append(error)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(len(steps))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return results


def in_a_fork(pair: Pair) -> int:
    """Materialise and compare in a forked process; give its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert_equal(pair.eager, materialize(pair.deferred))
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


ORDERS: dict[str, Callable[[Pair, random.Random], None]] = {
    "whole": _whole,
    "reversed": _tensors_reversed,
    "shuffled": _tensors_shuffled,
    "by child": _children_shuffled,
    "one child": _one_child,
    "interleaved": _interleaved,
    "threads": _threads,
}


def settle(pair: Pair, order: str, seed: int = 0) -> Pair:
    """Materialise `pair.deferred` in the named order, then what is left; give the pair back."""
    if isinstance(pair.deferred, nn.Module):
        ORDERS[order](pair, random.Random(f"{order} {seed}"))
    pair = Pair(pair.eager, materialize(pair.deferred))
    assert_equal(pair.eager, pair.deferred)
    return pair


def verify(
    fn: Callable[..., Any], *args: Any, seed: int = 0, order: str = "whole", **kw: Any
) -> Pair:
    """Build both, materialise in `order`, compare."""
    return settle(both(fn, *args, seed=seed, **kw), order, seed)


def verify_orders(fn: Callable[..., Any], *args: Any, seed: int = 0, **kw: Any) -> None:
    """`verify` in every order."""
    for order in ORDERS:
        try:
            verify(fn, *args, seed=seed, order=order, **kw)
        except Exception as error:
            raise AssertionError(f"in the order {order!r}: {error}") from error


def verify_values(fn: Callable[[], dict[str, Any]], seed: int = 0) -> None:
    """`verify` a function that returns a dict, its values materialised in several orders."""
    names = list(both(fn, seed=seed).eager)
    for number in range(0, 1 + 2 * len(names), 1 + len(names) // 3):
        pair = both(fn, seed=seed)
        order = names[number:] + names[:number]  # every rotation, forwards and then backwards
        if number > len(names):
            order = names[number - len(names) :] + names[: number - len(names)]
            order.reverse()
        for name in order:
            pair.deferred[name] = materialize(pair.deferred[name])
        assert_equal(*pair)
        _assert_same_gradients(*pair)


def _assert_same_gradients(eager: Any, deferred: Any) -> None:
    here, there = ([f.tensor for f in walk(obj).values()] for obj in (eager, deferred))
    outputs = [k for k, t in enumerate(here) if t.grad_fn is not None]
    leaves = [k for k, t in enumerate(here) if t.is_leaf and t.requires_grad]
    if outputs and leaves:
        wanted, got = (
            gradients([t[k] for k in outputs], [t[k] for k in leaves]) for t in (here, there)
        )
        for mine, other in zip(wanted, got):
            assert (mine is None) == (other is None), "a leaf is missing from the graph (C1)"
            assert mine is None or raw(mine) == raw(other), f"gradient {other}, in eager {mine}"


def gradients(outputs: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradient of the sum of all outputs for each leaf, None where they do not meet."""
    total = sum(o.float().sum() if not o.is_complex() else o.abs().sum() for o in outputs)
    return list(torch.autograd.grad(total, leaves, allow_unused=True, retain_graph=True))
