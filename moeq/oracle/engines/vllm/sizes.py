"""Size arithmetic for a selected backend: rounding, padding and memory."""

from __future__ import annotations

from moeq.layouts.registry import layout_class
from moeq.oracle.engines.vllm.case import Case
from moeq.oracle.records import CandidateReport, Sizes


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than the value."""
    return -(-value // multiple) * multiple


# All-to-all kinds round the hidden size up before weights are created: to a multiple in bytes, or to a listed size.
_ROW_BYTE_MULTIPLES = {"deepep_high_throughput": 512, "deepep_v2": 512}
_LISTED_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
_KINDS_WITH_LISTED_SIZES = ("deepep_low_latency", "nixl_ep")


def transported_hidden(case: Case) -> int:
    """Return the hidden size that the all-to-all kind rounds up to; unchanged if no listed size is large enough."""
    hidden, kind = case.shape.hidden_size, case.all2all
    if kind in _ROW_BYTE_MULTIPLES:
        return round_up(hidden, _ROW_BYTE_MULTIPLES[kind] // 2)
    if kind in _KINDS_WITH_LISTED_SIZES:
        return next((size for size in _LISTED_HIDDEN_SIZES if size >= hidden), hidden)
    return hidden


def sizes_for(case: Case, report: CandidateReport) -> Sizes:
    """Return the sizes of one rank's experts that the backend stores."""
    hidden, inner = case.shape.hidden_size, case.intermediate
    padded_hidden, padded_inner = transported_hidden(case), case.method.padded_intermediate or inner
    family, method = case.method.family, case.method.name
    if method in _MXFP4_METHODS:
        # Only these methods pass their activation to the round-up.
        activation = case.shape.activation if method in _PASS_ACTIVATION else ""
        rows = case.policy.rounding.get(case.device, {}).get(report.backend, {"": (1, 1)})
        multiples = rows.get(activation) or rows[""]
        padded_hidden, padded_inner = round_up(padded_hidden, multiples[0]), round_up(padded_inner, multiples[1])
    elif method == "Fp8PerBlockOnlineMoEMethod":
        padded_hidden, padded_inner = round_up(padded_hidden, 128), round_up(padded_inner, 128)
    elif family == "unquantized" and case.policy.since("0.31.0"):
        padded_inner = round_up(padded_inner, _unquantized_multiple(report.backend, padded_inner))
    elif report.experts in ("MarlinExperts", "BatchedMarlinExperts") and family == "wna16":
        padded_inner = marlin_padded(inner, case.method.group_size)
    return Sizes(hidden, inner, padded_hidden, padded_inner, case.local_experts)


_MXFP4_METHODS = (
    "GptOssMxfp4MoEMethod",
    "Mxfp4MoEMethod",
    "Mxfp4OnlineMoEMethod",
    "QuarkOCP_MX_MoEMethod",
    "CompressedTensorsW4A8Mxfp4MoEMethod",
)

_PASS_ACTIVATION = ("Mxfp4MoEMethod", "CompressedTensorsW4A8Mxfp4MoEMethod")


def _unquantized_multiple(backend: str, intermediate: int) -> int:
    """Return the multiple that an unquantised shard is rounded up to. AITER has a narrower tile for small experts."""
    if backend == "AITER" and intermediate <= 192:
        return 64
    return 128 if backend in ("AITER", "FLASHINFER_TRTLLM") else 1


def marlin_padded(intermediate: int, group: int | None) -> int:
    """Return the intermediate size per rank after Marlin's tile padding."""
    return layout_class("marlin-wna16/1").padding.padded(intermediate, group if group and group > 0 else None)


def shrunk_group(hidden: int, intermediate: int, group: int) -> int:
    """Return MoeWNA16's group size: halved until it divides both sizes; below 32 the engine gives up."""
    while group > 1 and (hidden % group or intermediate % group):
        group //= 2
    return group


def transient_bytes(case: Case, report: CandidateReport, sizes: Sizes) -> int:
    """Return the peak of extra device memory, in bytes, when the engine converts one layer at load time.

    A repack allocates its whole output while the input is alive, one projection at a time, so the peak is w13's
    output; emulation makes bf16 copies of everything; backends that only view their bytes need nothing.
    """
    if (report.experts or "").endswith("EmulationTritonExperts") and case.method.family == "wna16":
        bf16_bytes = 2 * sizes.hidden * sizes.intermediate
        return sizes.local_experts * 3 * bf16_bytes  # gate, up and down
    if report.backend in ("TRITON", "XPU", "EMULATION") and case.method.family in ("wna16", "int8"):
        return 0
    rows = 2 * sizes.padded_intermediate if case.shape.gated else sizes.padded_intermediate
    return sizes.local_experts * rows * sizes.padded_hidden * (case.method.bits or 16) // 8
