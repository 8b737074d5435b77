"""Golden bytes of FP8 for kernels with 8-bit activations: vLLM's own preparation of MoE layers, run on a CPU.

    python make_fp8.py VLLM FLASHINFER AITER DEEPGEMM

VLLM, FLASHINFER and AITER hold unpacked wheels, DEEPGEMM a checkout (`tests/test_layout.py`, and a folder
`deep_gemm-COMMIT.dist-info` that names its commit). Functions are taken out of their sources as they are. Three
operators need a GPU:

* FlashInfer's `block_scale_interleave` is stood in for by vLLM's own `swizzle_blockscale`;
* DeepGEMM's `transform_sf_into_required_layout` by what its C++ does: on SM90 scales of blocks stay, on SM100 they are
  repeated for every row and packed by the reference of its tests;
* `torch.compile` is left out.

Writes `fp8.safetensors` and its entry of `MANIFEST.json` beside this file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from make_marlin_float import Maker, record, take
from make_nvfp4 import module
from torch import Tensor

UTILS = {
    "nvfp4_utils": {"swizzle_blockscale"},
    "flashinfer_utils": {
        "swap_w13_to_w31",
        "rotate_weights_for_fi_trtllm_fp8_per_tensor_moe",
        "align_moe_weights_for_fi",
        "align_mxfp8_moe_weights_for_fi_trtllm",
        "_shuffle_deepseek_fp8_moe_weights",
        "_shuffle_mxfp8_moe_weights",
        "prepare_fp8_moe_layer_for_fi",
    },
    "fp8_utils": {
        "requant_weight_ue8m0_inplace",
        "_upcast_e8m0_to_fp32",
        "deepgemm_post_process_weight_scale_block",
        "deepgemm_post_process_fp8_weight_block",
        "prepare_fp8_moe_layer_for_deepgemm",
    },
    "w8a8_utils": {"normalize_e4m3fn_to_e4m3fnuz"},
}
ROWS = {"get_shuffle_block_size", "get_shuffle_matrix_a_row_indices"}
GATED = {"get_reorder_rows_for_gated_act_gemm_row_indices", "reorder_rows_for_gated_act_gemm"}
PARTS = ("w13", "w2", "s13", "s2")


def engine(vllm: Path, flashinfer: Path, aiter: Path, deepgemm: Path) -> dict[str, Any]:
    """The functions, and what they take from elsewhere."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    library: dict[str, Any] = {"torch": torch, "flashinfer_api": lambda function: function}
    take(flashinfer / "flashinfer/utils.py", ROWS, library)
    take(flashinfer / "flashinfer/fused_moe/core.py", GATED, library)
    take(flashinfer / "flashinfer/quantization/fp4_quantization.py", {"shuffle_matrix_a"}, library)
    take(aiter / "aiter/ops/shuffle.py", {"shuffle_weight"}, library)
    ceil = {"torch": torch, "align": lambda x, y: -(-x // y) * y}
    scope: dict[str, Any] = {
        "torch": torch,
        "logger": SimpleNamespace(warning_once=lambda *_: None, info_once=lambda *_: None),
        "round_up": ceil["align"],
        "cdiv": lambda x, y: -(-x // y),
        "Sequence": list,
        "DEFAULT_BLOCK_SIZE": [128, 128],
        "get_fp8_min_max": lambda: (-448.0, 448.0),
        "current_platform": SimpleNamespace(fp8_dtype=lambda: torch.float8_e4m3fn),
    }
    for name, functions in UTILS.items():
        take(vllm / "vllm/model_executor/layers/quantization/utils" / f"{name}.py", functions, scope)
    casts = {"_ceil_to_ue8m0", "_align", "get_tma_aligned_size", "per_block_cast_to_fp8"}
    take(vllm / "vllm/utils/deep_gemm.py", casts, scope)
    ceil["get_tma_aligned_size"] = scope["get_tma_aligned_size"]
    take(deepgemm / "tests/test_layout.py", {"get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl"}, ceil)

    def interleave(scales: Tensor) -> Tensor:
        return scope["swizzle_blockscale"](scales.view(torch.float8_e4m3fn)).view(torch.uint8)

    def transform(sf: Tensor, mn: int, k: int, recipe: tuple[int, int, int], num_groups: int, is_sfa: bool) -> Tensor:
        if scope["sm"] == 90:
            return sf
        rows = sf.index_select(-2, torch.arange(mn) // recipe[1])
        packed: Tensor = ceil["get_mn_major_tma_aligned_packed_ue8m0_tensor_torch_impl"](rows)
        return packed.mT.contiguous()  # as it lies in memory

    scope["transform_sf_into_required_layout"] = transform
    scope["is_deep_gemm_e8m0_used"] = lambda: True
    scope["shuffle_weight"] = library["shuffle_weight"]
    rows = {name: library[name] for name in ROWS}
    module("flashinfer", **{name: library[name] for name in ("reorder_rows_for_gated_act_gemm", "shuffle_matrix_a")})
    module("flashinfer.utils", **rows)
    module("flashinfer.fused_moe")
    module("flashinfer.fused_moe.core", **{name: library[name] for name in GATED})
    module("flashinfer.quantization")
    module("flashinfer.quantization.fp4_quantization", block_scale_interleave=interleave)
    module("vllm")
    module("vllm.utils")
    module("vllm.utils.deep_gemm", per_block_cast_to_fp8=scope["per_block_cast_to_fp8"])
    return scope


class FP8(Maker):
    """Draws layers, and keeps what each preparation makes of them. One expert each."""

    def layer(self, gated: bool, block: list[int] | None) -> SimpleNamespace:
        config = SimpleNamespace(is_act_and_mul=gated, intermediate_size_per_partition=0, hidden_dim=0)
        found = SimpleNamespace(activation=SimpleNamespace(is_gated=gated), moe_config=config)
        return found if block is None else SimpleNamespace(**vars(found), weight_block_size=block)

    def draw(self, tag: str, hidden: int, inner: int, scope: str, gated: bool) -> dict[str, Tensor]:
        rows = (2 if gated else 1) * inner
        shapes = {
            "block": ((rows // 128, hidden // 128), (hidden // 128, inner // 128)),
            "channel": ((rows, 1), (hidden, 1)),
            "tensor": ((), ()),
            "mx": ((rows, hidden // 32), (hidden, inner // 32)),
        }[scope]
        found = {"w13": self.codes(1, rows, hidden), "w2": self.codes(1, hidden, inner)}
        for name, shape in zip(("s13", "s2"), shapes, strict=True):
            found[name] = self.octets(1, *shape, high=255) if scope == "mx" else self.numbers(1, *shape)
        self.keep(tag, "in", found)
        return found

    def case(self, tag: str, hidden: int, inner: int, scope: str, names: tuple[str, ...], gated: bool = True) -> None:
        source = self.draw(tag, hidden, inner, scope, gated)
        block = {"block": [128, 128], "mx": [1, 32]}.get(scope)
        for name in names:
            given = {part: source[part].clone() for part in PARTS}
            self.keep(f"{tag}.{name}", "out", getattr(self, name.partition("_")[0])(name, given, gated, block))

    def flashinfer(
        self, name: str, given: dict[str, Tensor], gated: bool, block: list[int] | None
    ) -> dict[str, Tensor]:
        scales = {"w13_scale": given["s13"], "w2_scale": given["s2"]}
        static = {"w13_input_scale": torch.ones(1), "w2_input_scale": torch.ones(1)}
        packed = self.scope["prepare_fp8_moe_layer_for_fi"](
            self.layer(gated, block), given["w13"], given["w2"], **scales, **static, is_trtllm=name.endswith("trtllm")
        )
        return dict(zip(PARTS, packed, strict=True))

    def deepgemm(self, name: str, given: dict[str, Tensor], gated: bool, block: list[int]) -> dict[str, Tensor]:
        self.scope["sm"] = int(name.partition("_sm")[2])
        packed = self.scope["prepare_fp8_moe_layer_for_deepgemm"](*(given[part] for part in PARTS), tuple(block))
        return dict(zip(PARTS, packed, strict=True))

    def aiter(self, name: str, given: dict[str, Tensor], gated: bool, block: list[int] | None) -> dict[str, Tensor]:
        if name.endswith("fnuz"):
            for w, s in (("w13", "s13"), ("w2", "s2")):
                given[w], given[s], _ = self.scope["normalize_e4m3fn_to_e4m3fnuz"](given[w], given[s])
        return given | {w: self.scope["shuffle_weight"](given[w], layout=(16, 16)) for w in ("w13", "w2")}


def main() -> None:
    vllm, flashinfer, aiter, deepgemm = (Path(folder) for folder in sys.argv[1:])
    maker = FP8(engine(vllm, flashinfer, aiter, deepgemm))
    maker.random = torch.Generator().manual_seed(20)
    both, shuffles = ("flashinfer_cutlass", "flashinfer_trtllm"), ("aiter_fn", "aiter_fnuz")
    maker.case("block", 128, 128, "block", (*both, *shuffles, "deepgemm_sm90", "deepgemm_sm100"))
    maker.case("block_groups", 256, 128, "block", ("flashinfer_trtllm", "deepgemm_sm100"))
    maker.case("channel", 64, 32, "channel", shuffles)
    maker.case("tensor", 64, 48, "tensor", both)
    maker.case("tensor_aiter", 64, 32, "tensor", shuffles)
    maker.case("tensor_pad40", 64, 40, "tensor", both)
    maker.case("tensor_ungated", 64, 96, "tensor", both, gated=False)
    maker.case("mx", 256, 128, "mx", ("flashinfer_trtllm", "deepgemm_sm100"))
    libraries = {"vllm": vllm, "flashinfer_python": flashinfer, "amd_aiter": aiter, "deep_gemm": deepgemm}
    record("fp8", maker.tensors, Path(__file__), libraries)


if __name__ == "__main__":
    main()
