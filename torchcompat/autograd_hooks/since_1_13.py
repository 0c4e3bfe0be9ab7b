"""The floor: subclass constructors, ``.data``, the legacy constructor and CUDA's lazy start.

Until pytorch#92754 ``torch.Tensor(3, 4)`` fails under a mode that returns a subclass, so the
constructor is served in Python. Until pytorch#122636 argument parsing calls
``torch.cuda._lazy_init`` for every CUDA device, present or not.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchcompat import fake_tensor


def free_mode_key() -> Any:
    """Return the key of a mode that keeps devices from starting, if it is free; here: none."""
    return None


def patches(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List what is replaced while a mode is active: owner, name, replacement."""
    return [
        *common(recorder),
        *starts(recorder),
        (torch.Tensor, "__new__", legacy_new(recorder)),
    ]


def switch(active: bool) -> None:
    """Turn on what is no attribute of anything; nothing on this release."""


def common(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List the patches that every release needs."""
    return [
        (torch.Tensor, "_make_subclass", staticmethod(make_subclass(recorder))),
        (torch.Tensor, "data", data_property(recorder)),
        (torch._C.Generator, "get_state", generator_state(recorder)),
        (torch.backends.cudnn, "is_acceptable", acceptable_to_cudnn()),
    ]


def make_subclass(recorder: Any) -> Any:
    """Build the stand-in for ``Tensor._make_subclass``, which refuses fakes."""
    original = torch.Tensor._make_subclass

    # torch._dynamo compares signatures if it is imported meanwhile, and accepts only this one.
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or not fake_tensor.is_fake(args[1]):
            return original(*args, **kwargs)
        made = recorder.alias(args[1])
        made.__class__ = fake_tensor.fake_class(args[0])
        return made.requires_grad_(args[2] if len(args) > 2 else kwargs.get("require_grad", False))

    return make


def data_property(recorder: Any) -> Any:
    """Build a ``data`` property that lets a fake be assigned to a real tensor."""
    original = torch.Tensor.data

    def assign(self: torch.Tensor, source: torch.Tensor) -> None:
        if fake_tensor.is_fake(source) and not fake_tensor.is_fake(self):
            source = recorder.expose(source)
        original.__set__(self, source)  # type: ignore[attr-defined]

    return property(original.__get__, assign)  # type: ignore[attr-defined]


def generator_state(recorder: Any) -> Any:
    """Build ``Generator.get_state`` that gives the true state, not the recorder's placeholder."""
    original = torch._C.Generator.get_state
    inside = vars(torch.random)

    def get_state(self: torch.Generator) -> torch.Tensor:
        # fork_rng only puts it back: for that the placeholder is as good, and cheaper.
        caller = sys._getframe(1)
        forking = caller.f_globals is inside and caller.f_back.f_globals is inside  # type: ignore[union-attr]
        if not forking and recorder.recording():
            recorder.expose_generator(self)
        return original(self)

    return get_state


def acceptable_to_cudnn() -> Any:
    """Build the stand-in for ``cudnn.is_acceptable``, which asks fakes for addresses."""
    original: Any = torch.backends.cudnn.is_acceptable

    def is_acceptable(tensor: torch.Tensor) -> bool:
        return not fake_tensor.is_fake(tensor) and original(tensor)

    return is_acceptable


def starts(recorder: Any) -> list[tuple[Any, str, Any]]:
    """List the patches that keep devices from starting while arguments are parsed."""
    modules = (torch.cuda, getattr(torch, "xpu", None))
    return [(m, "_lazy_init", lazy_init(recorder, m)) for m in modules if hasattr(m, "_lazy_init")]


def lazy_init(recorder: Any, module: Any) -> Any:
    """Build the stand-in for a device's start: nothing, on threads that fake such devices."""
    original, kind = module._lazy_init, module.__name__.rpartition(".")[2]

    def start() -> None:
        if not recorder.fakes_hardware(kind):
            original()

    return start


def legacy_new(recorder: Any) -> Any:
    """Build ``Tensor.__new__`` for the forms of the legacy constructor."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is not torch.Tensor or not recorder.recording():
            return torch._C._TensorBase.__new__(cls, *args, **kwargs)
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            if args[0].dtype != torch.get_default_dtype():
                raise TypeError(f"expected {torch.get_default_dtype()} (got {args[0].dtype})")
            return args[0].detach()
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            with recorder.paused():
                made = torch._C._TensorBase.__new__(cls, *args, **kwargs)
            return recorder.constant(made)
        size = args[0] if args and isinstance(args[0], torch.Size) else args
        return torch.empty(size or (0,))

    return staticmethod(new)


def autocast(device: str, enabled: bool | None = None) -> bool:
    """Set whether autocast is on for a device type, if ``enabled`` says so; return what it was."""
    name = "autocast_cpu_enabled" if device == "cpu" else "autocast_enabled"
    was: bool = getattr(torch, f"is_{name}")()
    if enabled is not None:
        getattr(torch, f"set_{name}")(enabled)
    return was


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
