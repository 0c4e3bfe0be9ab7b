"""The floor: subclass constructors, ``.data``, the legacy constructor and CUDA's lazy start.

On 1.13 ``torch.Tensor(3, 4)`` fails under any mode that returns a tensor (pytorch#85961 is the
family), so the constructor is served in Python. Up to 2.3 argument parsing calls
``torch.cuda._lazy_init`` for every CUDA device, present or not.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Iterator

import torch
from torch.nn.parameter import UninitializedTensorMixin

from torchcompat import fake_tensor

mode_key: Any = None


def patches(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List what is replaced while a mode is active: owner, name, replacement."""
    return [
        *common(recorder),
        (torch.cuda, "_lazy_init", lazy_init(recorder)),
        (torch.Tensor, "__new__", legacy_new(recorder)),
    ]


def switch(active: bool) -> None:
    """Turn on what is no attribute of anything; nothing on this release."""


def common(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List the patches that every release needs."""
    return [
        (torch.Tensor, "_make_subclass", staticmethod(make_subclass(recorder))),
        (torch.Tensor, "data", data_property(recorder)),
        (UninitializedTensorMixin, "materialize", materialize_lazy(recorder)),
        (torch.random, "get_rng_state", rng_state(recorder)),
        (torch, "get_rng_state", rng_state(recorder)),
    ]


def make_subclass(recorder: Any) -> Any:
    """Build the stand-in for ``Tensor._make_subclass``, which refuses fakes."""
    original = torch.Tensor._make_subclass

    def make(cls: type, data: torch.Tensor, require_grad: bool = False, **options: Any) -> Any:
        if not fake_tensor.is_fake(data):
            return original(cls, data, require_grad, **options)
        if issubclass(cls, UninitializedTensorMixin):
            # It has no elements; real, it is initialised as eagerly, when its shape is known.
            with recorder.paused():
                empty = torch.empty(0, dtype=data.dtype, device=data.device)
            return original(cls, empty, require_grad, **options)
        made = recorder.alias(data)
        made.__class__ = fake_tensor.fake_class(cls)
        return made.requires_grad_(require_grad)

    return make


def data_property(recorder: Any) -> Any:
    """Build a ``data`` property that lets a fake be assigned to a real tensor."""
    original = torch.Tensor.data

    def assign(self: torch.Tensor, source: torch.Tensor) -> None:
        if fake_tensor.is_fake(source):
            source = recorder.expose(source)
        original.__set__(self, source)  # type: ignore[attr-defined]

    return property(original.__get__, assign)  # type: ignore[attr-defined]


def materialize_lazy(recorder: Any) -> Any:
    """Build the stand-in for ``UninitializedTensorMixin.materialize``."""
    original = UninitializedTensorMixin.materialize

    def materialize(self: Any, *args: Any, **kwargs: Any) -> None:
        with recorder.paused():
            original(self, *args, **kwargs)

    return materialize


def rng_state(recorder: Any) -> Any:
    """Build the stand-in for ``get_rng_state``: a caller outside torch gets the true state."""
    original = torch.random.get_rng_state
    inside = vars(torch.random)

    def get_rng_state() -> torch.Tensor:
        # fork_rng only puts it back: for that the recorder's placeholder is as good and cheaper.
        if sys._getframe(1).f_globals is not inside:
            recorder.expose_generator(torch.default_generator)
        return original()

    return get_rng_state


def lazy_init(recorder: Any) -> Any:
    """Build the stand-in for CUDA's start: nothing, on threads that record, if there is no CUDA."""
    original = torch.cuda._lazy_init

    def start() -> None:
        if not (recorder.fakes_hardware() and not fake_tensor.hardware("cuda")):
            original()

    return start


def legacy_new(recorder: Any) -> Any:
    """Build ``Tensor.__new__`` for the forms of the legacy constructor."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is not torch.Tensor or not recorder.recording():
            return torch._C._TensorBase.__new__(cls, *args, **kwargs)
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return args[0].detach() if args[0].dtype == torch.get_default_dtype() else None
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            with recorder.paused():
                return torch._C._TensorBase.__new__(cls, *args, **kwargs)
        size = args[0] if args and isinstance(args[0], torch.Size) else args
        return torch.empty(size or (0,))

    return staticmethod(new)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Run operators on real tensors: no dispatch to Python, no autocast, no inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        guard = torch._C._DisableTorchDispatch()
        cast, cuda_cast = torch.is_autocast_cpu_enabled(), torch.is_autocast_enabled()
        torch.set_autocast_cpu_enabled(False)
        torch.set_autocast_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cpu_enabled(cast)
            torch.set_autocast_enabled(cuda_cast)
            del guard


def become(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Make the object ``fake`` real if this release can; return the object that is real."""
    return real


def hand_over(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Give a real tensor the attributes and hooks set on the fake, so that handles stay valid."""
    attributes = {k: v for k, v in vars(fake).items() if k != "_value"}
    if attributes:
        vars(real).update(attributes)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(fake, name, None)
        if hooks:
            setattr(real, name, hooks)
