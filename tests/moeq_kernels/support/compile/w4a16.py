"""Compile the Hopper kernels ahead of time for sm_90, without a GPU. Needs triton only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from moeq_kernels.epilogue import PLAIN, SILU, Epilogue
from moeq_kernels.hopper.w4a16.w4a16_plan import (
    QUEUE16_PAIR,
    Direct,
    Kernel,
    Narrow,
    Queue,
    Wide,
    kernel_for,
    kernels,
)


@dataclass(frozen=True)
class Case:
    """One compilation of an expert product.

    Attributes:
        name: unique.
        kernel: sizes.
        kind: a key of `kinds.KINDS`.
        group: weights that share a scale; 0 for one scale for each output feature.
        zeros: whether zero points are read.
        x, scale: triton names of the activations' and the scales' types.
        epilogue: what follows the product.
        bias: whether there are biases (and whether they follow channel scales).
        splits: programs that share k in a narrow gate-up product.
        out: triton name of the results' type, where it is not that of the activations.
    """

    name: str
    kernel: Kernel
    kind: str = "uint4"
    group: int = 128
    zeros: bool = False
    x: str = "bf16"
    scale: str = "bf16"
    epilogue: Epilogue = SILU
    bias: bool = False
    splits: int = 1
    out: str | None = None


#: Formats beside int4 in groups of 128: name and changes.
_FORMATS: dict[str, dict[str, Any]] = {
    "g32": {"group": 32},
    "g64": {"group": 64, "epilogue": PLAIN},
    "zeros": {"zeros": True},
    "g32-zeros": {"group": 32, "zeros": True, "epilogue": PLAIN},
    "f16-scales": {"scale": "fp16"},
    "g32-f16-scales-zeros": {"group": 32, "zeros": True, "scale": "fp16"},
    "f16": {"x": "fp16", "scale": "fp16"},
    "f16-g32-zeros": {"x": "fp16", "scale": "fp16", "group": 32, "zeros": True, "epilogue": PLAIN},
    "channel": {"group": 0, "bias": True},
    "channel-zeros-f16": {"group": 0, "zeros": True, "x": "fp16", "scale": "fp16", "epilogue": PLAIN},
    "int8": {"kind": "uint8"},
    "int8-g32-zeros": {"kind": "uint8", "group": 32, "zeros": True, "epilogue": PLAIN},
    "int8-f16-scales": {"kind": "uint8", "scale": "fp16", "group": 64},
    "int8-f16": {"kind": "uint8", "x": "fp16", "scale": "fp16"},
    "int8-channel": {"kind": "uint8", "group": 0},
    "int2": {"kind": "uint2"},
    "int2-g32-f16": {"kind": "uint2", "group": 32, "x": "fp16", "scale": "fp16", "epilogue": PLAIN},
    "int2-channel": {"kind": "uint2", "group": 0, "bias": True},
    "int3": {"kind": "uint3", "group": 64},
    "int3-g32-f16": {"kind": "uint3", "group": 32, "x": "fp16", "scale": "fp16", "epilogue": PLAIN},
    "mxfp4": {"kind": "e2m1", "group": 32, "scale": "u8"},
    "mxfp4-oai": {
        "kind": "e2m1", "group": 32, "scale": "u8", "bias": True,
        "epilogue": Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0),
    },
    "mxfp4-permuted": {"kind": "e2m1-permuted", "group": 32, "scale": "u8"},
    "mxfp4-down": {"kind": "e2m1", "group": 32, "scale": "u8", "bias": True, "epilogue": PLAIN, "out": "i16"},
    "relu2": {"epilogue": Epilogue("relu2")},
    "situ": {"epilogue": Epilogue("situ", gated=True, alpha=4.0, limit=25.0)},
    "swiglu-step": {"epilogue": Epilogue("swiglu_step", gated=True, limit=7.0)},
}  # fmt: skip
#: Floats beside MXFP4.
_FLOATS: dict[str, dict[str, Any]] = {
    "nvfp4": {"kind": "nvfp4", "group": 16, "scale": "u8"},
    "nvfp4-down": {"kind": "nvfp4", "group": 16, "scale": "u8", "bias": True, "epilogue": PLAIN, "out": "i16"},
    "nvfp4-permuted": {"kind": "nvfp4-permuted", "group": 16, "scale": "u8"},
    "nvfp4-f16": {"kind": "nvfp4", "group": 16, "scale": "u8", "x": "fp16"},
    "fp8": {"kind": "fp8"},
    "fp8-down": {"kind": "fp8", "epilogue": PLAIN, "out": "i16"},
    "fp8-f16": {"kind": "fp8", "x": "fp16", "scale": "fp16"},
    "fp8-channel": {"kind": "fp8", "group": 0, "bias": True},
    "fp8-channel-f16": {"kind": "fp8", "group": 0, "x": "fp16", "scale": "fp16", "epilogue": PLAIN, "out": "fp32"},
    "mxfp8": {"kind": "mxfp8", "group": 32, "scale": "u8"},
    "mxfp8-down": {"kind": "mxfp8", "group": 32, "scale": "u8", "epilogue": PLAIN, "out": "i16"},
}  # fmt: skip


def cases() -> list[Case]:
    """Every kernel that plans may have, as gate-up (whole and split) and down product, and in all formats."""
    result = []
    for kernel in kernels("uint4"):
        base = Case(f"{_label(kernel)}-gate-up", kernel)
        if isinstance(kernel, Queue):  # both products
            result.append(replace(base, out="fp32"))
        else:
            result += [base, replace(base, name=f"{_label(kernel)}-down", epilogue=PLAIN)]
        if isinstance(kernel, Narrow):
            result.append(replace(base, name=f"{_label(kernel)}-gate-up-split", splits=4))
    for suffix, changes in (_FORMATS | _FLOATS).items():
        kind, group = changes.get("kind", "uint4"), changes.get("group", 128)
        for kernel in kernels(kind):
            case = Case(f"{_label(kernel)}-{suffix}", kernel_for(kernel, kind, group), **changes)
            gated = case.epilogue != PLAIN and case.epilogue.gated
            if (isinstance(kernel, Direct) and not gated and case.epilogue != PLAIN) or (
                isinstance(kernel, Wide) and kernel.gathers and case.epilogue == PLAIN
            ):
                continue  # direct kernels have a gate, and rows of a down product are in order
            result.append(case)
            if isinstance(kernel, Narrow) and suffix in ("nvfp4", "fp8-channel"):
                result.append(replace(case, name=f"{case.name}-split", splits=4))
    return result


def _label(kernel: Kernel) -> str:
    """Name a kernel and its sizes."""
    name = f"{type(kernel).__name__.lower()}{kernel.tokens}"
    if isinstance(kernel, Wide):
        return f"{name}g" if kernel.gathers else name
    if isinstance(kernel, Queue) and kernel.step == 64:
        return f"{name}-step64"
    return f"{name}-pair" if kernel == QUEUE16_PAIR else name


@dataclass(frozen=True)
class _Source:
    """What a kernel is compiled from: parameter types and constants by name."""

    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = field(default=())


def compile_case(case: Case, **options: Any) -> Any:
    """Compile for sm_90a; the result has `.asm` (`ttgir`, `ptx`, `cubin`, `sass`) and `.metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = {Narrow: _narrow, Direct: _direct, Queue: _queue, Wide: _wide}[type(case.kernel)](case, case.kernel)
    names = source.function.arg_names
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in source.aligned}
    signature = {name: source.types.get(name, "constexpr") for name in names}
    ast = _ast_source()(source.function, signature, constexprs=source.constants, attrs=attributes)
    registers = case.kernel.registers if isinstance(case.kernel, Narrow | Queue) else None
    cap = {"maxnreg": registers} if registers else {}
    return triton.compile(ast, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **cap, **options})


def compile_routing() -> dict[str, Any]:
    """Build the kernels that route, by name; Triton's interpreter takes them less strictly."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    routing, choosing = (import_module(f"moeq_kernels.device.{name}") for name in ("routing", "choosing"))
    wanted: dict[str, tuple[int, dict[str, Any]]] = {
        "route_few": (
            16,
            {
                "MAPPED": True,
                "PAIRS": 4096,
                "BINS": 256,
                "ROWS": 16,
                "COPY": True,
                "COLUMNS": 1024,
            },
        ),
        "count_pairs": (4, {"MAPPED": False, "BLOCK": 512, "BINS": 128, "expert_map": None}),
        "place_pairs": (8, {"MAPPED": True, "BLOCK": 512, "BINS": 128, "GROUP": 64}),
        "gather_rows": (4, {"ROWS": 8, "COLUMNS": 1024}),
        "sum_rows": (4, {"TOP_K": 8, "SPLITS": 2, "COLUMNS": 1024, "TOKENS": 2, "INTERPRET": False}),
        "choose_experts": (
            1,
            {
                "EXPERTS": 160,
                "GROUPS": 8,
                "KEPT": 3,
                "BEST_TWO": True,
                "ROWS": 8,
                "COLUMNS": 32,
                "TOP_K": 6,
                "SLOTS": 8,
                "SIGMOID": True,
                "RENORMALIZE": True,
                "FACTOR": 2.5,
                "TOKENS": 1,
            },
        ),
    }
    pointers = dict.fromkeys(("x", "sorted_x", "parts", "y"), "*bf16") | {"weights": "*fp32"}
    numbers = ("ids", "expert_map", "pair_of_row", "inverse", "tiles", "num_tiles", "cleared", "counts")
    pointers |= dict.fromkeys(numbers, "*i32") | {"logits": "*bf16", "bias": "*fp32", "padding": "*u8"}
    built = {}
    for name, (warps, constants) in wanted.items():
        function = getattr(choosing if name == "choose_experts" else routing, name)
        constants = {**constants, "DEPENDENT": True}
        types = {one: pointers.get(one, "i32") for one in function.arg_names if one not in constants}
        signature = {one: types.get(one, "constexpr") for one in function.arg_names}
        source = ASTSource(function, signature, constexprs=constants, attrs={})
        built[name] = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return built


def _ast_source() -> Any:
    """Triton 3.9 makes the class public."""
    gluon = import_module("triton.experimental.gluon")
    return getattr(gluon, "GluonASTSource", None) or import_module(f"{gluon.__name__}._runtime").GluonASTSource


def _descriptor(kind: str, shape: list[int], layout: Any) -> str:
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}],{layout!r}>"


def _common(case: Case, step: int, tiles: int, tokens: int) -> tuple[dict[str, str], dict[str, Any]]:
    """Types and constants that both kernels have; tiles and tokens of a box."""
    layouts = import_module("moeq_kernels.hopper.w4a16.device.layouts")
    bits = 8 if case.scale == "u8" else 16
    words = layouts.tile_bytes(case.kind) // 4
    types = {
        "w_desc": _descriptor("i32", [step // layouts.word_rows(case.kind), tiles, words], layouts.word_buffer()),
        "h_desc": _descriptor("i32", [step // 64, tiles, words], layouts.word_buffer()),
        "x_desc": _descriptor(case.x, [tokens, 64], layouts.token_buffer()),
        "s_desc": _descriptor(
            case.scale, [layouts.groups_of(step, case.group), 64 * tiles], layouts.scale_buffer(bits)
        ),
        "zero": "*i32",
        "out": f"*{case.out or case.x}",
        "tiles": "*i32",
    }
    constants: dict[str, Any] = {
        "STAGES": case.kernel.stages,
        "GROUP": case.group,
        "ZEROS": case.zeros,
        "KIND": case.kind,
        "EPILOGUE": case.epilogue,
        "DEPENDENT": True,
    }
    whole = case.kind.startswith("nvfp4")
    for name, there, kind in (
        ("scale", not case.group, case.scale), ("bias", case.bias, case.x), ("global_scale", whole, "fp32")
    ):  # fmt: skip
        if there:
            types[name] = f"*{kind}"
        else:
            constants[name] = None
    if case.kind != "uint3":
        del types["h_desc"]
        constants["h_desc"] = None
    return types, constants


#: Parameters that are None where a format lacks them.
_OPTIONAL = ("h_desc", "scale", "bias", "global_scale")


def _integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


def _narrow(case: Case, kernel: Narrow) -> _Source:
    types, constants = _common(case, kernel.step, 2, kernel.tokens)
    types |= {"partial": "*fp32", "arrived": "*i32"}
    if case.epilogue == PLAIN:
        types["out"] = "*fp32"
    types |= _integers("slabs groups count pair_tiles columns stride rows zero_words packed")
    constants |= {"TOKENS": kernel.tokens, "STEP": kernel.step, "SPLITS": case.splits, "AFTER": kernel.after}
    function = import_module("moeq_kernels.hopper.w4a16.device.narrow").expert_product_narrow
    return _Source(function, types, constants, ("zero", "out", "partial", "tiles", "columns", "stride", "rows"))


def _queue(case: Case, kernel: Queue) -> _Source:
    module = import_module("moeq_kernels.hopper.w4a16.device.queue")
    found, constants = _common(case, kernel.step, 2, module.box_of(kernel.tokens))
    types = {"x_desc": found["x_desc"], "m_desc": found["x_desc"], "middle": f"*{case.x}", "out": found["out"]}
    types |= {"partial": "*fp32", "counters": "*i32", "num_tiles": "*i32", "tiles": "*i32"}
    types |= _integers("most wanted_up least_up wanted_down least_down bundle up_pair_tiles")
    for name in ("up", "down"):
        types |= {f"{name}_{key}": found[key] for key in ("w_desc", "s_desc", "zero", *_OPTIONAL) if key in found}
        types |= _integers(" ".join(f"{name}_{key}" for key in ("slabs", "groups", "count", "blocks", "columns")))
        types |= _integers(" ".join(f"{name}_{key}" for key in ("stride", "zero_words", "packed")))
        constants |= {f"{name}_{key}": None for key in _OPTIONAL if key not in found}
    constants = {key: value for key, value in constants.items() if key not in _OPTIONAL}
    constants |= {
        "TOKENS": kernel.tokens,
        "STEP": kernel.step,
        "AFTER": kernel.after,
        "ROWS": kernel.rows,
        "EARLY": True,
        "LEAST": kernel.least or kernel.tokens,
    }
    columns = ("up_columns", "up_stride", "down_columns", "down_stride")
    pointers = ("up_zero", "down_zero", "middle", "out", "partial", "tiles", *columns)
    return _Source(module.expert_layer, types, constants, pointers)


def _direct(case: Case, kernel: Direct) -> _Source:
    types, constants = _common(case, kernel.step, 2, 8)
    del types["out"], types["tiles"]
    types |= {"ids": "*i32", "expert_map": "*i32", "partial": "*fp32", "arrived": "*i32"}
    types |= _integers("slabs groups count columns zero_words pairs experts known")
    constants |= {"STEP": kernel.step, "AFTER": kernel.after, "MAPPED": False, "SHARE": 2, "STAGES": 2}
    direct = import_module("moeq_kernels.hopper.w4a16.device.direct")
    if case.epilogue != PLAIN:
        for name in ("scale", "bias"):
            (types if name in types else constants).pop(name)
        constants["PAIRED"] = not constants.pop("EPILOGUE").interleaved
        types |= _integers("to_clear top_k")
        return _Source(direct.few_gate_up, types, constants, ("zero", "partial", "columns"))
    del types["x_desc"]
    types |= {"topk_weights": "*fp32", "parts": "*fp32", "y": f"*{case.x}"}
    types |= _integers("hidden stride_w up_packed packed")
    for name in ("scale", "bias"):  # as of the gate-up product
        given = types if name in types else constants
        given[f"up_{name}"] = given[name]
    epilogue = Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0) if case.bias else SILU
    constants |= {"TOP_K": 8, "UP_SHARES": 4, "SHARES": 2, "EPILOGUE": epilogue}
    return _Source(direct.few_down, types, constants, ("zero", "partial", "parts", "y", "columns", "hidden"))


def _wide(case: Case, kernel: Wide) -> _Source:
    types, constants = _common(case, 64, kernel.warpgroups, 32)
    types |= dict.fromkeys(("queue", "done", "num_tiles", "pair_of_row"), "*i32") | {"x": f"*{case.x}"}
    types |= _integers(
        "needed slabs groups steps blocks splits rows pair_tiles columns stride zero_words packed top_k stride_x"
    )
    constants["GATHER"] = case.epilogue != PLAIN and kernel.gathers
    constants |= {"TOKENS": kernel.tokens, "GROUPS_OF_WARPS": kernel.warpgroups, "REGISTERS": kernel.registers}
    constants |= {"EARLY": case.epilogue == PLAIN, "FOLLOWS": case.epilogue == PLAIN, "FINE": kernel.fine}
    function = import_module("moeq_kernels.hopper.w4a16.device.wide").expert_product_wide
    return _Source(function, types, constants, ("zero", "out", "tiles", "columns", "stride", "x", "stride_x"))
