"""Deferred against eager construction on a real CUDA device: the same bits, in reversed order.

Needs a CUDA device; without one, as in CI, it checks nothing: ``python benchmarks/gpu_streams.py``.
Each model is built eagerly and deferred after the same seeds; its tensors are materialised from the
last to the first and compared bit for bit, and so are the generators' states when construction is
over. Columns say how many random operators ran on scratch memory to learn what they take, the first
time and when the same model is built again. Ends with status 1 if anything differs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import nn

from torchcompat._random import streams
from torchcompat.deferred_init import deferred_init, materialize_tensor

CUDA = {"device": torch.device("cuda", 0)}


class Block(nn.Module):
    """Attention and a small network, initialised twice, with a buffer drawn at random."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, **CUDA)
        self.up = nn.Linear(width, 4 * width, **CUDA)
        self.down = nn.Linear(4 * width, width, bias=False, **CUDA)
        self.norm = nn.LayerNorm(width, **CUDA)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.xavier_uniform_(self.down.weight)
        self.register_buffer("mask", torch.rand(width, **CUDA) < 0.5)


def transformer() -> nn.Module:
    blocks = [Block(128) for _ in range(4)]
    return nn.Sequential(nn.Embedding(1000, 128, **CUDA), *blocks, nn.Linear(128, 1000, **CUDA))


def convolutions() -> nn.Module:
    layers = [nn.Conv2d(3, 64, 7, **CUDA), nn.BatchNorm2d(64, **CUDA)]
    layers += [nn.Conv2d(64, 64, 3, dtype=torch.float16, **CUDA) for _ in range(3)]
    for layer in layers[2:]:
        nn.init.kaiming_normal_(layer.weight.data)
    return nn.Sequential(*layers, nn.LSTM(64, 32, 2, **CUDA))


def large() -> nn.Module:
    """Sizes at which a kernel's grid is full, so that each thread draws several times."""
    return nn.ModuleList(nn.Linear(8192, width, **CUDA) for width in (8192, 8192, 5000, 8192))


def two_devices() -> nn.Module:
    """The streams of both devices are moved, and seeded, between each other's draws."""
    layers = [nn.Linear(50, 60), nn.Linear(60, 70, **CUDA), nn.Linear(70, 80)]
    torch.manual_seed(11)
    layers += [nn.Linear(60, 70, **CUDA), nn.Linear(50, 60), nn.Linear(80, 90, **CUDA)]
    state = torch.cuda.get_rng_state()
    layers.append(nn.Linear(60, 70, **CUDA))
    torch.cuda.set_rng_state(state)
    with torch.random.fork_rng():
        layers.append(nn.Linear(60, 70, **CUDA))
        torch.cuda.manual_seed(5)
    assert torch.cuda.initial_seed() == 11
    return nn.ModuleList([*layers, nn.Linear(7, 8, **CUDA)])


def draws() -> nn.ParameterDict:
    """Every kind of random number, sizes around those that change the way of drawing."""
    own = torch.Generator(**CUDA).manual_seed(3)
    made: dict[str, Any] = {}
    for n in (1, 255, 4096, 300_001):
        x = torch.empty(n, **CUDA)
        made[f"normal {n}"] = x.clone().normal_()
        made[f"uniform {n}"] = x.double().uniform_(-1, 1)
        made[f"own {n}"] = torch.randn(n, generator=own, **CUDA)
        made[f"strided {n}"] = torch.empty(n, 2, **CUDA).t().normal_()
        made[f"half {n}"] = torch.rand(n, dtype=torch.bfloat16, **CUDA)
        made[f"exponential {n}"] = x.clone().exponential_()
        made[f"cauchy {n}"] = x.clone().cauchy_()
        made[f"log normal {n}"] = x.clone().log_normal_()
        made[f"integers {n}"] = torch.randint(0, 2**40, (n,), **CUDA)
        made[f"permutation {n}"] = torch.randperm(n, **CUDA)
        made[f"bernoulli {n}"] = torch.bernoulli(torch.full((n,), 0.3, **CUDA))
        made[f"poisson {n}"] = torch.poisson(torch.full((n,), 4.0, **CUDA))
        made[f"dropout {n}"] = nn.functional.dropout(torch.ones(n, **CUDA), 0.4)
        made[f"truncated {n}"] = nn.init.trunc_normal_(torch.empty(n, **CUDA), a=-0.5, b=1)
        made[f"picked {n}"] = torch.multinomial(torch.ones(9, **CUDA), n, replacement=True)
    made["orthogonal"] = nn.init.orthogonal_(torch.empty(40, 60, **CUDA))
    parameters = {k: nn.Parameter(v, requires_grad=False) for k, v in made.items()}
    return nn.ParameterDict(parameters)


def states() -> list[torch.Tensor]:
    return [torch.get_rng_state(), torch.cuda.get_rng_state()]


def built(call: Callable[[], nn.Module]) -> tuple[nn.Module, list[torch.Tensor], float]:
    """Call after the same seeds; give the model, where the generators are, and the seconds."""
    torch.manual_seed(7)
    torch.rand(5, **CUDA)
    torch.cuda.synchronize()
    start = time.perf_counter()
    model = call()
    torch.cuda.synchronize()
    return model, states(), time.perf_counter() - start


def differences(eager: nn.Module, deferred: nn.Module) -> list[str]:
    """Name the tensors that come out different, materialised from the last to the first."""
    expected, found = eager.state_dict(keep_vars=True), deferred.state_dict(keep_vars=True)
    before, wrong = states(), []
    for name in reversed(list(found)):
        tensor = materialize_tensor(found[name])
        if not torch.equal(expected[name], tensor) or expected[name].stride() != tensor.stride():
            wrong.append(name)
    if not all(map(torch.equal, before, states())):
        wrong.append("a generator that materialising moved")
    return wrong


def check(build: Callable[[], nn.Module]) -> bool:
    eager, ends, seconds = built(build)
    counts, times, wrong = [], [], []
    run = streams.run_for_state
    for _ in range(2):
        ran: list[Any] = []
        streams.run_for_state = lambda op, ran=ran: ran.append(op) or run(op)
        deferred, found, spent = built(lambda: deferred_init(build))
        counts.append(len(ran))
        times.append(spent)
        if not all(map(torch.equal, ends, found)):
            wrong.append("where the generators end")
        wrong += differences(eager, deferred)
    streams.run_for_state = run
    print(
        f"{build.__name__:<14}{'DIFFERENT' if wrong else 'equal':<11}{counts[0]:>5}{counts[1]:>7}"
        f"{seconds:>11.3f}{times[0]:>9.3f}{times[1]:>9.3f}  {', '.join(wrong[:5])}"
    )
    return not wrong


def main() -> None:
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device here: nothing was checked")
        return
    streams._EXIT_ELEMENTS = 1 << 32
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")
    print(f"{'model':<14}{'result':<11}{'ran':>5}{'again':>7}{'eager s':>11}{'deferred':>9}")
    results = [check(f) for f in (transformer, convolutions, large, two_devices, draws)]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
