"""torchdistx by its old name: every submodule here is the torchcompat module itself.

``torchdistx.fake is torchcompat.fake``, and so on for each submodule, whichever way it is imported.
A module of this package is only a marker for the import system: when it is imported it puts its
torchcompat namesake, and the namesake's submodules, under its own name into ``sys.modules``. So
classes exist once, ``isinstance`` and pickles agree under both names, and nothing is patched.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING

from torchcompat import __version__ as __version__

if TYPE_CHECKING:
    from types import ModuleType

    from torchdistx import deferred_init, fake, gossip_grad, optimizers, slowmo

__all__ = ["deferred_init", "fake", "gossip_grad", "optimizers", "slowmo"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _stand_in(marker: str) -> None:
    """Put torchcompat's module, and its submodules, under the marker's name."""
    name = "torchcompat" + marker[len(__name__) :]
    module = importlib.import_module(name)
    for child in pkgutil.iter_modules(getattr(module, "__path__", ())):
        submodule = importlib.import_module(f"{name}.{child.name}")
        sys.modules[f"{marker}.{child.name}"] = submodule
    sys.modules[marker] = module
