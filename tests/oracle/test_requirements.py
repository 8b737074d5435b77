"""R01 to R48: each requirement on decisions as a named test, or a sentence why it cannot arise here.

Those on sizes are in `test_requirements_sizes.py`, those on how configs are read in `test_requirements_configs.py`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from oracle import test_requirements_configs, test_requirements_sizes
from oracle.asking import POLICY, ask, candidate, codes, ct, gptq, gpu
from oracle.examples import GPT_OSS, SHAPE, every_scheme, scheme

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.moeq import builtin_policy
from moeq.oracle.engines.vllm.advisories import CONDITIONS
from moeq.oracle.explain import requirements
from moeq.oracle.judge import judge_config
from moeq.oracle.records import MoeShape

#: Families whose weights moeq repacks for no backend yet.
NO_LAYOUTS = ("fp8", "nvfp4", "mxfp8")

#: Requirements about code outside the oracle, and where they are met.
ELSEWHERE = {
    "R04": "a property of kernel calls: the argument checks of moeq_kernels test swapped ids and weights",
    "R08": "a property of conversion: the converter refuses a source that is already converted",
    "R45": "a property of the converted folder: its manifest is written and checked by the checkpoint package",
}


def test_every_requirement_is_here_or_explained() -> None:
    names = (*globals(), *vars(test_requirements_configs), *vars(test_requirements_sizes))
    tested = {f"R{n}" for name in names for n in re.findall(r"^test_r(\d\d)_", name)}
    assert set(requirements()) == {f"R{n:02d}" for n in range(1, 49)}
    assert tested | set(ELSEWHERE) == set(requirements())
    assert not tested & set(ELSEWHERE)


@pytest.mark.cover
@pytest.mark.parametrize("engine", ["vllm@0.33.0", "moeq"])
@pytest.mark.parametrize("device", ["H100", "MI300X", "XPU", "CPU-ARM"])
def test_r01_everything_together_or_an_error(engine: str, device: str) -> None:
    for one, shape in every_scheme().values():
        verdict = ask(one, gpu(device, engine=engine), shape)
        if verdict.selected is None:
            assert verdict.error is not None
            assert verdict.refusal
            assert not verdict.ok
        else:
            assert verdict.error is None
            assert verdict.selected.experts
            assert verdict.weight_key
            assert verdict.sizes
            assert verdict.runs_as
        unexplained = [row for row in verdict.candidates if not row.supported and not row.reasons]
        assert not unexplained


def test_r01_silent_none_is_a_refusal() -> None:
    verdict = ask(every_scheme()["fp8 block"][0], gpu("CPU-ARM"))
    assert verdict.chosen is None
    assert verdict.error is not None
    assert verdict.error.kind == "SILENT_NONE"


def test_r02_lora_is_a_rule_with_its_own_reason() -> None:
    for one, shape in every_scheme().values():
        verdict = ask(one, gpu("A100", lora=True), shape)
        if verdict.family is None:  # the config is refused before any backend is asked
            continue
        for row in verdict.candidates:
            variants = POLICY.classes[row.experts].variants.get("sm80", ()) if row.experts in POLICY.classes else ()
            if variants and not any(variant.lora for variant in variants):
                assert "P13_LORA" in {reason.code for reason in row.reasons}
        taken = POLICY.classes[verdict.selected.experts].variants["sm80"] if verdict.selected else ()
        assert verdict.selected is None or any(variant.lora for variant in taken)


def test_r03_forced_and_automatic_go_through_the_same_rules() -> None:
    one, where = scheme("compressed-tensors"), gpu("A100", batched=True, ep=8, all2all="deepep_low_latency")
    automatic = candidate(ask(one, where), "MARLIN")
    forced = ask(one, replace(where, backend="marlin"))
    assert forced.error is not None
    assert forced.error.code == automatic.reasons[0].code == "P11_FORMAT"
    assert not forced.ok
    assert "BATCHED_MARLIN" in str(forced.nearest)


def test_r05_routing_decides_the_kernel() -> None:
    where = gpu("H100")
    own_router = ask(scheme("mxfp4", "e2m1", 32, scale="e8m0"), where, GPT_OSS)
    custom = ask(scheme("mxfp4", "e2m1", 32, scale="e8m0"), where, replace(GPT_OSS, routing="Custom"))
    assert own_router.chosen is not None
    assert custom.chosen is not None
    assert (own_router.chosen.monolithic, custom.chosen.monolithic) == (True, False)
    assert "P08_ROUTING" not in {reason.code for reason in candidate(custom, "TRITON").reasons}


def test_r06_every_record_is_complete() -> None:
    for family in POLICY.families.values():
        assert set(family.searches) == set(POLICY.devices), family.name
        for backend in family.backends.values():
            assert backend.classes
            assert all(name in POLICY.classes for name in backend.classes)
            assert backend.layouts or backend.no_layout or family.name in NO_LAYOUTS
    for row in POLICY.classes.values():
        assert row.format in ("standard", "batched")
        for device, variants in row.variants.items():
            assert device in POLICY.devices
            assert all(item.pairs and item.activations and item.parallel and item.dtypes for item in variants)
    assert {row["when"] for row in POLICY.advisories} == set(CONDITIONS)


def test_r07_both_marlin_formats_take_the_same_bytes() -> None:
    one, shape = scheme("compressed-tensors", symmetric=False), replace(SHAPE, has_bias=True)
    standard = ask(one, gpu("A100"), shape)
    batched = ask(one, gpu("A100", ep=8, all2all="deepep_low_latency"), shape)
    assert standard.convert is not None
    assert batched.convert is not None
    assert (standard.convert.backend, batched.convert.backend) == ("MARLIN", "BATCHED_MARLIN")
    assert standard.convert.layout == batched.convert.layout
    lost = ask(scheme("awq", symmetric=False), gpu("A100", env={"VLLM_MARLIN_INPUT_DTYPE": "fp8"}))
    assert "input-dtype-not-passed" in codes(lost)


def test_r09_every_parallel_form_has_an_answer() -> None:
    """A sample; the whole matrix is in test_matrix.py."""
    for kind in POLICY.all2all:
        verdict = ask(scheme("gptq"), gpu("H100", ep=8, all2all=kind))
        assert verdict.ok or verdict.refusal


def test_r10_the_report_says_which_format_runs() -> None:
    batched = ask(scheme("gptq"), gpu("A100", ep=8, all2all="deepep_low_latency"))
    assert batched.chosen is not None
    assert POLICY.classes[batched.chosen.experts].format == "batched"


def test_r13_bias_comes_from_the_checkpoint() -> None:
    one = scheme("compressed-tensors", group=32, has_bias=True)
    shape = replace(SHAPE, hidden_size=2880)
    assert "bias-dropped" in codes(ask(one, gpu("A100"), shape))
    assert "bias-dropped" not in codes(ask(scheme("compressed-tensors", group=32), gpu("A100"), shape))


def test_r14_one_group_per_rank() -> None:
    shape = replace(SHAPE, intermediate_size=512, num_experts=512, top_k=10)
    assert "marlin-w13-scale-order" in codes(ask(scheme("gptq"), gpu("A100", tp=4), shape))
    assert "marlin-w13-scale-order" not in codes(ask(scheme("gptq"), gpu("A100", tp=2), shape))


def test_r15_lora_only_where_it_is_applied() -> None:
    vllm = ask(scheme("gptq"), gpu("MI300X", lora=True))
    assert vllm.chosen is not None
    assert "lora-ignored" in codes(vllm)
    own = ask(scheme("gptq"), gpu("MI300X", lora=True, engine="moeq"))
    assert own.chosen is not None
    assert "lora-ignored" not in codes(own)


def test_r16_bias_is_never_dropped_by_moeq() -> None:
    one, shape = scheme("compressed-tensors", group=32, has_bias=True), replace(SHAPE, hidden_size=2880)
    assert "bias-dropped" in codes(ask(one, gpu("MI300X"), shape))
    assert not codes(ask(one, gpu("MI300X", engine="moeq"), shape))
    assert "bias-dropped" in codes(ask(scheme("awq", symmetric=False, has_bias=True), gpu("A100")))


@pytest.mark.parametrize("device", ["H100", "MI300X", "XPU", "CPU"])
def test_r17_channel_scales(device: str) -> None:
    verdict = ask(scheme("compressed-tensors", group=-1), gpu(device))
    assert verdict.error is not None
    assert verdict.error.kind == "BARE_ASSERTION"
    assert "channel-scales-assertion" in codes(verdict)
    assert ask(scheme("compressed-tensors", group=-1), gpu("A100")).ok


def test_r17_channel_scales_convert_for_marlin() -> None:
    target = ask(scheme("compressed-tensors", group=-1), gpu("H100")).convert
    assert target is not None
    assert (target.layout, target.flag) == ("marlin-wna16/1", "--moe-backend marlin")


def test_r18_no_choice_without_a_converter() -> None:
    verdict = ask(scheme("quark"), gpu("H100"))
    assert verdict.selected is not None
    assert verdict.selected.backend == "HUMMING"
    assert verdict.chosen is None
    assert [gate.error for gate in verdict.gates if not gate.passed] == ["TypeError"]
    assert ask(scheme("quark"), gpu("H100", packages={"humming": False})).ok
    for has_bias, error in ((False, "AssertionError"), (True, None)):
        one = scheme("quark", "e2m1", 32, scale="e8m0", has_bias=has_bias)
        found = [gate.error for gate in ask(one, gpu("H100")).gates if not gate.passed]
        assert found == ([error] if error else [])


def test_r18_marlins_converter_wants_a_group_size_up_to_vllm_0_29() -> None:
    """An H200 with vLLM 0.26.0 stopped so on weight-only int8 experts with one scale a channel."""
    for engine, group, error in (
        ("vllm@0.26.0", None, "TypeError"), ("vllm@0.26.0", -1, None), ("vllm@0.30.0", None, None)
    ):  # fmt: skip
        channels = ct(strategy="channel", num_bits=8, group_size=group)
        verdict = judge_config(channels, SHAPE, gpu("H200", engine=engine, backend="marlin"))
        assert [gate.error for gate in verdict.gates if not gate.passed] == ([error] if error else [])


def test_r19_what_is_reported_is_what_runs() -> None:
    one = scheme("compressed-tensors", "e2m1", 32, scale="e8m0")
    vllm = ask(one, gpu("B200"))
    assert vllm.selected is not None
    assert (vllm.reported_backend, vllm.selected.experts) == ("MARLIN", "CutlassExpertsMxfp4")
    own = ask(one, gpu("B200", engine="moeq"))
    assert own.chosen is not None
    assert own.reported_backend is None
    ignored = ask(one, gpu("H100", backend="triton"))
    assert ignored.selected is not None
    assert ignored.selected.backend == "MARLIN"


def test_r20_zero_points_are_seen() -> None:
    verdict = ask(scheme("awq", symmetric=False), gpu("XPU"))
    assert verdict.selected is not None
    assert "xpu-drops-zero-points" in codes(verdict)
    assert "F01_ZERO_POINT" in {
        r.code for r in candidate(ask(scheme("awq", symmetric=False), gpu("CPU-Zen")), "ZEN_CPU").reasons
    }


def test_r21_zero_points_under_expert_parallelism() -> None:
    verdict = ask(scheme("awq", symmetric=False), gpu("MI300X", ep=8, tp=8))
    assert "moe-wna16-ep-zero-points" in codes(verdict)
    assert "moe-wna16-ep-zero-points" not in codes(ask(scheme("awq", symmetric=False), gpu("MI300X", tp=2)))


def test_r22_inverted_check_is_predicted() -> None:
    env = {"VLLM_MARLIN_INPUT_DTYPE": "int8"}
    four = ask(scheme("gptq"), gpu("A100", env=env))
    eight = ask(scheme("gptq", "int8"), gpu("A100", env=env))
    assert [gate.error for gate in four.gates if not gate.passed] == ["AssertionError"]
    assert eight.ok
    assert "marlin-int8-activations-inverted" in codes(four)


def test_r26_a_reason_that_is_false_says_so() -> None:
    verdict = ask(scheme("gptq"), gpu("A100", backend="triton"))
    assert verdict.error is not None
    assert "this checkpoint has none" in verdict.error.text
    assert "gptq-bias-assumed" in codes(verdict)
    biased = ask(scheme("gptq", has_bias=True), gpu("A100", backend="triton"))
    assert biased.error is not None
    assert "this checkpoint has none" not in biased.error.text


def test_r27_gpt_oss_lora_on_rocm() -> None:
    one = scheme("mxfp4", "e2m1", 32, scale="e8m0")
    automatic = ask(one, gpu("MI300X", lora=True), GPT_OSS)
    assert automatic.chosen is None
    assert "triton_unfused" in str(automatic.nearest)
    assert "gpt-oss-lora-rocm" in codes(automatic)
    assert ask(one, gpu("MI300X", lora=True, backend="triton_unfused"), GPT_OSS).ok


@pytest.mark.parametrize("name", ["flashinfer_cutlass", "xpu", "batched_marlin"])
def test_r28_names_that_cannot_work(name: str) -> None:
    verdict = ask(scheme("mxfp4", "e2m1", 32, scale="e8m0"), gpu("B200", backend=name), GPT_OSS)
    assert verdict.error is not None
    assert "FLASHINFER_TRTLLM_MXFP4_BF16" in str(verdict.error.hint)
    assert "backend-never-works" in codes(verdict)


@pytest.mark.slow
def test_r29_reasons_are_prose() -> None:
    odd = re.compile(r"[<>{}]|\('|None\b|\w+\.\w+\(")
    for device in ("V100", "H100", "MI300X", "XPU", "CPU", "CPU-Zen"):
        for one, shape in every_scheme().values():
            for row in ask(one, gpu(device, lora=True, ep=8, dtype="fp16"), shape).candidates:
                for reason in row.reasons:
                    assert not odd.search(reason.text), reason.text


def test_r31_every_candidate_has_numbers_and_a_remedy() -> None:
    verdict = ask(scheme("gptq"), gpu("A100", tp=4))
    marlin = candidate(verdict, "MARLIN")
    assert any("192" in reason.text and "128" in reason.text for reason in marlin.reasons)
    assert marlin.unlock == "tp 2"
    weight_only = {**ct(), "format": "int-quantized"}
    refused = judge_config(weight_only, SHAPE, gpu("A100"))
    assert refused.error is not None
    assert refused.error.kind == "BARE_ASSERTION"
    assert "pack-quantized" in str(refused.error.hint)


def test_r33_emulation_zero() -> None:
    assert "emulation-zero-off-by-one" in codes(ask(scheme("gptq"), gpu("V100", dtype="fp16")))
    assert "emulation-zero-off-by-one" not in codes(judge_config(gptq(checkpoint_format="gptq_v2"), SHAPE, gpu("V100")))
    assert "emulation-zero-off-by-one" not in codes(ask(scheme("compressed-tensors"), gpu("A100", backend="emulation")))


def test_r34_emulation_memory() -> None:
    verdict = ask(scheme("compressed-tensors"), gpu("A100", backend="emulation"))
    packed = 3 * 128 * 2048 * 768 // 2
    assert verdict.transient_bytes == 4 * packed
    assert "emulation-bf16" in codes(verdict)


@pytest.mark.parametrize(
    ("one", "where", "shape", "gate"),
    [
        (scheme("gptq"), gpu("A100", tp=8, ep=8, eplb=True), SHAPE, "G6"),
        (scheme("compressed-tensors"), gpu("A100", tp=8), SHAPE, "G7"),
        (scheme("gptq"), gpu("CPU"), replace(SHAPE, hidden_size=2880), "G8"),
        (scheme("mxfp4", "e2m1", 32, scale="e8m0"), gpu("B200"), replace(GPT_OSS, has_bias=False), "G8"),
        (scheme("compressed-tensors", "e2m1", 32, scale="e8m0"), gpu("CPU"), SHAPE, "G8"),
        (scheme("compressed-tensors", "e2m1", 32, scale="e8m0"), gpu("MI300X"), SHAPE, "G9"),
        (scheme("gptq"), gpu("CPU", tp=2, ep=2), SHAPE, "G11"),
        (scheme("mxfp4", "e2m1", 32, scale="e8m0"), gpu("CPU", dtype="fp16"), GPT_OSS, "G11"),
        (scheme("mxfp8", "e4m3", 32, scale="e8m0"), gpu("CPU"), SHAPE, "G11"),
    ],
)
def test_r37_dry_run_finds_what_fails_later(one: Any, where: Deployment, shape: MoeShape, gate: str) -> None:
    verdict = ask(one, where, shape)
    assert verdict.selected is not None
    assert verdict.chosen is None
    assert verdict.refusal
    assert gate in {row.code for row in verdict.gates if not row.passed}
    assert verdict.convert is None or verdict.convert.backend != verdict.selected.backend


def test_r37_what_convert_writes_passes_every_gate() -> None:
    from moeq.oracle.engines.vllm.gates import Stage, run_gates
    from moeq.oracle.engines.vllm.outcome import derive_dp, resolve
    from moeq.oracle.quantization_config import config_of

    for one, shape in every_scheme().values():
        outcome = resolve(POLICY, config_of(one), shape, derive_dp(gpu("H100", tp=2)))
        verdict = ask(one, gpu("H100", tp=2), shape)
        if verdict.convert:
            row = candidate(verdict, verdict.convert.backend)
            assert all(gate.passed for gate in run_gates(Stage(outcome.case, outcome.entry, row)))


def test_r38_group_size_is_in_moeqs_key() -> None:
    ct32, gptq32 = scheme("compressed-tensors", group=32), scheme("gptq", group=32)
    assert not ask(ct32, gpu("CPU")).ok
    assert ask(gptq32, gpu("CPU")).ok
    assert "group-32-key" in codes(ask(ct32, gpu("CPU")))
    assert ask(ct32, gpu("CPU", engine="moeq")).ok == ask(gptq32, gpu("CPU", engine="moeq")).ok is True


def test_r39_no_two_schemes_share_a_key() -> None:
    schemes = [one for one, _ in every_scheme().values()]
    schemes += [scheme("compressed-tensors", activation="int8", group=-1), scheme("compressed-tensors", group=64)]
    keys = {(one.weight, one.activation, one.act_order, one.has_bias, one.quant_method) for one in schemes}
    assert len(keys) == len(schemes)
    channel = scheme("compressed-tensors", group=-1, activation="int8")
    assert ask(channel, gpu("A100")).family != ask(every_scheme()["ct int8 w8a8"][0], gpu("A100")).family


def test_r40_precision_that_really_runs() -> None:
    fp8 = ask(every_scheme()["fp8 block"][0], gpu("A100"))
    assert (fp8.runs_as, "activation-precision-differs" in codes(fp8)) == ("W8A16", True)
    mxfp4 = ask(every_scheme()["ct mxfp4"][0], gpu("B200"))
    assert (mxfp4.runs_as, "activation-precision-differs" in codes(mxfp4)) == ("W4A4", True)
    int8 = ask(every_scheme()["ct int8 w8a8"][0], gpu("A100"))
    assert (int8.runs_as, "activation-precision-differs" in codes(int8)) == ("W8A8", False)
    # vLLM calls its CPU kernels by INT4_W4A8 and FP8_W8A16, whatever the keys of their classes say.
    int4 = ask(every_scheme()["gptq int4 g128"][0], gpu("CPU"))
    assert (int4.runs_as, "activation-precision-differs" in codes(int4)) == ("W4A8", True)
    fp8 = ask(every_scheme()["fp8 block"][0], gpu("CPU"))
    assert (fp8.runs_as, "activation-precision-differs" in codes(fp8)) == ("W8A16", True)


@pytest.mark.parametrize(
    ("scheme_name", "device", "backend", "env", "runs"),
    [
        # Emulations round activations to 4 bits, whether or not the checkpoint asks for that.
        ("gpt-oss mxfp4", "MI300X", "emulation", {}, "W4A4"),
        ("gptq int4 g128", "A100", "emulation", {}, "W4A16"),
        ("gptq int4 g128", "RTX4090", "marlin", {"VLLM_MARLIN_INPUT_DTYPE": "int8"}, "W4A8"),
    ],
)
def test_r40_every_backend_says_what_it_runs(
    scheme_name: str, device: str, backend: str, env: dict[str, str], runs: str
) -> None:
    one, shape = every_scheme()[scheme_name]
    where = gpu(device, backend=backend, env=env, packages={"quark": True})
    assert ask(one, where, shape).runs_as == runs


def test_r41_gates_are_in_the_report() -> None:
    verdict = ask(scheme("mxfp4", "e2m1", 32, scale="e8m0"), gpu("T4", dtype="fp16"), GPT_OSS)
    assert [gate.code for gate in verdict.gates if not gate.passed] == ["G2", "G3"]
    assert {gate.code for gate in verdict.gates} == {"G0", "G1", "G2", "G3", "G5", "G6", "G7", "G8", "G9", "G10", "G11"}
    assert verdict.selected is not None


def test_r44_what_mattered_is_recorded() -> None:
    with_humming = ask(scheme("gptq"), gpu("H100"))
    without = ask(scheme("gptq"), gpu("H100", packages={"humming": False}))
    assert ("humming", "present") in with_humming.mattered
    assert ("humming", "absent") in without.mattered
    assert (with_humming.chosen.backend, without.chosen.backend) == ("HUMMING", "MARLIN")  # type: ignore[union-attr]
    mxint4 = ask(scheme("compressed-tensors", group=32), gpu("B200", env={"VLLM_USE_FLASHINFER_MOE_INT4": "1"}))
    assert ("VLLM_USE_FLASHINFER_MOE_INT4", "1") in mxint4.mattered


def test_r47_scaling_is_not_dropped() -> None:
    env, one = {"VLLM_USE_FLASHINFER_MOE_INT4": "1"}, scheme("compressed-tensors", group=32)
    scaled = replace(SHAPE, routed_scaling_factor=2.5)
    assert "scaling-dropped" in codes(ask(one, gpu("B200", env=env), scaled))
    assert "scaling-dropped" not in codes(ask(one, gpu("B200", env=env)))


def test_builtin_kernels_have_a_policy() -> None:
    assert builtin_policy().kernels
