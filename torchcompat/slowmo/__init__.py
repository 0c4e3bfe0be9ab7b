"""Slow momentum: workers that train apart and meet now and then.

SlowMo (Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD
with Slow Momentum", ICLR 2020, arXiv 1910.00643) saves communication twice: gradients are averaged
only among the ranks of a machine (``slowmo_comm``), and every so many steps all ranks average their
parameters and take a step with momentum along the way the average has gone (``slowmo_optimizer``).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from torchcompat.slowmo import slowmo_comm, slowmo_optimizer

__all__ = ["slowmo_comm", "slowmo_optimizer"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
