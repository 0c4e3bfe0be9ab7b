"""Who draws where: every generator is a stream, every recorded operator starts at a position in it.

Recording draws nothing. A position is an origin (a generator state that really was, or the state a
certain operator leaves behind) and the number of 32-bit draws made since. After each recorded
operator the visible generator is set to a placeholder that encodes its position, so whatever the
constructor does with generators (``manual_seed``, ``fork_rng``, saving and setting states) is seen
at the next random operator: a placeholder names a position, anything else is a new origin. Before
something really draws, and when the recording ends, the true state is put in.

This module alone decides where an operator's numbers start. Rules:
- What an operator draws is asked of ``draws.predict``. Where that has no answer, the operator is
  the origin of what follows, and runs on scratch memory when somebody has to know that state.
- A placeholder keeps the true seed, so ``initial_seed`` is right. What it encodes is forgotten when
  no thread records any more.
- When a recording ends with unproven operators on more than ``TORCHCOMPAT_EXIT_ELEMENTS`` elements,
  running them is postponed: the visible generator gets a state derived from the position, and a
  warning says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
from typing import Any, Callable, Iterator

import torch

from torchcompat._random import draws, mt19937

_MAGIC = (0x746F7263, 0x68636F6D)
_CPU_BYTES = 5056
_WORDS, _NORMALS = 24, 5016  # byte offsets in a CPU state: 624 words of 8 bytes, cached normals
_NO_HALF, _ORIGIN_HALF = -1, -2
_EXIT_ELEMENTS = int(os.environ.get("TORCHCOMPAT_EXIT_ELEMENTS", 1 << 24))


def _unconnected(op: Any) -> torch.Tensor:
    raise RuntimeError(f"nobody is here to run {op.describe()}")


# Set by the replayer: run an operator on scratch memory and return the state it leaves.
run_for_state: Callable[[Any], torch.Tensor] = _unconnected

# While a recording is active the method itself hides placeholders (see ``autograd_hooks``).
get_state = torch.Generator.get_state

_positions: dict[int, Position] = {}
_lock = threading.Lock()
_next_id = 0


class Origin:
    """A generator state that is known, or will be once an operator has run."""

    __slots__ = ("_state", "op")

    def __init__(self, state: torch.Tensor | None, op: Any = None) -> None:
        self._state = state
        self.op = op

    @property
    def resolved(self) -> bool:
        """Tell whether the state is known without running anything."""
        return self._state is not None

    def state(self) -> torch.Tensor:
        """Return the state, running the operators it waits for, the first one first."""
        waiting: list[Origin] = []
        origin = self
        while origin._state is None:
            waiting.append(origin)
            origin = origin.op.position.origin
        while waiting:
            origin = waiting.pop()
            origin._state = run_for_state(origin.op)
        assert self._state is not None
        return self._state

    def has_half(self) -> bool | None:
        """Tell whether a normal deviate is cached in this state; None if it is not known yet."""
        if self._state is None:
            return None
        return bool(self._state.numel() == _CPU_BYTES and self._state[_NORMALS + 24])


class Position:
    """A place in a stream: ``draws`` numbers after ``origin``.

    ``half`` says where the second half of a pair of normal deviates, if one is cached, was drawn:
    at that many draws after the origin, or as it was at the origin, or nowhere.
    """

    __slots__ = ("draws", "half", "origin")

    def __init__(self, origin: Origin, draws: int = 0, half: int = _ORIGIN_HALF) -> None:
        self.origin = origin
        self.draws = draws
        self.half = half

    def after(self, spending: draws.Spending | None, op: Any) -> Position:
        """Return the position that ``op`` leaves, given what it spends (None: not known)."""
        if spending is None:
            return Position(Origin(None, op))
        if not spending.normals:
            return Position(self.origin, self.draws + spending.draws, self.half)
        cached = self.origin.has_half() if self.half == _ORIGIN_HALF else self.half != _NO_HALF
        if cached is None:
            return Position(Origin(None, op))
        taken, left = draws.spend(spending, cached)
        end = self.draws + taken
        half = _NO_HALF
        if left:  # taken alone can be 0: then no pair was drawn and none is left
            half = end - 4
        return Position(self.origin, end, half)

    def state(self) -> torch.Tensor:
        """Compute the generator state of this position."""
        base = self.origin.state()
        if base.numel() != _CPU_BYTES:
            return base
        state = mt19937.jump(base, self.draws)
        if self.half == _ORIGIN_HALF:
            return state
        normals = torch.zeros(_CPU_BYTES - _NORMALS, dtype=torch.uint8, device="cpu")
        if self.half != _NO_HALF:
            normals = _draw_half(mt19937.jump(base, self.half))[_NORMALS:]
        state[_NORMALS:] = normals
        return state


def _draw_half(state: torch.Tensor) -> torch.Tensor:
    """Return the state after one serial normal deviate, whose pair's other half is now cached."""
    state[_NORMALS:] = 0
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty(1, device="cpu").normal_(generator=generator)
    return get_state(generator)


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that operators on ``device`` use by default, if torch has one here."""
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", ())
    index = device.index or 0
    return generators[index] if index < len(generators) else None


def where(generator: torch.Generator) -> Position:
    """Return the position of a visible generator."""
    state = get_state(generator)
    address = state.data_ptr()
    if state.numel() == _CPU_BYTES:
        first, second, number, _ = (ctypes.c_uint64 * 4).from_address(address + _WORDS)
        if (first, second) == _MAGIC:
            return _positions[number]
    elif state.numel() == 16:
        seed = ctypes.c_uint64.from_address(address).value
        if seed >> 32 == _MAGIC[0]:
            return _positions[seed & 0xFFFFFFFF]
    return Position(Origin(state))


def place(generator: torch.Generator, position: Position) -> None:
    """Set a visible generator to the placeholder of a position."""
    global _next_id
    with _lock:
        _next_id += 1
        number = _next_id & 0xFFFFFFFF
        _positions[number] = position
        seed = generator.initial_seed()
        if generator.device.type == "cpu":
            _cpu_seed.value = seed
            _cpu_words[:] = [*_MAGIC, number, 0]
            generator.set_state(_cpu_placeholder)
        else:
            state = torch.zeros(16, dtype=torch.uint8, device="cpu")
            ctypes.c_uint64.from_address(state.data_ptr()).value = _MAGIC[0] << 32 | number
            generator.set_state(state)


_cpu_placeholder = torch.zeros(_CPU_BYTES, dtype=torch.uint8, device="cpu")
_cpu_seed = ctypes.c_uint64.from_address(_cpu_placeholder.data_ptr())
_cpu_words = (ctypes.c_uint64 * 4).from_address(_cpu_placeholder.data_ptr() + _WORDS)
(ctypes.c_int32 * 2).from_address(_cpu_placeholder.data_ptr() + 8)[:] = [1, 1]  # left, seeded


def draw(op: Any, generator: torch.Generator, spending: Any, recording: bool) -> None:
    """Note where ``op`` starts drawing, and move the visible generator past it."""
    op.position = here = where(generator)
    op.after = after = here.after(spending, op)
    if recording:
        place(generator, after)
    else:
        generator.set_state(after.state())


def expose(generator: torch.Generator) -> None:
    """Give a visible generator its true state, because something is about to draw or read it."""
    position = where(generator)
    if position.draws or not position.origin.resolved or position.half != _ORIGIN_HALF:
        generator.set_state(position.state())
    elif position.origin._state is not None:
        generator.set_state(position.origin._state)


def settle(generator: torch.Generator) -> None:
    """Give a visible generator its true state at the end of a recording, unless that is dear."""
    position = where(generator)
    pending, origin = [], position.origin
    while not origin.resolved:
        pending.append(origin.op)
        origin = origin.op.position.origin
    elements = sum(value.geometry.numel for op in pending for value in op.reads or op.writes)
    if elements <= _EXIT_ELEMENTS:
        return expose(generator)
    dearest = max(pending, key=lambda op: sum(v.geometry.numel for v in op.reads or op.writes))
    warnings.warn(
        f"How many random numbers {dearest.describe()} takes is known only by running it. The "
        f"generator is not moved to where eager construction would leave it, since that means "
        f"running operators on {elements:,} elements; parameters are not affected. To have it "
        f"moved, set TORCHCOMPAT_EXIT_ELEMENTS={elements} in the environment before importing "
        "torchcompat.",
        stacklevel=2,
    )
    derived = torch.Generator()
    derived.set_state(origin.state())
    derived.manual_seed((derived.initial_seed() + 0x9E3779B97F4A7C15 * len(pending)) % 2**63)
    generator.set_state(get_state(derived))
    return None


def forget() -> None:
    """Drop what placeholders encode, when nobody records any more."""
    _positions.clear()


@contextlib.contextmanager
def borrowed(device: torch.device, generator: torch.Generator) -> Iterator[None]:
    """Let an operator that takes no generator draw from ``generator`` all the same."""
    default = default_generator(device)
    assert default is not None
    saved = get_state(default)
    default.set_state(get_state(generator))
    try:
        yield
    finally:
        generator.set_state(get_state(default))
        default.set_state(saved)


class Cursor:
    """A private generator of one device that is moved to the positions operators start at."""

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device=device)
        self._at: Position | None = None

    def seek(self, position: Position) -> torch.Generator:
        """Return the generator, standing at ``position``."""
        at, self._at = self._at, None
        near = at is not None and at.origin is position.origin and at.half == position.half
        if near and at is not None and at.draws <= position.draws:
            if at.draws < position.draws:
                gap = position.draws - at.draws
                self.generator.set_state(mt19937.jump(get_state(self.generator), gap))
        else:
            self.generator.set_state(position.state())
        return self.generator

    def passed(self, after: Position) -> None:
        """Note that the generator has just made the numbers that lead to ``after``."""
        self._at = after
