"""How many 32-bit numbers an operator takes from the CPU generator, measured on this very torch.

An operator runs on scratch tensors with a private generator, whose state tells how far it moved.
Small sizes are measured one by one. For larger ones the count is taken to be affine in the number
of elements within a residue class mod 16 (kernels work in blocks of 16), fitted at two sizes, and
trusted only if larger runs, one beyond the size at which kernels share work among threads, leave
the generator just where the law says.

- `None` means unproven. What does not fit, raises, depends on contents (which the runs vary), may
  overlap itself in memory or is not listed here gives `None`.
- Normals drawn serially come in pairs, of which the generator keeps the second half for the next
  taker. A `Spending` is stated without regard to that half; `spend` takes it into account.
- Numbers matter by kind (sign, zero, below or above one, bits of an integer range), not by value.
- That seeds and the number of threads do not matter is checked by tests/test_draws.py.
- No visible generator is moved: an operator without a generator argument borrows the default one
  for the microseconds of a measurement, under a lock, and leaves it as it was.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from typing import Any, NamedTuple, Tuple

import torch

from torchcompat._random.mt19937 import jump

_DRAWING = """
    normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ normal bernoulli
    rand randn randint randperm rand_like randn_like randint_like native_dropout
"""
# randperm takes wider numbers from a size on that is too large to be tried.
_LARGEST = {"randperm": 1 << 24}
_SMALL = 32  # sizes below are measured one by one
_PAIR = 4  # draws for two normals

# Places in the state: int32 `left`, the first byte behind the words, the byte "a half is cached".
_LEFT, _TAIL, _CACHED = 2, 5016, 5040

_answers: dict[Any, Spending | None] = {}
_laws: dict[Any, _Law | None] = {}
_lock = threading.RLock()


class Spending(NamedTuple):
    """What an operator takes: plain 32-bit `draws`, and `normals` taken serially, in pairs."""

    draws: int
    normals: int = 0


# What is taken once, and what for each element.
_Law = Tuple[Spending, Spending]


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
            return _answers[key]
        except (AttributeError, KeyError, TypeError):
            pass
    answer = _look_up(func, args, kwargs)
    if key is not None and all(isinstance(value, (int, float)) for value in args[1:]):
        if len(_answers) >= 1 << 14:
            _answers.clear()
        _answers[key] = answer
    return answer


def _look_up(func: Any, args: Any, kwargs: Any) -> Spending | None:
    """Apply the law for this kind of call, found now if the call is the first of its kind."""
    family = func.__name__.partition(".")[0]
    if family not in _DRAWING.split():
        return None
    names = [argument.name for argument in func._schema.arguments]
    call = {**dict(zip(names, args)), **kwargs}
    call.update({name: call.get(name) for name in ("generator", "device") if name in names})
    kinds, asked = zip(*(_describe(name, value) for name, value in call.items()))
    sizes = set(asked) - {None}
    if len(sizes) != 1 or not _is_tried(call):
        return None
    (size,) = sizes
    if size > _LARGEST.get(family, size):
        return None
    numbers = [value for value in call.values() if isinstance(value, (int, float))]
    spans = tuple(_kind(upper - lower) for lower, upper in zip(numbers, numbers[1:]))
    which = size if size < _SMALL else f"{size % 16} mod 16"
    case = (func, torch.get_default_dtype(), tuple(call), kinds, spans, which)
    with _lock:
        if case not in _laws:
            try:
                _laws[case] = _find_law(_Trial(func, len(args), call), size)
            except Exception:  # such arguments are refused, also where the operator really runs
                _laws[case] = None
        law = _laws[case]
    return law and _apply(law, size)


def _apply(law: _Law, numel: int) -> Spending:
    """What `numel` elements take."""
    return Spending(*(once + numel * each for once, each in zip(*law)))


def _is_tried(call: dict[str, Any]) -> bool:
    """Whether a call stays on CPU, and a floating dtype can tell its integers apart.

    Where it cannot, torch would warn at each try.
    """
    dtypes = [getattr(value, "dtype", value) for value in call.values()]
    floating = [d for d in dtypes if isinstance(d, torch.dtype) and d.is_floating_point]
    bound = min([2 / torch.finfo(dtype).eps for dtype in floating], default=math.inf)
    exact = all(abs(value) <= bound for value in call.values() if isinstance(value, int))
    return exact and torch.device(call.get("device") or "cpu").type == "cpu" and "out" not in call


def _describe(name: str, value: Any) -> tuple[Any, int | None]:
    """What of an argument may switch between algorithms, and how many elements it asks for."""
    if hasattr(value, "stride"):
        return (value.dtype, _layout(value)), value.numel()
    if name == "size":
        return None, torch.Size(value).numel()
    return (None, value) if name == "n" else (_kind(value), None)


def _kind(value: Any) -> Any:
    """The kind of a number; other values as they are."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int):
        return value < 0, value.bit_length(), value & (value - 1) == 0
    return tuple((value > bound) - (value < bound) for bound in (-math.inf, 0, 1, math.inf))


def _layout(tensor: Any) -> str:
    """The class of memory layout: in order or permuted, dense or with gaps, or overlapping."""
    pairs = zip(tensor.stride(), tensor.shape)
    steps = [(step, size) for step, size in pairs if size != 1 and tensor.numel()]
    extent, gaps = 1, ""
    for step, size in sorted(steps):
        if step < extent:
            return "overlapping"
        gaps = "gapped" if step > extent else gaps
        extent += (size - 1) * step
    return gaps + ("" if steps == sorted(steps, reverse=True) else "permuted")


def _scratch(like: Any, numel: int, content: float) -> torch.Tensor:
    """A tensor of `numel` elements equal to `content`, in dtype and layout like `like`."""
    layout = _layout(like)
    if layout == "overlapping":
        raise NotImplementedError
    gap = 2 if "gapped" in layout else 1
    memory = torch.empty(gap * numel, dtype=like.dtype, device="cpu")
    for piece in memory.chunk(1 + len(memory) // 20000):  # too small to wake other threads
        piece.fill_(content)
    if "permuted" not in layout:
        return memory[::gap]
    rows = next(rows for rows in range(2, numel + 1) if numel % rows == 0)
    return memory.view(rows, -1)[:, ::gap].t()


class _Trial(NamedTuple):
    """A call to be tried: an overload and its arguments, of which so many by position."""

    func: Any
    positional: int
    call: dict[str, Any]

    def run(self, numel: int, content: float, state: torch.Tensor) -> torch.Tensor:
        """Call on `numel` elements with a generator in `state`, and return its state after it."""
        call = {**self.call, "size": [numel], "n": numel, "device": torch.device("cpu")}
        call = {name: call[name] for name in self.call}
        for name, value in call.items():
            if hasattr(value, "stride"):
                call[name] = _scratch(value, numel, content)
        generator = torch.default_generator
        if "generator" in call:
            call["generator"] = generator = torch.Generator(device="cpu")
        values = list(call.items())
        before = generator.get_state()
        try:
            generator.set_state(state)
            args = [value for _, value in values[: self.positional]]
            self.func(*args, **dict(values[self.positional :]))
            return generator.get_state()
        finally:
            generator.set_state(before)

    def obeys(self, numel: int, taken: Spending) -> bool:
        """Whether the generator moves as `taken` says, with and without a cached half."""
        for content, start in zip((0.0, 1.0), _starts()):
            after = self.run(numel, content, start)
            draws, cached = spend(taken, bool(start[_CACHED]))
            end = _TAIL if taken.normals else None  # the half is known only by drawing
            if not torch.equal(after[:end], jump(start, draws)[:end]) or after[_CACHED] != cached:
                return False
        return True

    def measure(self, numel: int) -> Spending | None:
        """What `numel` elements take, few enough for the generator to stay in its block."""
        start = _starts()[0]
        after = self.run(numel, 0.5, start)
        moved = int(start.view(torch.int32)[_LEFT] - after.view(torch.int32)[_LEFT])
        for taken in (Spending(moved), Spending(0, 2 * moved // _PAIR - int(after[_CACHED]))):
            if self.obeys(numel, taken):
                return taken
        return None


def _find_law(trial: _Trial, size: int) -> _Law | None:
    """The law for this size alone if it is small, else for its class; None if there is none."""
    if size < _SMALL:
        exact = trial.measure(size)
        return exact and (exact, Spending(0))
    # Multiples of 3, so that the permuted layout exists for each size.
    small, middle, large, huge = (48 * k + 33 * size % 48 for k in (1, 2, 40, 700))
    first, second = trial.measure(small), trial.measure(middle)
    if first is None or second is None:
        return None
    each = Spending(*((b - a) // (middle - small) for a, b in zip(first, second)))
    law = Spending(*(a - small * b for a, b in zip(first, each))), each
    proven = all(trial.obeys(numel, _apply(law, numel)) for numel in (middle, large, huge))
    return law if proven else None


@lru_cache(maxsize=None)
def _starts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two states at the start of a block, the second with a cached half."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    torch.empty(1, device="cpu").uniform_(generator=generator)
    fresh = generator.get_state()
    torch.empty(1, device="cpu").normal_(generator=generator)
    return fresh, generator.get_state()
