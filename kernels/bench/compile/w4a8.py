"""Compiling the Hopper kernel for MXFP4 weights and e4m3 activations ahead of time for sm_90, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from bench.compile.w4a16 import _descriptor, _integers
from bench.compile.w8a8 import OAI, _compile
from moeq_kernels.epilogue import PLAIN, SILU, Epilogue
from moeq_kernels.hopper.w4a8.layer import TABLE, W4a8Wide


@dataclass(frozen=True)
class W4a8Case:
    """One compilation: a unique name, sizes, what follows the product, whether biases are added, triton type of out."""

    name: str
    kernel: W4a8Wide
    epilogue: Epilogue = SILU
    bias: bool = False
    out: str = "bf16"


def cases() -> list[W4a8Case]:
    """Both sizes as gate-up (gpt-oss's too) and down product."""
    result = []
    for _, kernel in TABLE:
        name = f"w4a8-{'queue' if kernel.queue else 'wide'}{kernel.tokens}"
        base = W4a8Case(f"{name}-gate-up", kernel)
        result += [base, replace(base, name=f"{name}-oai", epilogue=OAI, bias=True)]
        result.append(replace(base, name=f"{name}-down", epilogue=PLAIN, bias=True, out="fp32"))
    return result


def compile_case(case: W4a8Case, **options: Any) -> Any:
    """Compiles for sm_90a; the result has `.asm` (`ttgir`, `ptx`, `cubin`, `sass`) and `.metadata`."""
    words = import_module("moeq_kernels.hopper.w4a16.device.layouts")
    common = import_module("moeq_kernels.hopper.w8a8.device.common")
    kernel = case.kernel
    types = {
        "w_desc": _descriptor("i32", [8, 2, 128], words.word_buffer()),
        "s_desc": _descriptor("u8", [4, 128], words.scale_buffer(8)),
        "x_desc": _descriptor("fp8e4nv", [kernel.box, 128], common.operand()),
        **dict.fromkeys(("x_scale", "factor"), "*fp32"),
        **dict.fromkeys(("tiles", "num_tiles"), "*i32"),
        "out": f"*{case.out}",
        **_integers("steps blocks slabs groups pair_tiles columns stride packed"),
    }
    constants = {
        "TOKENS": kernel.tokens,
        "STAGES": kernel.stages,
        "REGISTERS": kernel.registers,
        "EPILOGUE": case.epilogue,
        "DEPENDENT": True,
    }
    module, function = "wide", "w4a8_product_wide"
    if kernel.queue:
        module, function = "wide_queue", "w4a8_product_wide_queue"
        types["queue"] = "*i32"
    else:
        constants["BOX"] = kernel.box
    if case.bias:
        types["bias"] = "*bf16"
    else:
        constants["bias"] = None
    found = getattr(import_module(f"moeq_kernels.hopper.w4a8.device.{module}"), function)
    return _compile(found, types, constants, options)
