"""What jumping ahead and predicting draws cost, in CPU time of one thread.

Run ``python benchmarks/jump.py [--json FILE]``. First-time costs include the polynomial or the
measurement, repeated ones find it kept; a jump's own time does not depend on its distance.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from torchcompat._random import draws, mt19937

DISTANCE = 65 * 10**9


def seconds(act: Callable[[], Any], repeats: int = 1) -> float:
    """CPU seconds of this thread for one call, the best of five rounds if there are repeats."""
    rounds = []
    for _ in range(5 if repeats > 1 else 1):
        start = time.thread_time()
        for _ in range(repeats):
            act()
        rounds.append((time.thread_time() - start) / repeats)
    return min(rounds)


def jumps() -> dict[str, float]:
    state = mt19937.jump(torch.Generator().get_state(), 1000)
    mt19937._plan.cache_clear()
    mt19937._reciprocal.cache_clear()
    chance = random.Random(0)
    distances = [chance.randrange(10**11) for _ in range(300)]
    return {
        "jump of 65e9, the first of the process": seconds(lambda: mt19937.jump(state, DISTANCE)),
        "jump of 65e9, again": seconds(lambda: mt19937.jump(state, DISTANCE), 50),
        "jump below 1e11, first time, mean of 300": mean(
            seconds(lambda d=d: mt19937.jump(state, d)) for d in distances
        ),
        "jump of 1e13, first time": seconds(lambda: mt19937.jump(state, 10**13)),
        "1,000,000 draws, drawn": seconds(lambda: mt19937.jump(state, 10**6), 20),
        "1,000 draws, drawn": seconds(lambda: mt19937.jump(state, 1000), 200),
    }


def predictions() -> dict[str, float]:
    tensor, odd = torch.empty(64, 32), torch.empty(77, 13)
    seen = (tensor.dtype, tensor.shape, tensor.stride())
    aten = torch.ops.aten
    costs = {}
    for name, func, more in (
        ("normal_", aten.normal_.default, (0.0, 0.02)),
        ("uniform_", aten.uniform_.default, (-0.1, 0.1)),
    ):
        draws._look_up.cache_clear()
        draws._laws.clear()
        first = seconds(lambda f=func, a=(tensor, *more): draws.predict(f, a, {}))
        other = seconds(lambda f=func, a=(odd, *more): draws.predict(f, a, {}))
        costs[f"predict {name}, first of its kind"] = max(first, other)
        costs[f"predict {name}, first of its shape"] = seconds(
            lambda f=func, a=(seen, *more): draws._look_up.__wrapped__(f, *a), 1000
        )
        costs[f"predict {name}, again"] = seconds(
            lambda f=func, a=(tensor, *more): draws.predict(f, a, {}), 10000
        )
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    figures = {**jumps(), **predictions()}
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.processor()}")
    for name, cost in figures.items():
        print(f"{name:45}{cost * 1e3:12.4f} ms")
    if options.json:
        options.json.write_text(
            json.dumps({"torch": torch.__version__, "seconds": figures}, indent=1)
        )


if __name__ == "__main__":
    main()
