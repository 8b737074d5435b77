"""Read Hopper machine code: registers that are overwritten while a wgmma still reads them, and contents of loops.

wgmma reads its left operand from registers while later instructions already run. Nothing in the hardware stops those
from overwriting the registers; the compiler must wait first. Triton's own pipelining (before 3.9) and ptxas (before
13.3) can get that wrong, so every build of these kernels is read.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"(?:^|\s|\*/)(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)\s*([^;]*);")
_LABEL = re.compile(r"^\s*\.?(L\w+):")
_BRANCH = re.compile(r"\bBRA\s+(?:\S+,\s*)?`?\(?\.?(L\w+)")
#: Shuffles, stores to shared memory, and local memory (spilled registers).
_UNWANTED = ("SHFL", "STS", "STSM", "LDSM", "LDL", "STL")
#: Instructions whose first operand is not a register that they write.
_READERS = ("ST", "RED", "ATOM", "SYNCS", "BAR", "BRA", "ISETP", "UTMA")


@dataclass(frozen=True)
class Instruction:
    """One instruction: line number from 0, operation with its suffixes, operands."""

    line: int
    operation: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Hazard:
    """`writer` overwrites `registers` of the running wgmma at `reader` (line numbers from 0)."""

    reader: int
    writer: int
    registers: tuple[int, ...]


def disassemble(cubin: bytes) -> str:
    """Disassemble a build with the `nvdisasm` that triton brings.

    Before 3.9, triton's own text of it (`asm["sass"]`) ends after 4096 instructions.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def instructions(sass: str) -> dict[int, Instruction]:
    """Instructions of a disassembly (of `disassemble`) by line number."""
    found = {}
    for number, line in enumerate(sass.splitlines()):
        match = _INSTRUCTION.search(line)
        if match:
            operands = tuple(part.strip() for part in match[2].split(","))
            found[number] = Instruction(number, match[1], operands)
    return found


def loops(sass: str) -> list[tuple[int, int]]:
    """(first line, line of the branch back) of every loop."""
    lines = sass.splitlines()
    labels = {match[1]: number for number, line in enumerate(lines) if (match := _LABEL.match(line))}
    found = []
    for number, line in enumerate(lines):
        match = _BRANCH.search(line)
        if match and labels.get(match[1], number) < number:
            found.append((labels[match[1]], number))
    return found


def main_loops(sass: str) -> list[list[Instruction]]:
    """Return the innermost loops that hold wgmma instructions.

    Blocks that ptxas moved behind a loop (waiting longer than usual) also branch back into it; a span that overlaps a
    shorter one is not counted.
    """
    code = instructions(sass)
    kept: list[tuple[int, int]] = []
    for first, last in sorted(loops(sass), key=lambda span: span[1] - span[0]):
        holds = any(is_wgmma(one) for number, one in code.items() if first <= number <= last)
        if holds and not any(first <= b and a <= last for a, b in kept):
            kept.append((first, last))
    return [[one for number, one in code.items() if first <= number <= last] for first, last in sorted(kept)]


def problems(sass: str, *, registers: bool = True) -> list[str]:
    """List what a build of these kernels must not have; empty where it is good.

    Left operands come from registers that nothing overwrites too early (or, without `registers`, all from shared
    memory); loops move no data between lanes and hold no spilled registers or round trips through shared memory.
    """
    found = [f"line {one.writer} overwrites registers of the wgmma in line {one.reader}" for one in hazards(sass)]
    inner = main_loops(sass)
    if not inner:
        found.append("no loop with wgmma")
    for body in inner:
        waits = sum(one.operation.startswith("WARPGROUP.DEPBAR") for one in body)
        if waits > 2 and waits >= sum(map(is_wgmma, body)):
            found.append(f"line {body[0].line}: a wait after every wgmma (ptxas had too few registers)")
        found += [
            f"line {one.line}: left operand in {'shared memory' if registers else 'registers'}"
            for one in body
            if is_wgmma(one) and bool(left_registers(one)) != registers
        ]
        found += [
            f"line {one.line}: {one.operation} in a main loop" for one in body if one.operation.startswith(_UNWANTED)
        ]
    return found


def is_wgmma(one: Instruction) -> bool:
    """bf16, int8 or fp8 warpgroup multiplication."""
    return one.operation.startswith(("HGMMA", "IGMMA", "QGMMA"))


def left_registers(one: Instruction) -> set[int]:
    """Return the registers of a wgmma's left operand; none where it is in shared memory."""
    match = re.match(r"R(\d+)", one.operands[1]) if is_wgmma(one) and len(one.operands) > 1 else None
    return set(range(int(match[1]), int(match[1]) + 4)) if match else set()


def hazards(sass: str) -> list[Hazard]:
    """List writes to a wgmma's left operand before a wait retires it; every loop is walked twice."""
    found: set[Hazard] = set()
    groups: list[list[tuple[int, set[int]]]] = []
    current: list[tuple[int, set[int]]] = []
    for one in _walk(sass):
        if is_wgmma(one):
            current.append((one.line, left_registers(one)))
            if any("gsb0" in operand for operand in one.operands):
                groups.append(current)
                current = []
        elif one.operation.startswith("WARPGROUP.DEPBAR"):
            running = int(one.operands[-1], 16)
            groups = groups[len(groups) - running :] if running else []
        else:
            written = _written(one)
            for reader, registers in (pair for group in [*groups, current] for pair in group):
                if written & registers:
                    found.add(Hazard(reader, one.line, tuple(sorted(written & registers))))
    return sorted(found, key=lambda hazard: (hazard.reader, hazard.writer))


def _walk(sass: str) -> Iterator[Instruction]:
    code = instructions(sass)
    back = {last: first for first, last in loops(sass)}
    for number, one in code.items():
        yield one
        if number in back:
            yield from (code[again] for again in range(back[number], number + 1) if again in code)


def _written(one: Instruction) -> set[int]:
    match = re.match(r"R(\d+)", one.operands[0]) if one.operands else None
    if not match or one.operation.startswith(_READERS):
        return set()
    width = 4 if ".128" in one.operation else 2 if re.search(r"\.64|\.WIDE", one.operation) else 1
    return set(range(int(match[1]), int(match[1]) + width))
