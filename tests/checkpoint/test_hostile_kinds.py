"""Hostile checkpoints: what is and is not a quantised MoE checkpoint, and what its experts are.

Each input ends in one clear line, or is read and described. The numbers in the names are those of the project's list
of inputs seen in practice; 1, 2, 54, 55 and 56 need a server (`test_hub.py`), 57 and 58 concern writing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    Stored,
    Tensors,
    config,
    ct,
    ct_config,
    experts,
    gptq,
    halved,
    quantization,
    router,
    write,
    write_sharded,
)
from checkpoint.refusals import check, fused_mxfp4, refused, warned

import moeq
from moeq.errors import MoeqError


def test_case_03_dense_model(tmp_path: Path) -> None:
    tensors = {"model.layers.0.mlp.gate_proj.weight": Stored("BF16", (8, 8))}
    refused(write(tmp_path / "a", tensors, config(num_experts=None)), "answer.not-moe", "no routed experts")
    document = {**config(), "num_experts": None}
    error = refused(write(tmp_path / "b", tensors, document), "answer.not-moe", "declares no experts")
    assert "experts.0.gate_proj" in (error.hint or ""), "says what was searched for"


def test_case_04_unquantised_moe(tmp_path: Path) -> None:
    def plain(n: int, k: int) -> Tensors:
        return {"weight": Stored("BF16", (n, k))}

    folder = write(tmp_path, {**router(), **experts(make=plain)}, config(quantization_config=None))
    checkpoint = moeq.open(folder)
    assert checkpoint.info.num_experts == EXPERTS
    assert checkpoint.info.intermediate_size == INTERMEDIATE
    assert checkpoint.info.refusals == ("its experts are not quantised",)
    with pytest.raises(MoeqError) as caught:
        checkpoint.matrix(0, 0, "w13")
    check(caught.value, "source.not-quantized")


@pytest.mark.parametrize("place", ["text_config", "quantize_config.json"])
def test_case_05_quantisation_config_elsewhere(tmp_path: Path, place: str) -> None:
    document = config(quantization_config=None)
    if place == "text_config":
        document = {"model_type": "wrapper", "text_config": {**document, "quantization_config": quantization()}}
    folder = write(tmp_path, None, document)
    if place.endswith(".json"):
        (folder / place).write_text(json.dumps({"bits": 4, "group_size": 32, "sym": True, "desc_act": False}))
    info = moeq.open(folder).info
    assert place in (info.quant_origin or "")
    assert info.schemes[0].scheme.group_size == 32


def test_case_06_partial_snapshot(tmp_path: Path) -> None:
    first, second = halved()
    folder = write_sharded(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    (folder / "b.safetensors").unlink()
    refused(folder, "source.missing-shard", "1 of 2", "b.safetensors")


def test_case_07_git_lfs_pointers(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in (refused(folder, "source.not-safetensors", "Git LFS").hint or "")


def test_case_08_truncated_shard(tmp_path: Path) -> None:
    folder = write(tmp_path)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(folder, "source.truncated", f"{size - 1:,}", f"{size:,}")


def test_case_08_unfinished_download(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").rename(folder / "model.safetensors.incomplete")
    refused(folder, "source.no-weights", "unfinished downloads")


def test_case_09_name_says_awq(tmp_path: Path) -> None:
    warned(write(tmp_path / "Qwen3-30B-AWQ"), "name.says-awq", "gptq")


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"weight": Stored("U8", (64, 1)), "weight.absmax": Stored("F32", (4,))}, "bitsandbytes"),
        ({"W_q": Stored("U8", (4, 4)), "meta": Stored("U8", (4,))}, "HQQ"),
        ({"weight": Stored("U32", (4, 4)), "scales": Stored("F16", (4, 1)), "biases": Stored("F16", (4, 1))}, "MLX"),
        ({"weight": Stored("I8", (4, 4)), "weight_offset": Stored("F32", (4, 1))}, "Ascend"),
        ({"trellis": Stored("I16", (4, 4)), "suh": Stored("F16", (4,))}, "EXL3"),
        ({"codes": Stored("I8", (4, 4)), "codebooks": Stored("F16", (1, 4))}, "AQLM"),
    ],
)
def test_case_10_unsupported_methods_by_their_tensors(tmp_path: Path, parts: Tensors, name: str) -> None:
    folder = write(tmp_path, experts(make=lambda n, k: parts), config(quantization_config=None))
    info = moeq.open(folder).info
    assert any(name in refusal for refusal in info.refusals)
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder).dequantize(0, 0, "gate")
    check(caught.value, "source.unsupported-format", name)


@pytest.mark.parametrize("method", ["exl3", "gguf", "aqlm", "vptq", "some-new-thing"])
def test_case_10_unsupported_methods_by_their_name(tmp_path: Path, method: str) -> None:
    tensors = {"model.layers.0.mlp.experts_packed": Stored("U8", (4,))}
    refused(
        write(tmp_path, tensors, config(quantization_config={"quant_method": method})),
        "source.unsupported-format",
        method,
    )


def test_case_10_other_containers(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    refused(folder, "source.truncated", "GGUF")


def test_case_17_mixed_bits_by_layer_and_expert(tmp_path: Path) -> None:
    rules = {r"+:.*layers\.1\..*": {"bits": 8}, r"-:.*self_attn.*": {}}
    tensors = {**router(), **experts(), **experts("model.layers.1.mlp.experts", bits=8)}
    document = config(num_hidden_layers=2, quantization_config=quantization(dynamic=rules))
    checkpoint = moeq.open(write(tmp_path / "layers", tensors, document))
    assert [use.layers for use in checkpoint.info.schemes] == [(0,), (1,)]
    assert (checkpoint.spec(0, "w13").bits, checkpoint.spec(1, "w13").bits) == (4, 8)
    rules = {r".*experts\.1\.": {"bits": 8}}
    tensors = {**router(), **experts(count=1)}
    tensors |= {name.replace("experts.0.", "experts.1."): stored for name, stored in experts(count=1, bits=8).items()}
    document = config(quantization_config=quantization(dynamic=rules))
    checkpoint = warned(write(tmp_path / "experts", tensors, document), "scheme.mixed-layer")
    assert (checkpoint.spec(0, "w2", 0).bits, checkpoint.spec(0, "w2", 1).bits) == (4, 8)


def test_case_17_mixed_inside_one_fused_tensor(tmp_path: Path) -> None:
    tensors = experts(names=("gate_proj", "", "down_proj")) | experts(names=("", "up_proj", ""), bits=8)
    document = config(quantization_config=quantization(dynamic={r".*up_proj": {"bits": 8}}))
    checkpoint = moeq.open(write(tmp_path, tensors, document))
    assert any("cannot be fused" in refusal for refusal in checkpoint.info.refusals)
    with pytest.raises(MoeqError) as caught:
        checkpoint.spec(0, "w13")
    check(caught.value, "source.inconsistent", "int4", "int8")
    assert checkpoint.spec(0, "gate").bits == 4


def test_case_18_missing_and_unquantised_experts(tmp_path: Path) -> None:
    tensors = {name: stored for name, stored in experts().items() if ".1.up_proj." not in name}
    refused(write(tmp_path / "a", tensors), "source.incomplete-experts", "layer 0", "experts 1", "up")
    plain = {name: stored for name, stored in experts().items() if ".1." not in name.partition("experts")[2]}
    plain |= {
        f"model.layers.0.mlp.experts.1.{name}.weight": Stored("BF16", shape)
        for name, shape in (
            ("gate_proj", (INTERMEDIATE, HIDDEN)),
            ("up_proj", (INTERMEDIATE, HIDDEN)),
            ("down_proj", (HIDDEN, INTERMEDIATE)),
        )
    }
    refused(write(tmp_path / "b", plain), "source.incomplete-experts", "experts 1 are not quantised")


def test_case_18_pruned_layers_may_have_fewer_experts(tmp_path: Path) -> None:
    tensors = {**experts(), **experts("model.layers.1.mlp.experts", 1)}
    checkpoint = moeq.open(write(tmp_path, tensors, config(num_hidden_layers=2)))
    assert checkpoint.info.experts_per_layer == (2, 1)
    assert checkpoint.num_experts(1) == 1


def test_case_19_number_of_experts(tmp_path: Path) -> None:
    refused(write(tmp_path, None, config(num_experts=7)), "source.inconsistent", "7 experts", "have 2")


def test_case_20_synonyms_that_disagree(tmp_path: Path) -> None:
    document = config(num_local_experts=4)
    refused(write(tmp_path, None, document), "source.bad-config", "num_local_experts is 4", "num_experts is 2")


def test_case_21_latent_experts(tmp_path: Path) -> None:
    document = config(hidden_size=HIDDEN * 2)
    refused(write(tmp_path / "a", None, document), "source.inconsistent", "64", "128")
    info = moeq.open(write(tmp_path / "b", None, {**document, "moe_latent_size": HIDDEN})).info
    assert (info.hidden_size, info.expert_input_size) == (HIDDEN * 2, HIDDEN)


def test_case_22_experts_without_gate(tmp_path: Path) -> None:
    checkpoint = moeq.open(write(tmp_path, experts(names=("", "up_proj", "down_proj"))))
    assert not checkpoint.info.gated
    spec = checkpoint.spec(0, "w13")
    assert (spec.n, spec.gated) == (INTERMEDIATE, False)
    assert checkpoint.matrix(0, 0, "w13").codes.shape == (INTERMEDIATE, HIDDEN)


def test_case_23_multi_token_prediction(tmp_path: Path) -> None:
    tensors = {**experts(), **experts("model.layers.1.mlp.experts", bits=8)}
    document = config(
        num_nextn_predict_layers=1, quantization_config=quantization(dynamic={r".*layers\.1\.": {"bits": 8}})
    )
    checkpoint = warned(write(tmp_path / "a", tensors, document), "mtp.not-converted")
    assert (checkpoint.info.moe_layers, checkpoint.info.mtp_layers) == ((0,), (1,))
    assert not any(".layers.1." in name for name in checkpoint.source.expert_names)
    assert checkpoint.spec(1, "w13").bits == 8
    tensors = {**experts(), **experts("mtp.layers.0.mlp.experts")}
    checkpoint = moeq.open(write(tmp_path / "b", tensors, config(num_nextn_predict_layers=1)))
    assert (checkpoint.info.moe_layers, checkpoint.info.mtp_layers) == ((0,), (1,))
    warned(write(tmp_path / "c", None, config(num_nextn_predict_layers=1)), "mtp.absent")


def test_case_24_transposed_stacks(tmp_path: Path) -> None:
    tensors = {
        "model.language_model.layers.0.mlp.experts.gate_up_proj": Stored("BF16", (EXPERTS, HIDDEN, 2 * INTERMEDIATE)),
        "model.language_model.layers.0.mlp.experts.down_proj": Stored("BF16", (EXPERTS, INTERMEDIATE, HIDDEN)),
    }
    document = config(model_type="qwen3_vl_moe_text", quantization_config=None)
    info = moeq.open(write(tmp_path, tensors, document)).info
    assert (info.hidden_size, info.expert_input_size, info.intermediate_size) == (HIDDEN, HIDDEN, INTERMEDIATE)


def test_case_25_fused_gate_up_of_an_unknown_family(tmp_path: Path) -> None:
    document = config(model_type="never_seen", quantization_config={"quant_method": "mxfp4"})
    checkpoint = moeq.open(write(tmp_path, fused_mxfp4(), document))
    assert checkpoint.info.family_from_names
    assert any("alternate" in refusal for refusal in checkpoint.info.refusals)
    with pytest.raises(MoeqError) as caught:
        checkpoint.matrix(0, 0, "gate")
    check(caught.value, "source.unknown-order")


def test_case_32_quantised_router(tmp_path: Path) -> None:
    tensors = {f"model.layers.0.mlp.gate.{part}": stored for part, stored in gptq(8, HIDDEN).items()}
    checkpoint = warned(write(tmp_path, {**tensors, **experts()}), "module.router-quantized", "model.layers.0.mlp.gate")
    assert next(use for use in checkpoint.info.modules if use.part == "router").quantized == 1


def test_case_52_layers_beyond_the_declared(tmp_path: Path) -> None:
    tensors = {**experts(), **experts("model.layers.7.mlp.experts")}
    checkpoint = warned(write(tmp_path, tensors), "mtp.undeclared", "7")
    assert checkpoint.info.mtp_layers == (7,)
    assert moeq.open(write(tmp_path, tensors, config(num_hidden_layers=9))).info.dense_layers == (1, 2, 3, 4, 5, 6, 8)


def test_case_59_code_in_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    document = config(auto_map={"AutoConfig": "evil.Evil"}, trust_remote_code=True)
    folder = write(tmp_path, None, document)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert moeq.open(folder).info.num_experts == EXPERTS
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rotation": "hadamard"}, "rotated"),
        ({"is_marlin_format": True}, "Marlin"),
        ({"checkpoint_format": "bitblas"}, "BitBLAS"),
        ({"pack_dtype": "int64"}, "int64"),
    ],
)
def test_case_60_transformed_gptq(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    folder = write(tmp_path, None, config(quantization_config=quantization(**changes)))
    assert any(says in refusal for refusal in moeq.open(folder).info.refusals)


@pytest.mark.parametrize(
    "changes",
    [
        {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
    ],
)
def test_case_60_transformed_compressed_tensors(tmp_path: Path, changes: dict[str, Any]) -> None:
    document = ct_config()
    document["quantization_config"] |= changes
    assert moeq.open(write(tmp_path, experts(make=ct(4)), document)).info.refusals
