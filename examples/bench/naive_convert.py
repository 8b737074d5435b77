"""The script that a user would write: load the files, repack every expert with torch, save the stacks.

    python examples/bench/naive_convert.py SRC DST

It knows three kernel layouts (Marlin int4, Marlin MXFP4, int8 W8A8) and is here to be compared with `moeq convert` by
`convert_speed.py`: same tensors, same bytes, none of the planning, checking, resuming or proving. It needs the whole
model in memory, twice. Nothing of moeq is used.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Within a tile of 16 (k) by 64 (n) codes: where the next nibble of Marlin's words comes from.
MARLIN = torch.tensor(
    [
        (8 * h + 2 * p + q) * 64 + 16 * c + 8 * o + r
        for r in range(8)
        for p in range(4)
        for c in range(4)
        for q in range(2)
        for o in range(2)
        for h in range(2)
    ]
)
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
MARLIN_ZEROS = (0, 16, 32, 48, 8, 24, 40, 56)


def nibbles(words: Tensor) -> Tensor:
    """int32 `[..., W]` to codes `[..., 8 W]`."""
    return ((words.unsqueeze(-1) >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15).flatten(-2)


def to_words(codes: Tensor) -> Tensor:
    """Codes `[..., 8 W]` to int32 `[..., W]`."""
    fields = codes.reshape(*codes.shape[:-1], -1, 8).to(torch.int32)
    words = torch.zeros(fields.shape[:-1], dtype=torch.int32)
    for index in range(8):
        words |= fields[..., index] << (4 * index)
    return words


def marlin_weight(codes: Tensor) -> Tensor:
    """Codes `[K, N]` to Marlin's int32 `[K / 16, 2 N]`."""
    k, n = codes.shape
    tiles = codes.reshape(k // 16, 16, n // 64, 64).permute(0, 2, 1, 3).reshape(k // 16, n // 64, 1024)
    return to_words(tiles[:, :, MARLIN].reshape(k // 16, 16 * n))


def marlin_scale(scales: Tensor) -> Tensor:
    """Scales `[G, N]`: octets of 64 columns transposed; a single group lies in the order of biases."""
    groups, n = scales.shape
    if groups == 1:
        return columns_in_32s(scales[0])[None]
    return scales.reshape(groups, n // 64, 8, 8).transpose(2, 3).reshape(groups, n)


def marlin_zero(zeros: Tensor) -> Tensor:
    """Zero points `[G, N]` to int32 `[G, N / 8]`."""
    groups, n = zeros.shape
    index = torch.tensor([column + r for r in range(8) for column in MARLIN_ZEROS])
    return to_words(zeros.reshape(groups, n // 64, 64)[:, :, index].reshape(groups, n))


def marlin_mxfp4_scale(scales: Tensor) -> Tensor:
    """Exponent bytes `[G, N]`: octets transposed, then every four in the order 0, 2, 1, 3."""
    return marlin_scale(scales).reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(scales.shape)


def columns_in_32s(bias: Tensor) -> Tensor:
    """Marlin's order of `[N]` values."""
    return bias.reshape(-1, 4, 4, 2).permute(0, 2, 1, 3).reshape(-1)


def gptq(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Symmetric GPTQ without act-order: codes packed along K."""
    codes = nibbles(parts["qweight"].t()).t()
    return {"weight": codes, "scale": parts["scales"]}


def awq(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """AWQ: codes packed along N in AWQ's order, with zero points."""
    order = torch.tensor(AWQ_NIBBLES)
    codes, zeros = (
        nibbles(parts[name]).unflatten(-1, (-1, 8))[..., order].flatten(-2) for name in ("qweight", "qzeros")
    )
    return {"weight": codes, "scale": parts["scales"], "zero": zeros}


def ct_int4(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """compressed-tensors pack-quantized: codes packed along K, `[N, K / 8]`."""
    return {"weight": nibbles(parts["weight_packed"]).t(), "scale": parts["weight_scale"].t()}


def int8(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"weight": parts["weight"], "scale": parts["weight_scale"].float()}


#: Which tensor of a projection tells the format: how it is read, the axis of N, and how each part is packed.
FORMATS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], int, dict[str, Callable[[Tensor], Tensor]]]]
FORMATS = {
    "g_idx": (gptq, 1, {"weight": marlin_weight, "scale": marlin_scale}),
    "qweight": (awq, 1, {"weight": marlin_weight, "scale": marlin_scale, "zero": marlin_zero}),
    "weight_packed": (ct_int4, 1, {"weight": marlin_weight, "scale": marlin_scale}),
    "weight": (int8, 0, {"weight": Tensor.contiguous, "scale": Tensor.contiguous}),
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w3|w2)\.(\w+)")
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(blocks|scales|bias)")


def convert_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All experts that are stored one by one."""
    found: dict[str, dict[int, dict[str, dict[str, Tensor]]]] = {}
    for name in [name for name in tensors if EXPERT.fullmatch(name)]:
        prefix, expert, projection, part = EXPERT.fullmatch(name).groups()
        projection = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(projection, projection)
        experts = found.setdefault(prefix, {})
        experts.setdefault(int(expert), {}).setdefault(projection, {})[part] = tensors.pop(name)
    out = {}
    for prefix, experts in found.items():
        for role, projections in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
            packed = []
            for expert in sorted(experts):
                parts = [experts[expert][projection] for projection in projections]
                decode, axis, packers = next(row for mark, row in FORMATS.items() if mark in parts[0])
                decoded = [decode(one) for one in parts]
                packed.append(
                    {part: pack(torch.cat([d[part] for d in decoded], axis)) for part, pack in packers.items()}
                )
            for part in packed[0]:
                out[f"{prefix}.{role}_{part}"] = torch.stack([one[part] for one in packed])
    return out


def convert_stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss: MXFP4 experts in one tensor, gate and up rows alternating."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name in [name for name in tensors if STACKED.fullmatch(name)]:
        prefix, projection, part = STACKED.fullmatch(name).groups()
        found.setdefault(prefix, {}).setdefault(projection, {})[part] = tensors.pop(name)
    out = {}
    for prefix, projections in found.items():
        for role, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
            packed = [
                mxfp4_expert(*(projections[name][part][expert] for part in ("blocks", "scales", "bias")), role == "w13")
                for expert in range(len(projections[name]["blocks"]))
            ]
            for part in packed[0]:
                out[f"{prefix}.{role}_{part}"] = torch.stack([one[part] for one in packed])
    return out


def mxfp4_expert(blocks: Tensor, scales: Tensor, bias: Tensor, gated: bool) -> dict[str, Tensor]:
    """One expert: gate rows before up rows, sizes padded as Marlin wants them (intermediate 128, hidden 256)."""
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
    halves = [slice(0, None, 2), slice(1, None, 2)] if gated else [slice(None)]
    n_multiple, k_multiple = (128, 256) if gated else (256, 128)
    rows = -(-len(codes[halves[0]]) // n_multiple) * n_multiple
    columns = -(-codes.shape[1] // k_multiple) * k_multiple

    def padded(matrix: Tensor, width: int) -> Tensor:
        parts = [F.pad(matrix[half], (0, width - matrix.shape[1], 0, rows - len(matrix[half]))) for half in halves]
        return torch.cat(parts)

    return {
        "weight": marlin_weight(padded(codes, columns).t()),
        "scale": marlin_mxfp4_scale(padded(scales, columns // 32).t()),
        "bias": columns_in_32s(padded(bias[:, None], 1)[:, 0]),
    }


def main(source: Path, destination: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    converted = convert_experts(tensors) | convert_stacked(tensors)
    destination.mkdir()
    save_file({**tensors, **converted}, destination / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(source / "config.json", destination)
    index = {"metadata": {}, "weight_map": dict.fromkeys([*tensors, *converted], "model.safetensors")}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
