"""`moeq transcode` from GGUF: values against blocks that are decoded on their own, names, exactness, refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import SIZES, gguf_bytes, moe_metadata, moe_tensors, random_tensor, write_model
from safetensors.torch import load_file

from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.schemes.dequantize import dequantize
from moeq.transcode import transcode_plan
from moeq.transcode.transcode import check, transcode

#: Sizes and types of some models are drawn: more seeds find more.
SEEDS = range(int(os.environ.get("MOEQ_RANDOM", "4")))


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def q8_0_values(raw: bytes) -> np.ndarray:
    """Dequantise Q8_0 blocks with numpy alone."""
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, 34)
    return blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("kind", "target", "bits"),
    [("q4_0", "compressed-tensors", 4), ("q8_0", "compressed-tensors", 8), ("q5_0", "gptq", 8), ("iq4_nl", "gptq", 8)],
)
def test_integers_are_exact(tmp_path: Path, kind: str, target: str, bits: int) -> None:
    source = write_model(tmp_path / "m.gguf", expert_type=kind)
    found = transcode(source, tmp_path / "out", target)
    assert found.exact
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert after.spec(0, "up").bits == bits
    for layer in (0, 1):
        for expert in range(4):
            for projection in ("gate", "up", "down"):
                assert torch.equal(
                    before.dequantize(layer, expert, projection), after.dequantize(layer, expert, projection)
                )


def test_experts_are_the_blocks_of_the_file(tmp_path: Path) -> None:
    """Row `n` of expert `e` is the block row `e * N + n`, decoded with numpy alone."""
    tensors = moe_tensors(np.random.default_rng(3), layers=1, expert_type="q8_0")
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf_bytes(moe_metadata("qwen3moe", layers=1, hidden=256, inner=256, experts=4), tensors))
    expected = q8_0_values(tensors["blk.0.ffn_up_exps.weight"][2]).reshape(4, 256, 256)
    checkpoint = open_checkpoint(source)
    for expert in range(4):
        assert np.array_equal(checkpoint.dequantize(0, expert, "up").numpy(), expected[expert])


def test_mxfp4_of_gpt_oss(tmp_path: Path) -> None:
    """Stacks, interleaved rows and biases are those of OpenAI's format; attention keeps its values in float32."""
    tensors = moe_tensors(np.random.default_rng(4), layers=1, expert_type="mxfp4")
    rng = np.random.default_rng(5)
    for name in ("gate", "up", "down"):
        bias = rng.standard_normal((4, 256)).astype(np.float32)
        tensors[f"blk.0.ffn_{name}_exps.bias"] = ("f32", bias.shape, bias.tobytes())
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf_bytes(moe_metadata("gpt-oss", layers=1, hidden=256, inner=256, experts=4), tensors))
    assert transcode(source, tmp_path / "out", "mxfp4").exact
    written = loaded(tmp_path / "out")
    assert written["model.layers.0.mlp.experts.gate_up_proj_blocks"].shape == (4, 512, 8, 16)
    gate_bias = np.frombuffer(tensors["blk.0.ffn_gate_exps.bias"][2], np.float32).reshape(4, 256)
    assert np.array_equal(written["model.layers.0.mlp.experts.gate_up_proj_bias"][:, 0::2].numpy(), gate_bias)
    assert written["model.layers.0.self_attn.o_proj.weight"].dtype == torch.float32
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for projection in ("gate", "up", "down"):
        assert torch.equal(before.dequantize(0, 3, projection), after.dequantize(0, 3, projection))
    assert transcode(source, tmp_path / "ct", "compressed-tensors").exact


def test_rotary_rows_of_floats_are_turned_back(tmp_path: Path) -> None:
    """Queries that are not quantised are copied, in the model's order."""
    tensors = moe_tensors(np.random.default_rng(6), layers=1, other_type="f32")
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf_bytes(moe_metadata("llama", layers=1, hidden=256, inner=256, experts=4), tensors))
    transcode(source, tmp_path / "out", "compressed-tensors")
    model = loaded(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"].numpy()
    stored = np.frombuffer(tensors["blk.0.attn_q.weight"][2], np.float32).reshape(256, 256)
    assert np.array_equal(model.reshape(4, 2, -1, 256).swapaxes(1, 2).reshape(-1, 256), stored)


@pytest.mark.cover("seed", every=4)
@pytest.mark.parametrize("seed", SEEDS)
def test_rotary_rows_are_turned_back(seed: int, tmp_path: Path) -> None:
    """Mixtral's queries and keys get their two halves per head back, blocks and all."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng([6, seed])
    queries = int(rng.choice([2, 4, 8]))
    heads = {"attn_q": queries, "attn_k": int(rng.choice([1, 2, queries]))}
    tensors = moe_tensors(rng, layers=1)
    for name, count in heads.items():
        kind = str(rng.choice(["q8_0", "q4_k", "q6_k", "iq4_xs", "f16", "f32"]))
        tensors[f"blk.0.{name}.weight"] = random_tensor(rng, kind, (256 // queries * count, 256))
    counts = {"attention.head_count": queries, "attention.head_count_kv": heads["attn_k"]}
    source = tmp_path / "m.gguf"
    metadata = moe_metadata("llama", layers=1, hidden=256, inner=256, experts=4, **counts)
    source.write_bytes(gguf_bytes(metadata, tensors))
    assert transcode(source, tmp_path / "out", "fp32").exact
    written = loaded(tmp_path / "out")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    for name, spelled in (("attn_q", "q_proj"), ("attn_k", "k_proj")):
        tensor = theirs[f"blk.0.{name}.weight"]
        stored = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(-1, 256)
        # llama.cpp: w.reshape(heads, 2, rows / heads / 2, K).swapaxes(1, 2)
        model = written[f"model.layers.0.self_attn.{spelled}.weight"].float().numpy()
        permuted = model.reshape(heads[name], 2, -1, 256).swapaxes(1, 2).reshape(-1, 256)
        assert np.array_equal(permuted, stored)
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in written


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("kind", ["q4_k", "q6_k", "iq3_s"])
def test_other_types_are_exact_in_float32(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    source = write_model(tmp_path / "m.gguf", layers=1, expert_type=kind, down_type="q5_1")
    assert transcode(source, tmp_path / "out", "fp32").exact
    rounded = check(source, "bf16")
    assert not rounded.exact
    assert all(loss.relative < 2.0**-8 for loss in rounded.losses)
    reader = gguf.GGUFReader(source)
    stored = next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_gate_exps.weight")
    expected = gguf.quants.dequantize(stored.data, stored.tensor_type).reshape(4, 256, 256)
    written = loaded(tmp_path / "out")
    for expert in range(4):
        assert np.array_equal(
            written[f"model.layers.0.mlp.experts.{expert}.gate_proj.weight"].numpy(), expected[expert]
        )
    with pytest.raises(MoeqError, match="but not floats"):
        transcode(source, tmp_path / "no", "compressed-tensors")


def test_types_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    source = write_model(tmp_path / "m.gguf", layers=1, expert_type="q5_k")
    with pytest.raises(MoeqError, match="is dequantised by the package gguf"):
        check(source, "fp32", workers=1)


def test_large_modules_are_taken_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcode_plan, "_ITEM_NUMBERS", 20 * 256)
    source = write_model(tmp_path / "m.gguf", layers=1)
    found = transcode(source, tmp_path / "out", "compressed-tensors")
    assert found.exact
    assert found.projections == 4 * 3 + 4 + 2 * 4  # 64 rows of the embedding and of the head, 20 at a time
    monkeypatch.undo()
    assert transcode(source, tmp_path / "whole", "compressed-tensors").exact
    one, other = loaded(tmp_path / "out"), loaded(tmp_path / "whole")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_split_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors, metadata = moe_tensors(rng), moe_metadata("qwen3moe", layers=2, hidden=256, inner=256, experts=4)
    names = list(tensors)
    for number, part in enumerate((names[:9], names[9:])):
        said = {"split.no": number, "split.count": 2, **(metadata if number == 0 else {})}
        raw = gguf_bytes(said, {name: tensors[name] for name in part})
        (tmp_path / f"m-{number + 1:05d}-of-00002.gguf").write_bytes(raw)
    write_model(tmp_path / "whole.gguf")
    split, whole = open_checkpoint(tmp_path / "m-00002-of-00002.gguf"), open_checkpoint(tmp_path / "whole.gguf")
    assert split.source.config == whole.source.config
    assert torch.equal(split.dequantize(1, 2, "down"), whole.dequantize(1, 2, "down"))
    with pytest.raises(MoeqError, match="holds 2 GGUF models"):
        open_checkpoint(tmp_path)
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(MoeqError, match="1 of the 2 parts"):
        open_checkpoint(tmp_path / "m-00002-of-00002.gguf")


def test_config_of_a_folder(tmp_path: Path) -> None:
    """A folder's own config and tokenizer are kept; a file that is named alone takes nothing from beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder / "m.gguf")
    (folder / "config.json").write_text(json.dumps({**open_checkpoint(folder / "m.gguf").source.config, "mine": 1}))
    (folder / "tokenizer.json").write_text("{}")
    transcode(folder, tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["mine"], config["quantization_config"]["quant_method"]) == (1, "compressed-tensors")
    assert (tmp_path / "out" / "tokenizer.json").exists()
    alone = open_checkpoint(folder / "m.gguf").source
    assert "config.json" not in alone.side_files()
    assert "tokenizer.json" not in alone.side_files() or alone.read_file("tokenizer.json", 1 << 20) != b"{}"


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"general.architecture": "gpt2"}, "answer.not-moe", "dense gpt2 model"),
        ({"general.architecture": "grok", "grok.expert_count": 8}, "source.unsupported-format", "grok"),
        ({"general.architecture": 7}, "source.bad-header", "general.architecture is 7"),
        ({"qwen3moe.block_count": 1 << 30}, "source.bad-header", "block_count"),
        ({"qwen3moe.embedding_length": "wide"}, "source.bad-header", "embedding_length"),
        ({"qwen3moe.expert_count": 5}, "source.inconsistent", "5"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path: Path, change: dict[str, object], code: str, words: str) -> None:
    metadata = moe_metadata("qwen3moe", layers=2, hidden=256, inner=256, experts=4) | change
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, moe_tensors(np.random.default_rng(0))))
    with pytest.raises(MoeqError) as caught:
        open_checkpoint(tmp_path / "m.gguf")
    assert caught.value.code == code
    assert words in caught.value.message


def test_tensors_without_a_name(tmp_path: Path) -> None:
    """A tensor that moeq cannot name is told by inspect and refused by transcode: nothing is lost in silence."""
    tensors = moe_tensors(np.random.default_rng(0))
    tensors["blk.0.attn_strange.weight"] = tensors["blk.0.attn_norm.weight"]
    metadata = moe_metadata("qwen3moe", layers=2, hidden=256, inner=256, experts=4)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, tensors))
    assert "attn_strange" in " ".join(open_checkpoint(tmp_path / "m.gguf").info.refusals)
    with pytest.raises(MoeqError, match="attn_strange"):
        check(tmp_path / "m.gguf", "bf16")


def test_decoded_once(tmp_path: Path) -> None:
    """A float type's matrix is its numbers under a scale of one, and decoding it does not change it."""
    pytest.importorskip("gguf")
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", layers=1, expert_type="q4_k"))
    matrix = checkpoint.matrix(0, 0, "down")
    first = dequantize(matrix)
    first.zero_()
    assert bool(dequantize(matrix).any())


@pytest.mark.cover("seed", every=4)
@pytest.mark.parametrize("seed", SEEDS)
def test_halves_of_a_latent_projection(seed: int, tmp_path: Path) -> None:
    """`kv_b_proj` is, head by head, the transposed keys and then the values."""
    rng = np.random.default_rng([8, seed])
    heads, rank, rows, more = (int(rng.choice(some)) for some in ((1, 2, 4), (32, 96), (32, 64), (32, 48)))
    tensors = moe_tensors(rng, layers=1)
    for name in ("attn_q", "attn_k", "attn_v"):
        del tensors[f"blk.0.{name}.weight"]
    shapes = (heads, rank, rows), (heads, more, rank)
    keys, values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    tensors["blk.0.attn_k_b.weight"] = ("f32", keys.shape, keys.tobytes())
    tensors["blk.0.attn_v_b.weight"] = ("f32", values.shape, values.tobytes())
    metadata = moe_metadata("deepseek2", layers=1, hidden=256, inner=256, experts=4, expert_gating_func=2)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, tensors))
    assert transcode(tmp_path / "m.gguf", tmp_path / "out", "fp32").exact
    found = loaded(tmp_path / "out")["model.layers.0.self_attn.kv_b_proj.weight"].numpy()
    found = found.reshape(heads, rows + more, rank)
    assert np.array_equal(found[:, :rows], keys.swapaxes(1, 2))
    assert np.array_equal(found[:, rows:], values)


def test_the_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = write_model(tmp_path / "m.gguf", layers=1)
    transcode(source, tmp_path / "out", "compressed-tensors")
    mine = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert mine.get_vocab() == theirs.get_vocab()
    assert mine.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


@pytest.mark.cover("seed", every=4)
@pytest.mark.parametrize("seed", SEEDS)
def test_linear_attention_of_qwen35(seed: int, tmp_path: Path) -> None:
    """Value heads, norms and the decay are what transformers' own conversion makes of the same tensors."""
    theirs = pytest.importorskip("transformers.integrations.gguf.gguf_conversion_mapping")
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng([9, seed])
    keys, per_key, size, key_size = (int(rng.choice(some)) for some in ((1, 2, 4), (1, 2, 3), (8, 16), (16, 32)))
    heads, tail = keys * per_key, keys * per_key * size
    fused = 2 * keys * key_size + tail
    tensors = moe_tensors(rng, layers=2)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        del tensors[f"blk.0.{name}.weight"]
    for layer in (0, 1):
        tensors[f"blk.{layer}.post_attention_norm.weight"] = tensors.pop(f"blk.{layer}.ffn_norm.weight")
    shapes = {
        "attn_qkv.weight": (fused, 256),
        "attn_gate.weight": (tail, 256),
        "ssm_alpha.weight": (heads, 256),
        "ssm_beta.weight": (heads, 256),
        "ssm_conv1d.weight": (fused, 4),
        "ssm_norm.weight": (size,),
        "ssm_out.weight": (256, tail),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
    }
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    stored["ssm_a"] = -np.exp(stored["ssm_a"])
    tensors |= {f"blk.0.{name}": ("f32", values.shape, values.tobytes()) for name, values in stored.items()}
    for name in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out"):
        kind, shape = str(rng.choice(["f32", "bf16", "q8_0", "q5_1"])), shapes[f"{name}.weight"]
        if kind not in ("q8_0", "q5_1") or shape[1] % 32 == 0:
            raw = random_tensor(rng, kind, shape)
            tensors[f"blk.0.{name}.weight"] = raw
            octets = np.frombuffer(raw[2], np.uint8).reshape(shape[0], -1)
            numbers = gguf.quants.dequantize(octets, gguf.GGMLQuantizationType[kind.upper()])
            stored[f"{name}.weight"] = numbers.view(np.float32).reshape(shape)
    more = {
        "ssm.conv_kernel": 4,
        "ssm.state_size": key_size,
        "ssm.group_count": keys,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": tail,
        "full_attention_interval": 2,
    }
    metadata = moe_metadata("qwen35moe", layers=2, hidden=256, inner=256, experts=4, **more)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, tensors))
    transcode(tmp_path / "m.gguf", tmp_path / "out", "fp32")
    written = loaded(tmp_path / "out")

    def converted(operation: object, values: np.ndarray) -> torch.Tensor:
        return operation.convert({"x": torch.from_numpy(values.copy())}, ["x"], ["y"])["y"]  # type: ignore[attr-defined]

    value_rows, per_head = theirs.TiledToGroupedRows(keys, per_key, size), theirs.TiledToGroupedRows(keys, per_key)
    after_keys = theirs.TiledToGroupedRows(keys, per_key, size, offset=2 * keys * key_size)
    expected = {
        "in_proj_qkv.weight": converted(after_keys, stored["attn_qkv.weight"]),
        "in_proj_z.weight": converted(value_rows, stored["attn_gate.weight"]),
        "in_proj_a.weight": converted(per_head, stored["ssm_alpha.weight"]),
        "in_proj_b.weight": converted(per_head, stored["ssm_beta.weight"]),
        "conv1d.weight": converted(after_keys, stored["ssm_conv1d.weight"]).unsqueeze(1),
        "norm.weight": torch.from_numpy(stored["ssm_norm.weight"]),
        "out_proj.weight": converted(theirs.TiledToGroupedInputs(keys, per_key, size), stored["ssm_out.weight"]),
        "dt_bias": converted(per_head, stored["ssm_dt.bias"]),
        "A_log": converted(per_head, converted(theirs.LogNegate(), stored["ssm_a"]).numpy()),
    }
    for name, values in expected.items():
        assert torch.equal(written[f"model.layers.0.linear_attn.{name}"], values), name
    norm = np.frombuffer(tensors["output_norm.weight"][2], np.float32)
    assert np.array_equal(written["model.norm.weight"].numpy(), norm - 1)


def test_a_tokenizer_that_cannot_be_converted(tmp_path: Path) -> None:
    """The weights are written all the same, and a warning says what is missing."""
    pytest.importorskip("transformers")
    metadata = moe_metadata("qwen3moe", layers=2, hidden=256, inner=256, experts=4)
    metadata["tokenizer.ggml.model"] = "of-another-kind"
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, moe_tensors(np.random.default_rng(0))))
    found = transcode(tmp_path / "m.gguf", tmp_path / "out", "compressed-tensors")
    assert found.exact
    assert "cannot convert its tokenizer" in " ".join(found.warnings)
    assert not (tmp_path / "out" / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("types", "target"),
    [
        (("q4_0", "q4_0", "q8_0"), "compressed-tensors"),
        (("q8_0", "q4_0", "iq4_nl"), "gptq"),
        (("q8_0", "q4_k", "q6_k"), "fp32"),
    ],
)
def test_layers_of_several_types(types: tuple[str, str, str], target: str, tmp_path: Path) -> None:
    """Layer 1 has experts of other types than layer 0: every number stays, and no engine sees two kinds in a layer."""
    rng = np.random.default_rng(2)
    tensors = moe_tensors(rng)
    for name, kind in zip(("gate", "up", "down"), types, strict=True):
        stored = f"blk.1.ffn_{name}_exps.weight"
        tensors[stored] = random_tensor(rng, kind, tensors[stored][1])
    source = tmp_path / "m.gguf"
    source.write_bytes(gguf_bytes(moe_metadata("qwen3moe", **SIZES), tensors))
    found = transcode(source, tmp_path / "out", target)
    assert found.exact
    assert not any("resolve to different schemes" in text for text in found.warnings)
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for layer in (0, 1) if target != "fp32" else ():
        for projection in ("gate", "up", "down"):
            assert torch.equal(before.dequantize(layer, 3, projection), after.dequantize(layer, 3, projection))


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    """Mixtral's files had one tensor per expert until April 2024: the result is that of stacked ones."""
    tensors = moe_tensors(np.random.default_rng(7), layers=1, expert_type="q4_0", down_type="q8_0")
    metadata = moe_metadata("llama", layers=1, hidden=256, inner=256, experts=4)
    (tmp_path / "stacked.gguf").write_bytes(gguf_bytes(metadata, tensors))
    for name in ("gate", "up", "down"):
        kind, shape, raw = tensors.pop(f"blk.0.ffn_{name}_exps.weight")
        size = len(raw) // 4
        for expert in range(4):
            one = raw[expert * size : (expert + 1) * size]
            tensors[f"blk.0.ffn_{name}.{expert}.weight"] = (kind, shape[1:], one)
    (tmp_path / "single.gguf").write_bytes(gguf_bytes(metadata, tensors))
    for source in ("stacked", "single"):
        for target in ("compressed-tensors", "fp32"):
            assert transcode(tmp_path / f"{source}.gguf", tmp_path / f"{source}-{target}", target).exact
    for target in ("compressed-tensors", "fp32"):
        one, other = (loaded(tmp_path / f"{source}-{target}") for source in ("stacked", "single"))
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
