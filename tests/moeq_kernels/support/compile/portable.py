"""Compile every kernel ahead of time, without a GPU, and read the result.

Triton compiles for any target it has a backend for; torch's meta tensors stand in for the weights. What is checked:
the kernel compiles, uses no local memory (spilled registers) inside a loop, fits the target's shared memory, and on
Hopper no product takes its left operand from registers (see kernels/README.md). Needs triton in compiled mode: a
process with TRITON_INTERPRET set cannot compile.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq_kernels import interpreter, portable
from moeq_kernels.areas import Area, Arena, contiguous
from moeq_kernels.blake3 import planned as planned_digests
from moeq_kernels.compiling import compile_one, specialise
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.errors import KernelArgumentError, KernelEnvironmentError
from moeq_kernels.formats import FORMATS, Format, find_format
from moeq_kernels.gpu import GPUS, Gpu
from moeq_kernels.index_maps import Digit, Packing, Placement, Reading
from moeq_kernels.launch import Launch
from moeq_kernels.lora import activation_launch, sum_launch
from moeq_kernels.placement import Elements, planned, planned_reading
from moeq_kernels.portable import quantize_launch
from moeq_kernels.problem import Piece, Problem, symbolic
from moeq_kernels.records import PackedMatrix


def _arch(gpu: Gpu) -> str:
    return f"sm_{gpu.arch}" if isinstance(gpu.arch, int) else gpu.arch


#: Architectures by name, with a GPU of each.
TARGETS: dict[str, Gpu] = {_arch(gpu): gpu for gpu in sorted(GPUS.values(), key=_arch)}


@dataclass(frozen=True)
class Case:
    """A kernel configuration to compile.

    Attributes:
        name: says what it is, unique.
        layout, element, group_size: the weights; empty layout for kernels that read none.
        rows: average rows per expert, which decides the tile.
        epilogue: `halves` or `interleaved` (gate and up), `down`, or a kernel name: `quantize_rows`, `sum_choices`.
        activation: activation of the gate-up product.
        dtype: type of x.
        zero_points, bias: which optional parts there are.
        activation_dtype: attribute of `PackedMatrix`.
    """

    name: str
    layout: str = ""
    element: str = ""
    group_size: int = 128
    rows: int = 16
    epilogue: str = "halves"
    activation: str = "silu"
    dtype: torch.dtype = torch.bfloat16
    zero_points: bool = False
    bias: bool = False
    activation_dtype: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one compilation produced.

    Attributes:
        case, target: which.
        registers: per thread, or -1 where the backend does not say.
        shared: bytes of shared memory.
        spills_in_loops: local-memory (scratch) instructions inside loops.
        spills: all of them, spills at the edges of a kernel included.
        problem: why the check fails, or None.
    """

    case: str
    target: str
    registers: int
    shared: int
    spills_in_loops: int
    spills: int
    problem: str | None


HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8

_EPILOGUES = ("halves", "interleaved", "down")


def full_matrix() -> list[Case]:
    """Every format x tile x epilogue, and the options of every format.

    Formats that differ in name only compile once; the largest tile is compiled with the options that need registers.
    """
    cases = _small_kernels()
    distinct = {
        (fmt.codec, fmt.kind, fmt.group_order, fmt.act_order, fmt.scale_kind): fmt for fmt in reversed(FORMATS.values())
    }
    for fmt in reversed(distinct.values()):
        for rows in (8, 256):
            base = _base_case(fmt, rows)
            cases += [replace(base, name=f"{base.name} {kind}", epilogue=kind) for kind in _EPILOGUES]
            cases += _zero_point_options(fmt, base) + (_other_options(fmt, base) if rows == 8 else [])
            cases += _fp8_options(fmt, base)
    return cases


def _small_kernels() -> list[Case]:
    names = (
        "quantize_rows",
        "quantize_rows_e4m3",
        "sum_choices",
        "place_words",
        "place_tiles",
        "read_words",
        "hash_chunks",
        "join_nodes",
        "activate_rows",
        "add_choices",
    )
    return [Case(name, epilogue=name) for name in names]


def _fp8_options(fmt: Format, base: Case) -> list[Case]:
    """e4m3 activations, with one scale for a row and for each group."""
    return [
        replace(base, name=f"{base.name} g{group} fp8", group_size=group, activation_dtype="fp8")
        for group in (fmt.group_sizes if fmt.fp8_activations else ())
    ]


def trimmed_matrix() -> list[Case]:
    """One case per format and kernel: what a test run can afford."""
    cases: list[Case] = []
    # Marlin's formats for float16 differ from those for bfloat16 in a constant.
    for index, fmt in enumerate(fmt for fmt in FORMATS.values() if not fmt.layout.endswith("-fp16/1")):
        base = _base_case(fmt, (8, 256)[index % 2])
        kind = _EPILOGUES[index % 3]
        cases.append(replace(base, name=f"{base.name} {kind}", epilogue=kind))
        cases += _fp8_options(fmt, base) if fmt.block_rows > 1 else []
    return cases + _small_kernels()


def spread(cases: Sequence[Case], targets: Sequence[str]) -> Iterator[tuple[Case, str]]:
    """Yield each case with one or two targets, which take turns."""
    for index, case in enumerate(cases):
        for offset in (0, 3) if case.element != "e4m3" else (0,):
            yield case, targets[(index + offset) % len(targets)]


def _base_case(fmt: Format, rows: int) -> Case:
    group = 128 if 128 in fmt.group_sizes else fmt.group_sizes[0] if fmt.group_sizes else 128
    activation = "swiglu_oai" if fmt.element == "e2m1" else "silu"
    name = f"{fmt.layout} {fmt.element} rows {rows}"
    dtype: torch.dtype = getattr(torch, fmt.dtypes[0])
    return Case(name, fmt.layout, fmt.element, group, rows, activation=activation, dtype=dtype)


def _other_options(fmt: Format, base: Case) -> list[Case]:
    cases = [replace(base, name=f"{base.name} gelu bias", activation="gelu", bias=True)]
    cases += [replace(base, name=f"{base.name} {name}", activation=name) for name in ("situ", "swiglu_step")]
    if len(fmt.dtypes) > 1:
        cases.append(replace(base, name=f"{base.name} float16", dtype=torch.float16))
    return cases


def _zero_point_options(fmt: Format, base: Case) -> list[Case]:
    if not fmt.zero_points:
        return []
    return [
        replace(base, name=f"{base.name} g32 zero points", group_size=32, zero_points=True),
        replace(base, name=f"{base.name} channel zero points", group_size=-1, zero_points=True),
    ]


def compile_case(case: Case, target: str) -> Outcome:
    """Compile one case. A compiler error is an Outcome with a problem, not an exception.

    Raises KernelEnvironmentError where triton is missing or interpreted.
    """
    if interpreter.active():
        raise KernelEnvironmentError("kernels cannot be compiled in the interpreter", "unset TRITON_INTERPRET")
    if target not in TARGETS:
        raise KernelArgumentError(f"unknown target '{target}'", f"known: {', '.join(TARGETS)}")
    launch = launch_of(case, target)
    try:
        compiled = compile_one(specialise(launch), TARGETS[target])
    except Exception as error:  # noqa: BLE001 - triton raises many types; the message is the finding
        text = str(error).strip() or type(error).__name__
        return Outcome(case.name, target, -1, 0, 0, 0, f"does not compile: {text[:300]}")
    return _inspect(case, target, compiled)


def launch_of(case: Case, target: str = "sm_90") -> Launch:
    """Return the launch that a layer of Qwen3-30B-A3B's size makes."""
    area = partial(Area.of, "workspace")
    if case.epilogue == "quantize_rows_e4m3":  # in groups of 128
        case = replace(case, layout="fp8-block-identity/1", element="e4m3", activation_dtype="fp8")
    if case.epilogue == "quantize_rows":
        codes, scales = area(torch.int8, 64, HIDDEN), area(torch.float32, 64)
        return quantize_launch(area(case.dtype, 64, HIDDEN), codes, scales, None, False)
    if case.epilogue in ("place_words", "place_tiles"):
        return _placement_launch(case.epilogue == "place_tiles")
    if case.epilogue == "read_words":
        return _reading_launch()
    if case.epilogue in ("hash_chunks", "join_nodes"):
        queued, _ = planned_digests(2, INTERMEDIATE * HIDDEN // 2, INTERMEDIATE * HIDDEN // 2)
        return queued.launches[0 if case.epilogue == "hash_chunks" else 1]
    if case.epilogue == "activate_rows":
        sums, more = area(torch.float32, 64, 2 * INTERMEDIATE), area(torch.float32, 64, INTERMEDIATE)
        areas = {"sums": sums, "gate": more, "up": more, "out": area(case.dtype, 64, INTERMEDIATE)}
        areas |= dict.fromkeys(("sums_rows", "gate_rows", "up_rows"), area(torch.int32, 64))
        addends = {"MORE": INTERMEDIATE, "WIDTH": INTERMEDIATE, "EACH": 1, "UP_AT": 0}
        return activation_launch(areas, Epilogue("situ", gated=True, alpha=4.0), addends, interpret=False)
    if case.epilogue == "add_choices":
        rows = area(torch.float32, 64, HIDDEN)
        areas = {
            "outputs": rows,
            "down": rows,
            "y": area(case.dtype, 16, HIDDEN),
            "weights": area(torch.float32, 16, 4),
        }
        return sum_launch(areas | dict.fromkeys(("outputs_rows", "down_rows"), area(torch.int32, 64)), interpret=False)
    gpu = TARGETS[target]
    if case.epilogue == "sum_choices":  # whatever the weights are
        case = replace(case, layout="marlin-wna16/1", element="int4")
    down = case.epilogue == "down"
    w13, w2 = _meta_matrix(case, 2 * INTERMEDIATE, HIDDEN), _meta_matrix(case, HIDDEN, INTERMEDIATE)
    limit = 7.0 if case.activation.startswith("swiglu") else 0.0
    epilogue = Epilogue(case.activation, gated=True, interleaved=case.epilogue == "interleaved", limit=limit)
    problem = Problem(
        symbolic("w13", w13), symbolic("w2", w2), epilogue, TOP_K, HIDDEN, case.dtype, EXPERTS, False, gpu,
        dependent=False,
    )  # fmt: skip
    piece = Piece.whole(problem, EXPERTS * case.rows // TOP_K)
    found = portable.launches(problem, piece, Arena(), portable.plan_for(problem, piece.tokens))
    if case.epilogue == "sum_choices":
        return found[-1]
    if case.epilogue == "quantize_rows_e4m3":
        return next(launch for launch in found if launch.kernel.endswith(f":{case.epilogue}"))
    products = [launch for launch in found if launch.kernel.endswith(":moe_gemm")]
    return products[1 if down else 0]


def _placement_launch(by_tiles: bool) -> Launch:
    """Return the launch that writes int4 codes, two to a byte, in Marlin's order, or word by word in another."""
    some = 4 if by_tiles else 3  # numbers that are no powers of two make no tiles
    rows = ((0, some, 16), (0, INTERMEDIATE // (16 * some), 16 * some))
    radices = (rows[0], (1, 4, 2), (0, 8, 1), rows[1], (1, HIDDEN // 16, 16))
    digits, stride = [], 1
    for axis, radix, multiple in radices:
        digits.append(Digit(axis, radix, multiple, False, stride))
        stride *= radix
    fields = tuple((8 * o, q + 8 * h) for q in range(2) for o in range(2) for h in range(2))
    placement, source = Placement(tuple(digits), fields, 4), (1, INTERMEDIATE, HIDDEN // 2)
    words = (INTERMEDIATE * HIDDEN // 8,)
    given, written = (torch.uint8, source, contiguous(source)), (torch.int32, words, contiguous(words))
    return planned(0, placement, (source[1], HIDDEN), Packing(2), *given, *written)


def _reading_launch() -> Launch:
    """Return the launch that reads int4 codes, two to a byte, out of Marlin's order."""
    rows = ((8, 1, 0, 4, 0), (2, 8, 0, 0, 2), (4, 16, 0, 1, 0), (INTERMEDIATE // 64, 64, 0, 32, 0))
    columns = ((2, 1, 0, 0, 4), (4, 2, 0, 1, 0), (2, 8, 0, 0, 1), (HIDDEN // 16, 16, 0, INTERMEDIATE // 2, 0))
    bytes_of_matrix = INTERMEDIATE * HIDDEN // 2
    into = Elements(INTERMEDIATE, HIDDEN // 2, 13, bytes_of_matrix + 64)
    given = torch.uint8, 2 * bytes_of_matrix + 128, torch.int32, (2, bytes_of_matrix // 4)
    return planned_reading(Reading(rows, columns, 4, 8), 0, True, into, *given).launches[0]


def _meta_matrix(case: Case, n: int, k: int) -> PackedMatrix:
    fmt = find_format(case.layout, case.element)
    group = k if case.group_size == -1 else case.group_size
    groups = k // group
    meta = partial(torch.empty, device="meta")
    scale: Tensor | None = None
    if fmt.group_order is not None or fmt.single_order is not None:
        order = fmt.single_order if groups == 1 else fmt.group_order
        fixed = str(case.dtype).removeprefix("torch.") not in fmt.scale_dtypes
        scale_dtype = getattr(torch, fmt.scale_dtypes[0]) if fixed else case.dtype
        scale = meta(EXPERTS, *fmt.scale_shape(order or "", n, groups), dtype=scale_dtype)
    global_scale = meta(EXPERTS, dtype=torch.float32) if fmt.global_scale == "required" else None
    zero = meta(EXPERTS, *fmt.zero_shape(n, groups), dtype=getattr(torch, fmt.zero_dtype)) if case.zero_points else None
    return PackedMatrix(
        layout=case.layout,
        weight=meta(EXPERTS, *fmt.weight_shape(n, k), dtype=getattr(torch, fmt.weight_dtype)),
        weight_high=None if fmt.high_shape is None else meta(EXPERTS, *fmt.high_shape(n, k), dtype=torch.int32),
        n=n,
        k=k,
        element=case.element,
        group_size=case.group_size,
        scale=scale,
        zero=zero,
        global_scale=global_scale,
        activation_dtype=case.activation_dtype,
        bias=meta(EXPERTS, n, dtype=case.dtype) if case.bias else None,
        permutation=meta(EXPERTS, k, dtype=torch.int32) if fmt.act_order else None,
        group_index=meta(EXPERTS, k, dtype=torch.int32) if fmt.act_order else None,
    )


def _inspect(case: Case, target: str, compiled: Any) -> Outcome:
    shared = int(compiled.metadata.shared)
    problem = None
    if case.layout and "v_mfma" not in compiled.asm.get("amdgcn", "v_mfma"):
        problem = "its products do not use matrix instructions (MFMA)"
    wide = case.activation_dtype and case.rows >= 64
    if wide and target in NATIVE_FP8 and not re.search(NATIVE_FP8[target], _text(compiled)):
        problem = "its products do not use tensor cores for e4m3"
    if TARGETS[target].backend == "cuda":
        registers = cuda_registers(compiled.asm["cubin"])
        inside, total = local_memory(sass(compiled.asm["cubin"]), CUDA_LINE, r"\b(?:LDL|STL)\b")
        if target == "sm_90" and _register_left_operand(compiled.asm["ptx"]):
            problem = "a product takes its left operand from registers"
    else:
        found = re.search(r"\.vgpr_count:\s*(\d+)", compiled.asm["amdgcn"])
        registers = int(found.group(1)) if found else -1
        inside, total = _amd_scratch(compiled.asm["amdgcn"])
    if inside:
        problem = f"{inside} local-memory instructions inside loops"
    if shared > TARGETS[target].shared_bytes:
        problem = f"needs {shared} bytes of shared memory, {target} has {TARGETS[target].shared_bytes}"
    return Outcome(case.name, target, registers, shared, inside, total, problem)


#: What instructions for e4m3 are called where there are some. Tiles of few rows on sm_90 and sm_100 are products by
#: mma.sync, for which Triton makes float16 of them.
NATIVE_FP8 = {
    **dict.fromkeys(("sm_89", "sm_90", "sm_120"), r"mma\S*e4m3\.e4m3"),
    "sm_100": r"mma\S*(?:e4m3|f8f6f4)",
    "gfx950": r"v_mfma_\S*(?:fp8_fp8|f8f6f4)",
}


def _text(compiled: Any) -> str:
    return str(compiled.asm.get("ptx") or compiled.asm["amdgcn"])


def _tool(name: str) -> str:
    """Find a CUDA binary tool that comes with triton. Raises KernelEnvironmentError where there is none."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise KernelEnvironmentError(f"this triton comes without {name}", "install the triton wheel from PyPI")
    return str(path)


def _dump(tool: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_tool(tool), *arguments, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelEnvironmentError(f"{tool} failed: {done.stderr.strip()[:200]}")
    return done.stdout


def cuda_registers(cubin: bytes) -> int:
    found = re.search(r"REG:(\d+)", _dump("cuobjdump", "-res-usage", cubin=cubin))
    return int(found.group(1)) if found else -1


def sass(cubin: bytes) -> list[str]:
    return _dump("nvdisasm", "-c", cubin=cubin).splitlines()


CUDA_LINE = re.compile(r"^(?P<label>\.L\w+):|BRA[^`]*`\((?P<jump>\.L\w+)\)")
_AMD_LINE = re.compile(r"^(?P<label>\.LBB\w+):|s_c?branch\w*\s+(?P<jump>\.LBB\w+)")


def local_memory(lines: list[str], pattern: re.Pattern[str], instruction: str) -> tuple[int, int]:
    """Local-memory instructions (inside loops, in all). A loop is what lies between a label and a jump back to it."""
    labels: dict[str, int] = {}
    loops: list[range] = []
    for number, line in enumerate(lines):
        found = pattern.search(line.strip())
        if found is None:
            continue
        if found["label"]:
            labels[found["label"]] = number
        elif found["jump"] in labels and labels[found["jump"]] < number - 1:  # not a `BRA .` at the end of a kernel
            loops.append(range(labels[found["jump"]], number))
    used = [number for number, line in enumerate(lines) if re.search(instruction, line)]
    return sum(any(number in loop for loop in loops) for number in used), len(used)


def _amd_scratch(assembly: str) -> tuple[int, int]:
    return local_memory(
        assembly.splitlines(), _AMD_LINE, r"\bscratch_(?:load|store)|buffer_(?:load|store).*\boffen\b.*\bs32\b"
    )


def _register_left_operand(ptx: str) -> bool:
    """Whether a Hopper wgmma has A in registers: its second operand is then a `{...}` list and not a descriptor."""
    return re.search(r"wgmma\.mma_async[^{;]*\{[^}]*\},\s*\{", ptx) is not None
