"""MoE layers of real models, weight formats, token counts, and the least time of a layer: what all benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

#: The GPU whose rates count where there is none.
H200 = "NVIDIA H200"
#: Bytes a second that a kernel reads from memory (`timing.measured_read`), by torch's name of the GPU.
READ = {H200: 4.4e12, "NVIDIA H100 80GB HBM3": 3.05e12}
#: Additions and multiplications a second of the tensor cores in bf16, measured on both GPUs; 8 bits have twice that.
BF16, BYTES = 790e12, 1580e12
#: Bytes of the largest second-level cache, an H200's.
L2 = 60e6


@dataclass(frozen=True)
class Shape:
    """A MoE layer on one GPU."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


#: Layers that plans were tuned on. `-tp8` and `-tp4` are the share of one rank of 8 or 4.
KNOWN = {
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v3-tp8": Shape(256, 8, 7168, 256),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
}

#: Layers that plans were not tuned on.
HELD_OUT = {
    "qwen3-next-80b": Shape(512, 10, 2048, 512),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880),
    "kimi-k2-tp8": Shape(384, 8, 7168, 256),
    "glm-4.5-air": Shape(128, 8, 4096, 1408),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "minimax-m2-tp4": Shape(256, 8, 3072, 384),
    "phi-3.5-moe": Shape(16, 2, 4096, 6400),
}

SHAPES = {
    **KNOWN,
    **HELD_OUT,
    "qwen3-235b-tp4": Shape(128, 8, 4096, 384),
    "mixtral-8x7b-tp8": Shape(8, 2, 4096, 1792),
}


@dataclass(frozen=True)
class Format:
    """Quantisation of the experts and arithmetic of the layer.

    Attributes:
        element: `int4`, `int8`, `e2m1` or `e4m3`.
        group_size: codes along k that share a scale; -1 is one scale per output feature.
        bits: stored bits per weight, scales included.
        order, activation, limit, bias: arguments of `moeq_kernels.fused_moe`.
        block_rows: output features that share a scale.
        int8_activations: whether rows are quantised to int8.
        fp8_activations: whether rows are quantised to e4m3.
        fp8_columns: columns of an e4m3 row that share a scale; -1 is all of them, 0 as many as in the weights.
        peak: operations per second of a Hopper GPU in this arithmetic.
    """

    element: str
    group_size: int
    bits: float
    order: str = "gate-up"
    activation: str = "silu"
    limit: float | None = None
    bias: bool = False
    block_rows: int = 1
    int8_activations: bool = False
    fp8_activations: bool = False
    fp8_columns: int = 0
    peak: float = BF16

    @property
    def code_bits(self) -> int:
        """Bits of a weight's code."""
        return 8 if self.element in ("int8", "e4m3") else 4

    @property
    def fp8_groups(self) -> int | None:
        """Columns of an e4m3 row that share a scale, all of them at -1; None where rows are not e4m3."""
        return (self.fp8_columns or self.group_size) if self.fp8_activations else None


_BLOCK = 8 + 32 / (128 * 128)

#: `mxfp4` is gpt-oss's layer (biases, clamped SwiGLU, interleaved rows), which every peer computes; `mxfp4-silu` has
#: SiLU, no biases, and gate before up. 4-bit weights with e4m3 activations (`-fp8`) have one scale per row. NVFP4 has
#: e4m3 scales and a float32 scale per expert. FP8 has float32 scales by channel, or by blocks of 128 x 128.
FORMATS = {
    "int4": Format("int4", 128, 4 + 16 / 128),
    "int8": Format("int8", 128, 8 + 16 / 128),
    "mxfp4": Format("e2m1", 32, 4.25, "interleaved", "swiglu_oai", 7.0, bias=True),
    "mxfp4-silu": Format("e2m1", 32, 4.25),
    "mxfp4-fp8": Format("e2m1", 32, 4.25, fp8_activations=True, fp8_columns=-1, peak=BYTES),
    "int4-fp8": Format("int4", 128, 4 + 16 / 128, fp8_activations=True, fp8_columns=-1, peak=BYTES),
    "w8a8": Format("int8", -1, 8.0, int8_activations=True, peak=BYTES),
    "nvfp4": Format("e2m1", 16, 4.5),
    "fp8-block-w8a8": Format("e4m3", 128, _BLOCK, block_rows=128, fp8_activations=True, peak=BYTES),
    "fp8-w8a8": Format("e4m3", -1, 8.0, fp8_activations=True, peak=BYTES),
    "fp8-block": Format("e4m3", 128, _BLOCK, block_rows=128),
    "fp8": Format("e4m3", -1, 8.0),
}

#: Token counts, most telling first: a run that is cut short drops the end of this list.
TOKENS = (1, 8, 128, 4096, 32, 512, 64, 16, 256, 8192, 1024, 4, 2, 2048, 16384)


@dataclass(frozen=True)
class Group:
    """One format at one shape; all its token counts are set up, and lost, together."""

    format: str
    shape: str


def whole_blocks(fmt: Format, shape: Shape) -> bool:
    """Return whether both sizes are whole blocks; checkpoints with scales of blocks have no others."""
    return fmt.block_rows == 1 or not (shape.hidden % fmt.block_rows or shape.intermediate % fmt.block_rows)


def _groups() -> Iterator[Group]:
    layers = (*KNOWN, *HELD_OUT)
    for shape, fmt in product(layers, ("int4", "mxfp4", "w8a8")):
        yield Group(fmt, shape)
    for shape, fmt in product(layers, ("mxfp4-silu", "mxfp4-fp8", "int4-fp8")):
        yield Group(fmt, shape)
    for shape, fmt in product(layers, ("nvfp4", "fp8-block-w8a8", "fp8-w8a8", "fp8-block", "fp8")):
        if whole_blocks(FORMATS[fmt], SHAPES[shape]):
            yield Group(fmt, shape)
    for shape in KNOWN:
        yield Group("int8", shape)
    yield Group("int4", "qwen3-235b-tp4")
    yield Group("int4", "mixtral-8x7b-tp8")


#: Groups, most telling first.
GROUPS = tuple(_groups())


def weight_bytes(fmt: Format, shape: Shape, experts: float) -> float:
    """Return the bytes of codes and scales of that many experts, without padding."""
    return experts * 3 * shape.hidden * shape.intermediate * fmt.bits / 8


def operations(shape: Shape, tokens: int) -> int:
    """Count the multiplications and additions of a layer."""
    return 6 * shape.hidden * shape.intermediate * tokens * shape.top_k


@dataclass(frozen=True)
class Floor:
    """Least microseconds for the bytes, and for the arithmetic."""

    memory: float
    compute: float

    @property
    def time(self) -> float:
        """The larger of the two."""
        return max(self.memory, self.compute)


def floor(fmt: Format, shape: Shape, tokens: int, hit: float, read: float = READ[H200]) -> Floor:
    """Return the least time of a call that chooses `hit` experts.

    Weights of these experts, x, y and the activations between the products are read or written once, at `read` bytes a
    second. An activation between the products is one byte where rows are quantised, else two; it is written and read.
    """
    middle = 2 if fmt.int8_activations or fmt.fp8_activations else 4
    moved = weight_bytes(fmt, shape, hit) + 4 * tokens * shape.hidden
    moved += middle * tokens * shape.top_k * shape.intermediate
    return Floor(moved / read * 1e6, operations(shape, tokens) / fmt.peak * 1e6)
