"""Load one layer of a converted checkpoint: its experts for `moeq_kernels.fused_moe`, or its tensors by name.

    experts = moeq.load_experts("DST", 0, device="cuda")
    y = moeq_kernels.fused_moe(x, experts, topk_weights, topk_ids)

With tensor parallelism every rank computes a part of each expert, with expert parallelism some of the experts
(`expert_map`). Either way the outputs of the ranks add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from moeq.checkpoint.manifest import LayerEntry, StackedRole, not_converted
from moeq.errors import MoeqError
from moeq.layouts.base import W13Order
from moeq.layouts.registry import get_layout, layout_class
from moeq.load.activation_scales import ActivationScales, activation_scales
from moeq.load.kernel_experts import check_e4m3, kernel_experts, row_order
from moeq.load.rank_reading import PartCut, part_cuts, read_experts, read_shards
from moeq.load.ranks import MatrixPart, Rank, RankPart, plan_rank
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.division import UNEVEN_FORMATS, split_experts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq.model.converted import ConvertedCheckpoint
    from moeq_kernels import PackedExperts

#: Names of activation dtypes in torch, by their names in manifests.
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def load_experts(
    dst: str | Path | Checkpoint,
    layer: int,
    *,
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    dtype: torch.dtype | None = None,
    activation_dtype: Literal["", "fp8"] = "",
    verify: bool = False,
    check_gpu: bool = True,
) -> PackedExperts:
    """Load the packed experts of one layer, reading only the bytes of this rank.

    Args:
        dst: output of `moeq convert`: a folder, or the result of `moeq.open`, whose headers are read already.
        layer: layer number.
        device: device of the tensors.
        tp_rank: rank within tensor parallelism.
        tp_size: number of ranks that share every expert.
        ep_rank: rank within expert parallelism.
        ep_size: number of ranks that share the experts; `expert_map` says which rank holds which.
        dtype: dtype of the activations, which the kernel has to support; None: the conversion's.
        activation_dtype: `fp8` for kernels that quantise activations to e4m3, which costs accuracy. They take FP8
            weights, and on Hopper, after `moeq_kernels.prepare`, symmetric int4 and MXFP4 in Marlin's or moeq's order.
        verify: recompute the digest of every expert of the layer first, which reads them all.
        check_gpu: refuse a GPU of another architecture than the one converted for.

    Raises MoeqError `usage.not-converted`, `usage.copied-layer`, `usage.no-such-layer`; `usage.rank`, `usage.tp`,
    `usage.ep` if the file does not serve these ranks; `usage.dtype`; `environment.gpu-mismatch`; `answer.no-kernel` if
    no kernel of moeq reads the layout; `source.digest-mismatch`; `source.*` for damaged files.
    """
    import torch

    checkpoint = open_converted(dst)
    entry = layer_entry(checkpoint, layer)
    check_kernel(entry, dtype, str(checkpoint.manifest.deployment.get("dtype", "bf16")))
    if activation_dtype:
        if activation_dtype != "fp8":
            raise MoeqError("usage.dtype", f"unknown activation_dtype '{activation_dtype}'", "known: fp8, or nothing")
        check_e4m3(entry.layout, entry.matrices["w13"].spec.element)
    target, rank = torch.device(device), Rank(tp_rank, tp_size, ep_rank, ep_size)
    part = checked_part(checkpoint, entry, rank, target, verify=verify, check_gpu=check_gpu)
    check_groups(entry, part)
    experts = packed_experts(checkpoint, entry, part.matrices, [part.rows], target)
    return experts.quantising(activation_dtype) if activation_dtype else experts


@dataclass(frozen=True)
class LayerTensors:
    """Tensors of a layer on one rank, as the files hold them."""

    #: Layout id; `docs/reference/layouts.md` names its kernel, its module's docstring describes each tensor.
    layout: str
    w13_order: W13Order  #: order of gate and up rows
    experts: tuple[int, int]  #: `(start, stop)` of the rank's experts, as the model counts them
    #: Tensors `[experts, ...]` of w13 by part (`weight`, `scale`, `global_scale`, ...), in the stored dtype.
    w13: dict[str, Tensor]
    w2: dict[str, Tensor]  #: tensors of w2 by part
    w13_spec: MatrixSpec  #: one expert's w13 as it is stored, padding included
    w2_spec: MatrixSpec  #: one expert's w2 as it is stored, padding included
    #: Scales of static activations for every expert of the layer; None if the source has none.
    activation_scales: ActivationScales | None


def load_tensors(
    dst: str | Path | Checkpoint,
    layer: int,
    *,
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    verify: bool = False,
    check_gpu: bool = True,
) -> LayerTensors:
    """Load the tensors of one layer, in any layout, reading only the bytes of this rank.

    For the arguments see `load_experts`.

    Raises MoeqError `usage.not-converted`, `usage.copied-layer`, `usage.no-such-layer`; `usage.rank`, `usage.tp`,
    `usage.ep` if the file does not serve these ranks; `environment.gpu-mismatch`; `source.digest-mismatch`; `source.*`
    for damaged files.
    """
    import torch

    checkpoint = open_converted(dst)
    entry = layer_entry(checkpoint, layer)
    target, rank = torch.device(device), Rank(tp_rank, tp_size, ep_rank, ep_size)
    part = checked_part(checkpoint, entry, rank, target, verify=verify, check_gpu=check_gpu)
    w13, w2 = part.matrices["w13"], part.matrices["w2"]
    return LayerTensors(
        layout=entry.layout,
        w13_order=layout_class(entry.layout).w13_order,
        experts=part.experts,
        w13=read_parts(checkpoint, entry, part, w13, target),
        w2=read_parts(checkpoint, entry, part, w2, target),
        w13_spec=w13.spec,
        w2_spec=w2.spec,
        activation_scales=activation_scales(checkpoint, entry),
    )


def checked_part(
    checkpoint: ConvertedCheckpoint,
    entry: LayerEntry,
    rank: Rank,
    device: torch.device,
    *,
    verify: bool,
    check_gpu: bool,
) -> RankPart:
    """Make the requested checks, then return the plan of what a rank reads of a layer.

    Raises MoeqError `environment.gpu-mismatch`, `source.digest-mismatch`, and the errors of `plan_rank`.
    """
    if check_gpu:
        check_device(checkpoint, device)
    if verify:
        check_layer_digests(checkpoint, entry)
    return plan_rank(entry, rank, uneven_unit(checkpoint, entry.layer))


def check_groups(entry: LayerEntry, part: RankPart) -> None:
    """Raise MoeqError `answer.no-kernel` for a shard with act-order that needs the groups of the whole matrix."""
    for role, matrix in part.matrices.items():
        if matrix.spec.all_groups is not None and matrix.spec.all_groups * matrix.spec.group_size > matrix.spec.k:
            raise MoeqError(
                "answer.no-kernel",
                f"layer {entry.layer}: a tensor-parallel shard of {role} with act-order keeps all "
                f"{matrix.spec.all_groups} groups of the whole, and moeq's kernels read just those of their columns",
                "convert it for one rank or for expert parallelism: moeq convert SRC DST --ep N",
            )


def expert_map(num_experts: int, ep_rank: int, ep_size: int, device: str | torch.device = "cpu") -> Tensor:
    """Return int32 `[num_experts]` for `fused_moe`: number of each expert on this rank, -1 for other ranks' experts."""
    import torch

    Rank(ep_rank=ep_rank, ep_size=ep_size).check()
    own = split_experts("the layer", num_experts, ep_size)[ep_rank]
    found = torch.full((num_experts,), -1, dtype=torch.int32, device=device)
    found[own.start : own.stop] = torch.arange(own.size, dtype=torch.int32, device=device)
    return found


def open_converted(dst: str | Path | Checkpoint, revision: str | None = None) -> ConvertedCheckpoint:
    """Open a converted checkpoint: a folder or Hub repository. Raises MoeqError `usage.not-converted` for a source."""
    checkpoint = dst if isinstance(dst, Checkpoint) else open_checkpoint(dst, revision)
    if checkpoint.kind != "converted":
        raise not_converted(checkpoint.source.name)
    return cast("ConvertedCheckpoint", checkpoint)


def layer_entry(checkpoint: ConvertedCheckpoint, layer: int) -> LayerEntry:
    """Find the layer in the manifest. Raises MoeqError `usage.copied-layer` or `usage.no-such-layer`."""
    for row in checkpoint.manifest.copied:
        if row.layer == layer:
            raise MoeqError(
                "usage.copied-layer",
                f"the experts of layer {layer} were copied unchanged: {row.reason}",
                "read them with moeq.open(DST).matrix(layer, expert, 'w13')",
            )
    return checkpoint.manifest.layer(layer)


def uneven_unit(checkpoint: Checkpoint, layer: int) -> int | None:
    """Return the block size, in intermediate features, of formats that engines cut unevenly but in whole blocks."""
    return UNEVEN_FORMATS.get(checkpoint.scheme_of(layer).format)


def check_kernel(entry: LayerEntry, dtype: torch.dtype | None, converted_for: str) -> None:
    """Raise MoeqError `answer.no-kernel` or `usage.dtype` if `fused_moe` cannot take the layer."""
    from moeq_kernels.errors import KernelUnsupportedError
    from moeq_kernels.formats import find_format

    row_order(entry.layout)
    try:
        found = find_format(entry.layout, entry.matrices["w13"].spec.element)
    except KernelUnsupportedError as error:
        raise MoeqError(
            "answer.no-kernel",
            f"layer {entry.layer}: {error.message}",
            "moeq.load_tensors hands out its tensors for other kernels; or convert for moeq's: moeq convert SRC DST "
            "--engine moeq",
        ) from error
    wanted = str(dtype).removeprefix("torch.") if dtype is not None else DTYPES.get(converted_for, converted_for)
    if wanted not in found.dtypes:
        raise MoeqError(
            "usage.dtype",
            f"layer {entry.layer}: activations are {wanted}, and the kernel of {entry.layout} takes "
            f"{' or '.join(found.dtypes)}",
        )


def check_device(checkpoint: ConvertedCheckpoint, device: torch.device) -> None:
    """Raise MoeqError `environment.gpu-mismatch` on a GPU of another architecture than the one converted for."""
    if device.type == "cuda":
        require_arch(checkpoint, device_arch(device))


def device_arch(device: torch.device) -> str:
    """Return the architecture of a CUDA or ROCm device: `sm90`, `gfx942`."""
    import torch

    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0])
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def require_arch(checkpoint: ConvertedCheckpoint, arch: str) -> None:
    """Raise MoeqError `environment.gpu-mismatch` unless the checkpoint was converted for that architecture."""
    gpu = checkpoint.manifest.deployment.get("gpu", {})
    if gpu.get("arch") != arch:
        raise MoeqError(
            "environment.gpu-mismatch",
            f"{checkpoint.source.name} was converted for {gpu.get('name')} ({gpu.get('arch')}), and this GPU is {arch}",
            f"convert it for this one: moeq convert SRC DST --gpu {arch}; or load with check_gpu=False where you know "
            "that the kernel reads the same bytes there",
        )


def check_layer_digests(checkpoint: ConvertedCheckpoint, entry: LayerEntry) -> None:
    """Raise MoeqError `source.digest-mismatch` if an expert no longer holds the values that were converted."""
    from moeq.digest import check_digests

    checked, wrong = check_digests(checkpoint, [entry], lambda label: None)
    if wrong:
        shown = ", ".join(f"expert {row.expert} {row.projection}" for row in wrong[:4])
        raise MoeqError(
            "source.digest-mismatch",
            f"layer {entry.layer}: {len(wrong)} of {checked} digests differ from the manifest: {shown}",
            "the files were changed or damaged after conversion: convert the source again",
        )


def packed_experts(
    checkpoint: Checkpoint,
    entry: LayerEntry,
    matrices: Mapping[StackedRole, MatrixPart],
    spans: Sequence[tuple[int, int]],
    device: torch.device,
) -> PackedExperts:
    """Read packed experts onto a device, without any check.

    `spans` are `(start, stop)` of experts within the stacked tensors, in the wanted order.
    """
    import torch

    tensors = {}
    for role, matrix in matrices.items():
        read = [read_parts(checkpoint, entry, RankPart(span, span, matrices), matrix, device) for span in spans]
        joined = {name: torch.cat([one[name] for one in read]) for name in read[0]} if len(read) > 1 else read[0]
        tensors[role] = joined
    specs = {role: matrix.spec for role, matrix in matrices.items()}
    return kernel_experts(entry.layout, specs, tensors, name=f"layer {entry.layer}")


def read_parts(
    checkpoint: Checkpoint,
    entry: LayerEntry,
    part: RankPart,
    matrix: MatrixPart,
    device: torch.device | None = None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Read the packed parts of a rank's matrix, `[experts, ...]` each, onto a device (None: the CPU).

    A part is read straight into its tensor of `into`, if that tensor has the stored dtype and shape.
    """
    source, names, into = checkpoint.source, matrix.stored.tensors, into or {}
    if matrix.window is None:
        found = {
            name: read_experts(source, tensor, part.rows, device, into.get(name)) for name, tensor in names.items()
        }
    else:
        cuts = part_cuts(entry.layout, matrix.stored.padded_spec, matrix.window)
        found = {
            name: read_shards(source, tensor, part.rows, cuts[name], device, into.get(name))
            for name, tensor in names.items()
            if cuts[name].spans is not None
        }
        if len(found) < len(names):
            computed = _cut_in_memory(checkpoint, entry, part, matrix, cuts)
            found |= {name: tensor.to(device) for name, tensor in computed.items()}
    if matrix.zero_bias and "bias" in found:
        found["bias"].zero_()
    return found


def fill_parts(
    checkpoint: Checkpoint, entry: LayerEntry, part: RankPart, matrix: MatrixPart, targets: Mapping[str, Tensor]
) -> None:
    """Fill tensors, by part, with the packed parts of a rank's matrix, converted to their dtypes."""
    device = next(iter(targets.values())).device
    for name, tensor in read_parts(checkpoint, entry, part, matrix, device, targets).items():
        if tensor.data_ptr() != targets[name].data_ptr():
            targets[name].copy_(tensor)


def _cut_in_memory(
    checkpoint: Checkpoint, entry: LayerEntry, part: RankPart, matrix: MatrixPart, cuts: Mapping[str, PartCut]
) -> dict[str, Tensor]:
    """Return the parts that the layout computes for a shard instead of selecting bytes, cut one expert at a time."""
    import torch

    layout, window = get_layout(entry.layout), matrix.window
    assert window is not None
    computed = [name for name, cut in cuts.items() if cut.spans is None]
    rows = []
    for row in range(*part.rows):
        whole = {
            name: read_experts(checkpoint.source, tensor, (row, row + 1))[0]
            for name, tensor in matrix.stored.tensors.items()
        }
        rows.append(layout.slice_parts(whole, matrix.stored.padded_spec, n=window.n, k=window.k))
    return {name: torch.stack([shard[name] for shard in rows]) for name in computed}
