"""What vLLM's functions are given, and how words are decoded for its Python packer; the engine itself is not needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layouts.matrices import random_matrix
from refusing import refuses

from moeq.matrix import MatrixSpec
from moeq.model.stored_parts import interleaved
from moeq.prove.parity_vllm import (
    EngineCode,
    ParityExperts,
    _awq_words,
    _awq_zeros,
    _Operations,
    _packed_zeros,
    _row_words,
    find_engine,
    marlin_mxfp4,
    marlin_wna16,
)
from moeq.schemes.bits import pack_nibbles, stream_codes

UTILS = "model_executor/layers/quantization/utils"

#: Files in the place of the engine's: its functions tell what they are given.
FILES = {
    f"{UTILS}/quant_utils.py": "def get_pack_factor(): ...\ndef pack_cols(): ...\ndef unpack_cols(): ...\n",
    f"{UTILS}/marlin_utils.py": "GPTQ_MARLIN_TILE = 16\n"
    + "".join(
        f"def {name}(): ...\n"
        for name in (
            *("get_scale_perms", "marlin_permute_scales", "marlin_permute_bias", "marlin_zero_points"),
            *("awq_to_marlin_zero_points", "moe_awq_to_marlin_zero_points", "moe_packed_to_marlin_zero_points"),
            *("marlin_act_int8_process_scales", "marlin_moe_permute_scales", "marlin_padded_nk"),
            "marlin_moe_padded_intermediate",
        )
    ),
    f"{UTILS}/marlin_utils_test.py": "def marlin_permute_weights(): ...\n"
    "def marlin_weights(codes, rows, columns, bits, order):\n    return codes\n"
    "def get_weight_perm(bits, act_order):\n    assert not act_order\n    return bits\n",
    f"{UTILS}/marlin_utils_fp4.py": "def mxfp4_marlin_process_scales(): ...\n"
    "def _repack_marlin_experts(): ...\n"
    "def prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, s13, s2, b13, b2):\n"
    "    assert layer.params_dtype == torch.bfloat16 and get_marlin_input_dtype() is None\n"
    "    return w13, w2, s13, s2, b13, b2\n",
    "model_executor/layers/fused_moe/oracle/int_wna16.py": "def _pad_w13_shard_cols(): ...\n"
    "def _pad_rows(): ...\n"
    "def _pad_w13_bias(): ...\n"
    "def _told(layer, *numbers):\n    ...\n"
    "def _process_weights_marlin(layer, config, bits, per_word, group, w13, w2, s13, s2, z13, z2, b13, b2):\n"
    "    numbers = [layer.intermediate_size_per_partition, layer.num_groups_w13, layer.num_groups_w2]\n"
    "    numbers = torch.tensor([*numbers, bits, per_word, group, round_up(33, 16)])\n"
    "    assert config is None and np is numpy\n"
    "    logger.warning_once('said by none')\n"
    "    repack = ops.gptq_marlin_moe_repack\n"
    "    return repack(w13.transpose(1, 2), 256, 256, bits), numbers, s13, s2, z13, z2, None, None, b13, b2\n"
    "def _process_awq_weights_marlin(layer, bits, per_word, group, config, w13, w2, s13, s2, z13, z2, b13, b2):\n"
    "    assert config is None and math.pi > 3\n"
    "    return ops.awq_marlin_moe_repack(w13, 256, 256, bits), w2, s13, s2, z13, z2, None, None, b13, b2\n",
}
W13, W2 = MatrixSpec("w13", 256, 256, "int4", 32, "f16"), MatrixSpec("w2", 256, 128, "int4", 64, "f16")


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> EngineCode:
    for name, text in FILES.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    found = find_engine(tmp_path)
    assert found.version == "of unknown version"
    return found


def given(w13: MatrixSpec, w2: MatrixSpec, **more: object) -> ParityExperts:
    made = {spec.role: [random_matrix(spec, seed) for seed in range(2)] for spec in (w13, w2)}
    fields = {"awq": False, "group_size": 32, **more}
    return ParityExperts(made["w13"], made["w2"], made, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("awq", [False, True])
def test_integers(awq: bool, zeros: bool, engine: EngineCode) -> None:
    specs = (replace(one, symmetric=not zeros, bias_dtype="bf16" if zeros else None) for one in (W13, W2))
    experts = given(*specs, awq=awq)
    found = marlin_wna16(engine, experts)
    assert torch.equal(found["w13"]["weight"], torch.stack([one.codes.t().long() for one in experts.w13]))
    scales = torch.stack([one.scales for one in experts.w2])
    assert torch.equal(found["w2"]["scale"], scales.transpose(1, 2) if awq else scales)
    assert found["w2"].keys() == {"weight", "scale", *(["zero"] if zeros or awq else []), *(["bias"] if zeros else [])}
    if zeros:
        assert torch.equal(found["w13"]["bias"], torch.stack([one.bias for one in experts.w13]))  # type: ignore[misc]
    if not awq:
        assert found["w2"]["weight"].tolist() == [128, 8, 2, 4, 8, 32, 48]
    if zeros or awq:
        wanted = torch.stack([_awq_zeros(one) if awq else _packed_zeros(one) for one in experts.w2])  # type: ignore[misc]
        assert torch.equal(found["w2"]["zero"], wanted)


@pytest.mark.parametrize("order", [False, True])
def test_mxfp4(order: bool, engine: EngineCode) -> None:
    specs = (replace(one, element="e2m1", group_size=32, scale_dtype="e8m0", bias_dtype="bf16") for one in (W13, W2))
    experts = given(*specs, interleaved=order)
    found = marlin_mxfp4(engine, experts)
    w13 = [interleaved(one) if order else one for one in experts.w13]
    assert torch.equal(found["w13"]["weight"], torch.stack([pack_nibbles(one.codes) for one in w13]))
    assert torch.equal(found["w2"]["weight"], torch.stack([pack_nibbles(one.codes) for one in experts.w2]))
    assert torch.equal(found["w13"]["bias"], torch.stack([one.bias for one in w13]))  # type: ignore[misc]
    assert torch.equal(found["w2"]["scale"], torch.stack([one.scales for one in experts.w2]))
    assert found["w2"].keys() == {"weight", "scale", "bias"}


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_decoded_as_they_were_made(bits: int, engine: EngineCode) -> None:
    matrix = random_matrix(MatrixSpec("w2", 128, 256, f"int{bits}", 32, "f16", symmetric=False))
    namespace = {"get_weight_perm": lambda bits, order: bits, "marlin_weights": lambda codes, *rest: (codes, rest)}
    operations, codes = _Operations(namespace), matrix.codes.t().long()
    words = _row_words(matrix)
    assert words.shape == (128, 256 * bits // 32)
    found, rest = operations.gptq_marlin_repack(words.t(), 256, 128, bits)
    assert torch.equal(found, codes)
    assert rest == (256, 128, bits, bits)
    zeros = _packed_zeros(matrix)
    assert zeros is not None
    assert matrix.zeros is not None
    assert torch.equal(stream_codes(zeros.t(), bits, 128), matrix.zeros.t().to(torch.uint8))
    if bits == 4:
        namespace["marlin_weights"] = lambda codes, *rest: codes
        assert torch.equal(operations.awq_marlin_moe_repack(_awq_words(matrix)[None], 256, 128, 4)[0], codes)
        fields = operations.awq_marlin_moe_repack(_awq_zeros(matrix)[None], 8, 128, 4)[0]
        assert torch.equal(fields, matrix.zeros.t().long())
        plain = replace(matrix, zeros=None)
        assert bool((operations.awq_marlin_moe_repack(_awq_zeros(plain)[None], 8, 128, 4) == 8).all())


def test_files_and_names_that_are_not_there(engine: EngineCode) -> None:
    hint = "parity knows the files of vLLM 0.33.0"
    path = engine.root / "none.py"
    text = f"vLLM of unknown version: {path}: [Errno 2] No such file or directory: '{path}'"
    with refuses("environment.engine-code", text, hint):
        engine.load("none.py", ["f"], {})
    path.write_text("a: int = 1\nb = 2\nb.c = 3\nclass D: ...\n")
    with refuses("environment.engine-code", f"vLLM of unknown version: {path} does not define c, e", hint):
        engine.load("none.py", ["a", "b", "D", "c", "e"], {})


def test_where_the_engine_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Exception, match="vLLM is not installed here; parity compares with the engine's own code"):
        find_engine()
    (tmp_path / "vllm" / "model_executor").mkdir(parents=True)
    (tmp_path / "vllm" / "_version.py").write_text('__version__ = "1.2"\n')
    spec = type("Spec", (), {"origin": str(tmp_path / "vllm" / "__init__.py")})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert find_engine() == EngineCode(tmp_path / "vllm", "1.2")
