"""Table of the formats that the kernels read. Importing this module needs neither torch nor triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from moeq_kernels.errors import KernelUnsupportedError

Shape = tuple[int, ...]
ShapeOf = Callable[[int, int], Shape]


@dataclass(frozen=True)
class Format:
    """Format of one element type in one layout, in the terms of the device code."""

    layout: str  #: layout id
    element: str  #: value of `PackedMatrix.element`
    codec: str  #: reader in `device.codecs`
    #: Element kind in `device.scales.weight_tile`: `uint2`, `uint3`, `uint4`, `uint8`, `e2m1`, `e4m3`, `int8` or
    #: `float`.
    kind: str
    weight_shape: ShapeOf  #: function from (n, k) to the shape of one packed expert in elements of `weight_dtype`
    weight_dtype: str  #: torch dtype name of the packed weights
    group_order: str | None  #: order of group scales, or None where the format has none
    single_order: str | None  #: order of scales per output feature, or None where the format has none
    scale_dtypes: tuple[str, ...]  #: torch dtype names of scales
    group_sizes: tuple[int, ...]  #: supported group sizes; -1 is one scale per output feature
    zero_points: bool = False  #: whether packed zero points are read
    #: Whether `permutation` and `group_index` are required; other integer formats may have them.
    act_order: bool = False
    bias_single: bool = False  #: whether biases lie in Marlin's 32-column order
    #: Granularity of n (per half for gate and up) and of k.
    n_multiple: int = 1
    k_multiple: int = 1
    dtypes: tuple[str, ...] = ("bfloat16", "float16")  #: torch dtype names of x
    int8_activations: bool = False  #: whether rows of x are quantised to int8
    fp8_activations: bool = False  #: whether rows of x may be quantised to e4m3 (`PackedMatrix.activation_dtype`)
    scale_kind: str = "float"  #: encoding of a stored scale, see `device.scales.scale_to_float`
    block_rows: int = 1  #: output features that share a scale
    global_exponent: int = 0  #: binary exponent by which the stored global scale exceeds the factor of the matrix
    global_scale: str = "optional"  #: `optional`, `required`, or `instead` if a global scale may replace the scales
    #: Function like `weight_shape` for `PackedMatrix.weight_high`, or None where there is none.
    high_shape: ShapeOf | None = None
    #: Torch dtype names of scales that the Hopper kernels for 16-bit activations read; empty where they do not read the
    #: format.
    hopper_scales: tuple[str, ...] = ()

    def scale_shape(self, order: str, n: int, groups: int) -> Shape:
        """Return the shape of one packed expert's scales; `order` is `group_order` or `single_order`."""
        columns = 32 * (-(-groups // 4) * 4)
        shapes = {
            "rows": (n, groups),
            "blocks": (-(-n // max(1, self.block_rows)), groups),
            "hopper-mx8": (-(-n // 256) * 8, columns),
            "hopper-mx4": (-(-n // 128) * 4, columns),
        }
        return shapes.get(order, (groups, n))

    def zero_shape(self, n: int, groups: int) -> Shape:
        """Return the shape of one packed expert's zero points."""
        if self.zero_dtype == "int32":
            return (groups, n * int(self.element.removeprefix("int")) // 32)
        return (n * int(self.element.removeprefix("int")) // 8, groups)

    @property
    def zero_dtype(self) -> str:
        """Torch dtype name of packed zero points."""
        return "int32" if self.codec.startswith("marlin") else "uint8"


_FLOATS = ("bfloat16", "float16", "float32")
_E4M3 = ("float8_e4m3fn", "uint8")
_E8M0 = ("uint8",)
_GROUPS = (16, 32, 64, 128, 256, -1)


def _marlin(layout: str, element: str, codec: str, words: int) -> Format:
    """Describe integers in Marlin's order: 16 codes of an output feature take `words` int32 words."""
    act_order = layout == "marlin-act-order/1"
    return Format(
        layout=layout,
        element=element,
        codec=codec,
        kind=f"u{element}",
        weight_shape=lambda n, k: (k // 16, n * words),
        weight_dtype="int32",
        group_order="marlin-group",
        single_order="marlin-single",
        scale_dtypes=_FLOATS,
        group_sizes=_GROUPS,
        zero_points=not act_order,
        act_order=act_order,
        bias_single=True,
        n_multiple=64,
        k_multiple=16,
        hopper_scales=() if act_order else ("bfloat16", "float16"),
    )


def _few_bits(element: str, codec: str, high_shape: ShapeOf | None = None) -> Format:
    """Describe symmetric 2- and 3-bit integers in the order of Marlin's words."""
    return replace(
        _marlin("moeq-wna16/1", element, codec, 2),
        weight_shape=lambda n, k: (k // 32, 2 * n),
        group_sizes=(32, 64, 128, -1),
        zero_points=False,
        k_multiple=64,
        high_shape=high_shape,
    )


def _mxfp4(layout: str, codec: str, weight_shape: ShapeOf, order: str, multiples: tuple[int, int]) -> Format:
    """Describe MXFP4 with scales in `order`; `multiples` are the granularity of n and of k."""
    marlin = order == "marlin-mx"
    return Format(
        layout=layout,
        element="e2m1",
        codec=codec,
        kind="e2m1",
        weight_shape=weight_shape,
        weight_dtype="int32" if marlin else "uint8",
        group_order=order,
        single_order="marlin-mx-single" if marlin else order,
        scale_dtypes=_E8M0,
        group_sizes=(32,),
        bias_single=marlin,
        n_multiple=multiples[0],
        k_multiple=multiples[1],
        dtypes=("bfloat16",),  # e8m0 scales span the range of bfloat16, not that of float16
        scale_kind="e8m0",
        hopper_scales=_E8M0 if marlin else (),
    )


def _plain(layout: str, element: str, codec: str, kind: str, per_byte: int) -> Format:
    """Describe integers in rows of K, `per_byte` codes in a byte; `int8` codes run with int8 activations."""
    return Format(
        layout=layout,
        element=element,
        codec=codec,
        kind=kind,
        weight_shape=lambda n, k: (n, k // per_byte),
        weight_dtype="int8" if kind == "int8" else "uint8",
        group_order=None if kind == "int8" else "rows",
        single_order="rows",
        scale_dtypes=_FLOATS,
        group_sizes=(-1,) if kind == "int8" else _GROUPS,
        zero_points=kind != "int8",
        n_multiple=per_byte,
        k_multiple=per_byte,
        int8_activations=kind == "int8",
    )


def _marlin_float(
    layout: str,
    element: str,
    group_sizes: tuple[int, ...],
    scale_kind: str,
    dtype: str,
    global_exponent: int = 0,
    codec: str = "",
) -> Format:
    """Describe NVFP4, FP8 or MXFP8 in Marlin's order, as vLLM 0.33 prepares it for parameters of `dtype`."""
    bytes_as_scales = scale_kind in ("s0e5m3", "e8m0")
    whole_groups = element == "e2m1" or scale_kind == "e8m0"
    words = 2 if element == "e2m1" else 4
    scale_dtypes = {"s0e5m3": _E4M3, "e8m0": _E8M0}.get(scale_kind, (dtype,))
    return Format(
        layout=layout,
        element=element,
        codec=codec or ("marlin4" if element == "e2m1" else "marlin8"),
        kind=element,
        weight_shape=lambda n, k: (k // 16, n * words),
        weight_dtype="int32",
        group_order="marlin-mx" if bytes_as_scales else "marlin-group",
        single_order="marlin-mx-single" if bytes_as_scales else "marlin-single",
        scale_dtypes=scale_dtypes,
        group_sizes=group_sizes,
        bias_single=True,
        n_multiple=64,
        k_multiple=max(16, *group_sizes) if whole_groups else 16,
        dtypes=(dtype,),
        fp8_activations=element == "e4m3" and not bytes_as_scales,
        scale_kind=scale_kind,
        global_exponent=global_exponent,
        global_scale="required" if global_exponent else "optional",
        hopper_scales=scale_dtypes,
    )


def _identity(layout: str, element: str, order: str, group_sizes: tuple[int, ...], scale_kind: str) -> Format:
    """Describe NVFP4, FP8 or MXFP8 as checkpoints store them, with stacked experts."""
    per_byte = 2 if element == "e2m1" else 1
    global_scale = "optional"
    if scale_kind == "e4m3":
        global_scale = "required"
    elif group_sizes == (-1,):
        global_scale = "instead"
    return Format(
        layout=layout,
        element=element,
        codec="nibbles" if element == "e2m1" else "rows",
        kind=element,
        weight_shape=lambda n, k: (n, k // per_byte),
        weight_dtype="uint8" if element == "e2m1" else "float8_e4m3fn",
        group_order=order if group_sizes != (-1,) else None,
        single_order=order,
        scale_dtypes={"e4m3": _E4M3, "e8m0": _E8M0}.get(scale_kind, _FLOATS),
        group_sizes=group_sizes,
        n_multiple=1,
        k_multiple=group_sizes[0] if scale_kind != "float" else 1,
        dtypes=("bfloat16",) if scale_kind == "e8m0" else ("bfloat16", "float16"),
        fp8_activations=scale_kind == "float",
        scale_kind=scale_kind,
        block_rows=128 if order == "blocks" else 1,
        global_scale=global_scale,
    )


def _unquantized(element: str, dtype: str) -> Format:
    return Format(
        layout="unquantized/1",
        element=element,
        codec="rows",
        kind="float",
        weight_shape=lambda n, k: (n, k),
        weight_dtype=dtype,
        group_order=None,
        single_order=None,
        scale_dtypes=(),
        group_sizes=(),
        dtypes=(dtype,),
    )


def _marlin_words(n: int, k: int) -> Shape:
    return (k // 16, 2 * n)


def _hopper_bytes(n: int, k: int) -> Shape:
    return (n // 4, 2 * k)


_TABLE = (
    _marlin("marlin-wna16/1", "int4", "marlin4", 2),
    _marlin("marlin-wna16/1", "int8", "marlin8", 4),
    _marlin("marlin-act-order/1", "int4", "marlin4", 2),
    _marlin("marlin-act-order/1", "int8", "marlin8", 4),
    _few_bits("int2", "marlin2"),
    _few_bits("int3", "marlin3", lambda n, k: (k // 64, 2 * n)),
    _plain("triton-wna16/1", "int4", "nibbles", "uint4", 2),
    _plain("triton-wna16/1", "int8", "rows", "uint8", 1),
    _plain("int8-w8a8/1", "int8", "rows", "int8", 1),
    _mxfp4("marlin-mxfp4/1", "marlin4", _marlin_words, "marlin-mx", (64, 32)),
    _mxfp4("marlin-mxfp4-interleaved/1", "marlin4", _marlin_words, "marlin-mx", (64, 32)),
    _mxfp4("moeq-mxfp4/1", "marlin4-permuted", _marlin_words, "marlin-mx", (64, 32)),
    _mxfp4("triton-kernels-hopper/1", "hopper4", _hopper_bytes, "hopper-mx8", (16, 64)),
    _mxfp4("triton-kernels-hopper-w4/1", "hopper4", _hopper_bytes, "hopper-mx4", (16, 64)),
    _mxfp4("mxfp4-identity/1", "nibbles", lambda n, k: (n, k // 2), "rows", (1, 32)),
    _marlin_float("marlin-nvfp4/1", "e2m1", (16,), "s0e5m3", "bfloat16", 119),
    _marlin_float("marlin-nvfp4-fp16/1", "e2m1", (16,), "s0e5m3", "float16", 7),
    _marlin_float("moeq-nvfp4/1", "e2m1", (16,), "s0e5m3", "bfloat16", 119, "marlin4-permuted"),
    _marlin_float("marlin-fp8/1", "e4m3", (128, -1), "float-120", "bfloat16"),
    _marlin_float("marlin-fp8-fp16/1", "e4m3", (128, -1), "float-8", "float16"),
    _marlin_float("marlin-mxfp8/1", "e4m3", (32,), "e8m0", "bfloat16"),
    _identity("nvfp4-identity/1", "e2m1", "rows", (16,), "e4m3"),
    _identity("fp8-identity/1", "e4m3", "rows", (-1,), "float"),
    _identity("fp8-block-identity/1", "e4m3", "blocks", (128,), "float"),
    _identity("mxfp8-identity/1", "e4m3", "rows", (32,), "e8m0"),
    _unquantized("bf16", "bfloat16"),
    _unquantized("f16", "float16"),
)

#: Formats that `fused_moe` reads, by (layout id, element).
FORMATS: dict[tuple[str, str], Format] = {(entry.layout, entry.element): entry for entry in _TABLE}


def find_format(layout: str, element: str) -> Format:
    """Return the format of a packed matrix. Raises KernelUnsupportedError, which names the known formats."""
    found = FORMATS.get((layout, element))
    if found is None:
        known = ", ".join(f"{one} {kind}" for one, kind in FORMATS)
        raise KernelUnsupportedError(
            f"no kernel reads {element} weights in layout '{layout}'", f"kernels read: {known}"
        )
    return found
