"""A program is a list of statements; running it eagerly and deferred must give the same.

It has three parts: statements before the construction (they make real tensors), the constructor
itself, and statements after it, which work on what the constructor returned. Then the kept values
are materialised in a random order, with draws in between, and compared bit for bit with
`tests.equality`, gradients, generator states and Python values included.
"""

from __future__ import annotations

import contextlib
import random
import re
import textwrap
import warnings
from typing import Any, Callable, Iterator, NamedTuple

import torch
from torch import nn

from tests.equality import assert_equal, gradients, raw, still_generator, walk
from tests.fuzz import grammar
from torchcompat.deferred_init import deferred_init, materialize_module, materialize_tensor


class Program(NamedTuple):
    """Statements by part, the names the constructor returns, and the seed of run and order."""

    before: tuple[str, ...]
    inside: tuple[str, ...]
    kept: tuple[str, ...]
    after: tuple[str, ...]
    seed: int

    def __str__(self) -> str:
        """The deferred run as plain Python; call `construct()` itself for the eager one."""
        kept = ", ".join(self.kept)
        body = textwrap.indent("\n".join((*self.inside, f"return [{kept}]")), "    ")
        return "\n".join(
            (
                "import copy, math, torch\nfrom torch import nn",
                "from torchcompat.deferred_init import deferred_init",
                f"torch.manual_seed({self.seed})",
                *self.before,
                f"def construct():\n{body}",
                f"[{kept}] = deferred_init(construct)",
                *self.after,
            )
        )


class Outcome(NamedTuple):
    """What a run left behind."""

    values: dict[str, Any]
    states: tuple[bytes, ...]


@contextlib.contextmanager
def every_warning_an_error() -> Iterator[None]:
    """Also those that torch gives once a process, or a program would depend on earlier ones."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        torch.set_warn_always(before)


# What the package documents to refuse, by name, and two limits of README: `.data` of another dtype
# takes a leaf out of the graph of its views, until a write makes torch build that graph anew; and
# torch cannot rebuild the graph of a fake's view whose base no longer requires grad.
REFUSED = re.compile(
    "recorded a real tensor of shape .* that was changed before"
    "|writes a real tensor from a deferred one that requires grad"
    "|builds an autograd graph on a tensor that was materialised and then changed"
    "|a leaf is not in the graph"
    "|new_fn INTERNAL ASSERT"
)
KEPT = (torch.Tensor, nn.Module, torch.Generator, float, int, list)


def _seed(seed: int) -> None:
    """Seed the CPU alone: `torch.manual_seed` formats the stack once for each other device."""
    torch.default_generator.manual_seed(seed)


def write(rnd: Any, size: int = 16) -> Program:
    """Write a random program of up to `size` statements in the constructor."""
    seed = rnd.randrange(1000)
    _seed(seed)
    dtype = torch.get_default_dtype()
    try:
        writer = grammar.Writer(rnd, grammar.names())
        before = writer.write([(grammar.FACTORIES, 1)], rnd.choice((0, 0, 0, 1, 2)))
        outer = set(writer.space)
        writer.rules.construct(writer.space)
        inside = writer.write(grammar.INSIDE, rnd.randrange(2, size + 1))
        mine = [k for k in writer.live(KEPT) if k not in outer]
        kept = [k for k in mine if rnd.randrange(4)] or mine[:1]
        rnd.shuffle(kept)
        writer.space = {k: v for k, v in writer.space.items() if k in outer or k in kept}
        writer.rules.after = True
        after = writer.write(grammar.AFTER, rnd.choice((0, 0, 1, 3, 6)))
    finally:
        torch.set_default_dtype(dtype)
    return Program(tuple(before), tuple(inside), tuple(kept), tuple(after), seed)


def run(program: Program, call: Callable[[Callable[[], Any]], Any]) -> Outcome:
    """Run a program, its constructor through `call`; give what it leaves."""
    dtype = torch.get_default_dtype()
    _seed(program.seed)
    outer = grammar.names()
    states = []
    try:
        exec("\n".join(program.before), outer)

        def construct() -> list[Any]:
            space = dict(outer)
            exec("\n".join(program.inside), space)
            return [space[name] for name in program.kept]

        space = dict(outer)
        space.update(zip(program.kept, call(construct)))
        states.append(raw(torch.get_rng_state()))
        exec("\n".join(program.after), space)
        states.append(raw(torch.get_rng_state()))
        left = {k: v for k, v in space.items() if isinstance(v, KEPT)}
        for name in [k for k, v in left.items() if isinstance(v, torch.Generator)]:
            states.append(raw(left.pop(name).get_state()))
        return Outcome(left, tuple(states))
    finally:
        torch.set_default_dtype(dtype)


def materialize_in_random_order(values: dict[str, Any], rnd: random.Random) -> None:
    """Replace each value by its materialised self; modules whole or tensor by tensor."""
    order = list(values)
    rnd.shuffle(order)
    for name in order:
        value = values[name]
        with still_generator():
            if isinstance(value, torch.Tensor):
                values[name] = materialize_tensor(value)
            elif isinstance(value, nn.Module):
                _materialize_module(value, rnd)
        if rnd.randrange(4) == 0:
            torch.rand(3)


def _materialize_module(module: nn.Module, rnd: random.Random) -> None:
    if rnd.randrange(3) == 0:
        slots = [(m._parameters, k) for m in module.modules() for k in m._parameters]
        rnd.shuffle(slots)
        for entries, key in slots:
            if entries[key] is not None:
                entries[key] = materialize_tensor(entries[key])
    materialize_module(module)


def eagerly(construct: Callable[[], Any]) -> Any:
    """The oracle: call the constructor."""
    return construct()


def check(program: Program, call: Callable[[Callable[[], Any]], Any] | None = None) -> None:
    """Fail unless `program` through `call`, `deferred_init` by default, ends as the eager run."""
    eager = run(program, eagerly)
    deferred = run(program, call or deferred_init)
    assert deferred.states == eager.states, "a generator is not where eager leaves it"
    materialize_in_random_order(deferred.values, random.Random(program.seed))
    assert list(eager.values) == list(deferred.values), "other names"
    for name, value in eager.values.items():
        if not isinstance(value, (torch.Tensor, nn.Module)):
            assert repr(deferred.values[name]) == repr(value), f"{name} read another value"
    assert_equal(eager.values, deferred.values)
    _compare_gradients(eager.values, deferred.values)


def _compare_gradients(eager: dict[str, Any], deferred: dict[str, Any]) -> None:
    here, there = ([f.tensor for f in walk(values).values()] for values in (eager, deferred))
    if not any(t.grad_fn is not None for t in here):
        return
    try:
        expected = gradients(*_ends(here))
    except RuntimeError:  # saved values were overwritten, or nothing leads to a leaf
        return
    coarse = any(t.is_floating_point() and t.element_size() == 2 for t in here)
    for mine, other in zip(expected, gradients(*_ends(there))):
        assert (mine is None) == (other is None), "a leaf is not in the graph"
        assert mine is None or _close(mine, other, coarse), f"gradient {other}, in eager {mine}"


def _close(mine: torch.Tensor, other: torch.Tensor, coarse: bool) -> bool:
    """Tell whether gradients agree; the engine adds them up in the order the nodes were made."""
    tolerance = 1e-2 if coarse else 1e-4
    return torch.allclose(mine, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _ends(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outputs = [t for t in tensors if t.grad_fn is not None]
    return outputs, [t for t in tensors if t.is_leaf and t.requires_grad]


def _saves_what_changes(program: Program) -> bool:
    """Tell whether eager gradients come from values that were written after they were saved."""
    found = []
    for save in (lambda t: t, lambda t: t.detach().clone()):
        with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t):
            tensors = [f.tensor for f in walk(run(program, eagerly).values).values()]
            found.append(gradients(*_ends(tensors)))
    return any(a is not None and not _close(a, b, coarse=False) for a, b in zip(*found))


def fails(program: Program) -> str:
    """Why the deferred run differs; nothing if it does not, or if two eager runs differ as well."""
    try:
        check(program)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if REFUSED.search(reason):
            return ""
        if "gradient" in reason and _saves_what_changes(program):
            return ""
    else:
        return ""
    try:
        check(program, eagerly)
    except Exception:
        return ""
    return reason


def repaired(program: Program) -> Program | None:
    """Delete what becomes an accident in a shortened program; nothing if a rule forbids it."""
    rules, space, parts = grammar.Rules(), grammar.names(), []
    dtype = torch.get_default_dtype()
    _seed(program.seed)
    try:
        for part in (program.before, program.inside, program.after):
            if len(parts) == 1:
                outer = set(space)
                rules.construct(space)
            if len(parts) == 2:
                kept = tuple(name for name in program.kept if name in space)
                space = {k: v for k, v in space.items() if k in outer or k in kept}
                rules.after = True
            parts.append([])
            for line in map(grammar.bare, part):
                if rules.forbid(line, space):
                    return None
                parts[-1].append(rules.run(line, space))
    except Exception:
        return None
    finally:
        torch.set_default_dtype(dtype)
    before, inside, after = map(tuple, parts)
    return Program(before, inside, kept, after, program.seed)


def shrink(program: Program) -> Program:
    """Drop statements and kept names one by one while the program still fails."""
    shorter = True
    while shorter:
        shorter = False
        for part in ("after", "inside", "kept", "before"):
            for index in reversed(range(len(getattr(program, part)))):
                rest = getattr(program, part)
                smaller = repaired(program._replace(**{part: rest[:index] + rest[index + 1 :]}))
                if smaller and fails(smaller):
                    program, shorter = smaller, True
    return program
