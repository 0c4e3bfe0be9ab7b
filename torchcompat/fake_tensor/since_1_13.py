"""The floor: fakes are wrapper subclasses; C++ answers for their attributes (pytorch#65340).

A fake carries one ``_value``: what the recorder knows of it. Operators reach the recorder through
``__torch_dispatch__``; what C++ would answer from memory that is not there is answered by the
methods below. ``__torch_function__`` is switched off, so that operators cost one trip to Python,
not two. Where a fake must change what C++ cannot change in place, two tensors swap their insides,
which torch can do since pytorch#111747 and pytorch#116955 (torch 2.3).

A fake that stands for an ``nn.Parameter`` or another subclass is an instance of a class made for it
that inherits from both. Limits: a subclass with ``__slots__`` cannot be faked (layout conflict);
what asks C++ for an address past Python (``to_dlpack``) gets null on this rung.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from torchcompat import fake_tensor
from torchcompat.fake_tensor.devices import OnDevice

if TYPE_CHECKING:
    from typing import TypeGuard  # novm

_recorder: Any = None
_classes: dict[type, type[FakeTensor]] = {}
_META = torch.device("meta")
_new_parameter = torch.nn.Parameter.__new__.__code__
_swap_tensors = getattr(getattr(torch.utils, "swap_tensors", None), "__code__", None)
_data: Any = torch._C._TensorBase.data
_make = torch.Tensor._make_wrapper_subclass


def connect(recorder: Any) -> None:
    """Name the object whose methods serve the operators and reads of every fake."""
    global _recorder
    _recorder = recorder


def _refusal(what: str) -> Any:
    """Build a method for what needs memory, and must not look as if there were some."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{self!r} {what}: it has no memory yet. Call materialize_tensor on it, or "
            "materialize_module on its module, first."
        )

    return refuse


def _in_memory(name: str) -> Any:
    """Build the method for what Python does to each element in place: now."""

    def run(self: Any, *args: Any) -> Any:
        getattr(self._exposed(), name)(*_recorder.real_data(args))
        return self

    return run


def _assign_class(self: Any, cls: type) -> None:
    """Let a fake stand for an instance of another class, or swap places with a real tensor."""
    caller = sys._getframe(1).f_back
    swapping = caller is not None and caller.f_code is _swap_tensors
    set_class(self, cls if swapping else fake_class(cls))


set_class: Any = vars(object)["__class__"].__set__
_Classed: Any = type("_Classed", (), {"__class__": property(type, _assign_class)})


class FakeTensor(_Classed, OnDevice):  # type: ignore[misc]  # a class made by a call
    """A tensor without memory. Not part of the API: use ``is_fake`` to ask, not ``isinstance``."""

    _value: Any
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs know no class method here
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _recorder.dispatch(func, args, kwargs or {})

    @property
    def data(self) -> Any:
        """An alias outside the graph; assigning makes the fake stand for other memory."""
        return _recorder.alias(self, True)

    @data.setter
    def data(self, source: torch.Tensor) -> None:
        _recorder.assign(self, source)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, flag: bool) -> None:
        # nn.Parameter.__new__ marks a custom tensor so; the class it was called for is the truth.
        frame = sys._getframe(1)
        inside = frame.f_code is _new_parameter
        cls: type = frame.f_locals["cls"] if inside else torch.nn.Parameter
        self.__class__ = fake_class(cls)

    def detach(self) -> Any:
        """Give an alias outside the graph."""
        result = _recorder.alias(self)
        # nn.Parameter.__new__ insists on getting its own argument's class back.
        if type(self) is not FakeTensor and sys._getframe(1).f_code is _new_parameter:
            result.__class__ = type(self)
        return result

    def detach_(self) -> Any:
        """Leave the graph, in place."""
        if self._value.storage is not None and self._value.storage.inference:
            return self.requires_grad_(False)  # it has none, and is no view that could not
        cut = self.requires_grad and not self.is_leaf
        super().detach_()
        if cut:  # views of it stay where they are
            self._value = self._value.alias()
        return self

    def as_subclass(self, cls: type) -> Any:
        """Give an alias that reports ``cls`` as one of its classes."""
        result: torch.Tensor = super().view_as(self) if torch.is_grad_enabled() else self.data
        result.__class__ = fake_class(cls)
        return result

    def _exposed(self) -> torch.Tensor:
        """Give this tensor its values now, and the memory to whoever asks for it."""
        real: torch.Tensor = _recorder.expose(self).detach().requires_grad_(self.requires_grad)
        return real

    def numpy(self, **options: Any) -> Any:
        """Give this tensor its values now and share them with an array."""
        return self._exposed().numpy(**options)

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> Any:
        array = self.numpy()
        if copy is False and dtype not in (None, array.dtype):
            raise ValueError("Unable to avoid copy while creating an array as requested.")
        return array.astype(dtype or array.dtype, copy=bool(copy))

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._exposed().__dlpack__(*args, **kwargs)

    def register_hook(self, hook: Any) -> Any:
        """Have ``hook`` called with the gradient, also of what this tensor becomes."""
        handle = super().register_hook(hook)  # type: ignore[no-untyped-call]
        if not self.is_leaf and self._value.storage is not None:
            _recorder.keep_hooks(self)
        return handle

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Share the memory of another tensor or storage."""
        if isinstance(source, FakeTensor) and (args or kwargs):
            return _recorder.set_strided(self, source, *args, **kwargs)
        given = () if source is None else (source, *args)
        return super().set_(*given, **kwargs)

    apply_, map_, map2_ = map(_in_memory, ("apply_", "map_", "map2_"))

    def tolist(self) -> Any:
        """Compute the values now and list them; the tensor stays deferred."""
        return _recorder.compute(self).tolist()

    def __copy__(self) -> Any:
        made = _recorder.alias(self).requires_grad_(self.requires_grad)
        made.__class__ = type(self)
        vars(made).update({k: v for k, v in vars(self).items() if k != "_value"})
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _recorder.deepcopy(self, memo)

    __reduce_ex__ = _refusal("cannot be pickled or saved")
    storage = untyped_storage = _typed_storage = _storage = _refusal("has no storage to give")
    data_ptr = share_memory_ = storage

    def is_shared(self) -> bool:
        """Tell whether the memory is shared between processes; there is none."""
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [f"size={tuple(self._value.geometry.size)}"]
        if self.dtype != torch.get_default_dtype():
            parts.append(f"dtype={self.dtype}")
        if self.device.type != "cpu":
            parts.append(f"device='{self.device}'")
        if self.requires_grad:
            parts.append("requires_grad=True")
        text = f"tensor(..., {', '.join(parts)}, fake=True)"
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    def __format__(self, spec: str) -> str:
        if self.dim() or type(self) is not FakeTensor or self._value.storage is None:
            return object.__format__(self, spec)
        return format(self.item(), spec)

    def new_tensor(  # type: ignore[override]  # torch takes keywords only; its stubs do not say so
        self, data: Any, **options: Any
    ) -> torch.Tensor:
        """Build a tensor from data, with this one's dtype and device unless others are given."""
        device = torch.device(options.pop("device", None) or self.device)
        data = _recorder.real_data(data)
        made = torch.tensor(data, dtype=options.pop("dtype", self.dtype), **options)
        return made if device == made.device else made.to(device)

    def new(self, *args: Any, **options: Any) -> Any:
        """Legacy constructor: sizes, a sequence, a storage or a tensor, of this dtype."""
        data = args[0] if len(args) == 1 else 0
        if isinstance(data, torch.Tensor):
            if data.dtype != self.dtype:
                raise TypeError(f"expected {self.dtype} (got {data.dtype})")
            return data.view_as(data)
        if torch.is_storage(data):
            return self.new_empty(0).set_(data)
        if not isinstance(data, (int, torch.Size)):
            return self.new_tensor(data)
        size = data if isinstance(data, torch.Size) else args
        return self.new_empty(options.pop("size", size) or (0,), **options)


def _initialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """Give a lazy parameter its shape, as ``UninitializedTensorMixin.materialize``."""
    g = self._value.geometry
    self.data = torch.empty(shape, device=device or g.device, dtype=dtype or g.dtype)
    self.__class__ = fake_class(self.cls_to_become)


def fake_class(cls: type) -> type[FakeTensor]:
    """Return the class of fakes that stand for instances of ``cls``."""
    if cls is torch.Tensor:
        return FakeTensor
    if issubclass(cls, FakeTensor):
        return cls
    if cls not in _classes:
        body: dict[str, Any] = {"__doc__": f"A fake {cls.__name__}.", "__module__": __name__}
        if issubclass(cls, UninitializedTensorMixin):
            body["materialize"] = _initialize
            # It says what may be done before then, and of which class the results are.
            body["__torch_function__"] = vars(UninitializedTensorMixin)["__torch_function__"]
        metaclass: Any = type(cls)
        try:
            _classes[cls] = metaclass(cls.__name__, (FakeTensor, cls), body)
        except TypeError as error:
            raise TypeError(
                f"tensors of class {cls.__name__} cannot be deferred: {error}"
            ) from None
    return _classes[cls]


def real_class(fake: torch.Tensor) -> type:
    """Return the class that a fake stands for."""
    return torch.Tensor if type(fake) is FakeTensor else type(fake).__bases__[1]


def is_fake(tensor: Any) -> TypeGuard[FakeTensor]:
    """Tell whether ``tensor`` is a fake; never raises, whatever is passed."""
    return issubclass(type(tensor), FakeTensor)


def subclass(cls: type, tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Return an instance of a tensor class on the memory of ``tensor``, outside any graph."""
    with torch.inference_mode(tensor.is_inference()):
        if cls is torch.Tensor:  # a view that became a leaf still shares its base's history
            made = tensor if tensor._is_view() and tensor.is_leaf else tensor.detach()
            return made.requires_grad_(requires_grad)
        return torch.Tensor._make_subclass(cls, tensor.detach(), requires_grad)


def seal(fake: torch.Tensor) -> None:
    """Have C++ refuse to tell the address of a fake; on this release it says null."""


def wrap(value: Any, cls: type[FakeTensor] = FakeTensor) -> FakeTensor:
    """Make the fake tensor of a recorded value."""
    g, storage = value.geometry, value.storage
    if torch.is_inference_mode_enabled() and storage is not None and not storage.inference:
        with torch.inference_mode(False):  # of a view, the version is that of its base
            return wrap(value, cls)
    device = g.device if fake_tensor.hardware(g.device.type) else _META
    fake: FakeTensor = _make(
        cls, g.size, strides=g.stride, storage_offset=g.offset, dtype=g.dtype, device=device
    )
    fake._value = value
    fake_tensor.seal(fake)
    if g.conj:
        torch._C._set_conj(fake, True)
    if g.neg:
        torch._C._set_neg(fake, True)
    return fake


def refit(fake: FakeTensor, value: Any) -> None:
    """Make a fake report, and stand for, another value."""
    storage = value.storage
    with torch._C.DisableTorchFunction():  # a lazy parameter refuses the question
        inference = fake.is_inference() if storage is None else storage.inference
    with torch.inference_mode(inference), torch.no_grad():
        like = wrap(value)
        if torch._has_compatible_shallow_copy_type(fake, like):
            _data.__set__(fake, like)
        else:  # from or to hardware that is not there
            like.requires_grad_(fake.requires_grad)
            torch._C._swap_tensor_impl(fake, like)
    fake._value = value
