"""The engine's own way from a checkpoint's experts to its kernels, on a CPU: its method, its loader, its preparation.

Operators that need a GPU are replaced by what they compute: `gptq_marlin_repack` by the packing of vLLM's own test
helpers, `scaled_fp8_quant` by a product that is rounded to E4M3, FlashInfer's `nvfp4_block_scale_interleave` and
`block_scale_interleave` by vLLM's `swizzle_blockscale`, AITER's and DeepGEMM's arrangements by their closed forms. The
golden bytes in `tests/data/golden` are made likewise.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from engines.vllm_engine import engine, ranks_of
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe.experts import aiter_mxfp8_moe, deep_gemm_moe
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils import fp8_utils, marlin_utils_fp4, marlin_utils_fp8
from vllm.model_executor.layers.quantization.utils.marlin_utils_test import get_weight_perm, marlin_weights
from vllm.model_executor.layers.quantization.utils.nvfp4_utils import swizzle_blockscale
from vllm.platforms import current_platform
from vllm.utils import deep_gemm

try:
    from vllm.model_executor.layers.fused_moe import b12x
except ImportError:  # 0.26.0
    b12x = None

from moeq.engines.vllm.config import method_of

#: Projection to the engine's name of its shard.
SHARDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
LAYER = "model.layers.1.mlp.experts"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the operators."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    for module in (marlin_utils_fp4, marlin_utils_fp8):
        monkeypatch.setattr(module.ops, "gptq_marlin_repack", _repack)
        # Up to 0.30.0 they make a buffer of the GPU's size, which the experts do not use.
        monkeypatch.setattr(module, "marlin_make_workspace_new", lambda *_, **__: torch.zeros(1), raising=False)
    monkeypatch.setattr(fp8_utils.ops, "scaled_fp8_quant", _to_fp8)
    # A scale that is a tensor of no dimension is rounded to the other's float16 on a GPU, and not on a CPU.
    monkeypatch.setattr(fp8_utils, "per_tensor_dequantize", lambda codes, scale: codes.half() * scale.half())
    monkeypatch.setattr(fp8_utils, "is_deep_gemm_e8m0_used", lambda: True)
    monkeypatch.setattr(fp8_utils, "per_block_cast_to_fp8", _plain(deep_gemm.per_block_cast_to_fp8), raising=False)
    monkeypatch.setattr(deep_gemm, "per_block_cast_to_fp8", _plain(deep_gemm.per_block_cast_to_fp8))
    monkeypatch.setattr(fp8_utils, "transform_sf_into_required_layout", _packed_exponents)
    monkeypatch.setattr(torch.ops, "_xpu_C", SimpleNamespace(is_xe2_arch=lambda: True), raising=False)
    monkeypatch.setattr(deep_gemm_moe, "get_mk_alignment_for_contiguous_layout", lambda: [128, 128])
    monkeypatch.setattr(aiter_mxfp8_moe, "is_aiter_mxfp8_moe_available", lambda: True, raising=False)  # 0.26.0
    shuffle = ModuleType("aiter.ops.shuffle")
    shuffle.shuffle_weight = _shuffle_weight  # type: ignore[attr-defined]
    shuffle.shuffle_scale = _shuffle_scale  # type: ignore[attr-defined]
    for module in (ModuleType("aiter"), ModuleType("aiter.ops"), shuffle):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if b12x is not None:
        monkeypatch.setattr(b12x, "get_b12x_fused_moe", _Handed)
        monkeypatch.setattr(b12x, "_is_current_stream_capturing", lambda: False)
    try:
        import flashinfer
        from flashinfer.quantization import fp4_quantization
    except ImportError:
        return

    def interleave(scales: Tensor) -> Tensor:
        return swizzle_blockscale(scales.view(torch.float8_e4m3fn)).view(torch.uint8)

    utils = ModuleType("flashinfer.cute_dsl.utils")  # that module needs CUTLASS, this function of it does not
    utils.convert_sf_to_mma_layout = _taken(Path(flashinfer.__file__).parent / "cute_dsl" / "utils.py")  # type: ignore
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setattr(flashinfer, "nvfp4_block_scale_interleave", lambda scales: interleave(scales).reshape(-1))
    monkeypatch.setattr(fp4_quantization, "block_scale_interleave", interleave)


class _Handed:
    """Stands for the b12x package: keeps what the engine's class hands to it."""

    discards_source_parameters = False

    def plan_weights(self, **options: Any) -> _Handed:
        self.options = options
        return self

    def prepare_weights(self, *, plan: _Handed, **given: Any) -> SimpleNamespace:
        return SimpleNamespace(plan=plan, given={**plan.options, **given})


def scales_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepGEMM on SM90 takes scales of blocks as they are."""
    monkeypatch.setattr(fp8_utils, "transform_sf_into_required_layout", lambda sf, *_, **__: sf)


def _repack(
    b_q_weight: Tensor, perm: Any = None, size_k: int = 0, size_n: int = 0, num_bits: int = 0, is_a_8bit: bool = False
) -> Tensor:
    shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
    codes = (b_q_weight.unsqueeze(1) >> shifts.view(1, -1, 1)) & ((1 << num_bits) - 1)
    order = get_weight_perm(num_bits, is_a_8bit)
    return marlin_weights(codes.reshape(size_k, size_n), size_k, size_n, num_bits, order, is_a_8bit)


def _to_fp8(numbers: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    dtype = current_platform.fp8_dtype()
    most = 224 if dtype == torch.float8_e4m3fnuz else 448
    return (numbers.float() * (1 / scale)).clamp(-most, most).to(dtype), scale


def _taken(path: Path, name: str = "convert_sf_to_mma_layout") -> Any:
    """A function out of its module."""
    tree = ast.parse(path.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    found.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, "ceil_div": lambda x, y: -(-x // y)}
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)
    return scope[name]


def _plain(function: Any) -> Any:
    """Without torch.compile."""
    return getattr(function, "_torchdynamo_orig_callable", function)


def _packed_exponents(sf: Tensor, mn: int, recipe: tuple[int, int, int], **_: Any) -> Tensor:
    """DeepGEMM on SM100: a scale for every row, four exponents to a word, rows next to each other."""
    rows = sf.index_select(-2, torch.arange(mn) // recipe[1])
    exponents = (rows.view(torch.int32) >> 23).to(torch.uint8)
    padded = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % 4, 0, -mn % 4))
    return padded.view(torch.int32).mT.contiguous().mT[..., :mn, :]


def _shuffle_weight(
    x: Tensor, layout: tuple[int, int] = (16, 16), is_guinterleave: bool = False, gate_up: bool = False
) -> Tensor:
    """AITER's tiles of 16 rows and 32 bytes, half a row of a tile (16 bytes) at a time.

    For FlyDSL 64 bytes, a quarter at a time; of w13 a tile of gate and one of up by turns.
    """
    columns, parts = (64, 4) if is_guinterleave else (32, 2)
    halves = 2 if gate_up else 1
    tiles = x.reshape(len(x), halves, -1, 16, x.shape[-1] // columns, parts, 16)
    return tiles.permute(0, 2, 1, 4, 5, 3, 6).reshape(x.shape)


def _shuffle_scale(x: Tensor, experts: int = 1, is_guinterleave: bool = False, gate_up: bool = False) -> Tensor:
    """AITER's tiles of 32 rows and 8 exponents: rows of both halves beside each other, of w13 those of gate and up."""
    rows, groups = len(x) // experts, x.shape[-1]
    assert rows % (32 if is_guinterleave else 256) == 0, "AITER would fill up"
    assert groups % 8 == 0, "AITER would fill up"
    if gate_up:
        x = x.view(experts, 2, -1, 16, groups).transpose(1, 2)
    tiles = x.reshape(-1, 2, 16, groups // 8, 2, 4)
    return tiles.permute(0, 3, 5, 2, 4, 1).reshape(-1, groups)


def prepared_layer(source: Path, *, moe_backend: str, config: Any = None, **options: Any) -> Any:
    """A layer of the source in the engine's own hands, filled and made ready by it.

    Args:
        config: the engine's quantisation config; without one, the one that the source's config names.
    """
    moe, manager = ranks_of(source, moe_backend=moe_backend, **options)
    original = json.loads((source / "config.json").read_text())["quantization_config"]
    parallel = moe.moe_parallel_config
    group = SimpleNamespace(rank_in_group=parallel.tp_rank, world_size=parallel.tp_size)
    with engine(), mock.patch.object(parallel_state, "_TP", group):  # no processes are started
        config = config or get_quantization_config(method_of(original)).from_config(original)
        config.packed_modules_mapping = {}
        layer = RoutedExperts(LAYER, moe.in_dtype, moe, config, manager)
        for name, tensor in _experts(source):
            expert, projection, part = name.split(".")
            role = "w2" if projection == "down_proj" else "w13"
            parameter = getattr(layer, f"{role}_{part}", None)
            if parameter is not None:
                spelled = f"experts.{role}_{part}"
                parameter.weight_loader(parameter, tensor, spelled, SHARDS[projection], int(expert))
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def _experts(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the layer by `EXPERT.PROJECTION.PART`."""
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.startswith(f"{LAYER}."):
                    yield name.removeprefix(f"{LAYER}."), file.get_tensor(name)


def draw(source: Path, folder: Path, hidden: int, inner: int, experts: int, seed: int) -> Path:
    """The checkpoint with random experts of other sizes. Gate and up share global scales, which the kernels want."""
    random = torch.Generator().manual_seed(seed)
    sizes = json.loads((source / "config.json").read_text())
    changes = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_local_experts": experts}
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(sizes | changes))
    of_hidden, of_inner = Fraction(hidden, sizes["hidden_size"]), Fraction(inner, sizes["moe_intermediate_size"])
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    others, models = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                (models if ".experts.0." in name else others)[name] = file.get_tensor(name)
        path.unlink()
    drawn = {name: tensor for name, tensor in others.items() if ".experts." not in name}
    for expert in range(experts):
        for name, tensor in models.items():
            ratio = (of_hidden, of_inner) if "down_proj" in name else (of_inner, of_hidden)
            by_channel = "channel" in source.name and name.endswith("scale")
            shape = tuple(tensor.shape)
            if len(shape) == 2:
                shape = int(shape[0] * ratio[0]), 1 if by_channel else int(shape[1] * ratio[1])
            drawn[name.replace(".experts.0.", f".experts.{expert}.")] = _random(tensor, shape, name, random)
    for name in drawn:
        gate = name.replace("up_proj", "gate_proj")
        if "up_proj" in name and drawn[name].numel() == 1 and "input_global" not in name:
            drawn[name] = drawn[gate].clone()
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def as_dynamic(source: Path, folder: Path) -> Path:
    """A checkpoint of compressed-tensors' FP8 as `quant_method: fp8`, scales of activations left to the engine."""
    return _rewritten(source, folder, {}, lambda name, tensor: None if "input_scale" in name else (name, tensor))


def as_deepseek(source: Path, folder: Path) -> Path:
    """A checkpoint of compressed-tensors' FP8 blocks in the form of DeepSeek's."""

    def spelled(name: str, tensor: Tensor) -> tuple[str, Tensor]:
        is_scale = "weight_scale" in name
        return name.replace("weight_scale", "weight_scale_inv"), tensor.float() if is_scale else tensor

    return _rewritten(source, folder, {"weight_block_size": [128, 128]}, spelled)


def _rewritten(
    source: Path, folder: Path, more: dict[str, Any], spelled: Callable[[str, Tensor], tuple[str, Tensor] | None]
) -> Path:
    """The checkpoint as `quant_method: fp8` with tensors by other names; those without one are left out."""
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **more}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with safe_open(source / "model.safetensors", "pt") as file:
        found = (spelled(name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        save_file(dict(filter(None, found)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _random(like: Tensor, shape: tuple[int, ...], name: str, random: torch.Generator) -> Tensor:
    """Any codes but NaN; scales are positive numbers that bf16 holds."""
    codes = torch.randint(0, 256, shape, generator=random, dtype=torch.int64).to(torch.uint8)
    if like.dtype == torch.float8_e4m3fn:
        scale = name.endswith("scale")
        found = codes.clamp(8, 0x7E) if scale else torch.where(codes & 0x7F == 0x7F, codes & 0x80, codes)
        return found.view(torch.float8_e4m3fn)
    if like.dtype == torch.uint8:
        return codes.clamp(100, 140) if name.endswith("scale") else codes
    numbers = (torch.rand(shape, generator=random) + 0.01) / 100
    return (1 / numbers if "global_scale" in name else numbers).to(torch.bfloat16).to(like.dtype)


def differences(ours: Any, theirs: Any, where: str = "") -> Iterator[str]:
    """Where two of the engine's objects differ; tensors in shape, dtype, strides and every bit."""
    if isinstance(theirs, Tensor):
        if not isinstance(ours, Tensor):
            yield f"{where}: {type(ours).__name__}, the engine has {tuple(theirs.shape)}"
        elif _form(ours) != _form(theirs):
            yield f"{where}: {_form(ours)}, the engine has {_form(theirs)}"
        elif not torch.equal(_bits(ours), _bits(theirs)):
            yield f"{where}: {int((_bits(ours) != _bits(theirs)).sum())} of {theirs.numel()} differ"
        elif getattr(theirs, "is_shuffled", False) != getattr(ours, "is_shuffled", False):
            yield f"{where}: is_shuffled"
    elif isinstance(theirs, dict):
        for name in theirs:
            yield from differences(ours[name], theirs[name], f"{where}[{name!r}]")
    elif dataclasses.is_dataclass(theirs) and not isinstance(theirs, type):
        for field in dataclasses.fields(theirs):
            yield from differences(getattr(ours, field.name), getattr(theirs, field.name), f"{where}.{field.name}")
    elif isinstance(theirs, (int, float, str, bool, tuple, list, type(None))) and ours != theirs:
        yield f"{where}: {ours!r}, the engine has {theirs!r}"


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """dtype, shape, and strides where there is a step to take (one number for all experts may be one in memory)."""
    steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.dtype, tuple(tensor.shape), steps if tensor.dim() > 1 else []


def _bits(tensor: Tensor) -> Tensor:
    whole = tensor.detach().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def layer_differences(ours: Any, theirs: Any) -> list[str]:
    """Of what the engine's kernel is called with and built from."""
    kernels = [layer.quant_method.moe_kernel for layer in (ours, theirs)]
    mine, wanted = (kernel.fused_experts for kernel in kernels)
    assert type(mine) is type(wanted)
    assert type(kernels[0].prepare_finalize) is type(kernels[1].prepare_finalize)
    found = [*differences(mine.quant_config, wanted.quant_config, "quant_config")]
    for name in ("w13_weight", "w2_weight"):
        found += differences(getattr(ours, name).data, getattr(theirs, name).data, name)
        if getattr(getattr(theirs, name), "is_shuffled", False) != getattr(getattr(ours, name), "is_shuffled", False):
            found.append(f"{name}: is_shuffled")
    for name, value in vars(wanted).items():
        if not name.startswith("_") and name not in ("quant_config", "moe_config"):
            found += differences(vars(mine).get(name), value, f"experts.{name}")
    if hasattr(wanted, "_prepared_experts"):
        found += differences(mine._prepared_experts.given, wanted._prepared_experts.given, "given")
    asked = copy.copy(ours.moe_config)
    asked.moe_backend = theirs.moe_config.moe_backend  # the test's own
    found += differences(asked, theirs.moe_config, "moe_config")
    parts = ("weight_scale", "weight_scale_2", "input_scale")
    made = {f"{role}_{part}" for role in ("w13", "w2") for part in parts}
    made |= {"g1_scale_c", "gemm1_clamp_limit", "gemm1_beta", "gemm1_alpha"}
    for name in made & dict(theirs.named_parameters()).keys() & dict(ours.named_parameters()).keys():
        found += differences(getattr(ours, name).data, getattr(theirs, name).data, name)
    return found
