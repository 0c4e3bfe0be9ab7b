"""The functions of torchdistx's extension module that its clients call directly.

``enter_*`` and ``leave_*`` come in pairs on one thread. ``enable_deferred_init`` is the older
switch.
"""

from __future__ import annotations

import threading
from typing import Any, Sequence

import torch

from torchcompat import _finish, _handles, _thread
from torchcompat.fake import is_fake as is_fake
from torchcompat.fake import meta_like as meta_like


class _Entered(threading.local):
    """What this thread has entered and not left, innermost last."""

    def __init__(self) -> None:
        self.deferred_init: list[Any] = []
        self.fake_mode: list[Any] = []


_entered = _Entered()


def _enter(what: str, context: Any) -> None:
    context.__enter__()
    getattr(_entered, what).append(context)


def _leave(what: str) -> None:
    contexts = getattr(_entered, what)
    if not contexts:
        raise RuntimeError(f"leave_{what} was called more often than enter_{what}")
    contexts.pop().__exit__(None, None, None)


def enter_deferred_init() -> None:
    """Begin to record on this thread."""
    _enter("deferred_init", _thread.recording(_handles))


def leave_deferred_init() -> None:
    """End what the last ``enter_deferred_init`` began."""
    _leave("deferred_init")


def enable_deferred_init(enabled: bool) -> None:
    """Begin to record on this thread, or stop; saying the same twice changes nothing."""
    if enabled != bool(_entered.deferred_init):
        enter_deferred_init() if enabled else leave_deferred_init()


def enter_fake_mode(fake_cuda: bool = False) -> None:
    """Begin to make fakes on this thread."""
    _enter("fake_mode", _thread.faking(_handles, fake_cuda))


def leave_fake_mode() -> None:
    """End what the last ``enter_fake_mode`` began."""
    _leave("fake_mode")


def can_materialize(tensor: Any) -> bool:
    """Tell whether ``tensor`` is a fake that has a tape."""
    return is_fake(tensor) and _finish.waits(tensor)


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real tensor, as ``torchcompat.deferred_init.materialize_tensor``."""
    from torchcompat import deferred_init  # it imports this module

    return deferred_init.materialize_tensor(tensor)


def is_gen_by_random_op(tensor: Any) -> bool:
    """Tell whether a random operator wrote a deferred tensor's memory."""
    if not can_materialize(tensor):
        return False
    return any(op.position is not None for op in tensor._value.storage.writers)


def materialize_tensor_with_local_shape(
    tensor: torch.Tensor, shape: Sequence[int], device: Any = None
) -> torch.Tensor:
    """Return what the tensor's factory gives for another shape, as a shard needs it.

    Only the shard is allocated. Random factories start at the tensor's own place in the stream.

    Raises:
        ValueError: if the tensor's content depends on its shape in other ways than being filled.
    """
    if not can_materialize(tensor):
        raise ValueError("materialize_tensor_with_local_shape needs a deferred tensor")
    return _handles.filled_as(tensor, tuple(shape), torch.device(device or tensor.device))
