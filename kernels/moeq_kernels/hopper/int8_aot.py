"""Compiling the int8 Hopper kernels ahead of time for sm_90, without a GPU. Needs triton only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from moeq_kernels.hopper.aot import _ast_source, _descriptor, _integers
from moeq_kernels.hopper.int8_plan import TABLE, Int8Narrow, Int8Wide
from moeq_kernels.launch import Epilogue

SILU = Epilogue("halves", "silu")
OAI = Epilogue("interleaved", "swiglu_oai", 1.702, 1.0, 7.0)


@dataclass(frozen=True)
class Int8Case:
    """One compilation of an int8 product.

    Attributes:
        name: unique.
        kernel: sizes.
        gated: gate-up product with an activation, or down product.
        split: several programs share k.
        bias: whether biases are added.
        epilogue: activation.
    """

    name: str
    kernel: Int8Narrow | Int8Wide
    gated: bool = True
    split: bool = False
    bias: bool = False
    epilogue: Epilogue = SILU


def cases() -> list[Int8Case]:
    """Every kernel of the plan's table, as gate-up (whole and split) and down product, with biases and gpt-oss's."""
    result = []
    for kernel in dict.fromkeys(kernel for _, kernel in TABLE):
        narrow = isinstance(kernel, Int8Narrow)
        name = f"int8-{'narrow' if narrow else 'wide'}{kernel.tokens}"
        base = Int8Case(f"{name}-gate-up", kernel)
        down = replace(base, name=f"{name}-down", gated=False)
        result += [base, down, replace(base, name=f"{name}-oai", bias=True, epilogue=OAI)]
        result.append(replace(down, name=f"{name}-down-bias", bias=True))
        if narrow:
            result.append(replace(base, name=f"{name}-gate-up-split", split=True))
    return result


def compile_case(case: Int8Case, **options: Any) -> Any:
    """Compiles for sm_90a; the result has `.asm` (`ttgir`, `ptx`, `cubin`, `sass`) and `.metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = case.kernel
    function, types, constants = _narrow(case, kernel) if isinstance(kernel, Int8Narrow) else _wide(case, kernel)
    types |= {"x_scale": "*fp32", "w_scale": "*fp32", "tiles": "*i32", "num_tiles": "*i32"}
    constants |= {
        "STAGES": kernel.stages,
        "GATED": case.gated,
        "WARPGROUPS": kernel.warpgroups,
        "REGISTERS": kernel.registers,
        "ACTIVATION": case.epilogue.activation,
        "ALPHA": case.epilogue.alpha,
        "BETA": case.epilogue.beta,
        "LIMIT": case.epilogue.limit,
        "BIAS": case.bias,
        "DEPENDENT": True,
    }
    if case.bias:
        types["bias"] = "*bf16"
    else:
        constants["bias"] = None
    names = function.arg_names
    aligned = ("x_scale", "w_scale", "bias", "out", "tiles", "num_tiles", "columns", "stride", "w_rows")
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types and name in aligned}
    signature = {name: types.get(name, "constexpr") for name in names}
    ast = _ast_source()(function, signature, constexprs=constants, attrs=attributes)
    cap = {"maxnreg": kernel.cap} if kernel.cap else {}
    return triton.compile(ast, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **cap, **options})


def _descriptors(weight_rows: int, token_rows: int) -> dict[str, str]:
    common = import_module("moeq_kernels.hopper.device.int8_common")

    def plain(function: Any) -> Any:
        return getattr(function, "fn", function)()

    weights = _descriptor("i8", [1, weight_rows, 128], plain(common.weight_box))
    tokens = _descriptor("i8", [token_rows, 128], plain(common.operand))
    return {"first_desc": weights, "second_desc": weights, "x_desc": tokens}


def _narrow(case: Int8Case, kernel: Int8Narrow) -> tuple[Any, dict[str, str], dict[str, Any]]:
    function = import_module("moeq_kernels.hopper.device.int8_narrow").int8_product_narrow
    types = _descriptors(64, kernel.box)
    types |= _integers("steps blocks splits rows columns stride w_rows up_row row_step")
    types["out"] = "*i32" if case.split else "*bf16" if case.gated else "*fp32"
    return function, types, {"TOKENS": kernel.tokens, "BOX": kernel.box, "SPLIT": case.split}


def _wide(case: Int8Case, kernel: Int8Wide) -> tuple[Any, dict[str, str], dict[str, Any]]:
    function = import_module("moeq_kernels.hopper.device.int8_wide").int8_product_wide
    types = _descriptors(128, 64)
    types |= _integers("steps blocks columns stride w_rows up_row row_step")
    types["out"] = "*bf16"
    return function, types, {}
