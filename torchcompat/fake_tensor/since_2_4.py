"""A tensor can refuse to tell the address of its memory (pytorch#122514).

Otherwise what asks past Python, such as ``torch.utils.dlpack.to_dlpack``, gets null and crashes.
"""

from __future__ import annotations

import torch


def seal(fake: torch.Tensor) -> None:
    """Have C++ refuse to tell the address of a fake."""
    torch._C._set_throw_on_mutable_data_ptr(fake)
