"""Recording and materialising against the other ways to build a model, in one process.

    python benchmarks/compare.py [--rounds 9] [--json FILE] [--plot FILE]

The ways take turns, and the table gives the median of each: CPU seconds, wall seconds, and how far
resident memory rose above where it stood before the call. Ratios compare within this run only.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import threading
import time
from pathlib import Path
from typing import Any, Callable

import torch
from torch import nn

from torchcompat.deferred_init import deferred_init, materialize_module


class Block(nn.Module):
    """A Llama-shaped layer: seven projections, two norms' weights, a rotary buffer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(2))
        steps = torch.arange(0, 128, 2).float() / 128
        self.register_buffer("inv_freq", 1.0 / 10000**steps, persistent=False)


class Llama(nn.Module):
    """A Llama-shaped model, initialised a second time by ``apply`` as transformers does it."""

    def __init__(self, layers: int, width: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(0, 0.02)


def large() -> nn.Module:
    return Llama(80, 8192, 22016, 32000)


def small() -> nn.Module:
    return Llama(8, 1536, 4096, 16000)  # 275 million parameters


def materialised(threads: int) -> nn.Module:
    model = deferred_init(small)
    materialize_module(model, num_threads=threads)
    return model


def skipped() -> nn.Module:
    """Build on ``meta`` and allocate without initialising, as ``torch.nn.utils.skip_init`` does."""
    with torch.device("meta"):
        model = small()
    return model.to_empty(device="cpu")


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return large()


def in_torch_fake_mode() -> nn.Module:
    from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: TID251

    with FakeTensorMode():
        return large()


WAYS: dict[str, dict[str, Callable[[], Any]]] = {
    "record 65B": {
        "meta": on_meta,
        "FakeTensorMode": in_torch_fake_mode,
        "deferred_init": lambda: deferred_init(large),
    },
    "build 0.3B": {
        "eager": small,
        "meta + to_empty (no values)": skipped,
        "deferred + materialised, 1 thread": lambda: materialised(1),
        "deferred + materialised, 2 threads": lambda: materialised(2),
    },
}


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096


def measure(build: Callable[[], Any]) -> dict[str, float]:
    """Run once: CPU seconds, wall seconds, and the highest rise of resident memory in MiB."""
    gc.collect()
    before, highest, stop = resident(), [0], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            highest[0] = max(highest[0], resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    cpu, wall = time.process_time(), time.perf_counter()
    model = build()
    found = {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    stop.set()
    watcher.join()
    del model
    return {**found, "peak_mib": max(0, highest[0] - before) / 2**20}


def run(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    table: dict[str, dict[str, dict[str, float]]] = {}
    for what, ways in WAYS.items():
        usable = {}
        for name, build in ways.items():
            try:
                build()
            except Exception as error:  # this release cannot do it that way
                print(f"{what}: {name} is left out: {type(error).__name__}: {error}")
            else:
                usable[name] = build
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in usable}
        for _ in range(rounds):
            for name, build in usable.items():
                seen[name].append(measure(build))
        table[what] = {
            name: {k: statistics.median(r[k] for r in runs) for k in runs[0]}
            for name, runs in seen.items()
        }
    return table


def show(table: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads")
    for what, ways in table.items():
        base = next(iter(ways.values()))["cpu_s"]
        print(f"\n{what:<38}{'CPU s':>9}{'ratio':>8}{'wall s':>9}{'peak MiB':>10}")
        for name, row in ways.items():
            ratio = row["cpu_s"] / base
            print(
                f"  {name:<36}{row['cpu_s']:>9.3f}{ratio:>8.2f}"
                f"{row['wall_s']:>9.3f}{row['peak_mib']:>10.0f}"
            )


def plot(table: dict[str, dict[str, dict[str, float]]], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(table), 1, figsize=(8, 3 * len(table)))
    for axis, (what, ways) in zip(axes, table.items()):
        axis.barh(list(ways), [row["cpu_s"] for row in ways.values()])
        axis.set_title(f"{what}, torch {torch.__version__}")
        axis.set_xlabel("CPU seconds")
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="write the table there, too")
    parser.add_argument("--plot", help="save a bar chart there (needs matplotlib)")
    options = parser.parse_args()
    table = run(options.rounds)
    show(table)
    if options.json:
        found = {"torch": torch.__version__, "machine": platform.processor(), "table": table}
        Path(options.json).write_text(json.dumps(found, indent=2))
    if options.plot:
        plot(table, options.plot)


if __name__ == "__main__":
    main()
