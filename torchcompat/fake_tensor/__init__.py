"""Seam 1: making and describing fake tensors.

A fake reports the device, dtype, sizes and strides of a tensor that does not exist. Everything that
touches torch's tensor subclasses is behind the names below; the recorder connects itself once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcompat import _gate

LADDER: _gate.Ladder = (((1, 13), "since_1_13"),)

if TYPE_CHECKING:  # every rung offers what the floor offers
    from torchcompat.fake_tensor import since_1_13 as _rung
else:
    _rung = _gate.load(__name__, LADDER)

FakeTensor = _rung.FakeTensor
connect = _rung.connect
fake_class = _rung.fake_class
hardware = _rung.hardware
indexed = _rung.indexed
is_composite = _rung.is_composite
is_fake = _rung.is_fake
itemsize = _rung.itemsize
real_class = _rung.real_class
refit = _rung.refit
subclass = _rung.subclass
wrap = _rung.wrap
