"""Weights of a layer as plain codes and scales, the same for every contender, and the reference's results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.cases import E2M1, Routed
from support.reference import Layer, moe, relative_error
from torch import Tensor

from bench.shapes import FORMATS, SHAPES, Format, Group, Shape
from bench.timing import inputs

#: Tokens whose outputs are compared; tokens do not mix, so more would cost minutes and tell little.
COMPARED = 16


@dataclass(frozen=True)
class Codes:
    """A stack of matrices: uint8 codes `[E, N, K]`, scales `[E, N, G]`, bias `[E, N]`, global scales float32 `[E]`.

    Scales are bytes where the format's are: e8m0 exponents for MXFP4, e4m3 for NVFP4. Those of blocks are repeated for
    every row of the block.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None
    global_scale: Tensor | None = None

    def padded(self, n: int, k: int, group_size: int, middle: int) -> Codes:
        """Add rows and columns of zero weights at the end."""
        more_n, more_k = n - self.codes.shape[1], k - self.codes.shape[2]
        if not more_n and not more_k:
            return self
        groups = 1 if group_size == -1 else -(-k // group_size)
        pad = torch.nn.functional.pad
        codes = pad(self.codes, (0, more_k, 0, more_n), value=middle)
        # e4m3 scales are rounded up with 0, as vLLM does it: its least numbers are below what Marlin keeps.
        neutral = 1 if self.global_scale is None else 0
        scales = pad(self.scales, (0, groups - self.scales.shape[2], 0, more_n), value=neutral)
        bias = None if self.bias is None else pad(self.bias, (0, more_n))
        return Codes(codes, scales, bias, self.global_scale)

    def rows(self, start: int, stop: int) -> Codes:
        """Take some of the output features."""
        bias = None if self.bias is None else self.bias[:, start:stop]
        return Codes(self.codes[:, start:stop], self.scales[:, start:stop], bias, self.global_scale)

    def then(self, other: Codes) -> Codes:
        """Join the output features of both."""
        bias = None if self.bias is None or other.bias is None else torch.cat([self.bias, other.bias], 1)
        codes, scales = torch.cat([self.codes, other.codes], 1), torch.cat([self.scales, other.scales], 1)
        return Codes(codes, scales, bias, self.global_scale)

    @property
    def e4m3(self) -> Tensor:
        """FP8 codes in torch's type."""
        return self.codes.contiguous().view(torch.float8_e4m3fn)

    def blocks(self, rows: int) -> Tensor:
        """Return the scales `[E, N / rows, G]` of blocks of so many rows."""
        return self.scales[:, ::rows].contiguous()


@dataclass(frozen=True)
class Problem:
    """A layer to time.

    Attributes:
        group: its format and shape.
        w13, w2: codes and scales; rows of w13 are in the order of the format.
        routing: one of `support.routing.ROUTINGS`.
    """

    group: Group
    w13: Codes
    w2: Codes
    routing: str = "uniform"

    @property
    def format(self) -> Format:
        """Format of the weights."""
        return FORMATS[self.group.format]

    @property
    def shape(self) -> Shape:
        """Sizes of the layer."""
        return SHAPES[self.group.shape]

    def padded(self, hidden: int, intermediate: int) -> tuple[Codes, Codes]:
        """Return w13 and w2 with both sizes rounded up; the layer computes the same."""
        fmt, half = self.format, self.shape.intermediate
        rest = (fmt.group_size, 1 << (self.bits - 1) if fmt.element.startswith("int") else 0)
        if fmt.order == "interleaved":
            w13 = self.w13.padded(2 * intermediate, hidden, *rest)
        else:
            gate, up = self.w13.rows(0, half), self.w13.rows(half, 2 * half)
            w13 = gate.padded(intermediate, hidden, *rest).then(up.padded(intermediate, hidden, *rest))
        return w13, self.w2.padded(hidden, intermediate, *rest)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.format.code_bits


def make_problem(group: Group, device: str = "cuda", seed: int = 0, routing: str = "uniform") -> Problem:
    """Draw codes, and scales that give weights of about 1 / sqrt(k): the same numbers in every process."""
    fmt, shape = FORMATS[group.format], SHAPES[group.shape]
    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
    w13, w2 = (_random(fmt, shape.experts, n, k, generator) for n, k in sizes)
    return Problem(group, w13, w2, routing)


def _random(fmt: Format, experts: int, n: int, k: int, generator: torch.Generator) -> Codes:
    device = generator.device
    codes = torch.randint(0, 1 << fmt.code_bits, (experts, n, k), generator=generator, device=device, dtype=torch.uint8)
    if fmt.element == "e4m3":
        # NaN and the largest value are left out; both signs are as frequent.
        codes = torch.where((codes & 127) > 125, codes & 128 | 64, codes)
    scales, whole = _random_scales(fmt, (experts, n, k), generator)
    bias = None
    if fmt.bias:
        bias = (torch.randn(experts, n, generator=generator, device=device) * 0.3).to(torch.bfloat16)
    return Codes(codes, scales, bias, whole)


def _random_scales(
    fmt: Format, sizes: tuple[int, int, int], generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Draw scales, and global ones for NVFP4."""
    experts, n, k = sizes
    device = generator.device
    groups = 1 if fmt.group_size == -1 else -(-k // fmt.group_size)
    size = (experts, -(-n // fmt.block_rows), groups)
    if fmt.element == "e2m1" and fmt.group_size == 16:
        # From 2 to 120: about 42 in the square mean, as the codes are about 3.
        scales = torch.randint(64, 112, size, generator=generator, device=device, dtype=torch.uint8)
        whole = (torch.rand(experts, generator=generator, device=device) + 0.5) / (125 * k**0.5)
        return scales, whole
    if fmt.element == "e2m1":
        middle = 126 - round(torch.log2(torch.tensor(3 * k**0.5)).item())
        scales = torch.randint(middle - 2, middle + 3, size, generator=generator, device=device, dtype=torch.uint8)
        return scales, None
    spread = (130 if fmt.element == "e4m3" else (1 << fmt.code_bits) * 0.29) * k**0.5
    scales = (torch.rand(size, generator=generator, device=device) + 0.5) / spread
    # Some peers keep float32 scales in bfloat16, so they are bfloat16 values for all.
    scales = scales.to(torch.bfloat16)
    if fmt.element == "e4m3" or fmt.int8_activations:
        scales = scales.float()
    return scales.repeat_interleave(fmt.block_rows, 1)[:, :n].contiguous(), None


def route(problem: Problem, tokens: int, seed: int) -> Routed:
    """Draw the tokens of a call and their experts: the same numbers in every process."""
    return inputs(problem.shape, tokens, 1000 + seed, problem.routing, problem.w13.codes.device)


class Stack:
    """Dequantises one expert at a time; looks like a float32 tensor `[E, N, K]` to the reference."""

    def __init__(self, codes: Codes, fmt: Format) -> None:
        self.parts, self.fmt, self.shape = codes, fmt, codes.codes.shape

    def __getitem__(self, expert: int) -> Tensor:
        codes, scales, k = self.parts.codes[expert], self.parts.scales[expert], self.shape[2]
        if self.fmt.element == "e2m1":
            values = torch.tensor(E2M1, device=codes.device)[codes.int()]
            whole = self.parts.global_scale
            nv = None if whole is None else scales.view(torch.float8_e4m3fn).float() * whole[expert]
            scales = torch.exp2(scales.float() - 127) if nv is None else nv
        elif self.fmt.element == "e4m3":
            values = codes.view(torch.float8_e4m3fn).float()
        else:
            values = codes.float() - (128.0 if self.fmt.element == "int8" else 8.0)
        size = k if self.fmt.group_size == -1 else self.fmt.group_size
        return values * scales.float().repeat_interleave(size, dim=1)[:, :k]


@dataclass(frozen=True)
class Truth:
    """The reference's result for some tokens of a call.

    Attributes:
        rows: the tokens.
        y: float32 `[rows, H]`.
        plain_error: relative error of the same arithmetic with bf16, int8 or e4m3 activations on dequantised weights.
        hit: number of experts that the whole call chooses.
    """

    rows: Tensor
    y: Tensor
    plain_error: float
    hit: int

    def error(self, y: Tensor) -> float:
        """Return the relative error of a result `[M, H]`; it is infinite where any number is not finite."""
        return relative_error(y[self.rows], self.y) if bool(y.isfinite().all()) else float("inf")


def truth(problem: Problem, tokens: int, seed: int = 0) -> Truth:
    """Compute the result of a call by the float32 reference."""
    fmt = problem.format
    routed = route(problem, tokens, seed)
    rows = torch.linspace(0, tokens - 1, min(tokens, COMPARED), device=routed.x.device).round().long().unique()
    biases = [None if part.bias is None else part.bias.float() for part in (problem.w13, problem.w2)]
    stacks: list[Any] = [Stack(part, fmt) for part in (problem.w13, problem.w2)]
    layer = Layer(*stacks, *biases, fmt.order, fmt.activation, limit=fmt.limit)
    given = (routed.x[rows], layer, routed.weights[rows], routed.ids[rows])
    y = moe(*given)
    plain = moe(*given, dtype=torch.bfloat16, int8_activations=fmt.int8_activations, fp8_groups=fmt.fp8_groups)
    return Truth(rows, y, relative_error(plain, y), routed.ids.unique().numel())
