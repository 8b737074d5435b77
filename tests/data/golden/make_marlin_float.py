"""Golden bytes of Marlin NVFP4, FP8 and MXFP8: vLLM's own preparation of MoE layers, run on a CPU.

    python make_marlin_float.py FOLDER

FOLDER holds an unpacked wheel of vLLM (`vllm/` and its `.dist-info`). Functions are taken out of its sources as they
are. The one operator that needs a GPU, `gptq_marlin_repack`, is stood in for by the packing of vLLM's own test helpers.
Writes `marlin_float.safetensors` and its entry of `MANIFEST.json` beside this file.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

HERE = Path(__file__).parent

#: Experts of the NVFP4 cases, whose bytes depend on each other, and of the others.
EXPERTS, ALONE = 2, 1
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


#: What is taken from each file.
NEEDED = {
    "quant_utils": {"get_pack_factor"},
    "marlin_utils": {
        "get_scale_perms",
        "marlin_permute_scales",
        "marlin_moe_padded_intermediate",
    },
    "marlin_utils_test": {"marlin_permute_weights", "marlin_weights", "get_weight_perm"},
    "marlin_utils_fp8": {
        "fp8_fused_exponent_bias_into_scales",
        "_moe_pad_shard_rows",
        "_moe_pad_last",
        "prepare_fp8_moe_layer_for_marlin",
        "pack_fp8_to_int32",
        "mxfp8_marlin_process_scales",
        "prepare_mxfp8_moe_layer_for_marlin",
    },
    "marlin_utils_fp4": {
        "_nvfp4_compute_scale_factor",
        "nvfp4_marlin_process_scales",
        "nvfp4_marlin_process_global_scale",
        "_repack_marlin_experts",
        "prepare_nvfp4_moe_layer_for_marlin",
    },
}


def take(path: Path, names: set[str], scope: dict[str, Any]) -> None:
    """Run some of a module's functions and its literal constants, without annotations and decorators."""
    kept: list[ast.stmt] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            node.decorator_list, node.returns = [], None
            for argument in (*node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            kept.append(node)
        elif isinstance(node, ast.Assign) and _is_literal(node.value):
            kept.append(node)
    exec(compile(ast.Module(kept, []), str(path), "exec"), scope)


def _is_literal(value: ast.expr) -> bool:
    try:
        ast.literal_eval(value)
    except ValueError:
        return False
    return True


def engine(folder: Path) -> dict[str, Any]:
    """The functions of the three files, and what they take from elsewhere."""
    scope: dict[str, Any] = {
        "torch": torch,
        "np": np,
        "math": math,
        "logger": SimpleNamespace(warning_once=lambda *_: None),
        "round_up": lambda size, multiple: -(-size // multiple) * multiple,
        "replace_parameter": setattr,
    }
    utils = folder / "vllm/model_executor/layers/quantization/utils"
    for name, functions in NEEDED.items():
        take(utils / f"{name}.py", functions, scope)

    def repack(b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool = False) -> Tensor:
        shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
        codes = (b_q_weight.unsqueeze(1) >> shifts.view(1, -1, 1)) & ((1 << num_bits) - 1)
        order = scope["get_weight_perm"](num_bits, is_a_8bit)
        return scope["marlin_weights"](codes.reshape(size_k, size_n), size_k, size_n, num_bits, order, is_a_8bit)

    scope["ops"] = SimpleNamespace(gptq_marlin_repack=repack)
    scope["get_marlin_input_dtype"] = lambda prefix=None: None
    return scope


class Maker:
    """Draws inputs, and keeps them with what the engine makes of them."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.random = torch.Generator().manual_seed(19)
        self.tensors: dict[str, Tensor] = {}

    def octets(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random, dtype=torch.int64).to(torch.uint8)

    def numbers(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        return ((torch.rand(shape, generator=self.random) + 0.01) / 100).to(dtype)

    def codes(self, *shape: int) -> Tensor:
        """E4M3 without NaN."""
        octets = self.octets(*shape)
        return torch.where((octets & 0x7F) == 0x7F, torch.zeros_like(octets), octets).view(torch.float8_e4m3fn)

    def keep(self, tag: str, kind: str, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            found = value.contiguous().clone()
            self.tensors[f"{tag}.{kind}.{name}"] = found.view(torch.uint8) if found.element_size() == 1 else found

    def nvfp4(self, tag: str, hidden: int, inner: int, params: torch.dtype, scales: range, gated: bool = True) -> None:
        """`scales`: bytes of the E4M3 scales; the second expert's are one exponent below the first's."""
        rows = (2 if gated else 1) * inner

        def draw(n: int, k: int) -> Tensor:
            found = self.octets(EXPERTS, n, k // 16, low=scales.start, high=scales.stop)
            found[1] = (found[1].int() - 8).clamp(min=0).to(torch.uint8)
            return found.view(torch.float8_e4m3fn)

        w13, w2 = self.octets(EXPERTS, rows, hidden // 2), self.octets(EXPERTS, hidden, inner // 2)
        s13, s2 = draw(rows, hidden), draw(hidden, inner)
        gs13, gs2 = self.numbers(EXPERTS), self.numbers(EXPERTS)
        layer = SimpleNamespace(
            num_experts=EXPERTS, hidden_size=hidden, intermediate_size_per_partition=inner, params_dtype=params
        )
        prepare = self.scope["prepare_nvfp4_moe_layer_for_marlin"]
        packed = prepare(layer, w13, s13, gs13.clone(), w2, s2, gs2.clone(), is_act_and_mul=gated)
        self.keep(tag, "in", {"w13": w13, "s13": s13, "gs13": gs13, "w2": w2, "s2": s2, "gs2": gs2})
        self.keep(tag, "out", dict(zip(("w13", "s13", "gs13", "w2", "s2", "gs2"), packed, strict=True)))

    def fp8(self, tag: str, hidden: int, inner: int, params: torch.dtype, scope: str, dtype: torch.dtype) -> None:
        w13, w2 = self.codes(ALONE, 2 * inner, hidden), self.codes(ALONE, hidden, inner)
        shapes = {
            "block": ((2 * inner // 128, hidden // 128), (hidden // 128, inner // 128)),
            "channel": ((2 * inner, 1), (hidden, 1)),
            "tensor": ((), ()),
        }[scope]
        s13, s2 = (self.numbers(ALONE, *shape, dtype=dtype) for shape in shapes)
        layer = SimpleNamespace(
            num_experts=ALONE, hidden_size=hidden, intermediate_size_per_partition=inner, orig_dtype=params
        )
        if scope == "block":
            layer.weight_block_size = [128, 128]
        packed = self.scope["prepare_fp8_moe_layer_for_marlin"](layer, w13, w2, s13.clone(), s2.clone())
        self.keep(tag, "in", {"w13": w13, "w2": w2, "s13": s13, "s2": s2})
        self.keep(tag, "out", dict(zip(("w13", "w2", "s13", "s2"), packed, strict=True)))

    def mxfp8(self, tag: str, hidden: int, inner: int) -> None:
        w13, w2 = self.codes(ALONE, 2 * inner, hidden), self.codes(ALONE, hidden, inner)
        s13 = self.octets(ALONE, 2 * inner, hidden // 32, high=255)
        s2 = self.octets(ALONE, hidden, inner // 32, high=255)
        torch.set_default_dtype(BF16)  # the engine sets it to the dtype of the model
        packed = self.scope["prepare_mxfp8_moe_layer_for_marlin"](SimpleNamespace(), w13, w2, s13, s2)
        torch.set_default_dtype(F32)
        self.keep(tag, "in", {"w13": w13, "w2": w2, "s13": s13, "s2": s2})
        self.keep(tag, "out", dict(zip(("w13", "w2", "s13", "s2"), packed, strict=True)))


def record(name: str, tensors: dict[str, Tensor], script: Path, libraries: dict[str, Path]) -> None:
    """Write `NAME.safetensors` and its entry of the manifest; the libraries' folders hold their `.dist-info`."""
    target, manifest = HERE / f"{name}.safetensors", HERE / "MANIFEST.json"
    versions = [
        next(folder.glob(f"{library}-*.dist-info")).name.removeprefix(f"{library}-").removesuffix(".dist-info")
        for library, folder in libraries.items()
    ]
    source = {"generator": script.name, "library": " + ".join(libraries), "version": " + ".join(versions)}
    save_file(tensors, target, metadata={"produced_by": json.dumps(source, sort_keys=True)})
    document = json.loads(manifest.read_text())
    document[name] = {
        "bytes": target.stat().st_size,
        "file": target.name,
        "numpy": np.__version__,
        "produced_by": source,
        "sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
        "tensors": {
            key: [str(value.dtype).removeprefix("torch."), list(value.shape)] for key, value in sorted(tensors.items())
        },
        "torch": torch.__version__,
    }
    manifest.write_text(json.dumps(document, indent=1, sort_keys=True))


def main() -> None:
    folder = Path(sys.argv[1])
    maker = Maker(engine(folder))
    maker.nvfp4("nvfp4_full", 128, 64, BF16, range(0x7F))
    maker.nvfp4("nvfp4_small", 128, 64, BF16, range(8, 0x48))
    maker.nvfp4("nvfp4_pad96", 128, 96, BF16, range(0x28, 0x70))
    maker.nvfp4("nvfp4_ungated", 128, 64, BF16, range(0x30, 0x7F), gated=False)
    maker.nvfp4("nvfp4_fp16", 128, 64, F16, range(0x7F))
    maker.fp8("fp8_block", 256, 256, BF16, "block", F32)
    maker.fp8("fp8_block_one_group", 256, 128, BF16, "block", BF16)
    maker.fp8("fp8_block_fp16", 256, 128, F16, "block", F32)
    maker.fp8("fp8_channel_pad96", 128, 96, BF16, "channel", BF16)
    maker.fp8("fp8_channel_fp16", 128, 64, F16, "channel", F32)
    maker.fp8("fp8_tensor", 128, 64, BF16, "tensor", F32)
    maker.mxfp8("mxfp8", 128, 64)
    maker.mxfp8("mxfp8_pad96", 128, 96)

    record("marlin_float", maker.tensors, Path(__file__), {"vllm": folder})


if __name__ == "__main__":
    main()
