"""Entry point of the vLLM plug-in (`vllm.general_plugins`). Importing this module imports no engine.

vLLM calls `register` in each of its processes, for every model. It has to be quick, may be called twice, and must not
fail with a version of the engine that the loader was never run with.
"""

from __future__ import annotations

from moeq.errors import MoeqError
from moeq.layouts.readers import VLLM_VERSIONS
from moeq.oracle.loaders import version_ranges


def register() -> None:
    """Register the quantisation method `moeq`. On another version of vLLM, register its refusal instead."""
    import vllm

    found = str(vllm.__version__).partition("+")[0]
    if found in VLLM_VERSIONS:
        from moeq.engines.vllm.config import register_config

        register_config()
    else:
        _register_refusal(found)


def wrong_engine(found: str) -> MoeqError:
    """Make the error that a user of another version sees when a converted checkpoint is loaded."""
    return MoeqError(
        "environment.engine-version",
        f"moeq's plug-in was run with vLLM {version_ranges(VLLM_VERSIONS)}, and this is vLLM {found}: kernels and "
        "loaders differ",
        f"pip install vllm=={VLLM_VERSIONS[0]}; or serve the source checkpoint, which this engine repacks itself",
    )


def _register_refusal(found: str) -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class Refusal(QuantizationConfig):  # type: ignore[misc]
        """Config that refuses every converted checkpoint."""

        @classmethod
        def from_config(cls, config: dict[str, object]) -> Refusal:
            raise wrong_engine(found)

        def get_name(self) -> str:
            return "moeq"

        def get_supported_act_dtypes(self) -> list[object]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        def get_quant_method(self, layer: object, prefix: str) -> None:
            return None

    register_quantization_config("moeq")(Refusal)
