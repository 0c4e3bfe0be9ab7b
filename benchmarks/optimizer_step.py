"""CPU time of one optimizer step: AnyPrecisionAdamW beside torch's AdamW in the same process.

    python benchmarks/optimizer_step.py [--tensors 200] [--side 256] [--steps 10] [--rounds 5]

Steps of the optimizers alternate round by round and the fastest round of each counts, so that a
busy machine slows all alike. The bar of the project: all float32 at most 1.3 times
``torch.optim.AdamW(foreach=False)``. Exits with 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from torchcompat.optimizers import AnyPrecisionAdamW

BAR = 1.3
REFERENCE = "AdamW(foreach=False)"
BARRED = "float32"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    seconds = measure(arguments.tensors, arguments.side, arguments.steps, arguments.rounds)
    ratio = seconds[BARRED] / seconds[REFERENCE]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, taken in seconds.items():
        print(f"{name:36} {taken * 1e3:8.2f} ms  {taken / seconds[REFERENCE]:5.2f}x")
    print(f"bar {BAR}: {'kept' if ratio <= BAR else 'missed'}")
    return int(ratio > BAR)


def measure(tensors: int, side: int, steps: int, rounds: int) -> dict[str, float]:
    """Return the seconds of CPU time that one step of each optimizer takes."""
    contenders = build(tensors, side)
    best = dict.fromkeys(contenders, float("inf"))
    for optimizer in contenders.values():
        optimizer.step()
    for _ in range(rounds):
        for name, optimizer in contenders.items():
            start = time.process_time()
            for _ in range(steps):
                optimizer.step()
            best[name] = min(best[name], (time.process_time() - start) / steps)
    return best


def build(tensors: int, side: int) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers by name, each with parameters of its own."""

    def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
        made = []
        for _ in range(tensors):
            made.append(torch.nn.Parameter(torch.randn(side, side).to(dtype)))
            made[-1].grad = torch.randn(side, side).to(dtype)
        return made

    plain = {"variance_dtype": torch.float32, "weight_decay": 0.01}
    return {
        REFERENCE: torch.optim.AdamW(parameters(), foreach=False),
        BARRED: AnyPrecisionAdamW(parameters(), **plain),
        "float32, bfloat16 variance (default)": AnyPrecisionAdamW(parameters(), weight_decay=0.01),
        "bfloat16 weights, Kahan": AnyPrecisionAdamW(
            parameters(torch.bfloat16), use_kahan_summation=True, weight_decay=0.01
        ),
        "AdamW(foreach=True)": torch.optim.AdamW(parameters(), foreach=True),
    }


if __name__ == "__main__":
    sys.exit(main())
