"""Golden bytes of FP8 and MXFP8 on Intel XPUs, and of MXFP8 for AITER: their own preparation, run on a CPU.

    python make_fp8_vendors.py VLLM AITER

VLLM holds an unpacked wheel, AITER a checkout (`aiter/ops/shuffle.py`, and a folder `aiter-COMMIT.dist-info` that names
its commit). Functions are taken out of their sources as they are.

Writes `fp8_vendors.safetensors` and its entry of `MANIFEST.json` beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from make_fp8 import FP8, PARTS
from make_marlin_float import record, take
from torch import Tensor


class Vendors(FP8):
    """The same cases for other devices."""

    def xpu(self, name: str, given: dict[str, Tensor], gated: bool, block: list[int] | None) -> dict[str, Tensor]:
        order = ("w13", "s13", "w2", "s2")
        packed = self.scope["prepare_fp8_moe_layer_for_xpu"](*(given[part] for part in order))
        return dict(zip(order, packed, strict=True))

    def aiter(self, name: str, given: dict[str, Tensor], gated: bool, block: list[int] | None) -> dict[str, Tensor]:
        # As `rocm_aiter_ops.shuffle_mxfp8_moe_weights` calls them.
        weight, scale = self.scope["shuffle_weight"], self.scope["shuffle_scale"]
        s13, s2 = (given[name].reshape(-1, given[name].shape[-1]) for name in ("s13", "s2"))
        packed = (
            weight(given["w13"], is_guinterleave=True, gate_up=True),
            weight(given["w2"], is_guinterleave=True, gate_up=False),
            scale(s13, len(given["w13"]), is_guinterleave=True, gate_up=True).view(given["s13"].shape),
            scale(s2).view(given["s2"].shape),
        )
        return dict(zip(PARTS, packed, strict=True))


def engine(vllm: Path, aiter: Path) -> dict[str, Any]:
    """The functions."""
    scope: dict[str, Any] = {"torch": torch}
    experts = vllm / "vllm/model_executor/layers/fused_moe/experts"
    take(experts / "xpu_moe.py", {"prepare_fp8_moe_layer_for_xpu"}, scope)
    take(aiter / "aiter/ops/shuffle.py", {"shuffle_weight", "shuffle_scale"}, scope)
    return scope


def main() -> None:
    vllm, aiter = (Path(folder) for folder in sys.argv[1:])
    maker = Vendors(engine(vllm, aiter))
    maker.random = torch.Generator().manual_seed(23)
    maker.case("block", 128, 128, "block", ("xpu",))
    maker.case("tensor", 48, 20, "tensor", ("xpu",))
    maker.case("mx", 96, 32, "mx", ("xpu",))
    maker.case("mx_tiles", 256, 256, "mx", ("aiter",))
    record("fp8_vendors", maker.tensors, Path(__file__), {"vllm": vllm, "aiter": aiter})


if __name__ == "__main__":
    main()
