"""The tape: what was done to which memory, held by the tensors it was done to.

A ``Storage`` is a piece of memory and the operators that wrote it, in order. A ``Value`` is one
tensor handle on a storage: the handle the storage was made with, or a view with the operator that
made the view. An ``Op`` is one recorded call, its tensors replaced by ``Value`` (deferred) and
``Const`` (real). There is no list of all operators: a fake tensor owns its value, the value its
storage, the storage its writers, so a model that is dropped takes its tape with it.

Nothing here runs an operator. Recording appends, planning and replaying only read.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any, Callable, ClassVar, Iterable, Sequence

import torch

_sequence = itertools.count(1)

# Real tensors up to this many bytes are copied when an operator records them, larger ones watched.
SNAPSHOT_BYTES = 1 << 20


def now() -> int:
    """Return a number between those of the operators recorded so far and of those to come."""
    return next(_sequence)


class Storage:
    """A piece of memory: its writers in order, and the real memory once it has been given out.

    ``memory`` is the handle the storage was made with, as a real tensor, from the moment on that
    somebody outside can see it; from then on operators act on it at once. ``known`` is the content
    after ``known_at`` writes, kept when a small storage had to be computed early.
    """

    __slots__ = (
        "__weakref__",
        "changes",
        "dependents",
        "graph",
        "inference",
        "known",
        "known_at",
        "memory",
        "root",
        "since",
        "version",
        "writers",
    )

    def __init__(self, root: Geometry) -> None:
        self.root = root
        self.writers: list[Op] = []
        self.memory: torch.Tensor | None = None
        self.known: torch.Tensor | None = None
        self.known_at = 0
        self.since = 0  # operators recorded after this one act on ``memory`` at once
        self.version = 0  # version counter of what was given out, then
        # Weak references to values whose graph comes from here, with 0, or may use what is here,
        # with the number of the operator that saved it.
        self.dependents: list[tuple[list[Any], int]] = []
        self.changes = 0  # writes to ``memory`` that bumped no version counter
        self.graph = False  # whether an operator that extended a graph wrote it
        self.inference = torch.is_inference_mode_enabled()


class Geometry:
    """How a tensor lies in its memory: sizes and strides in elements, offset, dtype, device."""

    __slots__ = ("conj", "device", "dtype", "neg", "offset", "size", "stride")

    def __init__(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.device = device
        self.conj = False  # read as the complex conjugate
        self.neg = False  # read with the opposite sign

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for extent in self.size:
            count *= extent
        return count

    @property
    def reach(self) -> int:
        """One past the last element that the handle can touch, counted from the storage's start."""
        if self.numel == 0:
            return self.offset
        spans = ((s - 1) * t for s, t in zip(self.size, self.stride))
        return self.offset + sum(spans) + 1

    def fits(self, root: Geometry) -> bool:
        """Tell whether memory that ``root`` describes holds every element."""
        return not self.numel or self.nbytes <= root.nbytes

    @property
    def nbytes(self) -> int:
        """The bytes from the storage's start to the end of what the handle can touch."""
        return self.reach * itemsize(self.dtype)


@functools.lru_cache(maxsize=None)
def itemsize(dtype: torch.dtype) -> int:
    """Return the bytes of one element."""
    return torch.empty(0, dtype=dtype, device="cpu").element_size()


class Value:
    """One handle on a storage. ``parent`` is None for the handle the storage was made with.

    A fake without a tape (made by ``fake_mode``) has a value without a storage.
    """

    __slots__ = (
        "__weakref__",
        "apart",
        "finished",
        "former",
        "geometry",
        "index",
        "meta",
        "op",
        "parent",
        "real",
        "resolves",
        "storage",
    )

    def __init__(
        self,
        storage: Storage | None,
        geometry: Geometry,
        parent: Value | None = None,
        op: Op | None = None,
        index: int = 0,
        apart: bool = False,
    ) -> None:
        self.storage = storage
        self.geometry = geometry
        self.parent = parent
        self.op = op  # what made a view of its parent; None: an alias outside the graph
        self.index = index  # which of that operator's outputs
        self.apart = apart  # no view to autograd; without an operator, its writes go uncounted
        self.meta: torch.Tensor | None = None
        self.real: torch.Tensor | None = None
        # What its tensor, a leaf of a graph, was before ``.data =``.
        self.former: Value | None = None
        self.finished = False  # whether ``real`` is the object that was given out
        # Whether it is what torch, below autograd, made of a conjugate or negative in a graph.
        self.resolves = False

    def alias(self, apart: bool = False) -> Value:
        """Make a handle on the same memory, outside the graph."""
        return Value(self.storage, self.geometry, self, apart=apart)

    @property
    def first(self) -> Value:
        """What the tensor was at first."""
        value = self
        while value.former is not None:
            value = value.former
        return value


class Op:
    """One recorded call. ``args`` and ``kwargs`` hold values and constants in place of tensors."""

    name = ""
    reads: Sequence[Value] = ()
    writes: Sequence[Value] = ()
    made: Sequence[Storage | None] = ()  # storages this call allocates, in the order of its outputs
    seen: dict[Storage, Any] = {}  # versions and checksums of memory that was there  # noqa: RUF012
    overwrites = False  # its one written storage is written whole and not read
    grad = False
    inference = False
    default_dtype: torch.dtype | None = None
    foreign = False  # whether it is an operator from outside torch
    graph = False  # whether it extended an autograd graph
    leaves: Sequence[tuple[Value, type]] = ()  # leaves of that graph among its inputs, and classes
    position: Any = None  # where in its generator's stream it starts drawing
    after: Any = None  # and where it leaves it
    takes_generator = False
    generator: Any = None  # the visible one that was moved past it
    site: tuple[str, int] | None = None

    def __init__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.seq = next(_sequence)
        self.func = func
        self.args = args
        self.kwargs = kwargs

    def describe(self) -> str:
        """Name the operator and the line of the user's code that called it."""
        where = f" (called at {self.site[0]}:{self.site[1]})" if self.site else ""
        return f"{self.name}{where}"


class Const:
    """A real tensor that a recorded operator reads: copied when small, watched when large.

    A watched tensor is copied at the last moment if a recorded program is about to write it. Other
    writes are noticed at replay by the version counter and, on CPU, by two exact checksums (sums of
    the memory's 64-bit words by row and by column), which see writes through numpy and ``.data``.
    """

    __slots__ = ("__weakref__", "_graded", "_mark", "_version", "tensor")
    watched: ClassVar[dict[int, list[Any]]] = {}

    def __init__(self, tensor: torch.Tensor, keep: bool = False) -> None:
        self._version = -1
        self._graded = keep
        self._mark: tuple[torch.Tensor, ...] | None = None
        small = tensor.numel() * tensor.element_size() <= SNAPSHOT_BYTES
        if small and not keep:
            with torch.no_grad():
                tensor = _snapshot(tensor.detach()) if tensor.layout == torch.strided else tensor
        self.tensor = tensor
        if keep or not small:
            self._version = version_of(tensor)
            self._mark = checksums(tensor)
            watchers = Const.watched.setdefault(_address(tensor), [])
            watchers[:] = [w for w in watchers if w() is not None]
            watchers.append(weakref.ref(self))

    def changed(self) -> bool:
        """Tell whether the tensor is not what it was when it was recorded."""
        if self._version < 0:
            return False
        if self._version != version_of(self.tensor) or self._graded > self.tensor.requires_grad:
            return True
        return not same_sums(checksums(self.tensor), self._mark)

    @staticmethod
    def before_write(tensor: torch.Tensor) -> None:
        """Copy what is watched in a tensor's memory now: the program is about to change it."""
        for watcher in Const.watched.pop(_address(tensor), ()) if Const.watched else ():
            const = watcher()
            if const is not None and const._version >= 0 and not const.tensor.requires_grad:
                const.tensor, const._version = _snapshot(const.tensor.detach()), -1


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with the gaps it leaves, if they are small: results lie as their inputs do."""
    span = 1 + sum((s - 1) * t for s, t in zip(tensor.shape, tensor.stride()))
    if not tensor.numel() or span * tensor.element_size() > SNAPSHOT_BYTES:
        return tensor.clone()
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _address(tensor: torch.Tensor) -> int:
    """Return the address at which a tensor's storage begins."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def stamp(storage: Storage) -> int:
    """Return a number that changes with every write to a storage's memory that can be seen."""
    assert storage.memory is not None
    return version_of(storage.memory) + (storage.changes << 32)


def version_of(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def checksums(tensor: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
    """Sum a CPU tensor's memory as 64-bit words over rows and over columns of 4096 words."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
        return None
    with torch.no_grad():
        flat = tensor.detach()
        if not flat.is_contiguous() or flat.storage_offset() * flat.element_size() % 8:
            flat = flat.clone(memory_format=torch.contiguous_format)
        if flat.is_complex():
            flat = torch.view_as_real(flat)
        flat = flat.reshape(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        words = flat[:whole].view(torch.int64) if whole else flat[:0].to(torch.int64)
        square = words.numel() // 4096 * 4096
        rows = words[:square].view(-1, 4096)
        return rows.sum(0), rows.sum(1), words[square:].clone(), flat[whole:].clone()


def same_sums(one: Any, other: Any) -> bool:
    """Tell whether two checksums, if there are any, are of the same content."""
    return one is None or other is None or all(map(torch.equal, one, other))


def tensors_in(args: Iterable[Any]) -> list[Any]:
    """List the values and constants among recorded arguments, lists of them included."""
    found: list[Any] = []
    for arg in args:
        if isinstance(arg, (Value, Const)):
            found.append(arg)
        elif isinstance(arg, list):
            found.extend(tensors_in(arg))
    return found


def replace(arg: Any, change: Callable[[Any], Any]) -> Any:
    """Rebuild a recorded argument with ``change`` applied to each of its values and constants."""
    if isinstance(arg, (Value, Const)):
        return change(arg)
    if isinstance(arg, list):
        return [replace(item, change) for item in arg]
    return arg


def flat(result: Any) -> list[Any]:
    """List the results of a call, those in lists and tuples included."""
    if isinstance(result, (list, tuple)):
        return [r for item in result for r in flat(item)]
    return [result]
