"""ktransformers' expert files: bytes of the library's own C++, what they decode to, and whole checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from refusing import refuses
from safetensors.torch import load_file

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.model import open as open_checkpoint
from moeq.model.tensor_bytes import as_bytes
from moeq.schemes.format import PartSig
from moeq.schemes.kt_amx import KtAmx, quantized, scale_part, weight_part
from moeq.schemes.registry import get_format
from moeq.transcode.transcode import check, transcode

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "formats" / "kt_amx.json").read_text())["vectors"]


def values(n: int, k: int) -> torch.Tensor:
    """The numbers of which the library's bytes were recorded."""
    i = torch.arange(n * k).reshape(n, k)
    whole = (i * 7919 + i * i % 104729) % 2039 - 1019
    return (whole.float() / 4096 * (1 + i[:, :1] % 5)).to(torch.bfloat16).float()


def format_of(bits: int) -> KtAmx:
    found = get_format(f"kt-amx-int{bits}")
    assert isinstance(found, KtAmx)
    return found


def packed(matrix: Any, nodes: int) -> dict[str, torch.Tensor]:
    found = format_of(matrix.spec.bits)
    parts = {}
    for part, signature in found.signatures(matrix.spec, nodes).items():
        tensor = found.repack(matrix, part, signature, None)  # type: ignore[arg-type]
        assert tensor is not None
        assert tuple(tensor.shape) == signature.shape
        parts[part] = tensor
    return parts


def spec_of(role: Any, n: int, k: int, bits: int, group: int) -> MatrixSpec:
    return MatrixSpec(role, n, k, f"int{bits}", group, "f32")


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("role", ["up", "down"])
@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"int{vector['bits']}-{vector['n']}x{vector['k']}")
def test_bytes_of_the_library(vector: dict[str, Any], role: str, nodes: int) -> None:
    """Each node's run is the recorded matrix; nodes have runs of rows, or of columns in the down projection."""
    n, k, bits = vector["n"], vector["k"], vector["bits"]
    whole = torch.cat([values(n, k)] * nodes, dim=1 if role == "down" else 0)
    matrix = quantized(whole, spec_of(role, *whole.shape, bits, k))
    parts = packed(matrix, nodes)
    for node in range(nodes):
        for part, digest in ((weight_part(node), vector["weight"]), (scale_part(node), vector["scale"])):
            assert hashlib.sha256(as_bytes(parts[part])).hexdigest() == digest
    again = format_of(bits).unpack(parts, matrix.spec, None)  # type: ignore[arg-type]
    assert torch.equal(again.codes, matrix.codes)
    assert torch.equal(again.scales, matrix.scales)


def test_rows_too_small_for_an_inverse_become_zeros() -> None:
    matrix = quantized(torch.full((32, 64), 1e-38), spec_of("up", 32, 64, 8, 64))
    assert bool((matrix.codes == 128).all())
    assert bool((quantized(torch.zeros(32, 64), spec_of("up", 32, 64, 8, 64)).codes == 128).all())


@pytest.mark.cover(every=3)
@pytest.mark.parametrize(("bits", "nodes"), [(4, 1), (8, 1), (8, 2)])
def test_whole_checkpoint(checkpoints: Path, tmp_path: Path, bits: int, nodes: int) -> None:
    """From int4 without a bfloat16 copy: experts alone, by the names that kt-kernel's loader asks for."""
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    found = transcode(source, tmp_path / "out", f"kt-amx-int{bits}", allow_lossy=True, numa=nodes)
    assert len(found.losses) == found.projections
    assert all(loss.relative < (0.2 if bits == 4 else 0.02) for loss in found.losses)
    written = {k: v for file in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(file).items()}
    opened = open_checkpoint(source)
    experts = opened.num_experts(0)
    assert len(written) == len(opened.info.moe_layers) * experts * 3 * nodes * 2
    for projection, name in (("gate", "ffn_gate_exps"), ("up", "ffn_up_exps"), ("down", "ffn_down_exps")):
        dense = opened.dequantize(0, 1, projection)  # type: ignore[arg-type]
        group = dense.shape[1] // (nodes if projection == "down" else 1)
        expected = packed(quantized(dense, spec_of(projection, *dense.shape, bits, group)), nodes)
        for part, tensor in expected.items():
            assert torch.equal(written[f"blk.0.{name}.1.{part}"], tensor)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": f"kt-amx-int{bits}"}


def test_refusals(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    with pytest.raises(MoeqError, match="cannot hold all values") as caught:
        transcode(source, tmp_path / "out", "kt-amx-int4", numa=1)
    assert caught.value.code == "answer.not-exact"
    for numa, words in ((4, "a multiple of 32 rows, 128 columns"), (9, "1 to 8 NUMA nodes"), (0, "1 to 8 NUMA nodes")):
        with pytest.raises(MoeqError, match=words) as caught:
            check(source, "kt-amx-int4", numa=numa)
        assert caught.value.code == "usage.target"
    with pytest.raises(MoeqError, match="has a bias"):
        check(checkpoints / "mxfp4-gptoss", "kt-amx-int8", numa=1)
    with pytest.raises(MoeqError, match="names of its own"):
        check(source, "kt-amx-int8", numa=1, names="mlp")


def test_numbers_that_bfloat16_does_not_hold() -> None:
    whole = torch.ones(32, 64)
    whole[3, 4] = torch.finfo(torch.float32).max
    with refuses("source.bad-data", "some numbers are not finite in bfloat16"):
        quantized(whole, spec_of("up", 32, 64, 8, 64))


def test_rows_of_all_nodes_count() -> None:
    parts = {
        name: PartSig("F32", (32 * (1 + node),)) for node in range(3) for name in (weight_part(node), scale_part(node))
    }
    assert format_of(8).out_features(parts) == 32 + 64 + 96
