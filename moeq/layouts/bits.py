"""Fixed permutations of the 32 bits of a word, as a few masked shifts. Importing this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from moeq.layouts.words import use_compiled

if TYPE_CHECKING:
    from torch import Tensor

#: Words handled at a time by the torch loop.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class BitPermutation:
    """A permutation of bits: bit i of a word goes to `places[i]`."""

    places: tuple[int, ...]

    @cached_property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """`(left shift, mask of the result)`; a negative shift goes right. OR-ing all steps permutes the word."""
        masks: dict[int, int] = {}
        for source, target in enumerate(self.places):
            masks[target - source] = masks.get(target - source, 0) | 1 << target
        return tuple(sorted(masks.items()))

    @cached_property
    def inverse(self) -> BitPermutation:
        """Inverse permutation."""
        places = [0] * 32
        for source, target in enumerate(self.places):
            places[target] = source
        return BitPermutation(tuple(places))

    def apply_(self, words: Tensor, *, compiled: bool | None = None) -> Tensor:
        """Permute the bits of flat int32 words in place. Returns the words."""
        if use_compiled(words.numel()) if compiled is None else compiled:
            from moeq.layouts.loops.bits import apply

            apply(self.steps, words.numpy())
            return words
        for start in range(0, words.numel(), _CHUNK):
            chunk = words[start : start + _CHUNK]
            chunk.copy_(self._permuted(chunk))
        return words

    def _permuted(self, words: Tensor) -> Tensor:
        import torch

        result = torch.zeros_like(words)
        for shift, mask in self.steps:
            # A right shift by s copies the sign into the top s bits; the mask, made of shifted bits, has none of those.
            moved = words << shift if shift >= 0 else words >> -shift
            result |= moved & (mask - (1 << 32) if mask >> 31 else mask)
        return result


def _mul_free() -> tuple[int, ...]:
    """Send the low nibble of every byte to the low half-word, and the high nibble to the high one."""
    places = [0] * 32
    for byte in range(4):
        last = byte == 3
        ends = (13, 10, 11, 14) if last else (6 - 3 * byte, 7 - 3 * byte, 8 - 3 * byte, 15 - 3 * byte)
        for half in range(2):
            for bit, end in enumerate(ends):
                places[8 * byte + 4 * half + bit] = 16 * half + end
    return tuple(places)


#: Eight e2m1 codes of a word permuted so that shifts and one bf16 multiplication decode them ("mul-free" fp4). Three
#: codes of each half-word keep sign and magnitude together; the fourth is spread over what is left.
#: Source: triton_kernels 3.5.1 (`HopperMXValueLayout`) and FlashInfer 0.7.2 (SM90 mixed-input GEMM).
MUL_FREE = BitPermutation(_mul_free())


def _moeq_mxfp4() -> tuple[int, ...]:
    """Place mantissa, both exponent bits and sign of nibbles 0, 1, 2 and 3; nibbles 4 to 7 go 16 bits further."""
    ends = ((6, 7, 8, 15), (0, 1, 2, 9), (3, 4, 5, 12), (30, 26, 27, 29))
    return tuple((end + 16 * half) % 32 for half in range(2) for nibble in ends for end in nibble)


#: Eight e2m1 codes of a Marlin word in the order of `moeq-mxfp4/1` (`moeq.layouts.moeq`).
MOEQ_MXFP4 = BitPermutation(_moeq_mxfp4())
