"""Random quantised MoE layers in every layout the kernels read, with the plain numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench import packing
from bench.reference import Layer
from moeq_kernels import PackedExperts, PackedMatrix


@dataclass(frozen=True)
class Quantised:
    """A stack of random matrices: uint8 codes `[E, N, K]`, scales `[E, N, G]`, zeros `[E, N, G]`, and their values."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    values: Tensor
    group_size: int
    bias: Tensor | None


def random_integers(
    shape: tuple[int, int, int],
    *,
    bits: int,
    group_size: int,
    zero_points: bool,
    dtype: torch.dtype,
    generator: torch.Generator,
    bias: bool = False,
) -> Quantised:
    """Random integer codes with scales that give values of about 1 / sqrt(K). shape is (E, N, K)."""
    experts, n, k = shape
    device = generator.device
    group = k if group_size == -1 else group_size
    groups = -(-k // group)
    codes = torch.randint(0, 1 << bits, shape, generator=generator, device=device, dtype=torch.uint8)
    spread = float((1 << bits) * 0.29 * k**0.5)
    scales = (torch.rand(experts, n, groups, generator=generator, device=device) + 0.5) / spread
    scales = scales.to(dtype)
    zeros = None
    middle: Tensor | float = float(1 << (bits - 1))
    index = torch.arange(k, device=device) // group
    if zero_points:
        low, high = (1 << bits) // 4, 3 * (1 << bits) // 4
        zeros = torch.randint(low, high, (experts, n, groups), generator=generator, device=device, dtype=torch.uint8)
        middle = zeros.float()[:, :, index]
    values = (codes.float() - middle) * scales.float()[:, :, index]
    vector = (torch.randn(experts, n, generator=generator, device=device) * 0.3).to(dtype) if bias else None
    return Quantised(codes, scales, zeros, values, group_size, vector)


def marlin_matrix(matrix: Quantised, bits: int) -> PackedMatrix:
    """Packed as `marlin-wna16/1`."""
    _, n, k = matrix.codes.shape
    return PackedMatrix(
        layout="marlin-wna16/1",
        weight=packing.marlin_weight(matrix.codes, bits),
        n=n,
        k=k,
        element=f"int{bits}",
        group_size=matrix.group_size,
        scale=packing.marlin_scale(matrix.scales),
        zero=None if matrix.zeros is None else packing.marlin_zero(matrix.zeros, bits),
        bias=None if matrix.bias is None else packing.marlin_bias(matrix.bias),
    )


#: layout id -> packer of integer matrices.
INTEGER_PACKERS: dict[str, Callable[[Quantised, int], PackedMatrix]] = {"marlin-wna16/1": marlin_matrix}


def integer_layer(
    layout: str,
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    bits: int = 4,
    group_size: int = 64,
    zero_points: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    order: str = "gate-up",
    bias: bool = False,
    activation: str = "silu",
    limit: float | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[PackedExperts, Layer]:
    """A weight-only int4 / int8 layer: packed, and as plain numbers."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows = intermediate if order == "ungated" else 2 * intermediate

    def matrix(n: int, k: int) -> Quantised:
        return random_integers(
            (experts, n, k),
            bits=bits,
            group_size=group_size,
            zero_points=zero_points,
            dtype=dtype,
            generator=generator,
            bias=bias,
        )

    w13, w2 = matrix(rows, hidden), matrix(hidden, intermediate)
    pack = INTEGER_PACKERS[layout]
    packed = PackedExperts(pack(w13, bits), pack(w2, bits), order)  # type: ignore[arg-type]
    b13 = None if w13.bias is None else w13.bias.float()
    b2 = None if w2.bias is None else w2.bias.float()
    return packed, Layer(w13.values, w2.values, b13, b2, order, activation, limit=limit)


@dataclass(frozen=True)
class Routed:
    """Random inputs: x `[M, H]`, weights and ids `[M, k]`."""

    x: Tensor
    weights: Tensor
    ids: Tensor


def route(
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Routed:
    """Standard normal inputs and uniform routing without replacement."""
    generator = torch.Generator(device=device).manual_seed(seed + 1000)
    x = torch.randn(tokens, hidden, generator=generator, device=device).to(dtype)
    logits = torch.rand(tokens, experts, generator=generator, device=device)
    weights, ids = logits.topk(top_k, dim=1)
    return Routed(x, weights / weights.sum(1, keepdim=True), ids.to(torch.int32))
