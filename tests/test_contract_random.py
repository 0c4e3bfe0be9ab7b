"""C2: generators stand where eager construction leaves them, and materialising moves none."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import nn

from tests.equality import (
    ORDERS,
    assert_equal,
    both,
    in_threads,
    materialize,
    still_generator,
    verify,
    verify_values,
)
from tests.zoo import habits, language
from torchcompat.deferred_init import deferred_init, materialize_module, materialize_tensor


def after(fn, *args, seed=3):
    """What the program draws after eager and after deferred construction."""
    found = []
    for call in (fn, lambda *a: deferred_init(fn, *a)):
        torch.manual_seed(seed)
        kept = call(*args)
        found.append((torch.rand(3), torch.randn(20), torch.randperm(9), torch.get_rng_state()))
        del kept
    return found


@pytest.mark.parametrize(
    "build",
    [
        language.GPT,
        language.Llama,
        habits.every_random_op,
        habits.seeds_inside,
        habits.depth_by_lot,
    ],
    ids=lambda build: build.__name__,
)
def test_the_program_draws_the_same_afterwards(build):
    eager, deferred = after(build)
    assert all(torch.equal(a, b) for a, b in zip(eager, deferred))


DRAWS = {
    "normal": lambda n: torch.empty(n).normal_(),
    "normal, double": lambda n: torch.empty(n, dtype=torch.float64).normal_(),
    "normal, bfloat16": lambda n: torch.empty(n, dtype=torch.bfloat16).normal_(),
    "normal, strided": lambda n: torch.empty(2 * n)[::2].normal_(),
    "normal, permuted": lambda n: torch.empty(n, 3).t().normal_(),
    "normal of tensors": lambda n: torch.normal(torch.zeros(n), torch.ones(n)),
    "uniform": lambda n: torch.empty(n).uniform_(),
    "uniform, double": lambda n: torch.empty(n, dtype=torch.float64).uniform_(),
    "uniform, bfloat16": lambda n: torch.empty(n, dtype=torch.bfloat16).uniform_(),
    "uniform, strided": lambda n: torch.empty(2 * n)[::2].uniform_(),
    "complex": lambda n: torch.randn(n, dtype=torch.complex64),
    "random": lambda n: torch.empty(n).random_(),
    "random, wide": lambda n: torch.empty(n, dtype=torch.int64).random_(-(2**40), 2**40),
    "random, byte": lambda n: torch.empty(n, dtype=torch.uint8).random_(),
    "randint": lambda n: torch.randint(0, 7, (n,)),
    "randperm": torch.randperm,
    "bernoulli": lambda n: torch.empty(n).bernoulli_(0.3),
    "bernoulli of a tensor": lambda n: torch.bernoulli(torch.full((n,), 0.3)),
    "exponential": lambda n: torch.empty(n).exponential_(),
    "geometric": lambda n: torch.empty(n).geometric_(0.4),
    "log_normal": lambda n: torch.empty(n).log_normal_(),
    "cauchy": lambda n: torch.empty(n).cauchy_(),
    "multinomial": lambda n: torch.multinomial(torch.ones(5), n, replacement=True),
    "poisson": lambda n: torch.poisson(torch.full((n,), 2.0)),
    "gamma": lambda n: torch._standard_gamma(torch.full((n,), 2.0)),
    "dropout": lambda n: nn.functional.dropout(torch.ones(n), 0.4),
    "alpha dropout": lambda n: nn.functional.alpha_dropout(torch.ones(n), 0.4, training=True),
    "rrelu": lambda n: nn.functional.rrelu(-torch.ones(n), training=True),
    "trunc_normal": lambda n: nn.init.trunc_normal_(torch.empty(n), std=0.02),
    "trunc_normal, tight": lambda n: nn.init.trunc_normal_(torch.empty(n), a=-0.5, b=1.0),
    "orthogonal": lambda n: nn.init.orthogonal_(torch.empty(n, 3)),
    "sparse": lambda n: nn.init.sparse_(torch.empty(n, 3), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_kind_of_draw_at_every_small_size(name):
    """Sizes around the blocks of sixteen; a second draw behind each shows the position."""
    sizes = (1, 2, 5, 15, 16, 17, 31, 32, 40, 257)
    assert_equal(*_both_materialized(lambda: [(DRAWS[name](n), torch.randn(18)) for n in sizes]))


def _both_materialized(fn):
    pair = both(fn, seed=8)
    order = list(range(len(pair.deferred)))
    random.Random(4).shuffle(order)
    for index in order:
        pair.deferred[index] = materialize(pair.deferred[index])
    return pair


@pytest.mark.parametrize("name", [name for name in DRAWS if name not in ("orthogonal", "sparse")])
def test_dropped_draws_count(name):
    def build():
        DRAWS[name](33)
        first = torch.randn(5)
        DRAWS[name](20)
        return {"first": first, "second": torch.rand(5)}

    verify_values(build)


def test_large_draws_are_exact():
    def build():
        torch.randn(100_003)
        return {
            "normal": torch.randn(50_001),
            "uniform": torch.rand(70_007),
            "tail": torch.randn(3),
        }

    verify_values(build)


def test_cached_half_of_a_pair():
    """Below sixteen elements normal numbers come in pairs; the odd one waits for the next call."""

    def build():
        found = {"a": torch.randn(3), "b": torch.randn(2), "c": torch.randn(1)}
        torch.manual_seed(5)
        found["d"] = torch.randn(1)
        found["e"] = torch.randn(1)
        return found

    verify_values(build)
    torch.manual_seed(1)
    torch.randn(3)  # half a pair is waiting before the construction
    state = torch.get_rng_state()
    eager = torch.randn(4)
    torch.set_rng_state(state)
    deferred = deferred_init(torch.randn, 4)
    assert_equal(eager, materialize(deferred))


def test_construction_in_the_middle_of_a_stream():
    for used in (0, 1, 623, 624, 625, 2000):
        torch.manual_seed(12)
        torch.rand(used)
        state = torch.get_rng_state()
        eager = nn.Linear(20, 30)
        torch.set_rng_state(state)
        deferred = deferred_init(nn.Linear, 20, 30)
        assert_equal(eager.bias, materialize_tensor(deferred.bias))


def test_states_saved_inside_mean_the_same_outside():
    def build():
        first = torch.randn(4)
        state = torch.get_rng_state()
        return first, state, torch.randn(4)

    pair = both(build)
    _, state, later = pair.deferred
    torch.set_rng_state(state)
    assert_equal(pair.eager[2], torch.randn(4))
    assert_equal(pair.eager[2], materialize_tensor(later))


def test_states_that_leave_the_constructor_are_true_states():
    """They may be written to a checkpoint, so their bytes count."""

    def build(generator):
        torch.randn(30)
        torch.rand(5, generator=generator)
        return torch.get_rng_state(), generator.get_state(), torch.randn(3)

    pair = [
        call(build, torch.Generator().manual_seed(3))
        for call in (lambda fn, g: fn(g), deferred_init)
        if torch.manual_seed(1)
    ]
    for eager, deferred in zip(*pair):
        assert_equal(eager, materialize_tensor(deferred))


def test_states_saved_outside_are_set_inside():
    torch.manual_seed(77)
    state = torch.get_rng_state()

    def build():
        torch.set_rng_state(state)
        return torch.randn(6)

    verify(build)


def test_seed_functions_inside():
    def build():
        torch.manual_seed(torch.initial_seed() + 1)
        first = torch.randn(4)
        torch.default_generator.manual_seed(6)
        return {"first": first, "second": torch.randn(4), "seed": torch.initial_seed()}

    pair = verify(build)
    assert pair.deferred["seed"] == pair.eager["seed"]


def test_torch_seed_takes_a_fresh_seed():
    def build():
        torch.seed()
        return torch.randn(40)

    torch.manual_seed(0)
    tensor = deferred_init(build)
    seed = torch.initial_seed()
    torch.manual_seed(seed)
    assert_equal(torch.randn(40), materialize_tensor(tensor))


def test_forked_generator_inside_and_outside():
    def build():
        first = torch.randn(3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            inner = torch.randn(3)
        return {"first": first, "inner": inner, "last": torch.randn(3)}

    verify_values(build)
    torch.manual_seed(2)
    with still_generator(), torch.random.fork_rng(devices=[]):
        deferred = deferred_init(build)
    assert_equal(build(), materialize(deferred))


def test_explicit_generators_end_where_eager_leaves_them():
    def build(generator):
        layer = nn.Linear(7, 5)
        layer.weight.data.normal_(generator=generator)
        torch.rand(9, generator=generator)
        layer.bias.data.uniform_(generator=generator)
        torch.randperm(5, generator=generator)
        return layer

    ends, results = [], []
    for call in (build, lambda g: deferred_init(build, g)):
        generator = torch.Generator().manual_seed(31)
        torch.manual_seed(1)
        results.append(call(generator))
        ends.append(generator.get_state())
        generator.manual_seed(0)
    assert torch.equal(*ends)
    materialize_module(results[1])
    assert_equal(*results)


def test_generator_made_and_dropped_inside():
    def build():
        generator = torch.Generator()
        generator.manual_seed(3)
        first = torch.randn(20, generator=generator)
        clone = torch.Generator()
        clone.set_state(generator.get_state())
        return {"first": first, "second": torch.rand(4, generator=clone), "plain": torch.rand(4)}

    verify_values(build)


def test_materialising_does_not_touch_an_explicit_generator():
    generator = torch.Generator().manual_seed(5)
    deferred = deferred_init(torch.randn, 40, generator=generator)
    state = generator.get_state()
    materialize_tensor(deferred)
    assert torch.equal(generator.get_state(), state)


def test_generators_after_an_exception():
    def build(generator):
        torch.randn(21)
        torch.rand(5, generator=generator)
        raise KeyError("stop")

    found = []
    for call in (build, lambda g: deferred_init(build, g)):
        generator = torch.Generator().manual_seed(9)
        torch.manual_seed(4)
        with pytest.raises(KeyError):
            call(generator)
        found.append((torch.get_rng_state(), generator.get_state(), torch.randn(3)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_draws_recorded_after_the_construction_share_the_program_stream():
    """In-place draws on deferred tensors outside `deferred_init` use the numbers of that moment."""
    found = []
    for call in (nn.Linear, lambda *a: deferred_init(nn.Linear, *a)):
        torch.manual_seed(6)
        layer = call(6, 5)
        before = torch.rand(2)
        nn.init.normal_(layer.weight)
        between = torch.rand(2)
        layer.bias.data.uniform_(3, 4)
        found.append([layer, before, between, torch.rand(2)])
    materialize(found[1][0])
    assert_equal(*found)


@pytest.mark.parametrize("order", ORDERS)
def test_seeds_between_deferral_and_materialisation_change_nothing(order):
    pair = both(language.GPT, seed=21)
    torch.manual_seed(999)
    ORDERS[order](pair, random.Random(1))
    materialize(pair.deferred)
    assert_equal(*pair)


def test_two_constructions_side_by_side():
    """Deferred one after the other, materialised interleaved."""
    torch.manual_seed(0)
    eager = [language.GPT(), torch.rand(3), language.Llama(), torch.rand(3)]
    torch.manual_seed(0)
    deferred = [
        deferred_init(language.GPT),
        torch.rand(3),
        deferred_init(language.Llama),
        torch.rand(3),
    ]
    for pair in zip(deferred[2].modules(), deferred[0].modules()):
        for module in pair:
            materialize_module(module)
    materialize(deferred)
    assert_equal(eager, deferred)


def test_nested_deferral_is_one_stream():
    def inner():
        return nn.Linear(5, 4)

    def nested():
        first = deferred_init(inner)
        return nn.Sequential(first, deferred_init(inner), nn.Linear(4, 2))

    def plain():
        return nn.Sequential(inner(), inner(), nn.Linear(4, 2))

    torch.manual_seed(2)
    eager = plain()
    torch.manual_seed(2)
    deferred = deferred_init(nested)
    assert_equal(torch.rand(1), _after_eager(plain, seed=2))
    materialize(deferred)
    assert_equal(eager, deferred)


def _after_eager(fn, seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fn()
        return torch.rand(1)


def test_materialising_inside_a_construction():
    """A finished deferred model is materialised while another one is being recorded."""
    torch.manual_seed(2)
    eager = [nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)]
    torch.manual_seed(2)
    first = deferred_init(nn.Linear, 4, 3)

    def build():
        second = nn.Linear(3, 3)
        materialize_module(first)
        assert type(first.weight) is nn.Parameter
        return [second, nn.Linear(3, 2)]

    assert_equal(eager, [first, *materialize(deferred_init(build))])


def test_threads_materialise_at_once():
    pairs = [both(language.Llama, seed=n) for n in range(4)]
    state = torch.get_rng_state()
    in_threads([lambda pair=pair: materialize_module(pair.deferred) for pair in pairs])
    assert torch.equal(torch.get_rng_state(), state)
    for pair in pairs:
        assert_equal(*pair)


def test_another_thread_may_draw_while_one_materialises():
    """Its numbers are those of the visible generator, untouched by the work next to it."""
    pair = both(lambda: nn.ModuleList(nn.Linear(200, 200) for _ in range(20)))
    torch.manual_seed(1)
    expected = [torch.rand(50) for _ in range(200)]
    torch.manual_seed(1)
    drawn = []
    worker = threading.Thread(target=lambda: drawn.extend(torch.rand(50) for _ in range(200)))
    worker.start()
    materialize_module(pair.deferred)
    worker.join()
    assert_equal(*pair)
    assert_equal(expected, drawn)


def drawn_between():
    late = torch.bernoulli(torch.full((3,), 2.0))
    torch.randn(9)
    torch.manual_seed(3)
    torch.randn(2)
    return late


# What eager torch refuses at the call, for its values, and a recording only when they are read.
REFUSED = {
    "normal": lambda _: torch.normal(torch.zeros(3), -torch.ones(3)),
    "normal, many": lambda _: torch.normal(torch.zeros(20), -torch.ones(20)),
    "normal of drawn": lambda _: torch.normal(torch.randn(3), -torch.ones(3)),
    "bernoulli": lambda _: torch.bernoulli(torch.full((3,), 2.0)),
    "bernoulli, generator": lambda g: torch.bernoulli(torch.full((3,), 2.0), generator=g),
    "poisson": lambda _: torch.poisson(-torch.ones(3)),
    "multinomial": lambda _: torch.multinomial(torch.zeros(3), 1),
    "after one unknown": lambda _: torch.multinomial(torch.poisson(torch.ones(4)) * 0, 1),
    "more drawn before it is read": lambda _: drawn_between(),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("before", [False, True])
def test_what_failed_and_was_caught_has_drawn_what_it_draws_in_eager(name, before):
    """It counted as if it had run, and all that was drawn after it was other than in eager."""

    def build():
        own = torch.Generator().manual_seed(4)
        found = [torch.randn(33), torch.randn(3, generator=own)] if before else []
        try:
            found += REFUSED[name](own).tolist()
        except RuntimeError:
            found.append(torch.ones(1))
        return [*found, torch.randn(17), nn.Linear(5, 6), torch.randn(4, generator=own)]

    verify(build)


TRUNCATED_FIRST = """
import torch
from torch import nn
from torchcompat.deferred_init import deferred_init, materialize_tensor
from torchcompat._random import draws, streams

def construct():
    found = [nn.init.trunc_normal_(torch.zeros(35, 2), std=0.02)]
    for size in ((3, 5), (3, 3), (3,), (17,)):
        found += [torch.empty(size, dtype=d).normal_() for d in (None, torch.bfloat16)]
    return found

torch.manual_seed(0)
eager, state = construct(), torch.get_rng_state()
torch.manual_seed(0)
deferred = deferred_init(construct)
assert torch.equal(torch.get_rng_state(), state)
for mine, other in zip(eager, reversed([materialize_tensor(t) for t in deferred[::-1]])):
    assert torch.equal(mine, other)
plain = torch.ops.aten.normal_.default
assert draws.predict(plain, (eager[0], 0.0, 0.02), {}) == streams.Spending(86)
"""


def test_the_first_draw_of_a_process_may_be_truncated_normals(run_python):
    """What was measured on its behalf was recorded, and spoilt all later predictions."""
    run_python(TRUNCATED_FIRST)
