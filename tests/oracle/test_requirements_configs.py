"""Requirements on configs: how quantisation configs are read, and what of them the engine ignores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import ask, candidate, codes, ct, gptq, gpu
from oracle.examples import SHAPE, scheme

from moeq.oracle.engines.vllm.configs.question import ConfigRefusal, integer
from moeq.oracle.judge import judge_config


@pytest.mark.parametrize("bits", ["4", (4,), True, 4.0, None])
def test_r11_config_values_have_types(bits: Any) -> None:
    with pytest.raises(ConfigRefusal, match="bits"):
        integer({"bits": bits}, "bits")
    verdict = judge_config(gptq(bits=bits), SHAPE, gpu("A100"))
    assert verdict.error is not None
    assert verdict.error.kind == "CONFIG"


def test_r23_aliases() -> None:
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True}
    assert judge_config(config, SHAPE, gpu("A100")).ok
    lost = judge_config(config, replace(SHAPE, hidden_size=2880), gpu("A100"))
    assert lost.error is not None
    assert lost.error.kind == "CONFIG"
    assert "awq-alias-lost" in codes(lost)


def test_r24_asymmetric_gptq() -> None:
    refused = judge_config(gptq(sym=False), SHAPE, gpu("A100"))
    assert refused.error is not None
    assert "moe_wna16" in str(refused.error.hint)
    assert "gptq-asymmetric-refused" in codes(refused)
    assert judge_config(gptq(sym=False), SHAPE, gpu("A100", quantization="moe_wna16")).ok


def test_r25_group_minus_one() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True}
    verdict = judge_config(config, SHAPE, gpu("A100"))
    assert verdict.selected is not None
    assert verdict.chosen is None
    assert [gate.code for gate in verdict.gates if not gate.passed] == ["G7"]
    assert ask(scheme("awq", group=-1, symmetric=False), gpu("A100", engine="moeq")).ok


def test_r30_rules_for_single_experts_are_noticed() -> None:
    down = gptq(dynamic={r"+:.*\.experts\.\d+\.down_proj": {"bits": 8}})
    assert "per-expert-rules-ignored" in codes(judge_config(down, SHAPE, gpu("A100")))
    whole = gptq(dynamic={r"+:.*\.experts.*": {"bits": 8}})
    assert "per-expert-rules-ignored" not in codes(judge_config(whole, SHAPE, gpu("A100")))
    ignore = {**ct(), "ignore": ["re:.*experts.5.*"]}
    assert "per-expert-rules-ignored" in codes(judge_config(ignore, SHAPE, gpu("A100")))


def test_r32_rules_before_fallback() -> None:
    config = gptq(dynamic={r"-:.*\.mlp\.experts.*": {}})
    rocm, cuda = judge_config(config, SHAPE, gpu("MI300X")), judge_config(config, SHAPE, gpu("A100"))
    assert (rocm.method, cuda.method) == ("MoeWNA16Method", "UnquantizedFusedMoEMethod")
    assert "rules-ignored-in-fallback" in codes(rocm)
    assert "rules-ignored-in-fallback" not in codes(cuda)


def test_r42_block_list() -> None:
    listed = gptq(modules_in_block_to_quantize=[["self_attn.q_proj"]])
    assert "block-list-ignored" in codes(judge_config(listed, SHAPE, gpu("A100")))
    named = gptq(modules_in_block_to_quantize=[["mlp.experts.0.gate_proj"]])
    assert "block-list-ignored" not in codes(judge_config(named, SHAPE, gpu("A100")))


@pytest.mark.parametrize(
    ("bits", "form", "sym", "advised"),
    [
        (5, "gptq_p", True, True),
        (4, "gptq_p", True, False),
        (4, "gptq_v2", False, False),
        (4, "gptq", False, True),
        (4, "gptq", True, False),
    ],
)
def test_r33_humming_reads_gptq_words_as_they_are(bits: int, form: str, sym: bool, advised: bool) -> None:
    table = gptq(bits=bits, checkpoint_format=form, sym=sym)
    verdict = judge_config(table, SHAPE, replace(gpu("H100"), quantization="humming"))
    assert ("humming-gptq-words" in codes(verdict)) == advised


@pytest.mark.parametrize("bits", [5, 6, 7])
def test_r38_humming_takes_widths_between_four_and_eight(bits: int) -> None:
    """It alone, from what the engine loads; its bytes depend on the GPU, so that there is nothing to convert to."""
    verdict = judge_config(ct(num_bits=bits), SHAPE, gpu("H100"))
    chosen = candidate(verdict, "HUMMING")
    assert verdict.ok
    assert verdict.selected is not None
    assert (verdict.selected.backend, verdict.selected.layout) == ("HUMMING", None)
    assert verdict.selected.no_layout == chosen.no_layout
    assert "depend on the GPU" in (chosen.no_layout or "")
    planar = judge_config(gptq(bits=bits, checkpoint_format="gptq_p"), SHAPE, gpu("H100"))
    assert planar.selected is None
    assert f"GPTQ with {bits} bits" in planar.refusal


def test_r43_gptq_v2() -> None:
    v2 = gptq(checkpoint_format="gptq_v2")
    assert "gptq-v2-zero-points" in codes(judge_config(v2, SHAPE, gpu("CPU")))
    assert "gptq-v2-zero-points" not in codes(judge_config(v2, SHAPE, gpu("A100")))
    assert "gptq-v2-zero-points" not in codes(judge_config(gptq(), SHAPE, gpu("CPU")))


def test_r46_mxint4_from_bytes() -> None:
    env = {"VLLM_USE_FLASHINFER_MOE_INT4": "1"}
    config = gptq(group_size=32)
    verdict = judge_config(config, SHAPE, gpu("B200", env=env, quantization="moe_wna16"))
    assert verdict.selected is not None
    assert verdict.selected.backend == "FLASHINFER_TRTLLM"
    assert "mxint4-unsigned-bytes" in codes(verdict)


def test_r48_mixed_models() -> None:
    ignored = {**ct(), "ignore": [r"re:.*mlp\.experts.*"]}
    fails = judge_config(ignored, SHAPE, gpu("H100", backend="emulation"))
    assert fails.error is not None
    assert "override-breaks-unquantised-layers" in codes(fails)
    assert judge_config(ignored, SHAPE, gpu("H100", backend="marlin")).ok
