"""Compile the Hopper kernels for int8 x int8 and e4m3 x e4m3 ahead of time for sm_90, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from itertools import product
from typing import Any

from support.compile.w4a16 import _ast_source, _descriptor, _integers

from moeq_kernels.epilogue import PLAIN, SILU, Epilogue
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Direct, Int8Narrow, Int8Wide, kernels

OAI = Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0)


@dataclass(frozen=True)
class Int8Case:
    """One compilation of a product of bytes.

    Attributes:
        name: unique.
        kernel: sizes.
        split: several programs share k.
        direct: every row is a tile.
        out: triton name of the type of results, of sums where split.
        bias: whether biases are added.
        epilogue: what follows the product.
        codes: triton name of their type.
        grouped: scales are of groups.
    """

    name: str
    kernel: Int8Narrow | Int8Wide | Int8Direct
    split: bool = False
    direct: bool = False
    out: str = "bf16"
    bias: bool = False
    epilogue: Epilogue = SILU
    codes: str = "i8"
    grouped: bool = False


def cases() -> list[Int8Case]:
    """Every kernel, as gate-up (whole and split) and down product, with biases and gpt-oss's."""
    direct = Int8Case("int8-direct-gate-up", Int8Direct())
    result = [direct, replace(direct, name="int8-direct-down", epilogue=PLAIN)]
    result.append(replace(direct, name="int8-direct-down-bias", epilogue=PLAIN, bias=True, out="fp16"))
    for kernel in kernels(int8=True):
        narrow = isinstance(kernel, Int8Narrow)
        name = f"int8-{'narrow' if narrow else 'wide'}{kernel.tokens}x{kernel.stages}"
        base = Int8Case(f"{name}-gate-up", kernel)
        down = replace(base, name=f"{name}-down", epilogue=PLAIN, out="fp32")
        result += [base, down, replace(base, name=f"{name}-oai", bias=True, epilogue=OAI)]
        result.append(replace(down, name=f"{name}-down-bias", bias=True, out="bf16"))
        if narrow:
            result.append(replace(base, name=f"{name}-gate-up-split", split=True, out="i32"))
            result.append(replace(base, name=f"{name}-gate-up-direct", direct=True))
    for kernel in kernels(int8=False):
        kind = "narrow" if isinstance(kernel, Int8Narrow) else "wide"
        result += _e4m3_cases(kernel, f"e4m3-{kind}{kernel.tokens}x{kernel.stages}")
    return result


def _e4m3_cases(kernel: Int8Narrow | Int8Wide, name: str) -> list[Int8Case]:
    """Scales of blocks and of channels in either product; with blocks the wide gate-up product makes codes."""
    base = Int8Case(f"{name}-block-gate-up", kernel, codes="fp8e4nv", grouped=True)
    down = replace(base, name=f"{name}-block-down", epilogue=PLAIN, out="fp32")
    channel = replace(base, name=f"{name}-channel-oai", grouped=False, bias=True, epilogue=OAI)
    if isinstance(kernel, Int8Wide):
        base = replace(base, out="fp8e4nv")
    result = [base, down, channel, replace(down, name=f"{name}-channel-down", grouped=False, out="bf16")]
    if isinstance(kernel, Int8Narrow):
        result.append(replace(base, name=f"{name}-block-gate-up-split", split=True, out="fp32"))
        result.append(replace(channel, name=f"{name}-channel-gate-up-direct", direct=True))
    return result


def compile_case(case: Int8Case, **options: Any) -> Any:
    """Compile for sm_90a; the result has `.asm` (`ttgir`, `ptx`, `cubin`, `sass`) and `.metadata`."""
    kernel = case.kernel
    if isinstance(kernel, Int8Direct):
        return _compile(*_direct(case, kernel), options)
    function, types, constants = _narrow(case, kernel) if isinstance(kernel, Int8Narrow) else _wide(case)
    types |= {"x_scale": "*fp32", "w_scale": "*fp32", "tiles": "*i32", "num_tiles": "*i32"}
    types["out"] = f"*{case.out}"
    constants |= {
        "STAGES": kernel.stages,
        "REGISTERS": kernel.registers,
        "EPILOGUE": case.epilogue,
        "BIAS": case.bias,
        "DEPENDENT": True,
    }
    if case.grouped:
        types |= _integers("scale_stride")
    else:
        constants["scale_stride"] = None
    if case.direct:
        del types["num_tiles"]
        constants["num_tiles"] = None  # no map of experts
    if case.bias:
        types["bias"] = "*bf16"
    else:
        constants["bias"] = None
    capped = {"maxnreg": kernel.cap} if isinstance(kernel, Int8Narrow) and kernel.cap else {}
    return _compile(function, types, constants, capped | options)


def _compile(function: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, Any]) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    names = function.arg_names
    aligned = {"columns", "stride", "w_rows", "hidden", "stride_x", "up_row"}
    aligned |= {name for name, kind in types.items() if kind.startswith("*")}
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types and name in aligned}
    signature = {name: types.get(name, "constexpr") for name in names}
    ast = _ast_source()(function, signature, constexprs=constants, attrs=attributes)
    return triton.compile(ast, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})


def _descriptors(weight_rows: int, token_rows: int, codes: str = "i8") -> dict[str, str]:
    common = import_module("moeq_kernels.hopper.w8a8.device.common")
    weights = _descriptor(codes, [1, weight_rows, 128], common.weight_box())
    tokens = _descriptor(codes, [token_rows, 128], common.operand())
    return {"first_desc": weights, "second_desc": weights, "x_desc": tokens}


def _narrow(case: Int8Case, kernel: Int8Narrow) -> tuple[Any, dict[str, str], dict[str, Any]]:
    function = import_module("moeq_kernels.hopper.w8a8.device.narrow").w8a8_product_narrow
    types = _descriptors(64, kernel.box, case.codes)
    types |= _integers("steps blocks splits rows columns stride w_rows up_row row_step experts known")
    constants = {"TOKENS": kernel.tokens, "BOX": kernel.box, "SPLIT": case.split, "DIRECT": case.direct}
    return function, types, {**constants, "WARPGROUPS": kernel.warpgroups}


def _direct(case: Int8Case, kernel: Int8Direct) -> tuple[Any, dict[str, str], dict[str, Any]]:
    device = import_module("moeq_kernels.hopper.w8a8.device.direct")
    types = _descriptors(64, 8)
    del types["x_desc"]
    types |= dict.fromkeys(("ids", "sums", "arrived"), "*i32") | {"scales": "*fp32"}
    types |= _integers("count columns hidden pairs experts known")
    constants = {"static_scale": None, "expert_map": None, "MAPPED": False, "SHARE": 7, "STEPS": 8}
    constants |= {"STAGES": kernel.stages, "COLUMNS": 4096, "DEPENDENT": True}
    if case.epilogue != PLAIN:
        return device.few_gate_up_int8, types | {"x": "*bf16"} | _integers("to_clear stride_x top_k"), constants
    types |= dict.fromkeys(("topk_weights", "parts", "up_scale", "w_scale"), "*fp32") | {"y": f"*{case.out}"}
    types |= _integers("stride_w up_row row_step w_rows")
    if case.bias:
        types |= dict.fromkeys(("up_bias", "bias"), "*bf16")
    else:
        constants |= dict.fromkeys(("up_bias", "bias"))
    constants |= {"TOP_K": 8, "UP_SHARES": 3, "SHARES": 2, "EPILOGUE": OAI if case.bias else SILU}
    constants["ROWS"] = 256 if case.bias else 128
    return device.few_down_int8, types, constants


def _wide(case: Int8Case) -> tuple[Any, dict[str, str], dict[str, Any]]:
    types = _descriptors(128, 64, case.codes)
    types |= _integers("steps blocks columns stride w_rows up_row row_step")
    types |= dict.fromkeys(("queue", "done"), "*i32") | _integers("needed")
    constants: dict[str, Any] = {"FOLLOWS": case.grouped and case.epilogue == PLAIN}
    if case.out == "fp8e4nv":
        types["out_scale"] = "*fp32"
        constants["ROUNDED"] = "bfloat16"
    else:
        constants |= {"out_scale": None, "ROUNDED": None}
    function = import_module("moeq_kernels.hopper.w8a8.device.wide").w8a8_product_wide
    return function, types, constants


def compile_rows() -> dict[str, Any]:
    """Build the kernels of `device.rows` at sizes of real models, for int8 and for e4m3 in groups."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    device = import_module("moeq_kernels.hopper.w8a8.device.rows")
    language = import_module("triton.language")
    silu = {"ACTIVATION": "silu", "ALPHA": 0.0, "BETA": 0.0, "LIMIT": 0.0}
    few = {
        "MAPPED": False,
        "PAIRS": 1024,
        "BINS": 256,
        "TOP_K": 8,
        "PER": 8,
        "CHOICES": 8,
        "COLUMNS": 8192,
        "DIRECT": False,
    }
    shared = {**silu, "SPLITS": 4, "DTYPE": language.bfloat16, "COLUMNS": 4096, "DIRECT": False}
    wanted: dict[str, tuple[int, dict[str, Any]]] = {
        "route_quantised": (16, few),
        "quantise_tokens": (8, {"TOP_K": 2, "CHOICES": 2, "COLUMNS": 4096}),
        "requantise": (16, {"ROWS": 1, "COLUMNS": 16384, "DIRECT": False}),
        "activate_quantised": (8, {**shared, "bias": None}),
    }
    pointers = {"x": "*bf16", "middle": "*bf16", "scales": "*fp32", "x_scale": "*fp32"}
    pointers |= dict.fromkeys(("ids", "inverse", "expert_of_row", "tiles", "num_tiles"), "*i32") | {"w_scale": "*fp32"}
    absent = dict.fromkeys(("static_scale", "expert_map"))
    built = {}
    for (name, (warps, constants)), e4m3 in product(wanted.items(), (False, True)):
        function = getattr(device, name)
        own = pointers | {"codes": "*u8" if e4m3 else "*i8", "sums": "*fp32" if e4m3 else "*i32"}
        constants = constants | {one: None for one in absent if one in function.arg_names} | {"DEPENDENT": True}
        constants |= {"MARLIN": e4m3, "INTERPRET": False}
        constants |= {} if e4m3 else {"scale_stride": None}
        types = {one: own.get(one, "i32") for one in function.arg_names if one not in constants}
        aligned = (*own, "hidden", "size", "stride_x", "stride_q", "up_row")
        attributes = {(i,): [["tt.divisibility", 16]] for i, one in enumerate(function.arg_names) if one in aligned}
        signature = {one: types.get(one, "constexpr") for one in function.arg_names}
        source = ASTSource(function, signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
        built[f"{name} e4m3" if e4m3 else name] = compiled
    return built
