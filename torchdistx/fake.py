"""The same module object as ``torchcompat.fake``."""

from __future__ import annotations

from torchcompat.fake import *
from torchdistx import _stand_in

_stand_in(__name__)
