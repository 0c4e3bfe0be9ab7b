"""The same module object as ``torchcompat.gossip_grad``."""

from __future__ import annotations

from torchcompat.gossip_grad import *
from torchdistx import _stand_in

_stand_in(__name__)
