"""Write a matrix into a packed tensor in place, by an index map that is given as digits of row and column numbers.

The kernel is launched on the current stream and never synchronises: later work of the stream reads the new words, and
graphs that were captured before find them at the same address.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moeq_kernels.errors import KernelArgumentError

#: Words that a program writes.
BLOCK = 512

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Digit:
    """One digit of the number of a packed word.

    Attributes:
        axis: 0 if it belongs to the row number, 1 for the column number.
        radix: number of its values.
        multiple: rows or columns by which it counts.
        reversed: whether it counts backwards.
        stride: words by which it counts.
        start: first value that is written.
        extent: number of values that are written.
    """

    axis: int
    radix: int
    multiple: int
    reversed: bool
    stride: int
    start: int
    extent: int


@dataclass(frozen=True)
class Placement:
    """Words of a packed tensor that hold a block of a matrix.

    Attributes:
        digits: digits of the number of a word, least significant first.
        fields: row and column offset of each element of a word, that in the lowest bits first.
        bits: bits of an element.
        flip: bits of each element that are stored inverted.
        steps: permutation of the bits of a finished word as `(left shift, mask)` pairs; empty for none.
        origin: row and column of the packed matrix at which the source begins.
    """

    digits: tuple[Digit, ...]
    fields: tuple[tuple[int, int], ...]
    bits: int
    flip: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    origin: tuple[int, int] = (0, 0)

    @property
    def words(self) -> int:
        """Number of words that are written."""
        count = 1
        for digit in self.digits:
            count *= digit.extent
        return count

    @property
    def constants(self) -> dict[str, object]:
        """Constexpr arguments of the kernel that the index map decides."""
        return {
            "DIGITS": tuple(
                (one.axis, one.radix, one.multiple, int(one.reversed), one.start, one.extent, one.stride)
                for one in self.digits
            ),
            "FIELDS": self.fields,
            "BITS": self.bits,
            "FLIP": self.flip,
            "STEPS": self.steps,
        }


@dataclass(frozen=True)
class Packing:
    """How the source holds the elements of a matrix: alone, or several to a word of one axis.

    Attributes:
        per: elements in a source word.
        along_rows: whether elements of one word follow each other along rows (AWQ) instead of columns.
        order: field of each element of a word; empty for ascending fields.
        sign: bits of each element that are stored inverted: 128 for int8 codes in two's complement.
    """

    per: int = 1
    along_rows: bool = False
    order: tuple[int, ...] = field(default=())
    sign: int = 0

    @property
    def constants(self) -> dict[str, object]:
        """Constexpr arguments of the kernel that the source decides."""
        order = self.order or tuple(range(self.per))
        digits = sum(place << (4 * element) for element, place in enumerate(order))
        return {"PER": self.per, "ALONG_ROWS": self.along_rows, "ORDER": digits, "SIGN": self.sign}


UNPACKED = Packing()


def place(
    source: Tensor, target: Tensor, placement: Placement, shape: tuple[int, int], packing: Packing = UNPACKED
) -> None:
    """Write a matrix, or several, into their words of a packed tensor, in place and in the order of the current stream.

    Args:
        source: elements `[rows, columns]`, or words of `packing.per` of them along one axis; any strides. With a first
            axis more for several matrices, which are written by one launch.
        target: all words of the packed matrices, one after the other, contiguous, of any dtype and shape.
        placement: which words are written, and with which elements.
        shape: rows and columns of the source matrix; elements beyond are 0.
        packing: how the source holds elements.

    Raises:
        KernelArgumentError: if source and target are on several devices or do not hold what `placement` says.
    """
    from moeq_kernels.device.placement import place_words

    size = -(-placement.bits * len(placement.fields) // 8)
    if size not in _WORDS or not target.is_contiguous():
        raise KernelArgumentError(f"words of {size} bytes in strides {target.stride()} cannot be written")
    words = target.view(-1).view(torch.uint8).view(_WORDS[size])
    last = sum((one.start + one.extent - 1) * one.stride for one in placement.digits)
    matrices = source if source.dim() == 3 else source.unsqueeze(0)
    number = len(matrices)
    each = words.numel() // max(number, 1)
    if matrices.dim() != 3 or last >= each or each * number != words.numel() or source.device != target.device:
        raise KernelArgumentError(
            f"word {last} of {each} on {target.device}, from {list(source.shape)} on {source.device}"
        )
    stored = matrices if not source.is_floating_point() else matrices.view(_WORDS[source.element_size()])
    count = placement.words
    with torch.cuda.device(source.device) if source.device.type == "cuda" else nullcontext():
        place_words[(-(-count // BLOCK), number)](
            stored,
            words,
            count,
            *shape,
            *stored.stride()[1:],
            *placement.origin,
            stored.stride(0),
            each,
            **placement.constants,
            **packing.constants,
            BLOCK=BLOCK,
        )
