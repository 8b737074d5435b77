"""Calls of one family of kernels with a given plan, for measurements and checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeq_kernels import PackedExperts, cuda, prepared, schedules
from moeq_kernels.areas import Area
from moeq_kernels.compiling import Binary, Specialisation, compile_one, parameters_of
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.gpu import GPUS, Gpu, gpu_of
from moeq_kernels.launch import run_with_triton
from moeq_kernels.portable import quantize_launch
from moeq_kernels.prepared import prepare_for

if TYPE_CHECKING:
    from bench.timing import Shape  # which imports triton, and programs choose its interpreter before that


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
    """y `[M, H]` by that family's kernels, which have to support the layer; plan None is what the family chooses."""
    known = None if expert_map is None else expert_map.numel()
    tokens, top_k = topk_ids.shape
    layer = prepare_for(x, experts, top_k, tokens, epilogue, known, family=family, plan=plan, dependent=dependent)
    return layer(x, topk_weights, topk_ids, expert_map=expert_map)


def planned_launches(
    experts: PackedExperts, shape: Shape, numbers: Sequence[int], epilogue: Epilogue, family: str | None,
    plan: Any = None,
) -> Iterator[str]:  # fmt: skip
    """What calls of so many tokens would launch on an H200, a line for each, for experts on `meta`: no GPU is asked."""
    x = torch.empty(0, shape.hidden, dtype=torch.bfloat16, device="meta")
    layer = prepare_for(x, experts, shape.top_k, max(numbers), epilogue, None, gpu="H200", family=family)
    for tokens in numbers:
        schedule = schedules.schedule(layer.family, layer.problem, tokens, plan)
        names = [launch.kernel.rpartition(":")[2] for launch in schedule.launches]
        yield f"M={tokens:5d} {layer.family}: {', '.join(names)}; {schedule.workspace_bytes} bytes of workspace"


def pretend(name: str) -> None:
    """Plans, compiles and runs for another NVIDIA GPU from now on: its PTX, which the driver assembles for this one.

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
    """By the Hopper kernels for 16-bit activations."""
    return run_family("hopper-w4a16", *given, **options)


def hopper_int8_moe(*given: Any, **options: Any) -> Tensor:
    """By the Hopper kernels for W8A8."""
    return run_family("hopper-w8a8", *given, **options)


def hopper_fp8_moe(*given: Any, **options: Any) -> Tensor:
    """By the Hopper kernels for e4m3 x e4m3."""
    return run_family("hopper-fp8", *given, **options)


def portable_moe(*given: Any, **options: Any) -> Tensor:
    """By the portable kernels."""
    return run_family("portable", *given, **options)


def quantize(x: Tensor, static_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """int8 codes `[R, K]` and float32 scales `[R]` of rows, by the portable kernel."""
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
