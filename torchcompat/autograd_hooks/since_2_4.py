"""A mode with the FAKE key keeps CUDA from starting (pytorch#122636): no patch of its start.

``torch.tensor`` on a device still needs the device, unless it is told to build on the CPU first
(pytorch#124413). Autocast is asked by device type, not by a function for each (pytorch#124359).
"""

from __future__ import annotations

from typing import Any

import torch

from torchcompat import fake_tensor
from torchcompat.autograd_hooks.since_1_13 import common
from torchcompat.autograd_hooks.since_2_3 import become, hand_over

__all__ = [
    "autocast",
    "become",
    "free_mode_key",
    "hand_over",
    "patches",
    "switch",
]

_lifts: list[bool] = []


def free_mode_key() -> Any:
    """Return the key of a mode that keeps devices from starting, if no other mode has it."""
    key = torch._C._TorchDispatchModeKey.FAKE
    return key if torch._C._get_dispatch_mode(key) is None else None


def patches(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List what is replaced while a mode is active: owner, name, replacement."""
    return common(recorder)


def switch(active: bool) -> None:
    """Let ``torch.tensor`` build on the CPU and convert, where its device is not there."""
    if active and not fake_tensor.hardware("cuda"):
        _lifts.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
    elif _lifts:
        torch._C._set_only_lift_cpu_tensors(_lifts.pop())


def autocast(device: str, enabled: bool | None = None) -> bool:
    """Set whether autocast is on for a device type, if ``enabled`` says so; return what it was."""
    was = torch.is_autocast_enabled(device)
    if enabled is not None:
        torch.set_autocast_enabled(device, enabled)
    return was
