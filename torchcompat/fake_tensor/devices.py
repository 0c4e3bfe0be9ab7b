"""Devices, there or not.

What C++ knows as the device of a tensor whose hardware is not there is ``meta``: its guards for
other devices fail, and in autograd they abort the process. So a fake tells its device itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_hardware: dict[str, bool] = {"cpu": True, "meta": True}


def hardware(kind: str) -> bool:
    """Tell whether tensors of this device type can really be made here."""
    if kind not in _hardware:
        module = sys.modules.get("torch_xla") if kind == "xla" else getattr(torch, kind, None)
        available = getattr(module, "is_available", None)
        _hardware[kind] = bool(available()) if available else kind == "xla" and module is not None
    return _hardware[kind]


def indexed(arg: Any) -> Any:
    """Give a device without an index the first one, where torch cannot ask for the current one."""
    if isinstance(arg, (str, torch.device)):
        device: Any = torch.device(arg)
        if device.index is None and not hardware(device.type):
            return torch.device(device.type, 0)
    return arg


def _is_on(kind: str) -> Any:
    return property(lambda self: self.device.type == kind)


def _mover(kind: str) -> Any:
    """Build the method that converts to a kind of device, present or not."""

    def move(self: Any, device: Any = None, non_blocking: bool = False, **options: Any) -> Any:
        found = torch.device(kind, device) if isinstance(device, int) else device or kind
        return self.to(torch.device(found), non_blocking=non_blocking, **options)

    return move


class OnDevice(torch.Tensor):
    """What fakes answer about their device, and how they leave it."""

    _value: Any

    @property
    def device(self) -> Any:  # type: ignore[override]
        """The device that the tensor reports, there or not."""
        return self._value.geometry.device

    is_meta = property(lambda _: False)
    is_cpu, is_cuda, is_xpu, is_mps, is_xla = map(_is_on, ("cpu", "cuda", "xpu", "mps", "xla"))

    def get_device(self) -> int:
        """Return the index of the device, -1 on the CPU."""
        index = self.device.index
        return -1 if index is None else index

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Convert dtype or device, as ``Tensor.to``."""
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device, args[0].dtype, *args[1:])
        args = tuple(indexed(a) for a in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = indexed(kwargs["device"])
        target = kwargs.get("device") or (args and args[0])
        if not isinstance(target, (torch.device, str)) or hardware(self.device.type):
            return super().to(*args, **kwargs)
        return self._moved(*args, **kwargs)

    def _moved(
        self, device: Any, dtype: Any = None, _: Any = None, copy: bool = False, **options: Any
    ) -> torch.Tensor:
        """Convert from hardware that is not there, of which C++ knows nothing."""
        device, dtype = torch.device(device), dtype or self.dtype
        layout = options.get("memory_format") or torch.preserve_format
        laid = layout is torch.preserve_format or self.is_contiguous(memory_format=layout)
        if laid and not copy and (device, dtype) == (self.device, self.dtype):
            return self
        made: torch.Tensor = torch.ops.aten._to_copy.default(
            self, dtype=dtype, device=device, memory_format=layout
        )
        return made

    def cpu(self, **options: Any) -> torch.Tensor:  # type: ignore[override]
        """Convert to the CPU."""
        return self.to(torch.device("cpu"), **options)

    cuda, xpu = _mover("cuda"), _mover("xpu")
