"""``torch._foreach_*`` extend graphs themselves, and count their writes (pytorch#93901).

Kernels that scripted functions are compiled to leave tensor subclasses alone.
"""

from __future__ import annotations

import torch


def count_write(tensor: torch.Tensor) -> None:
    """Count a write that no operator inside the recorded one counts."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


def switch(active: bool) -> None:
    """Turn on what is no attribute of anything; nothing on this release."""
