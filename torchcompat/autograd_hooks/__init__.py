"""Seam 2: what autograd and Python touch behind the dispatcher.

Some things never reach a dispatch mode: constructors of tensor subclasses, assignments to ``.data``
of real tensors, the initialisation of CUDA while arguments are parsed. They are patched while a
recording or fake mode is active anywhere in the process, by one holder that counts its users and
restores everything when the last one leaves; each patch asks whether its own thread is recording.
The rungs also say how a fake object becomes a real one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import operator
import threading
from typing import TYPE_CHECKING, Any, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from torchcompat import _gate

LADDER: _gate.Ladder = ((1, 13), (2, 0), (2, 1), (2, 3), (2, 4), (2, 12))

if TYPE_CHECKING:  # every rung changes what the floor offers
    from torchcompat.autograd_hooks.since_1_13 import *  # noqa: F403
else:
    globals().update(_gate.load(__name__, LADDER))

aten = torch.ops.aten
# Functions that look at memory, or at the class of an argument, before they dispatch, and their
# overloads, the second for an argument that is a name.
WHOLE: dict[Any, tuple[Any, ...]] = {
    torch.linalg.svdvals: (aten.linalg_svdvals.default,) * 2,
    torch.linalg.eigvalsh: (aten.linalg_eigvalsh.default,) * 2,
    torch.linalg.norm: (aten.linalg_norm.default, aten.linalg_norm.ord_str),
    torch.linalg.matrix_norm: (aten.linalg_matrix_norm.default, aten.linalg_matrix_norm.str_ord),
    torch.linalg.cond: (aten.linalg_cond.default, aten.linalg_cond.p_str),
    torch._sobol_engine_draw: (aten._sobol_engine_draw.default,),
    torch._sobol_engine_ff_: (aten._sobol_engine_ff_.default,),
    torch._sobol_engine_initialize_state_: (aten._sobol_engine_initialize_state_.default,),
    torch._sobol_engine_scramble_: (aten._sobol_engine_scramble_.default,),
}
_lock = threading.Lock()
_users = 0
_saved: list[tuple[Any, str, Any]] = []
_INHERITED = object()
_Excluding: Any = torch._C.ExcludeDispatchKeyGuard  # type: ignore[attr-defined]  # not in stubs
_PYTHON_AND_AUTOCAST = functools.reduce(
    operator.or_,
    (
        torch._C.DispatchKeySet(torch._C._dispatch_key_parse(key))
        for key in ("Python", "PythonTLSSnapshot", "AutocastCPU", "AutocastCUDA")
    ),
)


def enter(recorder: Any) -> None:
    """Apply the running release's patches, unless somebody already did."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for (owner, name), build in PATCHES.items():  # noqa: F405
            if build is not None:
                _saved.append((owner, name, vars(owner).get(name, _INHERITED)))
                _set(owner, name, build(getattr(owner, name), recorder))
        switch(True)  # noqa: F405


def leave() -> None:
    """Take back what ``enter`` did, when the last user leaves."""
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        switch(False)  # noqa: F405
        while _saved:
            owner, name, original = _saved.pop()
            if original is _INHERITED:
                delattr(owner, name)
            else:
                _set(owner, name, original)


def _set(owner: Any, name: str, value: Any) -> None:
    try:
        setattr(owner, name, value)
    except TypeError:  # a type of an extension module, whose ``setattr`` refuses
        gc.get_referents(vars(owner))[0][name] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


class quiet:  # noqa: N801
    """Run operators on real tensors: without dispatch to Python, autocast, grad, inference mode.

    ``graphs``: they may be differentiable, also where an operator is being dispatched.
    """

    def __init__(self, graphs: bool = False) -> None:
        self._graphs = graphs
        self._above: Any = None

    def __enter__(self) -> None:
        if self._graphs:
            self._above = torch.overrides.enable_reentrant_dispatch()
            try:
                self._above.__enter__()
            except RuntimeError:  # nothing is being dispatched
                self._above = None
        self._grad = torch.is_grad_enabled()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference:
            self._inference.__enter__()
        torch._C._set_grad_enabled(False)
        self._guard: Any = _Excluding(_PYTHON_AND_AUTOCAST)

    def __exit__(self, *exc: Any) -> None:
        del self._guard
        if self._inference:
            self._inference.__exit__(*exc)
        torch._C._set_grad_enabled(self._grad)
        if self._above:
            self._above.__exit__(*exc)


@contextlib.contextmanager
def above() -> Iterator[None]:
    """Run operators on real tensors as the program that calls the present operator would."""
    grad = torch.is_grad_enabled()
    inference = torch.is_inference_mode_enabled()
    with quiet(graphs=True), torch.inference_mode(inference), torch.set_grad_enabled(grad):
        yield


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Run operators for real, past every mode."""
    guard = torch._C._DisableTorchDispatch()
    try:
        yield
    finally:
        del guard


def is_composite(func: Any) -> bool:
    """Tell whether an overload is defined by others (seen only where autograd is off)."""
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def takes_numbers(name: str) -> bool:
    """Tell whether an operator called from Python may be given numbers for tensors."""
    return bool(torch._C._should_allow_numbers_as_tensors(name))


def decompose(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a composite overload as torch defines it for eager tensors, in C++."""
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
