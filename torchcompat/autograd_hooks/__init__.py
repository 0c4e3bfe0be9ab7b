"""Seam 2: what autograd and Python touch behind the dispatcher.

Some things never reach a dispatch mode: constructors of tensor subclasses, assignments to ``.data``
of real tensors, the initialisation of CUDA while arguments are parsed. They are patched while a
recording or fake mode is active anywhere in the process, by one holder that counts its users and
restores everything when the last one leaves; each patch asks whether its own thread is recording.
The rungs also say how a fake object becomes a real one.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchcompat import _gate

__all__ = [
    "LADDER",
    "TorchDispatchMode",
    "become",
    "enter",
    "free_mode_key",
    "hand_over",
    "leave",
    "past_dispatch",
    "quiet",
]

LADDER: _gate.Ladder = (
    ((1, 13), "since_1_13"),
    ((2, 0), "since_2_0"),
    ((2, 3), "since_2_3"),
    ((2, 4), "since_2_4"),
    ((2, 12), "since_2_12"),
)

if TYPE_CHECKING:  # every rung offers what the floor offers
    from torchcompat.autograd_hooks import since_1_13 as _rung
else:
    _rung = _gate.load(__name__, LADDER)

become = _rung.become
hand_over = _rung.hand_over
free_mode_key = _rung.free_mode_key

_lock = threading.Lock()
_users = 0
_saved: list[tuple[Any, str, Any, bool]] = []


def _set_type_attribute(owner: type, name: str, value: Any) -> None:
    """Set an attribute of an extension type, whose ``setattr`` refuses."""
    gc.get_referents(vars(owner))[0][name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def _set(owner: Any, name: str, value: Any) -> None:
    try:
        setattr(owner, name, value)
    except TypeError:  # a type of an extension module
        _set_type_attribute(owner, name, value)


def enter(recorder: Any) -> None:
    """Apply the running release's patches, unless somebody already did."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for owner, name, replacement in _rung.patches(recorder):
            own = name in vars(owner)
            _saved.append((owner, name, vars(owner)[name] if own else None, own))
            _set(owner, name, replacement)
        _rung.switch(True)


def leave() -> None:
    """Take back what ``enter`` did, when the last user leaves."""
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        _rung.switch(False)
        while _saved:
            owner, name, original, own = _saved.pop()
            if own:
                _set(owner, name, original)
            else:
                delattr(owner, name)


class quiet:  # noqa: N801
    """Run operators on real tensors: without dispatch to Python, autocast, grad, inference mode."""

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference:
            self._inference.__enter__()
        torch._C._set_grad_enabled(False)
        self._guard: Any = torch._C._DisableTorchDispatch()
        self._cast = [d for d in ("cpu", "cuda") if _rung.autocast(d)]
        for device in self._cast:
            _rung.autocast(device, False)

    def __exit__(self, *exc: Any) -> None:
        for device in self._cast:
            _rung.autocast(device, True)
        del self._guard
        if self._inference:
            self._inference.__exit__(*exc)
        torch._C._set_grad_enabled(self._grad)


def past_dispatch() -> Any:
    """Return a guard: while it lives, operators of this thread do not reach Python."""
    return torch._C._DisableTorchDispatch()
