"""The same module object as ``torchcompat.deferred_init``."""

from __future__ import annotations

from torchcompat.deferred_init import *
from torchdistx import _stand_in

_stand_in(__name__)
