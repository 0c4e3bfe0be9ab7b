"""A mode with the FAKE key keeps devices from starting (pytorch#122636): no patches of their start.

``torch.tensor`` on a device still needs the device, unless it is told to build on the CPU first
(pytorch#124413).
"""

from __future__ import annotations

from typing import Any

import torch

from torchcompat import fake_tensor

PATCHES = {(torch.cuda, "_lazy_init"): None, (torch.xpu, "_lazy_init"): None}
_lifts: list[bool] = []


def free_mode_key() -> Any:
    """Return the key of a mode that keeps devices from starting, if no other mode has it."""
    key = torch._C._TorchDispatchModeKey.FAKE
    return key if torch._C._get_dispatch_mode(key) is None else None


def switch(active: bool) -> None:
    """Let ``torch.tensor`` build on the CPU and convert, where its device is not there."""
    if active and not fake_tensor.hardware("cuda"):
        _lifts.append(torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
    elif _lifts:
        torch._C._set_only_lift_cpu_tensors(_lifts.pop())
