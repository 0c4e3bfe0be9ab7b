"""The long fuzz session: `python -m tests.fuzz --programs 10000 [--seed N] [--first N]`.

Program number k of a seed is always the same, so a crash is repeated with `--first k --programs
1`. Programs that come out different are cut down and printed as Python; the exit status is 1 if
there are any.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time

import torch

from tests.fuzz.programs import every_warning_an_error, fails, shrink, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000, help="how many programs to run")
    parser.add_argument("--seed", type=int, default=0, help="which series of programs")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--size", type=int, default=24, help="most statements in a constructor")
    parser.add_argument("--show", type=int, default=10, help="most failing programs to print")
    parser.add_argument("--trace", action="store_true", help="print each number, to find a crash")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    with every_warning_an_error():
        return session(options)


def session(options: argparse.Namespace) -> int:
    """Run the programs, report those that come out different, print the closing line."""
    failed, statements, start = [], 0, time.perf_counter()
    for number in range(options.first, options.first + options.programs):
        if options.trace:
            print(number, file=sys.stderr, flush=True)
        program = write(random.Random(f"{options.seed} {number}"), options.size)
        statements += len(program.inside) + len(program.after)
        if fails(program):
            failed.append(number)
            if len(failed) <= options.show:
                report(number, shrink(program))
    seconds = time.perf_counter() - start
    print(
        f"torch {torch.__version__}: {options.programs} programs of seed {options.seed}, "
        f"{statements} statements, {len(failed)} different, {seconds:.1f} s, "
        f"{1e3 * seconds / max(options.programs, 1):.2f} ms a program"
    )
    if failed:
        print(f"different: {' '.join(map(str, failed[:200]))}")
    return 1 if failed else 0


def report(number: int, program: object) -> None:
    print(f"# program {number}: {fails(program)}\n{program}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
