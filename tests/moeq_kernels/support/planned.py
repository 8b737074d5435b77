"""Calls of one family of kernels with a given plan, for measurements and checks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import PackedExperts, cuda, prepared
from moeq_kernels.areas import Area
from moeq_kernels.compiling import Binary, Specialisation, compile_one, parameters_of
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.gpu import GPUS, Gpu, gpu_of
from moeq_kernels.launch import run_with_triton
from moeq_kernels.portable import quantize_launch
from moeq_kernels.prepared import prepare_for


def run_family(
    family: str,
    x: Tensor,
    experts: PackedExperts,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    epilogue: Epilogue = SILU,
    expert_map: Tensor | None = None,
    plan: Any = None,
    dependent: bool = True,
) -> Tensor:
    """Return y `[M, H]` by that family's kernels, which have to support the layer; plan None leaves it the choice."""
    known = None if expert_map is None else expert_map.numel()
    tokens, top_k = topk_ids.shape
    layer = prepare_for(x, experts, top_k, tokens, epilogue, known, family=family, plan=plan, dependent=dependent)
    return layer(x, topk_weights, topk_ids, expert_map=expert_map)


def pretend(name: str) -> None:
    """Plan, compile and run for another NVIDIA GPU from now on: the driver assembles its PTX for this GPU.

    So code for sm_80 runs on a GPU of sm_90, where no older one is at hand. Multiprocessors are counted as they are.
    """
    here = gpu_of(torch.device("cuda"))
    other = replace(GPUS[name], multiprocessors=here.multiprocessors)

    def as_ptx(wanted: Specialisation, gpu: Gpu) -> Binary:
        built = compile_one(wanted, gpu)
        return Binary(built.asm["ptx"].encode() + b"\0", built.metadata.name, built.metadata.num_warps,
                      built.metadata.shared, (), parameters_of(built.asm["ptx"]))  # fmt: skip

    prepared.gpu_of = lambda _device: other  # type: ignore[assignment]
    cuda.binary = as_ptx


def hopper_moe(*given: Any, **options: Any) -> Tensor:
    """Run the Hopper kernels for 16-bit activations."""
    return run_family("hopper-w4a16", *given, **options)


def hopper_int8_moe(*given: Any, **options: Any) -> Tensor:
    """Run the Hopper kernels for W8A8."""
    return run_family("hopper-w8a8", *given, **options)


def hopper_fp8_moe(*given: Any, **options: Any) -> Tensor:
    """Run the Hopper kernels for e4m3 x e4m3."""
    return run_family("hopper-fp8", *given, **options)


def portable_moe(*given: Any, **options: Any) -> Tensor:
    """Run the portable kernels."""
    return run_family("portable", *given, **options)


def quantize(x: Tensor, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantise rows by the portable kernel: int8 codes `[R, K]` and float32 scales `[R]`."""
    roots = {"x": x.contiguous(), "codes": torch.empty_like(x, dtype=torch.int8), "scales": x.new_empty(len(x)).float()}
    areas = {name: Area.like(name, tensor) for name, tensor in roots.items()}
    static = None
    if static_scale is not None:
        roots["static"] = static_scale
        static = Area.like("static", static_scale)
    run_with_triton(
        [quantize_launch(areas["x"], areas["codes"], areas["scales"], static, x.device.type == "cpu")], roots
    )
    return roots["codes"], roots["scales"]
