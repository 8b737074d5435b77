"""Rows where the engine is wrong: the verdict says so, and moeq's own policy refuses or does it right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from oracle.examples import scheme
from oracle.rows import deployment_of, load, outcome_of, shape_of

from moeq.oracle.engines.vllm.advisories import advisories_for
from moeq.oracle.judge import judge
from moeq.oracle.records import MoeShape, Verdict
from moeq.schemes.base import Scheme

DATA = load()
ROWS = [row for row in DATA["vectors"] if row["hazards"] and row["entry"].startswith("hf:")]

_ACTIVATIONS = {"fp4": "e2m1", "fp8_e4m3": "e4m3", "float8": "e4m3"}


def scheme_of(row: dict[str, Any]) -> Scheme:
    """The scheme of a row, from its plain facts."""
    method = row["entry"].removeprefix("hf:")
    if row["weight_bits"] is None:
        return scheme(method, "int8", -1, scale="f32")
    mx = "mxfp4" in row["scheme"].lower()
    asked = (row["activation_quant"] or "").partition("/")[0] or None
    return scheme(
        method,
        "e2m1" if mx else f"int{row['weight_bits']}",
        row["group_size"] or -1,
        symmetric=not row["zero_point"],
        scale="e8m0" if mx else "f16",
        activation=_ACTIVATIONS.get(asked, asked) if asked else None,
        has_bias=bool(row["bias"]),
    )


def own_verdict(row: dict[str, Any]) -> tuple[Scheme, MoeShape, Verdict]:
    from dataclasses import replace

    where = replace(deployment_of(row, DATA["platforms"]), engine="moeq", backend="auto", quantization=None)
    one, shape = scheme_of(row), shape_of(row)
    return one, shape, judge(one, shape, where)


def _declared(one: Scheme, shape: MoeShape, verdict: Verdict) -> bool:
    bits = 16 if one.activation is None else 8
    return verdict.runs_as is not None and verdict.runs_as.endswith(f"A{bits}")


def _whole_groups(one: Scheme, shape: MoeShape, verdict: Verdict) -> bool:
    return verdict.sizes is not None and verdict.sizes.padded_intermediate % max(one.group_size, 1) == 0


def _reads_scheme(one: Scheme, shape: MoeShape, verdict: Verdict) -> bool:
    from moeq.oracle.engines.moeq import builtin_policy

    assert verdict.chosen is not None
    row = next(
        row.format
        for row in builtin_policy().kernels
        if row.format.layout == verdict.chosen.layout and row.format.element == one.weight.dtype
    )
    group = one.group_size if one.group_size > 0 else -1
    return group in row.group_sizes and (one.weight.symmetric or row.zero_points)


def _no_emulation(one: Scheme, shape: MoeShape, verdict: Verdict) -> bool:
    return verdict.chosen is not None and "EMULATION" not in verdict.chosen.backend


#: What "done right" means for a hazard, where moeq does not refuse the row.
RIGHT: dict[str, Callable[[Scheme, MoeShape, Verdict], bool]] = {
    "R14": _whole_groups,
    "R33": _no_emulation,
    "R34": _no_emulation,
    "R39": _declared,
    "R40": _declared,
}


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_the_engine_s_verdict_names_the_hazard(row: dict[str, Any]) -> None:
    advisories = advisories_for(outcome_of(row, DATA["platforms"]))
    assert set(row["hazards"]) <= {requirement for advisory in advisories for requirement in advisory.requirement}


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_moeq_refuses_or_does_it_right(row: dict[str, Any]) -> None:
    one, shape, verdict = own_verdict(row)
    if verdict.chosen is None:
        assert verdict.error is not None
        assert all(candidate.reasons for candidate in verdict.candidates)
        return
    assert verdict.advisories == ()
    assert _reads_scheme(one, shape, verdict)
    assert _declared(one, shape, verdict)
    for hazard in row["hazards"]:
        assert RIGHT.get(hazard, _reads_scheme)(one, shape, verdict), hazard
