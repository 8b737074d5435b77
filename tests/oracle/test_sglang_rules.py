"""SGLang's rules one by one: each fact that changes a choice or ends it, at its edges, and what the refusal says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moeq.oracle.engines.sglang.decision import decide_sglang
from moeq.oracle.engines.sglang.layer import SglangLayer, SglangRefusal

Row = dict[str, Any]
LAYER = SglangLayer((9, 0), 2048, 768, 128)
GPTQ: Row = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ: Row = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
FP8: Row = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS: Row = {**FP8, "weight_block_size": [128, 128]}
NVFP4: Row = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
EXPERTS = "model.layers.1.mlp.experts"
AUTO = "--moe-runner-backend auto"


def ct(form: str = "pack-quantized", inputs: Row | None = None, ignore: Any = (), **weights: Any) -> Row:
    made = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": made, "input_activations": inputs}}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": list(ignore), "config_groups": groups}


def decide(config: Row, **layer: Any) -> str:
    """Method in force, class, runner and layout in words; or the stage, the error and the reason with its remedy."""
    try:
        made = decide_sglang(config, replace(LAYER, **layer))
    except SglangRefusal as refused:
        return f"{refused.stage} {refused.error}: {refused.text}" + (f" -> {refused.remedy}" if refused.remedy else "")
    marks = f"{'' if made.quantised else ' plain'}{'' if made.runs else ' stops'}"
    return f"{made.name} {made.method} {made.runner} {made.layout}{marks}"


MARLIN = "gptq_marlin GPTQMarlinMoEScheme marlin marlin-wna16/1"
ORDERED = "gptq_marlin GPTQMarlinMoEScheme marlin marlin-act-order/1"
OWN = "AWQMoEScheme marlin marlin-wna16/1"
WNA16 = "moe_wna16 MoeWNA16Method triton triton-wna16/1"
NO_GPTQ = "name ValueError: gptq is no method on CUDA, and this checkpoint is not one that gptq_marlin takes"
PLAIN_AWQ = "awq UnquantizedFusedMoEMethod triton None plain"


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        (GPTQ, {}, MARLIN),
        (GPTQ, {"capability": (8, 0)}, MARLIN),
        (GPTQ, {"capability": (7, 5)}, f'{NO_GPTQ} -> quantization="moe_wna16"'),
        *(({**GPTQ, "group_size": size}, {}, MARLIN) for size in (-1, 32, 64, 128)),
        *(({**GPTQ, "group_size": size}, {}, f'{NO_GPTQ} -> quantization="moe_wna16"') for size in (16, 256)),
        ({**GPTQ, "bits": 8}, {}, MARLIN),
        ({**GPTQ, "bits": 3}, {}, NO_GPTQ),
        ({**GPTQ, "sym": False}, {}, f'{NO_GPTQ} -> quantization="moe_wna16"'),
        ({**GPTQ, "desc_act": None}, {}, f'{NO_GPTQ} -> quantization="moe_wna16"'),
        ({**GPTQ, "sym": False, "desc_act": True}, {}, NO_GPTQ),
        ({key: value for key, value in GPTQ.items() if key != "sym"}, {}, NO_GPTQ),
        ({**GPTQ, "desc_act": True}, {}, ORDERED),
        ({**GPTQ, "desc_act": True, "group_size": -1}, {}, MARLIN),
        (GPTQ, {"quantization": "gptq_marlin"}, MARLIN),
        (GPTQ, {"quantization": "marlin"}, MARLIN),
        (GPTQ, {"quantization": "moe_wna16"}, WNA16),
        ({**GPTQ, "sym": False}, {"quantization": "moe_wna16"}, WNA16),
        (
            {**GPTQ, "desc_act": True}, {"quantization": "moe_wna16"},
            'name ValueError: quantization="moe_wna16" is not for this gptq checkpoint here -> no quantization',
        ),
        (
            GPTQ, {"quantization": "awq"},
            'name ValueError: quantization="awq" is not for this gptq checkpoint here -> no quantization',
        ),
        (
            GPTQ, {"runner": "triton"},
            f"layer AssertionError: --moe-runner-backend triton trips an assertion: this method has its one runner"
            f" -> {AUTO}",
        ),
        (AWQ, {}, f"awq_marlin {OWN}"),
        (AWQ, {"act": "situ"}, f"awq_marlin {OWN}"),
        (AWQ, {"act": "gelu"}, "awq_marlin MoeWNA16Method triton triton-wna16/1"),
        (AWQ, {"tp": 2}, f"awq_marlin {OWN}"),
        (AWQ, {"tp": 4}, "awq_marlin MoeWNA16Method triton triton-wna16/1"),
        (AWQ, {"tp": 4, "ep": True}, f"awq_marlin {OWN}"),
        ({**AWQ, "group_size": 32}, {"tp": 12}, f"awq_marlin {OWN}"),
        ({**AWQ, "group_size": 32}, {"tp": 24}, "awq_marlin MoeWNA16Method triton triton-wna16/1"),
        (AWQ, {"hidden": 2112}, "awq_marlin MoeWNA16Method triton triton-wna16/1"),
        (AWQ, {"capability": (7, 5)}, PLAIN_AWQ),
        ({**AWQ, "group_size": 16}, {}, PLAIN_AWQ),
        ({**AWQ, "zero_point": False}, {}, PLAIN_AWQ),
        ({**AWQ, "bits": 8}, {}, "config ValueError: AWQ of 8 bits, only 4 is read"),
        (AWQ, {"quantization": "moe_wna16"}, WNA16),
        (AWQ, {"quantization": "moe_wna16", "capability": (7, 5)}, WNA16),
        (
            AWQ, {"quantization": "moe_wna16", "capability": (7, 0)},
            'name ValueError: quantization="moe_wna16" is not for this awq checkpoint here -> no quantization',
        ),
        ({**AWQ, "group_size": -1}, {}, "layer RuntimeError: group size -1 becomes a negative number of groups"),
        ({**AWQ, "modules_to_not_convert": ["mlp.experts"]}, {}, PLAIN_AWQ.replace("awq", "awq_marlin", 1)),
        ({**AWQ, "modules_to_not_convert": ["mlp.gate"]}, {}, f"awq_marlin {OWN}"),
        (
            {**AWQ, "modules_to_not_convert": ["experts"]}, {"quantization": "moe_wna16"},
            "moe_wna16 UnquantizedFusedMoEMethod triton None plain",
        ),
        (
            {**GPTQ, "group_size": 0}, {"quantization": "moe_wna16"},
            "layer ZeroDivisionError: groups of 0 weights",
        ),
        ({**GPTQ, "group_size": 64}, {"quantization": "moe_wna16", "inter": 96}, WNA16),
        (
            {**GPTQ, "group_size": 64}, {"quantization": "moe_wna16", "inter": 80},
            "layer AssertionError: no group size from 32 divides 80 per rank and hidden size 2048"
            " -> another tp, or expert parallelism",
        ),
        ({**GPTQ, "group_size": 64}, {"quantization": "moe_wna16", "hidden": 2080}, WNA16),
        (GPTQ, {"tp": 5}, "layer AssertionError: intermediate size 768 does not divide by tp 5 -> another tp"),
        (GPTQ, {"tp": 5, "ep": True}, "layer AssertionError: 128 experts do not divide by 5 ranks -> another tp"),
        (GPTQ, {"tp": 128, "ep": True}, MARLIN),
        (GPTQ, {"tp": 3, "experts": 7}, MARLIN),
        ({}, {}, "config ValueError: the config has no quantization"),
        ({**AWQ, "bits": None, "w_bit": 4, "q_group_size": 128}, {}, PLAIN_AWQ),
    ],
)  # fmt: skip
def test_gptq_and_awq(config: Row, layer: Row, expected: str) -> None:
    assert decide(config, **layer) == expected


DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
CT = "compressed-tensors CompressedTensorsWNA16MoE marlin marlin-wna16/1"
CT_TRITON = "compressed-tensors CompressedTensorsWNA16TritonMoE triton triton-wna16/1"
CT_INT4 = "compressed-tensors CompressedTensorsMxInt4MoE None trtllm-mxint4/1"
CT_PLAIN = "compressed-tensors UnquantizedFusedMoEMethod triton None plain"
NO_TRITON = (
    f"layer ValueError: the Triton runner takes symmetric int4 in groups of 32 or 128 without act-order -> {AUTO}"
)


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        (ct(), {}, CT),
        (ct(num_bits=8), {}, CT),
        (ct(actorder="group"), {}, CT.replace("wna16/1", "act-order/1")),
        (ct(actorder="weight"), {}, CT),
        (ct(), {"capability": (10, 0)}, CT_TRITON),
        (ct(), {"capability": (10, 3)}, CT_TRITON),
        (ct(), {"capability": (12, 0)}, CT),
        (ct(), {"capability": (10, 0), "runner": "marlin"}, CT),
        (ct(group_size=64), {"capability": (10, 0)}, CT),
        (ct(num_bits=8), {"capability": (10, 0)}, CT),
        (ct(symmetric=False), {"capability": (10, 0)}, CT),
        (ct(), {"runner": "triton"}, CT_TRITON),
        (ct(group_size=128), {"runner": "triton"}, CT_TRITON),
        (ct(group_size=64), {"runner": "triton"}, NO_TRITON),
        (ct(num_bits=8), {"runner": "triton"}, NO_TRITON),
        (ct(symmetric=False), {"runner": "triton"}, NO_TRITON),
        (ct(actorder="group"), {"runner": "triton"}, NO_TRITON),
        (ct(strategy="channel", group_size=None), {"runner": "triton"}, NO_TRITON),
        (ct(strategy="channel", group_size=None), {}, CT),
        (ct(strategy=None, group_size=-1), {}, CT),
        (ct(strategy=None, group_size=32), {"runner": "triton"}, CT_TRITON),
        (
            ct(strategy=None, group_size=None), {},
            "layer AttributeError: weights per tensor without activations trip over the activations that are not there",
        ),
        (ct(group_size=0), {}, "config ValidationError: group_size 0 with strategy group"),
        (ct(group_size=None), {}, "config ValidationError: group_size None with strategy group"),
        (ct(), {"runner": "flashinfer_trtllm"}, CT_INT4),
        (ct(group_size=128), {"runner": "flashinfer_trtllm"}, CT),
        (ct(num_bits=8), {"runner": "flashinfer_trtllm"}, CT),
        (ct(symmetric=False), {"runner": "flashinfer_trtllm"}, CT),
        (
            ct(actorder="group"), {"runner": "flashinfer_trtllm"},
            f"layer AssertionError: flashinfer_trtllm knows no act-order -> {AUTO}",
        ),
        (
            ct(), {"runner": "flashinfer_trtllm", "dtype": "fp16"},
            "layer AssertionError: flashinfer_trtllm takes bf16, not fp16 -> dtype bf16",
        ),
        (ct("int-quantized"), {},
         "layer ValueError: 4 bits as int-quantized: only 4 and 8 bits as pack-quantized are read"),
        (ct(num_bits=3), {},
         "layer ValueError: 3 bits as pack-quantized: only 4 and 8 bits as pack-quantized are read"),
        (ct(ignore=[f"{EXPERTS}.0.up_proj"]), {}, CT_PLAIN),
        (ct(ignore=[f"{EXPERTS}.1.up_proj"]), {}, CT),
        (ct(ignore=["re:.*mlp.experts.*"]), {}, CT_PLAIN),
        (ct(ignore=["re:mlp.experts.*"]), {}, CT),
        (ct(ignore=[EXPERTS]), {}, CT),
        (
            ct(inputs=DYNAMIC), {},
            "layer NotImplementedError: 4-bit weights with 8-bit activations have experts on NPUs only",
        ),
        (
            ct(inputs=DYNAMIC, num_bits=8), {},
            "layer NotImplementedError: 8-bit weights with 8-bit activations have experts on NPUs only"
            ' -> quantization="w8a8_int8"',
        ),
        (ct(inputs=DYNAMIC, num_bits=8), {"quantization": "w8a8_int8"},
         "w8a8_int8 W8A8Int8MoEMethod triton int8-w8a8/1"),
        (
            ct(ignore=["re:.*experts.*"]), {"quantization": "w8a8_int8"},
            "layer TypeError: experts that are to be ignored get the method of a linear layer",
        ),
    ],
)  # fmt: skip
def test_compressed_integers(config: Row, layer: Row, expected: str) -> None:
    assert decide(config, **layer) == expected


@pytest.mark.parametrize(
    ("layer", "expected"),
    [({}, CT), ({"capability": (10, 0)}, CT_TRITON), ({"runner": "triton"}, CT_TRITON),
     ({"runner": "flashinfer_trtllm"}, CT_INT4)],
)  # fmt: skip
def test_weights_that_do_not_say_it_are_symmetric(layer: Row, expected: str) -> None:
    config = ct()
    del config["config_groups"]["group_0"]["weights"]["symmetric"]
    assert decide(config, **layer) == expected


def test_fp8_that_does_not_say_it_is_symmetric() -> None:
    config = ct("float-quantized", TOKEN, **FLOAT, strategy="channel")
    del config["config_groups"]["group_0"]["weights"]["symmetric"]
    assert decide(config) == f"{CT8} triton None"


F = "fp8 Fp8MoEMethod"
FLOAT = {"num_bits": 8, "type": "float", "group_size": None}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CT8 = "compressed-tensors CompressedTensorsW8A8Fp8MoE"
CUT = "layer ValueError: the shard of 192 does not divide into blocks of 128 x 128 -> another tp, or expert parallelism"


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        (FP8, {}, f"{F} triton None"),
        ({**FP8, "activation_scheme": "static"}, {}, f"{F} triton None"),
        ({**FP8, "activation_scheme": "none"}, {},
         "config ValueError: activation_scheme none is not one of static, dynamic"),
        ({"quant_method": "fp8"}, {}, "config ValueError: the config has no activation_scheme"),
        (BLOCKS, {}, f"{F} triton None"),
        ({**BLOCKS, "weight_block_size": [128]}, {}, "config ValueError: weight_block_size [128] is not two sizes"),
        (
            {**BLOCKS, "activation_scheme": "static"}, {},
            "config ValueError: blocks need dynamic activations, activation_scheme is static",
        ),
        ({**FP8, "ignored_layers": ["mlp.experts"]}, {}, "fp8 UnquantizedFusedMoEMethod triton None plain"),
        ({**FP8, "modules_to_not_convert": ["mlp.experts"]}, {}, "fp8 UnquantizedFusedMoEMethod triton None plain"),
        ({**FP8, "ignored_layers": [], "modules_to_not_convert": ["mlp.experts"]}, {}, f"{F} triton None"),
        ({**FP8, "ignored_layers": ["layers.1.mlp."]}, {}, "fp8 UnquantizedFusedMoEMethod triton None plain"),
        ({**FP8, "ignored_layers": ["layers.1"]}, {}, "fp8 UnquantizedFusedMoEMethod triton None plain"),
        ({**FP8, "ignored_layers": ["layers.2", "ayers.1", "lm_head"]}, {}, f"{F} triton None"),
        ({**FP8, "ignored_layers": [f"{EXPERTS}.3.up_proj"]}, {}, "fp8 UnquantizedFusedMoEMethod triton None plain"),
        ({**FP8, "ignored_layers": ["model.layers.1.mlp.gate"]}, {}, f"{F} triton None"),
        (
            {**FP8, "ignored_layers": [EXPERTS]}, {"runner": "triton_kernel"},
            "fp8 UnquantizedFusedMoEMethod triton_kernel None plain",
        ),
        (
            {**FP8, "ignored_layers": [EXPERTS]}, {"runner": "deep_gemm"},
            "fp8 UnquantizedFusedMoEMethod triton None plain",
        ),
        *((FP8, {"runner": runner}, f"{F} triton None") for runner in ("flashinfer_cutlass", "flashinfer_cutedsl")),
        *((FP8, {"runner": runner}, f"{F} {runner} None")
          for runner in ("triton", "deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed")),
        *((FP8, {"runner": runner}, f"{F} None None stops") for runner in ("marlin", "triton_kernel")),
        (BLOCKS, {"runner": "cutlass"}, f"{F} None None"),
        (BLOCKS, {"runner": "cutlass", "capability": (10, 0)}, f"{F} None None"),
        (BLOCKS, {"runner": "cutlass", "capability": (12, 1)}, f"{F} None None"),
        (FP8, {"runner": "cutlass"},
         f"layer AssertionError: the cutlass runner takes FP8 with scales per block -> {AUTO}"),
        (
            BLOCKS, {"runner": "cutlass", "capability": (8, 6)},
            f"layer AssertionError: the cutlass runner has no FP8 on 8.6 -> {AUTO}",
        ),
        (
            BLOCKS, {"runner": "cutlass", "capability": (8, 9)},
            f"layer AssertionError: the cutlass runner does not run on 8.9 -> {AUTO}",
        ),
        (
            BLOCKS, {"runner": "cutlass", "capability": (11, 0)},
            f"layer AssertionError: the cutlass runner does not run on 11.0 -> {AUTO}",
        ),
        (BLOCKS, {"tp": 4}, CUT),
        (BLOCKS, {"tp": 4, "ep": True}, f"{F} triton None"),
        (BLOCKS, {"tp": 4, "runner": "flashinfer_trtllm"}, f"{F} flashinfer_trtllm None"),
        ({**BLOCKS, "weight_block_size": [64, 128]}, {"inter": 192}, f"{F} triton None"),
        ({**BLOCKS, "weight_block_size": [64, 128]}, {"tp": 4}, CUT.replace("128 x", "64 x")),
        ({**BLOCKS, "weight_block_size": [128, 64]}, {"inter": 192}, CUT.replace("x 128", "x 64")),
        (
            FP8, {"runner": "deep_gemm", "act": "gelu"},
            f"layer AssertionError: the deep_gemm runner has no activation gelu -> {AUTO}",
        ),
        (FP8, {"runner": "triton", "act": "gelu"}, f"{F} triton None"),
        ({**FP8, "quant_method": "mxfp8"}, {"inter": 32}, "mxfp8 Fp8MoEMethod triton None"),
        ({**FP8, "quant_method": "mxfp8"}, {"inter": 48}, "mxfp8 Fp8MoEMethod triton None"),
        (
            {**FP8, "quant_method": "mxfp8"}, {"inter": 96, "tp": 2},
            "layer ValueError: the shard of 48 does not divide into blocks of 1 x 32"
            " -> another tp, or expert parallelism",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, {}, "mxfp8 Fp8MoEMethod triton None"),
        (
            {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": [EXPERTS]}, {},
            "mxfp8 UnquantizedFusedMoEMethod triton None plain",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "MXFP8", "ignore": [EXPERTS]}}, {},
            "mxfp8 UnquantizedFusedMoEMethod triton None plain",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["lm_head"], "ignore": [EXPERTS]},
            {},
            "mxfp8 Fp8MoEMethod triton None",
        ),
        (ct("float-quantized", TOKEN, **FLOAT, strategy="channel"), {}, f"{CT8} triton None"),
        (ct("float-quantized", STATIC, **FLOAT, strategy="tensor"), {}, f"{CT8} triton None"),
        (ct("float-quantized", TOKEN, **FLOAT, strategy="block", block_structure=[128, 128]), {}, f"{CT8} triton None"),
        (ct("float-quantized", TOKEN, **FLOAT, strategy="block", block_structure=[128, 128]), {"tp": 4}, CUT),
        (ct("float-quantized", TOKEN, **FLOAT, strategy="block"), {"tp": 4}, f"{CT8} triton None"),
        (
            ct("float-quantized", STATIC, **FLOAT, strategy="channel"), {},
            "layer AssertionError: FP8 weights per channel with activations per tensor trip an assertion"
            ' -> quantization="w8a8_fp8"',
        ),
        (
            ct("float-quantized", TOKEN, **FLOAT, strategy="tensor"), {},
            "layer AssertionError: FP8 weights per tensor with activations per token trip an assertion",
        ),
        (
            ct("float-quantized", {**TOKEN, "dynamic": False}, **FLOAT, strategy="channel"), {},
            "layer ValueError: static activations with scales per token",
        ),
        *((ct("float-quantized", inputs, **FLOAT, strategy=strategy, symmetric=symmetric), {},
           f"layer RuntimeError: FP8 per {strategy} with these activations has no scheme for experts")
          for inputs, strategy, symmetric in ((None, "channel", True), (TOKEN, "channel", False))),
        (
            ct("float-quantized", TOKEN, **{**FLOAT, "group_size": 128}, strategy="group"), {},
            "layer RuntimeError: FP8 per group with these activations has no scheme for experts",
        ),
        *((ct("float-quantized", TOKEN, **FLOAT, strategy="channel"), {"runner": runner}, f"{CT8} {runner} None")
          for runner in ("flashinfer_trtllm", "flashinfer_trtllm_routed")),
        (ct("float-quantized", TOKEN, **FLOAT, strategy="channel"), {"runner": "marlin"}, f"{CT8} None None stops"),
        (
            ct("float-quantized", TOKEN, **FLOAT, strategy="channel"), {"quantization": "w8a8_fp8"},
            "w8a8_fp8 W8A8FP8MoEMethod triton None",
        ),
        ({"quant_method": "mxfp4"}, {}, "mxfp4 Mxfp4MoEMethod triton None"),
        *(({"quant_method": "mxfp4"}, {"runner": runner}, f"mxfp4 Mxfp4MoEMethod {runner} None")
          for runner in ("triton", "triton_kernel", "marlin", "deep_gemm", "flashinfer_mxfp4")),
        *(({"quant_method": "mxfp4"}, {"runner": "flashinfer_mxfp4", "capability": one},
           "mxfp4 Mxfp4MoEMethod flashinfer_mxfp4 None") for one in ((10, 0), (12, 0))),
        *(({"quant_method": "mxfp4"}, {"runner": "flashinfer_mxfp4", "capability": one},
           f"layer NotImplementedError: MXFP4 has no runner flashinfer_mxfp4 on this GPU -> {AUTO}")
          for one in ((8, 9), (11, 0))),
        (
            {"quant_method": "mxfp4"}, {"runner": "cutlass"},
            f"layer NotImplementedError: MXFP4 has no runner cutlass on this GPU -> {AUTO}",
        ),
        ({"quant_method": "mxfp4"}, {"runner": "marlin", "capability": (8, 9)},
         "mxfp4 Mxfp4MoEMethod marlin None stops"),
        ({"quant_method": "mxfp4"}, {"capability": (8, 9)}, "mxfp4 Mxfp4MoEMethod triton None"),
        ({"quant_method": "w4afp8"}, {"runner": "triton"}, "w4afp8 W4AFp8MoEMethod None None"),
        (ct("nvfp4-pack-quantized"), {"capability": (12, 0)},
         "compressed-tensors CompressedTensorsW4A16Nvfp4MoE marlin None"),
        (ct("nvfp4-pack-quantized", {}), {}, "compressed-tensors CompressedTensorsW4A16Nvfp4MoE marlin None"),
        (
            ct("nvfp4-pack-quantized", {}), {"capability": (10, 0)},
            "compressed-tensors CompressedTensorsW4A4Nvfp4MoE flashinfer_cutlass None",
        ),
        (
            ct("nvfp4-pack-quantized", {}), {"capability": (10, 0), "runner": "flashinfer_trtllm"},
            "compressed-tensors CompressedTensorsW4A4Nvfp4MoE flashinfer_trtllm None",
        ),
    ],
)  # fmt: skip
def test_floats(config: Row, layer: Row, expected: str) -> None:
    assert decide(config, **layer) == expected


N4, N8 = "modelopt_fp4 ModelOptNvFp4FusedMoEMethod", "modelopt_fp8 ModelOptFp8MoEMethod"
M8: Row = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("config", "layer", "expected"),
    [
        (NVFP4, {}, f"{N4} marlin None"),
        (NVFP4, {"capability": (8, 0)}, f"{N4} marlin None"),
        (NVFP4, {"capability": (10, 0)}, f"{N4} flashinfer_trtllm None"),
        (NVFP4, {"capability": (10, 0), "runner": "marlin"}, f"{N4} marlin None"),
        (NVFP4, {"runner": "marlin"}, f"{N4} marlin None"),
        (NVFP4, {"capability": (7, 5)}, "layer ValueError: NVFP4 does not run with the runner auto before Blackwell"),
        (
            NVFP4, {"runner": "triton"},
            "layer ValueError: NVFP4 does not run with the runner triton before Blackwell"
            " -> --moe-runner-backend marlin",
        ),
        (NVFP4, {"capability": (7, 5), "runner": "marlin"}, f"{N4} marlin None"),
        (
            NVFP4, {"capability": (10, 0), "runner": "cutlass"},
            f"layer NotImplementedError: NVFP4 has no runner cutlass -> {AUTO}",
        ),
        (
            NVFP4, {"capability": (10, 0), "runner": "deep_gemm", "act": "gelu"},
            f"layer AssertionError: the deep_gemm runner has no activation gelu -> {AUTO}",
        ),
        *(({**NVFP4, "quant_algo": name}, {}, f"{N4} marlin None") for name in ("NVFP4_AWQ", "W4A16_NVFP4")),
        ({**NVFP4, "quant_algo": "W4A8_NVFP4_FP8"}, {}, "config ValueError: modelopt_fp4 does not read W4A8_NVFP4_FP8"),
        ({**NVFP4, "ignore": None}, {}, "config ValueError: modelopt_fp4 needs a list of excluded modules"),
        *(({"quant_method": "modelopt", "quant_algo": "NVFP4", key: [EXPERTS]}, {},
           "modelopt_fp4 UnquantizedFusedMoEMethod triton None plain")
          for key in ("ignore", "modules_to_not_convert", "exclude_modules")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, f"{N4} marlin None"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, {}, f"{N4} marlin None"),
        (M8, {}, f"{N8} triton None"),
        (M8, {"runner": "flashinfer_cutlass"}, f"{N8} flashinfer_cutlass None"),
        (M8, {"runner": "flashinfer_trtllm"}, f"{N8} triton None"),
        ({**M8, "ignore": ["*experts*"]}, {}, "modelopt_fp8 UnquantizedFusedMoEMethod triton None plain"),
        ({**M8, "ignore": ["mlp"]}, {}, "modelopt_fp8 UnquantizedFusedMoEMethod triton None plain"),
        ({**M8, "ignore": ["*gate*", "mlp.experts"]}, {}, f"{N8} triton None"),
        (
            {**M8, "ignore": ["*experts*"]}, {"runner": "deep_gemm"},
            "modelopt_fp8 UnquantizedFusedMoEMethod deep_gemm None plain",
        ),
        (
            {**M8, "ignore": ["*experts*"]}, {"runner": "deep_gemm", "act": "gelu"},
            "layer AssertionError: unquantised experts with activation gelu on deep_gemm",
        ),
        (
            {**M8, "quant_algo": "INT4_AWQ"}, {},
            "config ValueError: modelopt reads FP8, this is INT4_AWQ -> no quantization",
        ),
        ({"quant_method": "modelopt"}, {}, "config ValueError: the config has no quantization"),
        ({"quant_method": "modelopt", "quantization": {}}, {}, "config ValueError: the config has no quant_algo"),
        ({"quant_method": "modelopt", "quantization": "FP8"}, {}, "config ValueError: the config has no quant_algo"),
        (M8, {"quantization": "modelopt"}, f"{N8} triton None"),
        (NVFP4, {"quantization": "modelopt"}, f"{N4} marlin None"),
        (NVFP4, {"quantization": "modelopt_fp8"}, f"{N4} marlin None"),
    ],
)  # fmt: skip
def test_modelopt(config: Row, layer: Row, expected: str) -> None:
    assert decide(config, **layer) == expected
