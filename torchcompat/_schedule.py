"""What must run to give some values their content, and in which order.

A ``Schedule`` starts from wanted values and collects, backwards, the operators their memory needs:
the last whole overwrite of a storage ends the search in it. Operators are ordered target by target,
each after what it depends on: readers of a storage's older state before the write that destroys it,
writes as they were recorded. Recorded history can be computed again, whatever happened to tensors
given out since; only the storages of targets become permanent (``Storage.memory``).

Autograd: the leaf inputs of an operator that extends a graph are the very objects that are given
out. A graph therefore makes its leaves targets, and a leaf its graph.
"""

from __future__ import annotations

import itertools
from typing import Any, Sequence

from torchcompat import fake_tensor
from torchcompat._tape import Geometry, Op, Storage, Value, checksums, same_sums, stamp


class Schedule:
    """The operators that some values need, and the memory they run on."""

    def __init__(self, targets: Sequence[Value] = (), sink: Op | None = None) -> None:
        self.graph = bool(targets)  # on scratch memory nobody asks for gradients
        self.targets: dict[Value, None] = {}
        self.ops: dict[int, Op] = {}
        self.permanent: dict[Storage, None] = {}
        self.given: set[tuple[int, Storage]] = set()  # who reads what was given out earlier
        self.extending: set[int] = set()  # operators that build a graph here, by number
        self._seen: set[tuple[Storage, int]] = set()
        self._states: list[tuple[Storage, int]] = []  # storages, and after how many writes
        if sink is not None:
            self._add(sink)
        for value in targets:
            self._target(value)
            self._search()
        self._search()

    # Slicing.

    def _target(self, value: Value) -> None:
        """Make a value, with the whole history of its storage, part of the schedule."""
        assert value.storage is not None
        if value not in self.targets:
            require_hardware(value.geometry)
            if value.former is not None:
                self._target(value.former)
            self.targets[value] = None
            self._graph_of(value)
            self._keep(value.storage)

    def _graph_of(self, value: Value) -> None:
        """Make the leaves that a view's graph starts from targets, too."""
        link: Value | None = value
        while link is not None and self.graph:
            if link.op is not None:
                self._leaves(link.op)
            link = link.parent

    def _leaves(self, op: Op) -> None:
        for leaf, _ in op.leaves:
            if leaf.real is None:
                self._target(leaf)

    def _keep(self, storage: Storage) -> None:
        """Make a storage permanent with all of its history."""
        if storage.memory is None and storage not in self.permanent:
            self.permanent[storage] = None
            self._states.append((storage, len(storage.writers)))

    def scratch(self, value: Value) -> None:
        """Make the content of a value part of the schedule, without giving it out."""
        assert value.storage is not None
        self._states.append((value.storage, len(value.storage.writers)))
        self._search()

    def _search(self) -> None:
        """Collect the operators that the wanted states of storages need."""
        while self._states:
            storage, count = self._states.pop()
            if storage in self.permanent and count == len(storage.writers):
                written = storage.writers[-1].seq if storage.writers else 0
                late = (found for found, seq in storage.dependents if not seq or seq < written)
                for reference in itertools.chain(*late):
                    dependent = reference()
                    if dependent is not None and dependent.real is None:
                        self._target(dependent)
            while count and (storage, count) not in self._seen:
                self._seen.add((storage, count))
                count -= 1
                op = storage.writers[count]
                self._add(op)
                if op.overwrites or storage in op.made:
                    break

    def _add(self, op: Op) -> None:
        """Add one operator, and the states of storages that it reads."""
        if op.seq in self.ops:
            return
        self.ops[op.seq] = op
        results = written_by(op)
        if op.graph and self.graph and any(s.memory is None for s in results):
            # A graph is built once, of the tensors that are given out.
            self._extend(op, results)
        for value in (*op.reads, *op.writes):
            if value.parent is not None:
                self._graph_of(value)
        for value in op.reads:
            storage = value.storage
            assert storage is not None
            if storage.memory is not None and op.seq > storage.since:
                self._unchanged(op, op.seen.get(storage), storage)
                self.given.add((op.seq, storage))
            elif not self._given_out(op, value):
                self._states.append((storage, _writers_before(storage, op.seq)))

    def _extend(self, op: Op, results: set[Storage]) -> None:
        """Let an operator build its graph: of leaves, results and what it saves, for good."""
        self.extending.add(op.seq)
        self._leaves(op)
        saved = {s for s in read_by(op) if len(s.writers) > _writers_before(s, op.seq)}
        for storage in results | saved:  # what is saved for backward may be written later
            self._keep(storage)

    def _given_out(self, op: Op, value: Value) -> bool:
        """Tell whether a graph is read from the memory already given out, and provide it."""
        storage = value.storage
        assert storage is not None
        if storage.memory is None or op.seq not in self.extending:
            return False
        leaf = any(v is value for v, _ in op.leaves)
        if not leaf and not storage.memory.requires_grad:
            return False
        late = len(storage.writers) != _writers_before(storage, op.seq)
        self._unchanged(op, None if late else (storage.version, None), storage)
        self.given.add((op.seq, storage))
        return True

    def _unchanged(self, op: Op, then: Any, storage: Storage) -> None:
        """Refuse to build a graph on memory that is not what the operator was recorded on."""
        assert storage.memory is not None
        version, sums = then or (None, None)
        same = version == stamp(storage)
        if not same or (sums is not None and not same_sums(checksums(storage.memory), sums)):
            raise RuntimeError(
                f"{op.describe()} builds an autograd graph on a tensor that was materialised and "
                "then changed. Materialise the two together, for example with materialize_module."
            )

    # Ordering.

    def order(self) -> list[Op]:
        """Return the operators, target by target, each after those it depends on."""
        before = self._dependencies()
        done: set[int] = set()
        ordered: list[Op] = []
        heads = [w.seq for v in self.targets if v.storage for w in v.storage.writers[-1:]]
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
        last_graph: dict[Value, int] = {}
        before: dict[int, list[int]] = {}
        for seq in sorted(self.ops):
            op = self.ops[seq]
            needs = before[seq] = []
            for leaf in {leaf.first for leaf, _ in op.leaves}:
                if leaf in last_graph:  # its ``.data`` may have moved since
                    needs.append(last_graph[leaf])
                last_graph[leaf] = seq
            written = written_by(op)
            for storage in read_by(op) - written:
                if (seq, storage) in self.given:
                    continue
                if storage in last_write:
                    needs.append(last_write[storage])
                readers.setdefault(storage, []).append(seq)
            for storage in written:
                if storage in last_write:
                    needs.append(last_write[storage])
                needs.extend(readers.pop(storage, ()))
                last_write[storage] = seq
        return before


def read_by(op: Op) -> set[Storage]:
    """Return the storages an operator reads."""
    return {v.storage for v in op.reads if v.storage is not None}


def written_by(op: Op) -> set[Storage]:
    """Return the storages an operator allocates or writes."""
    made = {s for s in op.made if s is not None}
    return made | {v.storage for v in op.writes if v.storage is not None}


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


def require_hardware(geometry: Geometry) -> None:
    """Refuse memory on a device that is not there."""
    if not fake_tensor.hardware(geometry.device.type):
        raise RuntimeError(
            f"a tensor of size {tuple(geometry.size)} is on {geometry.device}, and there is no such"
            " device here: it can be looked at, not materialised"
        )


def components(schedule: Schedule, ordered: list[Op]) -> list[list[Op]]:
    """Part operators, in order, into groups that share no memory with each other."""
    group: dict[object, object] = {}

    def find(item: object) -> object:
        while group.setdefault(item, item) is not item:
            group[item] = group[group[item]]
            item = group[item]
        return item

    for op in ordered:
        for storage in read_by(op) | written_by(op):
            if (op.seq, storage) not in schedule.given:
                group[find(storage)] = find(op.seq)
    parts: dict[object, list[Op]] = {}
    for op in ordered:
        parts.setdefault(find(op.seq), []).append(op)
    return list(parts.values())
