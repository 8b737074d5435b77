"""Random checkpoints of every quantised format and model family, and a reader of any format, by the formats' own rules.

Nothing here uses moeq but its list of families: codes are packed and decoded with numpy, 8-bit floats with torch.
Sizes, groups, names, biases, files and what lies beside the experts are drawn from a seed, and so are scales that no
quantiser means to write: of 0, negative, infinite, no number at all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from moeq.checkpoint.families import FAMILIES, ModelFamily

Tensors = dict[str, torch.Tensor]
Array = np.ndarray[Any, Any]

KINDS = (
    *("gptq", "gptq_v2", "awq", "ct-int"),
    *("fp8-tensor", "fp8-static", "fp8-channel", "fp8-block", "mxfp8", "mxfp4", "nvfp4", "ct-nvfp4"),
)

#: Values of E2M1, and AutoAWQ's order of columns within a word.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(codes: Array, bits: int) -> Array:
    """Codes along the last axis as a stream of bits, the first in the lowest, in 32-bit words."""
    stream = np.unpackbits(codes[..., None].astype(np.uint8), axis=-1, bitorder="little")[..., :bits]
    stream = stream.reshape(*codes.shape[:-1], -1)
    missing = -stream.shape[-1] % 32
    stream = np.pad(stream, [(0, 0)] * (stream.ndim - 1) + [(0, missing)])
    return np.packbits(stream, axis=-1, bitorder="little").view("<i4")


def unpacked(words: Array, bits: int, count: int) -> Array:
    """The other way, int64."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    stream = stream[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    return (stream.astype(np.int64) << np.arange(bits)).sum(axis=-1)


def awq_words(codes: Array) -> Array:
    """Codes `[rows, columns]` as AutoAWQ's words along the columns."""
    return packed(codes.reshape(*codes.shape[:-1], -1, 8)[..., _AWQ_ORDER].reshape(codes.shape), 4)


def awq_codes(words: Array) -> Array:
    """The other way."""
    codes = unpacked(words, 4, words.shape[-1] * 8).reshape(*words.shape[:-1], -1, 8)
    return codes[..., np.argsort(_AWQ_ORDER)].reshape(*words.shape[:-1], -1)


def spread(scales: Array, n: int, k: int) -> Array:
    """Scales of a projection, in whatever shape, as one for each number."""
    scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    if scales.ndim == 4:  # blocks as ModelOpt has them
        scales = scales[:, 0, :, 0]
    if scales.shape[0] not in (1, n) or scales.shape == (-(-n // 128), -(-k // 128)):
        scales = scales.repeat(128, 0)[:n].repeat(128, 1)[:, :k]
    elif scales.shape[1] > 1:
        scales = scales.repeat(-(-k // scales.shape[1]), 1)[:, :k]
    return np.broadcast_to(scales, (n, k))


def decoded(parts: Tensors, n: int, k: int, method: str, bits: int) -> Array:
    """float64 values of a projection from its tensors, whatever the format.

    Args:
        parts: tensors by part.
        n: output features.
        k: input features.
        method: `gptq` stores zero points minus one, `awq` has words of its own; else the parts say it all.
        bits: of integer codes.
    """
    arrays = {name: _numpy(tensor) for name, tensor in parts.items()}
    if "qweight" in arrays:
        scales = arrays["scales"].astype(np.float64).T
        if method == "awq":
            codes, zeros = awq_codes(arrays["qweight"]).T, awq_codes(arrays["qzeros"]).T
        else:
            codes = unpacked(arrays["qweight"].T, bits, k)
            zeros = unpacked(arrays["qzeros"], bits, n).T + (method == "gptq")
            zeros &= (1 << bits) - 1
        index = arrays["g_idx"] if "g_idx" in arrays else np.arange(k) // -(-k // scales.shape[1])
        with np.errstate(invalid="ignore"):
            return (codes - zeros[:, index]) * scales[:, index]
    if arrays.get("weight_packed", np.empty(0)).dtype == np.int32:
        codes, scales = unpacked(arrays["weight_packed"], bits, k), arrays["weight_scale"].astype(np.float64)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
        if "weight_zero_point" in arrays:
            zeros = unpacked(arrays["weight_zero_point"].T, bits, n).T
        index = np.arange(k) // -(-k // scales.shape[1])
        with np.errstate(invalid="ignore"):
            return (codes - zeros[:, index]) * scales[:, index]
    weight = arrays["weight_packed"] if "weight_packed" in arrays else arrays["weight"]
    if weight.dtype == np.uint8:
        numbers = _E2M1[np.stack([weight & 15, weight >> 4], axis=-1).reshape(n, k)]
    else:
        numbers = weight.reshape(n, k)
    name = next((name for name in ("weight_scale_inv", "weight_scale", "scale") if name in arrays), None)
    if name is None:
        return numbers
    scales = np.exp2(arrays[name] - 127.0) if arrays[name].dtype == np.uint8 else arrays[name]
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        numbers = numbers * spread(scales, n, k)
        if "weight_scale_2" in arrays:
            numbers = numbers * arrays["weight_scale_2"].reshape(())
        if "weight_global_scale" in arrays:  # moeq reads the reciprocal as a float32 number, as vLLM does
            numbers = numbers * np.float64(np.float32(1 / arrays["weight_global_scale"].reshape(())))
    return numbers


def _numpy(tensor: torch.Tensor) -> Array:
    floats = tensor.dtype.is_floating_point
    return tensor.double().numpy() if floats else tensor.numpy()


@dataclass(frozen=True)
class Drawn:
    """What a random checkpoint is.

    Attributes:
        seed: where everything else comes from.
        kind: one of `KINDS`.
        family: whose names it has.
        stacked: experts are rows of `gate_up_proj` and `down_proj` (compressed-tensors only).
        bits: of integer codes.
        group: columns that share a scale.
        symmetric: integers have no zero points of their own.
        hidden: input features of an expert.
        intermediate: its intermediate features.
        biased: projections have biases.
        odd: scales of 0, negative, infinite or no number at all are among the others.
    """

    seed: int
    kind: str
    family: ModelFamily
    stacked: bool
    bits: int
    group: int
    symmetric: bool
    hidden: int
    intermediate: int
    biased: bool
    odd: str | None

    @classmethod
    def of(cls, seed: int) -> Drawn:
        """What a seed gives."""
        draw = np.random.default_rng(seed)
        kind = str(draw.choice(KINDS))
        integer = kind in ("gptq", "gptq_v2", "awq", "ct-int")
        families = [family for family in FAMILIES if "deepseek_v4" not in family.model_types]
        family = families[int(draw.integers(len(families)))]
        group = int(draw.choice([32, 64, 128])) if integer else {"nvfp4": 16, "ct-nvfp4": 16}.get(kind, 32)
        return cls(
            seed=seed,
            kind=kind,
            family=family,
            stacked=kind in ("ct-int", "mxfp4") and bool(draw.random() < 0.4) and not family.interleaved,
            bits=4 if kind == "awq" else int(draw.choice([4, 8])),
            group=group,
            symmetric=kind != "awq" and bool(draw.random() < 0.5),
            hidden=max(group, 32) * int(draw.integers(1, 4)),
            intermediate=max(group, 32) * int(draw.integers(1, 4)),
            biased=kind in ("gptq", "gptq_v2", "awq") and bool(draw.random() < 0.25),
            odd=str(draw.choice(["0", "negative", "inf", "nan"])) if draw.random() < 0.3 else None,
        )

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Name of each projection of an expert to its sizes; gate, where there is one, up, down."""
        gate, up, down = self.family.projections
        if up == gate:  # one module for both, which quantisers take apart
            gate, up, down = "gate_proj", "up_proj", "down_proj"
        wide, narrow = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        return {**({gate: wide} if gate else {}), up: wide, down: narrow}

    @property
    def prefix(self) -> str:
        """Module of the experts of layer 0."""
        path = self.family.experts if self.family.experts.endswith("experts") else f"{self.family.experts}.experts"
        return f"{self.family.layers[0]}.0.{path}"

    @property
    def quantization(self) -> dict[str, Any]:
        """`quantization_config`."""
        kind, shared = self.kind, {"bits": self.bits, "group_size": self.group}
        if kind == "awq":
            return {**shared, "quant_method": "awq", "version": "gemm", "zero_point": True}
        if kind.startswith("gptq"):
            order = {"desc_act": False, "sym": self.symmetric}
            return {**shared, **order, "quant_method": "gptq", "checkpoint_format": kind}
        if kind in ("ct-int", "mxfp4", "ct-nvfp4"):
            integers = {"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "strategy": "group"}
            floats: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "group"}
            weights, name = {
                "ct-int": ({**integers, "group_size": self.group}, "pack-quantized"),
                "mxfp4": ({**floats, "group_size": 32, "scale_dtype": "torch.uint8"}, "mxfp4-pack-quantized"),
                "ct-nvfp4": ({**floats, "strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
            }[kind]
            group = {"targets": ["Linear"], "weights": weights}
            table = {"config_groups": {"group_0": group}, "format": name, "ignore": ["lm_head", "re:.*gate$"]}
            return {**table, "quant_method": "compressed-tensors"}
        if kind in ("fp8-tensor", "fp8-channel", "fp8-block"):
            table = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
            return {**table, "weight_block_size": [128, 128]} if kind == "fp8-block" else table
        algorithm = {"fp8-static": "FP8", "mxfp8": "MXFP8", "nvfp4": "W4A16_NVFP4"}[kind]
        return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}


@dataclass
class Checkpoint:
    """A checkpoint on disk.

    Attributes:
        sizes: module to output and input features, for every quantised one.
        values: module to float64 values.
        biases: module to its bias.
        beside: tensors that are not quantised.
    """

    drawn: Drawn
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    biases: Tensors = field(default_factory=dict)
    beside: Tensors = field(default_factory=dict)


def projection(drawn: Drawn, n: int, k: int, draw: np.random.Generator) -> Tensors:
    """A projection `[n, k]` as the drawn format stores it."""
    kind, groups, top = drawn.kind, -(-k // drawn.group), 2**drawn.bits
    if kind in ("gptq", "gptq_v2", "awq", "ct-int"):
        codes = draw.integers(0, top, (n, k))
        scales = _odd(drawn, draw, draw.random((n, groups)) * 0.02 + 1e-4).half()
        zeros = np.full((n, groups), top // 2) if drawn.symmetric else draw.integers(1, top, (n, groups))
        if kind == "awq":
            return {
                "qweight": _t(awq_words(codes.T)),
                "qzeros": _t(awq_words(zeros.T)),
                "scales": scales.T.contiguous(),
            }
        if kind == "ct-int":
            shape = torch.tensor([n, k])
            parts = {"weight_packed": _t(packed(codes, drawn.bits)), "weight_scale": scales, "weight_shape": shape}
            return parts if drawn.symmetric else {**parts, "weight_zero_point": _t(packed(zeros.T, drawn.bits).T)}
        return {
            "qweight": _t(packed(codes, drawn.bits).T),
            "qzeros": _t(packed((zeros.T - (kind == "gptq")) % top, drawn.bits)),
            "scales": scales.T.contiguous(),
            "g_idx": _t((np.arange(k) // drawn.group).astype(np.int32)),
        }
    if kind in ("mxfp4", "nvfp4", "ct-nvfp4"):
        octets = _t(draw.integers(0, 256, (n, k // 2), dtype=np.uint8))
        if kind == "mxfp4":
            exponents = draw.integers(118, 118 + int(draw.choice([1, 10, 24])), (n, groups), dtype=np.uint8)
            return {"weight_packed": octets, "weight_scale": _t(exponents)}
        scales = _t(draw.integers(0, 0x7F, (n, groups), dtype=np.uint8)).view(torch.float8_e4m3fn)
        factor = float(np.float32(draw.uniform(1e-4, 1e-2))) if draw.random() < 0.5 else 2.0 ** -int(draw.integers(12))
        if kind == "nvfp4":
            return {"weight": octets, "weight_scale": scales, "weight_scale_2": torch.tensor(factor)}
        return {"weight_packed": octets, "weight_scale": scales, "weight_global_scale": torch.tensor([1 / factor])}
    codes8 = draw.integers(0, 256, (n, k), dtype=np.uint8)
    codes8[(codes8 & 0x7F) == 0x7F] = 0x80
    weight = _t(codes8).view(torch.float8_e4m3fn)
    if kind == "mxfp8":
        return {"weight": weight, "weight_scale": _t(draw.integers(110, 130, (n, groups), dtype=np.uint8))}
    shape = {"fp8-channel": (n, 1), "fp8-block": (-(-n // 128), -(-k // 128))}.get(kind, (1,))
    scale = _odd(drawn, draw, np.exp2(draw.uniform(-9, -6, shape)))
    scale = scale[0] if kind == "fp8-static" else scale
    parts = {"weight": weight, "weight_scale_inv" if kind == "fp8-block" else "weight_scale": scale.clone()}
    return {**parts, "input_scale": torch.tensor(0.02)} if kind == "fp8-static" else parts


def _odd(drawn: Drawn, draw: np.random.Generator, scales: Array) -> torch.Tensor:
    """float32 scales, one of them odd where that was drawn."""
    found = scales.astype(np.float32)
    place = int(draw.integers(found.size))
    if drawn.odd and draw.random() < 0.5:
        found.flat[place] = -found.flat[place] if drawn.odd == "negative" else float(drawn.odd)
    return torch.from_numpy(found)


def _t(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def write(folder: Path, drawn: Drawn) -> Checkpoint:
    """Write the checkpoint, over one file or several."""
    draw, floats = np.random.default_rng([drawn.seed, 7]), torch.Generator().manual_seed(drawn.seed)
    made, tensors, family = Checkpoint(drawn), {}, drawn.family
    for expert in range(2):
        for name, (n, k) in drawn.projections.items():
            module = f"{drawn.prefix}.{expert}.{name}"
            parts = projection(drawn, n, k, draw)
            made.sizes[module], made.values[module] = (n, k), decoded(parts, n, k, drawn.kind, drawn.bits)
            if drawn.biased:
                made.biases[module] = torch.randn(n, generator=torch.Generator().manual_seed(expert)).half()
                parts["bias"] = made.biases[module]
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    if drawn.stacked and len(drawn.projections) == 3:
        tensors = _stacked(drawn, tensors)
    layer = f"{family.layers[0]}.0"
    made.beside = {
        f"{layer}.{family.router}.weight": torch.randn(2, drawn.hidden, generator=floats).bfloat16(),
        f"{layer}.input_layernorm.weight": torch.ones(drawn.hidden),
        "model.embed_tokens.weight": torch.randn(16, drawn.hidden, generator=floats).bfloat16(),
        "an.extra.tensor": torch.arange(7),
        "empty": torch.empty(0, 3),
    }
    tied = bool(draw.random() < 0.5)
    if not tied:
        made.beside["lm_head.weight"] = torch.randn(16, drawn.hidden, generator=floats).bfloat16()
    folder.mkdir()
    _save(folder, {**tensors, **made.beside}, draw)
    gpt_oss = {"num_local_experts": 2} if "gpt_oss" in family.model_types else {}
    table: dict[str, Any] = {"model_type": family.model_types[0], "num_hidden_layers": 1, **gpt_oss}
    table |= {
        "hidden_size": drawn.hidden,
        "num_experts_per_tok": 1,
        "num_attention_heads": 2,
        "tie_word_embeddings": tied,
    }
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        table[key] = 2
    table |= {"intermediate_size": drawn.intermediate, "moe_intermediate_size": drawn.intermediate}
    (folder / "config.json").write_text(json.dumps({**table, "quantization_config": drawn.quantization}))
    return made


def _stacked(drawn: Drawn, tensors: Tensors) -> Tensors:
    """Experts as rows of `gate_up_proj` and `down_proj`."""
    found, (gate, up, down) = {}, drawn.projections
    parts = sorted({name.rpartition(".")[2] for name in tensors})
    for part in parts:
        suffix = part.removeprefix("weight_")
        joined = []
        for expert in range(2):
            one, other = (tensors[f"{drawn.prefix}.{expert}.{name}.{part}"] for name in (gate, up))
            joined.append(one + other if part == "weight_shape" else torch.cat([one, other]))
        single = [tensors[f"{drawn.prefix}.{expert}.{down}.{part}"] for expert in range(2)]
        for name, rows in (("gate_up_proj", joined), ("down_proj", single)):
            stack = torch.stack(rows)
            if part == "weight_shape":
                stack = torch.tensor([2, *(rows[0].tolist())])
                if name == "gate_up_proj":
                    stack[2] = drawn.hidden
            found[f"{drawn.prefix}.{name}_{suffix}"] = stack
    return found


def _save(folder: Path, tensors: Tensors, draw: np.random.Generator) -> None:
    """In up to four files, tensors anywhere, with an index, with one file without, or with a file of any name."""
    count, names = int(draw.integers(1, 5)), list(tensors)
    draw.shuffle(names)
    cut = sorted(draw.integers(0, len(names) + 1, count - 1).tolist())
    shares = [names[start:stop] for start, stop in zip([0, *cut], [*cut, len(names)], strict=True)]
    shares = [share for share in shares if share]
    files = [f"model-{number:05}-of-{len(shares):05}.safetensors" for number in range(1, len(shares) + 1)]
    files = ["model.safetensors"] if len(shares) == 1 else files
    for file, share in zip(files, shares, strict=True):
        save_file({name: tensors[name] for name in share}, folder / file, {"format": "pt"})
    if len(files) > 1 and draw.random() < 0.7:
        places = {name: file for file, share in zip(files, shares, strict=True) for name in share}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def read(folder: Path) -> Tensors:
    """All tensors of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def parts_of(tensors: Tensors, module: str) -> Tensors:
    """The tensors of a module."""
    return {name[len(module) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")}
