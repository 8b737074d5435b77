"""Facts the Hopper kernels rest on: where Marlin's words put codes, and what the instructions make of them.

The instruction texts of `device.recipes` are run here one by one, in exact arithmetic.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import numpy as np
import pytest
import torch
from support.cases import E2M1
from support.packing import marlin_mx_scale, marlin_scale, marlin_weight, marlin_zero

from moeq.layouts.bits import MOEQ_MXFP4
from moeq_kernels.hopper.w4a16.device import layouts, recipes, weights
from moeq_kernels.hopper.w4a16.kinds import KINDS as KINDS_OF_WEIGHTS

KINDS = ("uint2", "uint3", "uint4", "uint8")
BITS = {name: kind.bits for name, kind in KINDS_OF_WEIGHTS.items()}


def _points(layout: object) -> dict[tuple[int, int, int], list[int]]:
    """Where a linear layout has (register, lane, warp)."""
    groups = [layout.reg_bases, layout.lane_bases, layout.warp_bases]
    found = {}
    for warp in range(4):
        for lane in range(32):
            for register in range(1 << len(layout.reg_bases)):
                at = [0] * len(layout.shape)
                for number, bases in zip((register, lane, warp), groups, strict=True):
                    for bit, basis in enumerate(bases):
                        if number >> bit & 1:
                            at = [a ^ b for a, b in zip(at, basis, strict=True)]
                found[register, lane, warp] = at
    return found


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("kind", [kind for kind, bits in BITS.items() if bits >= 4])
@pytest.mark.parametrize("wide", [False, True])
def test_words_hold_wgmma_fragments_in_the_documented_row_order(wide: bool, kind: str) -> None:
    """Each lane's words, read as `layouts.words` says, hold the fragments of the rows that the map names."""
    tiles, slabs, bits = 1 if wide else 2, 4, BITS[kind]
    tile_bytes = layouts.tile_bytes(kind)
    n_size, k_size = 2 * tiles * 64, 16 * slabs
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 1 << bits, (1, n_size, k_size), generator=generator, dtype=torch.uint8)
    packed = marlin_weight(codes, bits)[0].view(slabs, 2, tiles * tile_bytes // 4)
    words = packed.permute(1, 0, 2)  # pair, slab, words of the tiles
    for (register, lane, warp), (pair, slab, byte) in _points(layouts.words(wide, slabs, kind)).items():
        if register % 4:  # four bytes are a word
            continue
        g, t = divmod(lane, 4)
        word = int(words[pair, slab, byte // 4]) & 0xFFFFFFFF
        per_column = 1 if bits == 4 else 2
        j = byte // 4 // per_column % 4
        tile = pair * tiles + byte // tile_bytes
        for own in range(8 // bits * 4):
            if bits == 4:  # nibbles 0 / 4: h 0, k 2t / 2t + 1; 2 / 6: h 1; 1 / 5 and 3 / 7: the same at k + 8
                h, upper_k, odd = own // 2 % 2, own % 2, own // 4
            else:  # a word of each h; bytes: k 2t, 2t + 8, 2t + 1, 2t + 9
                h, upper_k, odd = byte // 4 % 2, own % 2, own // 2
            if own >= 32 // bits:
                continue
            n, k = 64 * tile + 16 * j + 8 * h + g, 16 * slab + 2 * t + 8 * upper_k + odd
            assert word >> (bits * own) & ((1 << bits) - 1) == int(codes[0, n, k])
        # wgmma gives rows 16 w .. of each 64 to warp w: the map must put this word's columns there
        row = 64 * (j % 2) + 32 * tile + 16 * (j // 2) if wide else 64 * j + 16 * tile
        assert row // 16 % 4 == warp


@pytest.mark.parametrize("wide", [False, True])
def test_scales_and_zero_points_lie_where_their_lanes_read(wide: bool) -> None:
    tiles = 1 if wide else 2
    n_size = 2 * tiles * 64
    columns = torch.arange(n_size, dtype=torch.int32)
    scale = marlin_scale(torch.stack([columns, columns], 1)[None])[0, 0].view(2, tiles * 8, 8)
    mx = marlin_mx_scale(torch.stack([columns, columns], 1)[None].to(torch.uint8))[0, 0].view(2, tiles * 8, 8)
    for (_, lane, _), (pair, tile_g, t, j_h) in _points(layouts.scales(wide)).items():
        assert (tile_g % 8, t) == divmod(lane, 4)
        tile = pair * tiles + tile_g // 8
        column = 64 * tile + 8 * j_h + tile_g % 8  # j_h = 2 j + h
        assert int(scale[pair, tile_g, j_h]) == column
        j1, j0, h = j_h // 4, j_h // 2 % 2, j_h % 2
        assert int(mx[pair, tile_g, 4 * j1 + 2 * h + j0]) == column
    for kind in ("uint4", "uint8"):
        bits = BITS[kind]
        codes = torch.randint(0, 1 << bits, (1, n_size, 1), dtype=torch.uint8)
        words = marlin_zero(codes, bits)[0, 0].view(2, tiles * 8, bits // 4)
        for pair, tile_g, _, j1 in _points(layouts.zeros(wide, kind)).values():
            word = int(words[pair, tile_g, j1 if bits == 8 else 0]) & 0xFFFFFFFF
            for j0 in range(2):
                for h in range(2):
                    # 4 bits: field j + 4 h; 8 bits: byte j0 + 2 h of the word of j1
                    field = 2 * j1 + j0 + 4 * h if bits == 4 else j0 + 2 * h
                    column = 64 * (pair * tiles + tile_g // 8) + 32 * j1 + 16 * j0 + 8 * h + tile_g % 8
                    assert word >> (bits * field) & ((1 << bits) - 1) == int(codes[0, column, 0])


@pytest.mark.parametrize("wide", [False, True])
def test_layouts_reach_every_place_of_their_shapes_and_none_beyond(wide: bool) -> None:
    """So that no lane reads beside what was loaded; each place has one thread, but some zero points have several."""
    found = {f"words {kind} {slabs}": layouts.words(wide, slabs, kind) for kind in BITS for slabs in (2, 4)}
    found |= {f"zeros {kind}": layouts.zeros(wide, kind) for kind in ("uint4", "uint8")}
    for tokens in (16, 32, 64, 128) if wide else (8, 16, 32, 64, 128):
        found[f"output {tokens}"] = layouts.output(wide, tokens)
        found[f"pairs {tokens}"] = layouts.output_pair(wide, tokens)
    found["scales"] = layouts.scales(wide)
    for name, layout in found.items():
        places = {tuple(at) for at in _points(layout).values()}
        assert places == {*np.ndindex(*layout.shape)}, name
        assert name.startswith("zeros") or len(places) == len(_points(layout)), name
    assert layouts.output_pair(wide, 16).shape[:2] == layouts.output(wide, 16).shape
    for (register, *_), (_, column, pair) in _points(layouts.output_pair(wide, 16)).items():
        assert (pair, column % 8) == (register % 2, register // 2 % 8)


@cache
def _value(bits: int, half: bool) -> Fraction | float:
    """A 16-bit float, exactly."""
    kind = torch.float16 if half else torch.bfloat16
    number = float(torch.tensor([bits], dtype=torch.int32).to(torch.int16).view(kind).double())
    return Fraction(number) if math.isfinite(number) else number


@cache
def _bits(value: Fraction | float, half: bool) -> int:
    """The 16-bit float nearest to an exact number, ties to even."""
    digits, least, most = (11, -24, 15) if half else (8, -133, 127)
    if isinstance(value, float):
        kind = torch.float16 if half else torch.bfloat16
        return int(torch.tensor(value, dtype=torch.float64).to(kind).view(torch.int16)) & 0xFFFF
    if value == 0:
        return 0
    size = abs(value)
    exponent = math.floor(math.log2(size))
    exponent += (size >= Fraction(2) ** (exponent + 1)) - (size < Fraction(2) ** exponent)
    step = Fraction(2) ** max(exponent - digits + 1, least)
    rounded = Fraction(round(size / step)) * step
    assert rounded < Fraction(2) ** (most + 1), "overflow"
    kind = torch.float16 if half else torch.bfloat16
    sign = 0x8000 if value < 0 else 0
    return sign | int(torch.tensor(float(rounded), dtype=torch.float64).to(kind).view(torch.int16))


def _pairs(function: Callable[..., Fraction | float], half: bool) -> Callable[..., int]:
    def apply(*values: int) -> int:
        low, high = (
            _bits(function(*(_value(value >> shift & 0xFFFF, half) for value in values)), half) for shift in (0, 16)
        )
        return low | high << 16

    return apply


def _product(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    return a * b if isinstance(a, Fraction) and isinstance(b, Fraction) else float(a) * float(b)


def _permute(a: int, b: int, selector: int) -> int:
    table = [(value >> 8 * i) & 255 for value in (a, b) for i in range(4)]
    return sum(table[selector >> 4 * i & 7] << 8 * i for i in range(4))


def _each_16(function: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda a, b: sum(function(a >> s & 0xFFFF, b >> s & 0xFFFF) << s for s in (0, 16))


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "or.b32": lambda a, b: a | b,
    "and.b32": lambda a, b: a & b,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    "shf.l.wrap.b32": lambda low, high, by: (high << by | low >> 32 - by) & 0xFFFFFFFF,
    "add.u16x2": _each_16(lambda a, b: a + b & 0xFFFF),
    "min.u16x2": _each_16(min),
    "prmt.b32": _permute,
    "fma.rn.bf16x2": _pairs(lambda a, b, c: a * b + c, False),
    "fma.rn.f16x2": _pairs(lambda a, b, c: a * b + c, True),
    "mul.bf16x2": _pairs(_product, False),
    "mul.f16x2": _pairs(_product, True),
}
#: float8_e4m3fn but for NaN, which is 480 here.
E4M3 = [
    Fraction(480) * (1 - code // 128 * 2)
    if code % 128 == 127
    else Fraction(float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn)))
    for code in range(256)
]


@cache
def _parsed(text: str) -> list[tuple[Callable[..., int], list[str], list[str]]]:
    """Operation, targets and sources of every line of a PTX text; a register of 32 bits may be two of 16."""
    found = []
    for line in text.splitlines():
        match = re.fullmatch(r"([a-z0-9.]+) (.*);", line)
        if not match:
            assert line in "{}", line
        elif match[1] != ".reg":
            target, *sources = re.findall(r"{[^}]*}|[^, ]+", match[2])
            found.append((OPERATIONS[match[1]], target.strip("{}").split(", "), sources))
    return found


def run(text: str, results: int, *given: int) -> list[int]:
    """Runs a PTX text on 32-bit registers; operands `$0 ..` are the results, then what is given."""
    registers = {f"${results + i}": word for i, word in enumerate(given)}

    def value(source: str) -> int:
        if source.startswith("{"):
            low, high = source.strip("{}").split(", ")
            return registers[low] | registers[high] << 16
        return registers[source] if source in registers else int(source, 0)

    for operation, targets, sources in _parsed(text):
        result = operation(*map(value, sources))
        if len(targets) == 2:
            registers |= {targets[0]: result & 0xFFFF, targets[1]: result >> 16}
        else:
            registers[targets[0]] = result
    return [registers[f"${i}"] for i in range(results)]


def _twice(bits: int) -> int:
    return bits | bits << 16


@cache
def _text(kind: str, half: bool, how: str, operands: int) -> str:
    """The instructions for a word of codes and so many operands, one for each of two columns."""
    assert recipes.constraints(kind, how).count("r") == recipes.registers(kind) + 1 + 2 * operands
    return recipes.dequantize(kind, half, how)


def _dequantized(kind: str, half: bool, how: str, code: int, *operands: int) -> int:
    """The 16-bit float that a code becomes; operands as 16-bit floats. Asks every place in the word."""
    word = code * (0x11111111 if BITS[kind] <= 4 else 0x01010101)
    doubled = [_twice(operand) for operand in operands for _ in range(2)]
    found = run(_text(kind, half, how, len(operands)), recipes.registers(kind), word, *doubled)
    assert len(set(found)) == 1
    assert found[0] & 0xFFFF == found[0] >> 16
    return found[0] & 0xFFFF


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [False, True])
def test_each_field_of_a_word_lands_in_its_register(kind: str, half: bool) -> None:
    """Different codes in all fields: register i holds those of (column, k) in the order that wgmma wants."""
    unit = Fraction(1, 2**9 if half else 2**21)
    if kind != "uint8":  # bits above codes of 2 and 3 bits are left out
        word, wanted = 0xF6D4B290, [(0, 4), (2, 6), (9, 13), (11, 15)]
        wanted = [(low % (1 << BITS[kind]), high % (1 << BITS[kind])) for low, high in wanted]
    else:
        word, wanted = 0xF0A37C05, [(0x05, 0xA3), (0x7C, 0xF0)]
    found = run(recipes.dequantize(kind, half, "plain"), len(wanted), word)
    middle = 1 << BITS[kind] - 1
    for value, (low, high) in zip(found, wanted, strict=True):
        assert _value(value & 0xFFFF, half) == (low - middle) * unit
        assert _value(value >> 16, half) == (high - middle) * unit


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", [False, True])
def test_codes_minus_zero_points_are_exact(kind: str, half: bool) -> None:
    unit = Fraction(1, 2**9 if half else 2**21)
    top = 1 << BITS[kind]
    for code in range(top):
        assert _value(_dequantized(kind, half, "plain", code), half) == (code - top // 2) * unit
        for zero in range(0, top, max(1, top // 16) - (top > 16)):
            offset = _bits(-zero * unit, half)
            assert _value(_dequantized(kind, half, "offset", code, offset), half) == (code - zero) * unit


def _scales(half: bool, number: int) -> list[int]:
    """Bits of positive scales over the range that the kernels take, the smallest and the largest among them."""
    generator = np.random.default_rng(3)
    kind = torch.float16 if half else torch.bfloat16
    low, high = (-24.0, 6.9) if half else (-30.0, 14.0)
    values = np.exp2(generator.uniform(low, high, number))
    return [int(b) & 0xFFFF for b in torch.tensor(values, dtype=torch.float64).to(kind).view(torch.int16)]


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_scales_round_once(kind: str) -> None:
    unit, top = Fraction(1, 2**21), 1 << BITS[kind]
    for scale in _scales(False, 6):
        s = _value(scale, False)
        factors = run(recipes.scale_factors(kind), 3, _twice(scale))
        low, high, middle = (value & 0xFFFF for value in factors)
        for code in range(top):
            wanted = _value(_bits((code - top // 2) * s, False), False) * unit
            folded = _dequantized(kind, False, "folded", code, low, high, middle)
            assert _value(folded, False) == wanted
            zero = 5 * top // 16
            wanted = _value(_bits((code - zero) * s, False), False) * unit
            product = _dequantized(kind, False, "offset scaled", code, _bits(-zero * unit, False), scale)
            assert _value(product, False) == wanted


@pytest.mark.parametrize("zero", [None, 5])
def test_float16_scales_beside_bf16_round_once(zero: int | None) -> None:
    """A float16 scale as high + low; for 4-bit codes the result is the rounded product, bit for bit."""
    unit = Fraction(1, 2**21)
    for scale in _scales(True, 24):
        s = _value(scale, True)
        high = _bits(s, False)
        low = _bits(s - _value(high, False), False)
        assert _value(high, False) + _value(low, False) == s
        for code in range(16):
            operands = ("split", high, low) if zero is None else ("offset split", _bits(-zero * unit, False), high, low)
            found = _dequantized("uint4", False, operands[0], code, *operands[1:])
            assert _value(found, False) == _value(_bits((code - (zero or 8)) * s, False), False) * unit


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero", [None, 5])
def test_float16_activations_take_weights_rounded_once(kind: str, zero: int | None) -> None:
    unit, top = Fraction(1, 2**9), 1 << BITS[kind]
    for scale in _scales(True, 6):
        s = _value(scale, True)
        times = _bits(s * 512, True)
        for code in range(top):
            wanted = _bits((code - (zero or top // 2)) * s, True)
            operands = ("scaled",) if zero is None else ("offset scaled", _bits(-zero * unit, True))
            found = _dequantized(kind, True, operands[0], code, *operands[1:], times)
            assert _value(found, True) == _value(wanted, True)


def test_e2m1_times_powers_of_two_is_exact() -> None:
    for first in range(0, 256, 4):
        stored = [first, first + 1, first + 2, first + 3]
        word = sum(byte << 8 * i for i, byte in enumerate(stored))
        factors = run(recipes.powers(), 4, word)
        for byte, factor in zip(stored, factors, strict=True):
            assert factor & 0xFFFF == factor >> 16
            f = _value(factor & 0xFFFF, False)
            if byte > 188:  # larger than 2^61, or NaN
                assert f == math.inf
                continue
            assert f == Fraction(2) ** (byte - 1 - recipes.E2M1_SHIFT)
            if byte % 7 and 70 < byte < 180:
                continue
            for code in range(16):
                found = _value(_dequantized("e2m1", False, "power", code, factor & 0xFFFF), False)
                wanted = Fraction(E2M1[code]) * Fraction(2) ** (byte - 127 - recipes.E2M1_SHIFT)
                assert found == wanted if byte >= 55 else abs(found - wanted) <= Fraction(2) ** -134
    # Different codes in all fields, in the order of the registers.
    found = run(recipes.dequantize("e2m1", False, "power"), 4, 0x7E5C3A19, *[_twice(0x7E80)] * 2)  # 2^126
    for value, (low, high) in zip(found, [(0x9, 0xC), (0xA, 0xE), (0x1, 0x5), (0x3, 0x7)], strict=True):
        assert (_value(value & 0xFFFF, False), _value(value >> 16, False)) == (E2M1[low], E2M1[high])


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("kind", ["e2m1", "nvfp4"])
def test_permuted_words_become_what_nibbles_become(kind: str) -> None:
    """Every code in every place beside zeros and beside all ones, and random words."""
    generator = random.Random(0)
    words = [code << 4 * place for place in range(8) for code in range(16)]
    words += [word ^ 0xFFFFFFFF for word in words] + [generator.getrandbits(32) for _ in range(1000)]
    scales = [_twice(0x7E80), _twice(0x3F80)]  # 2^126 and 1, for columns g and g + 8
    for word in words:
        permuted = sum((word >> bit & 1) << place for bit, place in enumerate(MOEQ_MXFP4.places))
        found = run(recipes.dequantize(f"{kind}-permuted", False, "power"), 4, permuted, *scales)
        assert found == run(recipes.dequantize(kind, False, "power"), 4, word, *scales), hex(word)


def test_factors_of_bytes_without_a_limit() -> None:
    for first in range(0, 188, 4):
        word = sum(first + i << 8 * i for i in range(4))
        assert run(recipes.powers(False), 4, word) == run(recipes.powers(), 4, word)
    assert run(recipes.powers(False), 4, 188)[0] == run(recipes.powers(), 4, 188)[0]


def _old(text: str) -> str:
    assert "fma.rn.bf16x2" in text
    assert "mul.bf16x2" not in text
    return text


@pytest.mark.parametrize("half", [False, True])
def test_e4m3_codes_are_exact_without_a_scale(half: bool) -> None:
    for code in range(256):
        assert _value(_dequantized("fp8", half, "unit", code), half) == E4M3[code]
    if not half:
        text = _old(recipes.dequantize("fp8", False, "unit", True))
        assert run(text, 2, 0x38B87F01) == run(recipes.dequantize("fp8", False, "unit"), 2, 0x38B87F01)
    # Different codes in all bytes: k and k + 1, then k + 8 and k + 9.
    found = run(recipes.dequantize("fp8", half, "unit"), 2, 0xF0A37C05)
    for word, (low, high) in zip(found, [(0x05, 0xA3), (0x7C, 0xF0)], strict=True):
        assert (_value(word & 0xFFFF, half), _value(word >> 16, half)) == (E4M3[low], E4M3[high])


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("half", [False, True])
def test_e4m3_codes_times_stored_scales_round_once(half: bool) -> None:
    lift = Fraction(2) ** (8 if half else 120)
    for scale in _scales(half, 12):
        s = _value(scale, half) / 2 ** (9 if half else 2)  # as small as scales of such codes are
        stored = _bits(s * lift, half)
        for code in range(256):
            found = _dequantized("fp8", half, "power", code, stored)
            assert _value(found, half) == _value(_bits(E4M3[code] * _value(stored, half) / lift, half), half)
    assert weights.channel_unit("fp8", half) == float(1 / lift)
    assert weights.undo("fp8", half, True) == weights.undo("fp8", half, False) == 1.0


def test_e4m3_times_powers_of_two_is_exact() -> None:
    undo = Fraction(weights.undo("mxfp8", False, True))
    for byte in (57, 58, 100, 120, 127, 135, 180, 188):
        factor = run(recipes.powers(), 4, byte)[0] & 0xFFFF
        for code in range(256):
            found = _value(_dequantized("mxfp8", False, "power", code, factor), False)
            assert found * undo == E4M3[code] * Fraction(2) ** (byte - 127)
    for byte in (189, 254, 255):  # larger than 2^61, or NaN
        factor = run(recipes.powers(), 4, byte)[0] & 0xFFFF
        assert _value(_dequantized("mxfp8", False, "power", 0x38, factor), False) == math.inf


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("half", [False, True])
def test_nvfp4_codes_times_stored_scales_are_exact(half: bool) -> None:
    """Every byte that the layout can hold, and those below that it sets to 0; the global scale's unit included."""
    stored_unit = Fraction(2) ** (14 if half else 126)  # of the global scale, and of v = 2^7 times the scale
    undo = Fraction(weights.undo("nvfp4", half, True))
    for first in range(0, 0xF8, 4):
        stored = [first + 2, first, first + 3, first + 1]
        word = sum(byte << 8 * i for i, byte in enumerate(stored))
        factors = run(recipes.nvfp4_factors(half), 4, word)
        if not half:
            assert run(_old(recipes.nvfp4_factors(False, True)), 4, word) == factors
        for byte, factor in zip(stored, factors, strict=True):
            assert factor & 0xFFFF == factor >> 16
            v = _value(byte << 7, True)
            least = Fraction(1, 2**24) if half else Fraction(0)
            for code in (0, 1, 3, 6, 7, 9, 15) if byte % 5 else range(16):
                found = _value(_dequantized("nvfp4", half, "power", code, factor & 0xFFFF), half) * undo
                # Below 2 (byte 128), where layouts have nothing but 0, float16 may round.
                assert abs(found - Fraction(E2M1[code]) * v / stored_unit) <= (0 if byte >= 128 else least / 2)
    found = run(recipes.dequantize("nvfp4", half, "power"), 4, 0x7E5C3A19, *[_twice(_bits(Fraction(1), half))] * 2)
    lift = 2**14 if half else 2**126
    for value, (low, high) in zip(found, [(0x9, 0xC), (0xA, 0xE), (0x1, 0x5), (0x3, 0x7)], strict=True):
        pair = (_value(value & 0xFFFF, half) * lift, _value(value >> 16, half) * lift)
        assert pair == (E2M1[low], E2M1[high])
