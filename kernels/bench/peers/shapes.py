"""What is timed: MoE layers of real models, weight formats, token counts, and which of them matter most. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A MoE layer on one GPU."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int


#: `-tp8` and `-tp4` are what one rank of 8 or 4 holds.
SHAPES = {
    "mixtral-8x7b": Shape(8, 2, 4096, 14336),
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v3-tp8": Shape(256, 8, 7168, 256),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880),
    "qwen3-235b-tp4": Shape(128, 8, 4096, 384),
    "mixtral-8x7b-tp8": Shape(8, 2, 4096, 1792),
}


@dataclass(frozen=True)
class Format:
    """How experts are quantised, and what the layer computes.

    Attributes:
        element: `int4`, `int8` or `e2m1`.
        group_size: codes along k that share a scale; -1 is one scale per output feature.
        order, activation, limit, bias: as `moeq_kernels.fused_moe` has them.
        int8_activations: rows are quantised to int8 on the way.
        bits: stored bits per weight, scales included.
        peak: multiplications per second of an H200 in this arithmetic, over 1e12.
    """

    element: str
    group_size: int
    bits: float
    order: str = "gate-up"
    activation: str = "silu"
    limit: float | None = None
    bias: bool = False
    int8_activations: bool = False
    peak: float = 790.0


#: MXFP4 is computed as gpt-oss does it (biases, clamped SwiGLU of interleaved rows): the one way that every peer knows.
FORMATS = {
    "int4": Format("int4", 128, 4 + 16 / 128),
    "int8": Format("int8", 128, 8 + 16 / 128),
    "mxfp4": Format("e2m1", 32, 4.25, "interleaved", "swiglu_oai", 7.0, bias=True),
    "w8a8": Format("int8", -1, 8.0, int8_activations=True, peak=1580.0),
}

#: Token counts, most telling first: a run that has to stop early stops at the end of this list.
TOKENS = (1, 8, 128, 4096, 32, 512, 64, 16, 256, 8192, 1024, 4, 2, 2048, 16384)


@dataclass(frozen=True)
class Group:
    """All token counts of one format at one shape: what is set up, and lost, together."""

    format: str
    shape: str


#: Groups, most telling first.
GROUPS = tuple(
    Group(*pair)
    for pair in (
        ("int4", "mixtral-8x7b"),
        ("int4", "qwen3-30b-a3b"),
        ("int4", "deepseek-v3-tp8"),
        ("mxfp4", "gpt-oss-20b"),
        ("mxfp4", "qwen3-30b-a3b"),
        ("w8a8", "mixtral-8x7b"),
        ("w8a8", "qwen3-30b-a3b"),
        ("int4", "gpt-oss-20b"),
        ("w8a8", "deepseek-v3-tp8"),
        ("w8a8", "gpt-oss-20b"),
        ("int8", "mixtral-8x7b"),
        ("int8", "qwen3-30b-a3b"),
        ("mxfp4", "deepseek-v3-tp8"),
        ("mxfp4", "mixtral-8x7b"),
        ("int8", "deepseek-v3-tp8"),
        ("int8", "gpt-oss-20b"),
        ("int4", "qwen3-235b-tp4"),
        ("int4", "mixtral-8x7b-tp8"),
    )
)

#: Read bandwidth of an H200 in bytes per second, as measured; the second-level cache in bytes.
BANDWIDTH, L2 = 4.4e12, 60e6


def weight_bytes(fmt: Format, shape: Shape, experts: float) -> float:
    """Codes and scales of that many experts, no padding."""
    return experts * 3 * shape.hidden * shape.intermediate * fmt.bits / 8


def operations(shape: Shape, tokens: int) -> int:
    """Multiplications and additions of a layer."""
    return 6 * shape.hidden * shape.intermediate * tokens * shape.top_k


@dataclass(frozen=True)
class Floor:
    """Least microseconds on an H200: for the bytes, and for the arithmetic."""

    memory: float
    compute: float

    @property
    def time(self) -> float:
        """The larger of the two."""
        return max(self.memory, self.compute)


def floor(fmt: Format, shape: Shape, tokens: int, hit: float) -> Floor:
    """For `hit` experts chosen: their weights, x, y and the activations in the middle, read or written once."""
    moved = weight_bytes(fmt, shape, hit) + 4 * tokens * shape.hidden + 4 * tokens * shape.top_k * shape.intermediate
    return Floor(moved / BANDWIDTH * 1e6, operations(shape, tokens) / (fmt.peak * 1e12) * 1e6)
