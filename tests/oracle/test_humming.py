"""What Humming makes of each config's weights, by version: bits, groups and the key that selection asks with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeq.oracle.engines.vllm.configs import humming
from moeq.oracle.engines.vllm.configs.humming import HummingWeights
from moeq.oracle.engines.vllm.configs.question import ConfigRefusal, weight_only_key
from moeq.oracle.engines.vllm.policy import load_policy

ROUND = {"bits": 4, "group_size": 128}


def weights(reader: str, layer: dict[str, Any], version: str = "0.33.0", dtype: str = "bf16") -> HummingWeights:
    """Readers ask for a version's facts and the model's dtype, and for nothing else."""
    probe = SimpleNamespace(deployment=SimpleNamespace(dtype=dtype))
    question: Any = SimpleNamespace(policy=load_policy(f"vllm@{version}"), probe=probe)
    return humming._WEIGHTS[reader](question, layer)


def refusal(reader: str, layer: dict[str, Any], version: str = "0.33.0") -> str:
    with pytest.raises(ConfigRefusal) as refused:
        weights(reader, layer, version)
    return f"{refused.value.error}: {refused.value.text}"


def ct(form: str, **more: Any) -> dict[str, Any]:
    return {"format": form, "type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, **more}


def test_integers_in_groups() -> None:
    for reader, more, zeros in (
        ("gptq", {}, False),
        ("gptq", {"sym": False}, True),
        ("gptq", {"desc_act": False}, False),
        ("awq", {}, True),
        ("awq", {"zero_point": False}, False),
        ("auto-round", {}, False),
        ("auto-round", {"sym": False, "act_bits": 16, "packing_format": "auto_round:auto_awq"}, True),
    ):
        found = weights(reader, ROUND | more)
        assert (found.bits, found.group, found.zeros) == (4, 128, zeros)
        assert found.key == weight_only_key(4, True, 128)
        assert weights(reader, ROUND | more | {"bits": 8}).key == weight_only_key(8, True, 128)
    assert weights("gptq", ROUND | {"bits": 8}, "0.30.0").key == weight_only_key(4, True, 128)
    assert weights("gptq", ROUND, "0.29.0").key == humming._NO_KEY


@pytest.mark.parametrize(
    ("version", "dtype", "bits", "symmetric", "key"),
    [
        ("0.33.0", "fp16", 4, True, "kInt4Static"),
        ("0.33.0", "fp16", 8, True, "kInt8Static"),
        ("0.33.0", "fp16", 3, True, None),
        ("0.33.0", "fp16", 4, False, None),
        ("0.33.0", "bf16", 4, True, None),
        ("0.30.0", "bf16", 8, True, "kInt4Static"),
        ("0.30.0", "bf16", 8, False, None),
    ],
)
def test_integers_with_a_scale_for_a_row(version: str, dtype: str, bits: int, symmetric: bool, key: str | None) -> None:
    found = weights("gptq", {"bits": bits, "group_size": -1, "sym": symmetric}, version, dtype)
    assert found == HummingWeights("uint", bits, -1, humming._NO_KEY if key is None else key, not symmetric)


def test_autoround_is_read_as_integers_since_0_31() -> None:
    for more in ({"data_type": "fp"}, {"packing_format": "auto_round:fp8"}, {"packing_format": "llm_compressor:nv_fp"}):
        assert "AutoRound's float formats are not supported" in refusal("auto-round", ROUND | more)
    said = refusal("auto-round", ROUND | {"act_bits": 15})
    assert said == "AssertionError: Humming: AutoRound with quantised activations is not supported"
    assert refusal("auto-round", ROUND, "0.30.0") == "TypeError: Humming reads no AutoRound weights"
    assert refusal("auto-round", {"bits": 4}) == "TypeError: Humming needs group_size in the quantisation config"


def test_reordered_columns_were_taken_before_0_31() -> None:
    assert refusal("gptq", ROUND | {"desc_act": True}) == "AssertionError: Humming: desc_act is not supported"
    assert weights("gptq", ROUND | {"desc_act": True}, "0.30.0").group == 128
    assert refusal("awq", {}) == "TypeError: Humming needs bits and group_size in the quantisation config"


def test_floats() -> None:
    assert weights("fp8", {}) == HummingWeights("fp8", 8, 0, "kFp8StaticTensorSym")
    assert weights("fp8", {}, "0.30.0").key == "kFp8StaticChannelSym"
    assert weights("fp8", {"weight_block_size": [128, 128]}) == HummingWeights("fp8", 8, 128, "kFp8Static128BlockSym")
    assert weights("fp8", {"weight_block_size": [128, 64]}) == HummingWeights("fp8", 8, 64, humming._NO_KEY)
    assert weights("mxfp4", {}) == HummingWeights("fp4", 4, 32, "kMxfp4Static", powers=True)
    assert weights("modelopt", {"quant_algo": "NVFP4"}) == HummingWeights("fp4", 4, 16, "kNvfp4Static")
    assert weights("modelopt", {"quant_algo": "MXFP8"}) == HummingWeights("fp8", 8, 32, "kMxfp8Static", powers=True)
    assert "Humming reads no ModelOpt fp8" in refusal("modelopt", {"quant_algo": "FP8"})
    assert "Humming needs dtype" in refusal("quark", {})
    assert "Humming's reader of Quark is not followed here" in refusal("quark", {}, "0.30.0")


def test_compressed_tensors() -> None:
    def read(form: str, version: str = "0.33.0", **more: Any) -> HummingWeights:
        return weights("compressed-tensors", ct(form, **more), version)

    for group, known in ((32, "kMxfp4Static"), (16, humming._NO_KEY)):
        found = read("mxfp4-pack-quantized", type="float", group_size=group)
        assert found == HummingWeights("fp4", 4, group, known, powers=True)
    for group, known in ((16, "kNvfp4Static"), (32, humming._NO_KEY)):
        found = read("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=group)
        assert found == HummingWeights("fp4", 4, group, known)
    packed = "pack-quantized"
    assert read(packed) == HummingWeights("uint", 4, 32, weight_only_key(4, True, 32), False)
    assert read(packed, symmetric=False).zeros is True
    assert read(packed, "0.29.0").key == read(packed, strategy="tensor").key == humming._NO_KEY
    for bits, key in ((4, "kInt4Static"), (8, "kInt8Static"), (3, "kUint3StaticChannel")):
        assert read(packed, strategy="channel", num_bits=bits) == HummingWeights("uint", bits, 0, key, False)
    block = read("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[128, 128])
    assert block == HummingWeights("fp8", 8, 128, "kFp8Static128BlockSym")
    other = read("naive-quantized", type="float", num_bits=8, strategy="block", block_structure=[64, 128])
    assert (other.group, other.key) == (128, humming._NO_KEY)
    channel = {"type": "float", "num_bits": 8, "strategy": "channel"}
    assert read("float-quantized", **channel).key == humming._NO_KEY
    assert read("float-quantized", "0.30.0", **channel).key == "kFp8StaticChannelSym"


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (ct("dense"), "format dense is not one of int-quantized, float-quantized, naive-quantized, pack-quantized"),
        (ct("pack-quantized", actorder="group"), "actorder is not supported"),
        (ct("pack-quantized", type="float"), "pack-quantized weights have to be integers"),
        (ct("int-quantized"), "int-quantized with 4 bits"),
        ({"format": "pack-quantized"}, "Humming needs type and num_bits and strategy"),
    ],
)
def test_what_compressed_tensors_may_not_say(layer: dict[str, Any], said: str) -> None:
    assert said in refusal("compressed-tensors", layer)
    for order in (None, "weight", "static"):
        assert weights("compressed-tensors", ct("pack-quantized", actorder=order)).group == 32
