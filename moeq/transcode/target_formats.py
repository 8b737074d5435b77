"""Targets of `--to`: which projections each takes, how it spells them, and its config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.schemes.format import Described
from moeq.schemes.registry import get_format
from moeq.spelling import option
from moeq.transcode import configs
from moeq.transcode.configs import Contents
from moeq.transcode.spellings import BLOCK, KT_AMX


@dataclass(frozen=True)
class TargetFormat:
    """A checkpoint format that can be written."""

    id: str  #: name for `--to`
    title: str
    spellings: dict[str, str]  #: kind of a projection to the spelling that stores it
    config: Callable[[Contents], dict[str, Any]] | None  #: the quantisation config; None for floats, which have none
    #: Name and content of the file in which the format's tools also keep the config.
    side_config: Callable[[Mapping[str, Any]], tuple[str, Mapping[str, Any]]] | None = None
    element: str | None = None  #: element of targets that are not quantised: `bf16`, `f16` or `f32`
    model_types: tuple[str, ...] = ()  #: the only models whose engines read the target; empty for all
    stackable: bool = False  #: whether the format's tools also write tensors that hold all experts
    bits: tuple[int, ...] = ()  #: widths of integer codes that all readers unpack alike; empty for all
    #: Spellings for projections with one static activation scale and one weight scale per tensor.
    static: Mapping[str, str] = field(default_factory=dict)
    #: Spellings of routed experts by kind of source, where they differ from those of other modules.
    of_experts: Mapping[str, str] = field(default_factory=dict)
    #: Whether only routed experts are written, for a reader that takes the rest from elsewhere.
    experts_only: bool = False
    pack: bool = False  #: whether experts are written as SGLang's expert pack instead of safetensors

    def spelling(self, described: Described, where: str, *, static: bool = False) -> str:
        """Return the id of a projection's spelling. Raises MoeqError `usage.target` with what would work."""
        scheme = described.scheme
        refusal = get_format(scheme.format).refusal_of(scheme) if scheme.format in _UNREADABLE else None
        kind = kind_of(described)
        bits = described.spec.bits
        if kind == "int" and self.bits and bits not in self.bits:
            known = ", ".join(map(str, self.bits))
            refusal = f"{option('to', self.id)} takes codes of {known} bits, and readers disagree about {bits}"
        # Projections that are not quantised have no codes to transcode; only experts-only targets write them.
        copied = scheme.format == "unquantized" and not self.experts_only
        if kind in self.spellings and refusal is None and not copied:
            per_tensor = static and scheme.weight.scale.granularity == "tensor"
            if kind in self.of_experts and ".experts" in where:
                return self.of_experts[kind]
            return self.static.get(kind, self.spellings[kind]) if per_tensor else self.spellings[kind]
        stored = ", ".join(_TITLES[kind] for kind in self.spellings)
        reason = refusal or f"{option('to', self.id)} stores {stored}, but not {_TITLES[kind]}"
        others = [] if refusal else [other.id for other in ENGINE_TARGETS.values() if kind in other.spellings]
        others = others or (["compressed-tensors"] if self.bits else [])
        hint = ", ".join(option("to", other) for other in others) or None
        raise MoeqError("usage.target", f"{where} is {get_format(scheme.format).title_of(scheme)}: {reason}", hint)

    def spec(self, described: Described, spelling: str, regroup: int | None) -> MatrixSpec:
        """Return the sizes and types of a projection under a spelling."""
        spec = described.spec
        plain = replace(spec, symmetric=True, act_order=False)
        if spelling == "plain":
            # Floats beside quantised weights are written in float32, which keeps every value; engines round them.
            return replace(plain, element=self.element or "f32", group_size=spec.k, scale_dtype="f32")
        if spelling.startswith(KT_AMX):
            nodes = int(spelling.rpartition("/")[2]) if spec.role in ("down", "w2") else 1
            element = "int8" if "int8" in spelling else "int4"
            return replace(plain, element=element, group_size=spec.k // nodes, scale_dtype="f32", bias_dtype=None)
        if "nvfp4" in spelling:
            return replace(spec, group_size=16, scale_dtype="e4m3")
        if spelling == "deepseek-fp8":
            return replace(plain, element="e4m3", scale_dtype="e8m0")
        if "fp8-block" in spelling:
            blocks = kind_of(described) == "fp8-block" and spec.element == "e4m3"
            kept = blocks and spec.scale_dtype != "e8m0" and "modelopt" not in spelling
            scale = spec.scale_dtype if kept else "f32"
            return replace(plain, element="e4m3", group_size=min(BLOCK, spec.k), scale_dtype=scale)
        if spelling in ("modelopt-fp8", "modelopt-fp8-channel"):
            return replace(spec, scale_dtype="f32")
        if spelling in ("ct-pack", "gptq") and regroup:
            return replace(spec, group_size=min(regroup, spec.k))
        return spec


#: Formats whose matrices alone do not determine what an engine computes.
_UNREADABLE = ("foreign", "modelopt-int4")

_TITLES = {
    "int": "packed integers",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "fp8": "FP8 per channel or tensor",
    "fp8-block": "block-scaled FP8",
    "mxfp8": "MXFP8",
    "float": "floats",
}


def kind_of(described: Described) -> str:
    """Return the kind of a projection, a key of `_TITLES`, whatever its spelling."""
    spec, scale = described.spec, described.scheme.weight.scale
    if spec.bits > 8:
        return "float"
    if spec.integer:
        # SGLang's int8 blocks have no other spelling.
        return "fp8-block" if scale.granularity == "block" else "int"
    if spec.element == "e2m1":
        return "mxfp4" if spec.scale_dtype == "e8m0" else "nvfp4"
    if scale.granularity == "block":
        return "fp8-block"
    return "fp8" if spec.num_groups == 1 and spec.scale_dtype != "e8m0" else "mxfp8"


_ALL_QUANTISED = ("int", "mxfp4", "nvfp4", "fp8", "fp8-block", "mxfp8")

#: Every kind; `float` are GGUF types whose blocks are no codes under scales.
_ALL = (*_ALL_QUANTISED, "float")

TARGETS: dict[str, TargetFormat] = {
    target.id: target
    for target in (
        TargetFormat(
            "compressed-tensors",
            "compressed-tensors: pack-quantized, mxfp4-, nvfp4-pack-quantized, float- or mxfp8-quantized",
            {
                "int": "ct-pack",
                "mxfp4": "ct-mxfp4",
                "nvfp4": "ct-nvfp4",
                "fp8": "ct-fp8",
                "fp8-block": "ct-fp8-block",
                "mxfp8": "ct-mxfp8",
            },
            configs.compressed_tensors,
            stackable=True,
            static={"fp8": "ct-fp8-tensor"},
        ),
        TargetFormat(
            "gptq",
            "GPTQ, zero points minus one (v1)",
            {"int": "gptq"},
            partial(configs.gptq, variant="gptq"),
            side_config=configs.gptq_side,
            bits=(2, 4, 8),
        ),
        TargetFormat(
            "gptq_v2",
            "GPTQ, zero points as they are (v2)",
            {"int": "gptq"},
            partial(configs.gptq, variant="gptq_v2"),
            side_config=configs.gptq_side,
            bits=(2, 3, 4, 8),
        ),
        TargetFormat(
            "mxfp4",
            "gpt-oss' MXFP4: stacked blocks and scales",
            {"mxfp4": "gpt-oss"},
            configs.gpt_oss,
            model_types=("gpt_oss",),
        ),
        TargetFormat(
            "deepseek-v4",
            "DeepSeek-V4's FP4 experts, everything else in FP8 blocks, with exponent bytes as scales",
            {"mxfp4": "deepseek-fp4", "fp8-block": "deepseek-fp8"},
            configs.deepseek_v4,
            model_types=("deepseek_v4", "deepseek_ref"),
        ),
        TargetFormat(
            "fp8",
            "block-scaled FP8, 128 x 128 (DeepSeek, Qwen, GLM)",
            dict.fromkeys(_ALL, "fp8-block"),
            configs.fp8_blocks,
        ),
        TargetFormat(
            "modelopt",
            "ModelOpt: FP8 per tensor, channel or block, MXFP8, NVFP4",
            {
                "fp8": "modelopt-fp8-channel",
                "fp8-block": "modelopt-fp8-block",
                "mxfp8": "modelopt-mxfp8",
                "nvfp4": "modelopt-nvfp4",
            },
            configs.modelopt,
            side_config=configs.modelopt_side,
            static={"fp8": "modelopt-fp8"},
            # vLLM's class for mixed tables loads experts with FP8 blocks by DeepSeek's method (0.30.0 to 0.33.0).
            of_experts={"fp8-block": "fp8-block"},
        ),
        TargetFormat(
            "nvfp4",
            "NVFP4 as ModelOpt writes it",
            {"mxfp4": "modelopt-nvfp4", "nvfp4": "modelopt-nvfp4"},
            configs.modelopt,
            side_config=configs.modelopt_side,
        ),
        TargetFormat(
            "nvfp4-compressed-tensors",
            "NVFP4 as compressed-tensors writes it",
            {"mxfp4": "ct-nvfp4", "nvfp4": "ct-nvfp4"},
            configs.compressed_tensors,
        ),
        *(
            TargetFormat(
                format_id,
                f"experts for ktransformers' {format_id[-4:]} kernels on a CPU, cut by NUMA node",
                dict.fromkeys(_ALL, format_id),
                partial(configs.kt_amx, method=format_id),
                experts_only=True,
            )
            for format_id in KT_AMX
        ),
        TargetFormat(
            "expert-pack",
            "SGLang's expert pack: DeepSeek-V4's MXFP4 experts, one after the other, with a hash each",
            {"mxfp4": "gguf-mxfp4"},
            configs.gguf,
            model_types=("deepseek_v4",),
            experts_only=True,
            pack=True,
        ),
        *(
            TargetFormat(
                name, f"{dtype}, not quantised", dict.fromkeys(_ALL, "plain"), None, element=element, stackable=True
            )
            for name, dtype, element in (
                ("bf16", "bfloat16", "bf16"),
                ("fp16", "float16", "f16"),
                ("fp32", "float32", "f32"),
            )
        ),
    )
}

#: Targets that hold a whole model.
ENGINE_TARGETS = {name: target for name, target in TARGETS.items() if not target.experts_only}


def get_target(name: str) -> TargetFormat:
    """Return the target of that name. Raises MoeqError `usage.target`."""
    if name not in TARGETS:
        raise MoeqError("usage.target", f"no format is called {name!r}", f"{option('to')} takes {', '.join(TARGETS)}")
    return TARGETS[name]
