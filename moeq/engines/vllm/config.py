"""The quantisation config `moeq` inside vLLM (0.33.0, 0.26.0): which layers are ours, and the source's own method for
all others. `moeq.engines.vllm.plugin` registers it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from moeq.engines.choice import asked_kernels
from moeq.engines.vllm.method import MoeqMoEMethod
from moeq.engines.vllm.models import leave_experts_out
from moeq.errors import MoeqError
from moeq.load.torch_loader import layer_entry, open_converted

if TYPE_CHECKING:
    from moeq.model.converted import ConvertedCheckpoint

_LAYER = re.compile(r"\.(\d+)\.")


def register_config() -> None:
    """Register the config with the engine. Calling it again does nothing."""
    register_quantization_config("moeq")(MoeqConfig)


class MoeqConfig(QuantizationConfig):  # type: ignore[misc]
    """`quantization_config` of a converted checkpoint, with the source's own inside.

    Args:
        original: the source's quantisation config, or None where it had none in `config.json`.
    """

    def __init__(self, original: dict[str, Any] | None) -> None:
        super().__init__()
        self.inner: Any = _source_method(original) if original else None
        self.checkpoint: ConvertedCheckpoint | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MoeqConfig:
        """From `config.json`."""
        return cls(config.get("original"))

    def get_name(self) -> str:
        """`moeq`."""
        return "moeq"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those of the source's method."""
        return list(self.inner.get_supported_act_dtypes()) if self.inner else [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of the oldest kernel; the manifest says which GPU it must be."""
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: `config.json` says everything."""
        return []

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Open the checkpoint, a folder or a Hub repository. Raises MoeqError `usage.not-converted`, `source.*`."""
        self.checkpoint = open_converted(model_name, None if Path(model_name).is_dir() else revision)
        if self.inner is not None:
            self.inner.maybe_update_config(model_name, hf_config=hf_config, revision=revision)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names in the source's config follow the engine's."""
        if self.inner is not None:
            self.inner.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Ours for converted experts, the source's for everything else."""
        if self.checkpoint is not None:
            config = get_current_vllm_config()
            leave_experts_out(config.model_config, self.checkpoint)
            number = _layer_number(prefix)
            if isinstance(layer, RoutedExperts) and number is not None and self.checkpoint.is_packed(number):
                return MoeqMoEMethod(
                    layer.moe_config,
                    self.checkpoint,
                    layer_entry(self.checkpoint, number),
                    asked_kernels(_own_options(config.additional_config)),
                    dummy=config.load_config.load_format == "dummy",
                )
        if self.inner is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        self.inner.packed_modules_mapping = self.packed_modules_mapping
        return self.inner.get_quant_method(layer, prefix)


def _layer_number(prefix: str) -> int | None:
    """Number of a layer by its name; None for draft layers of multi-token prediction, which some models count anew."""
    found = _LAYER.search(prefix)
    return int(found[1]) if found and "mtp" not in prefix else None


def _own_options(additional: Any) -> dict[str, Any] | None:
    """What `--additional-config` says to moeq."""
    found = additional.get("moeq") if isinstance(additional, dict) else None
    if found is not None and not isinstance(found, dict):
        raise MoeqError(
            "usage.kernels",
            f"moeq in --additional-config is {found!r}, not an object",
            """--additional-config '{"moeq": {"kernels": "auto"}}'""",
        )
    return found


def _method_of(original: dict[str, Any]) -> str:
    """The engine's name of the source's method: all of ModelOpt's are `modelopt`, and each class knows its own."""
    method = str(original["quant_method"])
    if method != "modelopt":
        return method
    alike = [get_quantization_config(name) for name in QUANTIZATION_METHODS if name.startswith(method)]
    answers = (config.override_quantization_method(original, None, hf_config=None) for config in alike)
    return next((name for name in answers if name is not None), method)


def _source_method(original: dict[str, Any]) -> Any:
    """The engine's config of the source's method. Raises MoeqError `answer.no-backend` where the engine refuses it."""
    method = str(original["quant_method"])
    try:
        return get_quantization_config(_method_of(original)).from_config(dict(original))
    except ValueError as error:
        raise MoeqError(
            "answer.no-backend",
            f"layers outside the experts are still {method}, as the source had them, and vLLM does not read them: "
            f"{error}",
            "moeq oracle SRC says what serves this checkpoint",
        ) from error


__all__ = ["MoeqConfig", "register_config"]
