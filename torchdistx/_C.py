"""The same module object as ``torchcompat._C``."""

from __future__ import annotations

from torchcompat._C import *
from torchdistx import _stand_in

_stand_in(__name__)
