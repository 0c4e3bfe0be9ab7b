"""Deferred module initialisation: build a model now, give its tensors their values later.

The functions live in submodules, imported on first use: ``torchcompat.deferred_init`` and
``torchcompat.fake`` are modules, as they are in torchdistx. Importing this package patches nothing,
imports no optional part, and on a torch it does not support raises ImportError and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchcompat import _gate

if TYPE_CHECKING:
    from types import ModuleType

    from torchcompat import deferred_init, fake, gossip_grad, optimizers, slowmo

__all__ = ["deferred_init", "fake", "gossip_grad", "optimizers", "slowmo"]

__version__ = "0.1.0"

_gate.running()


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
