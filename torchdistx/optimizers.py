"""The same module object as ``torchcompat.optimizers``."""

from __future__ import annotations

from torchcompat.optimizers import *
from torchdistx import _stand_in

_stand_in(__name__)
