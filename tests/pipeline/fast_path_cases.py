"""Which layouts have a fast path; one expert by the reference path and by its fast path; random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layouts.families import Family, fp8_scope, layouts_of
from safetensors.torch import save_file
from torch import Tensor

import moeq
from moeq.check import synthetic
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import StackedRole
from moeq.digest import logical_digest
from moeq.layouts.fp8 import MXFP8Layout
from moeq.layouts.marlin.fp8 import MarlinFp8, MarlinMXFP8
from moeq.layouts.marlin.nvfp4 import MarlinNVFP4
from moeq.layouts.mxfp4 import MXFP4Layout
from moeq.layouts.nvfp4 import NVFP4Layout
from moeq.matrix import split_projections
from moeq.model import Checkpoint
from moeq.model.expert_kinds import WHOLE_PARTS, Experts
from moeq.model.regroup import regroup
from moeq.model.shards import shard_matrix
from moeq.model.tensor_bytes import as_bytes
from moeq.pipeline.pack.fast import find_fast_path
from moeq.pipeline.pack.fast.path import Digests, FastPath
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.options import ConvertOptions, Ranks
from moeq.pipeline.state.restore_data import unrestorable

Array = np.ndarray


def _moved(*families: Family) -> set[str]:
    """Layouts of these families for which packing only moves bits."""
    return layouts_of(*families) & layouts_of(lambda kind: kind.rearranges)


_WNA16 = {"marlin-wna16/1", "triton-wna16/1"}
_FP16_MXFP4 = {"marlin-mxfp4-fp16/1", "marlin-mxfp4-fp16-interleaved/1"}
#: MXFP4 layouts whose order of nibbles has no loop.
_NO_LOOP = {
    "cpu-amx-mxfp4/1",
    "cpu-amx-mxfp4-interleaved/1",
    "marlin-mxfp4-fp8act/1",
    "marlin-mxfp4-fp8act-interleaved/1",
}
_MXFP4 = _moved(MXFP4Layout) - _FP16_MXFP4 - _NO_LOOP
_NVFP4 = _moved(NVFP4Layout) | layouts_of(MarlinNVFP4)
_MXFP8 = _moved(MXFP8Layout, MarlinMXFP8) - {"trtllm-mxfp8/1", "aiter-mxfp8/1"}  # too large
_FP8 = layouts_of(MarlinFp8)
_FP8_BLOCK = layouts_of(fp8_scope("block")) - {"deepgemm-fp8-sm90/1", "deepgemm-fp8-sm100/1"}
_FP8_CHANNEL = layouts_of(fp8_scope("channel"))
_FP8_TENSOR = layouts_of(fp8_scope("tensor"))

#: Layouts to which a checkpoint has a fast path, for w13 and w2 alike. Every other layout takes the reference path.
FAST_PATHS: dict[str, set[str]] = {
    "awq-int4-g32-qwen3moe": _WNA16,
    "ct-int4-asym-g32-mixtral": _WNA16,
    "ct-int4-g128-qwen3moe": _WNA16 | {"xpu-wna16/1"},
    "ct-mxfp4-qwen3moe": _MXFP4 | _FP16_MXFP4,
    "ct-fp8-block-qwen3moe": _FP8 | _FP8_BLOCK,
    "ct-fp8-channel-qwen3moe": _FP8 | _FP8_CHANNEL,
    "ct-fp8-tensor-qwen3moe": _FP8 | _FP8_CHANNEL,
    "ct-mxfp8-qwen3moe": _MXFP8,
    "ct-nvfp4-qwen3moe": _NVFP4,
    "ct-nvfp4a16-qwen3moe": _NVFP4,
    "ct-w8a8-qwen3moe": _WNA16 | {"int8-w8a8/1"},
    "gptq-int4-g128-mixtral": _WNA16 | {"xpu-wna16/1"},
    "gptq-int4-g32-actorder-qwen3moe": set(),
    "gptq-int4-g32-qwen3moe": _WNA16 | {"xpu-wna16/1"},
    "gptq-int8-g64-qwen3moe": _WNA16,
    "modelopt-fp8-qwen3moe": _FP8_CHANNEL | _FP8_TENSOR,  # its float32 scales are no bfloat16 numbers
    "modelopt-nvfp4-qwen3moe": _NVFP4,
    "mxfp4-gptoss": _MXFP4,
}


@dataclass(frozen=True)
class Packed:
    """What packing one expert's matrix comes to: bytes by part and shard, digests, tensors to keep."""

    parts: list[dict[str, bytes]]
    digests: tuple[tuple[str, str], ...]
    kept: set[str]


def on_reference_path(checkpoint: Checkpoint, plan: LayerPlan, role: StackedRole, expert: int) -> Packed:
    """What conversion does where there is no fast path."""
    layer = plan.entry.layer
    matrix = checkpoint.matrix(layer, expert, role)
    parts = []
    entry = plan.entry
    written = matrix if entry.source_group is None else regroup(matrix, entry.matrices[role].spec.group_size)
    for shard in plan.shards:
        cut = shard_matrix(written, shard.shard.intermediate, first=shard.shard.rank == 0)
        padded = shard.padding.pad(cut)
        largest = plan.layout.calibrate(padded)
        packed = (plan.layout if largest is None else plan.layout.with_calibration(largest)).pack(padded)
        parts.append({name: bytes(as_bytes(tensor)) for name, tensor in packed.items()})
    digests = tuple((projection, logical_digest(part)) for projection, part in split_projections(matrix))
    return Packed(parts, digests, unrestorable(checkpoint, layer, expert, role, matrix, exact=True))


def buffer(size: int, fill: int = 0xA5) -> Array:
    """Memory that starts at a cache line and holds rubbish."""
    room = np.full(size + 64, fill, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def stored(checkpoint: Checkpoint, layer: int, expert: int, fast_path: FastPath) -> dict[tuple[str, str], Array]:
    """The stored bytes that a fast path asks for."""
    experts = checkpoint.experts(layer)
    unit, found = experts.layer.unit(expert), {}
    for projection, part in fast_path.reads:
        entry = unit[projection][part]
        row = experts.layer.fused and part not in WHOLE_PARTS
        size = entry.nbytes // experts.num_experts if row else entry.nbytes
        start = entry.start + (expert * size if row else 0)
        found[projection, part] = buffer(size)
        found[projection, part][:] = np.frombuffer(checkpoint.source.read_bytes(entry.file, start, start + size), "u1")
    return found


class OnFastPath:
    """One expert's matrix on its fast path, with buffers of its own."""

    def __init__(
        self, checkpoint: Checkpoint, plan: LayerPlan, role: StackedRole, expert: int, fast_path: FastPath
    ) -> None:
        self._names = {key: _entry(checkpoint, plan.entry.layer, expert, key).name for key in _keys(checkpoint, plan)}
        self.inputs = stored(checkpoint, plan.entry.layer, expert, fast_path)
        self.outputs = [
            {part: buffer(size) for part, size in _sizes(plan, role, index).items()}
            for index in range(len(plan.shards))
        ]
        self.scratch = buffer(fast_path.scratch_bytes)
        if fast_path.calibration_reads:
            largest = fast_path.largest(self.inputs, self.scratch)
            fast_path = fast_path.with_calibration([1.0] * len(plan.shards) if largest is None else largest)
        self.fast_path = fast_path

    def pack(self) -> bool:
        """False where the fast path declines."""
        read = self.fast_path.read(self.inputs, self.scratch)
        if read is not None:
            self.fast_path.pack(read, self.outputs, self.scratch)
        return read is not None

    def prove(self) -> Digests | None:
        self.scratch[:] = 0x5A  # nothing may depend on what packing left there
        read = self.fast_path.read(self.inputs, self.scratch)
        return None if read is None else self.fast_path.prove(read, self.outputs, self.scratch)

    def rebuilt(self) -> bool:
        """Whether the stored bytes come back from the packed ones, whatever lay in memory before."""
        self.scratch[:] = 0xC3
        stored = {key: buffer(len(data), fill=0x99) for key, data in self.inputs.items()}
        self.fast_path.rebuild(self.outputs, stored, self.scratch)
        lost = set(self.fast_path.kept(self.inputs, self.scratch))
        return all(np.array_equal(stored[key], data) for key, data in self.inputs.items() if key not in lost)

    def packed(self) -> Packed | None:
        """None where the fast path declines."""
        if not self.pack():
            return None
        kept = {self._names[key] for key in self.fast_path.kept(self.inputs, self.scratch)}
        proof = self.prove()
        assert proof is not None, "what was packed does not unpack to the source"
        assert self.rebuilt(), "what was packed does not give the stored bytes back"
        return Packed([{name: out.tobytes() for name, out in parts.items()} for parts in self.outputs], proof, kept)


def _keys(checkpoint: Checkpoint, plan: LayerPlan) -> list[tuple[str, str]]:
    return list(checkpoint.experts(plan.entry.layer).layer.parts)


def _entry(checkpoint: Checkpoint, layer: int, expert: int, key: tuple[str, str]) -> TensorEntry:
    return checkpoint.experts(layer).layer.unit(expert)[key[0]][key[1]]


def _sizes(plan: LayerPlan, role: StackedRole, shard: int) -> dict[str, int]:
    widths = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4}
    specs = plan.shards[shard].parts[role]
    return {part: int(np.prod(spec.shape)) * widths[spec.dtype] for part, spec in specs.items()}


def fast_paths(
    checkpoint: Checkpoint, layout: str, layer: int = 0, *, tp: int = 1, **options: Any
) -> tuple[LayerPlan, dict[StackedRole, FastPath]]:
    """The plan of a layer and the fast paths that it has."""
    plan = plan_layer(checkpoint, layer, layout, Ranks(tp), ConvertOptions(**options))
    experts = checkpoint.experts(layer)
    found = {role: _found(experts, role, plan) for role in ("w13", "w2")}
    return plan, {role: fast_path for role, fast_path in found.items() if fast_path is not None}


def _found(experts: Experts, role: StackedRole, plan: LayerPlan) -> FastPath | None:
    return find_fast_path(experts, role, plan.layout, plan.shards, plan.entry.matrices[role].spec)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a synthetic checkpoint."""

    hidden: int
    intermediate: int
    experts: int = 2


def write_checkpoint(
    folder: Path,
    name: str,
    sizes: Sizes,
    edit: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    **quantization: object,
) -> Checkpoint:
    """A random checkpoint of one of the self-test's kinds in other sizes; `edit` changes its tensors."""
    recipe = next(recipe for recipe in synthetic.RECIPES if recipe.name == name)
    generator = torch.Generator().manual_seed(sizes.hidden)
    hidden, intermediate, experts = sizes.hidden, sizes.intermediate, sizes.experts
    tensors: dict[str, Tensor] = {}
    if recipe.projection is None:
        for stem, n, k in (("gate_up", 2 * intermediate, hidden), ("down", hidden, intermediate)):
            base = f"model.layers.0.mlp.experts.{stem}_proj_"
            tensors[f"{base}blocks"] = torch.randint(256, (experts, n, k // 32, 16), generator=generator).byte()
            tensors[f"{base}scales"] = torch.randint(255, (experts, n, k // 32), generator=generator).byte()
            tensors[f"{base}bias"] = torch.randn((experts, n), generator=generator).bfloat16()
    else:
        for expert in range(experts):
            prefix = f"model.layers.0.mlp.experts.{expert}."
            for stem in ("gate_proj.", "up_proj."):
                tensors |= recipe.projection(prefix + stem, intermediate, hidden, generator)
            tensors |= recipe.projection(prefix + "down_proj.", hidden, intermediate, generator)
    edit(tensors)
    family = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    if recipe.projection is not None:
        family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config = family | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": intermediate,
        "num_hidden_layers": 1,
        "num_local_experts": experts,
        "num_experts": experts,
        "num_experts_per_tok": 1,
        "hidden_act": "silu",
        "quantization_config": recipe.quantization | quantization,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return moeq.open(folder)
