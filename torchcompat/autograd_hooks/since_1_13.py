"""The floor: subclass constructors, ``.data``, the legacy constructor and CUDA's lazy start.

Until pytorch#92754 ``torch.Tensor(3, 4)`` fails under a mode that returns a subclass, so the
constructor is served in Python. Until pytorch#122636 argument parsing calls
``torch.cuda._lazy_init`` for every CUDA device, present or not.

``PATCHES`` says what is replaced while a mode is active: where, and what builds the stand-in from
the original and the recorder.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torchcompat import fake_tensor


def free_mode_key() -> Any:
    """Return the key of a mode that keeps devices from starting, if it is free; here: none."""
    return None


_fuser: list[bool] = []


def switch(active: bool) -> None:
    """Keep scripted functions from being compiled to kernels that ask fakes for addresses."""
    if active:
        _fuser.append(torch._C._jit_texpr_fuser_enabled())
        torch._C._jit_set_texpr_fuser_enabled(False)
    else:
        torch._C._jit_set_texpr_fuser_enabled(_fuser.pop())


def _make_subclass(original: Any, recorder: Any) -> Any:
    """Let ``Tensor._make_subclass`` take a fake."""

    # torch._dynamo compares signatures if it is imported meanwhile, and accepts only this one.
    def make(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2 or not fake_tensor.is_fake(args[1]):
            return original(*args, **kwargs)
        flag = args[2] if len(args) > 2 else kwargs.get("require_grad", False)
        made = recorder.alias(args[1]).requires_grad_(flag)
        made.__class__ = fake_tensor.fake_class(args[0])
        return made

    return staticmethod(make)


def _data(original: Any, recorder: Any) -> Any:
    """Let a fake be assigned to the ``data`` of a real tensor; read it past the mode.

    A mode would give what is read a version counter, which inference tensors cannot have.
    """

    def read(self: torch.Tensor) -> torch.Tensor:
        if self.is_inference():
            with recorder.paused():
                return original.__get__(self)  # type: ignore[no-any-return]
        return original.__get__(self)  # type: ignore[no-any-return]

    def assign(self: torch.Tensor, source: torch.Tensor) -> None:
        if fake_tensor.is_fake(source) and not fake_tensor.is_fake(self):
            source = recorder.expose(source)
        original.__set__(self, source)

    return property(read, assign)


def _get_state(original: Any, recorder: Any) -> Any:
    """Let a generator tell its true state, not the recorder's placeholder."""
    inside = vars(torch.random)

    def get_state(self: torch.Generator) -> torch.Tensor:
        # fork_rng only puts it back: for that the placeholder is as good, and cheaper.
        caller: Any = sys._getframe(1)
        forking = caller.f_globals is inside and caller.f_back.f_globals is inside
        if not recorder.recording():
            return recorder.true_state(self)  # type: ignore[no-any-return]
        if not forking:
            recorder.expose_generator(self)
        state: torch.Tensor = original(self)
        return state

    return get_state


def _set_state(original: Any, recorder: Any) -> Any:
    """Let a generator be set to a deferred state, as ``torch.load`` inside gives one."""

    def set_state(self: torch.Generator, state: torch.Tensor) -> Any:
        return original(self, recorder.real_data(state))

    return set_state


def _imported(original: Any, recorder: Any) -> Any:
    """Load scripted modules for real: C++ fills their tensors past every mode."""

    def load(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return original(*args, **kwargs)

    return load


def _is_acceptable(original: Any, recorder: Any) -> Any:
    """Keep cuDNN from asking fakes for addresses."""
    return lambda tensor: not fake_tensor.is_fake(tensor) and original(tensor)


def _lazy_init(original: Any, recorder: Any) -> Any:
    """Keep a device from starting on threads that fake such devices."""
    kind = original.__module__.rpartition(".")[2]
    return lambda: None if recorder.fakes_hardware(kind) else original()


def _legacy_constructor(original: Any, recorder: Any) -> Any:
    """Serve the forms of ``torch.Tensor(...)``."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording():
            return original(cls, *args, **kwargs)
        if cls is not torch.Tensor:
            return torch.Tensor._make_subclass(cls, new(torch.Tensor, *args, **kwargs))
        if len(args) == 1 and isinstance(args[0], torch.Tensor):
            return args[0].view_as(args[0])
        args = tuple(recorder.real_data(a) if isinstance(a, list) else a for a in args)
        return torch.empty(0).new(*args, **kwargs)

    return staticmethod(new)


PATCHES: dict[tuple[Any, str], Any] = {
    (torch.Tensor, "_make_subclass"): _make_subclass,
    (torch.Tensor, "data"): _data,
    (torch._C.Generator, "get_state"): _get_state,
    (torch._C.Generator, "set_state"): _set_state,
    (torch._C, "import_ir_module"): _imported,
    (torch._C, "import_ir_module_from_buffer"): _imported,
    (torch.backends.cudnn, "is_acceptable"): _is_acceptable,
    (torch.cuda, "_lazy_init"): _lazy_init,
    (torch.Tensor, "__new__"): _legacy_constructor,
}


def count_write(tensor: torch.Tensor) -> None:
    """Count a write that no operator inside the recorded one counts; here none is."""


def become(fake: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Make the object ``fake`` real if this release can; return the object that is real."""
    return real


def hand_over(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Give a real tensor the attributes and hooks set on the fake, so that handles stay valid."""
    vars(real).update({k: v for k, v in vars(fake).items() if k != "_value"})
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(fake, name, None)
        if hooks:
            setattr(real, name, hooks)
