"""What vLLM's and SGLang's quantization config for a converted checkpoint have in common.

Both engines ask their `QuantizationConfig` the same questions, and both answers hold the source's own config, which
still decides about every layer outside the experts. Registries and layer classes are the engines' own; they are in
`vllm/config.py` and `sglang/config.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from moeq.errors import MoeqError

if TYPE_CHECKING:
    import torch

#: `quant_method` of a converted checkpoint.
NAME = "moeq"

_LAYER = re.compile(r"\.(\d+)\.")


class ConvertedQuantization(ABC):
    """`quantization_config` of a converted checkpoint, with the source's own inside; a mixin.

    Args:
        original: the source's quantization config, or None where it had none in `config.json`.

    Attributes:
        inner: the engine's config for it, or None.
    """

    def __init__(self, original: dict[str, Any] | None) -> None:
        super().__init__()
        self.inner: Any = self.source_config(original) if original else None

    @staticmethod
    @abstractmethod
    def source_config(original: dict[str, Any]) -> Any:
        """The engine's config of the source's method. Raises MoeqError `answer.no-backend` without one."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """From `config.json`."""
        return cls(config.get("original"))

    def get_name(self) -> str:
        """`moeq`."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those of the source's method."""
        import torch

        return list(self.inner.get_supported_act_dtypes()) if self.inner else [torch.bfloat16, torch.float16]

    @property
    def weight_block_size(self) -> list[int] | None:
        """Of the layers that are as the source has them: engines allow sizes that such blocks do not divide."""
        found: list[int] | None = getattr(self.inner, "weight_block_size", None)
        return found

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: `config.json` says everything."""
        return []


def layer_number(prefix: str) -> int | None:
    """Number of a layer by its name; None for draft layers of multi-token prediction, which some models count anew."""
    found = _LAYER.search(prefix)
    return int(found[1]) if found and "mtp" not in prefix else None


def source_unread(method: str, engine: str, error: Exception) -> MoeqError:
    """The error for a source whose layers outside the experts the engine refuses."""
    return MoeqError(
        "answer.no-backend",
        f"layers outside the experts are still {method}, as the source had them, and {engine} does not read them: "
        f"{error}",
        "moeq oracle SRC says what serves this checkpoint",
    )


__all__ = ["NAME", "ConvertedQuantization", "layer_number", "source_unread"]
