"""Golden bytes of NVFP4 for kernels with 4-bit activations: vLLM's own preparation of MoE layers, run on a CPU.

    python make_nvfp4.py VLLM FLASHINFER

VLLM and FLASHINFER hold unpacked wheels. Functions are taken out of their sources as they are. The one operator that
needs a GPU, FlashInfer's `nvfp4_block_scale_interleave`, is stood in for by vLLM's own `swizzle_blockscale`, whose
`.cuda()` stays on the CPU. Writes `nvfp4.safetensors` and its entry of `MANIFEST.json` beside this file.
"""

from __future__ import annotations

import functools
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from make_marlin_float import Maker, record, take
from torch import Tensor

#: Experts of a case.
EXPERTS = 1

#: What is taken from each file of FlashInfer and of vLLM.
FLASHINFER = {
    "utils": {"get_shuffle_block_size", "get_shuffle_matrix_a_row_indices", "get_shuffle_matrix_sf_a_row_indices"},
    "fused_moe/core": {
        "_maybe_get_cached_w3_w1_permute_indices",
        "get_w2_permute_indices_with_cache",
        "get_reorder_rows_for_gated_act_gemm_row_indices",
    },
}
UTILS = {
    "nvfp4_utils": {"swizzle_blockscale"},
    "flashinfer_utils": {"align_fp4_moe_weights_for_fi", "align_fp4_moe_hidden_dim_for_fi", "swap_w13_to_w31"},
    "flashinfer_fp4_moe": {
        "reorder_w1w3_to_w3w1",
        "interleave_linear_and_gate",
        "reorder_w13_to_w31_for_flashinfer_cutedsl",
        "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
        "prepare_static_weights_for_trtllm_fp4_moe",
        "prepare_nvfp4_moe_layer_for_fi_or_cutlass",
    },
    "b12x_moe": {"_pad_gated_weights", "_per_expert_scale", "prepare_nvfp4_moe_layer_for_b12x"},
}
NAMES = ("w13", "s13", "gs13", "a13", "w2", "s2", "gs2", "a2")

#: The engine's names of what a case draws.
ARGUMENTS = {
    "w13": "w13",
    "s13": "w13_scale",
    "gs13": "w13_scale_2",
    "w2": "w2",
    "s2": "w2_scale",
    "gs2": "w2_scale_2",
}


class Backend(Enum):
    """vLLM's names of the backends that one function prepares for."""

    FLASHINFER_TRTLLM = "FLASHINFER_TRTLLM"
    FLASHINFER_CUTLASS = "FLASHINFER_CUTLASS"
    FLASHINFER_CUTEDSL_BATCHED = "FLASHINFER_CUTEDSL_BATCHED"
    FLASHINFER_B12X = "FLASHINFER_B12X"
    VLLM_CUTLASS = "VLLM_CUTLASS"


def module(name: str, **names: Any) -> None:
    """A module that the functions import from while they run."""
    found = sys.modules.setdefault(name, ModuleType(name))
    vars(found).update(names)
    found.__path__ = []


def engine(vllm: Path, flashinfer: Path) -> dict[str, Any]:
    """The functions, and what they take from elsewhere."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]
    library: dict[str, Any] = {"torch": torch, "functools": functools}
    for name, functions in FLASHINFER.items():
        take(flashinfer / "flashinfer" / f"{name}.py", functions, library)
    scope: dict[str, Any] = {
        "torch": torch,
        "F": torch.nn.functional,
        "logger": SimpleNamespace(warning_once=lambda *_: None, info_once=lambda *_: None),
        "round_up": lambda size, multiple: -(-size // multiple) * multiple,
        "amax_for_moe_activation_quant": lambda scale, eplb: scale.max(),
        "MoEActivation": SimpleNamespace(SWIGLUOAI="swigluoai"),
    }
    for name, functions in UTILS.items():
        take(vllm / "vllm/model_executor/layers/quantization/utils" / f"{name}.py", functions, scope)

    def interleave(scales: Tensor) -> Tensor:
        return scope["swizzle_blockscale"](scales.view(torch.float8_e4m3fn)).view(torch.uint8).reshape(-1)

    module("flashinfer", nvfp4_block_scale_interleave=interleave)
    module("flashinfer.fused_moe")
    module("flashinfer.fused_moe.core", **{name: library[name] for name in FLASHINFER["fused_moe/core"]})
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"):
        module(name)
    module("vllm.model_executor.layers.fused_moe.oracle")
    module(
        "vllm.model_executor.layers.fused_moe.oracle.nvfp4",
        NvFp4MoeBackend=Backend,
        is_global_sf_supported_for_nvfp4_backend=lambda backend: backend != Backend.VLLM_CUTLASS,
    )
    return scope


class NVFP4(Maker):
    """Draws layers, and keeps what each preparation makes of them."""

    def draw(self, tag: str, hidden: int, inner: int, *, gated: bool = True) -> dict[str, Tensor]:
        rows = (2 if gated else 1) * inner
        found = {
            "w13": self.octets(EXPERTS, rows, hidden // 2),
            "s13": self.octets(EXPERTS, rows, hidden // 16, low=8, high=0x7F).view(torch.float8_e4m3fn),
            "gs13": self.numbers(EXPERTS),
            "w2": self.octets(EXPERTS, hidden, inner // 2),
            "s2": self.octets(EXPERTS, hidden, inner // 16, low=8, high=0x7F).view(torch.float8_e4m3fn),
            "gs2": self.numbers(EXPERTS),
        }
        self.keep(tag, "in", found)
        return found

    def prepared(self, source: dict[str, Tensor], gated: bool) -> dict[str, Any]:
        """Arguments that every function takes: copies, since some work in place."""
        found: dict[str, Any] = {name: source[key].clone() for key, name in ARGUMENTS.items()}
        projections = 2 if gated else 1
        return found | {"a13_scale": torch.ones(EXPERTS, projections), "a2_scale": torch.ones(EXPERTS, 1)}

    def layer(self, hidden: int, inner: int, gated: bool) -> SimpleNamespace:
        parallel = SimpleNamespace(enable_eplb=False)
        config = SimpleNamespace(
            moe_parallel_config=parallel,
            intermediate_size_per_partition=inner,
            hidden_dim=hidden,
            hidden_dim_unpadded=None,
        )
        return SimpleNamespace(activation=SimpleNamespace(is_gated=gated), moe_config=config)

    def case(self, tag: str, hidden: int, inner: int, names: tuple[str, ...], *, gated: bool = True) -> None:
        source = self.draw(tag, hidden, inner, gated=gated)
        for name in names:
            layer, arguments = self.layer(hidden, inner, gated), self.prepared(source, gated)
            if name.startswith("b12x"):
                a16 = {"reorder_w13": name == "b12x_a16"}
                packed = self.scope["prepare_nvfp4_moe_layer_for_b12x"](**arguments, is_act_and_mul=gated, **a16)
            elif name == "cutedsl":
                packed = self.scope["prepare_nvfp4_moe_layer_for_flashinfer_cutedsl"](layer=layer, **arguments)
            else:
                packed = self.scope["prepare_nvfp4_moe_layer_for_fi_or_cutlass"](
                    backend=Backend[name], layer=layer, **arguments, is_act_and_mul=gated
                )
            made = dict(zip(NAMES, packed, strict=True))
            if name == "FLASHINFER_B12X":
                # Two statements of its class, which need a GPU's class around them to be run as they are.
                for role in ("13", "2"):
                    factor = made[f"gs{role}"].view(-1, 1, 1)
                    made[f"s{role}"] = (made[f"s{role}"].float() * factor).to(made[f"s{role}"].dtype)
                    made[f"gs{role}"] = torch.ones_like(made[f"gs{role}"])
            kept = {part: made[part] for part in ("w13", "s13", "gs13", "w2", "s2", "gs2")}
            self.keep(f"{tag}.{name}", "out", kept)


def main() -> None:
    vllm, flashinfer = Path(sys.argv[1]), Path(sys.argv[2])
    maker = NVFP4(engine(vllm, flashinfer))
    tiled = ("VLLM_CUTLASS", "FLASHINFER_CUTEDSL_BATCHED", "FLASHINFER_CUTLASS")
    shuffled = ("FLASHINFER_TRTLLM", "cutedsl")
    maker.case("whole", 128, 128, (*tiled, *shuffled, "FLASHINFER_B12X", "b12x", "b12x_a16"))
    maker.case("odd64", 192, 64, (*tiled, *shuffled, "b12x", "b12x_a16"))
    maker.case("pad96", 128, 96, (*shuffled, "b12x", "b12x_a16"))
    maker.case("ungated", 128, 96, ("VLLM_CUTLASS", "FLASHINFER_CUTLASS", *shuffled, "b12x"), gated=False)
    record("nvfp4", maker.tensors, Path(__file__), {"vllm": vllm, "flashinfer_python": flashinfer})


if __name__ == "__main__":
    main()
