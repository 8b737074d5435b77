"""Effects of static activation scales that are missing or unusable on what an engine computes.

Source: vLLM 0.33.0. `ModelOptNvFp4FusedMoE` and `CompressedTensorsW4A4Nvfp4MoEMethod` allocate scales with
`torch.empty` and divide by them, FlashInfer's backends and emulation (0.26.0 to 0.33.0, `oracle/nvfp4.py`) by the
largest of a layer; FP8 methods start from 1.0 and take the largest scale of a layer for all its experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moeq.errors import listed
from moeq.layouts.registry import layout_class
from moeq.model import Checkpoint
from moeq.model.activation_scales import ScaleFault
from moeq.oracle.records import Gate, Verdict
from moeq.schemes.format import ACTIVATION_SCALES
from moeq.spelling import option

#: Method whose loader refuses unequal scales of gate and up (vLLM 0.26.0 to 0.33.0, `RoutedExperts.weight_loader`).
_EQUAL_SCALES = "CompressedTensorsW8A8Fp8MoEMethod"

#: Backends of NVFP4 that take the largest activation scale of a layer for all experts, 0.26.0 to 0.33.0.
_ONE_NVFP4_SCALE = (
    *("FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS", "FLASHINFER_CUTEDSL", "FLASHINFER_CUTEDSL_BATCHED"),
    *("FLASHINFER_B12X", "EMULATION"),
)


def fault_kinds(checkpoint: Checkpoint, layer: int) -> frozenset[str]:
    """Return the kinds of scale faults of a layer; layers whose kinds differ need verdicts of their own."""
    unequal = {"unequal"} if checkpoint.unequal_scales(layer) else set()
    return frozenset(fault.what for fault in checkpoint.scale_faults(layer)) | unequal


def with_scales(checkpoint: Checkpoint, verdict: Verdict, layer: int) -> Verdict:
    """Return the verdict, with a failed gate if the engine computes NaN with the activation scales of a layer.

    A backend that leaves activations at 16 bits gets a note instead.
    """
    faults, unequal = checkpoint.scale_faults(layer), checkpoint.unequal_scales(layer)
    if unequal and verdict.method == _EQUAL_SCALES:
        shown_experts = ", ".join(map(str, unequal[:8]))
        text = (
            f"layer {layer}: gate and up of experts {shown_experts} have unequal input scales, which the loader refuses"
        )
        gate = Gate("G13", "tensors of experts", False, text, "ValueError", "LOADING", "the larger scale for both")
        return replace(verdict, gates=(*verdict.gates, gate))
    if not faults or verdict.selected is None or not verdict.engine.startswith(("vllm", "sglang")):
        return verdict
    backend, found = verdict.selected.backend, faults_text(faults)
    if is_weight_only(verdict):
        note = f"{found}: {backend} is weight-only and needs none; 4- and 8-bit activations would be wrong"
        return replace(verdict, notes=(*verdict.notes, note))
    experts = checkpoint.num_experts(layer)
    effect = _nvfp4(faults, verdict, experts) if verdict.family == "nvfp4" else _fp8(faults, experts)
    if effect is None and any(fault.is_stored for fault in faults):
        note = f"{found}: {backend} takes the largest scale of a layer for all of its experts, which hides it"
        return replace(verdict, notes=(*verdict.notes, note))
    if effect is None:
        return verdict
    flag = "--moe-runner-backend marlin" if verdict.engine.startswith("sglang") else "--moe-backend marlin"
    remedy = f"{flag}, or calibrate every expert and quantise again"
    text = f"{found}: {backend} {effect}; Marlin is weight-only and unharmed"
    gate = Gate("G13", "tensors of experts", False, text, "none", "LOADING", remedy)
    return replace(verdict, gates=(*verdict.gates, gate), convert=None, no_convert=text)


def conversion_warning(checkpoint: Checkpoint, layouts: Mapping[int, str]) -> str | None:
    """Return a warning about the activation scales of a converted folder; None if they have no faults."""
    faulty = {layer: checkpoint.scale_faults(layer) for layer in layouts}
    faults = [fault for found in faulty.values() for fault in found]
    if not faults:
        return None
    text = faults_text(faults)
    readers = [reader for layer in faulty if faulty[layer] for reader in layout_class(layouts[layer]).vllm_readers()]
    if all(reader.weights_only for reader in readers):
        return f"{text}; this layout is weight-only and unharmed, 4- and 8-bit activations would be wrong"
    nvfp4 = any(checkpoint.scheme_of(layer).format == "nvfp4" for layer in faulty if faulty[layer])
    effect = "give NaN" if nvfp4 or any(fault.is_stored for fault in faults) else "take 1.0 and lose accuracy"
    return f"{text}; kernels with 4- or 8-bit activations {effect}; {option('backend', 'marlin')} is unharmed"


def is_weight_only(verdict: Verdict) -> bool:
    """Return whether the engine runs 16-bit activations, which no stored scale affects.

    The emulation of NVFP4 rounds activations with the stored scale (vLLM 0.33.0,
    `Nvfp4QuantizationEmulationTritonExperts.a1_scale`).
    """
    emulated = verdict.family == "nvfp4" and verdict.selected is not None and verdict.selected.backend == "EMULATION"
    return not emulated and (verdict.runs_as is None or verdict.runs_as.endswith("A16"))


def faults_text(faults: Sequence[ScaleFault]) -> str:
    """Describe the first faults and count the others."""
    return listed((fault.text for fault in faults), 3, "; ")


def _nvfp4(faults: Sequence[ScaleFault], verdict: Verdict, num_experts: int) -> str | None:
    """Return the effect on NVFP4 activations; None if a larger scale of the layer hides the fault."""
    backend = verdict.selected.backend if verdict.selected else ""
    if all(fault.is_stored for fault in faults):
        shared = verdict.engine.startswith("vllm") and backend in _ONE_NVFP4_SCALE
        concerned = {expert for fault in faults for expert in fault.experts}
        if shared and all(_is_smallest(fault) for fault in faults) and len(concerned) < num_experts:
            return None
        return "divides by it, and outputs are NaN or wrong"
    return "multiplies with what memory holds (torch.empty), and outputs are NaN"


def _is_smallest(fault: ScaleFault) -> bool:
    """Return whether a usable scale of another expert is larger; compressed-tensors stores the reciprocal."""
    return fault.what in ("a negative", "an infinite" if ACTIVATION_SCALES[fault.part] else "a zero")


def _fp8(faults: Sequence[ScaleFault], num_experts: int) -> str | None:
    """Return the effect on FP8 activations; None if a larger scale of the layer hides the fault, or 1.0 fills it."""
    if any(fault.what in ("a NaN", "an infinite") for fault in faults):
        return "takes the largest scale of a layer for all of its experts, and all outputs are NaN"
    every = any(fault.is_stored and len(fault.experts) == num_experts for fault in faults)
    return "divides by the largest scale of the layer, which is not positive" if every else None
