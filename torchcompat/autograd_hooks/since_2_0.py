"""The legacy constructor works under a mode (pytorch#88446 is the family): one patch less."""

from __future__ import annotations

from typing import Any

import torch

from torchcompat.autograd_hooks.since_1_13 import (
    become,
    common,
    hand_over,
    lazy_init,
    free_mode_key,
    autocast,
    set_type_attribute,
    switch,
)

__all__ = ["autocast", "become", "hand_over", "free_mode_key", "patches", "set_type_attribute", "switch"]


def patches(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List what is replaced while a mode is active: owner, name, replacement."""
    return [*common(recorder), (torch.cuda, "_lazy_init", lazy_init(recorder))]
