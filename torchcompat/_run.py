"""Operators of a schedule on their way: the memory they run on, and what becomes of their results.

Every run works on new memory. Memory that is no target is released at its last use. A graph starts
from the very objects that are given out; what one tensor was before and after ``.data =`` is one
leaf, which has at each operator the memory it had when that was recorded.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

import torch

from torchcompat import fake_tensor
from torchcompat._random import streams
from torchcompat._schedule import Schedule, read_by, require_hardware, written_by
from torchcompat._tape import Op, Storage, Value, flat, replace
from torchcompat._thread import thread

_ERRORS = (IndexError, NotImplementedError, TypeError, ValueError)


class Run:
    """Some operators of a schedule on their way, and the memory they run on."""

    def __init__(
        self, schedule: Schedule, keep: Storage | None = None, outside: bool = False
    ) -> None:
        self.schedule = schedule
        self.keep = keep
        # The run on memory that was given out earlier; None in that run itself.
        self._outside: Run | None = None if outside else Run(schedule, outside=True)
        self.roots: dict[Storage, torch.Tensor] = {}
        self.final_state: torch.Tensor | None = None
        self._held: dict[Value, torch.Tensor] = {}
        self._by_storage: dict[Storage, list[Value]] = {}
        # Leaves, and where they were before; one table for both runs.
        self.moved: dict[torch.Tensor, torch.Tensor] = self._outside.moved if self._outside else {}
        self._lent: dict[Storage | None, torch.Tensor] = {}
        self._spare: torch.Tensor | None = None  # memory that was lent and is free again
        self._cursors: dict[torch.device, streams.Cursor] = {}

    def run(self, ordered: list[Op], report: Callable[[Storage], None] | None = None) -> None:
        """Run operators in order, releasing what is no target at its last use."""
        touched = {op.seq: read_by(op) | written_by(op) for op in ordered}
        last = {storage: op.seq for op in ordered for storage in touched[op.seq]}
        for op in ordered:
            self._execute(op)
            for storage in touched[op.seq]:
                if last[storage] != op.seq:
                    continue
                if storage not in self.schedule.permanent:
                    self._release(storage)
                elif report is not None:
                    report(storage)
        self._spare = None

    def _release(self, storage: Storage) -> None:
        if self.keep is not storage:
            self.roots.pop(storage, None)
            lent = self._lent.pop(storage, None)
            if lent is not None and (self._spare is None or len(self._spare) < len(lent)):
                self._spare = lent
            for value in self._by_storage.pop(storage, ()):
                self._held.pop(value, None)

    def handle(self, value: Value) -> torch.Tensor:
        """Return the real tensor of a value, making views, and memory not yet there, on the way."""
        chain = []
        while value not in self._held and value.parent is not None:
            real = value.real
            if real is not None and _in_graph(real) and self._lasting(value):
                self._hold(value, real)
                break
            chain.append(value)
            value = value.parent
        tensor = self._held.get(value)
        if tensor is None:
            assert value.storage is not None
            tensor = self.root(value.storage)
        for value in reversed(chain):
            tensor = self._view(value, tensor)
            self._hold(value, tensor)
        return tensor

    def _hold(self, value: Value, tensor: torch.Tensor) -> None:
        """Remember a value's tensor until its storage is released."""
        assert value.storage is not None
        self._held[value] = tensor
        self._by_storage.setdefault(value.storage, []).append(value)

    def root(self, storage: Storage) -> torch.Tensor:
        """Return the memory of a storage, allocating it if nothing has."""
        tensor = self.roots.get(storage) if self._outside else storage.memory
        if tensor is None:
            require_hardware(storage.root)
            with torch.inference_mode(storage.inference):
                tensor = self._allocate(storage)
        self.roots[storage] = tensor
        return tensor

    def _allocate(self, storage: Storage) -> torch.Tensor:
        """Make memory; what will be released again lies where something released lay, if it fits.

        So models that are cast after they are made leave no holes for the allocator to fill.
        """
        g, schedule = storage.root, self.schedule
        lasting = storage in schedule.permanent or storage is self.keep or schedule.extending
        if lasting or storage.inference or g.device.type != "cpu" or not g.numel:
            if not g.offset:
                return torch.empty_strided(g.size, g.stride, dtype=g.dtype, device=g.device)
            flat = torch.empty(g.reach, dtype=g.dtype, device=g.device)
            return flat.as_strided(g.size, g.stride, g.offset).detach()
        spare, self._spare = self._spare, None
        if spare is None or len(spare) < g.nbytes:
            del spare
            spare = torch.empty(g.nbytes, dtype=torch.uint8, device="cpu")
        self._lent[storage] = spare
        return spare[: g.nbytes].view(g.dtype).as_strided(g.size, g.stride, g.offset)

    def _view(self, value: Value, base: torch.Tensor) -> torch.Tensor:
        op = value.op
        if op is None:
            return base.data if value.apart else base.detach()
        lasting = self._lasting(value)
        known: dict[Any, torch.Tensor] = {value.parent: base}
        if lasting:
            known.update(self._leaves(op))
        args, kwargs = self._arguments(op, known)
        with torch.set_grad_enabled(op.grad and lasting):
            made: torch.Tensor = flat(op.func(*args, **kwargs))[value.index]
        return made

    def _lasting(self, value: Value) -> bool:
        """Tell whether a value's memory here is the one that is given out."""
        return self._outside is None or value.storage in self.schedule.permanent

    def remember_graphs(self) -> None:
        """Note which tensors others that are given out later have to start from."""
        for value, tensor in self._held.items():
            if value.real is None and self._lasting(value) and _in_graph(tensor):
                value.real = tensor

    def _arguments(
        self, op: Op, known: dict[Any, torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        def real(item: Any) -> torch.Tensor:
            if item in known:
                return known[item]
            if isinstance(item, Value):
                return self._source(op, item).handle(item)
            if item.changed():
                raise RuntimeError(
                    f"{op.describe()} recorded a real tensor of shape {tuple(item.tensor.shape)} "
                    "that was changed before the result was materialised. Clone the tensor before "
                    "using it, or materialise first."
                )
            tensor: torch.Tensor = item.tensor
            return tensor

        args = [replace(a, real) for a in op.args]
        return args, {k: replace(a, real) for k, a in op.kwargs.items()}

    def _execute(self, op: Op) -> None:
        """Run one operator and take its results."""
        extending = op.seq in self.schedule.extending
        for value in op.reads if extending else ():  # views may move their leaves
            self._source(op, value).handle(value)
        args, kwargs = self._arguments(op, self._leaves(op) if extending else {})
        for storage in op.made:
            if storage is not None and not fake_tensor.hardware(storage.root.device.type):
                if op.name != "_to_copy":
                    require_hardware(storage.root)
                kwargs["device"] = torch.device("cpu")  # on its way to where it can be
        try:
            with _as_recorded(op, extending or (op.foreign and not op.graph)):
                if op.position is not None:
                    result = self._draw(op, args, kwargs)
                else:
                    result = op.func(*args, **kwargs)
        except Exception as error:
            kind = type(error) if type(error) in _ERRORS else RuntimeError
            raise kind(f"could not materialise: {op.describe()}: {error}") from error
        for storage, tensor in zip(op.made, flat(result)):
            if storage is not None and tensor is not None:  # some kernels leave a result out
                self.roots[storage] = tensor
                self._keep_shared(op, tensor)

    def _keep_shared(self, op: Op, tensor: torch.Tensor) -> None:
        """Never lend again what an operator's result turned out to lie in."""
        for value in op.reads:
            lent = self._lent.get(value.storage) if value.storage else None
            if lent is not None and 0 <= tensor.data_ptr() - lent.data_ptr() < len(lent):
                del self._lent[value.storage]

    def _leaves(self, op: Op) -> dict[Any, torch.Tensor]:
        """Return the objects that are given out, as leaves of the graph ``op`` extends."""
        found = {}
        for value, cls in op.leaves:
            leaf, before = as_leaf(value, cls, self._source(op, value).handle(value))
            if before is not None:
                self.moved.setdefault(leaf, before)
            found[value] = leaf
        return found

    def _source(self, op: Op, value: Value) -> Run:
        """Return the run on whose memory an operator finds a value."""
        given = (op.seq, value.storage) in self.schedule.given
        return self._outside if given and self._outside else self

    def _draw(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        device = device or kwargs.get("device") or torch.device("cpu")
        cursor = self._cursors.get(device)
        if cursor is None:
            cursor = self._cursors[device] = streams.Cursor(device)
        generator = cursor.seek(op.position)
        try:
            if op.takes_generator:
                result = op.func(*args, **kwargs, generator=generator)
            else:
                with streams.borrowed(device, generator):
                    result = op.func(*args, **kwargs)
        except Exception:
            if thread.deferred:
                streams.failed(op, streams.get_state(generator))
            raise
        cursor.passed(op.after)
        if not self.schedule.targets:
            self.final_state = streams.get_state(generator)
        return result


@contextlib.contextmanager
def _as_recorded(op: Op, graph: bool) -> Iterator[None]:
    """Restore what was true of the thread when an operator was recorded."""
    dtype = torch.get_default_dtype()
    wanted = op.default_dtype or dtype
    if wanted != dtype:  # all threads have the same
        torch.set_default_dtype(wanted)
    try:
        with torch.inference_mode(op.inference), torch.set_grad_enabled(op.grad and graph):
            yield
    finally:
        if wanted != dtype:
            torch.set_default_dtype(dtype)


def _in_graph(tensor: torch.Tensor) -> bool:
    try:
        return tensor.grad_fn is not None
    except RuntimeError:  # a view of several that was written to: torch says so when asked
        return True


def as_leaf(
    value: Value, cls: type, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the object that a graph starts from, and that is given out for a leaf.

    If it was there and lay elsewhere than ``tensor``, that is returned, too.
    """
    leaf, before = leaf_of(value), None
    if leaf is None:
        leaf = fake_tensor.subclass(cls, tensor.detach() if value.apart else tensor, True)
    else:
        before = move(leaf, tensor)
    link: Value | None = value
    while link is not None:
        link.real, link = leaf, link.former
    return leaf, before


def leaf_of(value: Value | None) -> torch.Tensor | None:
    """Return the leaf that a graph knows a value's tensor as, if there is one."""
    while value is not None:
        if value.real is not None and value.real.requires_grad and value.real.is_leaf:
            return value.real
        value = value.former
    return None


def move(leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """Give a leaf the memory that its ``.data`` was, or became; return the old, if another."""

    def place(t: torch.Tensor) -> Any:
        return t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_inference()

    if place(leaf) == place(tensor):
        return None
    before = leaf.data
    if not (tensor.is_floating_point() or tensor.is_complex()):
        leaf.requires_grad_(False)  # as it was when that happened
    leaf.data = tensor
    return before
