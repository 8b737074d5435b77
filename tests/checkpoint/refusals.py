"""What tests of bad checkpoints ask: refused with that code in one line, opened with that warning, found by a scan."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint.builder import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    Stored,
    Tensors,
    experts,
    router,
)

import moeq
from moeq.errors import MoeqError
from moeq.model.scan import scan


def refused(folder: Path, code: str, *says: str) -> MoeqError:
    """Opening fails with that code, in one printable line that says each of the texts."""
    with pytest.raises(MoeqError) as caught:
        moeq.open(folder)
    check(caught.value, code, *says)
    return caught.value


def check(error: MoeqError, code: str, *says: str) -> None:
    assert error.code == code, error.message
    assert error.exit_code == (1 if code.startswith("answer.") else 4)
    assert error.message.isprintable()
    for text in says:
        assert text in error.message


def warned(folder: Path, code: str, *says: str) -> moeq.Checkpoint:
    """Opening works and names the oddity."""
    checkpoint = moeq.open(folder)
    found = [warning.message for warning in checkpoint.info.warnings if warning.code == code]
    assert found, [warning.code for warning in checkpoint.info.warnings]
    for text in says:
        assert text in found[0]
    return checkpoint


def found_by_scan(folder: Path, code: str) -> str:
    warnings = {warning.code: warning.message for warning in scan(moeq.open(folder))}
    assert code in warnings, warnings
    return warnings[code]


def with_parts(changes: dict[str, Stored | None], expert: str = "0.gate_proj") -> Tensors:
    """The default experts with some parts of one projection replaced, or removed (None)."""
    tensors = {**router(), **experts()}
    for part, stored in changes.items():
        name = f"model.layers.0.mlp.experts.{expert}.{part}"
        tensors.pop(name, None)
        if stored is not None:
            tensors[name] = stored
    return tensors


def fused_mxfp4(prefix: str = "model.layers.0.mlp.experts") -> Tensors:
    return {
        f"{prefix}.gate_up_proj_blocks": Stored("U8", (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32, 16)),
        f"{prefix}.gate_up_proj_scales": Stored("U8", (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 32)),
        f"{prefix}.down_proj_blocks": Stored("U8", (EXPERTS, HIDDEN, INTERMEDIATE // 32, 16)),
        f"{prefix}.down_proj_scales": Stored("U8", (EXPERTS, HIDDEN, INTERMEDIATE // 32)),
    }
