"""Who draws where: every generator is a stream, every recorded operator starts at a position in it.

Recording draws nothing. A position is an origin (a generator state that really was, or the state a
certain operator leaves behind) and the number of 32-bit draws made since. After each recorded
operator the visible generator is set to a placeholder that stands for its position, so whatever the
constructor does with generators (``manual_seed``, ``fork_rng``, saving and setting states) is seen
at the next random operator: a placeholder names a position, anything else is a new origin. Before
something really draws, and when the recording ends, the true state is put in.

This module alone decides where an operator's numbers start. Rules:
- What an operator spends on the CPU is asked of ``draws.predict``. Where that has no answer, and on
  other devices, it runs on scratch memory when somebody has to know the state it leaves. Where
  states are a seed and an offset, as on CUDA, one that has run speaks for all of the same overload,
  scalars, sizes and dtypes: they take the same offset.
- A placeholder keeps the seed, so ``initial_seed`` is right, except where states have neither form.
  A thread that draws from it without recording gets sound numbers. When no thread records any more,
  what placeholders stand for is forgotten.
- When a recording ends with operators to run on more than ``TORCHCOMPAT_EXIT_ELEMENTS`` elements,
  that is postponed: the visible generator gets another seed, and a warning says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
import warnings
from typing import Any, Iterator, NamedTuple

import torch

from torchcompat import fake_tensor
from torchcompat._random.mt19937 import BYTES, CACHED, NORMALS, WORDS, jump
from torchcompat._tape import replace

# While a recording is active the method itself hides placeholders (see ``autograd_hooks``).
get_state = torch.Generator.get_state

# Set by the replayer: runs an operator on scratch memory and returns the state it leaves.
run_for_state: Any = None

_EXIT_ELEMENTS = int(os.environ.get("TORCHCOMPAT_EXIT_ELEMENTS", 1 << 24))
_SEED_AND_OFFSET = 16  # bytes of a state that is just that
_MARK = 0x1B0A7C0D  # what placeholders have in common
_numbers = itertools.count(_MARK << 32)
_cpu_state = torch.Generator(device="cpu").manual_seed(_MARK).get_state()
_cpu_fields = (ctypes.c_uint64 * 5).from_address(_cpu_state.data_ptr())
_positions: dict[bytes, Position] = {}
_offsets: dict[str, Spending] = {}
forget = _positions.clear  # when nobody records any more
_lock = threading.RLock()


class Spending(NamedTuple):
    """What an operator takes: plain 32-bit `draws`, and `normals` taken serially, in pairs."""

    draws: int
    normals: int = 0


def spend(state: torch.Tensor, spending: Spending) -> torch.Tensor:
    """Return the state that spending leads to, byte for byte; a draw counts as one of an offset."""
    draws, normals = spending
    if state.numel() == _SEED_AND_OFFSET:
        moved = torch.tensor([0, draws], device="cpu")
        return (state.view(torch.int64) + moved).view(torch.uint8)
    state = jump(state, draws)
    if normals >= 16:  # pass over all pairs but the last; fewer are drawn serially below
        cached = int(state[CACHED])
        pairs = (normals - cached - 1) // 2
        state, normals = jump(state, 4 * pairs), normals - cached - 2 * pairs
        state[NORMALS:] = 0
    if normals:
        generator = torch.Generator(device="cpu").set_state(state)
        torch.empty(normals, dtype=torch.float32, device="cpu").normal_(generator=generator)
        state = get_state(generator)
    return state


class Origin:
    """A generator state; until it is known, the position before it and the operator (or none)."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def unknown(self) -> list[tuple[Origin, Position, Any]]:
        """List the origins that this one waits for, with their sources, the first one last."""
        found: list[tuple[Origin, Position, Any]] = []
        origin, source = self, self.source
        while not isinstance(source, torch.Tensor):
            found.append((origin, *source))
            origin = source[0].origin
            source = origin.source
        return found

    def state(self) -> Any:
        """Return the state, running the operators it waits for."""
        for origin, position, op in reversed(self.unknown()):
            spending = _offsets.get(_signature(op)) if op else Spending(0)
            try:
                state = spend(position.state(), spending) if spending else run_for_state(op)
            except Exception:  # eager torch would have failed there, and drawn nothing
                if not isinstance(origin.source, torch.Tensor):
                    origin.source = position.state()
                raise
            origin.learn(state)
        return self.source

    def learn(self, state: torch.Tensor) -> None:
        """Take the state that was found; if it is a seed and an offset, note what was taken."""
        source, self.source = self.source, state
        if state.numel() == _SEED_AND_OFFSET and not isinstance(source, torch.Tensor):
            start, end = (s.view(torch.int64)[1] for s in (source[0].state(), state))
            _offsets[_signature(source[1])] = Spending(int(end - start))


def _signature(op: Any) -> str:
    """Say all that the offset depends on which an operator takes."""

    def seen(tensor: Any) -> Any:
        g = getattr(tensor, "geometry", None)
        return (g.device, g.dtype, g.size, g.stride) if g else op.seq  # a real one is no other's

    if op.foreign or not hasattr(op.func, "_schema"):
        return str(op.seq)  # it may do anything
    given = replace([*op.args, *op.kwargs.values()], seen)
    return repr((op.func, op.default_dtype, *op.kwargs, given))


class Position(NamedTuple):
    """A place in a stream: ``draws`` numbers and then ``normals`` after ``origin``."""

    origin: Origin
    draws: int = 0
    normals: int = 0

    def after(self, spending: Spending | None, op: Any) -> Position:
        """Return the position that ``op`` leaves, given what it spends (None: not known)."""
        if spending is None:
            return Position(Origin((self, op)))
        if self.normals and spending.draws:
            return Position(Origin((self, None)), *spending)
        return Position(self.origin, self.draws + spending.draws, self.normals + spending.normals)

    def state(self) -> torch.Tensor:
        """Compute the generator state of this position."""
        return spend(self.origin.state(), Spending(self.draws, self.normals))


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that operators on ``device`` use by default, if torch has one here."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = getattr(torch, device.type, None)
    if hasattr(module, "init") and fake_tensor.hardware(device.type):
        module.init()  # which makes them
    generators = getattr(module, "default_generators", ())[device.index or 0 :]
    return generators[0] if generators else None


def _key(state: torch.Tensor) -> bytes:
    """Return what tells a placeholder's state from all others; of many words the first two do."""
    start, length = (WORDS, 16) if state.numel() == BYTES else (0, state.numel())
    return ctypes.string_at(state.data_ptr() + start, length)


def placed(generator: torch.Generator) -> Position | None:
    """Return the position that a visible generator's placeholder stands for, if it has one."""
    return _positions.get(_key(get_state(generator)))


def _place(generator: torch.Generator, position: Position) -> None:
    """Set a visible generator to a placeholder for a position."""
    number, state = next(_numbers), _cpu_state
    if generator.device.type == "cpu":
        seed, read = generator.initial_seed(), 2 + 79 * number % 600  # where to read differs
        _cpu_fields[:] = [seed, 1 << 32 | 625 - read, read, number & 0xFFFFFFFF, _MARK]
        generator.set_state(state)
    else:
        state = get_state(generator)
        if state.numel() == _SEED_AND_OFFSET:
            state.view(torch.int64)[1] = number << 2
            generator.set_state(state)
        else:
            state = get_state(generator.manual_seed(number))
    _positions[_key(state)] = position


def draw(op: Any, generator: torch.Generator, spending: Any, recording: bool) -> None:
    """Note where ``op`` starts drawing, and move the visible generator past it."""
    with _lock:
        op.position = here = placed(generator) or Position(Origin(get_state(generator)))
        op.after = here.after(spending, op)
        op.generator = generator
        if recording:
            _place(generator, op.after)
    if not recording:
        generator.set_state(op.after.state())


def failed(op: Any, state: torch.Tensor) -> None:
    """Put the visible generator back to the ``state`` in which ``op`` failed while recording.

    Eager torch fails at the call, so that whatever moved the generator since did not happen.
    """
    with _lock:
        generator, op.generator = op.generator, None
        if generator is not None:  # the first time
            generator.set_state(state)
            if not isinstance(op.after.origin.source, torch.Tensor):
                op.after.origin.source = state


def expose(generator: torch.Generator) -> None:
    """Give a visible generator its true state, because something is about to draw or read it."""
    position, failed = placed(generator), None
    while position is not None:
        try:
            state = position.state()
        except Exception as error:
            failed = failed or error
            continue
        with _lock:
            if placed(generator) is position:  # no other thread has recorded a draw meanwhile
                generator.set_state(state)
        position = placed(generator)
    if failed is not None:
        raise failed


def settle(generator: torch.Generator) -> None:
    """Give a visible generator its true state at the end of a recording, unless that is dear."""
    position, state = placed(generator), get_state(generator)
    unknown = position.origin.unknown() if position else []
    ops = [op for _, _, op in unknown if op]
    if state.numel() == _SEED_AND_OFFSET:
        alike = {_signature(op): op for op in ops}
        ops = [alike[signature] for signature in alike.keys() - _offsets.keys()]
    sizes = [sum(v.geometry.numel for v in op.reads or op.writes) for op in ops]
    if sum(sizes) <= _EXIT_ELEMENTS:
        return expose(generator)
    dearest = ops[sizes.index(max(sizes))]
    warnings.warn(
        f"How many random numbers {dearest.describe()} takes is known only by running it. The "
        f"generator is not moved to where eager construction would leave it, since that means "
        f"running operators on {sum(sizes):,} elements; parameters are not affected. To have it "
        f"moved, set TORCHCOMPAT_EXIT_ELEMENTS={sum(sizes)} in the environment before importing "
        "torchcompat.",
        stacklevel=2,
    )
    generator.set_state(unknown[-1][1].state())
    generator.manual_seed((generator.initial_seed() + 0x9E3779B97F4A7C15 * len(ops)) % 2**63)
    return None


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
        near = at and at.origin is position.origin and not at.normals
        if at and near and at.draws <= position.draws:
            gap = Spending(position.draws - at.draws, position.normals)
            if any(gap):
                self.generator.set_state(spend(get_state(self.generator), gap))
        elif at != position:
            self.generator.set_state(position.state())
        return self.generator

    def passed(self, after: Position) -> None:
        """Note that the generator has just made the numbers that lead to ``after``."""
        self._at = after
        if not any(after[1:]):
            after.origin.learn(get_state(self.generator))
