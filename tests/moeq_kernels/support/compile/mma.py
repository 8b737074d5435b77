"""Compile the `mma.sync` products ahead of time for all NVIDIA architectures, and read the machine code.

    python -m support.compile.mma [--formats nvfp4] [--targets sm_80] [--out results.json]

Checked: each compiles, keeps its registers (no local memory inside loops) and fits shared memory; words come by
cp.async (LDGSTS), tokens by ldmatrix (LDSM), products are HMMA. Exits 1 where one does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from functools import partial
from pathlib import Path

import torch
from support.compile.portable import CUDA_LINE, TARGETS, Outcome, cuda_registers, local_memory, sass

from moeq_kernels import PackedExperts, PackedMatrix
from moeq_kernels.compiling import compile_one, specialise
from moeq_kernels.formats import find_format
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import Problem
from moeq_kernels.schedules import schedule
from moeq_kernels.validate import epilogue_of

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
#: Formats: layout, element, group, zero points, dtype of scales, dtype of x, biases.
FORMATS: dict[str, tuple[str, str, int, bool, torch.dtype, torch.dtype, bool]] = {
    "int4": ("marlin-wna16/1", "int4", 128, False, torch.bfloat16, torch.bfloat16, False),
    "int4-g32-zeros": ("marlin-wna16/1", "int4", 32, True, torch.bfloat16, torch.bfloat16, False),
    "int4-f16": ("marlin-wna16/1", "int4", 64, False, torch.float16, torch.float16, False),
    "int4-f16-scales-zeros": ("marlin-wna16/1", "int4", 128, True, torch.float16, torch.bfloat16, False),
    "int4-channel": ("marlin-wna16/1", "int4", -1, False, torch.bfloat16, torch.bfloat16, True),
    "int8": ("marlin-wna16/1", "int8", 128, False, torch.bfloat16, torch.bfloat16, False),
    "int8-zeros": ("marlin-wna16/1", "int8", 64, True, torch.bfloat16, torch.bfloat16, False),
    "mxfp4-oai": ("marlin-mxfp4-interleaved/1", "e2m1", 32, False, torch.uint8, torch.bfloat16, True),
    "mxfp4-permuted": ("moeq-mxfp4/1", "e2m1", 32, False, torch.uint8, torch.bfloat16, False),
    "nvfp4": ("marlin-nvfp4/1", "e2m1", 16, False, torch.float8_e4m3fn, torch.bfloat16, False),
    "nvfp4-permuted": ("moeq-nvfp4/1", "e2m1", 16, False, torch.float8_e4m3fn, torch.bfloat16, False),
    "nvfp4-f16": ("marlin-nvfp4-fp16/1", "e2m1", 16, False, torch.float8_e4m3fn, torch.float16, True),
    "fp8": ("marlin-fp8/1", "e4m3", 128, False, torch.bfloat16, torch.bfloat16, False),
    "fp8-f16": ("marlin-fp8-fp16/1", "e4m3", 128, False, torch.float16, torch.float16, False),
    "fp8-channel": ("marlin-fp8/1", "e4m3", -1, False, torch.bfloat16, torch.bfloat16, True),
    "fp8-channel-f16": ("marlin-fp8-fp16/1", "e4m3", -1, False, torch.float16, torch.float16, False),
    "mxfp8": ("marlin-mxfp8/1", "e4m3", 32, False, torch.uint8, torch.bfloat16, False),
}
#: Tokens of 32 experts, top 4, that give tiles of 8, 16, 32 and 64 tokens.
TOKENS = (4, 96, 200, 2000)


def problem(name: str, target: str) -> Problem:
    """Make a layer of 32 experts in that format."""
    layout, element, group, zeros, scale_dtype, dtype, bias = FORMATS[name]
    fmt = find_format(layout, element)
    meta = partial(torch.empty, device="meta")

    def matrix(n: int, k: int) -> PackedMatrix:
        order = fmt.single_order if group == -1 else fmt.group_order
        groups = 1 if group == -1 else k // group
        zero = meta(32, *fmt.zero_shape(n, groups), dtype=torch.int32) if zeros else None
        return PackedMatrix(
            layout, meta(32, *fmt.weight_shape(n, k), dtype=torch.int32), n, k, element, group,
            meta(32, *fmt.scale_shape(order or "", n, groups), dtype=scale_dtype), zero,
            meta(32, n, dtype=dtype) if bias else None,
            global_scale=meta(32, 1, dtype=torch.float32) if fmt.global_scale == "required" else None,
        )  # fmt: skip

    oai = layout == "marlin-mxfp4-interleaved/1"
    experts = PackedExperts(matrix(1536, 2048), matrix(2048, 768), "interleaved" if oai else "gate-up")
    epilogue = epilogue_of(experts, "swiglu_oai" if oai else "silu", None, None, 7.0 if oai else None, False)
    x = torch.empty(0, 2048, dtype=dtype, device="meta")
    return prepare_for(x, experts, 4, 4096, epilogue, None, family="mma-w4a16", gpu=TARGETS[target].name).problem


def check(name: str, target: str, tokens: int) -> list[Outcome]:
    """Outcomes of both products."""
    found = problem(name, target)
    outcomes = []
    for launch in schedule("mma-w4a16", found, tokens).launches:
        if not launch.kernel.endswith(":expert_product_mma"):
            continue
        which = "down" if launch.arguments["pair_of_row"] is None else "gate-up"
        case = f"mma {name} {which} tile {launch.constants['TOKENS']}"
        try:
            built = compile_one(specialise(launch), found.gpu)
        except Exception as error:  # noqa: BLE001 - triton raises many types; the message is the finding
            outcomes.append(Outcome(case, target, -1, 0, 0, 0, f"does not compile: {str(error).strip()[:300]}"))
            continue
        lines = sass(built.asm["cubin"])
        text = "\n".join(lines)
        inside, local = local_memory(lines, CUDA_LINE, r"\b(?:LDL|STL)\b")
        problems = [f"{inside} local-memory instructions inside loops"] if inside else []
        problems += [f"no {word}" for word in ("HMMA", "LDGSTS", "LDSM") if word not in text]
        if built.metadata.shared > found.gpu.shared_bytes:
            problems.append(f"needs {built.metadata.shared} bytes of shared memory")
        shared = int(built.metadata.shared)
        registers = cuda_registers(built.asm["cubin"])
        outcomes.append(Outcome(case, target, registers, shared, inside, local, "; ".join(problems) or None))
    return outcomes


def main() -> int:
    """Run the command line, which prints one line per build."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trimmed", action="store_true", help="one tile for each format and architecture")
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--targets", nargs="*", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    for number, target in enumerate(options.targets):
        for at, name in enumerate(options.formats):
            for tokens in (TOKENS[(number + at) % len(TOKENS)],) if options.trimmed else TOKENS:
                for outcome in check(name, target, tokens):
                    outcomes.append(outcome)
                    verdict = outcome.problem or "good"
                    print(
                        f"{target} {outcome.case}: {outcome.registers} registers, {outcome.shared} bytes, {verdict}",
                        flush=True,
                    )
    if options.out:
        options.out.write_text(json.dumps([dataclasses.asdict(one) for one in outcomes], indent=0) + "\n")
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
