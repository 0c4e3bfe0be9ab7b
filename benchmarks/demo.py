"""Defer a Llama of 65 billion parameters, then give values to one of its blocks: ``nox -s demo``.

The model is written in plain torch.nn and knows nothing of torchcompat. It would take 243 GiB; it
is built here in the memory of its Python objects. One block is then materialised and compared with
the block that ordinary construction makes at the same point of the random stream, and a small model
of the same shape is compared whole, materialised block by block in reverse order.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from torchcompat.deferred_init import deferred_init, is_deferred, materialize_module


class Shape(NamedTuple):
    """The sizes of a Llama."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocabulary: int


LLAMA_65B = Shape(layers=80, width=8192, hidden=22016, heads=64, vocabulary=32000)
SMALL = Shape(layers=3, width=64, hidden=172, heads=4, vocabulary=500)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Rotary(nn.Module):
    """Turns each pair of channels by an angle that grows with the position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        frequency = 1.0 / 10000.0 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("frequency", frequency, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2]).float()[:, None] * self.frequency
        first, second = x.chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.rotary = Rotary(width // heads)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        query, key, value = (
            layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = self.rotary(query) @ self.rotary(key).transpose(-1, -2) / math.sqrt(shape[-1])
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.output((weights @ value).transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.width)
        self.attention = Attention(shape.width, shape.heads)
        self.feed_forward_norm = RMSNorm(shape.width)
        self.feed_forward = FeedForward(shape.width, shape.hidden)
        self.apply(init_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width).apply(init_weight)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False).apply(init_weight)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init_weight(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        module.weight.data.normal_(0.0, 0.02)


def peak_mib() -> float:
    """Return the most memory this process has had in use, in MiB; nan where nobody counts it."""
    try:
        import resource
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def same(one: nn.Module, other: nn.Module) -> bool:
    """Tell whether all parameters and buffers, by name, are equal bit for bit."""
    tensors = [dict(m.named_parameters(), **dict(m.named_buffers())) for m in (one, other)]
    return tensors[0].keys() == tensors[1].keys() and all(
        torch.equal(tensor, tensors[1][name]) for name, tensor in tensors[0].items()
    )


def census(model: nn.Module) -> str:
    """Return a table: how many tensors and elements each kind of module holds, and their size."""
    tensors, elements, size = Counter(), Counter(), Counter()
    for module in model.modules():
        kind = type(module).__name__
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensors[kind] += 1
            elements[kind] += tensor.numel()
            size[kind] += tensor.numel() * tensor.element_size()
    counters = (tensors, elements, size)
    rows = [(kind, *(counter[kind] for counter in counters)) for kind in tensors]
    rows.append(("all", *(sum(counter.values()) for counter in counters)))
    lines = [f"  {'kind':<12}{'tensors':>9}{'elements':>18}{'GiB':>10}"]
    lines += [f"  {kind:<12}{n:>9,}{m:>18,}{b / 2**30:>10.3f}" for kind, n, m, b in rows]
    return "\n".join(lines)


def check_small() -> bool:
    """Compare a small model whole: values, the output of both, and what they draw afterwards."""
    torch.manual_seed(1)
    eager, drawn = Llama(SMALL), torch.rand(3)
    torch.manual_seed(1)
    deferred, drawn_too = deferred_init(Llama, SMALL), torch.rand(3)
    for block in reversed(deferred.blocks):
        materialize_module(block)
    materialize_module(deferred)
    tokens = torch.arange(20).view(2, 10)
    outputs = torch.equal(eager(tokens), deferred(tokens))
    return same(eager, deferred) and outputs and torch.equal(drawn, drawn_too)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=LLAMA_65B.layers)
    parser.add_argument("--width", type=int, default=LLAMA_65B.width)
    chosen = parser.parse_args()
    shape = LLAMA_65B._replace(layers=chosen.layers, width=chosen.width)
    print(f"torch {torch.__version__}")

    torch.manual_seed(0)
    before, start = peak_mib(), time.perf_counter()
    model = deferred_init(Llama, shape)
    seconds, grown = time.perf_counter() - start, peak_mib() - before
    print(f"deferred in {seconds:.2f} s, {grown:.0f} MiB\n{census(model)}")

    start = time.perf_counter()
    block = model.blocks[0]
    materialize_module(block)
    print(f"block 0 materialised in {time.perf_counter() - start:.1f} s")
    assert is_deferred(model.blocks[-1]), "the rest must stay deferred"

    torch.manual_seed(0)
    nn.Embedding(shape.vocabulary, shape.width).apply(init_weight)
    verdicts = {
        "block 0 equals the eagerly built block": same(block, Block(shape)),
        "a small model equals eager, whole": check_small(),
    }
    for claim, holds in verdicts.items():
        print(f"{claim}: {'yes' if holds else 'NO'}")
    return 0 if all(verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
