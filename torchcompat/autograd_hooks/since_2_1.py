"""``torch._foreach_*`` extend graphs themselves, and count their writes (pytorch#93901)."""

from __future__ import annotations

import torch


def count_write(tensor: torch.Tensor) -> None:
    """Count a write that no operator inside the recorded one counts."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
