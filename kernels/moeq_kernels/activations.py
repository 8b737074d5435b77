"""Table of the activations between the two products. Importing this module needs neither torch nor triton.

Formulas are those of vLLM 0.33 (`model_executor/layers/activation.py`, `fused_moe/activation.py`) and SGLang 0.5.23
(`moe_runner/triton_utils/fused_moe.py`). `reference` names the engine's function in plain torch, with which tests
compare. Device code has each formula once for `triton.language` and once for Gluon.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    """Activation of gate g and up u, or of one projection x, in float32."""

    name: str  #: name in `fused_moe`
    gated: str  #: formula with a gate, or empty where there is none
    ungated: str  #: formula without a gate, or empty where there is none
    #: Names in vLLM's `MoEActivation`, which `moeq` uses for models; without a gate `_no_mul` follows.
    engine: tuple[str, ...]
    reference: str  #: function of vLLM 0.33 or of torch that computes it
    #: Default parameters, None where the formula has none.
    alpha: float | None = None
    beta: float | None = None
    #: Role of `limit`: `before` clamps g from above and u on both sides before the formula; `inside` is a number of the
    #: formula.
    limit: str = "before"
    alpha_required: bool = False  #: whether a caller has to give alpha
    default_limit: float = 0.0  #: limit where a caller gives none; 0 for no limit


ACTIVATIONS: dict[str, Activation] = {
    row.name: row
    for row in (
        Activation("silu", "g * sigmoid(g) * u", "x * sigmoid(x)", ("silu",), "SiluAndMul"),
        Activation("gelu", "g * normal_cdf(g) * u", "x * normal_cdf(x)", ("gelu",), "GeluAndMul"),
        Activation("gelu_tanh", "gelu_tanh(g) * u", "gelu_tanh(x)", ("gelu_tanh",), "GeluAndMul(approximate='tanh')"),
        Activation("relu2", "max(g, 0)^2 * u", "max(x, 0)^2", ("relu2",), "ReLUSquaredActivation"),
        Activation(
            "swiglu_oai",
            "g * sigmoid(alpha * g) * (u + beta)",
            "",
            ("swigluoai", "swigluoai_uninterleave"),
            "SiluAndMulWithClamp",
            alpha=1.702,
            beta=1.0,
        ),
        Activation(
            "swiglu_step",
            "min(g * sigmoid(g), limit) * clamp(u, -limit, limit)",
            "",
            ("swiglustep",),
            "SwigluStepAndMul",
            limit="inside",
            default_limit=7.0,
        ),
        Activation(
            "situ",
            "alpha * tanh(g / alpha) * sigmoid(g) * limit * tanh(u / limit), with u itself where there is no limit",
            "",
            ("situ",),
            "SituAndMul",
            alpha=1.0,
            limit="inside",
            alpha_required=True,
        ),
    )
}

#: Names of activations with a gate, and of activations without one.
GATED = tuple(row.name for row in ACTIVATIONS.values() if row.gated)
UNGATED = tuple(row.name for row in ACTIVATIONS.values() if row.ungated)

#: Kernel names of activations by the names that engines have for them.
BY_ENGINE_NAME: dict[str, str] = {
    engine + suffix: row.name
    for row in ACTIVATIONS.values()
    for engine in row.engine
    for suffix, formula in (("", row.gated), ("_no_mul", row.ungated))
    if formula
}
