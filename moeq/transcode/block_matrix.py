"""GGUF's blocks as the fast path of transcoding reads them: codes and scales, or the blocks themselves.

Types that are codes under scales give the fields of `moeq.pipeline.pack.fast.formats`. Types of other numbers give
`blocks`, uint8 `[N, bytes of a row]`, whose numbers are computed some rows at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.layouts.loops import blocks
from moeq.layouts.loops.codebooks import CODEBOOKS, is_installed
from moeq.layouts.loops.compare import any_all_ones
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.formats import Fields, Stored
from moeq.pipeline.pack.fast.scales import EXPONENT, WIDTH
from moeq.pipeline.pack.fast.scratch import Array, Region, regions_of
from moeq.schemes.format import Described, PartSig
from moeq.schemes.gguf import METHOD, part_of

#: Types of floats that are stored as they are.
PLAIN_TYPES = ("f32", "f16", "bf16")

#: Least bits of an E4M3 scale that is negative or NaN.
_NEGATIVE_E4M3 = 0x7F


@dataclass(frozen=True)
class StoredBlocks:
    """A projection in blocks of one type."""

    type: str
    spec: MatrixSpec
    reads: tuple[str, ...]

    @property
    def scratch_bytes(self) -> int:
        return self._regions["global scale"].stop if self.type in blocks.SCALE_BYTES else 0

    @cached_property
    def _regions(self) -> dict[str, Region]:
        spec, width = self.spec, np.dtype(WIDTH[self.spec.scale_dtype]).itemsize
        sizes = {"codes": spec.n * spec.k * spec.bits // 8, "scales": spec.n * spec.num_groups * width}
        return regions_of({**sizes, "global scale": 4 * spec.n if self.type == "nvfp4" else 0})

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        """Return the fields; None if a scale is no number that its type has."""
        n = self.spec.n
        fields: Fields = {}
        if "bias" in stored:
            bias = stored["bias"]
            fields["bias"] = bias.view(f"u{len(bias) // n}").reshape(-1, 1)
        rows = stored[part_of(self.type)].reshape(n, -1)
        if self.type not in blocks.SCALE_BYTES:
            return {"blocks": rows, **fields}
        codes = self._regions["codes"].array(scratch, (n, self.spec.k * self.spec.bits // 32), "u4")
        scales = self._regions["scales"].array(scratch, (n, self.spec.num_groups), WIDTH[self.spec.scale_dtype])
        blocks.split(self.type, rows, codes.view(np.uint8), scales.view(np.uint8))
        if any_all_ones(scales, EXPONENT[self.spec.scale_dtype]):
            return None
        if self.type == "nvfp4":
            if scales.max() >= _NEGATIVE_E4M3:
                return None
            shared = self._regions["global scale"].array(scratch, (n, 1), "u4")
            shared.view(np.float32).fill(1)
            fields["global_scale"] = shared
        return {"codes": codes, "scales": scales, **fields}


def stored_blocks(sigs: Mapping[str, PartSig], described: Described) -> StoredBlocks | None:
    """Describe how to read a projection; None unless it is blocks that loops can read."""
    block_type = described.scheme.checkpoint_format
    known = block_type in (*blocks.SCALE_BYTES, *blocks.NUMBERS, *PLAIN_TYPES)
    if described.scheme.format != METHOD or not known or (block_type in CODEBOOKS and not is_installed()):
        return None
    return StoredBlocks(block_type, described.spec, tuple(sigs))
