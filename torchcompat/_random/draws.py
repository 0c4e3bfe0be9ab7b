"""How many 32-bit numbers an operator takes from the CPU generator, measured on this very torch.

Releases, CPU capabilities and dtypes differ in what they draw, so nothing is assumed: an operator
runs on small scratch tensors with a private generator whose state tells how far it moved. Small
sizes are measured one by one. For larger ones the count is taken to be affine in the number of
elements within a residue class mod 16 (kernels work in blocks of 16), fitted at two sizes, and
trusted only if two larger runs, beyond the size at which kernels split their work, leave the
generator exactly where the law says.

Rules:
- `None` means unproven. Whatever does not fit, raises, depends on values (which the runs vary) or
  overlaps itself in memory gives `None`, and so does every operator not listed here.
- A deviate drawn serially comes in pairs of which the generator keeps the second half for the next
  taker. What an operator spends is therefore stated without regard to that half; `spend` adds it.
- Scalars matter by kind (sign, zero, below or above one, bits of an integer range), never by value.
- Counts do not depend on the number of threads: tests/test_draws.py checks it.
- No visible generator is moved. Operators without a generator argument borrow the default one for
  the few microseconds of a measurement, under a lock, and leave it as it was.
"""

from __future__ import annotations

import math
import threading
import warnings
from functools import lru_cache
from typing import Any, Callable, NamedTuple

import torch

from torchcompat._random.mt19937 import jump

_DRAWING = frozenset(
    "normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ normal bernoulli"
    " rand randn randint randperm rand_like randn_like randint_like native_dropout".split()
)
# randperm takes wider numbers from some size on that is too large to measure.
_LARGEST = {"randperm": 1 << 24}

# Sizes up to here are measured as they are; a law holds above.
_SMALL = 32
_PAIR = 4

# Places in the state: left (of int32), the first byte behind the words, "a half is cached".
_LEFT, _TAIL, _CACHED = 2, 5016, 5040

_MISSING = object()
_answers: dict[Any, Any] = {}
_measured: dict[Any, Any] = {}
_lock = threading.RLock()


class Spending(NamedTuple):
    """What an operator takes: plain 32-bit `draws`, and `normals` taken serially, in pairs."""

    draws: int
    normals: int = 0


class _Law(NamedTuple):
    """Draws and normals as affine functions of the number of elements."""

    slope: int
    offset: int
    normals: int

    def at(self, numel: int) -> Spending:
        """What `numel` elements take."""
        return Spending(self.slope * numel + self.offset, self.normals * numel)


def spend(spending: Spending, cached: bool) -> tuple[int, bool]:
    """Return the 32-bit draws really made, and whether half a pair of normals is cached after it.

    `cached` says whether one was cached before.
    """
    draws, normals = spending
    if not normals:
        return draws, cached
    missing = normals - cached
    return draws + _PAIR * ((missing + 1) // 2), missing % 2 == 1


def predict(func: Any, args: Any, kwargs: Any) -> Spending | None:
    """Return what calling the overload `func` on CPU takes from its generator, None if unproven.

    `args` and `kwargs` are those of the dispatcher. Tensors among them need only offer `shape`,
    `stride()`, `dtype` and `numel()`; no value is read.
    """
    key = None
    if args and (not kwargs or (len(kwargs) == 1 and "generator" in kwargs)):
        try:
            tensor = args[0]
            key = (func, tensor.dtype, tensor.shape, tensor.stride(), args[1:])
            answer = _answers.get(key, _MISSING)
        except (AttributeError, TypeError):
            key, answer = None, _MISSING
        if answer is not _MISSING:
            return answer  # type: ignore[no-any-return]
    answer = _look_up(func, tuple(args), kwargs)
    if key is not None and all(isinstance(value, (int, float)) for value in args[1:]):
        if len(_answers) >= 1 << 14:
            _answers.clear()
        _answers[key] = answer
    return answer


def _look_up(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spending | None:
    """Find the law for this kind of call, measuring where it is the first, and apply it."""
    family = func.__name__.partition(".")[0]
    if family not in _DRAWING:
        return None
    call = {**dict(zip(_names(func), args)), **kwargs}
    kinds = tuple((name, _kind(name, value)) for name, value in call.items())
    numels = {size for name, value in call.items() for size in _numels(name, value)}
    if len(numels) != 1 or any(kind is _MISSING for _, kind in kinds):
        return None
    numel = numels.pop()
    if numel > _LARGEST.get(family, numel):
        return None
    size = ("exactly", numel) if numel < _SMALL else ("mod 16", numel % 16)
    case = (func, torch.get_default_dtype(), kinds, _relation(call), size)
    with _lock:
        if case not in _measured:
            _measured[case] = _investigate(_Trial(func, args, kwargs), numel)
        found = _measured[case]
    return found.at(numel) if isinstance(found, _Law) else found


@lru_cache(maxsize=None)
def _names(func: Any) -> tuple[str, ...]:
    """The names of the overload's arguments."""
    return tuple(argument.name for argument in func._schema.arguments)


def _numels(name: str, value: Any) -> tuple[int, ...]:
    """The number of elements that an argument stands for, if it stands for one."""
    if hasattr(value, "stride"):
        return (value.numel(),)
    if name == "size":
        return (torch.Size(value).numel(),)
    return (value,) if name == "n" else ()


def _kind(name: str, value: Any) -> Any:
    """What of an argument may matter to the count, `_MISSING` where nothing can be said."""
    if hasattr(value, "stride"):
        layout = _layout(value)
        return (value.dtype, layout) if layout else _MISSING
    if name in ("size", "n", "generator"):
        return None
    if name == "out" or (name == "device" and torch.device(value or "cpu").type != "cpu"):
        return _MISSING
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int):
        return value < 0, value.bit_length(), value & (value - 1) == 0
    return tuple((value > bound) - (value < bound) for bound in (-math.inf, 0, 1, math.inf))


def _relation(call: dict[str, Any]) -> Any:
    """How the call's two numbers lie to each other: equal, or how wide a range of integers."""
    numbers = [value for value in call.values() if isinstance(value, (int, float))]
    if len(numbers) != 2:
        return None
    span = numbers[1] - numbers[0]
    return _kind("", span) if isinstance(span, int) else span == 0


def _layout(tensor: Any) -> str:
    """The memory layout's class, empty for tensors that may overlap themselves."""
    steps = [(step, size) for size, step in zip(tensor.shape, tensor.stride()) if size != 1]
    if tensor.numel() == 0 or _fill(steps) == "dense":
        return "contiguous"
    fill = _fill(sorted(steps, reverse=True))
    return "permuted" if fill == "dense" else fill


def _fill(steps: list[tuple[int, int]]) -> str:
    """Whether dimensions, outermost first, are dense, leave gaps, or (empty) may overlap."""
    extent, dense = 1, True
    for step, size in reversed(steps):
        if step < extent:
            return ""
        dense = dense and step == extent
        extent += (size - 1) * step
    return "dense" if dense else "gapped"


def _scratch(numel: int, like: Any, content: float | None) -> torch.Tensor:
    """A real tensor of `numel` elements, in dtype and layout like `like`, filled if asked."""
    layout = _layout(like)
    shape = (numel, 1)
    if layout == "permuted":
        rows = next(rows for rows in range(2, numel + 1) if numel % rows == 0)
        shape = (rows, numel // rows)
    elif layout == "gapped":
        shape = (numel, 2)
    tensor = torch.empty(shape, dtype=like.dtype, device="cpu")
    if content is not None:
        tensor.fill_(content)
    return tensor.t() if layout == "permuted" else tensor[:, 0]


class _Trial(NamedTuple):
    """A call to be tried at other sizes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, numel: int, content: float, state: torch.Tensor) -> torch.Tensor:
        """Call with `numel` elements from a generator in `state`, and return its state after it.

        Tensors given as arguments are filled with `content`.
        """
        names = _names(self.func)
        in_place = self.func.__name__.partition(".")[0].endswith("_")

        def resized(name: str, value: Any) -> Any:
            if hasattr(value, "stride"):
                # What is to be overwritten has no need of contents.
                return _scratch(numel, value, None if name == "self" and in_place else content)
            return {"size": [numel], "n": numel}.get(name, value)

        args = [resized(name, value) for name, value in zip(names, self.args)]
        kwargs = {name: resized(name, value) for name, value in self.kwargs.items()}
        if "device" in names:
            kwargs["device"] = torch.device("cpu")
        private = "generator" in names
        generator = torch.Generator(device="cpu") if private else torch.default_generator
        if private:
            kwargs["generator"] = generator
        before = generator.get_state()
        try:
            generator.set_state(state)
            self.func(*args, **kwargs)
            return generator.get_state()
        finally:
            generator.set_state(before)


def _investigate(trial: _Trial, numel: int) -> Spending | _Law | None:
    """What `numel` elements take if they are few, else the law for their class."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if numel < _SMALL:
                return _measure(trial, numel)
            return _fit(trial, numel % 16)
    except Exception:  # the operator refuses such arguments, and will say so where it really runs
        return None


def _fit(trial: _Trial, residue: int) -> _Law | None:
    """Fit a law to sizes of one residue class mod 16, and try it on larger ones."""
    # Multiples of 3, so that a permuted layout exists for each size.
    small, middle, large, huge = (48 * k + 33 * residue % 48 for k in (1, 2, 40, 700))
    first, second = _measure(trial, small), _measure(trial, middle)
    if first is None or second is None:
        return None
    slope = (second.draws - first.draws) // (middle - small)
    law = _Law(slope, first.draws - slope * small, first.normals // small)
    proven = law.at(middle) == second and all(
        _obeys(trial, size, content, law.at(size)) for size, content in ((large, 0.0), (huge, 1.0))
    )
    return law if proven else None


def _measure(trial: _Trial, numel: int) -> Spending | None:
    """What `numel` elements take, few enough to leave the generator within a block of words."""
    fresh = _starts()[0]
    after = trial.run(numel, 0.5, fresh)
    moved = int(fresh.view(torch.int32)[_LEFT] - after.view(torch.int32)[_LEFT])
    for spending in (Spending(moved), Spending(0, 2 * moved // _PAIR - after[_CACHED].item())):
        if _obeys(trial, numel, 0.5, spending):
            return spending
    return None


def _obeys(trial: _Trial, numel: int, content: float, spending: Spending) -> bool:
    """Whether the generator moves as `spending` says, with and without a cached half."""
    for start in _starts():
        after = trial.run(numel, content, start)
        draws, cached = spend(spending, bool(start[_CACHED]))
        expected = jump(start, draws)
        end = _TAIL if spending.normals else None
        if not torch.equal(after[:end], expected[:end]) or bool(after[_CACHED]) != cached:
            return False
    return True


@lru_cache(maxsize=None)
def _starts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two states at the start of a block, the second with a cached half."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    torch.empty(1, device="cpu").uniform_(generator=generator)
    fresh = generator.get_state()
    torch.empty(1, device="cpu").normal_(generator=generator)
    return fresh, generator.get_state()
