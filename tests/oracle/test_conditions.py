"""Single conditions of vLLM's classes and configs, at their edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import POLICY, ask, candidate, ct, gptq, gpu
from oracle.examples import SHAPE, every_scheme, scheme

from moeq.layouts.readers import Only
from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.question import ConfigQuestion, ConfigRefusal, check_selected, integer, required
from moeq.oracle.engines.vllm.filters import marlin_shape
from moeq.oracle.engines.vllm.linears import linears_of, renamings
from moeq.oracle.engines.vllm.outcome import resolve
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.engines.vllm.select import _holds as holds
from moeq.oracle.engines.vllm.select import _search_form
from moeq.oracle.engines.vllm.tables import patched
from moeq.oracle.engines.vllm.unlocks import on_kind
from moeq.oracle.judge import judge_config


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "expected"),
    [
        ("A100", "bf16", "sm90", "bf16"),
        ("A100", "bf16", "sm75", "fp16"),  # the default there
        ("A100", "fp16", "sm90", "fp16"),  # asked for
        ("T4", "fp16", "sm90", "bf16"),
    ],
)
def test_another_device_has_its_own_default_dtype(name: str, dtype: Any, kind: str, expected: str) -> None:
    found = on_kind(gpu(name, dtype=dtype), kind)
    assert (found.dtype, found.gpu.arch) == (expected, kind)


def test_keys_of_a_config() -> None:
    assert required({"w_bit": 4, "bits": 8}, "bits", "w_bit") == 8
    assert integer({"w_bit": 4}, "bits", "w_bit") == 4
    for config, text in (({}, "lacks bits / w_bit"), ({"bits": True}, "bits is True"), ({"bits": 4.0}, "bits is 4.0")):
        with pytest.raises(ConfigRefusal, match=text):
            integer(config, "bits", "w_bit")


def test_changes_of_a_table() -> None:
    table = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    changes = {"a": None, "b": {"c": None, "f": 5}, "e": {"g": 6}, "missing": None}
    assert patched(table, changes) == {"b": {"d": 3, "f": 5}, "e": {"g": 6}}
    assert table == {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}


@pytest.mark.parametrize("activation", ["silu", "relu2", "relu2_no_mul"])
def test_experts_without_a_gate_are_asked_for_by_an_activation_of_their_own(activation: str) -> None:
    single = replace(SHAPE, activation=activation, gated=False)
    assert judge_config(gptq(), single, gpu("H100")).ok
    gated = judge_config(gptq(), replace(single, gated=True), gpu("H100"))
    assert gated.ok is (activation != "relu2")
    if not gated.ok:
        texts = [reason.text for reason in candidate(gated, "MARLIN").reasons]
        assert any(text.startswith("activation relu2 is not one of silu, ") for text in texts)


FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
HELD = {
    "dtype": "bf16", "env": "A=1", "configs": ("x", "gptq"), "weights": ("kInt4Static", "y"), "activations": "none",
    "devices": ("rocm", "cuda 9.0"), "max_tp": 2, "activation": "silu",
}  # fmt: skip
FAILED = {
    "dtype": "fp16", "env": "A=2", "configs": ("x",), "weights": ("y",), "activations": "kInt8DynamicTokenSym",
    "devices": ("rocm", "cuda 8.0"), "max_tp": 1, "activation": "gelu",
}  # fmt: skip


def test_conditions_of_layouts() -> None:
    """Each condition counts by itself, and all together; one that is None holds."""
    case = resolve(POLICY, gptq(), SHAPE, gpu("H100", env={"A": "1"}, tp=2)).case
    assert case.method.weight_key == "kInt4Static"
    assert holds(case, Only())
    assert holds(case, Only(**HELD))
    for name, value in FAILED.items():
        assert not holds(case, Only(**{name: value})), name
        assert not holds(case, Only(**{**HELD, name: value})), name
        assert holds(case, Only(**{name: HELD[name]})), name
    assert not holds(case, Only(env="B=1"))


@pytest.mark.parametrize(
    ("inter", "hidden", "tp", "group", "text", "remedy"),
    [
        (768, 2048, 1, 128, None, None),
        (768, 2048, 4, 32, None, None),
        (128, 2048, 2, 128, None, None),  # one group: a scale per channel
        (768, 2048, 4, 128, "tp 4 cuts groups of 128: 192 per rank leaves 64", "tp 2 (384 per rank) or ep 4"),
        (768, 2080, 1, 128, "hidden size 2080 is not a multiple of group size 128", None),
    ],
)
def test_groups_that_moeqs_kernels_would_cut(inter, hidden, tp, group, text, remedy) -> None:
    shape = replace(SHAPE, intermediate_size=inter, hidden_size=hidden)
    found = ask(scheme("gptq", group=group), gpu("H100", engine="moeq", tp=tp), shape)
    cut = {(r.text, r.remedy) for row in found.candidates for r in row.reasons if r.code == "K05_GROUP_CUT"}
    assert found.ok is (text is None)
    assert cut == (set() if text is None else {(text, remedy)})


@pytest.mark.parametrize(("group", "strategy"), [(32, "group"), (-1, "channel"), (None, "tensor")])
def test_a_strategy_that_is_left_out(group: int | None, strategy: str) -> None:
    """compressed-tensors tells it from the group size (`QuantizationArgs.validate_model_after`)."""
    for symmetric in (True, False):
        bare, full = (ct(group_size=group, symmetric=symmetric, strategy=one) for one in (None, strategy))
        one, other = (judge_config(config, SHAPE, gpu("A100")) for config in (bare, full))
        assert (one.ok, one.weight_key, one.convert, one.error) == (
            other.ok,
            other.weight_key,
            other.convert,
            other.error,
        )


@pytest.mark.parametrize(
    ("where", "group", "fields", "method"),
    [
        ("gfx950", 32, {"backend": "flydsl"}, "CompressedTensorsW4A16FlydslMoEMethod"),
        ("gfx950", 32, {"backend": "flydsl", "lora": True}, "CompressedTensorsWNA16MoEMethod"),
        ("gfx950", 32, {}, "CompressedTensorsWNA16MoEMethod"),
        ("gfx950", 64, {"backend": "flydsl"}, "CompressedTensorsWNA16MoEMethod"),
        ("gfx942", 32, {"backend": "flydsl"}, "CompressedTensorsWNA16MoEMethod"),
        ("gfx1100", 32, {}, "CompressedTensorsWNA16RDNA3MoEMethod"),
    ],
)
def test_kernels_inside_the_method_of_old_versions(where: str, group: int, fields: Any, method: str) -> None:
    assert judge_config(ct(group), SHAPE, gpu(where, engine="vllm@0.26.0", **fields)).method == method


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"pcp": 2, "ep": 2}, "ep"),
        ({"pcp": 2, "ep": 2, "lora": True}, "ep:allgather_reducescatter"),
        ({"dp": 2, "ep": 2}, "ep:allgather_reducescatter"),
        ({"dp": 2, "ep": 2, "lora": True}, "ep:allgather_reducescatter"),
        ({"pcp": 2, "ep": 2, "all2all": "deepep_low_latency"}, "ep:deepep_low_latency"),
        ({"tp": 2, "ep": 2}, "ep"),
        ({"dp": 2}, "dp"),
        ({"tp": 2}, "tp"),
        ({"pcp": 2}, "tp"),
        ({}, "single"),
        ({"dp": 2, "ep": 2, "eplb": True}, "ep:allgather_reducescatter+eplb"),
        ({"dp": 2, "ep": 2, "all2all": "nobody's"}, "ep:allgather_reducescatter"),
    ],
)
def test_the_parallel_form_that_decides_the_order(fields: dict[str, Any], form: str) -> None:
    """Context-parallel ranks count as data-parallel ones with LoRA alone."""
    assert _search_form(resolve(POLICY, gptq(), SHAPE, gpu("H100", **fields)).case) == form


@pytest.mark.parametrize(
    ("config", "name", "hidden", "fields", "cut"),
    [
        (FP8_BLOCKS, "B200", 2080, {"backend": "flashinfer_trtllm"}, True),
        (FP8_BLOCKS, "B200", 2048, {"backend": "flashinfer_trtllm"}, False),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "B200", 2080, {"backend": "flashinfer_trtllm"}, False),
        (FP8_BLOCKS, "H100", 2080, {"backend": "triton"}, False),
    ],
)
def test_blocks_that_flashinfer_cuts(config: Any, name: str, hidden: int, fields: Any, cut: bool) -> None:
    found = judge_config(config, replace(SHAPE, hidden_size=hidden), gpu(name, **fields), explain=False)
    texts = [gate.text for gate in found.gates if not gate.passed]
    said = f"conversion to FLASHINFER_TRTLLM: hidden size {hidden} is no multiple of 128, so FP8 blocks are cut"
    assert found.chosen is not None or texts
    assert (said in texts) is cut, texts


@pytest.mark.parametrize(
    ("config", "fields", "errors"),
    [
        (ct(128), {"tp": 16}, {"ValueError"}),
        (gptq(), {"tp": 16, "quantization": "moe_wna16"}, {"AssertionError"}),
        (gptq(group_size=32), {"tp": 32, "quantization": "moe_wna16"}, {"AssertionError"}),
        (gptq(), {"tp": 8, "quantization": "moe_wna16"}, set()),
    ],
)
def test_which_methods_halve_groups(config: Any, fields: dict[str, Any], errors: set[str]) -> None:
    found = judge_config(config, SHAPE, gpu("A100", **fields), explain=False)
    assert {gate.error for gate in found.gates if gate.code == "G7" and not gate.passed} == errors
    assert errors or found.ok


def test_prefixes_that_a_class_renames() -> None:
    assert renamings("0.33.0", "Gemma4ForCausalLM") == {"model.language_model.": "model."}
    assert renamings("0.33.0", "NobodysForCausalLM") is None
    shape = replace(SHAPE, architecture="Gemma4ForCausalLM")
    where, inner = gpu("H100"), "model.language_model.layers.0.moe.experts"
    for prefix in (inner, "model.layers.0.moe.experts"):
        question = ConfigQuestion({}, resolve(POLICY, gptq(), shape, where).case, prefix)
        assert question.renamed(inner) == "model.layers.0.moe.experts"
        assert question.renamed(f"x.{inner}") == f"x.{inner}"
    plain = ConfigQuestion({}, resolve(POLICY, gptq(), SHAPE, where).case)
    assert plain.renamed(inner) == inner


def test_nothing_else_is_written_where_a_backend_is_asked_for() -> None:
    """A requested backend that does not run it leaves nothing to convert for; the automatic choice does."""
    plain = judge_config(gptq(), SHAPE, gpu("H100"), explain=False)
    assert plain.convert is not None
    supported = {row.flag for row in plain.candidates if row.supported}
    refused = next(row.flag for row in plain.candidates if row.flag and row.flag not in supported)
    asked = judge_config(gptq(), SHAPE, gpu("H100", backend=refused), explain=False)
    assert any(row.supported and row.layout for row in asked.candidates)
    assert (asked.ok, asked.convert, asked.no_convert) == (False, None, None)


def test_nothing_else_is_written_where_the_native_kernel_runs() -> None:
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    found = judge_config(config, SHAPE, gpu("H100"), explain=False)
    assert found.selected is not None
    assert found.selected.native
    assert found.convert is None or found.convert.backend == found.selected.backend


@pytest.mark.parametrize(
    ("backend", "version", "fits"),
    [
        ("MARLIN", "0.33.0", False), ("CPU", "0.33.0", False), ("CPU_W8A8", "0.33.0", False),
        ("FLASHINFER_CUTLASS", "0.33.0", False), ("FLASHINFER_TRTLLM", "0.33.0", False), ("TRITON", "0.33.0", True),
        ("MARLIN", "0.32.0", True),
    ],
)  # fmt: skip
def test_backends_without_scales_of_channels(backend: str, version: str, fits: bool) -> None:
    method = Method("Fp8PtpcOnlineMoEMethod", "fp8", "online", "kFp8StaticChannelSym", "kFp8DynamicTokenSym", 8, -1)
    case = Case(load_policy(f"vllm@{version}"), gpu("H100"), SHAPE, method)
    if fits:
        check_selected(case, backend)
    else:
        with pytest.raises(ConfigRefusal, match=f"{backend} does not apply one scale per output channel"):
            check_selected(case, backend)
    check_selected(replace(case, method=replace(method, name="Fp8PerTensorOnlineMoEMethod")), backend)


@pytest.mark.parametrize(
    ("fields", "backend", "said"),
    [
        ({"marlin_assertion": True}, "MARLIN", None), ({"marlin_assertion": True}, "BATCHED_MARLIN", None),
        ({"marlin_assertion": True}, "HUMMING", "per-channel scales: HUMMING is selected and a check"),
        ({"marlin_assertion": True, "act_order": True}, "TRITON", "act-order: TRITON is selected and a check"),
        ({"symmetric_assertion": True, "raw_zero_points": True}, "TRITON", "zero points: TRITON is selected"),
        ({"symmetric_assertion": True, "raw_zero_points": True}, "MARLIN", None),
        ({"symmetric_assertion": True}, "TRITON", None), ({"raw_zero_points": True}, "TRITON", None),
    ],
)  # fmt: skip
def test_assertions_about_the_selected_backend(fields: dict[str, Any], backend: str, said: str | None) -> None:
    case = Case(POLICY, gpu("H100"), SHAPE, Method("Any", "wna16", "ct", "kInt4Static", **fields))
    if said is None:
        check_selected(case, backend)
    else:
        with pytest.raises(ConfigRefusal, match=said) as caught:
            check_selected(case, backend)
        assert (caught.value.error, caught.value.hint) == (
            "AssertionError", "--moe-backend marlin where it is supported",
        )  # fmt: skip


def test_modules_that_a_class_fuses() -> None:
    """What a class does not list itself follows from what others declare for a module of that name."""
    found = {one.path: (one.shards, one.listed, one.split) for one in linears_of("0.33.0", "Qwen3MoeForCausalLM")}
    assert found["mlp.gate_up_proj"] == (("mlp.gate_proj", "mlp.up_proj"), False, "column")
    qkv = tuple(f"self_attn.{letter}_proj" for letter in "qkv")
    assert found["self_attn.qkv_proj"] == (qkv, True, "column")
    assert found["self_attn.o_proj"] == (("self_attn.o_proj",), False, "row")
    assert found["mlp.gate"] == (("mlp.gate",), False, "whole")
    assert linears_of("0.33.0", "NobodysForCausalLM") == ()


@pytest.mark.parametrize("name", ["H100", "B200", "A100", "MI300X"])
def test_how_backends_outside_the_order_are_reached(name: str) -> None:
    reached = set()
    for one, shape in every_scheme().values():
        for row in ask(one, gpu(name), shape).candidates:
            for reason in row.reasons:
                if reason.code != "F11_NOT_LISTED":
                    continue
                how = f"only {reason.remedy} reaches it" if reason.remedy else "nothing reaches it"
                assert reason.text.endswith(f" here: {how}")
                assert reason.remedy in (None, f"--moe-backend {row.flag}")
                reached.add(reason.remedy is not None)
    assert True in reached


@pytest.mark.parametrize(
    ("inner", "group", "padding", "tp", "said"),
    [
        (768, 128, True, 1, None), (768, 128, False, 2, None), (768, -1, True, 16, None), (768, None, True, 16, None),
        (768, 128, True, 4, (128, 192, 64, "tp 2")), (768, 32, False, 8, (64, 96, 32, "tp 4")),
        (768, 32, True, 8, None), (768, -1, False, 8, (64, 96, 32, "tp 4")),
    ],
)  # fmt: skip
def test_marlins_shape_test(inner: int, group: int | None, padding: bool, tp: int, said: Any) -> None:
    case = resolve(POLICY, gptq(), replace(SHAPE, intermediate_size=inner), gpu("A100", tp=tp)).case
    found = list(marlin_shape(case, group, tile_padding=padding))
    if said is None:
        assert found == []
        return
    multiple, size, rest, remedy = said
    text = f"intermediate size per rank {size} is not a multiple of {multiple} (remainder {rest})"
    assert [row[0] for row in found] == [text]
    assert str(found[0][1]).startswith(remedy)


def test_other_causes_of_marlins_shape_test() -> None:
    case = resolve(POLICY, gptq(), replace(SHAPE, hidden_size=2080), gpu("A100")).case
    assert list(marlin_shape(case, 48, tile_padding=True))[:2] == [
        ("hidden size 2080 is not a multiple of 128 (remainder 32)", None),
        ("group size 48 is not one of -1, 32, 64, 128", None),
    ]
    amd = resolve(POLICY, gptq(), SHAPE, gpu("MI300X")).case
    assert list(marlin_shape(amd, 128, tile_padding=True)) == [("Marlin has no ROCm build", "a CUDA device")]
    old = resolve(load_policy("vllm@0.26.0"), gptq(), replace(SHAPE, router_weight_on_input=True), gpu("A100")).case
    assert list(marlin_shape(old, 128, tile_padding=True)) == [
        ("router weights multiply the input", "vLLM 0.27 and newer")
    ]


@pytest.mark.parametrize(
    ("fields", "model", "split"),
    [
        ({"tp": 2, "dp": 2, "ep": 4}, "qwen3_moe", True), ({"tp": 2, "dp": 2, "ep": 4}, "mixtral", False),
        ({"tp": 1, "dp": 4, "ep": 4}, "qwen3_moe", False), ({"tp": 4, "ep": 4}, "qwen3_moe", False),
        ({"tp": 2, "dp": 2}, "qwen3_moe", False),
        ({"tp": 2, "dp": 2, "ep": 4, "all2all": "deepep_low_latency"}, "qwen3_moe", False),
    ],
)  # fmt: skip
def test_models_that_split_tokens_before_the_experts(fields: dict[str, Any], model: str, split: bool) -> None:
    case = resolve(POLICY, gptq(), replace(SHAPE, model_type=model), gpu("H100", **fields)).case
    assert case.sequence_parallel is split


@pytest.mark.parametrize(
    ("gated", "activation", "expected"),
    [(True, "silu", True), (True, "relu2_no_mul", False), (False, "relu2", False), (False, "relu2_no_mul", False)],
)
def test_experts_with_a_gate_half(gated: bool, activation: str, expected: bool) -> None:
    case = resolve(POLICY, gptq(), replace(SHAPE, gated=gated, activation=activation), gpu("H100")).case
    assert case.gated is expected
