"""Common part of the quantisation configs `moeq` in vLLM and SGLang.

Both engines ask their `QuantizationConfig` the same questions. The source's own config, inside of ours, still decides
about every layer outside the experts. Registries and layer classes differ: see `vllm/config.py` and
`sglang/config.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from moeq.errors import MoeqError

if TYPE_CHECKING:
    import torch

#: `quant_method` of a converted checkpoint.
NAME = "moeq"

_LAYER = re.compile(r"\.(\d+)\.")


class ConvertedQuantization(ABC):
    """Mixin for the `quantization_config` of a converted checkpoint, which holds the source's own, or of a source.

    Args:
        original: the source's quantisation config, or None if its `config.json` has none.
        converted: whether the config is that of a converted checkpoint.

    Attributes:
        inner: the engine's config of the source's method, or None.
        converted: whether the config is that of a converted checkpoint.
        unread: error that says why the engine does not read the other layers of a source, or None.
    """

    def __init__(self, original: dict[str, Any] | None, *, converted: bool) -> None:
        super().__init__()
        self.converted = converted
        self.inner: Any = None
        self.unread: MoeqError | None = None
        self._read_source_config(original)

    def _read_source_config(self, original: Mapping[str, Any] | None) -> None:
        """Set `inner` to the engine's config of the source's method; without one, raise for a converted checkpoint.

        A source keeps the error in `unread`: its experts are judged first, as `convert` judges them.
        """
        try:
            self.inner = self.source_config(dict(original)) if original else None
        except MoeqError as error:
            if self.converted:
                raise
            self.unread = error

    @staticmethod
    @abstractmethod
    def source_config(original: dict[str, Any]) -> Any:
        """Make the engine's config of the source's method. Raises MoeqError `answer.no-backend` if it has none."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Make the config from the quantisation config in `config.json`, of a converted checkpoint or of a source."""
        converted = config.get("quant_method") == NAME
        return cls(config.get("original") if converted else config, converted=converted)

    def get_name(self) -> str:
        """Return `moeq`."""
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the activation dtypes that the source's method supports."""
        import torch

        return list(self.inner.get_supported_act_dtypes()) if self.inner else [torch.bfloat16, torch.float16]

    @property
    def weight_block_size(self) -> list[int] | None:
        """Block size of the layers outside the experts, for which engines allow sizes that blocks do not divide."""
        found: list[int] | None = getattr(self.inner, "weight_block_size", None)
        return found

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no names: `config.json` says everything."""
        return []


def layer_number(prefix: str) -> int | None:
    """Return the number of a layer by its name; None for draft layers, which some models count from 0 again."""
    found = _LAYER.search(prefix)
    return int(found[1]) if found and "mtp" not in prefix else None


def source_unread(method: str, engine: str, error: Exception) -> MoeqError:
    """Make the error for a source whose layers outside the experts the engine refuses."""
    return MoeqError(
        "answer.no-backend",
        f"layers outside the experts are still {method}, as the source had them, and {engine} does not read them: "
        f"{error}",
        "moeq oracle SRC says what serves this checkpoint",
    )
