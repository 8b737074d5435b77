"""From elements to packed words and back, by an `Arrangement`: in compiled loops where there is numba, else in torch.

Both give the same bytes. The compiled loop fills a buffer that callers may reuse, with at most the packed matrix of
one expert as scratch; it starts to pay at `COMPILED_FROM` elements, since the first use on a machine compiles it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from moeq.layouts.arrangement import Arrangement

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Elements from which the compiled loops are used.
COMPILED_FROM = 1 << 18

#: Elements from which cached loops are used: any number, as loading them takes no longer than importing torch.
CACHED_FROM = 0


@lru_cache(maxsize=1)
def have_numba() -> bool:
    """Return whether the compiled loops are available: numba is installed and fits numpy."""
    try:
        from moeq.layouts.loops.native import available

        return available()
    except ImportError:
        return False


@lru_cache(maxsize=1)
def have_cached() -> bool:
    """Return whether some of the compiled loops are in the cache, ready to be called."""
    try:
        from moeq.layouts.loops.native import cached

        return cached()
    except ImportError:
        return False


def word_dtype(bits: int) -> torch.dtype:
    """Return the torch dtype that holds words of 8, 16, 32 or 64 bits."""
    import torch

    return {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]


def pack_words(
    arrangement: Arrangement, elements: Tensor, bits: int, out: Tensor | None = None, *, compiled: bool | None = None
) -> Tensor:
    """Arrange a matrix into flat words, each as wide as all its fields together; return `out`, or a new tensor.

    Args:
        elements: `[rows, columns]`, uint8 codes where words hold several fields, else any dtype of `bits` bits.
        compiled: force the numba loop (True) or the torch loop (False); None chooses by size.
    """
    import torch

    fields = arrangement.fields_per_word
    dtype = word_dtype(bits * fields)
    if out is None:
        out = torch.empty(elements.numel() // fields, dtype=dtype)
    if fields == 1 and elements.dtype != dtype:
        elements = elements.view(dtype)
    if _compiled(compiled, elements.numel()):
        from moeq.layouts.loops.scatter import pack

        pack(arrangement, elements.contiguous().numpy(), bits, out.numpy())
        return out
    spread = arrangement.spread(elements)
    words = out.view(spread.shape[: len(arrangement.words)])
    if fields == 1:
        words.copy_(spread)
        return out
    spread = spread.flatten(len(arrangement.words))
    words.copy_(spread[..., 0])
    for field in range(1, fields):
        words |= spread[..., field].to(dtype) << (bits * field)
    return out


def unpack_words(
    arrangement: Arrangement,
    words: Tensor,
    shape: tuple[int, int],
    bits: int,
    *,
    compiled: bool | None = None,
) -> Tensor:
    """Invert `pack_words` exactly: uint8 codes where words hold several fields, else words of `bits` bits."""
    import torch

    fields = arrangement.fields_per_word
    dtype = word_dtype(bits * fields)
    words = words.contiguous().view(dtype).reshape(-1)
    if _compiled(compiled, words.numel() * fields):
        from moeq.layouts.loops.scatter import unpack

        out = torch.empty(shape, dtype=torch.uint8 if fields > 1 else dtype)
        unpack(arrangement, words.numpy(), bits, out.numpy())
        return out
    view = words.view(arrangement.word_shape(*shape))
    if fields == 1:
        return arrangement.gather(view, *shape).contiguous()
    mask = (1 << bits) - 1
    radix = arrangement.radices(*shape)
    codes = torch.stack([((view >> (bits * field)) & mask).to(torch.uint8) for field in range(fields)], dim=-1)
    codes = codes.view(*view.shape, *(radix[digit.name] for digit in arrangement.fields))
    return arrangement.gather(codes, *shape).contiguous()


def take_columns(codes: Tensor, order: Tensor) -> Tensor:
    """Return uint8 `[N, K]` with column `order[i]` at place i."""
    import torch

    if not use_compiled(codes.numel()):
        return codes[:, order]
    from moeq.layouts.loops.columns import take

    out = torch.empty_like(codes)
    take(codes.contiguous(), order.contiguous(), out)
    return out


def block_sums(codes: Tensor, block: int) -> Tensor:
    """Return int32 `[N, K / block]` sums of consecutive uint8 codes."""
    import torch

    n, k = codes.shape
    if not use_compiled(codes.numel()):
        return codes.reshape(n, k // block, block).sum(dim=2, dtype=torch.int32)
    from moeq.layouts.loops.columns import block_sums as compiled

    out = torch.empty(n, k // block, dtype=torch.int32)
    compiled(codes.contiguous(), block, out)
    return out


def use_compiled(elements: int) -> bool:
    """Return whether a job of that size is worth the compiled loops, and they are available."""
    return elements >= COMPILED_FROM and have_numba()


def use_cached(elements: int) -> bool:
    """Return whether a job of that size is worth the loops that are in the cache."""
    return elements >= CACHED_FROM and have_cached()


def _compiled(wanted: bool | None, elements: int) -> bool:
    return use_compiled(elements) if wanted is None else wanted
