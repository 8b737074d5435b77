"""Transcoded models compute what their sources mean: transformers' logits on a CPU, for every source and target.

Where transformers reads a result itself (floats; FP8 blocks and gpt-oss' MXFP4, which it dequantises), it does; the
others are read by moeq's readers, and transformers gets the values. What vLLM refuses of a result is said beforehand.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transcode.libraries import parts_of, source_values, tensors_of, with_names_of_mixtral

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.plan.expert_names import with_names
from moeq.pipeline.plan.layer_verdict import judge_checkpoint
from moeq.transcode.result_check import GPUS
from moeq.transcode.target_formats import ENGINE_TARGETS
from moeq.transcode.transcode import transcode

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
SOURCES = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Targets without a place for a source's codes, or for its order of columns.
REFUSALS = ("usage.target", "usage.act-order")
OF_ONE_FAMILY = ("deepseek-v4",)
TOKENS = torch.arange(12).view(1, 12) % 32


def logits(folder: Path, method: str = "") -> torch.Tensor:
    """Logits of a few tokens, in float32, with every tensor's name known to transformers.

    It dequantises a checkpoint of `method`.
    """
    transformers = pytest.importorskip("transformers")
    readers = {"fp8": transformers.FineGrainedFP8Config, "mxfp4": transformers.Mxfp4Config}
    options: dict[str, Any] = {"quantization_config": readers[method](dequantize=True)} if method else {}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16 if method else torch.float32,
        output_loading_info=True,
        attn_implementation="eager",
        **options,
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with torch.no_grad():
        found: torch.Tensor = model.float()(TOKENS).logits
    return found


def plain(source: Path, out: Path, dtype: torch.dtype) -> Path:
    """The same model with the values of all quantised modules as numbers, rounded to a type."""
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    tensors, values = tensors_of(source), dict(source_values(source))
    named = with_names_of_mixtral if config["model_type"] == "mixtral" else str
    modules = tuple(f"{name}." for module in values for name in (module, with_names_of_mixtral(module)))
    found = {named(name): value for name, value in tensors.items() if not name.startswith(modules)}
    for module, value in values.items():
        found[f"{named(module)}.weight"] = value.to(dtype)
        bias = parts_of(tensors, module).get("bias")
        if bias is not None:
            found[f"{named(module)}.bias"] = bias
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in found.items()}, out / "model.safetensors")
    return out


@cache
def meant(source: Path, scratch: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of a source, by its values."""
    if source.name == "mxfp4-gptoss":
        return logits(source, "mxfp4")
    return logits(plain(source, scratch / f"{source.name}-{dtype}", dtype))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


#: Pairs that run with every test: names of another family's tools, blocks that no rank gets whole, floats, stacks.
FAST = (
    ("ct-int4-asym-g32-mixtral", "fp8"),
    ("gptq-int4-g128-mixtral", "gptq_v2"),
    ("gptq-int4-g32-actorder-qwen3moe", "compressed-tensors"),
    ("modelopt-nvfp4-qwen3moe", "bf16"),
    ("mxfp4-gptoss", "mxfp4"),
)

#: Every source to every target, but for those of one family, and gpt-oss' experts one by one: its class in
#: transformers knows stacks alone.
PAIRS = [
    pytest.param(name, target, marks=() if (name, target) in FAST else pytest.mark.slow, id=f"{name}-{target}")
    for name in SOURCES
    for target in ENGINE_TARGETS
    if target not in OF_ONE_FAMILY and (name != "mxfp4-gptoss" or target in (*FLOATS, "mxfp4"))
]


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_every_result_computes_the_same(name: str, target: str, scratch: Path, tmp_path: Path) -> None:
    source, out = CHECKPOINTS / name, tmp_path / "out"
    try:
        written = transcode(source, out, target, allow_lossy=True)
    except MoeqError as refusal:
        if refusal.code not in REFUSALS:
            raise
        return
    method = json.loads((out / "config.json").read_text()).get("quantization_config", {}).get("quant_method")
    if target in FLOATS:
        found, expected = logits(out), meant(source, scratch, FLOATS[target])
    elif method in ("fp8", "mxfp4"):
        found, expected = logits(out, method), meant(source, scratch, torch.bfloat16)
    else:
        found = logits(plain(out, tmp_path / "plain", torch.float32))
        expected = meant(source, scratch, torch.float32)
    error = float((found - expected).norm() / expected.norm())
    assert error < (1e-5 if written.exact else 0.2), (error, written.exact)
    result, places = moeq.open(out), [Deployment(parse_gpu(gpu)) for gpu in GPUS]
    verdicts = [with_names(result, judge_checkpoint(result, where, explain=False), 0) for where in places]
    told = [text for text in written.warnings if text.startswith("vLLM runs the result on none of ")]
    assert bool(told) is not any(verdict.ok for verdict in verdicts), (told, verdicts)
    assert not told or any(verdict.refusal in told[0] for verdict in verdicts), told
