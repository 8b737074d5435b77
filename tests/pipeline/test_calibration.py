"""What an expert without the scale of its activations means for each engine's kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pipeline.mixing import Tensors, rewritten

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.model.activation_scales import ScaleFault
from moeq.oracle.records import Verdict
from moeq.pipeline.plan.calibration import conversion_warning, fault_kinds, faults_text, is_weight_only, with_scales
from moeq.pipeline.plan.layer_verdict import judge_checkpoint

FAULT = "layer 0: experts 1 have no input_scale of up"
HARMLESS = "is weight-only and needs none; 4- and 8-bit activations would be wrong"
NAN = "multiplies with what memory holds (torch.empty), and outputs are NaN; Marlin is weight-only and unharmed"


@pytest.fixture(scope="module")
def faulty(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    def without(tensors: Tensors) -> Tensors:
        return {name: one for name, one in tensors.items() if not name.endswith(".experts.1.up_proj.input_scale")}

    return rewritten(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path_factory.mktemp("faulty") / "source", without)


@pytest.mark.parametrize(
    ("gpu", "engine", "note", "failed"),
    [
        ("A100", "vllm@0.33.0", f"{FAULT}: MARLIN {HARMLESS}", None),
        ("A100", "sglang@0.5.23", f"{FAULT}: MARLIN {HARMLESS}", None),
        ("A100", "moeq", None, None),
        ("H100", "vllm@0.33.0", f"{FAULT}: HUMMING {HARMLESS}", None),
        ("B200", "vllm@0.33.0", None, f"{FAULT}: FLASHINFER_TRTLLM {NAN}"),
        ("B200", "moeq", None, None),
    ],
)
def test_an_expert_without_a_scale(gpu: str, engine: str, note: str | None, failed: str | None, faulty: Path) -> None:
    verdict = judge_checkpoint(moeq.open(faulty), Deployment(gpu=parse_gpu(gpu), engine=engine), 0, explain=False)
    assert [text for text in verdict.notes if text.startswith(FAULT)] == ([note] if note else [])
    gates = [gate for gate in verdict.gates if not gate.passed]
    assert [gate.text for gate in gates] == ([failed] if failed else [])
    assert verdict.ok == (failed is None)
    if failed:
        assert verdict.no_convert == failed
        assert gates[0].remedy == "--moe-backend marlin, or calibrate every expert and quantise again"
        assert verdict.convert is None


def fault(what: str, *experts: int, part: str = "input_scale", layer: int = 0) -> ScaleFault:
    return ScaleFault(layer, part, what, experts, ())


def with_faults(*faults: ScaleFault, unequal: tuple[int, ...] = (), scheme: str = "fp8") -> Any:
    """A layer of four experts with these faults."""
    return SimpleNamespace(
        scale_faults=lambda layer: [one for one in faults if one.layer == layer],
        unequal_scales=lambda layer: unequal,
        num_experts=lambda layer: 4,
        scheme_of=lambda layer: SimpleNamespace(format=scheme),
    )


@pytest.fixture(scope="module")
def clean(checkpoints: Path) -> Verdict:
    """What vLLM does with a checkpoint whose scales are right: FLASHINFER_TRTLLM, with 4-bit activations."""
    opened = moeq.open(checkpoints / "modelopt-nvfp4-qwen3moe")
    return judge_checkpoint(opened, Deployment(gpu=parse_gpu("B200")), 0, explain=False)


NAN_OF_NVFP4 = "divides by it, and outputs are NaN or wrong"
NAN_OF_FP8 = "takes the largest scale of a layer for all of its experts, and all outputs are NaN"
NOT_POSITIVE = "divides by the largest scale of the layer, which is not positive"
HIDDEN = "takes the largest scale of a layer for all of its experts, which hides it"


@pytest.mark.parametrize(
    ("family", "backend", "faults", "effect"),
    [
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("a zero", 1)], HIDDEN),
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("a negative", 1, 2)], HIDDEN),
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("a zero", 0, 1, 2, 3)], NAN_OF_NVFP4),  # no other is larger
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("a zero", 0, 1), fault("a negative", 2, 3)], NAN_OF_NVFP4),
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("a NaN", 1)], NAN_OF_NVFP4),
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("an infinite", 1)], NAN_OF_NVFP4),
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("an infinite", 1, part="input_global_scale")], HIDDEN),  # a reciprocal
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("a zero", 1, part="input_global_scale")], NAN_OF_NVFP4),
        ("nvfp4", "FLASHINFER_TRTLLM", [fault("a zero", 1), fault("a NaN", 2)], NAN_OF_NVFP4),
        ("nvfp4", "CUTLASS", [fault("a zero", 1)], NAN_OF_NVFP4),
        ("nvfp4", "CUTLASS", [fault("a zero", 1), fault("no", 2)], "multiplies with what memory holds (torch.empty)"),
        ("fp8", "CUTLASS", [fault("a NaN", 1)], NAN_OF_FP8),
        ("fp8", "CUTLASS", [fault("an infinite", 1)], NAN_OF_FP8),
        ("fp8", "CUTLASS", [fault("a zero", 1)], HIDDEN),
        ("fp8", "CUTLASS", [fault("a zero", 0, 1, 2, 3)], NOT_POSITIVE),
        ("fp8", "CUTLASS", [fault("no", 0, 1, 2, 3)], None),  # 1.0 fills it
        ("fp8", "CUTLASS", [fault("no", 1)], None),
        ("fp8", "CUTLASS", [], None),
    ],
)
@pytest.mark.parametrize("engine", ["vllm@0.33.0", "sglang@0.5.23", "transformers"])
def test_what_each_fault_does(
    family: str, backend: str, faults: list[ScaleFault], effect: str | None, engine: str, clean: Verdict
) -> None:
    selected = replace(clean.selected, backend=backend)  # type: ignore[type-var]
    verdict = replace(clean, family=family, selected=selected, engine=engine, runs_as="W4A4")
    found = with_scales(with_faults(*faults), verdict, 0)
    if engine == "transformers":
        assert found is verdict
        return
    if engine.startswith("sglang") and family == "nvfp4" and effect == HIDDEN:
        effect = NAN_OF_NVFP4  # it has a scale for each expert
    if effect is None:
        assert found == verdict
        return
    text = f"{faults_text(faults)}: {backend} {effect}"
    if effect == HIDDEN:
        assert found == replace(verdict, notes=(*verdict.notes, text))
        return
    gate = found.gates[-1]
    assert gate.text.startswith(text)
    assert gate.text.endswith("; Marlin is weight-only and unharmed")
    assert not gate.passed
    flag = "--moe-runner-backend" if engine.startswith("sglang") else "--moe-backend"
    assert gate.remedy == f"{flag} marlin, or calibrate every expert and quantise again"
    assert found == replace(verdict, gates=(*verdict.gates, gate), convert=None, no_convert=gate.text)


def test_nothing_is_said_where_nothing_was_selected(clean: Verdict) -> None:
    verdict = replace(clean, selected=None)
    assert with_scales(with_faults(fault("a NaN", 1)), verdict, 0) is verdict


@pytest.mark.parametrize(
    ("family", "backend", "runs_as", "only"),
    [
        ("fp8", "MARLIN", "W8A16", True),
        ("fp8", "CUTLASS", "W8A8", False),
        ("fp8", "CUTLASS", None, True),
        ("nvfp4", "EMULATION", "W4A16", False),
        ("fp8", "EMULATION", "W4A16", True),
        ("nvfp4", "MARLIN", "W4A16", True),
    ],
)
def test_which_backends_leave_activations_alone(
    family: str, backend: str, runs_as: str | None, only: bool, clean: Verdict
) -> None:
    selected = replace(clean.selected, backend=backend)  # type: ignore[type-var]
    verdict = replace(clean, family=family, selected=selected, runs_as=runs_as)
    assert is_weight_only(verdict) is only
    found = with_scales(with_faults(fault("a NaN", 1)), verdict, 0)
    assert found.notes[len(verdict.notes) :] == ((f"{fault('a NaN', 1).text}: {backend} {HARMLESS}",) if only else ())


def test_gate_and_up_with_unequal_scales(clean: Verdict) -> None:
    checkpoint = with_faults(fault("a zero", 1), unequal=tuple(range(9)))
    verdict = replace(clean, method="CompressedTensorsW8A8Fp8MoEMethod", family="fp8", runs_as="W8A16")
    gate = with_scales(checkpoint, verdict, 3).gates[-1]
    told = "layer 3: gate and up of experts 0, 1, 2, 3, 4, 5, 6, 7 have unequal input scales, which the loader refuses"
    assert (gate.code, gate.passed, gate.text, gate.remedy) == ("G13", False, told, "the larger scale for both")
    other = replace(verdict, method="ModelOptFp8MoEMethod")
    assert with_scales(checkpoint, other, 3).gates == other.gates
    assert fault_kinds(checkpoint, 0) == {"a zero", "unequal"}
    assert fault_kinds(with_faults(fault("a zero", 1), fault("no", 2)), 0) == {"a zero", "no"}


@pytest.mark.parametrize(
    ("faults", "layouts", "scheme", "told"),
    [
        ([], {0: "marlin-fp8/1"}, "fp8", None),
        ([fault("a NaN", 1)], {1: "marlin-fp8/1"}, "fp8", None),
        ([fault("a NaN", 1)], {0: "marlin-fp8/1"}, "fp8", "this layout is weight-only and unharmed, 4- and 8-bit"),
        ([fault("a NaN", 1)], {0: "flashinfer-cutlass-fp8-tensor/1"}, "fp8", "8-bit activations give NaN; "),
        ([fault("no", 1)], {0: "flashinfer-cutlass-fp8-tensor/1"}, "fp8", "activations take 1.0 and lose accuracy; "),
        ([fault("no", 1)], {0: "flashinfer-cutlass-fp8-tensor/1"}, "nvfp4", "8-bit activations give NaN; "),
        ([fault("no", 1)], {0: "flashinfer-cutlass-fp8-tensor/1", 1: "marlin-fp8/1"}, "fp8", "take 1.0"),
        (
            [fault("no", 1)],
            {1: "flashinfer-cutlass-fp8-tensor/1", 0: "marlin-fp8/1"},
            "fp8",
            "weight-only and unharmed",
        ),
    ],
)
def test_what_a_conversion_warns_of(
    faults: list[ScaleFault], layouts: dict[int, str], scheme: str, told: str | None
) -> None:
    found = conversion_warning(with_faults(*faults, scheme=scheme), layouts)
    if told is None:
        assert found is None
        return
    assert found is not None
    assert found.startswith(f"{faults_text(faults)}; ")
    assert told in found
