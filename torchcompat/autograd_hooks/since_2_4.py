"""A mode with the FAKE key keeps devices from starting (pytorch#122636): no patches of their start.

``torch.tensor`` on a device still needs the device, unless it is told to build on the CPU first
(pytorch#124413). Generators can be pickled (pytorch#126271) and cloned (pytorch#114068).
"""

from __future__ import annotations

from typing import Any

import torch

from torchcompat import fake_tensor


def _in_true_state(original: Any, recorder: Any) -> Any:
    """Let a generator be copied or pickled in its true state, not with a placeholder."""

    def copy(self: torch.Generator, *args: Any) -> Any:
        recorder.expose_generator(self)
        return original(self, *args)

    return copy


def _setstate(original: Any, recorder: Any) -> Any:
    """Let a generator be unpickled where tensors are deferred."""

    def setstate(self: torch.Generator, state: Any) -> None:
        original(self, tuple(recorder.real_data(state)))

    return setstate


PATCHES = {
    (torch.cuda, "_lazy_init"): None,
    (torch.xpu, "_lazy_init"): None,
    (torch._C.Generator, "clone_state"): _in_true_state,
    (torch._C.Generator, "__reduce__"): _in_true_state,
    (torch._C.Generator, "__setstate__"): _setstate,
}
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
