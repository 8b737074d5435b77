"""Golden tensors (the libraries' own outputs) and the adapters from their inputs to logical matrices."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from moeq.layouts.layout import Layout
from moeq.layouts.padding import plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix

FOLDER = Path(os.environ.get("MOEQ_TEST_GOLDEN") or Path(__file__).parents[1] / "data" / "golden")
if not (FOLDER / "MANIFEST.json").exists() and (FOLDER / "data" / "MANIFEST.json").exists():
    FOLDER = FOLDER / "data"


@lru_cache(maxsize=1)
def manifest() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "MANIFEST.json").read_text())
    return document


@cache
def tensors(name: str) -> dict[str, Tensor]:
    return dict(load_file(FOLDER / manifest()[name]["file"]))


_DTYPES = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.uint8: "e8m0",
    torch.float8_e4m3fn: "e4m3",
}


@dataclass(frozen=True)
class Source:
    """The logical tensors of all experts of one role, as a golden file stores them."""

    role: str
    element: str
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    bias: Tensor | None = None
    global_scales: Tensor | None = None
    gated: bool = True

    def spec(self) -> MatrixSpec:
        _, n, k = self.codes.shape
        return MatrixSpec(
            role=self.role,  # type: ignore[arg-type]
            n=n,
            k=k,
            element=self.element,
            group_size=k // self.scales.shape[2],
            scale_dtype=_DTYPES[self.scales.dtype],
            symmetric=self.zeros is None,
            bias_dtype=None if self.bias is None else _DTYPES[self.bias.dtype],
            gated=self.gated,
        )

    def expert(self, e: int) -> QuantizedMatrix:
        return QuantizedMatrix(
            spec=self.spec(),
            codes=self.codes[e],
            scales=self.scales[e],
            zeros=None if self.zeros is None else self.zeros[e].to(torch.int16),
            bias=None if self.bias is None else self.bias[e],
            global_scale=None if self.global_scales is None else self.global_scales[e].expand(self.codes.shape[1]),
        )


def nibbles(packed: Tensor) -> Tensor:
    """uint8 `[..., K / 2]`, low nibble first -> codes `[..., K]`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def pack_experts(layout: Layout, w13: Source, w2: Source, role: str, *, pad: bool = True) -> dict[str, Tensor]:
    """What moeq writes for one role, stacked along experts: padded by the layout's rule, calibrated, packed."""
    source = w13 if role == "w13" else w2
    experts = [source.expert(e) for e in range(source.codes.shape[0])]
    if pad:
        plan = plan_padding(layout, w13.spec(), w2.spec())
        experts = [plan.pad(matrix) for matrix in experts]
    found = [layout.calibrate(matrix) for matrix in experts]
    values = [value for value in found if value is not None]
    if values:
        layout = layout.with_calibration(max(values))
    packed = [layout.pack(matrix) for matrix in experts]
    return {part: torch.stack([one[part] for one in packed]) for part in packed[0]}


def lay(layout_id: str, **options: Any) -> Layout:
    return get_layout(layout_id, **options)


def same_bytes(mine: Tensor, golden: Tensor) -> bool:
    """Equal shape and equal bytes, whatever the dtypes are called."""
    if mine.shape != golden.shape or mine.element_size() != golden.element_size():
        return False
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (mine, golden)]
    return bool(torch.equal(*flat))
