"""Digests of what Triton's compiler is given for device code, kept in `tests/data/kernels/code.json`.

Kernels are checked and measured on GPUs, which CI has not; Triton's interpreter ignores layouts, caches, waits and the
sizes of masks. Where a digest changes, so does what runs on a GPU: check it there (`support.random_check`), then
`python -m support.golden_code` writes the file anew. Digests are of the intermediate representation that Triton makes
of source text, before it optimises, without line numbers; so builds take milliseconds, and need no GPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parents[2] / "data" / "kernels" / "code.json"

#: Builds of `support.compile.portable` beside its trimmed matrix: what few formats have, every epilogue and activation.
PORTABLE = (
    "marlin-fp8-fp16/1 e4m3 rows 8 gelu bias", "marlin-wna16/1 int4 rows 8 channel zero points",
    "marlin-wna16/1 int4 rows 8 float16", "marlin-wna16/1 int4 rows 8 situ", "marlin-wna16/1 int4 rows 8 swiglu_step",
    "marlin-wna16/1 int4 rows 256 down", "marlin-wna16/1 int4 rows 256 halves",
    "marlin-wna16/1 int4 rows 256 interleaved", "marlin-wna16/1 int8 rows 8 g32 zero points",
    "triton-wna16/1 int4 rows 8 g32 zero points", "triton-wna16/1 int8 rows 8 g32 zero points",
)  # fmt: skip

#: Builds of `support.compile.w4a16` in which every source line is compiled that any of its builds compiles.
WORDS = (
    "direct1-fp8-channel-f16", "direct1-int3", "direct1-int3-g32-f16", "direct1-int8-f16-scales", "direct1-mxfp4-down",
    "direct1-mxfp4-oai", "direct1-mxfp8", "direct1-nvfp4-f16", "narrow8-down", "narrow8-fp8-channel-f16",
    "narrow8-g32-f16-scales-zeros", "narrow8-gate-up-split", "narrow8-int2-g32-f16", "narrow8-int3-g32-f16",
    "narrow8-int8-g32-zeros", "narrow8-mxfp4-permuted", "narrow8-relu2", "narrow8-situ", "queue8-channel-zeros-f16",
    "queue8-gate-up", "queue8-int3", "queue16-pair-mxfp4-oai", "queue16-swiglu-step", "wide32-down",
    "wide32-f16-g32-zeros", "wide64-gate-up", "wide64g-int3", "wide64-nvfp4-permuted", "wide96g-fp8-f16",
    "wide96-nvfp4-down", "wide160g-mxfp8",
)  # fmt: skip

#: Builds of `support.compile.w8a8`, likewise.
BYTES = (
    "e4m3-narrow8x3-block-down", "e4m3-narrow8x3-channel-oai", "e4m3-wide128x4-block-down",
    "e4m3-wide128x4-block-gate-up", "int8-direct-down", "int8-direct-down-bias", "int8-direct-gate-up",
    "int8-narrow8x6-down-bias", "int8-narrow8x6-gate-up-direct", "int8-narrow8x6-gate-up-split",
    "int8-narrow128x6-down", "int8-wide128x4-down", "int8-wide128x4-gate-up", "int8-wide128x4-oai",
)  # fmt: skip

#: Builds of `support.compile.w4a8`.
W4A8 = (
    "w4a8-64-oai", "w4a8-160-down", "w4a8-160-permuted", "w4a8-int4-64-g32", "w4a8-int4-64-g0-down",
    "w4a8-int4-160-g128",
)  # fmt: skip

#: Formats, tokens and architectures of `mma.sync` products: all ways to decode, and all tiles.
MMA = (
    ("int4", 4, "sm_80"), ("int4-g32-zeros", 96, "sm_90"), ("int4-f16", 200, "sm_80"),
    ("int4-f16-scales-zeros", 2000, "sm_89"), ("int4-channel", 4, "sm_80"), ("int8", 96, "sm_80"),
    ("int8-zeros", 4, "sm_120"), ("mxfp4-oai", 200, "sm_80"), ("mxfp4-permuted", 4, "sm_90"), ("nvfp4", 2000, "sm_80"),
    ("nvfp4-permuted", 4, "sm_90"), ("nvfp4-f16", 96, "sm_80"), ("fp8", 4, "sm_80"), ("fp8-f16", 200, "sm_90"),
    ("fp8-channel", 96, "sm_80"), ("fp8-channel-f16", 4, "sm_80"), ("mxfp8", 4, "sm_80"),
)  # fmt: skip


def _text(source: Any, target: Any = None, options: Any = None) -> str:
    """Return what Triton makes of a kernel first, in the place of `triton.compile`."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    backend = make_backend(target)
    given = backend.parse_options({**(options or {}), **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen = backend.get_codegen_implementation(given)
    text: str = source.make_ir(target, given, codegen, backend.get_module_map(), context).str_nodebug()
    return f"{sorted((options or {}).items())}\n{text}"


def of_portable() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of kernels for all GPUs, and of those that route, on Hopper."""
    from moeq_kernels.compiling import compile_one, specialise
    from support.compile import portable, w4a16, w8a8
    from support.golden_launches import lines_of

    more = [case for case in portable.full_matrix() if case.name in PORTABLE]
    trimmed = portable.trimmed_matrix()
    single = [
        replace(case, name=f"{case.name} channel", group_size=-1)
        for case in trimmed
        if case.layout in ("marlin-mxfp4/1", "marlin-nvfp4/1", "marlin-mxfp8/1")
    ]
    for case in (*trimmed, *more, *single):
        launch = portable.launch_of(case)
        text = compile_one(specialise(launch), portable.TARGETS["sm_90"])
        yield case.name, "\n".join([*lines_of(launch), text])
    yield from w4a16.compile_routing().items()
    yield from w8a8.compile_rows().items()
    yield from of_mma()


def of_mma() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of `mma.sync` products, the gate-up and the down product in turn."""
    from moeq_kernels.compiling import compile_one, specialise
    from moeq_kernels.schedules import schedule
    from support.compile import mma

    for place, (name, tokens, target) in enumerate(MMA):
        found = mma.problem(name, target)
        launches = schedule("mma-w4a16", found, tokens).launches
        launch = [one for one in launches if one.kernel.endswith(":expert_product_mma")][place % 2]
        yield f"{name}, {tokens} tokens, {target}", compile_one(specialise(launch), found.gpu)


def of_hopper(module: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of some products for Hopper, builds of a module of `support.compile`."""
    compiler = import_module(f"support.compile.{module}")
    cases = {case.name: case for case in compiler.cases()}
    yield from ((name, compiler.compile_case(cases[name])) for name in names)


#: Parts of the file: kernels for all GPUs, and Hopper's products of packed weights and 16-bit activations, of bytes,
#: and of 4-bit weights and e4m3 activations.
PARTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "portable": of_portable,
    "words": partial(of_hopper, "w4a16", WORDS),
    "bytes": partial(of_hopper, "w8a8", BYTES),
    "w4a8": partial(of_hopper, "w4a8", W4A8),
}


def digests(parts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the digests of each kernel, by part and name; this process must not be interpreting."""
    import triton

    triton.compile = _text
    return {
        part: {name: hashlib.sha256(text.encode()).hexdigest()[:16] for name, text in PARTS[part]()} for part in parts
    }


def main() -> None:
    """Print the digests of the parts that are asked for, or write the file."""
    import triton

    if asked := sys.argv[1:]:
        print(json.dumps(digests(asked)))
        return
    FILE.write_text(json.dumps({"triton": triton.__version__, **digests(tuple(PARTS))}, indent=0) + "\n")


if __name__ == "__main__":
    main()
