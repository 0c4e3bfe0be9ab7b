"""The functions of torchdistx's extension module that its clients call directly.

``enter_*`` and ``leave_*`` come in pairs on one thread. ``enable_deferred_init`` is the older
switch.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Sequence

import torch

from torchcompat import _finish, _handles, _thread, fake_tensor


class _Entered(threading.local):
    def __init__(self) -> None:
        self.deferred: list[contextlib.ExitStack] = []
        self.fake: list[contextlib.ExitStack] = []


_entered = _Entered()


def _enter(stack: list[contextlib.ExitStack], context: Any) -> None:
    entered = contextlib.ExitStack()
    entered.enter_context(context)
    stack.append(entered)


def _leave(stack: list[contextlib.ExitStack], what: str) -> None:
    if not stack:
        raise RuntimeError(f"leave_{what} was called more often than enter_{what}")
    stack.pop().close()


def enter_deferred_init() -> None:
    """Begin to record on this thread."""
    _enter(_entered.deferred, _thread.recording(_handles))


def leave_deferred_init() -> None:
    """End what the last ``enter_deferred_init`` began."""
    _leave(_entered.deferred, "deferred_init")


def enable_deferred_init(enabled: bool) -> None:
    """Begin to record on this thread, or stop; saying the same twice changes nothing."""
    if enabled and not _entered.deferred:
        enter_deferred_init()
    elif not enabled and _entered.deferred:
        leave_deferred_init()


def enter_fake_mode(fake_cuda: bool = False) -> None:
    """Begin to make fakes on this thread."""
    _enter(_entered.fake, _thread.faking(_handles, fake_cuda))


def leave_fake_mode() -> None:
    """End what the last ``enter_fake_mode`` began."""
    _leave(_entered.fake, "fake_mode")


def is_fake(tensor: Any) -> bool:
    """Tell whether ``tensor`` is a fake."""
    return fake_tensor.is_fake(tensor)


def can_materialize(tensor: Any) -> bool:
    """Tell whether ``tensor`` is a fake that has a tape."""
    return fake_tensor.is_fake(tensor) and _finish.waits(tensor)


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real tensor, as ``torchcompat.deferred_init.materialize_tensor``."""
    from torchcompat import deferred_init

    return deferred_init.materialize_tensor(tensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor, as ``torchcompat.fake.meta_like``."""
    from torchcompat import fake as public

    return public.meta_like(fake)


def is_gen_by_random_op(tensor: torch.Tensor) -> bool:
    """Tell whether a random operator wrote a deferred tensor's memory."""
    if not fake_tensor.is_fake(tensor) or not _finish.waits(tensor):
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
