"""Recoding against brute force: where an exact representation exists it is found, and where none does that is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.regroup import repeat_groups
from moeq.schemes.declared import Declared
from moeq.schemes.dequantize import E2M1_VALUES, dequantize
from moeq.schemes.format import Context
from moeq.schemes.registry import get_format, read_dialect
from moeq.transcode import recode_matrices as recode
from moeq.transcode.compare import compare, same_codes
from moeq.transcode.configs import Contents, Quantisation, compressed_tensors, gptq
from moeq.transcode.spellings import SPELLINGS, pack

#: Every value of E4M3.
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E4M3 = E4M3[torch.isfinite(E4M3)].double()


def mxfp4(n: int, k: int, generator: torch.Generator, spread: int, zeros: float = 0.1) -> QuantizedMatrix:
    """Random codes under random power-of-two scales within `spread` exponents; some groups are all zero."""
    spec = MatrixSpec("up", n, k, "e2m1", 32, "e8m0")
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120 - spread, 121, (n, spec.num_groups), generator=generator, dtype=torch.uint8)
    empty = torch.rand(n, spec.num_groups, generator=generator) < zeros
    codes[empty.repeat_interleave(32, dim=1)[:, :k]] &= 8
    return QuantizedMatrix(spec, codes, scales)


@pytest.mark.parametrize("spread", [0, 6, 13, 14, 15, 16, 20])
def test_fp8_blocks_are_exact_wherever_a_power_of_two_scale_is(spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    matrix = mxfp4(200, 320, generator, spread)
    spec = replace(matrix.spec, element="e4m3", group_size=128, scale_dtype="f32")
    found = recode.to_fp8_blocks(matrix, spec)
    before, after = dequantize(matrix).double(), dequantize(found).double()
    exact = inexact = 0
    for row in range(0, 200, 128):
        for column in range(0, 320, 128):
            block, ours = before[row : row + 128, column : column + 128], after[row : row + 128, column : column + 128]
            distinct = block.unique()
            possible = any(
                bool(torch.isin(distinct / 2.0**power, E4M3).all()) for power in range(-30, 20) if distinct.numel()
            )
            assert torch.equal(block, ours) == possible
            exact, inexact = exact + possible, inexact + (not possible)
    loss = compare("m", matrix, found, (128, 128))
    assert (loss is None) == (inexact == 0)
    assert loss is None or (loss.blocks, loss.of_blocks) == (inexact, exact + inexact)


def test_a_span_of_14_exponents_is_exact_and_15_is_not() -> None:
    spec = MatrixSpec("up", 128, 128, "e2m1", 32, "e8m0")
    target = replace(spec, element="e4m3", group_size=128, scale_dtype="f32")
    codes = torch.tensor([7, 1] * 64, dtype=torch.uint8).expand(128, 128).contiguous()  # 6 and 0.5
    for span, exact in ((14, True), (15, False)):
        scales = torch.full((128, 4), 127 + span, dtype=torch.uint8)
        scales[1:, :] = 127
        matrix = QuantizedMatrix(spec, codes, scales)
        assert (compare("m", matrix, recode.to_fp8_blocks(matrix, target), (128, 128)) is None) == exact


@pytest.mark.parametrize("kind", ["tensor", "channel"])
def test_fp8_scales_are_repeated_where_blocks_have_one(kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    spec = MatrixSpec("up", 160, 256, "e4m3", 256, "f32")
    codes = torch.randint(0, 0x7F, (160, 256), generator=generator, dtype=torch.uint8)
    scales = torch.full((160, 1), 0.0173) if kind == "tensor" else torch.rand(160, 1, generator=generator) + 0.01
    matrix = QuantizedMatrix(spec, codes, scales)
    found = recode.to_fp8_blocks(matrix, replace(spec, group_size=128))
    loss = compare("m", matrix, found, (128, 128))
    if kind == "tensor":
        assert loss is None
        assert torch.equal(found.codes, codes)
    else:
        assert loss is not None
        assert loss.blocks == loss.of_blocks == 4
        assert loss.relative < 0.04  # E4M3 has three bits behind the point


@pytest.mark.parametrize("powers", [True, False])
def test_fp8_blocks_under_exponents_are_the_nearest_numbers(powers: bool) -> None:
    """Scales that are no powers of two are not stored as some: the codes change with them."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randn(200, 256, generator=generator).mul(60).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.exp2(torch.randint(-9, -5, (2, 2), generator=generator).float()) * (1.0 if powers else 1.7)
    spread = scales.repeat_interleave(128, 0)[:200].contiguous()
    matrix = QuantizedMatrix(MatrixSpec("up", 200, 256, "e4m3", 128, "f32"), codes, spread)
    found = recode.to_fp8_blocks(matrix, replace(matrix.spec, scale_dtype="e8m0"))
    before, after = dequantize(matrix), dequantize(found)
    assert torch.equal(before, after) == powers
    assert torch.equal(found.codes, codes) == powers
    assert float((before - after).abs().div(before.abs().clamp(min=1e-4)).max()) <= 2**-4


def test_tiny_blocks_get_a_scale_that_kernels_do_not_flush() -> None:
    codes = torch.ones(128, 128, dtype=torch.uint8)
    matrix = QuantizedMatrix(MatrixSpec("up", 128, 128, "e2m1", 32, "e8m0"), codes, torch.zeros(128, 4).byte())
    found = recode.to_fp8_blocks(matrix, replace(matrix.spec, element="e4m3", group_size=128, scale_dtype="f32"))
    assert float(found.scales.min()) == 2.0**-126
    assert torch.equal(dequantize(found), dequantize(matrix))


@pytest.mark.parametrize("spread", [0, 9, 17, 18, 22, 40])
def test_nvfp4_is_exact_where_scales_fit(spread: int) -> None:
    generator = torch.Generator().manual_seed(spread)
    matrices = [mxfp4(48, 160, generator, spread), mxfp4(32, 160, generator, spread)]
    specs = [replace(matrix.spec, group_size=16, scale_dtype="e4m3") for matrix in matrices]
    found = recode.to_e4m3_scales(matrices, specs)
    shared = {float(matrix.global_scale[0]) for matrix in found if matrix.global_scale is not None}
    assert len(shared) == 1
    reachable = sorted(float(value) for value in E4M3.unique() if value > 0)
    for matrix, result in zip(matrices, found, strict=True):
        before, after = dequantize(matrix), dequantize(result)
        scales = torch.exp2(matrix.scales.double() - 127) / shared.copy().pop()
        used = ((matrix.codes & 7) != 0).reshape(matrix.spec.n, -1, 32).any(dim=2)
        fits = torch.isin(scales, torch.tensor(reachable, dtype=torch.float64)) | ~used
        same = (before == after).reshape(matrix.spec.n, -1, 32).all(dim=2)
        assert bool(same[fits].all())
        if spread <= 17:
            assert bool(fits.all())


def test_codes_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    values = torch.arange(-7000, 7001, dtype=torch.float64) / 1000
    codes = recode.nearest_e2m1(values)
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    distance = (values.unsqueeze(1) - table[:8].unsqueeze(0) * torch.sign(values).unsqueeze(1)).abs()
    best = distance.min(dim=1).values
    assert torch.equal((table[codes.long()] - values).abs(), best)
    tied = (distance == best.unsqueeze(1)).sum(dim=1) > 1
    assert int(tied.sum()) > 10
    assert bool(((codes[tied & (values != 0)] & 1) == 0).all())


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("seed", range(40))
def test_integers_of_any_size_survive_every_spelling(seed: int) -> None:
    """Random bits, sizes, groups (the last one partial) and zero points through config, headers and words."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    bits = (2, 3, 4, 8)[draw(0, 4)]
    spelling = ("ct-pack", "gptq")[seed % 2]
    n, k = (8 * draw(1, 12), 32 * draw(1, 9)) if bits == 3 else (draw(1, 90), draw(1, 300))
    group = k if draw(0, 4) == 0 else min(k, 2 ** draw(3, 8))
    symmetric = draw(0, 2) == 0
    dtype = (torch.float16, torch.bfloat16, torch.float32)[draw(0, 3)]
    name = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[dtype]
    spec = MatrixSpec("up", n, k, f"int{bits}", group, name, symmetric=symmetric)
    zeros = torch.randint(1, 2**bits, (n, spec.num_groups), generator=generator, dtype=torch.int16)
    matrix = QuantizedMatrix(
        spec,
        torch.randint(0, 2**bits, (n, k), generator=generator, dtype=torch.uint8),
        torch.rand(n, spec.num_groups, generator=generator).to(dtype),
        zeros=None if symmetric else zeros,
    )
    contents = Contents({Quantisation(spelling, bits, -1 if group == k else group, symmetric): ["m"]}, [])
    config = (
        compressed_tensors(contents)
        if spelling == "ct-pack"
        else gptq(contents, "gptq_v2" if bits == 3 else ("gptq", "gptq_v2")[seed // 2 % 2])
    )
    declaration = read_dialect(config["quant_method"], config, "test")
    assert declaration is not None
    declared = declaration.resolve("m") or Declared("")
    signatures = SPELLINGS[spelling].signatures(spec)
    stored_as = get_format(SPELLINGS[spelling].format)
    described = stored_as.describe(signatures, Context("m", "up", declared, k_hint=k))
    assert described.spec == spec
    stored = pack(matrix, signatures, described.scheme, "m")
    assert {part: tuple(tensor.shape) for part, tensor in stored.items()} == {
        part: signature.shape for part, signature in signatures.items()
    }
    after = stored_as.unpack(stored, described.spec, described.scheme)
    assert compare("m", matrix, after, (1, group)) is None
    assert torch.equal(dequantize(matrix), dequantize(after))


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("seed", range(20))
def test_smaller_groups_mean_the_same(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = int(torch.randint(1, 500, (1,), generator=generator))
    group = (128, 64, 32)[seed % 3]
    spec = MatrixSpec("up", 12, k, "int4", min(group, k), "bf16", symmetric=False)
    matrix = QuantizedMatrix(
        spec,
        torch.randint(0, 16, (12, k), generator=generator, dtype=torch.uint8),
        torch.rand(12, spec.num_groups, generator=generator).to(torch.bfloat16),
        zeros=torch.randint(0, 16, (12, spec.num_groups), generator=generator, dtype=torch.int16),
    )
    size = next(size for size in (16, 8, 4, 2, 1) if spec.group_size % size == 0)
    found = repeat_groups(matrix, replace(spec, group_size=size))
    assert found.scales.shape == (12, -(-k // size))
    assert torch.equal(dequantize(matrix), dequantize(found))


def test_a_changed_number_is_found_where_it_is() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = mxfp4(600, 96, generator, 3)
    codes = matrix.codes.clone()
    codes[517, 70] ^= 5
    loss = compare("m", matrix, replace(matrix, codes=codes), (1, 32))
    before, after = dequantize(matrix), dequantize(replace(matrix, codes=codes))
    assert loss is not None
    assert (loss.numbers, loss.blocks, loss.of_blocks, loss.first) == (1, 1, 1800, (517, 70))
    assert loss.max_abs == abs(float(before[517, 70]) - float(after[517, 70]))


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("start", [0, 1, 3])
def test_equal_codes_are_found_whatever_their_places_in_memory(n: int, start: int) -> None:
    spec = MatrixSpec("up", n, 8, "e2m1", 32, "e8m0")
    flat = torch.randint(0, 16, (start + n * 8,), dtype=torch.uint8)
    codes, scales = flat[start:].reshape(n, 8), torch.full((n, 1), 120, dtype=torch.uint8)
    before, after = QuantizedMatrix(spec, codes, scales), QuantizedMatrix(spec, codes.clone(), scales)
    assert same_codes(before, after)
    after.codes[n - 1, 7] ^= 1
    assert not same_codes(before, after)
    assert not same_codes(before, QuantizedMatrix(spec, codes, scales + 1))
