"""How many 32-bit numbers an operator takes from the CPU generator, measured on this very torch.

An operator runs on scratch tensors with a private generator, whose state tells how far it moved.
Small sizes are measured one by one. For larger ones the count is taken to be affine in the number
of elements within a residue class mod 16 (kernels work in blocks of 16), fitted at two sizes, and
trusted only if larger runs, one beyond the size at which kernels share work among threads, leave
the generator in just the state that the law says.

- `None` means unproven. What does not fit, raises, depends on contents or on how tensors that are
  not contiguous lie in memory (the runs vary both), or is not listed here gives `None`. So do
  factories: they are recorded as an allocation and an operator that fills it.
- A `Spending` is stated without regard to half a pair of normals that the generator may keep.
- Numbers matter by kind (sign, zero, below or above one, bits of an integer range), not by value.
- That seeds and the number of threads do not matter is checked by tests/test_draws.py.
- No visible generator is moved: an operator without a generator argument borrows the default one
  for the microseconds of a measurement, under a lock, and leaves it as it was.
"""

from __future__ import annotations

import contextlib
import math
import threading
from functools import lru_cache
from typing import Any, Callable

import torch

from torchcompat import autograd_hooks
from torchcompat._random.mt19937 import CACHED, LEFT
from torchcompat._random.streams import Spending, borrowed, get_state, spend

_DRAWING = """
    normal_ uniform_ random_ bernoulli_ exponential_ geometric_ log_normal_ cauchy_ normal bernoulli
    native_dropout
"""
_EXACT = 256  # every floating dtype has the integers up to here; beyond, each try may warn
_SMALL = 32  # sizes below are measured one by one
_laws: dict[Any, Callable[[int], Spending] | None] = {}
_lock = threading.RLock()


def predict(func: Any, args: Any, kwargs: Any) -> Spending | None:
    """Return what calling the overload `func` on CPU takes from its generator, None if unproven.

    `args` and `kwargs` are those of the dispatcher. Tensors among them need only offer `dtype`,
    `shape` and `stride()`; no value is read.
    """
    seen = [(a.dtype, a.shape, a.stride()) if hasattr(a, "stride") else a for a in args]
    try:
        return None if kwargs.keys() - {"generator"} else _look_up(func, *seen)
    except (TypeError, ValueError):  # a list of sizes: nothing that is listed here takes one
        return None


@lru_cache(maxsize=1 << 14)
@autograd_hooks.paused()  # neither our mode nor one of the program's own takes part
def _look_up(func: Any, *args: Any) -> Spending | None:
    """Apply the law for this kind of call, found now if the call is the first of its kind."""
    tensors = [value for value in args if isinstance(value, tuple)]
    numbers = [value for value in args if isinstance(value, (int, float))]
    sizes = {size.numel() for _, size, _ in tensors}
    if func.__name__.partition(".")[0] not in _DRAWING.split() or len(sizes) != 1:
        return None
    wide = any(isinstance(number, int) and abs(number) > _EXACT for number in numbers)
    if any(0 in stride or (wide and dtype.is_floating_point) for dtype, _, stride in tensors):
        return None
    (size,) = sizes
    spans = tuple(_kind(upper - lower) for lower, upper in zip(numbers, numbers[1:]))
    which = size if size < _SMALL else f"{size % 16} mod 16"
    case = (func, tuple(map(_kind, args)), spans, which)
    with _lock:
        if case not in _laws:
            _laws[case] = None
            with contextlib.suppress(Exception):  # refused, also where the operator really runs
                _laws[case] = _find_law(func, args, size)
        law = _laws[case]
    return law and law(size)


def _kind(value: Any) -> Any:
    """What of an argument may switch between algorithms."""
    if isinstance(value, tuple):
        dtype, size, stride = value
        return dtype, torch.empty_strided(size, stride, device="meta").is_contiguous()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, int):
        return value < 0, value.bit_length(), value & (value - 1) == 0
    return tuple((value > bound) - (value < bound) for bound in (-math.inf, 0, 1, math.inf))


def _scratch(like: Any, numel: int, variant: int) -> torch.Tensor:
    """A tensor of `numel` elements equal to `variant`; if not contiguous, permuted or with gaps."""
    dtype, contiguous = _kind(like)
    memory = torch.empty(2 * numel, dtype=dtype, device="cpu")
    for piece in memory.chunk(1 + len(memory) // 20_000):  # too small to wake other threads
        piece.fill_(variant)
    if contiguous:
        return memory[:numel]
    rows = next((rows for rows in range(2, numel) if numel % rows == 0), numel)
    return memory[::2] if variant or rows == numel else memory[:numel].view(rows, -1).t()


def _run(func: Any, args: tuple[Any, ...], numel: int, variant: int) -> torch.Tensor:
    """Call on `numel` elements with a generator in a starting state; return its state after it."""
    generator = torch.Generator(device="cpu").set_state(_starts()[variant])
    args = tuple(_scratch(a, numel, variant) if isinstance(a, tuple) else a for a in args)
    if any(argument.name == "generator" for argument in func._schema.arguments):
        func(*args, generator=generator)
    else:
        with borrowed(torch.device("cpu"), generator):
            func(*args)
    return get_state(generator)


def _find_law(func: Any, args: Any, size: int) -> Callable[[int], Spending] | None:
    """The law for this size alone if it is small, else for its class; None if there is none."""

    def obeys(numel: int, taken: Spending) -> bool:
        ends = (spend(start, taken) for start in _starts())
        return all(torch.equal(_run(func, args, numel, v), end) for v, end in enumerate(ends))

    def measure(numel: int) -> Spending | None:
        """What so few elements take that the generator stays in its block."""
        start, after = _starts()[0], _run(func, args, numel, 0)
        moved = int(start.view(torch.int32)[LEFT] - after.view(torch.int32)[LEFT])
        plain, serial = Spending(moved), Spending(0, moved // 2 - int(after[CACHED]))
        return next((taken for taken in (plain, serial) if obeys(numel, taken)), None)

    if size < _SMALL:
        exact = measure(size)
        return exact and (lambda _: exact)
    # Multiples of 3, so that permuted tensors exist of each size.
    small, middle, large, huge = (48 * k + 33 * size % 48 for k in (1, 2, 40, 700))
    first, second = measure(small), measure(middle)
    if first is None or second is None:
        return None
    each = [(b - a) // (middle - small) for a, b in zip(first, second)]

    def law(numel: int) -> Spending:
        return Spending(*(a + (numel - small) * b for a, b in zip(first, each)))

    return law if all(obeys(n, law(n)) for n in (middle, large, huge)) else None


@lru_cache(maxsize=None)
def _starts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two states at the start of a block, the second with a cached half."""
    seeded = torch.Generator(device="cpu").manual_seed(0).get_state()
    fresh = spend(seeded, Spending(1))
    return fresh, spend(fresh, Spending(0, normals=1))
