"""What happens to the products of a gate-up or down matrix before they are stored, as one constant of the kernels."""

from __future__ import annotations

from typing import Literal


class Epilogue(str):
    """The end of a product. Its text names all of it.

    It is a string because Triton writes kernels' constants as JSON for whoever hooks into compiling (vLLM does).

    Attributes:
        activation: `silu`, `gelu`, `gelu_tanh`, `swiglu_oai`, `relu2` (ungated), or `none`.
        gated: the activation takes two halves of the columns and makes one result of each pair.
        interleaved: gate and up are neighbouring columns (gate even), else gate comes first and up I columns later.
        alpha, beta: of `swiglu_oai`.
        limit: clamp of gate (from above) and up (both sides); 0 for none.
        weight: where router weights are multiplied (portable kernels only): `first`, before bias and activation,
            `last`, or nowhere.
    """

    __slots__ = ("activation", "alpha", "beta", "gated", "interleaved", "limit", "weight")

    activation: str
    gated: bool
    interleaved: bool
    alpha: float
    beta: float
    limit: float
    weight: str

    def __new__(
        cls,
        activation: str = "none",
        gated: bool = False,
        interleaved: bool = False,
        alpha: float = 1.702,
        beta: float = 1.0,
        limit: float = 0.0,
        weight: Literal["", "first", "last"] = "",
    ) -> Epilogue:
        numbers = "_".join(str(value).replace("-", "m") for value in (alpha, beta, limit))
        made = super().__new__(cls, f"{activation}{int(gated)}{int(interleaved)}_{numbers}{weight}")
        made.activation, made.gated, made.interleaved = activation, gated, interleaved
        made.alpha, made.beta, made.limit, made.weight = alpha, beta, limit, weight
        return made

    def __getnewargs__(self) -> tuple[str, bool, bool, float, float, float, str]:  # type: ignore[override]
        """What a copy in another process is made from."""
        return self.activation, self.gated, self.interleaved, self.alpha, self.beta, self.limit, self.weight

    def mangle(self) -> str:
        """A name for compiled functions."""
        return str(self)


SILU = Epilogue("silu", gated=True)
PLAIN = Epilogue()
