"""The same module object as ``torchcompat.slowmo``."""

from __future__ import annotations

from torchcompat.slowmo import *
from torchdistx import _stand_in

_stand_in(__name__)
