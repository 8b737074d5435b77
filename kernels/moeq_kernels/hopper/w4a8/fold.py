"""Folding of MXFP4 scales into shifts of e5m2 exponents and one factor per output feature, once per layer.

An e2m1 code times 2^e is a normal e5m2 number for e from -13 on (0.5 becomes 2^-14, the least one), and the device code
reaches e = 1 (`device.codes`). If the e8m0 scales of an output feature span at most 14 powers of two, its weights are
therefore exactly e5m2 numbers times half of the largest of these scales.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moeq_kernels.errors import KernelUnsupportedError
from moeq_kernels.formats import find_format
from moeq_kernels.records import PackedExperts, PackedMatrix

#: Upper bound of the powers of two between the largest and the least scale of an output feature.
SPAN = 14
#: Exponent bias of e8m0, and exponent by which codes with the largest scale are shifted.
_BIAS, _TOP = 127, 1


def folded(experts: PackedExperts) -> PackedExperts:
    """Return the layer with `exponent_shift`, factors in `scale_factor`, and e4m3 activations.

    Raises KernelUnsupportedError if scales of an output feature are too far apart or NaN, or if it has only one.
    """
    suffix = f" of {experts.name}" if experts.name else ""
    w13, w2 = (_folded(f"{name}{suffix}", one) for name, one in (("w13", experts.w13), ("w2", experts.w2)))
    return replace(experts, w13=w13, w2=w2)


def _folded(name: str, matrix: PackedMatrix) -> PackedMatrix:
    """Fold one matrix: shifts are bytes 4 (E - top + SPAN); factors are float32 `[E, n]` in Marlin's order."""
    if matrix.scale is None or matrix.channelwise:
        raise KernelUnsupportedError(f"{name} has no scales of groups along k, which this kernel folds")
    experts, n = matrix.num_experts, matrix.n
    if matrix.scale.device.type == "meta":
        factor = torch.empty(experts, n, device="meta")
        shifts = matrix.scale.view(torch.uint8).clone()
        return replace(matrix, exponent_shift=shifts, scale_factor=factor, activation_dtype="fp8")
    scale = matrix.scale.view(torch.uint8).to(torch.int16)
    used = _used(matrix)
    top = torch.where(used, scale, 0).amax(1)
    shift = scale - top[:, None] + SPAN
    column = torch.arange(n, device=scale.device)
    is_far = (used & ((shift < 0) | (scale == 255))).any(1)[:, _grouped(column)]
    if bool(is_far.any()):
        raise KernelUnsupportedError(
            _refusal(name, is_far, scale[:, :, _grouped(column)], used[:, :, _grouped(column)]),
            "leave activation_dtype out: beside 16-bit activations scales may be any",
        )
    factor = torch.empty(experts, n, device=scale.device)
    # Codes in Marlin's order are decoded with the other sign (`device.codes`).
    sign = 1 if _permuted(matrix) else -1
    factor[:, _single(column)] = sign * torch.exp2((top.float() - (_BIAS + _TOP))[:, _grouped(column)])
    # Groups of zeros may have any scale, so their shifts are clamped.
    shifts = (4 * shift.clamp(0, SPAN)).to(torch.uint8)
    return replace(matrix, exponent_shift=shifts, scale_factor=factor, activation_dtype="fp8")


def _refusal(name: str, far: Tensor, scale: Tensor, used: Tensor) -> str:
    """Name the first expert and feature that e5m2 cannot hold.

    `far` is `[E, n]`; `scale` and `used` are `[E, K / 32, n]` with features in order.
    """
    expert, feature = far.nonzero()[0].tolist()
    scales = scale[expert, :, feature][used[expert, :, feature]]
    least, most = int(scales.min()) - _BIAS, int(scales.max()) - _BIAS
    fault = "a scale that is NaN" if most == 255 - _BIAS else f"scales from 2^{least} to 2^{most}"
    features, experts = int(far.sum()), int(far.any(1).sum())
    return (
        f"{name}: feature {feature} of expert {expert} has {fault}, but 8-bit weights hold scales 2^{SPAN} apart; "
        f"{features} features of {experts} of {len(far)} experts are like that"
    )


def _grouped(column: Tensor) -> Tensor:
    """Return the places of columns in Marlin's MXFP4 scales: bits below 64 as g, j1, h, j0.

    Source: vLLM 0.33.0, `mxfp4_marlin_process_scales`.
    """
    g, h, j0, j1 = column & 7, column >> 3 & 1, column >> 4 & 1, column >> 5 & 1
    return (column & -64) | g << 3 | j1 << 2 | h << 1 | j0


def _single(column: Tensor) -> Tensor:
    """Return the places of columns in Marlin's 32-column order, see `device.epilogue.single_order`."""
    return (column & -31) | ((column & 6) << 2) | ((column & 24) >> 2)


def _permuted(matrix: PackedMatrix) -> bool:
    """Return whether words have the order of bits of `moeq-mxfp4/1`."""
    return find_format(matrix.layout, matrix.element).codec == "marlin4-permuted"


def _used(matrix: PackedMatrix) -> Tensor:
    """Mark groups that hold anything but zeros, in the places of their scales `[E, K / 32, n]`."""
    # Bits of magnitudes in column g of 16 columns, and in column g + 8 (`device.codes`).
    masks = (0x01C701C7, 0x4C384C38) if _permuted(matrix) else (0x00770077, 0x77007700)
    experts, n, k = matrix.num_experts, matrix.n, matrix.k
    found = torch.empty(experts, k // 32, n, dtype=torch.bool, device=matrix.weight.device)
    for expert in range(experts):
        words = matrix.weight[expert].view(k // 32, 2, n // 64, 8, 4, 4)  # slab, tile, g, t, j
        halves = [(words & mask != 0).any(1).any(3) for mask in masks]
        by_column = torch.stack(halves, -1).view(k // 32, n // 64, 8, 2, 2, 2)  # tile, g, j1, j0, h
        found[expert] = by_column.transpose(4, 5).reshape(k // 32, n)
    return found
