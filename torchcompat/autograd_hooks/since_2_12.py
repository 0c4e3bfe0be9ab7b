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

# No normal deviate is farther out than sqrt(-2 log 2**-53) = 8.6 sigma.
_UNREACHABLE = 9.0


def _trunc_normal(original: Any, recorder: Any) -> Any:
    """Record a truncated normal as one operator."""

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


PATCHES = {(init, "_no_grad_trunc_normal_"): _trunc_normal}
