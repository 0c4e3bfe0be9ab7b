"""Jump torch's CPU generator ahead without drawing.

The generator is MT19937, whose words are linear over GF(2) in 19937 bits of state: there is one
polynomial `phi` of degree 19937 with `sum(phi[i] * word[k + i]) == 0` for every k, so with
`p = t**n mod phi` we have `word[n + j] == sum(p[i] * word[i + j])`. Far words are therefore sums of
near ones, and `p` costs about log2(n) squarings. The method is that of Haramoto, Matsumoto,
Nishimura, Panneton and L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number Generators",
INFORMS Journal on Computing 20 (2008).

Rules:
- A jump moves by whole twists (624 words) and then sets the read position, so that a polynomial
  depends on the number of twists alone and equal distances share it wherever they start.
- Near words are read from the block after the present one: in the seeded block the low 31 bits of
  word 0 are no part of the state and do not obey the recurrence.
- Near words are taken as torch puts them out. Tempering is linear and acts word by word, so sums
  of outputs are outputs, and only the 624 words of the result are untempered.
- Polynomials are Python integers, bit i for t**i; sums of words are taken by torch.
- Nothing here reads or moves a generator that anyone else can see.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import zip_longest

import torch

_BLOCK = 624
_DEGREE = 19937
_MASK = (1 << _DEGREE) - 1

# Below this many draws, drawing is cheaper than the sum over near words.
_NEAR = 1 << 19
_SCRATCH = 1 << 15

# The exponents of phi below its degree; tests/test_mt19937.py computes them afresh.
_EXPONENTS = tuple(
    int(exponent)
    for exponent in """
0 1189 1416 1585 1643 1870 2493 2773 3000 3227 3454 3681 3908 4135 4362 4753 5661 6337
6569 7129 7477 7525 7583 7752 7979 8206 9505 9901 9969 10128 10693 10761 10920 11089
11147 11157 11215 11321 11374 11384 11485 11611 11712 11717 11838 11881 11944 11997
12277 12335 12393 12504 12509 12620 12673 12731 12736 12789 12905 12958 12963 13137
13185 13190 13243 13301 13412 13528 13533 13639 13697 13760 13813 13866 14093 14151
14209 14320 14325 14436 14547 14552 14605 14721 14774 14779 14953 15001 15006 15059
15117 15228 15344 15349 15455 15513 15576 15629 15682 15909 15967 16025 16136 16141
16252 16363 16368 16421 16537 16590 16595 16817 16822 16875 16933 17044 17160 17271
17329 17445 17498 17725 17783 17841 17952 18068 18179 18237 18406 18633 18691 18860
19087 19314
""".split()
)

# Int32 places of the state's fields; each word occupies eight bytes.
_LEFT, _NEXT = 2, 4
_FIRST_WORD = 6

# The sum over near words takes eight coefficients at a time: `_CHUNKS` bytes of polynomial, each
# with a window of the stream that its eight shifted blocks fit in.
_CHUNKS = (_DEGREE + 7) // 8
_WINDOW = _BLOCK + 7
_SPAN = 8 * (_CHUNKS - 1) + _WINDOW
_BLANK = (_SPAN + 7) // 8


def jump(state: torch.Tensor, draws: int) -> torch.Tensor:
    """Return the state that drawing `draws` 32-bit numbers from a CPU generator leads to.

    `state` is what `torch.Generator.get_state()` gives (uint8, 5056 bytes) and is left as it is.
    The result equals, byte for byte, the state after really drawing; seed and cached normals keep
    their values. Raises `ValueError` for a negative count or a tensor of another size.
    """
    if draws < 0:
        raise ValueError(f"cannot jump back by {-draws} draws")
    if state.numel() != 5056 or state.dtype != torch.uint8:
        raise ValueError("not the state of a CPU generator")
    if draws < _NEAR:
        return _advance(state, draws)
    position = _BLOCK + 1 - int(state.view(torch.int32)[_LEFT])
    twists, read = divmod(position + draws - 1, _BLOCK)
    outputs = _sum(_near_outputs(state), _plan(twists - 1))
    result = state.clone()
    fields = result.view(torch.int32)
    _set_position(fields, read + 1)
    fields[_FIRST_WORD : _FIRST_WORD + 2 * _BLOCK : 2] = _untemper(outputs)
    return result


def _set_position(fields: torch.Tensor, read: int) -> None:
    """Let the next draw take word `read` of the block, or twist first if all 624 are read."""
    fields[_LEFT] = _BLOCK + 1 - read
    fields[_NEXT] = read


def _advance(state: torch.Tensor, draws: int) -> torch.Tensor:
    """Move a private generator by really drawing."""
    generator = torch.Generator()
    generator.set_state(state)
    while draws > 1:
        pairs = min(draws // 2, _SCRATCH)
        _draw_pairs(generator, pairs)
        draws -= 2 * pairs
    if draws:
        torch.empty(1, dtype=torch.int32).random_(generator=generator)
    return generator.get_state()


def _draw_pairs(generator: torch.Generator, pairs: int) -> torch.Tensor:
    """Draw int64 numbers over their whole range: two outputs each, the first in the high half."""
    return torch.empty(pairs, dtype=torch.int64).random_(-(1 << 63), None, generator=generator)


def _near_outputs(state: torch.Tensor) -> torch.Tensor:
    """The outputs from the start of the next block on that a sum needs, then a window of zeros."""
    start = state.clone()
    _set_position(start.view(torch.int32), _BLOCK)
    generator = torch.Generator()
    generator.set_state(start)
    halves = _draw_pairs(generator, (_SPAN + 1) // 2).view(torch.int32).view(-1, 2)
    outputs = torch.zeros(8 * _BLANK + _WINDOW, dtype=torch.int32)
    outputs[:_SPAN] = halves.flip(1).view(-1)[:_SPAN]
    return outputs


def _sum(outputs: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    """Add up the windows of `outputs` that `plan` chooses.

    Windows with the same eight coefficients are added first, into one row per byte value; then the
    rows are added with their shifts, halving the table by one coefficient at a time.
    """
    windows = outputs.as_strided((_BLANK + 1, _WINDOW), (8, 1))
    rows = windows.index_select(0, plan[0])
    for places in plan[1:]:
        rows ^= windows.index_select(0, places)
    total = torch.zeros(_BLOCK, dtype=torch.int32)
    for shift in range(7, -1, -1):
        without, having = rows.split(1 << shift)
        rows = without ^ having
        total ^= _collapse(having)[shift : shift + _BLOCK]
    return total


def _collapse(rows: torch.Tensor) -> torch.Tensor:
    """The sum of 2**k rows."""
    while len(rows) > 1:
        upper, lower = rows.split(len(rows) // 2)
        rows = upper ^ lower
    return rows[0]


def _untemper(outputs: torch.Tensor) -> torch.Tensor:
    """The words of the state that these 624 outputs (int32) come from."""
    words = outputs.to(torch.int64) & 0xFFFFFFFF
    words ^= words >> 18
    words ^= (words << 15) & 0xEFC60000
    partial = words
    for _ in range(4):
        partial = words ^ ((partial << 7) & 0x9D2C5680)
    words = partial ^ (partial >> 11) ^ (partial >> 22)
    return words.to(torch.int32)


@lru_cache(maxsize=512)
def _plan(twists: int) -> torch.Tensor:
    """Which windows to add for a jump by `twists` blocks: column b lists the chunks equal to b.

    The columns are filled up with the window of zeros. Column 0 stays empty.
    """
    places: list[list[int]] = [[] for _ in range(256)]
    for place, coefficients in enumerate(_power(_BLOCK * twists).to_bytes(_CHUNKS, "little")):
        if coefficients:
            places[coefficients].append(place)
    return torch.tensor(list(zip_longest(*places, fillvalue=_BLANK)), dtype=torch.int32)


def _power(exponent: int) -> int:
    """t**exponent mod phi."""
    squarings = max(exponent.bit_length() - 14, 0)
    result = 1 << (exponent >> squarings)
    for place in range(squarings - 1, -1, -1):
        # Read in base 4, the binary digits of a polynomial are those of its square.
        square = int(format(result, "b"), 4)
        result = _reduce(square << (exponent >> place & 1))
    return result


def _reduce(polynomial: int) -> int:
    """Remainder by phi of a polynomial of degree below 2 * 19937."""
    quotient = polynomial >> _DEGREE
    for shifts in _RECIPROCAL:
        summand = quotient
        for shift in shifts:
            quotient ^= summand >> shift
    for exponent in _EXPONENTS:
        polynomial ^= quotient << exponent
    return polynomial & _MASK


def _reciprocal() -> list[tuple[int, ...]]:
    """Shifts that divide by phi.

    Seen from the top, phi is 1 + f with f divisible by a high power, and over GF(2) the power
    series 1 / (1 + f) is the product of the 1 + f**(2**k), where squaring doubles each exponent.
    """
    factors = []
    shifts = [_DEGREE - exponent for exponent in _EXPONENTS]
    while shifts:
        factors.append(tuple(shifts))
        shifts = [2 * shift for shift in shifts if 2 * shift < _DEGREE]
    return factors


_RECIPROCAL = _reciprocal()
