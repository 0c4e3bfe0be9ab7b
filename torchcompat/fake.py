"""Fake tensors: tensors that report everything and hold nothing."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Iterator

from torchcompat import _handles, _infer, _thread, autograd_hooks, fake_tensor

if TYPE_CHECKING:
    import torch

__all__ = ["fake_mode", "is_fake", "meta_like"]


@contextlib.contextmanager
def fake_mode(*, fake_cuda: bool = False) -> Iterator[None]:
    """Make every tensor constructed inside a fake one, without memory and without values.

    Args:
        fake_cuda: let tensors be on CUDA devices that are not there. Without it, and without CUDA,
            naming a CUDA device raises what it raises outside.
    """
    with _thread.faking(_handles, fake_cuda):
        yield


def is_fake(tensor: Any) -> bool:
    """Tell whether ``tensor`` is a fake; False for anything else, whatever it is."""
    return fake_tensor.is_fake(tensor)


def meta_like(fake: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the ``meta`` device that lies as ``fake`` does.

    Raises:
        ValueError: if ``fake`` is not a fake tensor.
    """
    if not fake_tensor.is_fake(fake):
        raise ValueError(f"meta_like needs a fake tensor, not {type(fake).__name__}")
    with autograd_hooks.paused():
        made = _infer.meta_tensor(fake._value.geometry)
        return made.requires_grad_(fake.requires_grad)
