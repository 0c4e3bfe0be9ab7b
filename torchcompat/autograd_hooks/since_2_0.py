"""The legacy constructor works under a mode (pytorch#92754): one patch less."""

from __future__ import annotations

from typing import Any

from torchcompat.autograd_hooks.since_1_13 import (
    autocast,
    become,
    common,
    free_mode_key,
    hand_over,
    starts,
    switch,
)

__all__ = [
    "autocast",
    "become",
    "free_mode_key",
    "hand_over",
    "patches",
    "switch",
]


def patches(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List what is replaced while a mode is active: owner, name, replacement."""
    return [*common(recorder), *starts(recorder)]
