"""What each thread is recording, and the mode that makes it so.

One mode per thread serves nested ``deferred_init`` and ``fake_mode`` calls; the outermost pushes
and pops it. The mode keeps torch from starting devices that are not there (see ``autograd_hooks``),
and the function mode gives devices an index and has ``torch.tensor(..., device="cuda")`` made on
the CPU first.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from torchcompat import autograd_hooks, fake_tensor
from torchcompat._random import streams


class _Thread(threading.local):
    """Depths of what is active, and the generators that hold placeholders."""

    def __init__(self) -> None:
        self.deferred = 0
        self.pure = False  # factories make fakes without a tape
        self.devices = 0  # devices that are not there are faked
        self.modes: list[Any] = []
        self.generators: dict[int, torch.Generator] = {}


thread = _Thread()
_recording = 0
_lock = threading.Lock()


class Mode(autograd_hooks.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends every operator of this thread to the recorder."""

    def __init__(self, dispatch: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dispatch = dispatch
        key = autograd_hooks.free_mode_key()
        if key is not None:
            self._mode_key = key

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._dispatch(func, args, kwargs or {})


def faked(kind: str) -> bool:
    """Tell whether tensors of a device type are faked on this thread without its hardware."""
    return not fake_tensor.hardware(kind) and (kind != "cuda" or bool(thread.devices))


def require_devices(kind: str) -> None:
    """Fail as torch fails where CUDA is named without being there, and not to be faked."""
    if kind == "cuda" and not thread.devices and not fake_tensor.hardware("cuda"):
        torch.cuda.init()  # type: ignore[no-untyped-call]


class FunctionMode(TorchFunctionMode):
    """Serves calls that read data before they dispatch, or name hardware that is not there."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _SERVED:
            return _SERVED[func](self._recorder, func, args, dict(kwargs or {}))
        return func(*args, **kwargs) if kwargs else func(*args)


def _computed(
    recorder: Any, args: Any, kwargs: dict[str, Any], which: Callable[[Any, Any], bool]
) -> tuple[Any, dict[str, Any]]:
    """Compute the fakes in the arguments that ``which`` takes, told place or name, and value."""
    args = [recorder.real_data(a) if which(i, a) else a for i, a in enumerate(args)]
    return args, {k: recorder.real_data(a) if which(k, a) else a for k, a in kwargs.items()}


def _from_data(recorder: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Build a tensor from data: fakes in it are computed, absent devices come after."""
    # A tensor itself is copied like any other.
    args, kwargs = _computed(recorder, args, kwargs, lambda _, a: isinstance(a, (list, tuple)))
    device = kwargs.get("device")
    if device is None and not fake_tensor.hardware("cuda"):
        device = torch.empty(0).device  # the default, whoever set it
    device = torch.device(device or "cpu")
    if faked(device.type):
        return func(*args, **{**kwargs, "device": "cpu"}).to(fake_tensor.indexed(device))
    return func(*args, **kwargs)


def _moved(_: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Move a real tensor to a device that may not be there."""
    if fake_tensor.is_fake(args[0]):
        return func(*args, **kwargs)
    if func is torch.Tensor.to:
        if "device" in kwargs:
            kwargs["device"] = fake_tensor.indexed(kwargs["device"])
        return func(*(fake_tensor.indexed(a) for a in args), **kwargs)
    kind = func.__name__
    if not faked(kind):
        return func(*args, **kwargs)
    index = (*args[1:], kwargs.pop("device", None), None)[0]
    index = index if isinstance(index, int) else torch.device(index or kind).index
    return args[0].to(torch.device(kind, index or 0), **kwargs)


def _as_called(recorder: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record what looks at memory, at classes, or for modes, before it dispatches."""
    args = args or tuple(kwargs.pop(name) for name in ("input", "A") if name in kwargs)
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    if not any(map(fake_tensor.is_fake, given)):
        with autograd_hooks.paused():
            return func(*args, **kwargs)
    graph = torch.is_grad_enabled() and any(a.requires_grad for a in given)
    if graph or any(fake_tensor.is_fake(a) and a._value.storage is None for a in given):
        return func(*args, **kwargs)
    named = any(isinstance(a, str) for a in (*args, *kwargs.values()))
    if func is torch.linalg.matrix_norm and len(args) == 1 and "ord" not in kwargs:
        named = True  # by default it is
    return recorder.whole(autograd_hooks.WHOLE[func][named], args, kwargs)


def _norm(recorder: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Record the nuclear norm as it was called."""
    given = {**dict(zip(("input", "p", "dim", "keepdim", "out", "dtype"), args)), **kwargs}
    if given.get("p") != "nuc" or given.get("out") is not None:
        return func(*args, **kwargs)
    rest = {name: given[name] for name in ("keepdim", "dtype") if given.get(name) is not None}
    matrix = given.get("input", given.get("self"))
    dim = (0, 1) if given.get("dim") is None else given["dim"]
    return _as_called(recorder, torch.linalg.matrix_norm, (matrix, "nuc", dim), rest)


def _of_real_data(recorder: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Build what is always built for real, of computed values."""
    args, kwargs = _computed(recorder, args, kwargs, lambda *_: True)
    return func(*args, **kwargs)


def _split(recorder: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Split a tensor at places that are computed."""
    args, kwargs = _computed(recorder, args, kwargs, lambda at, _: at in _PLACES)
    return func(*args, **kwargs)


_PLACES = {1, 2, "indices", "sections", "indices_or_sections", "tensor_indices_or_sections"}
_SERVED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray), _from_data),
    **dict.fromkeys((torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.xpu), _moved),
    **dict.fromkeys((torch.sparse_coo_tensor, torch.nn.functional.one_hot), _of_real_data),
    **dict.fromkeys((torch.tensor_split, torch.Tensor.tensor_split), _split),
    **dict.fromkeys((torch.norm, torch.Tensor.norm), _norm),
    **dict.fromkeys(autograd_hooks.WHOLE, _as_called),
}


@contextlib.contextmanager
def _active(recorder: Any, devices: bool) -> Iterator[None]:
    """Keep the modes and patches up; the outermost of this thread pushes and pops them."""
    wanted = devices and not fake_tensor.hardware("cuda")
    push = not thread.modes
    autograd_hooks.enter(recorder)
    thread.devices += wanted
    with contextlib.ExitStack() as stack:
        stack.callback(autograd_hooks.leave)
        if push:
            mode = Mode(recorder.dispatch)
            thread.modes.append(mode)
            stack.callback(thread.modes.pop)
            stack.enter_context(mode)
            stack.enter_context(FunctionMode(recorder))
        try:
            yield
        finally:
            thread.devices -= wanted


@contextlib.contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """Record on this thread; at the end of the outermost, give generators their true states."""
    global _recording
    with _lock:
        _recording += 1
    pure, thread.pure = thread.pure, False
    thread.deferred += 1
    try:
        with _active(recorder, True):
            yield
    finally:
        thread.deferred -= 1
        thread.pure = pure
        try:
            if not thread.deferred:
                settle()
        finally:
            with _lock:
                _recording -= 1
                if not _recording:
                    streams.forget()


def settle() -> None:
    """Give every generator that this thread moved its true state, also if one cannot be had."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(autograd_hooks.paused())
        while thread.generators:
            stack.callback(streams.settle, thread.generators.popitem()[1])


@contextlib.contextmanager
def faking(recorder: Any, cuda: bool) -> Iterator[None]:
    """Make every factory of this thread give fakes without a tape."""
    pure, thread.pure = thread.pure, True
    try:
        with _active(recorder, cuda):
            yield
    finally:
        thread.pure = pure
