"""Optimizers of the torchdistx API.

``AnyPrecisionAdamW`` is AdamW with a dtype of its own for each part of its state.
"""

from __future__ import annotations

from torchcompat.optimizers.anyprecision_optimizer import AnyPrecisionAdamW

__all__ = ["AnyPrecisionAdamW"]
