"""Quantisation config `moeq` in vLLM: moeq's method for packed experts, the source's own for other layers.

Experts come from a converted checkpoint, or with `--quantization moeq` from a source, which is packed while it is
loaded. `moeq.engines.vllm.plugin` registers the config. Packed experts are kept away from vLLM's model classes, which
would look for the source's tensors: a class gets all other tensors of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.model_executor.models.utils import PPMissingLayer

from moeq.deploy.deployment import Deployment
from moeq.engines.choice import EngineOptions, engine_options
from moeq.engines.converted_config import NAME, ConvertedQuantization, layer_number, source_unread
from moeq.engines.experts_source import ExpertsSource, PackingExpertsSource, open_experts
from moeq.engines.reload import ExpertReload, divert
from moeq.engines.vllm.engine_experts import RELEASE, current_gpu
from moeq.engines.vllm.experts_method import MoeqMoEMethod
from moeq.engines.vllm.own_experts import logger
from moeq.errors import MoeqError
from moeq.oracle.loaders import TRANSFORMERS_GUARD, reads_by_own_config
from moeq.oracle.versions import BUILTIN

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq.model import Checkpoint

    Weights = Iterable[tuple[str, Tensor]]
    Load = Callable[[Any, Weights], set[str] | None]


def register_config() -> None:
    """Register the config with the engine. Further calls have no effect."""
    register_quantization_config(NAME)(MoeqConfig)


class MoeqConfig(ConvertedQuantization, QuantizationConfig):  # type: ignore[misc]
    """Quantisation config `moeq` in vLLM.

    Attributes:
        experts: packed experts of the checkpoint that is loaded; None until the engine names it.
        opened: folder or Hub repository of that checkpoint, and its revision.
    """

    def __init__(self, original: dict[str, Any] | None = None, *, converted: bool = False) -> None:
        super().__init__(original, converted=converted)
        self.experts: ExpertsSource | None = None
        self.opened: tuple[str, str | None] | None = None
        self._plain: dict[str, bool] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the checkpoint: the engine sends its config to the processes of ranks, and each opens it again."""
        return {**self.__dict__, "experts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.opened is not None:
            self.experts = open_experts(*self.opened, logger, converted=self.converted)

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Checkpoint that is loaded; None until the engine names it."""
        return None if self.experts is None else self.experts.checkpoint

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return `moeq` for a checkpoint of any method if the user asks for it: `--quantization moeq`."""
        return NAME if user_quant == NAME else None

    @staticmethod
    def source_config(original: dict[str, Any]) -> Any:
        try:
            return get_quantization_config(method_of(original)).from_config(dict(original))
        except ValueError as error:
            raise source_unread(str(original["quant_method"]), "vLLM", error) from error

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the compute capability of the oldest GPU with kernels; the manifest says which GPU is needed."""
        return 75

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Open the checkpoint, a folder or a Hub repository.

        Raises MoeqError `usage.not-converted`, `source.*`, `answer.*` for a source whose experts are never packed.
        """
        self.opened = (model_name, None if Path(model_name).is_dir() else revision)
        self.experts = open_experts(*self.opened, logger, converted=self.converted)
        if self.inner is None and self.unread is None and not self.converted:  # the config may be in a file of its own
            self._read_source_config(self.experts.checkpoint.quantization_config)
        model_type = str(self.experts.checkpoint.source.config.get("model_type", ""))
        if self.inner is not None and reads_by_own_config(model_type, self.inner.get_name()):
            raise MoeqError(
                "usage.unsupported-model",
                f"vLLM reads the FP8 layers of {model_type} outside the experts by a config of that model, which the "
                "plug-in does not stand in for",
                "serve the source checkpoint without --quantization moeq",
            )
        if getattr(hf_config, "_experts_implementation", None) == TRANSFORMERS_GUARD:
            hf_config._experts_implementation = "eager"  # some of the engine's classes are transformers'
        if self.inner is not None:
            self.inner.maybe_update_config(model_name, hf_config=hf_config, revision=revision)

    @property
    def kv_cache_scheme(self) -> dict[str, Any] | None:
        """KV-cache scheme if the source stores its scales: the engine then makes an FP8 cache."""
        found: dict[str, Any] | None = getattr(self.inner, "kv_cache_scheme", None)
        return found

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename the modules in the source's config as the engine names them."""
        if self.inner is not None:
            self.inner.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Return moeq's method for packed experts, and the source's for all other layers."""
        if self.experts is not None:
            config = get_current_vllm_config()
            options = engine_options(_own_options(config.additional_config))
            if isinstance(self.experts, PackingExpertsSource):
                self.experts.decide(deployment_of(config, options), options.prove)
                if self.unread is not None:
                    raise self.unread
            leave_experts_out(config.model_config, self.experts.names)
            number = layer_number(prefix)
            entry = self.experts.entry(number) if isinstance(layer, RoutedExperts) and number is not None else None
            if entry is not None:
                dummy = config.load_config.load_format == "dummy"
                return MoeqMoEMethod(layer.moe_config, self.experts, entry, options, dummy=dummy)
        if isinstance(layer, LinearBase) and (self.inner is None or self._is_plain(prefix.partition(".")[0])):
            return UnquantizedLinearMethod()
        if self.inner is None:
            return None
        self.inner.packed_modules_mapping = self.packed_modules_mapping
        return self.inner.get_quant_method(layer, prefix)

    def _is_plain(self, part: str) -> bool:
        """Return whether a part of the model, such as its vision tower, has tensors and none of them is quantised.

        Ignore lists may leave such a part out, since the engine gives it no config: Kimi-K2.5's class does so for
        configs of compressed-tensors, but not for ours.
        """
        if self.checkpoint is None:
            return False
        if part not in self._plain:
            entries = self.checkpoint.source.tensors.items()
            dtypes = {entry.dtype for name, entry in entries if name.startswith(f"{part}.")}
            self._plain[part] = bool(dtypes) and dtypes <= {"F64", "F32", "F16", "BF16"}
        return self._plain[part]


def deployment_of(config: Any, options: EngineOptions) -> Deployment:
    """Describe the deployment of a source, as options of `convert` would.

    Args:
        options: moeq's options; if they ask for moeq's kernels, only those decide.
    """
    parallel = config.parallel_config
    tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
    backend = str(getattr(getattr(config, "kernel_config", None), "moe_backend", "auto"))
    dtype = None if config.model_config is None else str(config.model_config.dtype)
    return Deployment(
        gpu=current_gpu(),
        tp=tp,
        ep=tp * dp if parallel.enable_expert_parallel else 1,
        dp=dp,
        dtype="fp16" if dtype == "torch.float16" else "bf16",
        backend="auto" if options.kernels == "moeq" else backend,
        engine=BUILTIN if options.kernels == "moeq" else f"vllm@{RELEASE}",
    )


def _own_options(additional: Any) -> dict[str, Any] | None:
    """Return moeq's options in `--additional-config`."""
    found = additional.get("moeq") if isinstance(additional, dict) else None
    if found is not None and not isinstance(found, dict):
        raise MoeqError(
            "usage.kernels",
            f"moeq in --additional-config is {found!r}, not an object",
            """--additional-config '{"moeq": {"kernels": "auto"}}'""",
        )
    return found


def method_of(original: dict[str, Any]) -> str:
    """Return the engine's name of the source's method; ModelOpt's methods are all `modelopt`, so its classes decide."""
    method = str(original["quant_method"])
    if method != "modelopt":
        return method
    classes = [get_quantization_config(name) for name in QUANTIZATION_METHODS if name.startswith(method)]
    answers = (config.override_quantization_method(original, None, hf_config=None) for config in classes)
    return next((name for name in answers if name is not None), method)


#: Names of all tensors with experts that moeq's method fills, in checkpoints of a model class.
_STACKED: dict[type, set[str]] = {}


def leave_experts_out(model_config: Any, names: frozenset[str]) -> None:
    """Hide experts, by the names of their tensors, from the class of the model that is about to be built.

    Other checkpoints of that class still load in the same process. Further calls have no effect.
    """
    if model_config is None:  # a layer without a model
        return
    kind = get_model_architecture(model_config)[0]
    if kind not in _STACKED:
        _STACKED[kind] = set()
        kind.load_weights = _without_experts(kind)
    _STACKED[kind] |= names


def _without_experts(kind: Any) -> Load:
    original: Load = kind.load_weights

    @wraps(original)
    def load_weights(model: Any, weights: Weights) -> set[str] | None:
        own = {
            name: layer
            for name, layer in model.named_modules()
            if isinstance(layer, RoutedExperts) and hasattr(layer.quant_method, "entry")
        }
        running = next((layer for layer in own.values() if layer.quant_method.moe_kernel is not None), None)
        if running is not None:  # `reload_weights`, or a weight update from training
            path = running.quant_method.model_config.model  # `reload_weights` sets it to its `weights_path`
            weights = divert(weights, ExpertReload(own.values(), path, from_path=_is_engines_reading(weights)))
        # With pipeline parallelism a rank may hold no layer with experts.
        is_unsupported = not own and not any(isinstance(module, PPMissingLayer) for module in model.modules())

        def others() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name not in _STACKED[kind]:
                    yield name, tensor
                elif is_unsupported:
                    raise MoeqError(
                        "usage.unsupported-model",
                        f"{kind.__name__} does not run its experts through vLLM's RoutedExperts, and nothing else "
                        f"takes {name}",
                        "serve the source checkpoint instead",
                    )

        loaded = original(model, others())
        if loaded is None:
            return None
        return loaded | {
            f"{name}.{parameter}" for name, layer in own.items() for parameter, _ in layer.named_parameters()
        }

    return load_weights


def _is_engines_reading(weights: Weights) -> bool:
    """Return whether the engine's loader reads these tensors, from the path in the config of the model."""
    reading: Any = getattr(DefaultModelLoader, "get_all_weights", None)  # versions without a reload have none
    return reading is not None and getattr(weights, "gi_code", None) is reading.__code__
