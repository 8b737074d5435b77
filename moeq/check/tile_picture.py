"""Find the places of one tile's codes in a layout, by packing numbered codes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix

#: Size of the tile: input features (k) by output features (n).
TILE_K, TILE_N = 16, 64

#: Rows and columns of the probe matrix: a multiple of every layout's block.
_PROBE = 256

_DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TilePicture:
    """Positions of the codes of a 16 x 64 tile in the packed weight."""

    layout: str  #: layout id
    bits: int  #: bits of a code
    codes: tuple[tuple[int, int], ...]  #: `(k, n)` of every code of the tile, in memory order
    first_byte: int  #: address of the first code
    last_byte: int  #: address of the last code


def tile_picture(layout_id: str, spec: MatrixSpec) -> TilePicture | None:
    """Return where the codes of the first tile of a matrix like `spec` lie; None if the layout splits or changes codes.

    Every code of a probe matrix has a number in base `2**bits`. Each digit of these numbers is packed as codes; the
    packed bytes, read as codes, then spell the number of the code at every address.
    """
    layout = get_layout(layout_id, allow_lossy=True)
    group = _PROBE if spec.num_groups == 1 else spec.group_size
    probe = MatrixSpec("w2", _PROBE, _PROBE, spec.element, group, spec.scale_dtype, spec.symmetric, spec.act_order)
    numbers = torch.arange(_PROBE * _PROBE).view(_PROBE, _PROBE)
    digits, found = -(-16 // spec.bits), torch.zeros(_PROBE * _PROBE, dtype=torch.int64)
    for digit in range(digits):
        shift = digit * spec.bits
        codes = ((numbers >> shift) & ((1 << spec.bits) - 1)).to(torch.uint8)
        stored = _packed_codes(layout, probe, codes)
        if stored is None or stored.numel() != found.numel():
            return None
        found |= stored.to(torch.int64) << shift
    if not torch.equal(found.sort().values, numbers.flatten()):
        return None
    n, k = found // _PROBE, found % _PROBE
    places = torch.where((n < TILE_N) & (k < TILE_K))[0]
    origins = tuple((int(k[place]), int(n[place])) for place in places)
    return TilePicture(layout_id, spec.bits, origins, *(int(places[at]) * spec.bits // 8 for at in (0, -1)))


def _packed_codes(layout: Layout, spec: MatrixSpec, codes: Tensor) -> Tensor | None:
    """Return packed codes in address order, low bits first; None if the layout refuses to pack them."""
    one = torch.ones(spec.n, spec.num_groups)
    scales = one.to(torch.uint8) if spec.scale_dtype == "e8m0" else one.to(_DTYPES.get(spec.scale_dtype, torch.float32))
    zeros = None if spec.symmetric else one.to(torch.int16)
    groups = (torch.arange(spec.k) // spec.group_size).to(torch.int32) if spec.act_order else None
    try:
        packed = layout.pack(QuantizedMatrix(spec, codes, scales, zeros, groups))["weight"]
    except MoeqError:
        return None
    data = packed.contiguous().view(-1).view(torch.uint8)
    if spec.bits == 4:
        return torch.stack([data & 15, data >> 4], dim=1).flatten()
    return data ^ 0x80 if packed.dtype == torch.int8 else data  # signed storage: the code minus 128
