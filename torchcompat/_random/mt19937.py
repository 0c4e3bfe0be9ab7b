"""Jump torch's CPU generator ahead without drawing.

MT19937's words are linear over GF(2) in 19937 bits of state: there is one polynomial `phi` of that
degree with `sum(phi[i] * word[k + i]) == 0` for every k, so that `p = t**n mod phi` gives
`word[n + j] == sum(p[i] * word[i + j])`. Far words are sums of near ones, and `p` takes log2(n)
squarings: Haramoto, Matsumoto, Nishimura, Panneton and L'Ecuyer, "Efficient Jump Ahead for
F2-Linear Random Number Generators", INFORMS Journal on Computing 20 (2008).

- A jump goes by whole twists (624 words) and then sets the read position, so that a polynomial
  depends on the number of twists alone and equal distances share it wherever they start.
- The near words are those behind the present block: in the block that seeding makes, the low 31
  bits of word 0 are no part of the state and do not obey the recurrence. They are taken as torch
  puts them out, since tempering is linear too; only the result is untempered.
- Polynomials are Python integers, bit i for t**i. Words are summed by torch, in pieces below the
  size at which it would wake its other threads: waiting for those costs more than the sum.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import zip_longest

import torch

# A state in bytes: where the words begin, the cached normals behind them, and whether one is there.
BYTES, WORDS, NORMALS, CACHED = 5056, 24, 5016, 5040
# Its int32 fields: what is left of the block and the next to read; of a word's two, one is zero.
LEFT, _NEXT, _WORDS = 2, 4, slice(WORDS // 4, NORMALS // 4, 2)

_BLOCK = 624
_DEGREE = 19937
# Up to this many draws, drawing is cheaper than a sum over near words and its polynomial.
_NEAR = 1 << 20
_SCRATCH = 1 << 15

# The sum takes six coefficients (two octal digits) at a time, each six with a window of the stream
# that holds the six blocks they stand for. Behind the stream lies a window of zeros.
_GROUP = 6
_GROUPS = -(-_DEGREE // _GROUP)
_WINDOW = _BLOCK + _GROUP
_SPAN = _GROUP * (_GROUPS - 1) + _WINDOW
_BLANK = -(-_SPAN // _GROUP)


def jump(state: torch.Tensor, draws: int) -> torch.Tensor:
    """Return the state that drawing `draws` 32-bit numbers from a CPU generator leads to.

    `state` is what `torch.Generator.get_state()` gives (uint8, 5056 bytes), and left as it is. The
    result equals, byte for byte, the state after really drawing; seed and cached normals keep their
    values. Raises `ValueError` for a negative count.
    """
    if draws < 0:
        raise ValueError(f"cannot jump back by {-draws} draws")
    if draws <= _NEAR:
        return _draw(state, draws) if draws else state.clone()
    result = state.clone()
    fields = result.view(torch.int32)
    twists, read = divmod(_BLOCK - int(fields[LEFT]) + draws, _BLOCK)
    fields[LEFT], fields[_NEXT] = 1, _BLOCK
    fields[_WORDS] = _untemper(_sum(_next_outputs(result), _plan(twists - 1)))
    fields[LEFT], fields[_NEXT] = _BLOCK - read, read + 1
    return result


def _draw(state: torch.Tensor, draws: int) -> torch.Tensor:
    """Jump by really drawing from a private generator."""
    generator = torch.Generator(device="cpu").set_state(state)
    for start in range(0, draws // 2, _SCRATCH):
        _draw_pairs(generator, min(_SCRATCH, draws // 2 - start))
    torch.empty(draws % 2, dtype=torch.int32, device="cpu").random_(generator=generator)
    return generator.get_state()


def _draw_pairs(generator: torch.Generator, pairs: int) -> torch.Tensor:
    """Draw int64 numbers over their whole range: two outputs each, the first in the high half."""
    numbers = torch.empty(pairs, dtype=torch.int64, device="cpu")
    return numbers.random_(-(1 << 63), None, generator=generator)


def _next_outputs(state: torch.Tensor) -> torch.Tensor:
    """The outputs from a state on, as many as a sum needs, and zeros."""
    generator = torch.Generator(device="cpu").set_state(state)
    halves = _draw_pairs(generator, _SPAN // 2).view(torch.int32).view(-1, 2)
    outputs = torch.zeros(_GROUP * _BLANK + _WINDOW, dtype=torch.int32, device="cpu")
    outputs[:_SPAN] = halves.flip(1).view(-1)
    return outputs


def _sum(outputs: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """Sum the blocks of `outputs` that `plan` chooses."""
    # Windows with the same six coefficients first, into a row for each of the 64 values.
    windows = outputs.view(torch.int64).as_strided((_BLANK + 1, _WINDOW // 2), (_GROUP // 2, 1))
    rows = windows.index_select(0, plan[0])
    for places in plan[1:]:
        rows ^= windows.index_select(0, places)
    # Then the rows with their shifts, one coefficient at a time.
    total = torch.zeros(_BLOCK, dtype=torch.int32, device="cpu")
    for shift in reversed(range(_GROUP)):
        without, having = rows.chunk(2)
        rows = without ^ having
        while len(having) > 1:
            upper, lower = having.chunk(2)
            having = upper ^ lower
        total ^= having[0].view(torch.int32)[shift : shift + _BLOCK]
    return total


def _untemper(outputs: torch.Tensor) -> torch.Tensor:
    """The words of the state that these outputs (int32) come from."""
    words = outputs.to(torch.int64) & 0xFFFFFFFF
    words ^= words >> 18
    words ^= words << 15 & 0xEFC60000
    partial = words
    for _ in range(4):
        partial = words ^ (partial << 7 & 0x9D2C5680)
    return (partial ^ partial >> 11 ^ partial >> 22).to(torch.int32)


@lru_cache(maxsize=512)
def _plan(twists: int) -> torch.Tensor:
    """For a jump by `twists` blocks, column c lists the windows of the sixes that equal c.

    Columns are filled up with the window of zeros. Column 0 adds nothing: it is empty.
    """
    digits = format(_power(_BLOCK * twists), f"0{2 * _GROUPS}o")
    places: dict[str, list[int]] = {format(six, "02o"): [] for six in range(1 << _GROUP)}
    for place, six in enumerate(reversed(re.findall("..", digits))):
        places[six].append(place)
    places["00"] = []
    rows = list(zip_longest(*places.values(), fillvalue=_BLANK))
    return torch.tensor(rows, dtype=torch.int32, device="cpu")


def _power(exponent: int) -> int:
    """t**exponent mod phi."""
    result = 1
    for bit in format(exponent, "b"):
        # Read in base 4, the binary digits of a polynomial are those of its square.
        result = _remainder(int(format(result, "b"), 4) << int(bit))
    return result


def _remainder(polynomial: int) -> int:
    """The remainder by phi of a polynomial of degree below 2 * 19937."""
    quotient = polynomial >> _DEGREE
    for shifts in _reciprocal() if quotient else ():
        summand = quotient
        for shift in shifts:
            quotient ^= summand >> shift
    return polynomial ^ _times_phi(quotient)


def _times_phi(polynomial: int) -> int:
    """Multiply by phi = a * (b**31 + m[0] * b**30 + ... + m[30]) + m[31].

    a is t**624 + t**397, b is t**623 + t**396 and m are the bits of the twist's matrix: Matsumoto
    and Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998), appendix A.
    """
    result = polynomial
    for place in range(31):
        result <<= 396
        result ^= result << 227
        if 0x9908B0DF >> place & 1:
            result ^= polynomial
    result <<= 397
    return polynomial ^ result ^ result << 227


@lru_cache(maxsize=None)
def _reciprocal() -> list[tuple[int, ...]]:
    """The shifts that divide by phi, which seen from the top is 1 + f with f small.

    Over GF(2) the series 1 / (1 + f) is the product of all 1 + f**(2**k), and squaring doubles
    exponents.
    """
    shifts = [match.start() for match in re.finditer("1", format(_times_phi(1), "b"))][1:]
    return [tuple(s << k for s in shifts if s << k < _DEGREE) for k in range(14)]
