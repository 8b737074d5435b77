"""Compiling the Hopper kernels ahead of time for sm_90, without a GPU. Needs triton only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from moeq_kernels.hopper.plan import TABLE, Narrow, Wide


@dataclass(frozen=True)
class Case:
    """One compilation of an expert product.

    Attributes:
        name: unique.
        kernel: sizes.
        group: weights that share a scale.
        zeros: whether zero points are read.
        gated: gate-up product with SwiGLU, or down product.
        splits: programs that share k in a narrow gate-up product.
    """

    name: str
    kernel: Narrow | Wide
    group: int = 128
    zeros: bool = False
    gated: bool = True
    splits: int = 1


def cases() -> list[Case]:
    """Every kernel of the plan's table, as gate-up (whole and split) and down product, and its group sizes."""
    result = []
    for kernel in dict.fromkeys(kernel for _, kernel in TABLE):
        kind = "narrow" if isinstance(kernel, Narrow) else "wide"
        name = f"{kind}{kernel.tokens}"
        base = Case(f"{name}-gate-up", kernel)
        result += [base, Case(f"{name}-down", kernel, gated=False)]
        if isinstance(kernel, Narrow):
            result.append(replace(base, name=f"{name}-gate-up-split", splits=4))
        folded = replace(kernel, after=False, registers=None) if isinstance(kernel, Narrow) else kernel
        result.append(Case(f"{name}-g32", folded, group=32))
        result.append(Case(f"{name}-g64", kernel, group=64, gated=False))
        result.append(Case(f"{name}-zeros", kernel, zeros=True))
        result.append(Case(f"{name}-g32-zeros", folded, group=32, zeros=True, gated=False))
    return result


@dataclass(frozen=True)
class _Source:
    """What a kernel is compiled from: parameter types and constants by name."""

    function: Any
    types: dict[str, str]
    constants: dict[str, Any]
    aligned: tuple[str, ...] = field(default=())


def compile_case(case: Case, **options: Any) -> Any:
    """Compiles for sm_90a; the result has `.asm` (`ttgir`, `ptx`, `cubin`, `sass`) and `.metadata`."""
    import triton
    from triton.backends.compiler import GPUTarget

    source = _narrow(case, case.kernel) if isinstance(case.kernel, Narrow) else _wide(case, case.kernel)
    names = source.function.arg_names
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in source.aligned}
    signature = {name: source.types.get(name, "constexpr") for name in names}
    ast = _ast_source()(source.function, signature, constexprs=source.constants, attrs=attributes)
    registers = getattr(case.kernel, "registers", None) if isinstance(case.kernel, Narrow) else None
    cap = {"maxnreg": registers} if registers else {}
    return triton.compile(ast, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **cap, **options})


def _ast_source() -> Any:
    """Triton 3.9 makes the class public."""
    gluon = import_module("triton.experimental.gluon")
    return getattr(gluon, "GluonASTSource", None) or import_module(f"{gluon.__name__}._runtime").GluonASTSource


def _descriptor(kind: str, shape: list[int], layout: Any) -> str:
    return f"tensordesc<{kind}[{', '.join(map(str, shape))}],{layout!r}>"


def _descriptors(words: tuple[int, int], tokens: int) -> dict[str, str]:
    layouts = import_module("moeq_kernels.hopper.device.layouts")
    slabs, tiles = words

    def plain(function: Any) -> Any:
        return getattr(function, "fn", function)()

    return {
        "w_desc": _descriptor("i32", [slabs, tiles, 128], plain(layouts.word_buffer)),
        "x_desc": _descriptor("bf16", [tokens, 64], plain(layouts.token_buffer)),
        "s_desc": _descriptor("bf16", [1, 64 * tiles], plain(layouts.scale_buffer)),
    }


def _integers(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "i32")


def _narrow(case: Case, kernel: Narrow) -> _Source:
    types = _descriptors((8, 2), kernel.tokens) | {
        "zero": "*i32",
        "out": "*bf16" if case.gated else "*fp32",
        "partial": "*fp32",
        "arrived": "*i32",
        "tiles": "*i32",
    }
    types |= _integers("slabs groups steps pair_tiles columns stride rows zero_words")
    constants = {
        "TOKENS": kernel.tokens,
        "STAGES": kernel.stages,
        "GROUP": case.group,
        "ZEROS": case.zeros,
        "GATED": case.gated,
        "SPLITS": case.splits,
        "AFTER": kernel.after,
        "DEPENDENT": True,
    }
    function = import_module("moeq_kernels.hopper.device.narrow").expert_product_narrow
    return _Source(function, types, constants, ("zero", "out", "partial", "tiles", "columns", "stride", "rows"))


def _wide(case: Case, kernel: Wide) -> _Source:
    types = _descriptors((4, kernel.warpgroups), 32)
    types |= {"zero": "*i32", "out": "*bf16", "tiles": "*i32", "num_tiles": "*i32"}
    types |= _integers("slabs groups steps blocks splits rows pair_tiles columns stride zero_words")
    constants = {
        "TOKENS": kernel.tokens,
        "STAGES": kernel.stages,
        "GROUP": case.group,
        "ZEROS": case.zeros,
        "GATED": case.gated,
        "GROUPS_OF_WARPS": kernel.warpgroups,
        "REGISTERS": kernel.registers,
        "DEPENDENT": True,
    }
    function = import_module("moeq_kernels.hopper.device.wide").expert_product_wide
    return _Source(function, types, constants, ("zero", "out", "tiles", "columns", "stride"))
