"""The outer loop of SlowMo: average the parameters now and then, and step with slow momentum.

Between two averages a worker trains alone with the base optimizer. Every ``slowmo_freq`` steps all
ranks average their parameters ``x``, and then, with ``previous`` as they stood after the average
before (Wang et al., arXiv 1910.00643, algorithm 1):

    momentum = slowmo_factor * momentum + (previous - x) / lr
    previous = previous - slowmo_lr * lr * momentum
    x = previous

The rules:

- The first average is after ``slowmo_freq`` steps; ``previous`` is taken when a parameter meets its
  first step, so weights may be loaded between the construction of the optimizer and training.
- The wrapper has the base optimizer's own ``param_groups`` and ``state``. The slow state is kept
  apart, since some optimizers take any state of a parameter for their own; in a state dict it
  stands with the parameter's other state, where the tools that re-key such dicts carry it along.
- Every parameter is averaged, with or without a gradient on this rank, so that ranks always agree
  on what they send.

Limits: every rank must call ``step`` equally often, so a GradScaler that skips a step on one rank
only leaves the others waiting. Parameters must be whole on each rank: DDP, or FSDP with
``NO_SHARD``.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any, Callable, Iterator, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim import Optimizer

__all__ = ["SlowMomentumOptimizer"]

_SETTINGS = ("slowmo_freq", "slowmo_factor", "slowmo_lr", "step")
_PREVIOUS, _MOMENTUM = "slowmo_previous", "slowmo_momentum"
_STATE_HOOKS = (  # of Optimizer, from torch 2.1 on
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
)


class _Slow(NamedTuple):
    """The slow state of one parameter, in the parameter's shape, dtype and device."""

    previous: Tensor
    momentum: Tensor


class SlowMomentumOptimizer(Optimizer):
    """Wrap an optimizer so that all ranks meet every ``slowmo_freq`` steps, with slow momentum.

    Learning-rate schedulers and step hooks take it like any optimizer; hooks on state dicts are
    the base optimizer's.

    Args:
        base_optim: the optimizer of the steps in between; each group needs an ``lr``.
        slowmo_freq: steps between two averages, at least 1.
        slowmo_factor: how much of the slow momentum is kept, at least 0; 0 gives plain averaging.
        slowmo_lr: length of the slow step, at least 0; 1 goes as far as the momentum says.

    Raises:
        ValueError: an argument is out of its range, or the parameters are DTensors.
        RuntimeError: ``torch.distributed`` is not initialised.
    """

    def __init__(
        self,
        base_optim: Optimizer,
        slowmo_freq: int = 48,
        slowmo_factor: float = 0.5,
        slowmo_lr: float = 1.0,
    ) -> None:
        if not isinstance(base_optim, Optimizer):
            raise ValueError(f"base_optim must be a torch.optim.Optimizer, not {base_optim!r}")
        if not dist.is_initialized():
            raise RuntimeError("SlowMo averages over all ranks: call init_process_group() first")
        self._base_optim: Optimizer | None = None
        super().__init__([dict(group) for group in base_optim.param_groups], base_optim.defaults)
        self._base_optim = base_optim
        self._share_with_base()
        for group in self.param_groups:
            _check_group(group)
        for name in _STATE_HOOKS:
            if hasattr(base_optim, name):
                setattr(self, name, getattr(base_optim, name))
        self._slow: dict[Tensor, _Slow] = {}
        self._configure(slowmo_freq, slowmo_factor, slowmo_lr, step=0)

    @property
    def base_optim(self) -> Optimizer:
        """The wrapped optimizer."""
        assert self._base_optim is not None
        return self._base_optim

    def _share_with_base(self) -> None:
        """Take the base's lists again: it replaces them when it loads a state dict."""
        self.param_groups = self.base_optim.param_groups
        self.state = self.base_optim.state

    def _configure(self, freq: int, factor: float, lr: float, step: int) -> None:
        """Check and take the settings, and stand at ``step`` steps since the beginning."""
        if freq < 1:
            raise ValueError(f"slowmo_freq must be at least 1, not {freq}")
        if not factor >= 0.0:
            raise ValueError(f"slowmo_factor must be at least 0, not {factor}")
        if not lr >= 0.0:
            raise ValueError(f"slowmo_lr must be at least 0, not {lr}")
        self.slowmo_freq, self.slowmo_factor, self.slowmo_lr = freq, factor, lr
        with warnings.catch_warnings():
            # torch advises against averaging at every step; the slow momentum is a reason to.
            warnings.filterwarnings("ignore", message="When period is 1")
            self.averager = PeriodicModelAverager(period=freq, warmup_steps=freq - 1)
        self.averager.step = step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer; its parameters join at the next step.

        Raises:
            ValueError: the group has no ``lr``, or its parameters are DTensors.
        """
        if self._base_optim is None:  # Optimizer.__init__ repeats the base's own groups
            super().add_param_group(param_group)
        else:
            self._base_optim.add_param_group(param_group)
            _check_group(self.param_groups[-1])

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of the base optimizer and, when it is time, a slow step with all ranks.

        Args:
            closure: handed to the base optimizer.

        Returns:
            What the base optimizer returned: the closure's loss, or None.
        """
        for param, _ in self._parameters():
            if param not in self._slow:
                previous = param.detach().clone()
                self._slow[param] = _Slow(previous, torch.zeros_like(previous))
        loss = self.base_optim.step(closure)
        due = (self.averager.step + 1) % self.slowmo_freq == 0
        means = [_stand_in(param) for param, _ in self._parameters()] if due else []
        self.averager.average_parameters(means)
        for mean, (param, lr) in zip(means, self._parameters()):
            self._slow_step(param, mean.detach(), lr)
        return loss

    @torch.no_grad()
    def _slow_step(self, param: Tensor, mean: Tensor, lr: float) -> None:
        """Move a parameter, and where it starts from next, along the slow momentum."""
        previous, momentum = self._slow[param]
        if lr == 0.0:
            # A scheduler may end or begin at 0, where the momentum has no scale: only average.
            previous.copy_(mean)
        else:
            momentum.mul_(self.slowmo_factor).add_((previous - mean).div_(lr))
            previous.sub_(momentum, alpha=self.slowmo_lr * lr)
        param.copy_(previous)

    def _parameters(self) -> Iterator[tuple[Tensor, float]]:
        """Yield each parameter with the learning rate of its group."""
        for group in self.param_groups:
            for param in group["params"]:
                yield param, float(group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state dict with the slow state and the settings added.

        The state of a parameter has two more tensors, ``slowmo_previous`` and ``slowmo_momentum``;
        ``slowmo_freq``, ``slowmo_factor``, ``slowmo_lr`` and ``step`` stand beside ``state``.
        """
        packed = dict(self.base_optim.state_dict())
        packed["state"] = dict(packed["state"])
        for name, param in self._named(packed):
            if param in self._slow:
                previous, momentum = self._slow[param]
                slow = {_PREVIOUS: previous, _MOMENTUM: momentum}
                packed["state"][name] = {**packed["state"].get(name, {}), **slow}
        settings = (self.slowmo_freq, self.slowmo_factor, self.slowmo_lr, self.averager.step)
        packed.update(zip(_SETTINGS, settings))
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of what ``state_dict`` returned; the dict itself is left as it is.

        The model's parameters must be loaded as well for the run to go on as it would have.

        Raises:
            ValueError: a setting is missing or out of its range, or the groups do not match.
        """
        missing = [name for name in _SETTINGS if name not in state_dict]
        if missing:
            raise ValueError(f"not a state dict of SlowMomentumOptimizer: no {', '.join(missing)}")
        base = {key: value for key, value in state_dict.items() if key not in _SETTINGS}
        slow: dict[Any, dict[str, Tensor]] = {}
        base["state"] = {}
        for name, state in state_dict["state"].items():
            fast = {k: v for k, v in state.items() if k not in (_PREVIOUS, _MOMENTUM)}
            slow[name] = {k: v for k, v in state.items() if k in (_PREVIOUS, _MOMENTUM)}
            if fast:
                base["state"][name] = fast
        # Most releases keep the tensors they are given, and would go on to change the caller's.
        self.base_optim.load_state_dict(copy.deepcopy(base))
        self._share_with_base()
        self._slow = {
            param: _Slow(_copy(slow[name][_PREVIOUS], param), _copy(slow[name][_MOMENTUM], param))
            for name, param in self._named(base)
            if slow.get(name)
        }
        self._configure(*(state_dict[name] for name in _SETTINGS))

    def _named(self, packed: dict[str, Any]) -> Iterator[tuple[Any, Tensor]]:
        """Yield each parameter with its name in a state dict, usually a number."""
        for saved, group in zip(packed["param_groups"], self.param_groups):
            yield from zip(saved["params"], group["params"])

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a SlowMomentumOptimizer belongs to its processes: save its state_dict()")


def _check_group(group: dict[str, Any]) -> None:
    """Raise ValueError if SlowMo cannot work on a parameter group."""
    if "lr" not in group:
        raise ValueError("SlowMo needs a learning rate: a parameter group has no 'lr'")
    if any(hasattr(param, "to_local") for param in group["params"]):
        raise ValueError("SlowMo averages whole parameters over all ranks and cannot use DTensors")


def _stand_in(param: Tensor) -> torch.nn.Parameter:
    """Return a parameter with the same values for torch's averager.

    The averager points ``data`` at memory of its own and passes over parameters without a gradient;
    a stand-in keeps the real one where it is and always has a gradient.
    """
    values = param.detach()
    stand_in = torch.nn.Parameter(values)
    stand_in.grad = values
    return stand_in


def _copy(saved: Tensor, param: Tensor) -> Tensor:
    """Return a copy of a saved tensor on the device and in the dtype of its parameter."""
    return saved.detach().to(device=param.device, dtype=param.dtype, copy=True)
