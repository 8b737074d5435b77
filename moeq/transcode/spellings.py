"""Spellings: how target formats store one projection, in which parts, dtypes and shapes, by that format's own tools.

The formats themselves pack the parts (`moeq.schemes`); this module only lists the parts that a writer has to make.
Sources: compressed-tensors 0.17 to 0.20, GPTQModel 7.7, nvidia-modelopt 0.47, transformers 5.23.
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

#: Largest number of NUMA nodes for which experts are cut.
MAX_NUMA_NODES = 8

#: Spellings with one scale per block of `BLOCK` x `BLOCK` weights.
FP8_BLOCKS = ("fp8-block", "ct-fp8-block", "deepseek-fp8", "modelopt-fp8-block")

#: Formats of ktransformers; their spellings have the number of NUMA nodes behind a slash, `kt-amx-int4/2`.
KT_AMX = ("kt-amx-int4", "kt-amx-int8")

_DTYPES = {name: dtype for dtype, name in FLOAT_NAMES.items() if dtype != "U8"}


@dataclass(frozen=True)
class Spelling:
    """One way to store a projection."""

    id: str  #: name within this module's table
    format: str  #: id of the format in `moeq.schemes.registry` that reads it
    parts: Callable[[MatrixSpec], dict[str, PartSig]]  #: dtype and shape of every part, from the sizes alone
    #: Name and shape of the static scale of activations; None if the spelling has no place for one.
    activation: tuple[str, tuple[int, ...]] | None = None

    def signatures(self, spec: MatrixSpec) -> dict[str, PartSig]:
        """Return dtype and shape of every part of the matrix, the bias among them."""
        found = self.parts(spec)
        if spec.bias_dtype is not None:
            found["bias"] = PartSig(_DTYPES[spec.bias_dtype], (spec.n,))
        return found


def pack(matrix: QuantizedMatrix, signatures: Mapping[str, PartSig], scheme: Scheme, where: str) -> dict[str, Tensor]:
    """Pack one projection and return its stored tensors by part.

    Raises MoeqError `bug.no-part` if a format cannot pack a part that its spelling names.
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
    """Return the number of 32-bit words of a dense bit stream."""
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


def _nvfp4(weight: str, global_scale: str, shape: tuple[int, ...]) -> Callable[[MatrixSpec], dict[str, PartSig]]:
    matrix = _byte_matrix(weight, "U8", "weight_scale", "F8_E4M3")
    return lambda spec: {**matrix(spec), global_scale: PartSig("F32", shape)}


def _e4m3(
    scale: str, shape: Callable[[MatrixSpec], tuple[int, ...]], dtype: str | None = None
) -> Callable[[MatrixSpec], dict[str, PartSig]]:
    """Return the parts of FP8 codes with scales of that shape, by default in the matrix's scale dtype."""

    def parts(spec: MatrixSpec) -> dict[str, PartSig]:
        scales = PartSig(dtype or _DTYPES[spec.scale_dtype], shape(spec))
        return {"weight": PartSig("F8_E4M3", (spec.n, spec.k)), scale: scales}

    return parts


def _groups(spec: MatrixSpec) -> tuple[int, int]:
    return spec.n, spec.num_groups


def _blocks(spec: MatrixSpec) -> tuple[int, int]:
    return -(-spec.n // BLOCK), -(-spec.k // BLOCK)


def _spread_blocks(spec: MatrixSpec) -> tuple[int, ...]:
    """Return ModelOpt's shape of block scales, `[row blocks, 1, column blocks, 1]`."""
    rows, columns = _blocks(spec)
    return rows, 1, columns, 1


def _kt_amx(format_id: str, nodes: int) -> Spelling:
    def parts(spec: MatrixSpec) -> dict[str, PartSig]:
        from moeq.schemes.kt_amx import KtAmx

        form = get_format(format_id)
        assert isinstance(form, KtAmx)
        return form.signatures(spec, nodes)

    return Spelling(f"{format_id}/{nodes}", format_id, parts)


SPELLINGS: dict[str, Spelling] = {
    spelling.id: spelling
    for spelling in (
        *(_kt_amx(format_id, nodes) for format_id in KT_AMX for nodes in range(1, MAX_NUMA_NODES + 1)),
        Spelling("ct-pack", "ct-pack", _ct_pack),
        Spelling("gptq", "gptq", _gptq),
        Spelling("ct-mxfp4", "ct-mxfp4", _byte_matrix("weight_packed", "U8", "weight_scale", "U8")),
        Spelling("deepseek-fp4", "deepseek-fp4", _byte_matrix("weight", "I8", "scale", "F8_E8M0")),
        Spelling("deepseek-fp8", "fp8-block", _e4m3("scale", _blocks)),
        Spelling("gpt-oss", "mxfp4", _gpt_oss),
        Spelling("gguf-mxfp4", "gguf", lambda spec: {"gguf_mxfp4": PartSig("U8", (spec.n, spec.num_groups * 17))}),
        Spelling(
            "ct-nvfp4", "nvfp4", _nvfp4("weight_packed", "weight_global_scale", (1,)), ("input_global_scale", (1,))
        ),
        Spelling("ct-fp8", "fp8", _e4m3("weight_scale", lambda spec: (spec.n, 1))),
        Spelling("ct-fp8-tensor", "fp8", _e4m3("weight_scale", lambda spec: (1,)), ("input_scale", (1,))),
        Spelling("ct-mxfp8", "mxfp8", _e4m3("weight_scale", _groups, "U8")),
        Spelling("fp8-block", "fp8-block", _e4m3("weight_scale_inv", _blocks)),
        Spelling("ct-fp8-block", "fp8-block", _e4m3("weight_scale", _blocks)),
        Spelling("modelopt-nvfp4", "nvfp4", _nvfp4("weight", "weight_scale_2", ()), ("input_scale", ())),
        Spelling("modelopt-fp8", "fp8", _e4m3("weight_scale", lambda spec: ()), ("input_scale", ())),
        Spelling("modelopt-fp8-channel", "fp8", _e4m3("weight_scale", lambda spec: (spec.n,))),
        Spelling("modelopt-fp8-block", "fp8-block", _e4m3("weight_scale", _spread_blocks)),
        Spelling("modelopt-mxfp8", "mxfp8", _e4m3("weight_scale", _groups, "U8")),
        Spelling("plain", "unquantized", lambda spec: {"weight": PartSig(_DTYPES[spec.element], (spec.n, spec.k))}),
        Spelling(
            "plain-transposed", "unquantized", lambda spec: {"weight": PartSig(_DTYPES[spec.element], (spec.k, spec.n))}
        ),
    )
}
