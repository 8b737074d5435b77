"""Parts of a packed matrix, each an index map of one logical tensor: their record, and how they are packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import TensorSpec
from moeq.layouts.bits import BitPermutation
from moeq.layouts.words import pack_words, unpack_words, word_dtype
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: safetensors dtype and bytes of a stored scale, by `MatrixSpec.scale_dtype` (or `bias_dtype`).
STORED_DTYPE: dict[str, str] = {"f16": "F16", "bf16": "BF16", "f32": "F32", "e8m0": "U8", "e4m3": "F8_E4M3"}

#: Bits of a stored element.
DTYPE_BITS = {"U8": 8, "I8": 8, "F8_E4M3": 8, "F16": 16, "BF16": 16, "I32": 32, "F32": 32}

Field = Literal["codes", "scales", "zeros", "bias"]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name."""
    import torch

    names = {
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "F32": torch.float32,
    }
    return names[name]


@dataclass(frozen=True)
class Part:
    """One tensor of the packed matrix."""

    field: Field  #: the logical tensor it holds; `bias` is taken as a matrix of one column
    arrangement: Arrangement  #: index map from `[rows, columns]` to words
    shape: tuple[int, ...]  #: stored shape of one expert
    dtype: str  #: stored safetensors dtype; a word fills a whole number of its elements
    bits: int  #: bits of one element within a word
    #: Multiples that rows and columns are zero-filled to inside the layout (gate and up together for `w13`).
    pad: tuple[int, int] = (1, 1)
    group: int = 1  #: input features per column, for the arithmetic of slices (scales: the group size; codes: 1)
    rewrite: BitPermutation | None = None  #: permutation of the bits of every finished word, or None
    flip: int = 0  #: bits of each element that are stored inverted (8 makes int4 codes two's complement)
    rows: int = 1  #: output features that share a stored row (scales of blocks: 128; of a whole matrix: all)
    halves_swapped: bool = False  #: the halves of the rows change places before they are filled up and arranged

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype as stored."""
        return TensorSpec(self.shape, self.dtype)

    def padded(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the size of the matrix after padding inside the layout."""
        return -(-rows // self.pad[0]) * self.pad[0], -(-columns // self.pad[1]) * self.pad[1]


def repeat_rows(part: Part, stored: Tensor, spec: MatrixSpec) -> Tensor:
    """Return all rows of a matrix, of which a part stores one for each `part.rows`."""
    return stored if part.rows == 1 else stored.repeat_interleave(part.rows, dim=0)[: spec.n].contiguous()


def is_common(part: Part, spec: MatrixSpec) -> bool:
    """Return whether a part holds one number, or one for each column, for the whole matrix."""
    one_column = part.field not in ("scales", "zeros") or spec.num_groups == 1
    return part.rows > 1 and part.rows >= spec.n and one_column


def arrange(part: Part, elements: Tensor, out: Tensor) -> None:
    """Pack a matrix `[rows, columns]` into one stored tensor, zero-filling where the layout pads inside."""
    words = flat_words(out, part)
    if part.halves_swapped:
        elements = elements.roll(len(elements) // 2, dims=0)
    pack_words(part.arrangement, _zero_fill(elements, part), part.bits, words)
    if part.flip:
        flips = sum(part.flip << (part.bits * field) for field in range(part.arrangement.fields_per_word))
        width = 8 * words.element_size()
        words ^= flips - (1 << width) if width > 8 and flips >> (width - 1) else flips
    if part.rewrite is not None:
        part.rewrite.apply_(words)


def rearrange(part: Part, packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """Invert `arrange`: return codes, or words of `part.bits` bits, `[rows, columns]`."""
    words = flat_words(packed.contiguous(), part)
    if part.rewrite is not None:
        words = part.rewrite.inverse.apply_(words.clone())
    padded = part.padded(*shape)
    found = unpack_words(part.arrangement, words, padded, part.bits)
    if part.flip:
        found = found ^ part.flip  # a new tensor: `found` may be a view of the caller's
    halves = 2 if part.arrangement.has_halves else 1
    kept = found.view(halves, padded[0] // halves, padded[1])[:, : shape[0] // halves, : shape[1]].reshape(shape)
    return kept.roll(shape[0] // 2, dims=0) if part.halves_swapped else kept


def _zero_fill(elements: Tensor, part: Part) -> Tensor:
    rows, columns = part.padded(*elements.shape)
    if (rows, columns) == tuple(elements.shape):
        return elements
    # Fill gate and up apart: where an engine pads interleaved rows at their end, half of the padding belongs to each.
    halves = 2 if part.arrangement.has_halves else 1
    old = elements.reshape(halves, -1, elements.shape[1])
    filled = elements.new_zeros((halves, rows // halves, columns))
    filled[:, : old.shape[1], : old.shape[2]] = old
    return filled.view(rows, columns)


def flat_words(tensor: Tensor, part: Part) -> Tensor:
    """View a stored tensor as the words of its arrangement."""
    return tensor.view(-1).view(word_dtype(part.bits * part.arrangement.fields_per_word))


def changed(before: Tensor, after: Tensor) -> int:
    """Count the values that differ in their bits."""
    width = word_dtype(8 * before.element_size())
    return int((before.contiguous().view(width) != after.contiguous().view(width)).sum())


#: 16-bit floats: neither holds all numbers of the other, nor those of float32.
HALF_DTYPES = ("F16", "BF16")


def logical_dtype(part: Part, spec: MatrixSpec) -> str:
    """Return the safetensors dtype of the logical scales or bias that a part holds."""
    return STORED_DTYPE[(spec.bias_dtype or "") if part.field == "bias" else spec.scale_dtype]


def as_stored(part: Part, spec: MatrixSpec) -> bool:
    """Return whether a part holds the bytes of the logical tensor, possibly several to a word."""
    several = part.arrangement.fields_per_word > 1
    return part.field in ("codes", "zeros") or several or logical_dtype(part, spec) == part.dtype
