"""What happens to the products of a gate-up or down matrix before they are stored, as one constant of the kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finish:
    """The end of a product.

    Attributes:
        activation: `silu`, `gelu`, `gelu_tanh`, `swiglu_oai`, `relu2` (ungated), or `none`.
        gated: the activation takes two halves of the columns and makes one result of each pair.
        interleaved: gate and up are neighbouring columns (gate even), else gate comes first and up I columns later.
        alpha, beta: of `swiglu_oai`.
        limit: clamp of gate (from above) and up (both sides); 0 for none.
    """

    activation: str = "none"
    gated: bool = False
    interleaved: bool = False
    alpha: float = 1.702
    beta: float = 1.0
    limit: float = 0.0

    def mangle(self) -> str:
        """A name for compiled functions."""
        numbers = "_".join(str(value).replace("-", "m") for value in (self.alpha, self.beta, self.limit))
        return f"{self.activation}{int(self.gated)}{int(self.interleaved)}_{numbers}"


SILU = Finish("silu", gated=True)
PLAIN = Finish()
