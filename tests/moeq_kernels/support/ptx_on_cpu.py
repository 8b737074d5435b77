"""Run PTX texts of device code on tensors, instruction by instruction, with the rounding of each instruction."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class Value(torch.Tensor):
    """A tensor that also converts by bits, and that no operator changes, as Triton's."""

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        return self + other

    def __isub__(self, other: Any) -> Any:  # type: ignore[misc]
        return self - other

    def __imul__(self, other: Any) -> Any:  # type: ignore[misc]
        return self * other

    def to(self, dtype: Any, *, bitcast: bool = False) -> Any:
        if bitcast:
            return self.view(dtype)
        return super().to(getattr(dtype, "dtype", dtype))


def value(given: Any) -> Value:
    """Anything as a Value."""
    return torch.as_tensor(given).as_subclass(Value)


@cache
def _instructions(text: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Operation, target and sources of each line of a PTX text."""
    found = []
    for line in text.splitlines():
        for one in re.findall(r"[^;]+", line.strip("{} ") if line.strip() in "{}" else line):
            match = re.fullmatch(r"\s*([a-z0-9.]+) (.*?)\s*", one)
            if match and match[1] != ".reg":
                target, *sources = re.findall(r"{[^}]*}|[^, ]+", match[2])
                found.append((match[1], target, tuple(sources)))
    return found


def _halves(dtype: torch.dtype, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def apply(*words: Tensor) -> Tensor:
        results = []
        for shift in (0, 16):
            # Two's complement: bits above 15 do not fit an int16.
            bits = [((word >> shift & 0xFFFF) ^ 0x8000) - 0x8000 for word in words]
            numbers = [one.to(torch.int16).view(dtype).double() for one in bits]
            results.append(function(*numbers).to(dtype).view(torch.int16).long() & 0xFFFF)
        return results[0] | results[1] << 16

    return apply


def _permute(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    a, b, selector = torch.broadcast_tensors(a, b, selector)
    table = torch.stack([one >> 8 * i & 255 for one in (a, b) for i in range(4)])
    result = torch.zeros_like(selector)
    for i in range(4):
        chosen = selector >> 4 * i & 15
        byte = table.gather(0, (chosen & 7)[None])[0]
        # The fourth bit asks for eight copies of the byte's sign.
        result |= torch.where(chosen > 7, (byte >> 7) * 255, byte) << 8 * i
    return result


def _pairs(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: (function(a & 0xFFFF, b & 0xFFFF) & 0xFFFF) | (function(a >> 16, b >> 16) & 0xFFFF) << 16


#: Registers of the machine: of lane 31, whose mask has most bits.
SPECIAL = {"%lanemask_lt": 0x7FFFFFFF}

OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
    "shr.u32": lambda a, b: a >> b,
    # Of the 64 bits of b and a the upper half, after b * 2^32 + a has gone c bits to the left.
    "shf.l.wrap.b32": lambda a, b, c: (b << (c & 31) | a >> 32 - (c & 31)) & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "add.u32": lambda a, b: a + b & 0xFFFFFFFF,
    "min.u32": torch.minimum,
    "mul.lo.u32": lambda a, b: a * b & 0xFFFFFFFF,
    "mad.lo.u32": lambda a, b, c: a * b + c & 0xFFFFFFFF,
    "add.u16x2": _pairs(torch.add),
    "min.u16x2": _pairs(torch.minimum),
    "prmt.b32": _permute,
    "fma.rn.bf16x2": _halves(torch.bfloat16, lambda a, b, c: a * b + c),
    "fma.rn.f16x2": _halves(torch.float16, lambda a, b, c: a * b + c),
    "mul.bf16x2": _halves(torch.bfloat16, torch.mul),
    "mul.f16x2": _halves(torch.float16, torch.mul),
}


def inline_asm(text: str, constraints: str, given: tuple[Value, ...], dtypes: Any, pure: bool, pack: int) -> Any:
    """Run a PTX text on `pack` neighbouring elements at a time, which share 32-bit registers."""
    if ".f32" in text:
        return {"ex2": torch.exp2, "rcp": torch.reciprocal}[text[:3]](given[0])
    if text.startswith(("fence", "shfl")):  # lanes of a warp have the same here
        return given[0] if given else value(0)
    results = constraints.count("=")
    shape = torch.broadcast_shapes(*(one.shape for one in given))
    registers: dict[str, Tensor] = {}
    number = results
    for one in given:
        own = one.expand(shape).contiguous().flatten().view(torch.uint8).view(shape.numel() // pack, -1, 4).long()
        for word in own.unbind(1):
            registers[f"${number}"] = sum((word[:, byte] << 8 * byte for byte in range(4)), torch.tensor(0))
            number += 1
    assert number == constraints.count("r"), "operands and constraints"

    def read(source: str) -> Tensor:
        if source.startswith("{"):
            low, high = source.strip("{}").split(", ")
            return registers[low] | registers[high] << 16
        if source in SPECIAL:
            return torch.tensor(SPECIAL[source])
        return registers[source] if source in registers else torch.tensor(int(source, 0))

    for operation, target, sources in _instructions(text):
        found = OPERATIONS[operation](*(read(source) for source in sources))
        halves = target.strip("{}").split(", ")
        if len(halves) == 2:
            registers |= {halves[0]: found & 0xFFFF, halves[1]: found >> 16}
        else:
            registers[target] = found
    every = [registers[f"${i}"].expand(shape.numel() // pack) for i in range(results)]
    several = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    made, at = [], 0
    for dtype in several:
        each = pack * dtype.itemsize // 4
        words = torch.stack(every[at : at + each], 1)
        at += each
        parts = torch.stack([words >> 8 * byte & 255 for byte in range(4)], 2).to(torch.uint8)
        made.append(value(parts.flatten().view(dtype).reshape(shape)))
    return tuple(made) if isinstance(dtypes, tuple) else made[0]
