"""Compile the Hopper kernels for 4-bit weights and e4m3 activations ahead of time for sm_90, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from support.compile.w4a16 import _descriptor, _integers
from support.compile.w8a8 import OAI, _compile

from moeq_kernels.epilogue import PLAIN, SILU, Epilogue
from moeq_kernels.hopper.w4a8.w4a8_launches import BOX, KERNELS, W4a8Wide


@dataclass(frozen=True)
class W4a8Case:
    """One compilation.

    Attributes:
        name: unique.
        kernel: sizes.
        element: element of the weights, `e2m1-permuted` in moeq's order of bits.
        group: int4 codes that share a scale, 0 for one scale for each output feature.
        epilogue, bias, out: what follows the product, whether biases are added, triton type of out.
    """

    name: str
    kernel: W4a8Wide
    element: str = "e2m1"
    group: int = 32
    epilogue: Epilogue = SILU
    bias: bool = False
    out: str = "bf16"


def cases() -> list[W4a8Case]:
    """Both sizes as gate-up (gpt-oss's too) and down product, moeq's order of bits, int4 with every group."""
    result = []
    for kernel in KERNELS:
        base = W4a8Case(f"w4a8-{kernel.tokens}-gate-up", kernel)
        result += [base, replace(base, name=f"w4a8-{kernel.tokens}-oai", epilogue=OAI, bias=True)]
        result.append(replace(base, name=f"w4a8-{kernel.tokens}-down", epilogue=PLAIN, bias=True, out="fp32"))
        result.append(replace(base, name=f"w4a8-{kernel.tokens}-permuted", element="e2m1-permuted"))
        for group in (128, 64, 32, 0):
            base = W4a8Case(f"w4a8-int4-{kernel.tokens}-g{group}", kernel, "int4", group)
            result += [base, replace(base, name=f"{base.name}-down", epilogue=PLAIN, bias=True)]
    return result


def compile_case(case: W4a8Case, **options: Any) -> Any:
    """Compile for sm_90a; the result has `.asm` (`ttgir`, `ptx`, `cubin`, `sass`) and `.metadata`."""
    words = import_module("moeq_kernels.hopper.w4a16.device.layouts")
    common = import_module("moeq_kernels.hopper.w8a8.device.common")
    kernel, mxfp4 = case.kernel, case.element != "int4"
    per = words.groups_of(128, case.group)
    types = {
        "w_desc": _descriptor("i32", [8, 2, 128], words.word_buffer()),
        "s_desc": _descriptor("u8" if mxfp4 else "bf16", [per, 128], words.scale_buffer(8 if mxfp4 else 16)),
        "x_desc": _descriptor("fp8e4nv", [BOX, 128], common.operand()),
        "x_scale": "*fp32",
        **dict.fromkeys(("queue", "tiles", "num_tiles"), "*i32"),
        "out": f"*{case.out}",
        **_integers("steps blocks slabs groups pair_tiles columns stride packed"),
    }
    constants = {
        "TOKENS": kernel.tokens,
        "STAGES": kernel.stages,
        "REGISTERS": kernel.registers,
        "EPILOGUE": case.epilogue,
        "DEPENDENT": True,
        "KIND": "uint4" if case.element == "int4" else case.element,
        "GROUP": case.group,
    }
    if case.group and not mxfp4:
        constants["factor"] = None
    else:
        types["factor"] = "*fp32" if mxfp4 else "*bf16"
    if case.bias:
        types["bias"] = "*bf16"
    else:
        constants["bias"] = None
    wide = import_module("moeq_kernels.hopper.w4a8.device.wide")
    return _compile(wide.w4a8_product_wide, types, constants, options)
