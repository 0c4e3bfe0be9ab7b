"""Build a module now, give its tensors their values later.

``deferred_init`` runs a constructor while recording; the tensors it makes report everything but
have no memory. ``materialize_module`` and ``materialize_tensor`` replay what a tensor needs and
give the values eager construction would have given, bit for bit, whatever part is asked for in
what order.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, TypeVar

import torch

from torchcompat import _C as _C  # where torchdistx's clients look for it
from torchcompat import _finish, _handles, _thread, fake_tensor

__all__ = ["deferred_init", "is_deferred", "materialize_module", "materialize_tensor"]

T = TypeVar("T")


def deferred_init(module_fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``module_fn(*args, **kwargs)`` and return its result with every new tensor deferred.

    Args:
        module_fn: any callable: a module class, a function that returns a module, a tensor or
            anything that holds them.
        args, kwargs: its arguments.

    After the call each random number generator stands where the plain call would have left it.

    Raises:
        TypeError: if ``module_fn`` cannot be called.
        Anything that ``module_fn`` raises; torch is then as it was before.

    The interface is that of torchdistx, where deferred initialisation was introduced.
    """
    if not callable(module_fn):
        raise TypeError(f"deferred_init needs a callable, not {type(module_fn).__name__}")
    with _thread.recording(_handles):
        return module_fn(*args, **kwargs)


def is_deferred(obj: torch.Tensor | torch.nn.Module) -> bool:
    """Tell whether a tensor, or any tensor of a module, waits to be materialised.

    Raises:
        ValueError: if ``obj`` is neither a tensor nor a module.
    """
    if isinstance(obj, torch.Tensor):
        return _finish.waits(obj)
    if isinstance(obj, torch.nn.Module):
        return any(map(_finish.waits, _finish.tensors_of(obj)))
    raise ValueError(f"is_deferred needs a Tensor or a Module, not {type(obj).__name__}")


def materialize_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real tensor that a deferred one stands for; a real tensor is returned as it is.

    From torch 2.3 on the deferred object itself becomes real. Calling it again, from whatever
    thread, returns the same object.

    Raises:
        TypeError: if ``tensor`` is no tensor.
        ValueError: if it was made by ``fake_mode`` and so can have no values.
        RuntimeError: if its values cannot be computed here; the message names the operator, the
            line that called it and the way out.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"materialize_tensor needs a Tensor, not {type(tensor).__name__}")
    if fake_tensor.is_fake(tensor) and not _finish.waits(tensor):
        raise ValueError(f"{tensor!r} was made by fake_mode: it has no values to materialise")
    made: torch.Tensor = _finish.finish([tensor])[0]
    return made


def materialize_module(
    module: torch.nn.Module,
    buffers_only: bool = False,
    check_fn: Callable[[torch.nn.Module], bool] | None = None,
    *,
    recurse: bool = True,
    num_threads: int | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> None:
    """Give the parameters, buffers and plain tensor attributes of a module their values, in place.

    Args:
        module: the module; if nothing in it is deferred, nothing happens.
        buffers_only: leave parameters and plain attributes as they are.
        check_fn: asked once for every module; where it says False the module's own tensors are left
            as they are, and its children are still visited.
        recurse: whether to visit submodules.
        num_threads: how many threads may initialise tensors at once; by default as many as torch
            uses. The values do not depend on it.
        progress: True shows a bar of bytes with tqdm (the extra ``progress``); a function is called
            with the bytes done and the bytes in all after each tensor, from whatever thread.

    Raises:
        TypeError: if ``module`` is no module.
        ValueError: if ``num_threads`` is less than 1.
        ImportError: if a bar is asked for and tqdm is not there.
        RuntimeError: as ``materialize_tensor``.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"materialize_module needs a Module, not {type(module).__name__}")
    modules = [m for m in _finish.modules_of(module, recurse) if check_fn is None or check_fn(m)]
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, not {num_threads}")
    with _progress(progress) as report:
        _finish.finish_modules(modules, buffers_only, num_threads, report)


@contextlib.contextmanager
def _progress(wanted: bool | Callable[[int, int], None]) -> Iterator[Any]:
    """Give a function to report bytes to: the caller's, a bar's, or none."""
    if not wanted or callable(wanted):
        yield wanted or None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc="materialising") as bar:

        def report(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield report
