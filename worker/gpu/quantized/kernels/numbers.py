"""Numbers that codes stand for, in registers: two at a time by their bits, or one at a time by arithmetic.

Owns: both ways, for each kind of codes. A word of 16 bits has codes of as many ranges of inputs as fit, the
lowest bits of the first.
Source: NVIDIA, PTX ISA: `lop3`, and `fma` of packed numbers.

Threads hold words in pairs, side by side in a register, and tensor cores take numbers of 16 bits in such
pairs, so that both halves of a register are worked on at once and nothing is moved between them. A code gets
the exponent of a number whose last bit is one (128 in bfloat16, 1,024 in float16), or moves to where a float
has its exponent and fraction; a sum or a product, which is exact, makes it what it stands for. Two codes of
e4m3 are no numbers, and would become some: weights with such go the longer way.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton import knobs

NIBBLES_FROM_ZERO, NIBBLES_LESS_EIGHT, NIBBLES_E2M1, NIBBLES_BY_TABLE, INT8, FLOAT8 = range(6)
"""Values of CODES: four bits for 0 to 15, for -8 to 7, for floats, for a table's numbers; eight bits."""
_LESS_EIGHT = tl.constexpr(NIBBLES_LESS_EIGHT)
_E2M1 = tl.constexpr(NIBBLES_E2M1)
_BY_TABLE = tl.constexpr(NIBBLES_BY_TABLE)
_INT8 = tl.constexpr(INT8)
_FLOAT8 = tl.constexpr(FLOAT8)
NUM_RANGES_OF_NIBBLES, NUM_RANGES_OF_BYTES = 4, 2
WORD_BITS = 16
_IS_INTERPRETED = knobs.runtime.interpret
_AND_OR, _AND_XOR = 0xEA, 0x6A
"""Tables of `lop3`: the first and the second, then or (exclusive or) the third."""


class _Float(NamedTuple):
    """A float of 16 bits."""

    ptx: str
    """The type of a pair of it."""
    num_fraction_bits: int
    bias: int
    to_bits: Callable[[float], int]

    def twice(self, number: float) -> str:
        """Return a pair of a number that the float has."""
        return _twice(self.to_bits(number))

    @property
    def unit(self) -> float:
        """Return the number whose last bit is one."""
        return 2.0**self.num_fraction_bits


def _bits_of_bfloat16(number: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", number))[0]) >> WORD_BITS


def _bits_of_float16(number: float) -> int:
    return int(struct.unpack("<H", struct.pack("<e", number))[0])


_BFLOAT16 = _Float("bf16x2", 7, 127, _bits_of_bfloat16)
_FLOAT16 = _Float("f16x2", 10, 15, _bits_of_float16)


def _twice(bits: int) -> str:
    return f"0x{bits << WORD_BITS | bits:08x}"


def _moved(source: str, places: int) -> str:
    """Shift a register's bits up and write them to `a`; bits of the other half are to be masked."""
    return f"shl.b32 a, {source}, {places}; " if places >= 0 else f"shr.u32 a, {source}, {-places}; "


def _whole(form: _Float, num_bits: int, least: int, *, sign: int = 0) -> str:
    """Whole numbers behind the bits of the unit; `sign` is the code's bit that makes a number less."""
    num_ranges = WORD_BITS // num_bits
    lines = f"mov.b32 c, {form.twice(1)}; mov.b32 d, {form.twice(least - form.unit)}; "
    for place in range(num_ranges):
        lines += _moved(f"${num_ranges}", -num_bits * place)
        unit = _twice(form.to_bits(form.unit) ^ sign)
        lines += f"lop3.b32 a, a, {_twice((1 << num_bits) - 1)}, {unit}, {_AND_XOR}; "
        lines += f"fma.rn.{form.ptx} ${place}, a, c, d; "
    return lines


def _floats(form: _Float, num_bits: int, num_fraction_bits: int, bias: int) -> str:
    """Floats of fewer bits. That exponents begin elsewhere is a factor, which makes small ones normal."""
    num_ranges, up = WORD_BITS // num_bits, form.num_fraction_bits - num_fraction_bits
    size = (1 << num_bits - 1) - 1
    lines = f"mov.b32 c, {form.twice(2.0 ** (form.bias - bias))}; mov.b32 d, {form.twice(-0.0)}; "
    for place in range(num_ranges):
        begin = num_bits * place
        lines += _moved(f"${num_ranges}", up - begin) + f"and.b32 b, a, {_twice(size << up)}; "
        lines += _moved(f"${num_ranges}", WORD_BITS - num_bits - begin)
        lines += f"lop3.b32 a, a, {_twice(1 << WORD_BITS - 1)}, b, {_AND_OR}; "
        lines += f"fma.rn.{form.ptx} ${place}, a, c, d; "
    return lines


def _bytes_of_bfloat16(form: _Float) -> str:
    """Whole numbers of more bits than a fraction has: 128 and the lower seven bits, less 128 or 256."""
    lines, unit = f"mov.b32 c, {form.twice(-1)}; ", form.twice(form.unit)
    for place in range(NUM_RANGES_OF_BYTES):
        lines += _moved("$2", -8 * place)
        lines += f"lop3.b32 b, a, {_twice(128)}, {unit}, {_AND_OR}; "
        lines += f"lop3.b32 a, a, {_twice(127)}, {unit}, {_AND_OR}; "
        lines += f"fma.rn.{form.ptx} ${place}, b, c, a; "
    return lines


def _program(lines: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 a, b, c, d; " + lines + "}")


_FROM_ZERO_BFLOAT16, _FROM_ZERO_FLOAT16 = (_program(_whole(form, 4, 0)) for form in (_BFLOAT16, _FLOAT16))
_LESS_EIGHT_BFLOAT16, _LESS_EIGHT_FLOAT16 = (_program(_whole(form, 4, -8)) for form in (_BFLOAT16, _FLOAT16))
_E2M1_BFLOAT16, _E2M1_FLOAT16 = (_program(_floats(form, 4, 1, 1)) for form in (_BFLOAT16, _FLOAT16))
_E4M3_BFLOAT16, _E4M3_FLOAT16 = (_program(_floats(form, 8, 3, 7)) for form in (_BFLOAT16, _FLOAT16))
_INT8_BFLOAT16 = _program(_bytes_of_bfloat16(_BFLOAT16))
_INT8_FLOAT16 = _program(_whole(_FLOAT16, 8, -128, sign=128))
_OUT_4, _OUT_2 = tl.constexpr("=&r,=&r,=&r,=&r,r"), tl.constexpr("=&r,=&r,r")


def goes_by_bits(dtype: torch.dtype) -> bool:
    """Tell whether codes become numbers of a dtype so. The interpreter knows no machine's instructions."""
    return dtype is not torch.float32 and not _IS_INTERPRETED


@triton.jit
def decode_by_bits(words, CODES: tl.constexpr, DTYPE: tl.constexpr) -> tl.tuple:
    """Return the numbers of each range, in bfloat16 or float16. CODES is none that looks a table up."""
    if CODES == _INT8:
        return _two_ranges(words, _INT8_BFLOAT16, _INT8_FLOAT16, DTYPE)
    elif CODES == _FLOAT8:
        return _two_ranges(words, _E4M3_BFLOAT16, _E4M3_FLOAT16, DTYPE)
    elif CODES == _E2M1:
        return _four_ranges(words, _E2M1_BFLOAT16, _E2M1_FLOAT16, DTYPE)
    elif CODES == _LESS_EIGHT:
        return _four_ranges(words, _LESS_EIGHT_BFLOAT16, _LESS_EIGHT_FLOAT16, DTYPE)
    else:
        return _four_ranges(words, _FROM_ZERO_BFLOAT16, _FROM_ZERO_FLOAT16, DTYPE)


@triton.jit
def _two_ranges(words, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, DTYPE: tl.constexpr) -> tl.tuple:
    LINES: tl.constexpr = BFLOAT16 if tl.bfloat16 == DTYPE else FLOAT16
    return tl.inline_asm_elementwise(LINES, _OUT_2, [words], (DTYPE.value,) * 2, is_pure=True, pack=2)


@triton.jit
def _four_ranges(words, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr, DTYPE: tl.constexpr) -> tl.tuple:
    LINES: tl.constexpr = BFLOAT16 if tl.bfloat16 == DTYPE else FLOAT16
    return tl.inline_asm_elementwise(LINES, _OUT_4, [words], (DTYPE.value,) * 4, is_pure=True, pack=2)


@triton.jit
def decode_range(
    words, table_ptr, place: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """Return the numbers of one range, in any dtype that has them."""
    if CODES >= _INT8:
        codes = ((words.to(tl.int32) >> (8 * place)) & 255).to(tl.uint8)
        if CODES == _INT8:
            return codes.to(tl.int8, bitcast=True).to(tl.float32).to(DTYPE)
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(DTYPE)
    codes = (words.to(tl.int32) >> (4 * place)) & 15
    if CODES == _BY_TABLE:
        return tl.load(table_ptr + codes).to(DTYPE)
    if CODES != _E2M1:
        return (codes - 8 if CODES == _LESS_EIGHT else codes).to(DTYPE)
    # Two bits of exponent and one of fraction move to their places in a float; below 1 numbers are halves.
    size = codes & 7
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where(codes < 8, number, -number).to(DTYPE)
