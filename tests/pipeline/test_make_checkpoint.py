"""The generator of random checkpoints: what it writes is what a real model of that format looks like to moeq."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from bench_scripts import make_checkpoint as generator
from safetensors import safe_open

import moeq

PAIRS = [(model, kind) for model, row in generator.MODELS.items() for kind in row.formats]
TINY = generator.MODELS["tiny"]
SCHEMES = {"gptq": "gptq int4 g128 sym", "awq": "awq int4 g128", "ct-int4": "ct-pack int4 g32 sym"}
SCHEMES |= {"w8a8": "ct-int8 int8", "mxfp4": "mxfp4 e2m1 g32 sym", "nvfp4": "nvfp4", "mxfp8": "mxfp8"}
SCHEMES |= {"fp8-tensor": "fp8", "fp8-channel": "fp8", "fp8-block": "fp8-block", "fp8-block-f32": "fp8-block"}


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every tensor's bytes, wherever it lies."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                data = file.get_tensor(name).contiguous().flatten().view(torch.uint8).numpy().tobytes()
                found[name] = hashlib.sha256(data).hexdigest()
    return found


@pytest.mark.cover
@pytest.mark.parametrize(("model", "kind"), PAIRS)
def test_moeq_recognises_every_model_and_format(model: str, kind: str, tmp_path: Path) -> None:
    size = generator.Size(layers=2, shard_bytes=1 << 30)
    total = generator.write_checkpoint(tmp_path, generator.MODELS[model], kind, size, sparse=True)
    info, wanted = moeq.open(tmp_path).info, generator.MODELS[model]
    assert info.schemes[0].title.startswith(SCHEMES[kind])
    assert info.num_experts == wanted.num_experts
    assert (info.hidden_size, info.moe_layers) == (wanted.hidden, tuple(range(wanted.dense, wanted.dense + 2)))
    assert info.expert_bytes + info.other_bytes == total
    assert {warning.code for warning in info.warnings} <= {"scheme.bias"}


@pytest.mark.slow
def test_the_seed_decides_the_bytes_and_the_files_do_not(tmp_path: Path) -> None:
    one, small, other = tmp_path / "one", tmp_path / "small", tmp_path / "other"
    generator.write_checkpoint(one, TINY, "gptq", seed=1)
    generator.write_checkpoint(small, TINY, "gptq", generator.Size(shard_bytes=1 << 17), seed=1)
    generator.write_checkpoint(other, TINY, "gptq", seed=2)
    assert len(list(small.glob("*.safetensors"))) > 3
    assert digests(one) == digests(small)
    values = {name for name, digest in digests(one).items() if digest == digests(other)[name]}
    assert {name.rpartition(".")[2] for name in values} == {"g_idx", "qzeros"}, "only these are not random"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind"), [("tiny", kind) for kind in TINY.formats])
def test_values_are_finite(model: str, kind: str, tmp_path: Path) -> None:
    generator.write_checkpoint(tmp_path, generator.MODELS[model], kind)
    values = moeq.open(tmp_path).dequantize(0, 3, "down")
    assert torch.isfinite(values).all()
    assert 0.001 < values.abs().mean() < 10


def test_a_format_that_the_model_does_not_come_in(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gpt_oss is written as mxfp4, not as gptq"):
        generator.write_checkpoint(tmp_path, generator.MODELS["gpt-oss-20b"], "gptq")
