"""Static scales of activations, which are carried over if the target keeps them.

Checkpoints with static FP8 activations hold one `input_scale` per projection; those with 4-bit activations hold a
second-level scale, which ModelOpt stores as a multiplier (`input_scale`) and compressed-tensors as a divisor
(`input_global_scale`). The weights' second-level scale is
stored likewise: ModelOpt has a multiplier, compressed-tensors a divisor. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from moeq.errors import MoeqError
from moeq.layouts.float_bits import bits_of, numbers_of
from moeq.schemes.base import Scheme
from moeq.schemes.format import ACTIVATION_SCALES, FLOAT_NAMES, PartSig
from moeq.schemes.nvfp4 import divisor_of
from moeq.transcode.compare import Loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    Array = np.ndarray[Any, Any]

#: Bytes per dtype of static scales.
_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class StaticScale:
    """The static scale of a projection's activations, in the source and in the target."""

    source: str  #: name of the part in the source
    dtype: str  #: dtype in the source
    target: str  #: name of the part in the target
    written: PartSig  #: dtype and shape in the target

    @property
    def inverted(self) -> bool:
        """Whether source and target store reciprocals of each other."""
        return ACTIVATION_SCALES[self.source] != ACTIVATION_SCALES[self.target]

    def converted(self, stored: Array, module: str) -> tuple[Array, Loss | None]:
        """Return the bytes that the target stores, and the loss if the number has no exact reciprocal, else None.

        Raises MoeqError `source.bad-data` if the scale is not positive and finite.
        """
        value = float(numbers_of(stored.view(f"u{_WIDTHS[self.dtype]}"), FLOAT_NAMES[self.dtype])[0])
        if not isfinite(value) or value <= 0:
            raise MoeqError("source.bad-data", f"{module}: {self.source} is {value}, expected a positive number")
        if not self.inverted:
            return _stored(value, self.written.dtype), None
        if ACTIVATION_SCALES[self.source]:
            return _stored(float(np.float32(1 / value)), self.written.dtype), None
        divisor = divisor_of(value)
        after = float(np.float32(1) / np.float32(divisor))
        loss = None if after == value else _loss(f"{module}.{self.target}", value, after)
        return _stored(divisor, self.written.dtype), loss


def static_part(parts: Mapping[str, PartSig], scheme: Scheme) -> tuple[str, str] | None:
    """Return part and dtype of a projection's static scale of activations; None if the checkpoint uses none.

    No engine uses a stored scale if the config asks for scales that are computed at run time.
    """
    activation = scheme.activation
    if activation is None:
        return None
    names = tuple(ACTIVATION_SCALES) if activation.dtype == "e2m1" else ("input_scale",)
    if activation.dtype != "e2m1" and (activation.scale.dynamic or activation.scale.granularity != "tensor"):
        return None
    for name in names:
        if name in parts and parts[name].dtype in _WIDTHS and parts[name].shape in ((), (1,), (1, 1)):
            return name, parts[name].dtype
    return None


def _stored(value: float, dtype: str) -> Array:
    """Return the bytes of a value in a dtype that holds it."""
    return bits_of(np.array([value], np.float32), FLOAT_NAMES[dtype]).view(np.uint8)


def _loss(name: str, before: float, after: float) -> Loss:
    change = abs(before - after)
    return Loss(name, 1, 1, 1, 1, (1, 1), change, change / abs(before), (0, 0), before, after)
