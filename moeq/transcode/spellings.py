"""How target formats store one projection: its parts with dtypes and shapes, as that format's own tools write them.

Packing is that of the formats themselves (`moeq.schemes`); here is only what a writer has to decide: which parts there
are. Sources: compressed-tensors 0.17 to 0.20, GPTQModel 7.7, nvidia-modelopt 0.47, transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.format import FLOAT_NAMES, PartSig
from moeq.schemes.registry import get_format

if TYPE_CHECKING:
    from torch import Tensor

#: Rows and columns of a block of FP8 weights.
BLOCK = 128

#: Spellings with one scale per such block.
FP8_BLOCKS = ("fp8-block", "ct-fp8-block", "deepseek-fp8")

_DTYPES = {name: dtype for dtype, name in FLOAT_NAMES.items() if dtype != "U8"}


@dataclass(frozen=True)
class Spelling:
    """One way to store a projection.

    Attributes:
        id: name within this module's table.
        format: id of the format in `moeq.schemes.registry` that reads it.
        parts: dtype and shape of every part, from the sizes alone.
    """

    id: str
    format: str
    parts: Callable[[MatrixSpec], dict[str, PartSig]]

    def signatures(self, spec: MatrixSpec) -> dict[str, PartSig]:
        """Dtype and shape of every part, the bias among them."""
        found = self.parts(spec)
        if spec.bias_dtype is not None:
            found["bias"] = PartSig(_DTYPES[spec.bias_dtype], (spec.n,))
        return found


def pack(matrix: QuantizedMatrix, signatures: Mapping[str, PartSig], scheme: Scheme, where: str) -> dict[str, Tensor]:
    """The stored tensors of one projection.

    Raises:
        MoeqError: `bug.no-part` where a format cannot pack a part that its spelling names.
    """
    found: dict[str, Tensor] = {}
    for part, signature in signatures.items():
        tensor = get_format(scheme.format).rebuild(matrix, part, signature, scheme)
        if tensor is None:
            detail = f"{where}: {scheme.format} does not pack {part} as {signature.dtype} {list(signature.shape)}"
            raise MoeqError("bug.no-part", detail, "report this as a bug in moeq")
        found[part] = tensor
    return found


def _words(count: int, bits: int) -> int:
    """32-bit words of a dense bit stream."""
    return -(-count * bits // 32)


def _ct_pack(spec: MatrixSpec) -> dict[str, PartSig]:
    parts = {
        "weight_packed": PartSig("I32", (spec.n, _words(spec.k, spec.bits))),
        "weight_scale": PartSig(_DTYPES[spec.scale_dtype], (spec.n, spec.num_groups)),
        "weight_shape": PartSig("I64", (2,)),
    }
    if not spec.symmetric:
        parts["weight_zero_point"] = PartSig("I32", (_words(spec.n, spec.bits), spec.num_groups))
    return parts


def _gptq(spec: MatrixSpec) -> dict[str, PartSig]:
    return {
        "qweight": PartSig("I32", (_words(spec.k, spec.bits), spec.n)),
        "qzeros": PartSig("I32", (spec.num_groups, _words(spec.n, spec.bits))),
        "scales": PartSig(_DTYPES[spec.scale_dtype], (spec.num_groups, spec.n)),
        "g_idx": PartSig("I32", (spec.k,)),
    }


def _byte_matrix(
    weight: str, weight_dtype: str, scale: str, scale_dtype: str
) -> Callable[[MatrixSpec], dict[str, PartSig]]:
    def parts(spec: MatrixSpec) -> dict[str, PartSig]:
        return {
            weight: PartSig(weight_dtype, (spec.n, spec.k // 2)),
            scale: PartSig(scale_dtype, (spec.n, spec.num_groups)),
        }

    return parts


def _gpt_oss(spec: MatrixSpec) -> dict[str, PartSig]:
    return {
        "blocks": PartSig("U8", (spec.n, spec.num_groups, 16)),
        "scales": PartSig("U8", (spec.n, spec.num_groups)),
    }


def _ct_nvfp4(spec: MatrixSpec) -> dict[str, PartSig]:
    parts = _byte_matrix("weight_packed", "U8", "weight_scale", "F8_E4M3")(spec)
    return {**parts, "weight_global_scale": PartSig("F32", (1,))}


def _modelopt_nvfp4(spec: MatrixSpec) -> dict[str, PartSig]:
    parts = _byte_matrix("weight", "U8", "weight_scale", "F8_E4M3")(spec)
    return {**parts, "weight_scale_2": PartSig("F32", ())}


def _fp8_rows(spec: MatrixSpec) -> dict[str, PartSig]:
    return {
        "weight": PartSig("F8_E4M3", (spec.n, spec.k)),
        "weight_scale": PartSig(_DTYPES[spec.scale_dtype], (spec.n, 1)),
    }


def _fp8_blocks(scale: str) -> Callable[[MatrixSpec], dict[str, PartSig]]:
    def parts(spec: MatrixSpec) -> dict[str, PartSig]:
        blocks = (-(-spec.n // BLOCK), -(-spec.k // BLOCK))
        return {
            "weight": PartSig("F8_E4M3", (spec.n, spec.k)),
            scale: PartSig(_DTYPES[spec.scale_dtype], blocks),
        }

    return parts


def _plain(spec: MatrixSpec) -> dict[str, PartSig]:
    return {"weight": PartSig(_DTYPES[spec.element], (spec.n, spec.k))}


def _transposed(spec: MatrixSpec) -> dict[str, PartSig]:
    return {"weight": PartSig(_DTYPES[spec.element], (spec.k, spec.n))}


SPELLINGS: dict[str, Spelling] = {
    spelling.id: spelling
    for spelling in (
        Spelling("ct-pack", "ct-pack", _ct_pack),
        Spelling("gptq", "gptq", _gptq),
        Spelling("ct-mxfp4", "ct-mxfp4", _byte_matrix("weight_packed", "U8", "weight_scale", "U8")),
        Spelling("deepseek-fp4", "deepseek-fp4", _byte_matrix("weight", "I8", "scale", "F8_E8M0")),
        Spelling("deepseek-fp8", "fp8-block", _fp8_blocks("scale")),
        Spelling("gpt-oss", "mxfp4", _gpt_oss),
        Spelling("ct-nvfp4", "nvfp4", _ct_nvfp4),
        Spelling("modelopt-nvfp4", "nvfp4", _modelopt_nvfp4),
        Spelling("ct-fp8", "fp8", _fp8_rows),
        Spelling("fp8-block", "fp8-block", _fp8_blocks("weight_scale_inv")),
        Spelling("ct-fp8-block", "fp8-block", _fp8_blocks("weight_scale")),
        Spelling("plain", "unquantized", _plain),
        Spelling("plain-transposed", "unquantized", _transposed),
    )
}
