"""The legacy constructor works under a mode (pytorch#92754): one patch less."""

from __future__ import annotations

import torch

PATCHES = {(torch.Tensor, "__new__"): None}
