"""Models in the styles found in public code, written for this suite in plain `torch.nn`.

A `Model` says how to build it, how to call it, and how much of it a constructor must leave
deferred. Sizes are tiny: what matters is which operators a constructor uses, and in which order.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch


class Model(NamedTuple):
    """One constructor under test.

    `inputs` gives the arguments of a forward call whose result must also be equal; `reads` marks a
    constructor that needs values of its own parameters, so that not all of it can stay deferred;
    `since` is the first torch release that can build it at all.
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[[], tuple[Any, ...]] | None = None
    reads: bool = False
    since: tuple[int, int] = (1, 13)
    warnings: tuple[str, ...] = ()


def tokens(vocabulary: int = 31, batch: int = 2, length: int = 7) -> Callable[[], tuple[Any, ...]]:
    """Arguments for a language model: one batch of token numbers."""
    return lambda: (torch.arange(batch * length).reshape(batch, length) % vocabulary,)


def image(size: int = 16, channels: int = 3, batch: int = 2) -> Callable[[], tuple[Any, ...]]:
    """Arguments for a vision model: one batch of smooth images."""
    shape = (batch, channels, size, size)
    return lambda: (torch.linspace(-1, 1, batch * channels * size * size).reshape(shape),)
