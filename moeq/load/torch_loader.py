"""The experts of one layer of a converted checkpoint, ready for `moeq_kernels.fused_moe`.

    experts = moeq.load_experts("DST", 0, device="cuda")
    y = moeq_kernels.fused_moe(x, experts, topk_weights, topk_ids)

With tensor parallelism every rank computes a part of each expert and the outputs add up; with expert parallelism every
rank computes some of the experts (`expert_map`) and the outputs add up likewise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from moeq.checkpoint.manifest import LayerEntry
from moeq.errors import MoeqError
from moeq.layouts.arranged import ArrangedLayout
from moeq.layouts.registry import get_layout
from moeq.load.kernel_experts import check_e4m3, kernel_experts, row_order
from moeq.load.rank_reading import PartCut, part_cuts, read_experts, read_shards
from moeq.load.ranks import MatrixPart, Rank, RankPart, plan_rank
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.division import UNEVEN_FORMATS, split_experts

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq.model.converted import ConvertedCheckpoint
    from moeq_kernels import PackedExperts

#: Names of activation dtypes, as torch, manifests and kernels have them.
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
    """Packed experts of one layer, reading only the bytes of this rank.

    Args:
        dst: output of `moeq convert`: folder, or what `moeq.open` gave (which saves reading the headers again).
        layer: layer number.
        device: where the tensors go.
        tp_rank: rank within tensor parallelism.
        tp_size: ranks that share every expert.
        ep_rank: rank within expert parallelism.
        ep_size: ranks that share the experts; this one holds those of `expert_map`.
        dtype: dtype of the activations, checked against what the kernel takes; None: that of the conversion.
        activation_dtype: `fp8` for kernels that quantise activations to e4m3 on the way, which costs accuracy:
            FP8 weights, and on Hopper MXFP4 and symmetric int4 in Marlin's order by `moeq_kernels.prepare` (see there).
        verify: recompute the digest of every expert of the layer first (reads all of them).
        check_gpu: refuse a GPU of another architecture than the one converted for.

    Raises:
        MoeqError: `usage.not-converted`, `usage.copied-layer`, `usage.no-such-layer`; `usage.rank`, `usage.tp`,
            `usage.ep` where the file does not serve these ranks; `usage.dtype`; `environment.gpu-mismatch`;
            `answer.no-kernel` where no kernel of moeq reads the layout; `source.digest-mismatch`; `source.*` for
            damaged files.
    """
    import torch

    checkpoint = open_converted(dst)
    entry = layer_entry(checkpoint, layer)
    check_kernel(entry, dtype, str(checkpoint.manifest.deployment.get("dtype", "bf16")))
    if activation_dtype:
        if activation_dtype != "fp8":
            raise MoeqError("usage.dtype", f"unknown activation_dtype '{activation_dtype}'", "known: fp8, or nothing")
        check_e4m3(entry.layout, entry.matrices["w13"].spec.element, prepared=True)
    target, rank = torch.device(device), Rank(tp_rank, tp_size, ep_rank, ep_size)
    part = checked_part(checkpoint, entry, rank, target, verify=verify, check_gpu=check_gpu)
    check_groups(entry, part)
    experts = packed_experts(checkpoint, entry, part, target)
    return experts.quantising(activation_dtype) if activation_dtype else experts


def checked_part(
    checkpoint: ConvertedCheckpoint,
    entry: LayerEntry,
    rank: Rank,
    device: torch.device,
    *,
    verify: bool,
    check_gpu: bool,
) -> RankPart:
    """What a rank reads of a layer, after the checks that `load_experts` and `load_tensors` are asked for.

    Raises:
        MoeqError: `environment.gpu-mismatch`, `source.digest-mismatch`; as `plan_rank`.
    """
    if check_gpu:
        check_device(checkpoint, device)
    if verify:
        check_layer_digests(checkpoint, entry)
    return plan_rank(entry, rank, uneven_unit(checkpoint, entry.layer))


def check_groups(entry: LayerEntry, part: RankPart) -> None:
    """Raises MoeqError `answer.no-kernel` for a shard of act-order that needs the groups of the whole."""
    for role, matrix in part.matrices.items():
        if matrix.spec.all_groups is not None and matrix.spec.all_groups * matrix.spec.group_size > matrix.spec.k:
            raise MoeqError(
                "answer.no-kernel",
                f"layer {entry.layer}: a tensor-parallel shard of {role} with act-order keeps all "
                f"{matrix.spec.all_groups} groups of the whole, and moeq's kernels read just those of their columns",
                "convert it for one rank or for expert parallelism: moeq convert SRC DST --ep N",
            )


def expert_map(num_experts: int, ep_rank: int, ep_size: int, device: str | torch.device = "cpu") -> Tensor:
    """int32 `[num_experts]` for `fused_moe`: number of each expert on this rank, -1 where it is on another."""
    import torch

    Rank(ep_rank=ep_rank, ep_size=ep_size).check()
    own = split_experts("the layer", num_experts, ep_size)[ep_rank]
    found = torch.full((num_experts,), -1, dtype=torch.int32, device=device)
    found[own.start : own.stop] = torch.arange(own.size, dtype=torch.int32, device=device)
    return found


def open_converted(dst: str | Path | Checkpoint, revision: str | None = None) -> ConvertedCheckpoint:
    """A converted checkpoint: a folder or a Hub repository. Raises MoeqError `usage.not-converted` for a source."""
    checkpoint = dst if isinstance(dst, Checkpoint) else open_checkpoint(dst, revision)
    if checkpoint.kind != "converted":
        raise MoeqError(
            "usage.not-converted",
            f"{checkpoint.source.name} is a source checkpoint, whose experts no kernel reads as they are",
            "convert it first: moeq convert SRC DST --gpu NAME",
        )
    return cast("ConvertedCheckpoint", checkpoint)


def layer_entry(checkpoint: ConvertedCheckpoint, layer: int) -> LayerEntry:
    """The layer in the manifest. Raises MoeqError `usage.copied-layer` or `usage.no-such-layer`."""
    for row in checkpoint.manifest.copied:
        if row.layer == layer:
            raise MoeqError(
                "usage.copied-layer",
                f"the experts of layer {layer} were copied unchanged: {row.reason}",
                "read them with moeq.open(DST).matrix(layer, expert, 'w13')",
            )
    return checkpoint.manifest.layer(layer)


def uneven_unit(checkpoint: Checkpoint, layer: int) -> int | None:
    """Intermediate features that ranks get in multiples of, for formats whose engines cut unevenly."""
    return UNEVEN_FORMATS.get(checkpoint.scheme_of(layer).format)


def check_kernel(entry: LayerEntry, dtype: torch.dtype | None, converted_for: str) -> None:
    """Raises MoeqError `answer.no-kernel` or `usage.dtype` where `fused_moe` cannot take the layer."""
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
    asked = str(dtype).removeprefix("torch.") if dtype is not None else DTYPES.get(converted_for, converted_for)
    if asked not in found.dtypes:
        raise MoeqError(
            "usage.dtype",
            f"layer {entry.layer}: activations are {asked}, and the kernel of {entry.layout} takes "
            f"{' or '.join(found.dtypes)}",
        )


def check_device(checkpoint: ConvertedCheckpoint, device: torch.device) -> None:
    """Raises MoeqError `environment.gpu-mismatch` on a GPU of another architecture than the one converted for."""
    import torch

    if device.type != "cuda":
        return
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(device)
        arch = f"sm{major}{minor}"
    require_arch(checkpoint, arch)


def require_arch(checkpoint: ConvertedCheckpoint, arch: str) -> None:
    """Raises MoeqError `environment.gpu-mismatch` unless the checkpoint was converted for that architecture."""
    gpu = checkpoint.manifest.deployment.get("gpu", {})
    if gpu.get("arch") != arch:
        raise MoeqError(
            "environment.gpu-mismatch",
            f"{checkpoint.source.name} was converted for {gpu.get('name')} ({gpu.get('arch')}), and this GPU is {arch}",
            f"convert it for this one: moeq convert SRC DST --gpu {arch}; or load with check_gpu=False where you know "
            "that the kernel reads the same bytes there",
        )


def check_layer_digests(checkpoint: ConvertedCheckpoint, entry: LayerEntry) -> None:
    """Raises MoeqError `source.digest-mismatch` where an expert no longer holds the values that were converted."""
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
    checkpoint: Checkpoint, entry: LayerEntry, part: RankPart, device: torch.device, rows: Sequence[int] | None = None
) -> PackedExperts:
    """What `part` says, read and put on the device; nothing is checked here.

    Args:
        rows: experts within the stacked tensors, in the order wanted; None: those of `part`.
    """
    import torch

    tensors = {}
    for role, matrix in part.matrices.items():
        spans = [part.rows] if rows is None else [(row, row + 1) for row in rows]
        read = [read_parts(checkpoint, entry, replace(part, rows=span), matrix, device) for span in spans]
        tensors[role] = read[0] if rows is None else {name: torch.cat([one[name] for one in read]) for name in read[0]}
    specs = {role: matrix.spec for role, matrix in part.matrices.items()}
    return kernel_experts(entry.layout, specs, tensors, name=f"layer {entry.layer}")


def read_parts(
    checkpoint: Checkpoint,
    entry: LayerEntry,
    part: RankPart,
    matrix: MatrixPart,
    device: torch.device | None = None,
    into: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The packed parts of a rank's matrix, `[experts, ...]` each, on a device (None: the CPU).

    They are read straight into the tensors of `into`, where it has one of the stored dtype for a part.
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


def _cut_in_memory(
    checkpoint: Checkpoint, entry: LayerEntry, part: RankPart, matrix: MatrixPart, cuts: Mapping[str, PartCut]
) -> dict[str, Tensor]:
    """Parts that the layout computes for a shard instead of selecting bytes: one whole expert at a time."""
    import torch

    layout, window = get_layout(entry.layout), matrix.window
    assert isinstance(layout, ArrangedLayout)  # plan_rank made sure
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
