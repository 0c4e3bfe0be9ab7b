"""Jumps against really drawing, and the constants behind them computed afresh."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from torchcompat._random import mt19937
from torchcompat._random.mt19937 import jump

HUGE = 10**13


def generator(seed: int = 1, drawn: int = 0, normal: bool = False) -> torch.Generator:
    """A generator that has drawn so many numbers and, if asked, keeps half a pair of normals."""
    made = torch.Generator().manual_seed(seed)
    torch.empty(drawn).uniform_(generator=made)
    if normal:
        torch.empty(1).normal_(generator=made)
    return made


def after_drawing(state: torch.Tensor, draws: int) -> torch.Tensor:
    made = torch.Generator()
    made.set_state(state)
    while draws:
        part = min(draws, 1 << 22)
        torch.empty(part).uniform_(generator=made)
        draws -= part
    return made.get_state()


STARTS = {
    "as torch makes it": torch.Generator(),
    "just seeded": generator(7),
    "one drawn": generator(7, 1),
    "within a block": generator(7, 1000),
    "one before the end of a block": generator(7, 623),
    "at the end of a block": generator(7, 2 * 624),
    "at the start of a block": generator(7, 2 * 624 + 1),
    "with a cached normal": generator(7, 99, normal=True),
}


AT_IMPORT = {
    draws: jump(STARTS["within a block"].get_state(), draws) for draws in (1001, 2 * 10**9)
}


@pytest.fixture(params=STARTS.values(), ids=STARTS)
def state(request):
    return request.param.get_state()


@pytest.fixture
def always_far(monkeypatch):
    """Let even a jump of a few blocks go by polynomial."""
    monkeypatch.setattr(mt19937, "_NEAR", 624)


SHORT = [625, 626, 1247, 1248, 1249, 1871, 19936, 19937, 19938, 39999, 100_000]


@pytest.mark.parametrize("draws", [0, 1, 2, 623, 624, *SHORT])
def test_short_jumps_draw(state, draws):
    assert torch.equal(jump(state, draws), after_drawing(state, draws))


@pytest.mark.parametrize("draws", SHORT)
def test_polynomials_are_exact_at_every_start(state, draws, always_far):
    assert torch.equal(jump(state, draws), after_drawing(state, draws))


@pytest.mark.parametrize("seed", range(4))
def test_long_jumps_equal_drawing(seed):
    chance = random.Random(seed)
    state = generator(seed, chance.randrange(2000), normal=True).get_state()
    draws = mt19937._NEAR + chance.randrange(1 << 25)
    assert torch.equal(jump(state, draws), after_drawing(state, draws))


def test_the_change_of_method_leaves_no_seam(state):
    for draws in range(mt19937._NEAR - 1, mt19937._NEAR + 3):
        assert torch.equal(jump(state, draws), after_drawing(state, draws))


@pytest.mark.parametrize("seed", range(6))
def test_jumps_compose(state, seed):
    chance = random.Random(seed)
    first, second = chance.randrange(HUGE // 2), chance.randrange(HUGE // 2)
    assert torch.equal(jump(jump(state, first), second), jump(state, first + second))
    # By way of really drawing, so that an error common to both sides shows.
    near = chance.randrange(1, 5000)
    assert torch.equal(
        after_drawing(jump(state, first), near), jump(after_drawing(state, near), first)
    )


def test_every_later_draw_is_the_same(state):
    draws = 3_000_017
    jumped, drawn = torch.Generator(), torch.Generator()
    jumped.set_state(jump(state, draws))
    drawn.set_state(after_drawing(state, draws))
    for make in (
        lambda g: torch.randn(5, generator=g),
        lambda g: torch.rand(700, generator=g, dtype=torch.float64),
        lambda g: torch.randperm(1000, generator=g),
        lambda g: torch.randn(1, generator=g),
        lambda g: torch.randn(999, generator=g),
    ):
        assert torch.equal(make(jumped), make(drawn))
    assert torch.equal(jumped.get_state(), drawn.get_state())
    assert jumped.initial_seed() == drawn.initial_seed()


def test_nothing_given_or_visible_is_changed():
    state = generator(3, 5, normal=True).get_state()
    kept, visible = state.clone(), torch.get_rng_state()
    for draws in (0, 10, 10**9):
        assert jump(state, draws).data_ptr() != state.data_ptr()
    assert torch.equal(state, kept)
    assert torch.equal(torch.get_rng_state(), visible)


def test_negative_distances_are_refused():
    with pytest.raises(ValueError, match="cannot jump back by 3 draws"):
        jump(generator().get_state(), -3)


@pytest.fixture(params=["dtype", "device"])
def other_default(request):
    """Whatever makes factory functions give something else than CPU tensors of float32."""
    if request.param == "device":
        if not hasattr(torch, "set_default_device"):
            pytest.skip("torch 2.0 brought default devices")
        with torch.device("meta"):
            yield
    else:
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


def test_defaults_do_not_matter(other_default):
    mt19937._plan.cache_clear()
    for draws, expected in AT_IMPORT.items():
        assert torch.equal(jump(STARTS["within a block"].get_state(), draws), expected)


def test_threads_may_jump_at_once():
    state = generator(11).get_state()
    distances = [10**10 + 10**7 * (i % 5) for i in range(20)]
    expected = {draws: jump(state, draws) for draws in set(distances)}
    mt19937._plan.cache_clear()
    wrong = []

    def work(mine):
        wrong.extend(
            draws for draws in mine if not torch.equal(jump(state, draws), expected[draws])
        )

    threads = [threading.Thread(target=work, args=(distances[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_polynomials_kept_are_bounded():
    state = generator().get_state()
    mt19937._plan.cache_clear()
    for draws in (10**9, 10**9, 10**9 + 1, 2 * 10**9):
        jump(state, draws)
    cache = mt19937._plan.cache_info()
    assert cache.misses == 2  # a distance is known again, also from another place in its block
    assert cache.maxsize is not None


def berlekamp_massey(bits: list[int]) -> int:
    """The shortest linear recurrence of a sequence, as a polynomial over GF(2).

    Euclid's algorithm on x**n and the sequence as a polynomial, stopped half way.
    """
    rest, other_rest = 1 << len(bits), int("".join(map(str, bits)), 2)
    factor, other_factor = 0, 1
    while other_rest.bit_length() > len(bits) // 2:
        while rest.bit_length() >= other_rest.bit_length():
            shift = rest.bit_length() - other_rest.bit_length()
            rest ^= other_rest << shift
            factor ^= other_factor << shift
        rest, other_rest = other_rest, rest
        factor, other_factor = other_factor, factor
    return other_factor


@pytest.mark.parametrize("bit", [0, 13, 30])
def test_phi_is_what_a_real_stream_obeys(bit):
    numbers = torch.empty(2 * 19937, dtype=torch.int64).random_(
        1 << 31, generator=generator(bit, 700)
    )
    phi = berlekamp_massey(((numbers >> bit) & 1).tolist())
    assert phi.bit_length() - 1 == mt19937._DEGREE == 19937
    assert bin(phi).count("1") == 135
    assert phi == mt19937._times_phi(1)


@pytest.mark.parametrize("seed", range(5))
def test_remainders_by_phi(seed):
    chance = random.Random(seed)
    phi = mt19937._times_phi(1)
    quotient, rest = chance.getrandbits(19936), chance.getrandbits(19937)
    product = 0
    for place in range(phi.bit_length()):
        if phi >> place & 1:
            product ^= quotient << place
    assert mt19937._times_phi(quotient) == product
    assert mt19937._remainder(product ^ rest) == rest


@pytest.mark.parametrize("exponent", [0, 1, 2, 19936, 19937, 19938, 16383, 16384, 50_001])
def test_powers_by_squaring_equal_powers_by_steps(exponent):
    phi, power = mt19937._times_phi(1), 1
    for _ in range(exponent):
        power <<= 1
        if power >> 19937:
            power ^= phi
    assert mt19937._power(exponent) == power


def test_the_layout_of_the_state():
    seeded = generator(12345)
    fields = seeded.get_state().view(torch.int64)
    assert fields.numel() == 632
    assert fields[0] == 12345
    assert fields[3] == 12345  # word 0 of MT19937 is the seed
    for drawn in range(1, 700):
        torch.empty(1).uniform_(generator=seeded)
        fields = seeded.get_state().view(torch.int32)
        read = (drawn - 1) % 624 + 1
        assert (int(fields[mt19937.LEFT]), int(fields[mt19937._NEXT])) == (625 - read, read)
        assert not fields[mt19937._WORDS.start + 1 : mt19937._WORDS.stop : 2].any()
