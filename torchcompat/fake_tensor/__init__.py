"""Seam 1: making and describing fake tensors.

A fake reports the device, dtype, sizes and strides of a tensor that does not exist. Everything that
touches torch's tensor subclasses is behind the names that the rungs offer; the recorder connects
itself once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from torchcompat import _gate

LADDER: _gate.Ladder = ((1, 13), (2, 4))

if TYPE_CHECKING:  # every rung changes what the floor offers
    from torchcompat.fake_tensor.since_1_13 import *  # noqa: F403
else:
    globals().update(_gate.load(__name__, LADDER))

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
