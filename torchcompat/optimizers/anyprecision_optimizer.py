"""AdamW that keeps each part of its state in a dtype of its own.

Training in bfloat16 saves memory in three places, the weights, the momentum and the variance, and
each of them bears it differently. So each has its own dtype here, and weights of few bits may have
a compensation buffer, which carries what rounding takes from every update into the next one (Kahan
summation). The rules:

- One step is computed in float32, or float64 if the weight or its state is float64, and each result
  is rounded once, when it is stored.
- Where nothing needs converting the operations and their order are those of the running release's
  ``torch.optim.AdamW(foreach=False)``, so that float32 without Kahan is equal to it bit for bit.
- The update is elementwise, so a DTensor is updated shard by shard, without communication.

Limits: deterministic rounding cannot store a change below half a unit in the last place. A bfloat16
variance at ``beta2 = 0.999`` (both are the defaults) so stops growing at a quarter of the square of
a steady gradient, which makes steps up to twice as long as AdamW's, and never decays, since the
decay of 0.1 % is under half a unit (0.2 to 0.4 %); where that matters take a float32 variance or a
smaller ``beta2``. A compensation buffer rounds too: a bfloat16 weight near 1 that moves by 1e-4 a
step goes wrong by 0.6 % of its way with a bfloat16 buffer, 0.1 % with float16.

Tensors are updated one by one: torch's foreach kernels give the same bits on the CPU but take twice
the time there, since each sweeps all tensors before the next can start.
"""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchcompat import _gate

# Where torch's own AdamW changed its arithmetic: the momentum became a lerp in 2.1 and the root of
# the bias correction a power in 2.5, each a last bit away from what it was before. May go when the
# floor reaches 2.5.
_LERP_MOMENTUM = _gate.running() >= (2, 1)
_POWER_FOR_ROOT = _gate.running() >= (2, 5)

_LOAD_HOOKS = _gate.running() >= (2, 1)  # Optimizer.register_load_state_dict_pre_hook

_DTYPES = ("momentum_dtype", "variance_dtype", "compensation_buffer_dtype")
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "use_kahan_summation", *_DTYPES)


class AnyPrecisionAdamW(Optimizer):
    """AdamW with momentum, variance and a Kahan compensation buffer each in its own dtype.

    The algorithm is AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization",
    arXiv 1711.05101). With ``use_kahan_summation`` the update and the weight decay are added to a
    compensation buffer, the buffer is added to the weight, and what rounding lost in that sum goes
    back into the buffer; so bfloat16 weights move by steps far below their own resolution.

    The state of a parameter is ``step`` (a float32 tensor without dimensions), and in its own shape
    ``exp_avg``, ``exp_avg_sq`` and, with Kahan summation, ``compensation``. ``load_state_dict``
    copies them in the dtypes they were saved in.

    Args:
        params: parameters, or dicts of parameter groups; every option below may differ by group.
        lr: learning rate, at least 0.
        betas: decay rates of momentum and variance, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: decoupled decay per unit of learning rate, at least 0.
        use_kahan_summation: keep a compensation buffer for the weights.
        momentum_dtype: dtype of ``exp_avg``; dtypes may also be names, such as ``"bfloat16"``.
        variance_dtype: dtype of ``exp_avg_sq``.
        compensation_buffer_dtype: dtype of ``compensation``.

    Raises:
        ValueError: a hyperparameter is out of its range, or a dtype is not a floating-point one.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        use_kahan_summation: bool = False,
        momentum_dtype: torch.dtype | str = torch.float32,
        variance_dtype: torch.dtype | str = torch.bfloat16,
        compensation_buffer_dtype: torch.dtype | str = torch.bfloat16,
    ) -> None:
        given = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "use_kahan_summation": use_kahan_summation,
            "momentum_dtype": momentum_dtype,
            "variance_dtype": variance_dtype,
            "compensation_buffer_dtype": compensation_buffer_dtype,
        }
        super().__init__(params, _checked(given))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; options it does not name take the optimizer's defaults.

        Raises:
            ValueError: as for the constructor.
        """
        super().add_param_group({**param_group, **_checked({**self.defaults, **param_group})})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and its gradients; called once, with gradients enabled.

        Returns:
            What the closure returned, or None without one.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict[str, Any]) -> None:
        """Advance one parameter's state by one step and move the parameter."""
        grad = param.grad
        if grad is None or grad.layout is not torch.strided:
            raise RuntimeError(
                "AnyPrecisionAdamW does not support sparse gradients: use dense ones, or "
                "torch.optim.SparseAdam for this parameter"
            )
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
        _add_missing_buffers(state, param, group)
        state["step"] += 1
        names = ["exp_avg", "exp_avg_sq"]
        if group["use_kahan_summation"]:
            names.append("compensation")
        tensors = [param, _placed_like(grad, param), *(state[name] for name in names)]
        if hasattr(param, "to_local"):
            tensors = [tensor.to_local() for tensor in tensors]
        _advance(_Numbers.of(group, float(state["step"])), *map(_as_real, tensors))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state made by ``state_dict``; tensors keep the dtypes they have there.

        Raises:
            ValueError: the groups do not match, or an option in them is out of its range.
        """
        seen = [state_dict]
        if _LOAD_HOOKS:
            # Hooks may replace the dict, so the last one notes what there is to be loaded.
            note = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
            try:
                super().load_state_dict(state_dict)
            finally:
                note.remove()
        else:
            super().load_state_dict(state_dict)
        # Optimizer.load_state_dict has cast the state to the dtype of the parameter or, where there
        # was nothing to cast, kept the caller's own tensors, so take each tensor anew.
        for name, param in zip(_members(seen[-1]["param_groups"]), _members(self.param_groups)):
            for key, value in seen[-1]["state"].get(name, {}).items():
                if isinstance(value, Tensor):
                    device = value.device if key == "step" else param.device
                    self.state[param][key] = value.detach().to(device, copy=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A state saved by torch.optim.AdamW, say, has no options for the dtypes.
        for group in self.param_groups:
            group.update(_checked({**self.defaults, **group}))


class _Numbers(NamedTuple):
    """The numbers of one step of AdamW, the same for all elements of a tensor."""

    beta1: float
    beta2: float
    eps: float
    decay: float
    step_size: float
    variance_root: float

    @classmethod
    def of(cls, group: dict[str, Any], step: float) -> _Numbers:
        """Return the numbers of a group's step number ``step``, the first being 1."""
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        correction = 1 - beta2**step
        root = correction**0.5 if _POWER_FOR_ROOT else math.sqrt(correction)
        decay = lr * group["weight_decay"]
        return cls(beta1, beta2, group["eps"], decay, lr / (1 - beta1**step), root)


def _advance(
    numbers: _Numbers,
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    variance: Tensor,
    compensation: Tensor | None = None,
) -> None:
    """Do one step of AdamW on plain tensors of one shape, all but the gradient in place."""
    stored = (weight, momentum, variance)
    wide = torch.float64 if any(t.dtype is torch.float64 for t in stored) else torch.float32
    grad = grad.to(wide)
    mean, square = momentum.to(wide), variance.to(wide)
    if _LERP_MOMENTUM:
        mean.lerp_(grad, 1 - numbers.beta1)
    else:
        mean.mul_(numbers.beta1).add_(grad, alpha=1 - numbers.beta1)
    square.mul_(numbers.beta2).addcmul_(grad, grad, value=1 - numbers.beta2)
    _store(momentum, mean)
    _store(variance, square)
    root = square.sqrt() if square is variance else square.sqrt_()
    denominator = root.div_(numbers.variance_root).add_(numbers.eps)
    if compensation is None:
        moved = weight.to(wide)
        if numbers.decay:
            moved.mul_(1 - numbers.decay)
        _store(weight, moved.addcdiv_(mean, denominator, value=-numbers.step_size))
    else:
        change = compensation.to(wide)
        change.addcdiv_(mean, denominator, value=-numbers.step_size)
        _add_compensated(weight, change, numbers.decay)
        _store(compensation, change)


def _add_compensated(weight: Tensor, change: Tensor, decay: float) -> None:
    """Decay the weight and add the change to it; leave in ``change`` what rounding lost."""
    before = weight.to(change.dtype, copy=True)
    if decay:
        change.sub_(before, alpha=decay)
    weight.copy_(before + change)
    change.sub_(weight.to(change.dtype) - before)


def _store(place: Tensor, value: Tensor) -> None:
    """Round a result into its place, unless it was computed there."""
    if value is not place:
        place.copy_(value)


def _add_missing_buffers(state: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
    """Create the zero buffers that a step needs; Kahan summation may be switched on at any step."""
    wanted = [("exp_avg", "momentum_dtype"), ("exp_avg_sq", "variance_dtype")]
    if group["use_kahan_summation"]:
        wanted.append(("compensation", "compensation_buffer_dtype"))
    for name, option in wanted:
        if name not in state:
            state[name] = torch.zeros_like(
                _as_real(param),
                dtype=_as_dtype(option, group[option]),
                memory_format=torch.preserve_format,
            )


def _as_real(tensor: Tensor) -> Tensor:
    """View complex numbers as pairs of real ones, as torch's AdamW does."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _placed_like(grad: Any, param: Any) -> Tensor:
    """Lay a DTensor's gradient out as its parameter, when the two differ."""
    if hasattr(param, "to_local") and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad  # type: ignore[no-any-return]


def _members(groups: list[dict[str, Any]]) -> Iterable[Any]:
    """Return the parameters, or their names in a state dict, of all groups in order."""
    return chain.from_iterable(group["params"] for group in groups)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return this optimizer's options out of a dict, dtypes as torch.dtype; ValueError if bad."""
    found = {name: options[name] for name in _OPTIONS}
    for name in ("lr", "eps", "weight_decay"):
        if not found[name] >= 0.0:
            raise ValueError(f"{name} must be at least 0, not {found[name]}")
    if len(found["betas"]) != 2 or not all(0.0 <= beta < 1.0 for beta in found["betas"]):
        raise ValueError(f"betas must be two numbers in [0, 1), not {found['betas']}")
    found.update({name: _as_dtype(name, found[name]) for name in _DTYPES})
    return found


def _as_dtype(option: str, value: Any) -> torch.dtype:
    """Return a floating-point dtype given as such or by its name, with or without ``torch.``."""
    dtype = getattr(torch, value.rpartition(".")[2], None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{option} must be a floating-point dtype or its name, not {value!r}")
    return dtype
