"""The epilogue of a product: operations on its sums before they are stored. Kernels take it as one constant."""

from __future__ import annotations

from typing import Literal


class Epilogue(str):
    """Epilogue of a product; the text of this string names every option.

    The class derives from `str` because Triton writes kernel constants as JSON for compile hooks (vLLM installs one).
    """

    __slots__ = ("activation", "alpha", "beta", "gated", "interleaved", "limit", "weight")

    activation: str  #: name in `moeq_kernels.activations`, or `none`
    gated: bool  #: whether the activation combines a gate column and an up column into one result
    interleaved: bool  #: whether gate and up columns are interleaved (gate even); otherwise gate is first
    #: Parameters of the activation's formula; a limit of 0 disables clamps.
    alpha: float
    beta: float
    limit: float
    #: Point at which router weights are applied (portable kernels only): `first` (before bias and activation), `last`,
    #: or empty for never.
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
        """Return the arguments from which another process rebuilds a pickled epilogue."""
        return self.activation, self.gated, self.interleaved, self.alpha, self.beta, self.limit, self.weight

    @property
    def constants(self) -> dict[str, str | float]:
        """Constants of the activation, for kernels that do not take an `Epilogue`."""
        return {"ACTIVATION": self.activation, "ALPHA": self.alpha, "BETA": self.beta, "LIMIT": self.limit}

    def mangle(self) -> str:
        """Return the text that Triton puts into names of compiled functions."""
        return str(self)


SILU = Epilogue("silu", gated=True)
PLAIN = Epilogue()
