"""Instructions that turn packed codes into 16-bit floats, as PTX text.

A text converts one 32-bit word of codes, `w`, into `count` registers of two 16-bit floats each: the pairs of wgmma's
left operand that the word holds (vLLM's `gptq_marlin_repack` 0.33.0, see `layouts`). A 4-bit word has the pairs
(column, k), (column + 8, k), (column, k + 8), (column + 8, k + 8), so its registers 0 and 2 belong to one column; an
8-bit word holds k and k + 8 of one column.

2- and 3-bit integers (`moeq-wna16/1`). A nibble of a word has the codes of two slabs, or their lower two bits; of the
words of third bits it has those of four slabs. `nibbles` makes words of 4-bit codes from them, in which the bits above
the codes may be set: the masks of `dequantize` leave them out.

Integers. A code v in the lowest bits of a 16-bit float is the denormal v * 2^-133 (bf16) or v * 2^-24 (f16); four bits
further up it is 16 times that (linear even if the top bit reaches the exponent field). One multiply-add turns it into
(v - zero) * 2^-21 (f16: * 2^-9), exactly. With a bf16 scale folded into the factors, the same multiply-add gives
(v - zero) * scale * 2^-21, rounded once, if all codes have the same zero; otherwise a product follows. A float16 scale
does not fit in bf16, but its 11 bits are the sum of two bf16 numbers, high + low: (v - zero) * low is exact for 4-bit
codes, and one multiply-add of (v - zero) * high rounds once.

e2m1. Sign and the three other bits, moved to their places in a bf16, are the value times 2^-126, subnormals included.
One multiplication by a factor with two set bits and one mask move a code from bits 0 .. 3 or 4 .. 7. The product with
the scale, a power of two, removes the factor and is exact. It is exact for NVFP4 as well, whose scales have four
significant bits. In float16 the code is the value times 2^-14, and its bits are moved one by one.

e2m1, permuted (`moeq-mxfp4/1`, `moeq-nvfp4/1`), in bf16. One mask (sign and bits 8 to 6 of a bf16) takes the first pair
of codes from the word itself, the second from the word shifted left by three bits, the third from the word rotated left
by six. The fourth pair has the remaining bits: they are masked in the rotated word, and one multiplication with three
set bits moves them under the mask. That is eight instructions for eight codes; nibbles take 13. Scale bytes of
`moeq-mxfp4/1` are at most 188, so their factors need no limit.

e4m3. Sign and the seven other bits, moved to their places in a 16-bit float, are the value times 2^-120 (f16: 2^-8),
subnormals included; codes of NaN count as 480, as in Marlin. Stored scales are larger by that factor, so one product
with the scale rounds once; with a power of two it is exact.
"""

from __future__ import annotations

from triton.experimental.gluon import constexpr_function

from moeq_kernels.hopper.w4a16.kinds import KINDS

#: Constants as pairs of 16-bit floats, by (float16, bits of a code): factor of codes in the lowest bits, factor of
#: codes four bits further up, and negative midpoint.
_CONSTANTS = {
    (False, 2): (0x77807780, 0x75807580, 0xB580B580),  # 2^112, 2^108, -2 * 2^-21
    (False, 3): (0x77807780, 0x75807580, 0xB600B600),  # 2^112, 2^108, -4 * 2^-21
    (True, 2): (0x78007800, 0x68006800, 0x9C009C00),  # 2^15, 2^11, -2 * 2^-9
    (True, 3): (0x78007800, 0x68006800, 0xA000A000),  # 2^15, 2^11, -4 * 2^-9
    (False, 4): (0x77807780, 0x75807580, 0xB680B680),  # 2^112, 2^108, -8 * 2^-21
    (False, 8): (0x77807780, 0, 0xB880B880),  # 2^112, -, -128 * 2^-21
    (True, 4): (0x78007800, 0x68006800, 0xA400A400),  # 2^15, 2^11, -8 * 2^-9
    (True, 8): (0x78007800, 0, 0xB400B400),  # 2^15, -, -128 * 2^-9
}
#: Factors 2^120 and 2^8 that e4m3 codes lack as bf16 and f16.
_E4M3_UNIT = {False: 0x7B807B80, True: 0x5C005C00}
#: Operands of each way to finish, two registers per operand, in the order of the arguments.
_OPERANDS = {
    "plain": (),
    "offset": ("z",),
    "folded": ("low", "high", "z"),
    "scaled": ("s",),
    "offset scaled": ("z", "s"),
    "split": ("p", "q"),
    "offset split": ("z", "p", "q"),
    "power": ("s",),
    "unit": (),
}
#: Exponent by which e2m1 weights are too small, so that factors for scales from 2^-72 to 2^61 are normal bf16 numbers.
E2M1_SHIFT = 60
#: Exponent by which e4m3 weights with e8m0 scales are too small: their factors are those of e2m1, their codes lack 2^6
#: less as bf16.
MXFP8_SHIFT = 54
#: Exponent of the factor beside the stored scale of NVFP4 weights in bf16; codes lack 2^126.
NVFP4_SHIFT = 96


@constexpr_function
def registers(kind):
    """Return the number of registers that hold a decoded word."""
    return 2 if KINDS[kind].bits == 8 else 4


@constexpr_function
def _fields(kind, half):
    """Return lines that extract codes into a0, a1, ... in the order of the registers."""
    if kind == "uint8":
        return ["shr.u32 s8, w, 8;", "and.b32 a0, w, 0x00ff00ff;", "and.b32 a1, s8, 0x00ff00ff;"]
    if kind in ("fp8", "mxfp8"):
        lines = []
        for i in range(2):  # bytes 0 and 2 are shifted up, so that their signs are the top bits
            lines.append("shl.b32 a0, w, 8;" if i == 0 else "mov.b32 a1, w;")
            lines += [f"shr.u32 s8, a{i}, {1 if half else 4};", f"and.b32 a{i}, a{i}, 0x80008000;"]
            lines += [f"and.b32 s8, s8, {0x3F803F80 if half else 0x07F007F0:#010x};", f"or.b32 a{i}, a{i}, s8;"]
        return lines
    if kind == "nvfp4" and half:
        lines = []
        for i, lift in enumerate((12, 4, 8, 0)):  # shift that moves each code's sign to the top bit
            lines.append(f"shl.b32 a{i}, w, {lift};")
            lines += [f"shr.u32 s8, a{i}, 3;", f"and.b32 a{i}, a{i}, 0x80008000;"]
            lines += ["and.b32 s8, s8, 0x0e000e00;", f"or.b32 a{i}, a{i}, s8;"]
        return lines
    if kind in ("e2m1-permuted", "nvfp4-permuted"):
        lines = ["mov.b32 a0, w;", "shl.b32 a1, w, 3;", "shf.l.wrap.b32 a2, w, w, 6;"]
        lines += ["and.b32 a3, a2, 0x001b001b;", "mul.lo.u32 a3, a3, 0x1084;"]
        return lines + [f"and.b32 a{i}, a{i}, 0x81c081c0;" for i in range(4)]
    lines = ["shr.u32 s8, w, 8;"]
    mask = 0x00010001 * ((1 << KINDS[kind].bits) - 1)
    for i in range(4):
        lines.append(f"and.b32 a{i}, {'s8' if i % 2 else 'w'}, {mask << 4 if i >= 2 else mask:#010x};")
        if kind in ("e2m1", "nvfp4"):
            lines.append(f"mul.lo.u32 a{i}, a{i}, {'0x1040' if i < 2 else '0x104'};")
            lines.append(f"and.b32 a{i}, a{i}, 0x81c081c0;")
    return lines


@constexpr_function
def _multiply(result, one, other, float_pair, old):
    """Return a product of pairs; before sm_90 bf16 products are multiply-adds with -0, which is equal."""
    if old and float_pair == "bf16x2":
        return f"fma.rn.bf16x2 {result}, {one}, {other}, nothing;"
    return f"mul.{float_pair} {result}, {one}, {other};"


@constexpr_function
def _finish(kind, half, how, old):
    """Return lines from codes to results r0, r1, ...; names of operands end with their column h (z0, z1)."""
    bits = KINDS[kind].bits
    float_pair = "f16x2" if half else "bf16x2"
    lines = []
    for i in range(registers(kind)):
        h = i % 2 if bits <= 4 else 0
        upper = bits <= 4 and i >= 2
        if how == "power":
            lines.append(_multiply(f"r{i}", f"a{i}", f"s{h}", float_pair, old))
            continue
        if how == "unit":
            lines.append(_multiply(f"r{i}", f"a{i}", "lm", float_pair, old))
            continue
        if how == "folded":
            lines.append(f"fma.rn.{float_pair} r{i}, a{i}, {'high' if upper else 'low'}{h}, z{h};")
            continue
        zero = f"z{h}" if how.startswith("offset") else "c"
        lines.append(f"fma.rn.{float_pair} r{i}, a{i}, {'hm' if upper else 'lm'}, {zero};")
        if how.endswith("scaled"):
            lines.append(_multiply(f"r{i}", f"r{i}", f"s{h}", float_pair, old))
        if how.endswith("split"):
            lines.append(_multiply(f"a{i}", f"r{i}", f"q{h}", float_pair, old))
            lines.append(f"fma.rn.{float_pair} r{i}, r{i}, p{h}, a{i};")
    return lines


@constexpr_function
def dequantize(kind, half, how, old=False):
    """Return the text for one word; `$n` numbers are results, word, operands. `old`: for GPUs before sm_90."""
    count = registers(kind)
    low, high, middle = _CONSTANTS[half, KINDS[kind].bits]
    if how == "unit":
        low = _E4M3_UNIT[half]
    names = [f"a{i}" for i in range(count)] + [f"r{i}" for i in range(count)] + ["w", "s8", "lm", "hm", "c"]
    operands = [f"{name}{h}" for name in _OPERANDS[how] for h in range(2)]
    lines = [f".reg .b32 {', '.join(names + operands)};", f"mov.b32 w, ${count};"]
    lines += [f"mov.b32 {name}, ${count + 1 + i};" for i, name in enumerate(operands)]
    lines += [f"mov.b32 {name}, {value:#010x};" for name, value in (("lm", low), ("hm", high), ("c", middle))]
    if old:
        lines += [".reg .b32 nothing;", "mov.b32 nothing, 0x80008000;"]
    lines += _fields(kind, half) + _finish(kind, half, how, old)
    lines += [f"mov.b32 ${i}, r{i};" for i in range(count)]
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def constraints(kind, how):
    """Return the operand constraints of the text of `dequantize`."""
    return ",".join(["=&r"] * registers(kind) + ["r"] * (1 + 2 * len(_OPERANDS[how])))


@constexpr_function
def nibbles(kind, at=0):
    """Return the text from a word of two slabs, with uint3 also one of third bits, to a word of 4-bit codes for each.

    The third bits of the slabs are bits `at` and `at` + 1 of a nibble.
    """
    if kind == "uint2":
        return "mov.b32 $0, $2;\nshr.u32 $1, $2, 2;"
    lines = [".reg .b32 w, h;"]
    for i in range(2):
        lift = 2 - at - i
        lines.append(f"shl.b32 h, $3, {lift};" if lift >= 0 else f"shr.u32 h, $3, {-lift};")
        lines += ["mov.b32 w, $2;" if i == 0 else "shr.u32 w, $2, 2;", "and.b32 w, w, 0x33333333;"]
        lines += ["and.b32 h, h, 0xcccccccc;", f"or.b32 ${i}, w, h;"]
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def scale_factors(kind, old=False):
    """Return the text from a pair of bf16 scales s to s times the constants of `_CONSTANTS` for a kind of integers."""
    lines = [".reg .b32 m, nothing;", "mov.b32 nothing, 0x80008000;"] if old else [".reg .b32 m;"]
    for i, value in enumerate(_CONSTANTS[False, KINDS[kind].bits]):
        lines += [f"mov.b32 m, {value:#010x};", _multiply(f"${i}", "$3", "m", "bf16x2", old)]
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def _spread_bytes(declarations, constants, arithmetic):
    """Return the text that turns the four bytes of `$4` into four pairs (f, f).

    Bytes 0 and 2 become the 16-bit halves of `e`, bytes 1 and 3 those of `o`; `arithmetic` turns each half into f.
    """
    return f"""{{
{declarations}
.reg .b16 f0, f1, f2, f3;
{constants}and.b32 e, $4, 0x00ff00ff;
prmt.b32 o, $4, 0, 0x4341;
{arithmetic}
mov.b32 {{f0, f2}}, e;
mov.b32 {{f1, f3}}, o;
mov.b32 $0, {{f0, f0}};
mov.b32 $1, {{f1, f1}};
mov.b32 $2, {{f2, f2}};
mov.b32 $3, {{f3, f3}};
}}"""


@constexpr_function
def powers(limited=True, old=False):
    """Return the text from four e8m0 bytes E to pairs (f, f) with f = 2^(E - 1 - E2M1_SHIFT) in bf16.

    Bytes from 55 to 188 (scales 2^-72 to 2^61) give exact weights, and smaller ones weights of 0. Larger bytes, 255
    (NaN) among them, give infinity if `limited`, and must not occur otherwise.
    """
    offset = (126 - E2M1_SHIFT) << 7
    if not limited:
        text = f"mad.lo.u32 e, e, 128, {offset | offset << 16:#x};\nmad.lo.u32 o, o, 128, {offset | offset << 16:#x};"
        return _spread_bytes(".reg .b32 e, o;", "", text)
    declarations = ".reg .b32 e, o, c, top;"
    if old:  # these GPUs have no arithmetic on pairs of 16-bit integers; the sums do not carry
        declarations = f".reg .b32 l, h;\n{declarations}"
        limits = "\n".join(
            f"and.b32 l, {one}, 0xffff;\nshr.u32 h, {one}, 16;\nmin.u32 l, l, 0x7f80;\nmin.u32 h, h, 0x7f80;\n"
            f"shl.b32 h, h, 16;\nor.b32 {one}, l, h;"
            for one in ("e", "o")
        )
        sums = f"add.u32 e, e, c;\nadd.u32 o, o, c;\n{limits}"
    else:
        sums = "add.u16x2 e, e, c;\nadd.u16x2 o, o, c;\nmin.u16x2 e, e, top;\nmin.u16x2 o, o, top;"
    constants = f"mov.b32 c, {offset | offset << 16:#010x};\nmov.b32 top, 0x7f807f80;\n"
    return _spread_bytes(declarations, constants, f"mul.lo.u32 e, e, 128;\nmul.lo.u32 o, o, 128;\n{sums}")


@constexpr_function
def nvfp4_factors(half, old=False):
    """Return the text from four scale bytes of NVFP4 to pairs (f, f), f = v * 2^96 in bf16, or v in float16.

    A byte is the upper byte of a float16 v without its sign: five bits of exponent, three of fraction (vLLM 0.33.0,
    `nvfp4_marlin_process_scales`). Moved to their places in a bf16, they are v * 2^-112, subnormals included.
    """
    lines = [f"shl.b32 {name}, {name}, {7 if half else 4};" for name in ("e", "o")]
    if not half:
        lines += ["mov.b32 m, 0x73807380;", "mov.b32 nothing, 0x80008000;"]  # 2^104, for two products
        lines += [_multiply(name, name, "m", "bf16x2", old) for name in ("e", "e", "o", "o")]
    return _spread_bytes(".reg .b32 e, o, m, nothing;", "", "\n".join(lines))
