"""Two tensors can swap what they stand for (pytorch#111747), so a fake can become real.

What is swapped is C++'s part, with its link back to the Python object (pytorch#116955).
Argument parsing starts XPU devices, too (pytorch#118846).
"""

from __future__ import annotations

import torch

from torchcompat import fake_tensor
from torchcompat.autograd_hooks.since_1_13 import _lazy_init

PATCHES = {(torch.xpu, "_lazy_init"): _lazy_init}


def become(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Make the object ``fake`` real if this release can; return the object that is real."""
    try:
        torch._C._swap_tensor_impl(fake, real)
    except RuntimeError:  # something in C++ still refers to the fake
        return real
    kind, attributes = type(fake), vars(fake)
    real_kind = type(real)
    fake_tensor.set_class(real, kind)
    fake_tensor.set_class(fake, real_kind)
    fake.__dict__, real.__dict__ = vars(real), attributes
    return fake
