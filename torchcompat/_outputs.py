"""The results of one recorded call: inferred, made as fakes, and noted on the tape.

Where no kernel can say what a call returns, it is run once on computed values to find out, and
recorded like any other. Sparse results are computed for real: a tape is of dense memory.
"""

from __future__ import annotations

from typing import Any

import torch

from torchcompat import _calls, _eager, _infer, _rebind, _replay, autograd_hooks, fake_tensor
from torchcompat._plans import Plan, plan_for
from torchcompat._random import streams
from torchcompat._schedule import written_by
from torchcompat._tape import Geometry, Op, Storage, Value, replace, tensors_in
from torchcompat._thread import require_devices

_NO_KERNEL = (NotImplementedError, AssertionError, ImportError)
_SMALL = 1 << 26  # bytes that may be computed to find out why a shape could not be inferred
# Operators that take tensors of several devices.
_ACROSS_DEVICES = {"copy_", "_copy_from", "index", "index_put_", "_index_put_impl_", "set_"}


def _flat(results: Any) -> Any:
    return results if isinstance(results, (list, tuple)) else (results,)


def _require_within(g: Geometry, root: Geometry) -> None:
    """Refuse a view that reaches beyond its memory, as torch does."""
    if g.numel and g.nbytes > root.nbytes:
        raise RuntimeError(
            f"sizes {list(g.size)}, strides {list(g.stride)}, storage offset {g.offset} need a "
            f"storage of {g.nbytes} bytes, which is out of bounds for storage of size {root.nbytes}"
        )


class Outputs:
    """The results of one call: inferred, then made as fakes and noted on the tape."""

    def __init__(self, plan: Plan, args: Any, kwargs: dict[str, Any], op: Op | None) -> None:
        self.plan, self.op = plan, op
        self.args, self.kwargs = args, kwargs
        self.values: list[Value] = []
        grad = op is not None and op.grad
        self.encoded = [_calls.encode(a, grad) for a in args]
        self.named = {
            k: _calls.encode(a, grad) if k != "generator" else None for k, a in kwargs.items()
        }
        self.device = self._device()
        self.fakes, self.reals = _calls.tensors(args, kwargs)
        if op is not None:
            keep = {f._value for f in self.fakes if op.grad and f.requires_grad}
            op.args = [
                a if i in plan.returns else _calls.fixed(a, keep)
                for i, a in enumerate(self.encoded)
            ]
            op.kwargs = {k: _calls.fixed(a, keep) for k, a in self.named.items()}
        self.results = self._infer()

    def _device(self) -> torch.device:
        device = self.kwargs.get("device")
        if device is None:
            items = [i for a in (*self.encoded, *self.named.values()) for i in tensors_in(a)]
            device = _infer.common_device(items, self.plan.name not in _ACROSS_DEVICES)
        if device is None:
            return torch.device("cpu")
        if self.kwargs.get("device") is not None:
            require_devices(device.type)
        indexed: torch.device = fake_tensor.indexed(device)
        return indexed

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
        return result

    def _look(self) -> Any:
        with torch.no_grad():
            return _eager.run(self.plan, self.args, self.kwargs)

    def build(self, written: Any = ()) -> Any:
        """Return what the caller gets, and put the call on the tape."""
        if any(getattr(r, "layout", torch.strided) != torch.strided for r in _flat(self.results)):
            return _eager.run(self.plan, self.args, self.kwargs)  # a tape is of dense memory
        returns = self.plan.returns
        single = not isinstance(self.results, (list, tuple))
        results = (self.results,) if single else self.results
        many = len(returns) == 1 and not single
        if not returns:
            made = None
            self.made: list[Any] = []
        else:
            self.made = []
            listed = [
                self._output(returns[0] if many else returns[i], r) for i, r in enumerate(results)
            ]
            made = listed[0] if single else type(self.results)(listed) if many else tuple(listed)
        if self.op is not None:
            self._note(written)
        return made

    def _output(self, origin: int | None, result: Any) -> Any:
        if isinstance(result, (list, tuple)):
            return [self._output(origin, r) for r in result]
        if isinstance(result, Geometry):
            shape = result.size
        elif isinstance(result, torch.Tensor):
            shape = result.shape
        else:
            self.made.append(None)
            return result
        if origin is not None:
            name = self.plan.argument_names[origin]
            source = self.args[origin] if origin < len(self.args) else self.kwargs[name]
            if any(i == origin for i, _ in self.plan.writes):
                self.made.append(None)
                return self._written(source, tuple(shape))
            base = source._value
            geometry = _infer.located(result, base.geometry.device)
            if self.plan.name == "as_strided" and base.storage:
                _require_within(geometry, base.storage.root)
            value = Value(base.storage, geometry, base, self.op, len(self.made))
            self.made.append(None)
            return self._wrap(value, result)
        geometry = _infer.located(result, self.device)
        if self.device.type == "meta":
            self.made.append(None)
            return _infer.meta_tensor(geometry)
        storage = Storage(geometry) if self.op is not None else None
        self.made.append(storage)
        return self._wrap(Value(storage, geometry), result)

    def _wrap(self, value: Value, result: Any) -> Any:
        if isinstance(result, torch.Tensor) and result.device.type == "meta":
            value.meta = result
        self.values.append(value)
        return fake_tensor.wrap(value)

    def _written(self, source: Any, shape: tuple[int, ...]) -> Any:
        """Return a written argument; an ``out=`` of another shape gets new memory first."""
        if shape != tuple(source.shape) and source._value.storage is not None:
            old = source._value
            _rebind.rebind(plan_for(torch.ops.aten.resize_.default), (source, list(shape)), {})
            value = source._value
            assert self.op is not None

            def renewed(item: Any) -> Any:
                return value if item is old else item

            self.named = {k: replace(v, renewed) for k, v in self.named.items()}
            self.op.kwargs = self.named
        return source

    def _note(self, written: Any) -> None:
        """Put the call on the tape of every storage it makes or writes."""
        op, plan = self.op, self.plan
        assert op is not None
        op.made = self.made
        op.foreign = plan.foreign
        op.writes = [t._value for t in written]
        items = [i for a in (*op.args, *op.kwargs.values()) for i in tensors_in(a)]
        op.reads = [i for i in items if isinstance(i, Value)]
        if plan.overwrites and len(op.writes) == 1:
            index, name = plan.writes[0]
            rest = [a for i, a in enumerate(op.args) if i != index]
            rest += [a for k, a in op.kwargs.items() if k != name]
            others = [i for a in rest for i in tensors_in(a) if isinstance(i, Value)]
            target = op.writes[0]
            memory = target.storage
            apart = memory is not None and all(v.storage is not memory for v in others)
            if apart and _calls.covers(target) and memory is not None and not memory.graph:
                op.reads, op.overwrites = others, True
        if plan.random and op.position is None:
            _calls.note_draws(plan, op, self.args, self.kwargs, self.device)
        if op.grad:
            _calls.note_graph(op, [*self.fakes, *self.reals], [*self.values, *op.writes])
        for storage in self.made:
            if storage is not None:
                storage.writers.append(op)
        for storage in written_by(op) - set(self.made):
            storage.writers.append(op)
