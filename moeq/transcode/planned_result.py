"""The result of a transcoding before it is written: its config and headers, opened like any checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.model.checkpoint import Checkpoint
from moeq.pipeline.state.publish import without_quantization
from moeq.transcode.transcode_plan import TranscodePlan

#: Config key with the format of DeepSeek-V4's experts; engines assume FP4 where it is missing.
EXPERT_DTYPE = "expert_dtype"
_EXPERT_DTYPES = {"deepseek-fp4": "fp4", "deepseek-fp8": "fp8", "fp8-block": "fp8"}

#: Config keys of a model's dtype.
_DTYPE_KEYS = ("dtype", "torch_dtype")
_DTYPE_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


class _PlannedSource(Source):
    """Config and headers of files that are not written yet."""

    def path(self, file: str) -> Path:
        raise MoeqError("source.missing-file", f"{file} is planned and not written yet")


def planned_result(checkpoint: Checkpoint, plan: TranscodePlan) -> Checkpoint:
    """Return the checkpoint that a plan will write, with headers and without data."""
    source = _PlannedSource(checkpoint.source.name, written_config(checkpoint.source.config, plan), {})
    source.tensors = {
        name: TensorEntry(name, dtype, shape, file.name, *file.form.ranges[name])
        for file in plan.files
        for name, (shape, dtype) in file.tensors.items()
    }
    return Checkpoint(source)


def written_config(config: Mapping[str, Any], plan: TranscodePlan) -> dict[str, Any]:
    """Make `config.json`: the source's, with the target's quantisation config instead of the source's.

    For an expert pack it is the source's, unchanged, which SGLang's loader expects.
    """
    if plan.target.pack:
        return dict(config)
    found = _with_expert_dtype(without_quantization(config), plan)
    if plan.config is not None:
        return {**found, "quantization_config": dict(plan.config)}
    name = _DTYPE_NAMES[plan.target.element or "bf16"]
    if not any(key in found for key in _DTYPE_KEYS):
        found["torch_dtype"] = name
    return dict(_with_dtype(found, name))


def _with_dtype(config: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a config in which all dtypes, of the model and of its parts, are `name`."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield key, dict(_with_dtype(value, name))
        else:
            yield key, name if key in _DTYPE_KEYS and isinstance(value, str) else value


def _with_expert_dtype(config: Mapping[str, Any], plan: TranscodePlan) -> dict[str, Any]:
    """Return a model's config in which DeepSeek-V4's `expert_dtype` describes the written experts."""
    family = plan.survey.family
    if family is None or "deepseek_v4" not in family.model_types:
        return dict(config)
    found = {key: value for key, value in config.items() if key != EXPERT_DTYPE}
    spellings = (projected.spelling for layer in plan.survey.layers for projected in layer.kinds[0].values())
    value = next((_EXPERT_DTYPES[name] for name in spellings if name in _EXPERT_DTYPES), None)
    return found if value is None else {**found, EXPERT_DTYPE: value}
