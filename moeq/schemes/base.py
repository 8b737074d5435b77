"""The record that says how a checkpoint encodes its weights. Imports no torch.

The oracle decides on a `Scheme`, so it holds *everything* that a kernel may depend on: two checkpoints that some kernel
has to treat differently never compare equal. vLLM's keys do not tell group sizes apart, nor int4 in int8 from int8,
which has led to wrong choices of kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeq.matrix import ELEMENT_BITS

Granularity = Literal["tensor", "channel", "token", "group", "block"]

#: Form of the zero points: absent, stored without an offset, or stored minus one (GPTQ v1).
ZeroPoint = Literal["none", "stored", "stored-minus-one"]


@dataclass(frozen=True)
class ScaleKey:
    """Type and extent of a scale."""

    dtype: str  #: `f16`, `bf16`, `f32`, `e8m0`, `e4m3`
    granularity: Granularity
    group_shape: tuple[int, int]  #: `(rows, columns)` that share a scale; -1 stands for the whole axis
    dynamic: bool = False  #: whether scales are computed at run time (activations) instead of stored


@dataclass(frozen=True)
class QuantKey:
    """Type of a quantised tensor, weight or activation."""

    dtype: str  #: element type of a value: `int4`, `int8`, `e2m1`, `e4m3`, ... (see `moeq.matrix.ELEMENT_BITS`)
    storage: str  #: container of the stored elements: `i32-packed`, `u8-packed`, `i8`, `f8`, ...
    scale: ScaleKey
    symmetric: bool = True  #: whether there are no zero points
    scale2: ScaleKey | None = None  #: second-level scale (NVFP4's global scale), if any


#: Types of activations at run time that configs of several dialects ask for.
FP8_STATIC = QuantKey("e4m3", "runtime", ScaleKey("f32", "tensor", (-1, -1)))
FP8_PER_TOKEN = QuantKey("e4m3", "runtime", ScaleKey("f32", "token", (1, -1), dynamic=True))
FP8_PER_GROUP = QuantKey("e4m3", "runtime", ScaleKey("f32", "group", (1, 128), dynamic=True))
MXFP8 = QuantKey("e4m3", "runtime", ScaleKey("e8m0", "group", (1, 32), dynamic=True))
NVFP4 = QuantKey("e2m1", "runtime", ScaleKey("e4m3", "group", (1, 16), dynamic=True))


@dataclass(frozen=True)
class Scheme:
    """Encoding of one set of expert weights."""

    #: Id of the checkpoint format in the scheme registry (`gptq`, `awq`, `ct-pack`, `ct-int8`, `mxfp4`, ...).
    format: str
    weight: QuantKey
    #: Type that the checkpoint asks activations to be quantised to; None for weight-only.
    activation: QuantKey | None = None
    packing: str = ""  #: where a code sits in its container (free text of the format, shown to people)
    zero_point: ZeroPoint = "none"
    act_order: bool = False  #: whether columns are reordered by activation size (`g_idx` is not `k // group_size`)
    has_bias: bool = False
    quant_method: str = ""  #: the name under which the config declares it (`gptq`, `compressed-tensors`, ...)
    checkpoint_format: str = ""  #: the format's own variant (`gptq`, `gptq_v2`, `gemm`, `pack-quantized`, ...)
    writer: str | None = None

    @property
    def bits(self) -> int:
        """Bits per weight code."""
        return ELEMENT_BITS[self.weight.dtype]

    @property
    def group_size(self) -> int:
        """Weights along `K` per scale, or -1 for one scale per channel (or coarser)."""
        return self.weight.scale.group_shape[1]

    @property
    def title(self) -> str:
        """Short name for people, such as `gptq int4 g128 sym`."""
        scope = f"g{self.group_size}" if self.group_size > 0 else self.weight.scale.granularity
        symmetry = "sym" if self.weight.symmetric else "asym"
        order = " act-order" if self.act_order else ""
        activation = f" act-{self.activation.dtype}" if self.activation else ""
        return f"{self.format} {self.weight.dtype} {scope} {symmetry}{order}{activation}"
