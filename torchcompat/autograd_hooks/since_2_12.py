"""``trunc_normal_`` rejects and draws again (pytorch#174997): it is recorded as one operator.

Seen operator by operator it reads what it drew, and would give every weight of a ViT its values
while recording. An empty tensor goes through it first, so that bad arguments fail, and warn, where
they do eagerly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import init

from torchcompat import fake_tensor
from torchcompat.autograd_hooks.since_2_4 import (
    autocast,
    become,
    free_mode_key,
    hand_over,
    switch,
)
from torchcompat.autograd_hooks.since_2_4 import patches as patches_below

__all__ = [
    "autocast",
    "become",
    "free_mode_key",
    "hand_over",
    "patches",
    "switch",
]

# No normal deviate is farther out than sqrt(-2 log 2**-53) = 8.6 sigma.
_UNREACHABLE = 9.0


def patches(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List what is replaced while a mode is active: owner, name, replacement."""
    return [*patches_below(recorder), (init, "_no_grad_trunc_normal_", trunc_normal(recorder))]


def trunc_normal(recorder: Any) -> Any:
    """Build the stand-in that records a truncated normal as one operator."""
    original = init._no_grad_trunc_normal_

    def fill(
        tensor: Any, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Any:
        if not fake_tensor.is_fake(tensor):
            return original(tensor, mean, std, a, b, generator=generator)
        with recorder.paused():
            trial = torch.empty(0, dtype=tensor.dtype)
            original(trial, mean, std, a, b, generator=torch.Generator())
        plain = a < mean - _UNREACHABLE * std and b > mean + _UNREACHABLE * std
        like = (torch.ops.aten.normal_.default, (mean, std)) if plain else None
        return recorder.composite(original, tensor, (mean, std, a, b), generator, like)

    return fill
