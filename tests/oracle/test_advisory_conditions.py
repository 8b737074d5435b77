"""Each condition of an advisory: a decision that meets it, and single changes that end it, and that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import POLICY, gpu
from oracle.examples import SHAPE

from moeq.deploy.gpus import Gpu
from moeq.oracle.engines.vllm.advisories import CONDITIONS
from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.outcome import Outcome
from moeq.oracle.engines.vllm.select import Selection
from moeq.oracle.records import CandidateReport, EngineError, Gate, Reason

Row = dict[str, Any]
EXPERTS = "model.layers.0.mlp.experts"
MARLIN = ("MARLIN", "MarlinExperts")
GPTQ = {"name": "AutoGPTQMoEMethod", "config": "gptq"}
WNA16 = {"name": "MoeWNA16Method", "config": "moe_wna16"}
#: A capability of 12.0, a GPU without one, AMD's and a processor.
NEW, PLAIN = Gpu("new", "cuda", "sm120", (12, 0)), Gpu("x86", "cpu", "x86")
AMX, MI300 = Gpu("x86-amx", "cpu", "x86-amx"), Gpu("MI300X", "rocm", "gfx942")


def made(
    *, runs: tuple[str, str | None] | None = ("TRITON", "TritonExperts"), supported: bool = True,
    key: str | None = None, error: str | tuple[str, str] | None = None, failed: str = "", passed: str = "",
    entry: str = "gptq", config: Row | None = None, missing: tuple[int, ...] = (), bias_reason: str = "",
    refused: bool = False, flag: str = "marlin", **fields: Any,
) -> Outcome:  # fmt: skip
    """A decision with these facts; fields of the layer, the method and the deployment by their names."""
    shape = {name: fields.pop(name) for name in list(fields) if hasattr(SHAPE, name)}
    method: Row = {"name": "Any", "family": "wna16", "config": "ct", "weight_key": "kInt4Static", "group_size": 128}
    method |= {"bits": 4, **fields.pop("method", {})}
    method |= {one: fields.pop(one) for one in list(fields) if one in Method.__dataclass_fields__ and one != "name"}
    where = fields.pop("gpu", None)
    deployment = gpu("H100", **fields)
    deployment = deployment if where is None else replace(deployment, gpu=where)
    selected = CandidateReport(*runs, None, None, supported, activation_key=key) if runs and not error else None
    kinds = ("ValueError", error) if isinstance(error, str) else error
    row = CandidateReport(
        "MARLIN", None, None, None, False, (Reason(bias_reason, ""),) if bias_reason else (), flag=flag
    )
    selection = Selection(selected, EngineError(*kinds, "") if kinds else None, (row,))
    gates = [Gate(code, "", False, "") for code in failed.split()] + [
        Gate(code, "", True, "") for code in passed.split()
    ]
    case = Case(POLICY, deployment, replace(SHAPE, **shape), Method(**method))
    return Outcome(case, entry, selection, tuple(gates), refused, config or {}, EXPERTS, missing)


FP8 = {"method": {"name": "Fp8MoEMethod", "family": "fp8", "config": "fp8", "weight_key": "kFp8StaticTensorSym"}}
NVFP4 = {
    "method": {"name": "ModelOptNvFp4FusedMoE", "family": "nvfp4", "config": "modelopt", "weight_key": "kNvfp4Static"}
}
#: Condition -> facts that meet it, changes that end it, changes that do not.
TABLE: dict[str, tuple[Row, list[Row], list[Row]]] = {
    "w13_scale_order": (
        {"runs": MARLIN, "group_size": 768},
        [{"group_size": 767}, {"group_size": 2048}, {"group_size": None}, {"runs": None}, {"family": "int8"},
         {"runs": ("TRITON", "TritonExperts")}, {"group_size": 384}],
        [{"group_size": 769}, {"group_size": 2047}, {"tp": 2}, {"group_size": 384, "tp": 2},
         {"runs": ("BATCHED_MARLIN", "BatchedMarlinExperts")}],
    ),
    "bias_assumed": (
        {"error": "OVERRIDE_UNSUPPORTED", "bias_reason": "F02_BIAS", "backend": "marlin"},
        [{"has_bias": True}, {"error": "NO_BACKEND"}, {"bias_reason": "F01"}, {"flag": "triton"}, {"bias_reason": ""}],
        [{"tp": 2}],
    ),
    "backend_never_works": (
        {"backend": "marlin", "family": "w4a8-int8"},
        [{"backend": "auto"}, {"family": "wna16"}, {"family": "mxfp4"}],
        [{"backend": "nobody's"}, {"backend": "nobody's", "family": "wna16"},
         {"backend": "flashinfer_cutlass", "family": "mxfp4", "gpu": NEW}],
    ),
    "int8_online": ({"method": {"name": "Int8OnlineMoEMethod"}}, [{"method": {"name": "Int8"}}], []),
    "precision_differs": (
        {**FP8, "activation_key": "kFp8StaticTensorSym", "runs": MARLIN},
        [{"activation_key": None}, {"runs": None}, {"method": {"name": "Int8OnlineMoEMethod"}},
         {"runs": ("TRITON", "TritonExperts"), "key": "kFp8StaticTensorSym"}],
        [{"activation_key": "kMxfp4Dynamic"}],
    ),
    "flashinfer_padding": (
        {**NVFP4, "runs": ("FLASHINFER_TRTLLM", "X"), "intermediate_size": 96},
        [{"gated": False}, {"runs": ("FLASHINFER_CUTLASS", "X")}, {"intermediate_size": 128}, {"runs": None},
         {**FP8}, {**FP8, "intermediate_size": 104, "runs": ("TRITON", "X")},
         {**FP8, "intermediate_size": 104, "weight_key": "kFp8Static128BlockSym"}],
        [{"intermediate_size": 64, "tp": 2}, {**FP8, "intermediate_size": 104},
         {**FP8, "intermediate_size": 104, "runs": ("FLASHINFER_CUTLASS", "X")}],
    ),
    "block_list": (
        {"config": {"modules_in_block_to_quantize": [["self_attn.q_proj"], "mlp.gate"]}},
        [{"entry": "awq"}, {"config": {"modules_in_block_to_quantize": []}}, {"config": {}},
         {"config": {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.experts.0.up_proj"]]}},
         {"config": {"modules_in_block_to_quantize": ["mlp.experts"]}}],
        [{"config": {"modules_in_block_to_quantize": ["self_attn.q_proj"]}}],
    ),
    "gptq_v2": (
        {"config": {"checkpoint_format": "gptq_v2"}, "entry": "gptq"},
        [{"config": {"checkpoint_format": "gptq"}}, {"entry": "awq"}, {"runs": MARLIN}],
        [{"entry": "moe_wna16"}, {"runs": ("CPU", None)}, {"runs": ("RDNA3", None)}],
    ),
    "humming_gptq": (
        {"method": {"name": "HummingMoEMethod", "bits": 3},
         "config": {"quant_method": "gptq", "checkpoint_format": "gptq_p"}},
        [{"method": {"name": "AutoGPTQMoEMethod"}}, {"config": {"quant_method": "awq", "checkpoint_format": "gptq_p"}},
         {"method": {"name": "HummingMoEMethod", "bits": 4}}, {"method": {"name": "HummingMoEMethod", "bits": 8}},
         {"config": {"quant_method": "gptq"}}, {"config": {"quant_method": "gptq", "sym": True}},
         {"config": {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_v2"}},
         {"config": {"quant_method": "gptq", "sym": False, "checkpoint_format": "gptq_p"}, "bits": 4}],
        [{"method": {"name": "HummingMoEMethod", "bits": bits}} for bits in (5, 6, 7)]
        + [{"config": {"quant_method": "gptq", "sym": False}}],
    ),
    "new_architecture": (
        {"gpu": NEW},
        [{"gpu": replace(NEW, capability=(10, 3))}, {"gpu": replace(NEW, capability=(10, 0))}, {"gpu": PLAIN},
         {"runs": None}],
        [{"gpu": replace(NEW, capability=(11, 0))}],
    ),
    "first_class_unasked": (
        {"first_class": True, "supported": False}, [{"first_class": False}, {"supported": True}, {"runs": None}], [],
    ),
    "unprintable_key": (
        {"error": ("KeyError", "OTHER")},
        [{"error": ("KeyError", "CONFIG")}, {"error": ("ValueError", "OTHER")}, {"error": None}], [],
    ),
    "act_order_one_group": (
        {"act_order": True, "runs": MARLIN, "group_size": 768},
        [{"act_order": False}, {"runs": ("TRITON", "X")}, {"tp": 2}, {"tp": 2, "group_size": 384}, {"group_size": 384}],
        [{"group_size": 2048}, {"tp": 2, "ep": 2}],
    ),
    "uncalibrated_fp8": (
        {**FP8, "missing": (1,), "runs": ("TRITON", "X"), "key": "kFp8StaticTensorSym"},
        [{"missing": ()}, {"family": "nvfp4"}, {"runs": MARLIN}, {"runs": None}, {"key": None}],
        [{"missing": (0, 7)}],
    ),
    "channel_assertion": (
        {"marlin_assertion": True, "error": "BARE_ASSERTION"},
        [{"marlin_assertion": False}, {"act_order": True}, {"error": "CONFIG"}], [],
    ),
    "quark_converter": (
        {"entry": "quark", "failed": "G8", "passed": "G7"},
        [{"entry": "gptq"}, {"failed": "G7", "passed": "G8"}, {"failed": ""}], [{"failed": "G7 G8"}],
    ),
    "hard_wired": ({"family": "mxfp4-ct"}, [{"family": "mxfp4"}], []),
    "awq_order_unseen": (
        {"method": {"config": "awq"}, "runs": ("XPU", None)},
        [{"method": {"config": "gptq"}}, {"runs": MARLIN}, {"runs": None}], [{"runs": ("ZEN_CPU", None)}],
    ),
    "wna16_ep_zero_points": (
        {"method": WNA16, "raw_zero_points": True, "tp": 2, "ep": 2},
        [{"method": GPTQ}, {"raw_zero_points": False}, {"ep": 1}], [],
    ),
    "int8_activation_check": (
        {"method": GPTQ, "env": {"VLLM_MARLIN_INPUT_DTYPE": "int8"}},
        [{"method": WNA16}, {"env": {}}, {"env": {"VLLM_MARLIN_INPUT_DTYPE": "fp8"}}], [],
    ),
    "input_dtype_lost": (
        {"env": {"VLLM_MARLIN_INPUT_DTYPE": "fp8"}, "runs": MARLIN, "method": {"config": "awq"}},
        [{"env": {}}, {"runs": ("TRITON", "X")}, {"method": {"config": "gptq"}}],
        [{"method": {"config": "inc"}}, {"method": {"config": "ct"}}, {"env": {"VLLM_MARLIN_INPUT_DTYPE": "int8"}}],
    ),
    "awq_alias": (
        {"refused": True, "entry": "awq", "config": {"w_bit": 4}},
        [{"refused": False}, {"entry": "gptq"}, {"config": {}}, {"config": {"w_bit": 4, "bits": 4}}], [],
    ),
    "gptq_asymmetric": (
        {"refused": True, "entry": "gptq", "config": {"sym": False}},
        [{"refused": False}, {"entry": "awq"}, {"config": {}}, {"config": {"sym": True}}, {"config": {"sym": 0}}], [],
    ),
    "negative_groups": (
        {"method": WNA16, "group_size": -1},
        [{"method": GPTQ}, {"group_size": 0}, {"group_size": None}, {"group_size": 1}],
        [{"method": {"name": "AutoAWQMoEMethod"}}],
    ),
    "gpt_oss_lora_rocm": (
        {"gpu": MI300, "entry": "gpt_oss_mxfp4", "error": "NO_BACKEND", "lora": True},
        [{"gpu": NEW}, {"entry": "mxfp4"}, {"error": "CONFIG"}, {"lora": False}], [],
    ),
    "bare_assertion": ({"error": "BARE_ASSERTION"}, [{"error": "CONFIG"}, {"error": None}], []),
    "emulation": ({"runs": ("EMULATION", "X")}, [{"family": "mxfp4"}, {"runs": MARLIN}], []),
    "emulation_zero": (
        {"runs": ("EMULATION", "X"), "method": {"config": "gptq"}, "config": {}},
        [{"runs": MARLIN}, {"method": {"config": "awq"}}, {"config": {"checkpoint_format": "gptq_v2"}}],
        [{"config": {"checkpoint_format": "gptq"}}],
    ),
    "interleaved_padding": (
        {"runs": MARLIN, "intermediate_size": 192 + 32, "activation": "swigluoai", "group_size": 32},
        [{"activation": "silu"}, {"intermediate_size": 256}, {"runs": ("TRITON", "X")}, {"family": "int8"}], [],
    ),
    "non_gated_padding": (
        {"runs": MARLIN, "intermediate_size": 192 + 32, "gated": False, "group_size": 32},
        [{"gated": True}, {"intermediate_size": 256}, {"runs": ("TRITON", "X")}], [],
    ),
    "later_gate_fails": (
        {"failed": "G6"}, [{"failed": ""}, {"failed": "G5"}, {"failed": "", "passed": "G6 G7"}, {"runs": None}],
        [{"failed": code} for code in ("G7", "G8", "G9", "G5 G9")],
    ),
    "group32_cpu": (
        {"gpu": AMX, "weight_key": "kInt4Static32", "error": "NO_BACKEND"},
        [{"gpu": PLAIN}, {"weight_key": "kInt4Static"}, {"error": "CONFIG"}], [],
    ),
    "mxint4_bytes": (
        {"runs": ("FLASHINFER_TRTLLM", "X"), "method": {"config": "moe_wna16"}},
        [{"runs": MARLIN}, {"method": {"config": "gptq"}}], [],
    ),
    "override_mixed": (
        {"family": "unquantized", "error": "OVERRIDE_UNKNOWN"},
        [{"family": "wna16"}, {"error": "OVERRIDE_UNSUPPORTED"}], [],
    ),
    "cutlass_mxfp4_hopper": (
        {"runs": ("FLASHINFER_CUTLASS_MXFP4_BF16", "X")}, [{"gpu": NEW}, {"runs": MARLIN}], [],
    ),
    "nvfp4_non_gated": (
        {**NVFP4, "activation": "relu2_no_mul", "runs": ("FLASHINFER_TRTLLM", "X")},
        [{**FP8}, {"activation": "silu"}, {"runs": MARLIN}], [],
    ),
    "marlin_mxfp4_fp16": (
        {"runs": MARLIN, "family": "mxfp4-generic", "dtype": "fp16"},
        [{"runs": ("TRITON", "X")}, {"family": "nvfp4"}, {"dtype": "bf16"}], [{"family": "mxfp4"}],
    ),
    "wna16_8bit_zero_points": (
        {"method": {**WNA16, "bits": 8}, "raw_zero_points": True},
        [{"method": {**GPTQ, "bits": 8}}, {"raw_zero_points": False}, {"method": {**WNA16, "bits": 4}}], [],
    ),
    "nvfp4_split_groups": (
        {**NVFP4, "intermediate_size": 1864},
        [{**FP8}, {"runs": None}, {"intermediate_size": 1856}], [{"intermediate_size": 1856, "tp": 8}],
    ),
    "gemma4": (
        {"architecture": "Gemma4ForCausalLM"}, [{"architecture": "Gemma3"}, {"architecture": "XGemma4"}], [],
    ),
    "rules_before_fallback": (
        {"method": WNA16, "entry": "gptq", "config": {"dynamic": {r"-:.*mlp\.experts": {}}}},
        [{"method": GPTQ}, {"entry": "awq"}, {"config": {"dynamic": {r"-:.*self_attn": {}}}}, {"config": {}},
         {"config": {"dynamic": {r"mlp\.experts": {}}}}],
        [{"config": {"dynamic": {r"+:model\.layers\.0": {}}}}, {"config": {"dynamic": {r"model\.layers": {}}}}],
    ),
    "per_expert_rules": (
        {"entry": "gptq", "config": {"dynamic": {rf"+:{EXPERTS}\.7\.down_proj": {}}}},
        [{"config": {"dynamic": {rf"+:{EXPERTS}": {}}}}, {"config": {"dynamic": {r"+:.*self_attn": {}}}},
         {"config": {"dynamic": {rf"+:{EXPERTS}\.128\.": {}}}}, {"entry": "fp8"},
         {"entry": "awq", "config": {"modules_to_not_convert": [EXPERTS]}},
         {"entry": "awq", "config": {"modules_to_not_convert": ["gate"]}}, {"entry": "awq", "config": {}},
         {"entry": "compressed-tensors", "config": {"ignore": [f"{EXPERTS}.0.up_proj"]}},
         {"entry": "compressed-tensors", "config": {"ignore": ["lm_head", f"re:{EXPERTS}.*"]}},
         {"entry": "compressed-tensors", "config": {"ignore": [f"re:{EXPERTS}[.]0[.]up_proj"]}},
         {"entry": "compressed-tensors", "config": {"ignore": [f"{EXPERTS}.128.up_proj"]}},
         {"entry": "compressed-tensors", "config": {}}],
        [{"config": {"dynamic": {rf"-:{EXPERTS}\.{expert}\.": {}}}} for expert in (0, 1, 127)]
        + [{"entry": "awq", "config": {"modules_to_not_convert": [f"experts.{expert}."]}} for expert in (0, 5)]
        + [{"entry": "compressed-tensors", "config": {"ignore": [f"{EXPERTS}.127.gate_proj"]}},
           {"entry": "compressed-tensors", "config": {"ignore": [f"{EXPERTS}.1.down_proj"]}},
           {"entry": "compressed-tensors", "config": {"ignore": [rf"re:{EXPERTS}\.1\..*"]}}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_ends_a_condition_and_what_does_not(name: str) -> None:
    facts, ends, stays = TABLE[name]
    assert CONDITIONS[name](made(**facts))
    for change in ends:
        assert not CONDITIONS[name](made(**{**facts, **change})), change
    for change in stays:
        assert CONDITIONS[name](made(**{**facts, **change})), change


@pytest.mark.parametrize(
    ("name", "flag", "facts", "ends"),
    [
        ("lora_ignored", "ignores_lora", {"lora": True}, [{"lora": False}]),
        ("bias_dropped", "drops_bias", {"has_bias": True}, [{"has_bias": False}]),
        ("zero_points_dropped", "drops_zero_points", {"raw_zero_points": True}, [{"raw_zero_points": False}]),
        ("scaling_dropped", "drops_scaling", {"swiglu_limit": 7.0}, [{"swiglu_limit": None}]),
        ("scaling_dropped", "drops_scaling", {"routed_scaling_factor": 2.5}, [{"routed_scaling_factor": 1.0}]),
        ("scaling_dropped", "drops_scaling", {"activation": "swigluoai"}, [{"activation": "silu"}]),
    ],
)
def test_what_classes_drop(name: str, flag: str, facts: Row, ends: list[Row]) -> None:
    """The flag of the class that runs counts, and that of no other."""
    classes: dict[bool, tuple[str, str]] = {}
    for name_of_class, one in POLICY.classes.items():
        classes.setdefault(bool(getattr(one, flag)), ("ANY", name_of_class))
    assert set(classes) == {True, False}, classes
    assert CONDITIONS[name](made(runs=classes[True], **facts))
    assert not CONDITIONS[name](made(runs=classes[False], **facts))
    assert not CONDITIONS[name](made(runs=None, **facts))
    for change in ends:
        assert not CONDITIONS[name](made(runs=classes[True], **{**facts, **change}))


def test_biases_that_awqs_method_drops() -> None:
    facts: Row = {"has_bias": True, "runs": MARLIN, "method": {"config": "awq"}}
    assert CONDITIONS["bias_dropped"](made(**facts))
    for change in ({"has_bias": False}, {"runs": None}, {"method": {"config": "gptq"}}):
        assert not CONDITIONS["bias_dropped"](made(**{**facts, **change}))


def test_every_condition_is_tried() -> None:
    dropped = {"lora_ignored", "bias_dropped", "zero_points_dropped", "scaling_dropped"}
    assert set(TABLE) | dropped == set(CONDITIONS)
