"""MXFP4 experts in the engine's own hands, on a CPU: gpt-oss through its model's loader, others through `quant_method`.

What needs a GPU is replaced by what it computes, as in `engine_preparation.py`: FlashInfer's interleaving of weights
for SM90 is its CUDA kernel line by line; AITER's shuffles are its Python functions in closed form; triton_kernels is
the package that comes with vLLM, told which GPU it is on.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engines.engine_preparation import _packed_exponents, _shuffle_scale, _shuffle_weight
from engines.vllm_engine import engine, ranks_of
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.oracle import mxfp4
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, Mxfp4Config, Mxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils import fp8_utils, mxfp4_utils
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import swizzle_blockscale
from vllm.model_executor.models import gpt_oss
from vllm.platforms import current_platform

#: Parts of a fused tensor of gpt-oss, and the engine's parameters.
PARAMETERS = {
    "gate_up_proj_blocks": "w13_weight",
    "gate_up_proj_scales": "w13_weight_scale",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_blocks": "w2_weight",
    "down_proj_scales": "w2_weight_scale",
    "down_proj_bias": "w2_bias",
}
LAYER = "layers.1.mlp.experts"


def stand_in(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Replace the operators, beside those of `engine_preparation.stand_in`."""
    monkeypatch.setattr(mxfp4, "_user_moe_activation_override", lambda: None, raising=False)
    monkeypatch.setattr(fp8_utils, "transform_sf_into_required_layout", _packed_exponents)
    _flashinfer(monkeypatch)
    _aiter(monkeypatch)
    if layout.startswith("aiter") or "cdna4" in layout:
        _rocm(monkeypatch, layout)
    if layout.startswith("triton-kernels"):
        _gpu_of_triton_kernels(monkeypatch, layout.removeprefix("triton-kernels-").removesuffix("/1"))


def _rocm(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """The engine's module for it asks the GPU when it is imported."""
    here = "gfx1250" if "gfx1250" in layout else "gfx950"
    module = ModuleType("vllm.platforms.rocm")
    for name in ("gfx942", "gfx950", "gfx1250"):
        setattr(module, f"on_{name}", lambda name=name: name == here)
    module.get_cdna_version = lambda: 4  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(mxfp4, "current_platform", _Rocm())


class _Rocm:
    """The platform as it is, but for its name."""

    def __getattr__(self, name: str) -> Any:
        return getattr(current_platform, name)

    def is_rocm(self) -> bool:
        return True


def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer
    from flashinfer import fp4_quantization, fused_moe

    def interleave(scales: Tensor) -> Tensor:
        return swizzle_blockscale(scales.view(torch.float8_e4m3fn)).view(torch.uint8)

    monkeypatch.setattr(flashinfer, "block_scale_interleave", interleave, raising=False)
    for module in (fp4_quantization, flashinfer):
        monkeypatch.setattr(module, "nvfp4_block_scale_interleave", lambda scales: interleave(scales).reshape(-1))
    monkeypatch.setattr(
        fused_moe,
        "interleave_moe_weights_for_sm90_mixed_gemm",
        lambda weight, kind: torch.stack([_interleaved_for_sm90(expert) for expert in weight]),
    )


#: Bits of a 32-bit word of eight codes, and by how much FlashInfer's kernel shifts them left.
_DEALT = {
    0x80: 24, 0x70: 18, 0x08: 12, 0x07: 6,
    0x8000: 13, 0x7000: 7, 0x0800: 1, 0x0700: -5,
    0x800000: 2, 0x700000: -4, 0x080000: -10, 0x070000: -16,
    0x80000000: -1, 0x10000000: 1, 0x60000000: -3, 0x08000000: -13, 0x01000000: -11, 0x06000000: -15,
}  # fmt: skip


def _interleaved_for_sm90(weight: Tensor) -> Tensor:
    """`interleave_fp4_weights_for_sm90_mixed_gemm_kernel` of one expert, uint8 `[rows, columns]`."""
    rows, columns = weight.shape
    out = torch.empty_like(weight)
    block, lane = torch.arange(rows // 2).view(-1, 1, 1), torch.arange(16).view(1, -1, 1)
    part, tile = torch.arange(columns // 32).view(1, 1, -1) * 32, lane // 4
    row, source = block // 8 * 16 + block % 8, part + tile * 8 + lane % 4
    picked = [weight[row + below, source + right].to(torch.int64) for right in (0, 4) for below in (0, 8)]
    word = picked[0] | picked[1] << 8 | picked[2] << 16 | picked[3] << 24
    dealt = torch.zeros_like(word)
    for bits, shift in _DEALT.items():
        kept = word & bits
        dealt |= kept << shift if shift > 0 else kept >> -shift
    target = part + lane // 8 * 16 + lane % 4 * 4
    for place in range(4):
        out[row + tile % 2 * 8, target + place] = (dealt >> (8 * place) & 0xFF).to(torch.uint8)
    return out


def _aiter(monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_of = lambda x: x.view(torch.uint8)  # noqa: E731

    def weight(x: Tensor, *, layout: tuple[int, int] = (16, 16), **how: bool) -> Tensor:
        return _shuffle_weight(bytes_of(x), **how).contiguous().view(x.dtype)

    def scale(x: Tensor, experts: int = 1, is_guinterleave: bool = False, gate_up: bool = False) -> Tensor:
        return _shuffle_scale(bytes_of(x), experts, is_guinterleave, gate_up).contiguous().view(x.dtype)

    def tiles(data: Tensor, arch: str, preshuffle_factor: int, scale_kwidth: int) -> Tensor:
        """Of `[experts, G, N]`: tiles of so many rows and columns, one after the other; transposed again."""
        experts, groups, rows = data.shape
        x = data.mT.reshape(experts, rows // preshuffle_factor, preshuffle_factor, groups // scale_kwidth, scale_kwidth)
        return x.transpose(2, 3).reshape(experts, rows // preshuffle_factor, groups * preshuffle_factor).mT

    found: dict[str, dict[str, Any]] = {
        "aiter.ops.shuffle": {
            "shuffle_weight": weight,
            "shuffle_scale": scale,
            "shuffle_weight_a16w4": lambda x, lanes, gate_up: weight(x, is_guinterleave=True, gate_up=gate_up),
            "shuffle_scale_a16w4": lambda x, experts, gate_up: scale(x, experts, True, gate_up),
        },
        "aiter.utility.fp4_utils": {"e8m0_shuffle": scale},
        "aiter.ops.triton.utils.shuffle": {"shuffle_scale_moe": tiles},
    }
    parents = ("aiter", "aiter.ops", "aiter.utility", "aiter.ops.triton", "aiter.ops.triton.utils")
    for name in (*parents, *found):
        module = ModuleType(name)
        module.__dict__.update(found.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


def _gpu_of_triton_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from triton_kernels.tensor_details import layout

    major = {"hopper": 9, "blackwell": 10, "cdna4": 0}[name]
    monkeypatch.setattr(layout, "cuda_capability_geq", lambda wanted, minor=0: major >= wanted)
    monkeypatch.setattr(layout, "is_hip_cdna4", lambda: name == "cdna4")
    pretended = SimpleNamespace(
        is_cuda=lambda: major > 0,
        is_rocm=lambda: not major,
        is_device_capability=lambda wanted: wanted == 10 * major,
        is_device_capability_family=lambda wanted: wanted == 10 * major,
    )
    monkeypatch.setattr(mxfp4_utils, "current_platform", pretended)
    monkeypatch.setattr(mxfp4_utils, "should_use_cdna4_mx_scale_swizzle", lambda: name == "cdna4")
    monkeypatch.setattr(mxfp4_utils, "should_use_gfx1250_mx_scale_swizzle", lambda: False, raising=False)


def gpt_oss_layer(source: Path, *, moe_backend: str, **options: Any) -> Any:
    """A layer of gpt-oss, filled by the engine's class of the model and made ready by its method."""
    moe, manager = ranks_of(source, moe_backend=moe_backend, **options)
    document = json.loads((source / "config.json").read_text())
    parallel = moe.moe_parallel_config
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    with engine(), mock.patch.object(parallel_state, "_TP", SimpleNamespace(rank_in_group=0, world_size=1)):
        layer = RoutedExperts(LAYER, moe.in_dtype, moe, GptOssMxfp4Config(), manager)
        model = gpt_oss.GptOssModel.__new__(gpt_oss.GptOssModel)
        nn.Module.__init__(model)
        model.config = SimpleNamespace(**document)
        model.parallel_config = SimpleNamespace(enable_expert_parallel=parallel.use_ep)
        model.add_module("layers", nn.ModuleDict({"1": nn.ModuleDict({"mlp": nn.ModuleDict({"experts": layer})})}))
        held = len(layer.w13_weight)
        start = parallel.ep_rank * held
        ranks = {
            "get_dp_group": alone,
            "get_pcp_group": alone,
            "get_tensor_model_parallel_world_size": parallel.tp_size,
            "get_tensor_model_parallel_rank": parallel.tp_rank,
        }
        with ExitStack() as stack:
            for name, value in ranks.items():
                stack.enter_context(mock.patch.object(gpt_oss, name, create=True, return_value=value))
            flat = mock.Mock(return_value=(parallel.tp_size, parallel.tp_rank))
            kind = gpt_oss.FusedMoEParallelConfig
            stack.enter_context(mock.patch.object(kind, "flatten_tp_across_dp_and_pcp", flat))
            loaded = _load(model, start, start + held, list(_fused(source)))
        assert loaded == {f"{LAYER}.{name}" for name in PARAMETERS.values()}
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def _load(model: Any, start: int, stop: int, weights: list[tuple[str, Tensor]]) -> set[str]:
    """Up to some version the loader is told the heads of the attention as well."""
    asked = model._load_weights_mxfp4.__func__.__code__.co_varnames
    heads = {"heads_per_rank": 0, "head_start": 0} if "heads_per_rank" in asked else {}
    found: set[str] = model._load_weights_mxfp4(
        ep_rank_end=stop, ep_rank_start=start, weights=weights, stacked_params_mapping=[], **heads
    )
    return found


def _fused(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the layer by the engine's names."""
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            if name.startswith(f"model.{LAYER}."):
                yield f"{LAYER}.{PARAMETERS[name.rpartition('.')[2]]}", file.get_tensor(name)


def draw_gpt_oss(source: Path, folder: Path, hidden: int, inner: int, experts: int, seed: int) -> Path:
    """The checkpoint with random experts of other sizes."""
    random = torch.Generator().manual_seed(seed)
    shutil.copytree(source, folder)
    changes = {"hidden_size": hidden, "intermediate_size": inner, "num_local_experts": experts}
    config = json.loads((source / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    drawn: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            drawn |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        path.unlink()
    for name in drawn:
        kind = name.rpartition(".")[2]
        if kind not in PARAMETERS:
            continue
        rows, columns = (2 * inner, hidden) if kind.startswith("gate_up") else (hidden, inner)
        if kind.endswith("bias"):
            drawn[name] = torch.randn(experts, rows, generator=random).to(torch.bfloat16)
            continue
        shape = (experts, rows, columns // 32, 16) if kind.endswith("blocks") else (experts, rows, columns // 32)
        low, high = (0, 256) if kind.endswith("blocks") else (100, 140)
        drawn[name] = torch.randint(low, high, shape, generator=random, dtype=torch.int64).to(torch.uint8)
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Generic(Mxfp4Config):  # type: ignore[misc]
    """Experts of any model but gpt-oss, whose method early versions give to `quant_method: mxfp4` too."""

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        return Mxfp4MoEMethod(layer.moe_config)


def as_mxfp4(source: Path, folder: Path) -> Path:
    """A checkpoint of compressed-tensors' MXFP4 with the names that the engine's own method for MXFP4 reads."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(source / "model.safetensors", "pt") as file:
        found = {name.replace("weight_packed", "weight"): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
