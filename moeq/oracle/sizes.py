"""Size arithmetic that follows a choice: rounding, padding, memory. Pure functions of backend, platform and shape."""

from __future__ import annotations

from moeq.layouts.registry import layout_class
from moeq.oracle.case import Case
from moeq.oracle.records import CandidateReport, Sizes

# Multiples of (hidden, intermediate per rank) that MXFP4 methods round up to before loading, by the backend's rule.
# Source: `maybe_roundup_sizes` of vLLM 0.33.0.
_ROUND: dict[str, tuple[int, int]] = {
    "none": (1, 1),
    "32": (32, 32),
    "64": (1, 64),
    "128": (128, 128),
    "trtllm": (256, 128),
    "marlin": (256, 128),
    "aiter-w4a4": (256, 128),
}


def round_up(value: int, multiple: int) -> int:
    """Smallest multiple that is not less than the value."""
    return -(-value // multiple) * multiple


def mxfp4_multiples(rule: str, backend: str, case: Case) -> tuple[int, int]:
    """Multiples of (hidden, intermediate per rank) for an MXFP4 backend.

    The order of tests matters: the rules of particular backends come before the platform's.
    """
    if rule in ("none", "32", "128", "trtllm"):
        return _ROUND[rule]
    if rule == "marlin":
        return (128 if case.gpu.platform == "xpu" else 256, 128)
    if case.gpu.platform == "rocm":
        return _rocm_multiples(rule, backend, case)
    return _ROUND["32"] if case.gpu.platform == "cpu" else _ROUND["64"]


def _rocm_multiples(rule: str, backend: str, case: Case) -> tuple[int, int]:
    if rule == "aiter-w4a4":
        return _ROUND[rule]
    plain = case.shape.activation in ("silu", "situ")
    cdna4 = case.gpu.arch in ("gfx950", "gfx1250")
    if plain and (backend == "AITER_MXFP4_BF16" or (backend == "TRITON_UNFUSED" and not cdna4)):
        return (128, 128)
    return (256, 256)


def sizes_for(case: Case, report: CandidateReport) -> Sizes:
    """Sizes of one rank's experts as the backend stores them."""
    hidden, inner = case.shape.hidden_size, case.intermediate
    padded_hidden, padded_inner = hidden, inner
    family = case.policy.families[case.method.family]
    backend = family.backends[report.backend]
    if family.name in ("mxfp4", "mxfp4-generic", "mxfp4-ct"):
        multiples = mxfp4_multiples(backend.round, backend.name, case)
        padded_hidden, padded_inner = round_up(hidden, multiples[0]), round_up(inner, multiples[1])
    elif report.experts in ("MarlinExperts", "BatchedMarlinExperts") and family.name == "wna16":
        padded_inner = marlin_padded(inner, case.method.group_size)
    return Sizes(hidden, inner, padded_hidden, padded_inner, case.local_experts)


def marlin_padded(intermediate: int, group: int | None) -> int:
    """Intermediate size per rank after Marlin's tile padding."""
    return layout_class("marlin-wna16/1").padding.padded(intermediate, group if group and group > 0 else None)


def shrunk_group(hidden: int, intermediate: int, group: int) -> int:
    """MoeWNA16's group size: halved until it divides both sizes (below 32 the engine gives up)."""
    while group > 1 and (hidden % group or intermediate % group):
        group //= 2
    return group


def transient_bytes(case: Case, report: CandidateReport, sizes: Sizes) -> int:
    """Extra device memory of the engine's load-time conversion of one layer, in bytes, at its peak.

    A repack allocates its whole output while the input is alive, one projection at a time, so the peak is w13's
    output; emulation makes bf16 copies of everything; backends that only view their bytes need nothing.
    """
    if report.experts.endswith("EmulationTritonExperts") and case.method.family == "wna16":
        return 3 * sizes.local_experts * sizes.hidden * sizes.intermediate * 2
    if report.backend in ("TRITON", "XPU", "EMULATION") and case.method.family in ("wna16", "int8"):
        return 0
    rows = 2 * sizes.padded_intermediate if case.shape.gated else sizes.padded_intermediate
    return sizes.local_experts * rows * sizes.padded_hidden * (case.method.bits or 16) // 8


# Rows of one Marlin tile, smallest first.
_BLOCK_M = (8, 16, 32, 48, 64)


def marlin_block_m(rows_per_expert: float, activation_bits: int = 16) -> int:
    """Rows per tile that Marlin picks: the first size that an expert's rows fill to less than 90 %, else the largest.

    Args:
        rows_per_expert: standard format: tokens x top-k / experts; batched format: the static capacity per expert
            (not the real counts, which the engine does not look at).
        activation_bits: 8-bit activations need at least 16 rows.
    """
    least = 16 if activation_bits == 8 else 8
    return next((size for size in _BLOCK_M if size >= least and rows_per_expert / size < 0.9), _BLOCK_M[-1])
