"""Seam 1: making and describing fake tensors.

A fake reports the device, dtype, sizes and strides of a tensor that does not exist. Everything that
touches torch's tensor subclasses is behind the names that the rungs offer; the recorder connects
itself once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcompat import _gate
from torchcompat.fake_tensor.devices import hardware as hardware
from torchcompat.fake_tensor.devices import indexed as indexed

LADDER: _gate.Ladder = ((1, 13), (2, 4))

if TYPE_CHECKING:  # every rung changes what the floor offers
    from torchcompat.fake_tensor.since_1_13 import *  # noqa: F403
else:
    globals().update(_gate.load(__name__, LADDER))
