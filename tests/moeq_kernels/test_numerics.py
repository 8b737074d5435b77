"""The small numeric steps, bit for bit: what the interpreter gets wrong must come out right in both worlds."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from support.planned import quantize

from moeq_kernels import interpreter
from moeq_kernels.device.numerics import (
    dot,
    e4m3_to_float,
    float_to_e4m3,
    quotients,
    round_half_even,
    round_to,
    round_to_int8,
    sigmoid,
)
from moeq_kernels.device.scales import e2m1_to_float, scale_to_float

INTERPRET = interpreter.active()


@triton.jit
def _round_kernel(x, y, SIZE: tl.constexpr, INTERPRET: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(y + index, round_to(tl.load(x + index), y.dtype.element_ty, INTERPRET))


@triton.jit
def _scales_kernel(x, y, KIND: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    if KIND == "e2m1":
        tl.store(y + index, e2m1_to_float(tl.load(x + index).to(tl.int32)))
    elif KIND == "to e4m3":
        tl.store(y + index, float_to_e4m3(tl.load(x + index)))
    elif KIND == "codes":
        tl.store(y + index, e4m3_to_float(tl.load(x + index)))
    else:
        tl.store(y + index, scale_to_float(tl.load(x + index), KIND))


@triton.jit
def _map_kernel(x, y, SIZE: tl.constexpr, ROUND: tl.constexpr):
    index = tl.arange(0, SIZE)
    value = tl.load(x + index)
    tl.store(y + index, round_half_even(value) if ROUND else sigmoid(value))


@triton.jit
def _quotient_kernel(x, scales, y, codes, SIZE: tl.constexpr, INTERPRET: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, SIZE)
    value = quotients(tl.load(x + index), tl.load(scales + row), INTERPRET)
    tl.store(y + row * SIZE + index, value)
    tl.store(codes + row * SIZE + index, round_to_int8(tl.minimum(tl.maximum(value, -128.0), 127.0)))


@triton.jit
def _dot_kernel(a, b, c, INTERPRET: tl.constexpr):
    rows = tl.arange(0, 32)[:, None]
    columns = tl.arange(0, 32)[None, :]
    index = rows * 32 + columns
    acc = tl.zeros((32, 32), c.dtype.element_ty)
    tl.store(c + index, dot(tl.load(a + index), tl.load(b + index), acc, INTERPRET))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
def test_rounding_to_16_bits_is_to_nearest_even(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 1 << 32, (4096,), generator=generator, dtype=torch.int64)
    bits[1000:2000] = bits[1000:2000] & ~0x7FFF | 0x8000  # ties
    special = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, 3.4e38]
    x = (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)
    x[: len(special)] = torch.tensor(special)
    if dtype == torch.float16:
        x[2000:] = x[2000:].abs().clamp(1e-6, 6e4).nan_to_num()
    y = torch.empty(4096, dtype=dtype, device=device)
    _round_kernel[(1,)](x.to(device), y, SIZE=4096, INTERPRET=INTERPRET)
    wanted = x.to(dtype)
    same = (y.cpu().view(torch.int16) == wanted.view(torch.int16)) | (y.cpu().isnan() & wanted.isnan())
    assert same.all(), x[~same][:5]


def test_every_e2m1_code(device: torch.device) -> None:
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    y = torch.empty(16, device=device)
    _scales_kernel[(1,)](codes, y, KIND="e2m1", SIZE=16)
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert y.tolist() == positive + [-value for value in positive]
    assert y.cpu().signbit().tolist() == [False] * 8 + [True] * 8


def test_every_e8m0_byte(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    y = torch.empty(256, device=device)
    _scales_kernel[(1,)](codes, y, KIND="e8m0", SIZE=256)
    assert y[255].isnan()
    assert y[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]


@pytest.mark.parametrize("kind", ["codes", "e4m3"])
def test_every_e4m3_byte(kind: str, device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    y = torch.empty(256, device=device)
    _scales_kernel[(1,)](codes, y, KIND=kind, SIZE=256)
    wanted = codes.cpu().view(torch.float8_e4m3fn).float()
    assert torch.equal(y.cpu().nan_to_num(999), wanted.nan_to_num(999))
    assert torch.equal(y.cpu().isnan(), wanted.isnan())
    assert torch.equal(y.cpu()[:127].signbit(), wanted[:127].signbit())


def test_every_byte_of_marlins_nvfp4_scales(device: torch.device) -> None:
    codes = torch.arange(248, dtype=torch.uint8).repeat(2)[:256]  # above are infinity and NaN of float16
    y = torch.empty(256, device=device)
    _scales_kernel[(1,)](codes.to(device), y, KIND="s0e5m3", SIZE=256)
    wanted = (codes.to(torch.int16) << 7).view(torch.float16).float() / 128
    assert torch.equal(y.cpu(), wanted)


@pytest.mark.parametrize(("kind", "exponent"), [("float-120", 120), ("float-8", 8)])
def test_scales_with_an_exponent_folded_in(kind: str, exponent: int, device: torch.device) -> None:
    scales = torch.rand(256, generator=torch.Generator().manual_seed(2)) / 100
    stored = (scales * 2.0**exponent).to(torch.bfloat16)
    y = torch.empty(256, device=device)
    _scales_kernel[(1,)](stored.to(device), y, KIND=kind, SIZE=256)
    assert torch.equal(y.cpu(), scales.to(torch.bfloat16).float())


def test_rounding_to_e4m3_is_to_nearest_even(device: torch.device) -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2  # exact in float32
    near = torch.cat([ties.nextafter(torch.zeros(126)), ties.nextafter(torch.full((126,), 1e9))])
    special = torch.tensor([0.0, 448.0, 449.0, 464.0, 1e30, float("inf"), float("nan"), 1e-30, 2.0**-10, 2.0**-9])
    random = torch.randn(1024, generator=torch.Generator().manual_seed(3)) * 3
    x = torch.cat([codes, ties, near, special, random])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.zeros(4096 - len(x))])
    y = torch.empty(4096, dtype=torch.uint8, device=device)
    _scales_kernel[(1,)](x.to(device), y, KIND="to e4m3", SIZE=4096)
    wanted = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    found = y.cpu().view(torch.float8_e4m3fn)
    assert torch.equal(found.float().isnan(), wanted.float().isnan())
    known = ~x.isnan()
    assert torch.equal(y.cpu()[known], wanted.view(torch.uint8)[known])


def test_round_half_even(device: torch.device) -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.49, -127.5, 0.49999997, 1e6, 3.0, -2.5, 7.51, 0, 1, -1])
    y = torch.empty(16, device=device)
    _map_kernel[(1,)](x.to(device), y, SIZE=16, ROUND=True)
    assert torch.equal(y.cpu(), torch.round(x))


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("codes", [127, 448])
@pytest.mark.parametrize("bits", [8, 11], ids=["bf16", "f16"])
def test_quotients_by_an_inverse_are_those_of_divisions(bits: int, codes: int, device: torch.device) -> None:
    """Every fraction over every scale of such a fraction; powers of two change nothing but the exponent."""
    fractions = torch.arange(1 << bits - 1, 1 << bits).float()
    tops = fractions if bits == 8 else fractions[::37]
    powers = torch.arange(16) - 20
    x = (fractions[None] * torch.exp2(powers)[:, None]).flatten()
    scales = tops / codes
    y = torch.empty(len(tops), len(x), device=device)
    rounded = torch.empty(len(tops), len(x), dtype=torch.int8, device=device)
    _quotient_kernel[(len(tops),)](x.to(device), scales.to(device), y, rounded, SIZE=len(x), INTERPRET=INTERPRET)
    wanted = x[None] / scales[:, None]
    assert not torch.equal(x[None] * (1 / scales[:, None]), wanted)  # a product with the inverse alone is not enough
    assert torch.equal(y.cpu(), wanted)
    assert torch.equal(rounded.cpu(), wanted.round().clamp(-128, 127).to(torch.int8))


def test_quotients_of_values_without_inverse_are_finite(device: torch.device) -> None:
    x = torch.tensor([0.0, 1e-40, 1e-38, -1e-38]).repeat(4)
    y, codes = torch.empty(16, device=device), torch.empty(16, dtype=torch.int8, device=device)
    scale = torch.tensor([1e-38 / 127], device=device)
    _quotient_kernel[(1,)](x.to(device), scale, y, codes, SIZE=16, INTERPRET=INTERPRET)
    assert y.isfinite().all()
    assert y.abs().max() <= 127


def test_sigmoid_at_both_ends(device: torch.device) -> None:
    x = torch.tensor([-1e4, -88.0, -20.0, -1.0, 0.0, 1.0, 20.0, 1e4])
    y = torch.empty(8, device=device)
    _map_kernel[(1,)](x.to(device), y, SIZE=8, ROUND=False)
    torch.testing.assert_close(y.cpu(), torch.sigmoid(x), rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize(("dtype", "out"), [(torch.bfloat16, torch.float32), (torch.int8, torch.int32)])
def test_dot(dtype: torch.dtype, out: torch.dtype, device: torch.device) -> None:
    a, b = (torch.randint(-128, 128, (32, 32), generator=torch.Generator().manual_seed(i)).to(dtype) for i in (0, 1))
    c = torch.empty(32, 32, dtype=out, device=device)
    _dot_kernel[(1,)](a.to(device), b.to(device), c, INTERPRET=INTERPRET)
    assert torch.equal(c.double().cpu(), a.double() @ b.double())  # small integers: exact


@pytest.mark.parametrize("columns", [64, 100, 5000])
def test_quantised_rows(columns: int, device: torch.device) -> None:
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)).bfloat16()
    x[1] = 0
    codes, scales = quantize(x.to(device), None)
    top = x.float().abs().amax(1)
    wanted = torch.where(top > 0, top / 127, 1.0)
    assert torch.equal(scales.cpu(), wanted)
    assert torch.equal(codes.cpu(), torch.round(x.float() / wanted[:, None]).to(torch.int8))
