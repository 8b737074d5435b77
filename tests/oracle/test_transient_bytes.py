"""Device memory that vLLM takes besides a layer while it repacks it at load time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeq.oracle.engines.vllm import sizes
from moeq.oracle.records import Sizes

SIZES = Sizes(100, 90, 128, 96, 3)


@pytest.mark.parametrize(
    ("family", "backend", "experts", "bits", "gated", "expected"),
    [
        ("wna16", "MARLIN", "MarlinExperts", 4, True, 3 * 2 * 96 * 128 // 2),
        ("wna16", "MARLIN", "MarlinExperts", 8, False, 3 * 96 * 128),
        ("fp8", "TRITON", None, None, True, 3 * 2 * 96 * 128 * 2),
        ("wna16", "EMULATION", "Int4EmulationTritonExperts", 4, True, 3 * 3 * 100 * 90 * 2),
        ("wna16", "TRITON", "TritonExperts", 4, True, 0),
        ("int8", "XPU", "XPUExperts", 8, True, 0),
    ],
)
def test_the_peak_is_the_output_of_w13(
    family: str, backend: str, experts: str | None, bits: int | None, gated: bool, expected: int
) -> None:
    case: Any = SimpleNamespace(method=SimpleNamespace(family=family, bits=bits), shape=SimpleNamespace(gated=gated))
    report: Any = SimpleNamespace(backend=backend, experts=experts)
    assert sizes.transient_bytes(case, report, SIZES) == expected
