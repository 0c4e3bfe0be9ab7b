"""The results of one recorded call: inferred, made as fakes, and noted on the tape.

Where no kernel can say what a call returns, it is run once on computed values to find out, and
recorded like any other. Sparse results are computed for real: a tape is of dense memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchcompat import _eager, _infer, _rebind, _replay, autograd_hooks, fake_tensor
from torchcompat._calls import Tensors, encode, note_draws, note_graph, replaces
from torchcompat._random import streams
from torchcompat._schedule import written_by
from torchcompat._tape import Const, Geometry, Op, Storage, Value, flat, replace, tensors_in
from torchcompat._thread import require_devices

if TYPE_CHECKING:
    from torchcompat._plans import Plan

_NO_KERNEL = (NotImplementedError, AssertionError, ImportError)
_SMALL = 1 << 26  # bytes that may be computed to find out why a shape could not be inferred
# Operators that take tensors of several devices.
_ACROSS_DEVICES = {"copy_", "_copy_from", "index", "index_put_", "_index_put_impl_", "set_"}


def _values(args: Any) -> list[Value]:
    return [i for i in tensors_in(args) if isinstance(i, Value)]


def _require_within(g: Geometry, root: Geometry) -> None:
    """Refuse a view that reaches beyond its memory, as torch does."""
    if not g.fits(root):
        raise RuntimeError(
            f"sizes {list(g.size)}, strides {list(g.stride)}, storage offset {g.offset} need a "
            f"storage of {g.nbytes} bytes, which is out of bounds for storage of size {root.nbytes}"
        )


class Outputs:
    """The results of one call: inferred, then made as fakes and noted on the tape."""

    def __init__(
        self, plan: Plan, args: Any, kwargs: dict[str, Any], tensors: Tensors, op: Op | None
    ) -> None:
        self.plan, self.op = plan, op
        self.args, self.kwargs = args, kwargs
        self.fakes, self.reals = tensors
        self.values: list[Value] = []
        self.made: list[Storage | None] = []
        grad = op is not None and op.grad
        self.encoded = [encode(a, grad) for a in args]
        self.named = {k: encode(a, grad) if k != "generator" else None for k, a in kwargs.items()}
        self.device = self._device()
        if op is not None:
            op.args, op.kwargs = self._fixed(op.grad)
        self.results = self._infer()

    def _device(self) -> torch.device:
        device = self.kwargs.get("device")
        if device is not None:
            require_devices(device.type)
        else:
            items = tensors_in((*self.encoded, *self.named.values()))
            device = _infer.common_device(items, self.plan.name not in _ACROSS_DEVICES)
        return torch.device("cpu") if device is None else fake_tensor.indexed(device)

    def _fixed(self, grad: bool) -> tuple[list[Any], dict[str, Any]]:
        """Replace by constants what lies in memory that is there: it may be changed at any time."""
        there = {f._value for f in self.fakes if f._value.storage.memory is not None}
        if not there:
            return self.encoded, self.named
        there -= {f._value for f in self.fakes if grad and f.requires_grad}

        def fix(item: Any) -> Any:
            return Const(_replay.materialize(item)) if item in there else item

        views = self.plan.returns
        args = [a if i in views else replace(a, fix) for i, a in enumerate(self.encoded)]
        return args, {k: replace(a, fix) for k, a in self.named.items()}

    def _infer(self) -> Any:
        try:
            return _infer.infer(self.plan, self.encoded, self.named)
        except _NO_KERNEL:
            if self.plan.inplace:
                return self.args[0]
            if self.op is None:
                raise
        except Exception:
            size = sum(f.numel() * f.element_size() for f in self.fakes)
            if self.op is None or size > _SMALL or not fake_tensor.hardware(self.device.type):
                raise
            if self.plan.writes:
                return self._try()
        return self._discover()

    def _try(self) -> Any:
        """Run an operator that writes, on copies: to fail as it fails, or to find that it works."""

        def copied(item: Any) -> Any:
            return _replay.compute(item).clone() if isinstance(item, Value) else item.tensor.clone()

        named = {**self.named, "generator": None} if self.plan.generator else self.named
        with autograd_hooks.quiet():
            return _infer.call_on(self.plan.func, self.encoded, named, copied, self.device)

    def _discover(self) -> Any:
        """Learn the shapes by running the operator on computed values."""
        generator = self.kwargs.get("generator") or streams.default_generator(self.device)
        if self.op is None or generator is None:
            return self._look()
        # Whether an operator from elsewhere draws is told by the generator alone.
        streams.expose(generator)
        before = streams.get_state(generator)
        result = self._look()
        after = streams.get_state(generator)
        if self.plan.random or not torch.equal(before, after):
            self.op.position = streams.Position(streams.Origin(before))
            self.op.after = streams.Position(streams.Origin(after))
            self.op.takes_generator = self.plan.generator
            self.op.kwargs = {k: v for k, v in self.op.kwargs.items() if k != "generator"}
        return result

    def _look(self) -> Any:
        with torch.no_grad():
            return _eager.run(self.plan, self.args, self.kwargs)

    def build(self, written: Any = ()) -> Any:
        """Return what the caller gets, and put the call on the tape."""
        results, returns = self.results, self.plan.returns
        if any(getattr(r, "layout", torch.strided) != torch.strided for r in flat(results)):
            return _eager.run(self.plan, self.args, self.kwargs)  # a tape is of dense memory
        made: Any = None
        if not isinstance(results, (list, tuple)):
            made = self._output(returns[0], results) if returns else None
        elif len(returns) == 1:
            made = type(results)(self._output(returns[0], r) for r in results)
        elif returns:
            made = tuple(map(self._output, returns, results))
        if self.op is not None:
            self._note(written)
        return made

    def _output(self, origin: int | None, result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return [self._output(origin, r) for r in result]
        index = len(self.made)
        self.made.append(None)
        if not isinstance(result, (Geometry, torch.Tensor)):
            return result
        if origin is None:
            geometry = _infer.located(result, self.device)
            if self.device.type == "meta":
                return _infer.meta_tensor(geometry)
            if self.op is not None:
                self.made[index] = Storage(geometry)
            return self._wrap(Value(self.made[index], geometry), result)
        source = self.plan.argument(self.plan.argument_names[origin], self.args, self.kwargs)
        geometry = _infer.located(result, source.device)
        if any(i == origin for i, _ in self.plan.writes):
            return self._written(source, geometry)
        base = source._value
        if self.plan.name == "as_strided" and base.storage:
            _require_within(geometry, base.storage.root)
        return self._wrap(Value(base.storage, geometry, base, self.op, index), result)

    def _wrap(self, value: Value, result: Any) -> Any:
        if isinstance(result, torch.Tensor) and result.device.type == "meta":
            value.meta = result
        self.values.append(value)
        return fake_tensor.wrap(value)

    def _written(self, source: Any, geometry: Geometry) -> Any:
        """Return a written argument; an ``out=`` of another shape gets new memory first."""
        if geometry.size != tuple(source.shape):
            old = source._value
            new = _rebind.lay(source, geometry)._value
            if self.op is not None:
                given = self.named.items()
                self.op.kwargs = {k: replace(v, lambda i: new if i is old else i) for k, v in given}
        return source

    def _note(self, written: Any) -> None:
        """Put the call on the tape of every storage it makes or writes."""
        op, plan = self.op, self.plan
        assert op is not None
        op.made = self.made
        op.foreign = plan.foreign
        op.writes = [t._value for t in written]
        op.reads = _values((*op.args, *op.kwargs.values()))
        if plan.overwrites and len(op.writes) == 1:
            index, name = plan.writes[0]
            rest = [a for i, a in enumerate(op.args) if i != index]
            rest += [a for k, a in op.kwargs.items() if k != name]
            others, target = _values(rest), op.writes[0]
            if all(v.storage is not target.storage for v in others) and replaces(target):
                op.reads, op.overwrites = others, True
        if plan.random and op.position is None:
            note_draws(plan, op, self.args, self.kwargs, self.device)
        if op.grad:
            note_graph(op, [*self.fakes, *self.reals], [*self.values, *op.writes])
            if isinstance(self.args[0], list):
                for tensor in written:
                    autograd_hooks.count_write(tensor)
        for storage in written_by(op):
            storage.writers.append(op)
