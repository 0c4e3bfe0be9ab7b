"""From a tape to real tensors: slice, order, run, release.

A ``Schedule`` starts from wanted values and collects, backwards, the operators their memory needs: the
last whole overwrite of a storage ends the search in it. Operators then run target by target, each
after what it depends on: readers of a storage's older state before the write that destroys it, writes
in the order they were recorded. Memory that is no target is released at its last use. Every run works
on new memory, so recorded history can be computed again, whatever happened to tensors given out
since; only the storages of targets become permanent (``Storage.memory``).

Autograd: an operator runs with grad enabled if it was recorded so, and its leaf inputs are the very
objects that are given out. A graph therefore makes its leaves targets, and a leaf its graph.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterable, Sequence

import torch

from torchcompat import autograd_hooks, fake_tensor
from torchcompat._random import streams
from torchcompat._tape import Const, Op, Storage, Value, now, replace

aten = torch.ops.aten

# One thread plans and gives out tensors at a time, so that two callers get one object.
lock = threading.RLock()

_ERRORS = (IndexError, NotImplementedError, TypeError, ValueError)
_KNOWN_BYTES = 1 << 20


class Schedule:
    """The operators that some values need, and the memory they run on."""

    def __init__(self, targets: Sequence[Value] = (), sink: Op | None = None) -> None:
        self.graph = bool(targets)  # on scratch memory nobody asks for gradients
        self.targets: list[Value] = []
        self.ops: dict[int, Op] = {}
        self.held: dict[Value, torch.Tensor] = {}
        self.roots: dict[Storage, torch.Tensor] = {}
        self.by_storage: dict[Storage, list[Value]] = {}
        self.cursors: dict[torch.device, streams.Cursor] = {}
        self.permanent: set[Storage] = set()
        self._given: set[Storage] = set()  # provided from the memory given out earlier
        self._extending: set[int] = set()  # operators that build a graph here, by number
        self._seen: set[tuple[Storage, int]] = set()
        self._sink = sink
        if sink is not None:
            self._add(sink)
        for value in targets:
            self.target(value)

    # Slicing.

    def target(self, value: Value) -> None:
        """Make a value, and all that its storage's whole history needs, part of the schedule."""
        storage = value.storage
        assert storage is not None
        _require_hardware(value.geometry)
        self.targets.append(value)
        self._graph_of(value)
        self._keep(storage)

    def _graph_of(self, value: Value) -> None:
        """Make the leaves that a view's graph starts from targets, too."""
        link: Value | None = value
        while link is not None and self.graph:
            if link.op is not None:
                self._leaves(link.op)
            link = link.parent

    def _leaves(self, op: Op) -> None:
        for leaf, _ in op.leaves:
            if leaf.real is None and leaf not in self.targets:
                self.target(leaf)

    def _keep(self, storage: Storage) -> None:
        """Make a storage permanent with all of its history."""
        if storage.memory is not None or storage in self.permanent:
            return
        self.permanent.add(storage)
        self._content(storage, len(storage.writers))
        for reference in storage.dependents:
            dependent = reference()
            if dependent is not None and dependent.real is None:
                self.target(dependent)

    def scratch(self, value: Value) -> None:
        """Make the content of a value part of the schedule, without giving it out."""
        assert value.storage is not None
        self._content(value.storage, len(value.storage.writers))

    def _content(self, storage: Storage, count: int) -> None:
        waiting = [(storage, count)]
        while waiting:
            storage, count = waiting.pop()
            while count and (storage, count) not in self._seen:
                self._seen.add((storage, count))
                count -= 1
                op = storage.writers[count]
                waiting.extend(self._add(op))
                if op.overwrites or storage in op.made:
                    break

    def _add(self, op: Op) -> list[tuple[Storage, int]]:
        """Add one operator; return the states of storages that it reads."""
        if op.seq in self.ops:
            return []
        self.ops[op.seq] = op
        results = {*op.made, *(v.storage for v in op.writes)} - {None}
        if op.graph and self.graph and any(s.memory is None for s in results):
            # A graph is built once, of the tensors that are given out.
            self._extending.add(op.seq)
            self._leaves(op)
            for storage in results:
                self._keep(storage)
        needs = []
        for value in (*op.reads, *op.writes):
            if value.parent is not None:
                self._graph_of(value)
        for value in op.reads:
            storage = value.storage
            assert storage is not None
            if storage.memory is not None and op.seq > storage.since:
                self._give(storage)
            elif not self._given_out(op, value):
                needs.append((storage, _writers_before(storage, op.seq)))
        if op is self._sink:
            for storage, count in needs:
                self._content(storage, count)
        return needs

    def _given_out(self, op: Op, value: Value) -> bool:
        """Tell whether a graph is read from the memory already given out, and provide it."""
        storage = value.storage
        assert storage is not None
        if storage.memory is None or op.seq not in self._extending:
            return False
        leaf = any(v is value for v, _ in op.leaves)
        if not leaf and not storage.memory.requires_grad:
            return False
        late = len(storage.writers) != _writers_before(storage, op.seq)
        if late or storage.version != _version(storage.memory):
            raise RuntimeError(
                f"{op.describe()} builds an autograd graph on a tensor that was materialised and then "
                "changed. Materialise the two together, for example with materialize_module."
            )
        self._give(storage)
        return True

    def _give(self, storage: Storage) -> None:
        assert storage.memory is not None
        self.roots[storage] = storage.memory
        self._given.add(storage)

    def _lasting(self, value: Value) -> bool:
        """Tell whether a value's memory here is the one that is given out."""
        return value.storage in self.permanent or value.storage in self._given

    # Ordering.

    def order(self) -> list[Op]:
        """Return the operators, target by target, each after those it depends on."""
        before = self._dependencies()
        done: set[int] = set()
        ordered: list[Op] = []
        heads = [w.seq for v in self.targets for w in v.storage.writers[-1:]]  # type: ignore[union-attr]
        for head in [*heads, *sorted(self.ops)]:
            waiting = [head] if head in self.ops else []
            while waiting:
                seq = waiting[-1]
                missing = [] if seq in done else [s for s in before[seq] if s not in done]
                if missing:
                    waiting.extend(missing)
                    continue
                waiting.pop()
                if seq not in done:
                    done.add(seq)
                    ordered.append(self.ops[seq])
        return ordered

    def _dependencies(self) -> dict[int, list[int]]:
        last_write: dict[Storage, int] = {}
        readers: dict[Storage, list[int]] = {}
        before: dict[int, list[int]] = {}
        for seq in sorted(self.ops):
            op = self.ops[seq]
            needs = before[seq] = []
            written = {v.storage for v in op.writes} | set(op.made)
            for storage in {v.storage for v in op.reads} - written:
                if storage in last_write:
                    needs.append(last_write[storage])
                readers.setdefault(storage, []).append(seq)  # type: ignore[arg-type]
            for storage in written:
                if storage is None:
                    continue
                if storage in last_write:
                    needs.append(last_write[storage])
                needs.extend(readers.pop(storage, ()))
                last_write[storage] = seq
        return before

    # Running.

    def run(self) -> None:
        """Run everything, releasing what is no target at its last use."""
        ordered = self.order()
        last: dict[Storage, int] = {}
        for op in ordered:
            for storage in _touched(op):
                last[storage] = op.seq
        for op in ordered:
            self.execute(op)
            for storage in _touched(op):
                if last[storage] == op.seq and storage not in self.permanent:
                    self._release(storage)

    def _release(self, storage: Storage) -> None:
        if self.keep is storage:
            return
        self.roots.pop(storage, None)
        for value in self.by_storage.pop(storage, ()):
            self.held.pop(value, None)

    keep: Storage | None = None

    def handle(self, value: Value) -> torch.Tensor:
        """Return the real tensor of a value, making views, and memory not yet there, on the way."""
        chain = []
        while value not in self.held and value.parent is not None:
            graph = value.real is not None and value.real.grad_fn is not None
            if graph and self._lasting(value):
                self.hold(value, value.real)
                break
            chain.append(value)
            value = value.parent
        tensor = self.held.get(value)
        if tensor is None:
            tensor = self._root(value.storage)  # type: ignore[arg-type]
        for value in reversed(chain):
            tensor = self._view(value, tensor)
            self.hold(value, tensor)
        return tensor

    def hold(self, value: Value, tensor: torch.Tensor) -> None:
        """Remember a value's tensor until its storage is released."""
        self.held[value] = tensor
        self.by_storage.setdefault(value.storage, []).append(value)  # type: ignore[arg-type]

    def _root(self, storage: Storage) -> torch.Tensor:
        tensor = self.roots.get(storage)
        if tensor is None:
            g = storage.root
            _require_hardware(g)
            with torch.inference_mode(storage.inference):
                tensor = torch.empty_strided(g.size, g.stride, dtype=g.dtype, device=g.device)
            self.roots[storage] = tensor
        return tensor

    def _view(self, value: Value, base: torch.Tensor) -> torch.Tensor:
        op = value.op
        if op is None:
            return base.detach()
        if op.leaves and self._lasting(value):
            self._take_leaves(op)
            base = self.held.get(value.parent, base)  # type: ignore[arg-type]
        args, kwargs = self._arguments(op, {value.parent: base})
        with torch.set_grad_enabled(op.grad and self._lasting(value)):
            made: torch.Tensor = _flat(op.func(*args, **kwargs))[value.index]
        if made.grad_fn is not None and value.real is None:
            value.real = made
        return made

    def _arguments(self, op: Op, known: dict[Any, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        def real(item: Any) -> torch.Tensor:
            if item in known:
                return known[item]
            if isinstance(item, Value):
                return self.handle(item)
            if item.changed():
                raise RuntimeError(
                    f"{op.describe()} recorded a real tensor of shape {tuple(item.tensor.shape)} that "
                    "was changed before the result was materialised. Clone the tensor before using "
                    "it, or materialise first."
                )
            return item.tensor

        args = [replace(a, real) for a in op.args]
        return args, {k: replace(a, real) for k, a in op.kwargs.items()}

    def execute(self, op: Op) -> None:
        """Run one operator and take its results."""
        extending = op.seq in self._extending
        if extending:
            self._take_leaves(op)
        args, kwargs = self._arguments(op, {})
        for storage in op.made:
            if storage is not None and not fake_tensor.hardware(storage.root.device.type):
                if op.name != "_to_copy":
                    _require_hardware(storage.root)
                kwargs["device"] = torch.device("cpu")  # on its way to where it can be
        try:
            with _as_recorded(op, self.graph and (extending or not op.graph)):
                if op.position is not None:
                    result = self._draw(op, args, kwargs)
                else:
                    result = op.func(*args, **kwargs)
        except Exception as error:
            kind = type(error) if type(error) in _ERRORS else RuntimeError
            raise kind(f"could not materialise: {op.describe()}: {error}") from error
        if op.made:
            for storage, tensor in zip(op.made, _flat(result)):
                if storage is not None:
                    self.roots[storage] = tensor

    def _take_leaves(self, op: Op) -> None:
        """Put the objects that are given out in place as leaves of the graph that ``op`` extends."""
        for value, cls in op.leaves:
            if value.real is None or not value.real.requires_grad:
                value.real = leaf(self.handle(value), cls)
            self.hold(value, value.real)

    def _draw(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
        device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
        device = device or kwargs.get("device") or torch.device("cpu")
        cursor = self.cursors.get(device)
        if cursor is None:
            cursor = self.cursors[device] = streams.Cursor(device)
        generator = cursor.seek(op.position)
        if op.takes_generator:
            result = op.func(*args, **kwargs, generator=generator)
        else:
            with streams.borrowed(device, generator):
                result = op.func(*args, **kwargs)
        cursor.passed(op.after)
        if op is self._sink:
            self.final_state = streams.get_state(generator)
        return result


def _touched(op: Op) -> set[Storage]:
    touched = {v.storage for v in op.reads} | {v.storage for v in op.writes} | set(op.made)
    touched.discard(None)
    return touched  # type: ignore[return-value]


def _writers_before(storage: Storage, seq: int) -> int:
    """Count the writes of a storage that came before an operator."""
    writers = storage.writers
    if not writers or writers[-1].seq < seq:
        return len(writers)
    low, high = 0, len(writers)
    while low < high:
        middle = (low + high) // 2
        if writers[middle].seq < seq:
            low = middle + 1
        else:
            high = middle
    return low


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (list, tuple)):
        return [r for item in result for r in _flat(item)]
    return [result]


def _require_hardware(geometry: Any) -> None:
    if not fake_tensor.hardware(geometry.device.type):
        raise RuntimeError(
            f"a tensor of size {tuple(geometry.size)} is on {geometry.device}, and there is no such "
            "device here: it can be looked at, not materialised"
        )


@contextlib.contextmanager
def _as_recorded(op: Op, graph: bool) -> Any:
    """Restore what was true of the thread when an operator was recorded."""
    dtype = torch.get_default_dtype()
    if op.default_dtype is not None and op.default_dtype != dtype:
        torch.set_default_dtype(op.default_dtype)
    try:
        with torch.inference_mode(op.inference), torch.set_grad_enabled(op.grad and graph):
            yield
    finally:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


def leaf(tensor: torch.Tensor, cls: type) -> torch.Tensor:
    """Make the leaf of an autograd graph on a tensor's memory."""
    if cls is torch.Tensor:
        return tensor.detach().requires_grad_()
    return torch.Tensor._make_subclass(cls, tensor.detach(), True)


def compute(value: Value) -> torch.Tensor:
    """Compute a value's present content on scratch memory; nobody may write to the result."""
    storage = value.storage
    assert storage is not None
    with lock, autograd_hooks.quiet():
        schedule = Schedule()
        if storage.memory is not None:
            schedule.roots[storage] = storage.memory.detach()
        elif storage.known is not None and storage.known_at == len(storage.writers):
            schedule.roots[storage] = storage.known
        else:
            schedule.scratch(value)
            schedule.keep = storage
            schedule.run()
            root = schedule._root(storage)
            if root.numel() * root.element_size() <= _KNOWN_BYTES:
                storage.known, storage.known_at = root.detach(), len(storage.writers)
        return schedule.handle(value).detach()


def materialize(*values: Value) -> torch.Tensor:
    """Give values their real tensors, for good; return the first one's."""
    with lock, autograd_hooks.quiet():
        wanted = [v for v in values if v.real is None]
        if wanted:
            schedule = Schedule(wanted)
            schedule.run()
            _give_out(schedule)
        assert values[0].real is not None
        return values[0].real


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _give_out(schedule: Schedule) -> None:
    """Make what a schedule computed permanent."""
    for storage in schedule.permanent:
        root = schedule._root(storage)
        storage.memory = root if root.requires_grad else root.detach()
        storage.known = None
        storage.since = now()
    for value in schedule.targets:
        storage = value.storage
        assert storage is not None
        assert storage.memory is not None
        if storage not in schedule.roots:
            schedule._give(storage)
        if value.real is None:
            value.real = schedule.handle(value)
        storage.version = _version(storage.memory)


def state_after(op: Op) -> torch.Tensor:
    """Run an operator on scratch memory to learn the generator state it leaves."""
    with lock, autograd_hooks.quiet():
        schedule = Schedule(sink=op)
        schedule.run()
        return schedule.final_state


streams.run_for_state = state_after
