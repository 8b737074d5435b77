"""Which small checkpoints are converted for what in the loader tests."""

from __future__ import annotations

from pathlib import Path

import torch

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.load import warmup
from moeq.load.activation import activation_of
from moeq.load.ranks import Rank
from moeq.load.torch_loader import open_converted
from moeq.model import Checkpoint
from moeq.reference.moe import Expert, Linear, moe
from moeq_kernels.problem import Problem

#: Checkpoint to the layout it is converted to: every kernel of moeq at least once.
LAYOUTS = {
    "gptq-int4-g32-qwen3moe": "marlin-wna16/1",
    "gptq-int4-g32-actorder-qwen3moe": "marlin-act-order/1",
    "gptq-int8-g64-qwen3moe": "triton-wna16/1",
    "gptq-int4-g128-mixtral": "marlin-wna16/1",
    "awq-int4-g32-qwen3moe": "triton-wna16/1",
    "ct-int4-asym-g32-mixtral": "marlin-wna16/1",
    "ct-int4-g128-qwen3moe": "triton-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "ct-mxfp4-qwen3moe": "mxfp4-identity/1",
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
}


def convert(
    source: Path, destination: Path, layout: str | None = None, allow_lossy: bool = False, **deployment: object
) -> Path:
    """Convert for an A100 with the given TP / EP."""
    where = Deployment(gpu=parse_gpu("A100"), **deployment)  # type: ignore[arg-type]
    chosen = layout or LAYOUTS[source.name]
    moeq.convert(source, destination, where, layout=chosen, force_layout=True, allow_lossy=allow_lossy)
    return destination


def warmed_problems(folder: Path, where: str, ranks: int) -> set[Problem] | None:
    """What `moeq warmup --gpu H200` compiles kernels for with so many ranks (`tp` or `ep`).

    None for small checkpoints whose halves are padded, and which cannot be cut.
    """
    every = [Rank(**{f"{where}_rank": rank, f"{where}_size": ranks}) for rank in range(ranks)]
    try:
        return {layer.problem for _, layer in warmup._prepared(open_converted(folder), "H200", every, "bf16", 64)}
    except MoeqError as refused:
        if refused.code != "usage.tp":
            raise
        return None


def reference_layer(
    source: Checkpoint, layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The layer in float32 from the source's own dequantised weights."""

    def expert(number: int) -> Expert:
        def linear(name: str) -> Linear:
            return Linear(source.dequantize(layer, number, name), source.matrix(layer, number, name).bias)

        return Expert(linear("gate"), linear("up"), linear("down"))

    return moe(x, expert, weights, ids, activation_of(source.info.activation, source.source.config))
