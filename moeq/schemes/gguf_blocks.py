"""Unpack blocks of GGUF types: to codes and scales where a type has them, otherwise to floats.

Codes are unpacked here, and so are the two commonest float types. All other types whose numbers are no code times a
scale (minimums, two levels of scales, codebooks of several numbers) are dequantised by `gguf.quants` (0.19), which
knows every type and is imported only where one of them occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeq.errors import MoeqError

if TYPE_CHECKING:
    from torch import Tensor

#: Values of IQ4_NL's 16 codes (`kvalues_iq4nl` of ggml), which int8 holds.
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class CodedType:
    """A type whose numbers are codes times one scale."""

    element: str  #: element type of the codes, as `moeq.matrix` has it
    group: int  #: codes per scale
    scale: str  #: type of a scale
    block: int  #: codes per stored block
    octets: int  #: bytes per stored block
    #: Function from blocks, uint8 `[B, octets]`, to codes, uint8 `[B, block]`, and scales `[B, block / group]`.
    unpack: Callable[[Tensor], tuple[Tensor, Tensor]]


def _halves(octets: Tensor) -> Tensor:
    """Return codes of nibbles `[..., 2 n]`: all low ones, then all high ones."""
    import torch

    return torch.cat([octets & 15, octets >> 4], dim=-1)


def _f16(octets: Tensor) -> Tensor:
    import torch

    return octets.contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return _halves(blocks[:, 2:]), _f16(blocks[:, :2])


def _q5_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    bits = (blocks[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    # int5 counts from -16; as int8, which engines load, codes count from -128.
    return _halves(blocks[:, 6:]) + (bits.flatten(1) << 4) + (128 - 16), _f16(blocks[:, :2])


def _q8_0(blocks: Tensor) -> tuple[Tensor, Tensor]:
    return blocks[:, 2:] ^ 128, _f16(blocks[:, :2])


def _iq4_nl(blocks: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    table = torch.tensor([value + 128 for value in _IQ4_NL], dtype=torch.uint8)
    return table[_halves(blocks[:, 2:]).int()], _f16(blocks[:, :2])


def _mxfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    # ggml's table has doubled values under halved scales: the exponent byte means what OCP's does.
    return _halves(blocks[:, 1:]), blocks[:, :1].contiguous()


def mxfp4_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """Join codes `[N, K]` and exponent bytes `[N, K / 32]` to MXFP4 blocks: uint8 `[N, K / 32 * 17]`."""
    import torch

    halves = codes.reshape(*scales.shape, 2, 16)
    return torch.cat([scales.unsqueeze(-1), halves[:, :, 0] | (halves[:, :, 1] << 4)], dim=-1).flatten(1)


def _nvfp4(blocks: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    scales = blocks[:, :4].contiguous()
    if bool((scales >= 127).any()):
        detail = f"an NVFP4 scale has the byte {int(scales.max())}, unsigned E4M3 ends at 126"
        raise MoeqError("source.bad-data", detail, "the file is damaged")
    return _halves(blocks[:, 4:].reshape(-1, 4, 8)).flatten(1), scales.view(torch.float8_e4m3fn)


#: Types that are codes under scales.
CODED: dict[str, CodedType] = {
    "q4_0": CodedType("int4", 32, "f16", 32, 18, _q4_0),
    "q5_0": CodedType("int8", 32, "f16", 32, 22, _q5_0),
    "q8_0": CodedType("int8", 32, "f16", 32, 34, _q8_0),
    "iq4_nl": CodedType("int8", 32, "f16", 32, 18, _iq4_nl),
    "mxfp4": CodedType("e2m1", 32, "e8m0", 32, 17, _mxfp4),
    "nvfp4": CodedType("e2m1", 16, "e4m3", 64, 36, _nvfp4),
}


def _widened(blocks: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = _q4_0(blocks)
    return codes + (128 - 8), scales


#: Types read as codes of more bits than they have, where other experts of a layer have codes of 8 bits.
WIDENED: dict[str, CodedType] = {"q4_0_int8": CodedType("int8", 32, "f16", 32, 18, _widened)}

#: Elements and bytes per block of the types that are decoded to floats.
FLOATS: dict[str, tuple[int, int]] = {
    "f32": (1, 4),
    "f16": (1, 2),
    "bf16": (1, 2),
    "q4_1": (32, 20),
    "q5_1": (32, 24),
    "q2_k": (256, 84),
    "q3_k": (256, 110),
    "q4_k": (256, 144),
    "q5_k": (256, 176),
    "q6_k": (256, 210),
    "iq2_xxs": (256, 66),
    "iq2_xs": (256, 74),
    "iq3_xxs": (256, 98),
    "iq1_s": (256, 50),
    "iq3_s": (256, 110),
    "iq2_s": (256, 82),
    "iq4_xs": (256, 136),
    "iq1_m": (256, 56),
    "tq1_0": (256, 54),
    "tq2_0": (256, 66),
}


#: Types read as float32, where other rows of the same matrix are numbers of another kind.
AS_FLOAT32: dict[str, str] = {f"{kind}_f32": kind for kind in (*CODED, "f16", "bf16")}


def readings(gate: str, up: str, down: str) -> tuple[str, str, str]:
    """Say how the types of a layer's experts are read, so that a kernel can multiply with them.

    Gate and up are one matrix to engines, and all three are of one kind in a quantised layer. Codes of 4 bits become
    codes of 8 bits if another projection has 8 bits; gate and up of different kinds become float32.
    """

    def kind_of(name: str) -> str:
        if name in CODED:
            return CODED[name].element + CODED[name].scale
        return name if name in ("f16", "bf16") else "f32"

    def widened(*names: str) -> tuple[str, ...]:
        mixed = {kind_of(name) for name in names} == {"int4f16", "int8f16"}
        return tuple(f"{name}_int8" if mixed and f"{name}_int8" in WIDENED else name for name in names)

    gate, up, down = widened(gate, up, down)
    if gate in WIDENED or up in WIDENED or down in WIDENED:
        return gate, up, down
    gate, up = widened(gate, up)
    if gate in WIDENED or up in WIDENED or kind_of(gate) == kind_of(up):
        return gate, up, down
    first, second = (f"{name}_f32" if f"{name}_f32" in AS_FLOAT32 else name for name in (gate, up))
    return first, second, down


def _q4_k(blocks: Tensor) -> Tensor:
    import torch

    scale, minimum = _f16(blocks[:, :2]).float(), _f16(blocks[:, 2:4]).float()
    _require_finite("q4_k", scale, minimum)
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = scale * torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=1)
    minimums = minimum * torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=1)
    codes = _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return codes.float().mul_(scales.unsqueeze(2)).sub_(minimums.unsqueeze(2))


def _q6_k(blocks: Tensor) -> Tensor:
    import torch

    scale = _f16(blocks[:, 208:]).float()
    _require_finite("q6_k", scale)
    scales = scale * blocks[:, 192:208].view(torch.int8)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).reshape(4, 1)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    codes = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32) | (high << 4)
    return codes.reshape(-1, 16, 16).float().sub_(32).mul_(scales.unsqueeze(2))


def _require_finite(kind: str, *scales: Tensor) -> None:
    import torch

    if not all(bool(torch.isfinite(scale).all()) for scale in scales):
        raise MoeqError("source.bad-data", f"some {kind} numbers are not finite", "the file is damaged")


#: Float types that are computed here, since most files have them; operations and their order are those of `gguf`.
_COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {"q4_k": _q4_k, "q6_k": _q6_k}


#: Formats that hold a type's numbers exactly; all others round them once, and `transcode` says how far.
_EXACT = {
    "q4_0": "int4, groups of 32: exact in compressed-tensors and GPTQ",
    "q5_0": "int8, groups of 32: exact in compressed-tensors and GPTQ",
    "q8_0": "int8, groups of 32: exact in compressed-tensors and GPTQ",
    "iq4_nl": "int8, groups of 32: exact in compressed-tensors and GPTQ",
    "mxfp4": "MXFP4: exact in compressed-tensors, gpt-oss' own format, FP8 blocks and bfloat16",
    "nvfp4": "NVFP4: exact in compressed-tensors and ModelOpt",
    "bf16": "bfloat16: exact in bf16 and fp32",
    "f16": "float16: exact in fp16 and fp32",
}


def exactness(kind: str) -> str:
    """Return a phrase for people: the formats that hold a type's numbers exactly."""
    if kind in WIDENED:
        return f"read as int8 beside codes of 8 bits, {_EXACT['q8_0'].removeprefix('int8, ')}"
    return _EXACT.get(kind, "floats: exact in fp32, rounded once in bf16, fp16 and fp8")


def float_values(kind: str, rows: Tensor) -> Tensor:
    """Return rows of a type of `FLOATS`, uint8 `[N, bytes of a row]`, as floats `[N, K]`: the stored ones or float32.

    Raises MoeqError `environment.no-gguf` without the package gguf; `source.bad-data` for numbers that are not finite.
    """
    import numpy as np
    import torch

    if kind in _COMPUTED:
        blocks = rows.reshape(-1, FLOATS[kind][1])
        return _COMPUTED[kind](blocks).reshape(rows.shape[0], -1)
    plain = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    if kind in plain:
        values = rows.contiguous().view(plain[kind])
    else:
        quants, types = _library()
        with np.errstate(all="ignore"):  # damaged scales overflow, and are found below
            values = torch.from_numpy(quants.dequantize(rows.contiguous().numpy(), types[kind.upper()]))
    if not bool(torch.isfinite(values).all()):
        raise MoeqError("source.bad-data", f"some {kind} numbers are not finite", "the file is damaged")
    return values


def _library() -> tuple[Any, Any]:
    try:
        from gguf import GGMLQuantizationType, quants
    except ImportError:
        raise MoeqError(
            "environment.no-gguf",
            "this GGUF type is dequantised by the package gguf, which is not installed",
            "pip install gguf",
        ) from None
    return quants, GGMLQuantizationType
