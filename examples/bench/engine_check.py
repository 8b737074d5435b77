"""Runs vLLM's own expert kernels on what moeq converted and loaded, on a GPU, against the float32 reference.

    python examples/bench/engine_check.py tests/data/checkpoints/* --out results.json

Three implementations for every checkpoint and every layout that fits it:

* `kernel`: `moeq.load_experts`, and the engine's function called on those tensors;
* `plug-in`: the engine's `RoutedExperts` with moeq's method, created, loaded, set up and applied by the engine;
* `engine`: the same with the source's own method: the engine loads the source and repacks it itself.

Activations and scales are bf16, as the engine rounds them. An error counts as right up to twice that of torch on
dequantised weights, rounded to bf16 where the engine's kernels hand a tensor on (activations to int8 for W8A8).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import moeq
from moeq.reference.moe import Activation, Expert, Linear, activate, moe, rounded

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

#: On a CPU everything is set up as far as the engine goes there.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

LAYOUTS = (
    "marlin-wna16/1",
    "marlin-act-order/1",
    "triton-wna16/1",
    "int8-w8a8/1",
    "marlin-mxfp4/1",
    "marlin-mxfp4-interleaved/1",
)
FACTOR = 2.0
LAYER = 1
TOKENS = (1, 17, 130)


@dataclass(frozen=True)
class Case:
    """Inputs and what they should give: float32 `y`, and the relative errors of bf16 torch and of int8 activations."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    y: Tensor
    plain_error: float
    int8_error: float


def error_of(y: Tensor, truth: Tensor) -> float:
    """Relative Frobenius error; infinite where a value is not finite."""
    y = y.float().cpu()
    return float((y - truth).norm() / truth.norm()) if bool(y.isfinite().all()) else float("inf")


def activation_of(checkpoint: Any) -> Activation:
    """Compute what the model does between the products."""
    return Activation(checkpoint.info.activation, limit=float(checkpoint.source.config.get("swiglu_limit") or 7.0))


def cases(source: Any) -> list[Case]:
    """Random tokens and routing, from the source's own dequantised weights."""
    info = source.info
    activation = activation_of(source)
    experts = {number: expert(source, number) for number in range(info.num_experts)}
    found = []
    for tokens in TOKENS:
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, info.hidden_size, generator=generator).to(torch.bfloat16)
        weights, ids = torch.rand(tokens, info.num_experts, generator=generator).topk(info.top_k, dim=1)
        weights = weights / weights.sum(1, keepdim=True)
        y = moe(x, experts.__getitem__, weights, ids, activation)
        errors = []
        for int8 in (False, True):
            plain = torch.zeros_like(y)
            for number in ids.unique().tolist():
                rows, slots = torch.where(ids == number)
                given = (x[rows], experts[number], activation, weights[rows, slots])
                plain.index_add_(0, rows, rounded_expert(*given, int8=int8))
            errors.append(error_of(plain.to(torch.bfloat16), y))
        found.append(Case(x, weights, ids, y, *errors))
    return found


def rounded_expert(x: Tensor, one: Expert, activation: Activation, weights: Tensor, int8: bool) -> Tensor:
    """Compute an expert's weighted output, rounded to bf16 wherever the engine's kernels hand a tensor on.

    With int8, rows go into the products as int8 codes times a scale each, and weights as they are.
    """
    dtype = None if int8 else torch.bfloat16
    x = codes(x.float()) if int8 else x
    gate, up = (rounded(linear(x, dtype), torch.bfloat16) for linear in (one.gate, one.up))
    hidden = rounded(activate(gate, up, activation), torch.bfloat16)
    down = one.down(codes(hidden) if int8 else hidden, dtype)
    return rounded(down * weights[:, None], torch.bfloat16)


def codes(rows: Tensor) -> Tensor:
    """Rows as int8 stores them, scaled by their largest value."""
    scale = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-10) / 127
    return (rows / scale).round() * scale


def expert(source: Any, number: int) -> Expert:
    """One expert's dequantised projections."""

    def linear(name: str) -> Linear:
        return Linear(source.dequantize(LAYER, number, name), source.matrix(LAYER, number, name).bias)

    return Expert(linear("gate"), linear("up"), linear("down"))


Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]


def marlin(experts: Any, activation: Activation) -> Implementation:
    """`fused_marlin_moe` on loaded tensors."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    w13, w2 = experts.w13, experts.w2
    kinds = {"int4": scalar_types.uint4b8, "int8": scalar_types.uint8b128, "e2m1": scalar_types.float4_e2m1f}
    kind = kinds[w13.element] if w13.zero is None else scalar_types.uint4
    options: dict[str, Any] = {"activation": MoEActivation.SILU}
    if activation.name == "swigluoai" and experts.w13_order == "interleaved":
        options = {"activation": MoEActivation.SWIGLUOAI}
    elif activation.name == "swigluoai":
        clamped = {"clamp_limit": activation.limit, "gemm1_alpha": activation.alpha, "gemm1_beta": 1.0}
        options = {"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE, **clamped}

    order: dict[str, Any] = {}
    if w13.group_index is not None:  # up to 0.29.0
        order = {"g_idx1": w13.group_index, "g_idx2": w2.group_index}
        order |= {"sort_indices1": w13.permutation, "sort_indices2": w2.permutation}

    def scale(matrix: Any) -> Tensor:
        exponents = matrix.scale.dtype == torch.uint8
        return matrix.scale.view(torch.float8_e8m0fnu) if exponents else matrix.scale.to(torch.bfloat16)

    def bias(matrix: Any) -> Tensor | None:
        return None if matrix.bias is None else matrix.bias.to(torch.bfloat16)

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(x, (0, w13.k - x.shape[1]))
        y = fused_marlin_moe(
            wide,
            w13.weight,
            w2.weight,
            bias(w13),
            bias(w2),
            scale(w13),
            scale(w2),
            weights,
            ids,
            quant_type_id=kind.id,
            global_num_experts=experts.num_experts,
            **order,
            w1_zeros=w13.zero,
            w2_zeros=w2.zero,
            **options,
        )
        return y[:, : x.shape[1]]

    return run


def triton(experts: Any, activation: Activation) -> Implementation:
    """`fused_experts_impl` on loaded tensors."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_impl

    w13, w2 = experts.w13, experts.w2
    if w13.layout == "int8-w8a8/1":
        options = {"use_int8_w8a8": True, "per_channel_quant": True, "w1_scale": w13.scale, "w2_scale": w2.scale}
    else:
        four = w13.element == "int4"
        options = {
            "use_int4_w4a16": four,
            "use_int8_w8a16": not four,
            "w1_scale": w13.scale.to(torch.bfloat16),
            "w2_scale": w2.scale.to(torch.bfloat16),
            "w1_zp": w13.zero,
            "w2_zp": w2.zero,
            "block_shape": [0, w13.group_size],
        }
    return lambda x, weights, ids: fused_experts_impl(
        x, w13.weight, w2.weight, weights, ids, global_num_experts=experts.num_experts, **options
    )


def kernel_implementation(converted: Path) -> Implementation:
    """Return moeq's loader, the engine's function."""
    experts = moeq.load_experts(converted, LAYER, device=DEVICE)
    activation = activation_of(moeq.open(converted))
    if experts.w13_order == "interleaved" and activation.name == "silu":
        raise ValueError("the engine has no SiLU for interleaved rows")
    return (marlin if experts.w13.layout.startswith("marlin") else triton)(experts, activation)


def plug_in_layer(checkpoint: Any, number: int, method: Any) -> Any:
    """Make the engine's layer with moeq's method, which fills it when the engine processes its weights."""
    return one_layer().empty_layer(checkpoint, number, method, "auto", torch.device(DEVICE), torch.bfloat16)


def source_layer(checkpoint: Any, number: int, method: Any, read: Callable[[str], Tensor] | None = None) -> Any:
    """Make the engine's layer with the source's method, filled as the engine fills it."""
    int8 = checkpoint.source.config["quantization_config"].get("format") == "int-quantized"
    backend = ("triton" if int8 else "marlin") if DEVICE == "cuda" else "auto"
    device = torch.device(DEVICE)
    return one_layer().filled_layer(checkpoint, number, method, backend, device, torch.bfloat16, read)


def one_layer() -> Any:
    """Import what builds layers of the engine, which imports the engine."""
    from moeq.engines.vllm import one_layer as found

    return found


def plug_in_implementation(converted: Path) -> Implementation:
    """Run the engine's layer with moeq's method, in the engine's kernels."""
    os.environ["MOEQ_KERNELS"] = "engine"
    checkpoint, build = moeq.open(converted), one_layer()
    run: Implementation = build.ready(plug_in_layer(checkpoint, LAYER, build.converted_method(checkpoint))).run
    return run


def engine_implementation(source: Path) -> Implementation:
    """Run the engine's layer with the source's method."""
    checkpoint, build = moeq.open(source), one_layer()
    run: Implementation = build.ready(source_layer(checkpoint, LAYER, build.source_method(checkpoint))).run
    return run


def outcome(build: Callable[[], Implementation], given: list[Case], layout: str = "") -> dict[str, Any]:
    """Errors of an implementation at every token count, or why there is none."""
    try:
        run = build()
        rows = []
        for case in given:
            y = run(case.x.to(DEVICE), case.weights.to(DEVICE), case.ids.to(DEVICE).to(torch.int32))
            error = error_of(y, case.y)
            plain = case.int8_error if layout == "int8-w8a8/1" else case.plain_error
            rows.append({"tokens": len(case.x), "error": error, "plain_error": plain})
    except Exception as error:  # noqa: BLE001 - whatever the engine raises is the finding
        return {"refused": f"{type(error).__name__}: {str(error)[:400]}"}
    return {"right": all(row["error"] <= FACTOR * row["plain_error"] for row in rows), "rows": rows}


def implementations(folder: Path, scratch: Path) -> Iterator[dict[str, Any]]:
    """Every implementation for a checkpoint."""
    source = moeq.open(folder)
    given = cases(source)
    for layout in LAYOUTS:
        target = scratch / f"{folder.name}-{layout.partition('/')[0]}"
        row = {"checkpoint": folder.name, "layout": layout}
        try:
            moeq.convert(folder, target, moeq.Deployment(gpu=moeq.gpu("H200")), layout=layout, force_layout=True)
        except moeq.MoeqError:
            continue  # the layout does not hold this format
        yield {**row, "implementation": "kernel", **outcome(lambda t=target: kernel_implementation(t), given, layout)}
        yield {**row, "implementation": "plug-in", **outcome(lambda t=target: plug_in_implementation(t), given, layout)}
    yield {
        "checkpoint": folder.name,
        "implementation": "engine",
        **outcome(lambda: engine_implementation(folder), given),
    }


def text(row: dict[str, Any]) -> str:
    """One line."""
    worst = max((r["error"] / r["plain_error"] for r in row.get("rows", ())), default=0.0)
    said = row.get("refused") or f"{'right' if row['right'] else 'WRONG'}, error {worst:.2f} x that of bf16 torch"
    return f"{row['checkpoint']:32s} {row['implementation']:8s} {row.get('layout', ''):28s} {said}"


def main() -> int:
    """Command line; exits 1 where the engine's kernels or moeq's plug-in give wrong numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path, nargs="+", help="checkpoint folders (files are passed over)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    from importlib.metadata import version

    about = {
        "schema": "moeq.engine-check/1",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
        "vllm": version("vllm"),
    }
    rows = []
    with tempfile.TemporaryDirectory() as scratch, one_layer().engine(torch.device(DEVICE)):
        for folder in filter(Path.is_dir, options.sources):
            for row in implementations(folder, Path(scratch)):
                rows.append(row)
                print(text(row), flush=True)
                options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 1 if any(row["implementation"] != "engine" and row.get("right") is False for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
