"""Predicted draws against what the generator of the running torch really does."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchcompat import _gate
from torchcompat._random import draws
from torchcompat._random.draws import Spending, predict
from torchcompat._random.streams import spend

aten = torch.ops.aten

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ALL = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)

random_from = getattr(aten.random_, "from")
# Operators on a tensor, the arguments behind it, and the dtypes whose draws must be known.
OPERATORS = {
    "normal_": (aten.normal_.default, (0.0, 0.02), (*FLOATS, *COMPLEX)),
    "normal_ by integers": (aten.normal_.default, (0, 1), (*FLOATS, *COMPLEX)),
    "normal_ std 0": (aten.normal_.default, (1.0, 0.0), FLOATS),
    "normal_ defaults": (aten.normal_.default, (), FLOATS),
    "uniform_": (aten.uniform_.default, (-0.1, 0.1), FLOATS),
    "uniform_ point": (aten.uniform_.default, (0.3, 0.3), FLOATS),
    "uniform_ wide": (aten.uniform_.default, (-3.0, 200.0), FLOATS),
    "random_": (aten.random_.default, (), (*FLOATS, *INTEGERS, torch.bool)),
    "random_ to 10": (aten.random_.to, (10,), (*FLOATS, *INTEGERS)),
    "random_ to 1": (aten.random_.to, (1,), (*FLOATS, *INTEGERS, torch.bool)),
    "random_ -5 to 100": (random_from, (-5, 100), (*FLOATS, *INTEGERS[:4])),
    "random_ to 2**28 - 1": (random_from, (0, 2**28 - 1), (torch.int64, torch.int32)),
    "random_ to 2**28": (random_from, (0, 2**28), (torch.int64, torch.int32)),
    "random_ to 2**32 - 1": (random_from, (0, 2**32 - 1), (torch.int64,)),
    "random_ to 2**32": (random_from, (0, 2**32), (torch.int64,)),
    "random_ over 2**32": (random_from, (-(2**31), 2**31 + 1), (torch.int64,)),
    "random_ from 0": (random_from, (0, None), (torch.float32, *INTEGERS)),
    "random_ from least": (random_from, (-(2**63), None), (torch.int64,)),
    "bernoulli_": (aten.bernoulli_.float, (0.3,), (*FLOATS, *INTEGERS, torch.bool)),
    "bernoulli_ never": (aten.bernoulli_.float, (0.0,), FLOATS),
    "bernoulli_ always": (aten.bernoulli_.float, (1.0,), FLOATS),
    "exponential_": (aten.exponential_.default, (1.5,), FLOATS),
    "geometric_": (aten.geometric_.default, (0.3,), (*FLOATS, *INTEGERS)),
    "log_normal_": (aten.log_normal_.default, (0.0, 1.0), FLOATS),
    "cauchy_": (aten.cauchy_.default, (0.0, 1.0), FLOATS),
    "bernoulli": (aten.bernoulli.default, (), FLOATS),
    "bernoulli p": (aten.bernoulli.p, (0.3,), (*FLOATS, *INTEGERS, torch.bool)),
    "normal tensor": (aten.normal.Tensor_float, (0.5,), FLOATS),
    "native_dropout": (aten.native_dropout.default, (0.4, True), FLOATS),
    "native_dropout p 0": (aten.native_dropout.default, (0.0, True), FLOATS),
    "native_dropout idle": (aten.native_dropout.default, (0.4, False), FLOATS),
}

SIZES = [0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 100, 625, 800, 4095, 32767, 32769, 65536]
SIZES += [100_003]


def permuted(*shape: int):
    return lambda dtype: torch.empty(shape, dtype=dtype).permute(*reversed(range(len(shape))))


# Tensors of each layout: how to make one of a dtype.
TENSORS = {
    **{f"contiguous {n}": lambda dtype, n=n: torch.empty(n, dtype=dtype) for n in SIZES},
    "contiguous 3 x 1 x 50": lambda dtype: torch.empty(3, 1, 50, dtype=dtype),
    "scalar": lambda dtype: torch.empty((), dtype=dtype),
    "part of a larger one": lambda dtype: torch.empty(90, 50, dtype=dtype)[1:30],
    **{
        f"permuted {shape}": permuted(*shape) for shape in [(2, 2), (3, 5), (4, 8), (7, 7), (8, 80)]
    },
    "permuted 3-D": permuted(4, 5, 60),
    "permuted, large": permuted(331, 211),
    "channels last": lambda dtype: torch.empty(8, 5, 3, 3, dtype=dtype).to(
        memory_format=torch.channels_last
    ),
    **{
        f"gapped {n}": lambda dtype, n=n: torch.empty(n, 3, dtype=dtype)[:, 1]
        for n in (2, 15, 16, 33, 64, 1001, 40_000)
    },
    "gapped rows": lambda dtype: torch.empty(20, 50, dtype=dtype)[:, :17],
    "permuted and empty": lambda dtype: torch.empty(0, 3, dtype=dtype).t(),
    "gapped and permuted": lambda dtype: torch.empty(20, 50, dtype=dtype)[:, ::2].t(),
}


def starts() -> list[torch.Tensor]:
    """A state amid a block and one with a cached normal."""
    generator = torch.Generator().manual_seed(99)
    torch.empty(1000).uniform_(generator=generator)
    plain = generator.get_state()
    torch.empty(1).normal_(generator=generator)
    return [plain, generator.get_state()]


STARTS = starts()


def after_calling(state, func, args, kwargs):
    """The state of the generator after a real call."""
    if "generator" in [argument.name for argument in func._schema.arguments]:
        generator = torch.Generator()
        kwargs = {**kwargs, "generator": generator}
    else:
        generator = torch.default_generator
    generator.set_state(state)
    func(*args, **kwargs)
    return generator.get_state()


def halves_work(func, dtype) -> bool:
    """Whether torch has the kernel: bernoulli of float16 came with 2.2."""
    return dtype != torch.float16 or "bernoulli" not in str(func) or _gate.running() >= (2, 2)


def check(func, args, kwargs, known=True):
    """The prediction holds in a real call, or there is none because such a call is refused."""
    answer = predict(func, args, kwargs)
    for state in STARTS:
        try:
            after = after_calling(state, func, args, kwargs)
        except (RuntimeError, NotImplementedError):
            assert answer is None or args[0].numel() == 0
            assert not known
            return
        if answer is None:
            assert not known
            return
        assert torch.equal(after, spend(state, answer))


@pytest.fixture(autouse=True)
def fresh():
    """Every test measures for itself, on one thread: waiting for others would take most of it."""
    draws._look_up.cache_clear()
    draws._laws.clear()
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.filterwarnings("ignore:.*is out of bounds")
def test_every_operator_dtype_layout_and_size(name):
    func, more, known = OPERATORS[name]
    for dtype in ALL:
        expected = dtype in known and halves_work(func, dtype)
        for make in list(TENSORS.values())[:: 1 if expected else 9]:
            check(func, (make(dtype).fill_(0.5), *more), {}, expected)


def test_tensors_as_parameters_of_distributions():
    for dtype in FLOATS:
        for make in TENSORS.values():
            half, kwargs = make(dtype).fill_(0.5), {}
            check(aten.normal.float_Tensor, (0.0, half), kwargs)
            check(aten.normal.Tensor_Tensor, (half, half), kwargs)
            known = halves_work(aten.bernoulli_.Tensor, dtype)
            check(aten.bernoulli_.Tensor, (make(dtype), half), kwargs, known)


class Described:
    """All that a prediction may look at."""

    def __init__(self, shape, dtype=torch.float32, stride=None):
        self.shape, self.dtype = torch.Size(shape), dtype
        self._stride = torch.empty(shape, device="meta").stride() if stride is None else stride

    def stride(self):
        return self._stride

    def numel(self):
        return self.shape.numel()


@pytest.mark.parametrize("name", ["normal_", "uniform_", "bernoulli_", "random_ over 2**32"])
def test_descriptions_suffice_and_huge_sizes_do_not_overflow(name):
    func, more, dtypes = OPERATORS[name]
    for dtype in filter(partial(halves_work, func), dtypes):
        for residue in (0, 5):
            near, far = ((16 << place) + residue for place in (10, 33))
            check(func, (torch.empty(near, dtype=dtype), *more), {})
            one, two, huge = (
                predict(func, (Described((numel,), dtype), *more), {})
                for numel in (near, 2 * near - residue, far)
            )
            times = (far - near) // (near - residue)
            assert huge == Spending(
                *(a + times * (b - a) for a, b in zip(one, two)),
            )
            assert huge.draws > 2**31 or name == "bernoulli_"


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.multinomial.default, (torch.ones(10), 3)),
        (aten.poisson.default, (torch.ones(10),)),
        (aten._standard_gamma.default, (torch.ones(10),)),
        (aten._sample_dirichlet.default, (torch.ones(10),)),
        (aten.binomial.default, (torch.ones(10), torch.ones(10))),
        (aten.rrelu_with_noise.default, (torch.ones(10), torch.ones(10), 0.1, 0.3, True)),
        (aten.add.Tensor, (torch.ones(10), torch.ones(10))),
        (aten.random_.to, (torch.ones(100, dtype=torch.float16), 60000)),
        (aten.rand.default, ([10],)),
        (aten.rand_like.default, (torch.ones(10),)),
        (aten.randperm.default, (10,)),
        (aten.normal_.default, (torch.ones(1).expand(100),)),
        (aten.bernoulli.default, (torch.ones(1).expand(100),)),
        (aten.normal.Tensor_Tensor, (torch.ones(4, 1), torch.ones(5))),
        (aten.normal_.default, (torch.ones(40, dtype=torch.int64),)),
        (aten.normal_.default, (torch.ones(40), 0.0, -1.0)),
    ],
    ids=str,
)
def test_what_cannot_be_known(func, args):
    assert predict(func, args, {}) is None


def test_other_arguments_by_name_are_not_known():
    assert predict(aten.bernoulli.default, (torch.ones(3),), {"generator": None}) == Spending(3)
    assert predict(aten.bernoulli.out, (torch.ones(3),), {"out": torch.empty(3)}) is None


@pytest.mark.parametrize("threads", [2, 5])
def test_the_number_of_threads_does_not_matter(threads):
    calls = [
        (func, (make(dtype).fill_(0.5), *more))
        for func, more, dtypes in OPERATORS.values()
        for dtype in dtypes[:2]
        for make in (TENSORS["contiguous 100003"], TENSORS["permuted, large"])
    ]
    answers = [predict(func, args, {}) for func, args in calls]
    torch.set_num_threads(threads)
    for answer, (func, args) in zip(answers, calls):
        check(func, args, {})
        draws._look_up.cache_clear()
        draws._laws.clear()
        assert predict(func, args, {}) == answer


def test_measuring_leaves_no_trace(capfd):
    before = torch.get_rng_state()
    own = torch.Generator()
    kept = own.get_state()
    for func, more, dtypes in OPERATORS.values():
        for dtype in dtypes:
            for n in (5, 5000):
                kwargs = {"generator": own} if func is aten.normal_.default else {}
                predict(func, (torch.empty(n, dtype=dtype), *more), kwargs)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(own.get_state(), kept)
    assert capfd.readouterr() == ("", "")


def test_arguments_are_not_written():
    tensor = torch.full((50,), 3.0)
    for func, more, _ in OPERATORS.values():
        predict(func, (tensor, *more), {})
    assert bool((tensor == 3).all())


def test_a_failed_measurement_gives_the_default_generator_back():
    before = torch.get_rng_state()
    assert predict(aten.native_dropout.default, (torch.empty(9), 7.0, True), {}) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_of_the_program_take_no_part():
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    tensor = torch.empty(50)
    expected = predict(aten.normal_.default, (tensor,), {})
    for cached in (draws._look_up.cache_clear, draws._laws.clear, draws._starts.cache_clear):
        cached()
    with Refusing():
        answer = predict(aten.normal_.default, (tensor,), {})
    assert expected is not None
    assert answer == expected


def test_threads_may_ask_at_once():
    calls = [
        (func, (torch.empty(n), *more))
        for func, more, dtypes in OPERATORS.values()
        if torch.float32 in dtypes
        for n in (3, 100, 101)
    ]
    expected = [predict(func, args, {}) for func, args in calls]
    draws._look_up.cache_clear()
    draws._laws.clear()
    answers = {}

    def ask(which):
        answers[which] = [predict(func, args, {}) for func, args in calls]

    threads = [threading.Thread(target=ask, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(answers.values()) == [expected] * 4


def test_answers_are_kept_within_bounds():
    tensor = torch.empty(40)
    for place in range((1 << 14) + 10):
        predict(aten.uniform_.default, (tensor, 0.0, 1.0 + place), {})
    assert draws._look_up.cache_info().currsize <= 1 << 14
    assert len(draws._laws) == 2  # up to 1, and above
