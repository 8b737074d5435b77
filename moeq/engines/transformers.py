"""transformers loads converted checkpoints, once this module is imported.

    import moeq.engines.transformers
    model = AutoModelForCausalLM.from_pretrained("DST", device_map="cuda")

The import registers the quantisation method `moeq` and the experts implementation `moeq` in transformers' own
registries. Experts are loaded by transformers as they lie in the files, without repacking, and run in `moeq_kernels` on
a GPU and as the float32 reference, one expert dequantised at a time, on a CPU. Every model works whose experts go
through transformers' experts interface (`use_experts_implementation`). Linear layers outside the experts that the
source had quantised (GPTQ attention, for example) are dequantised while they are loaded; everything else loads as
transformers does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeq.engines.transformers_versions import check_version

check_version()  # an older transformers lacks what is imported next

# ruff: noqa: E402
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.engines.dense import QuantizedLinear, quantized_linears
from moeq.engines.experts_module import ConvertedExperts
from moeq.errors import MoeqError
from moeq.load.torch_loader import check_device, check_kernel, layer_entry, open_converted
from moeq.oracle.loaders import TRANSFORMERS_GUARD

if TYPE_CHECKING:
    from moeq.model.converted import ConvertedCheckpoint

#: Name of the experts implementation, as `from_pretrained(experts_implementation=...)` takes it.
IMPLEMENTATION = "moeq"

_LAYER = re.compile(r"\.(\d+)\.")


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts of a layer `[tokens, H]`, where `experts_implementation` is `moeq`.

    Raises:
        MoeqError: `usage.not-converted` where the checkpoint of the model is none of moeq's.
    """
    converted = getattr(module, "converted", None)
    if converted is None:
        raise MoeqError(
            "usage.not-converted",
            f"{type(module).__name__} holds plain weights, and experts_implementation='moeq' reads packed ones",
            "convert the checkpoint first: moeq convert SRC DST --gpu NAME",
        )
    found: Tensor = converted(hidden_states, top_k_index, top_k_weights)
    return found


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
ALL_EXPERTS_FUNCTIONS.register(TRANSFORMERS_GUARD, experts_forward)


@register_quantization_config("moeq")
class MoeqConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """`quantization_config` of a converted checkpoint.

    Args:
        manifest: name of the manifest.
        layouts: ids of the layouts in it.
        original: the source's quantisation config.
    """

    def __init__(
        self,
        manifest: str = MANIFEST_NAME,
        layouts: list[str] | None = None,
        original: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        self.quant_method = "moeq"
        self.manifest = manifest
        self.layouts = layouts or []
        self.original = original
        self.more = more


@register_quantizer("moeq")
class MoeqQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts experts that read packed weights in the place of transformers' own, before weights are loaded."""

    requires_calibration = True  # there is nothing that transformers could quantise on the fly

    def __init__(self, quantization_config: MoeqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.checkpoint: ConvertedCheckpoint | None = None
        self.linears: list[QuantizedLinear] = []
        self.beside: dict[str, torch.dtype] = {}

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        if getattr(model.config, "distributed_config", None) is not None:
            raise MoeqError(
                "usage.parallel",
                "transformers was asked to split the model over processes, but each would load all converted experts",
                "use device_map to spread layers over GPUs, or moeq.load_experts(tp_rank=..., tp_size=...)",
            )
        checkpoint = _open(model, checkpoint_files)
        self.checkpoint = checkpoint
        self.beside = _dtypes_beside(model)
        for name, module in _experts(model):
            entry = layer_entry(checkpoint, _layer_number(name))
            if entry.ranks:
                axis = entry.sharding.axis
                raise MoeqError(
                    f"usage.{axis}",
                    f"layer {entry.layer} is written rank by rank for {axis} {len(entry.ranks)}, and transformers "
                    "loads all of it",
                    "convert it for one rank: moeq convert SRC DST --tp 1",
                )
            ConvertedExperts(module, entry)
            module.config._experts_implementation = IMPLEMENTATION
        self.linears = quantized_linears(checkpoint, _linears(model), self.quantization_config.original)

    def get_weight_conversions(self) -> list[WeightConverter]:
        """One conversion per linear layer that the source had quantised: its tensors become one weight.

        Every transformers 5 asks for these, on its own or from inside `update_weight_conversions` (from 5.8), whose
        arguments changed in 5.21.
        """
        return [_conversion(self, linear) for linear in self.linears]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self.checkpoint is not None  # transformers calls the two in this order
        _cast(model, self.beside)
        for _, module in _experts(model):
            device = module.w13_weight.device
            if device.type == "cuda":
                check_device(self.checkpoint, device)
                check_kernel(module.converted.entry, model.dtype, "bf16")
        return model

    def dequantize(self, model: Any, *more: Any, **named: Any) -> Any:
        """Refused: transformers would say that it is not implemented."""
        raise MoeqError(
            "usage.dequantize",
            "packed experts are not made plain weights again inside transformers",
            "moeq restore DST OUT gives the source back",
        )

    def is_serializable(self) -> bool:
        """Saving would lose the manifest; copy the folder instead."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradients."""
        return False


def _open(model: Any, checkpoint_files: list[str] | None) -> ConvertedCheckpoint:
    """The converted checkpoint that the model's files belong to, and a refusal of models that are not covered."""
    if not _experts(model):
        raise MoeqError(
            "usage.unsupported-model",
            f"{type(model).__name__} has no experts that go through transformers' experts interface",
            "moeq.load_experts loads the layers of any converted checkpoint",
        )
    if not checkpoint_files:
        raise MoeqError("usage.no-files", "a converted model needs its files: from_pretrained('DST')")
    folder = Path(checkpoint_files[0]).parent
    if not (folder / MANIFEST_NAME).exists():  # a Hub download: transformers fetched only what it knows
        _download_manifest(model, folder)
    return open_converted(folder)


def _download_manifest(model: Any, folder: Path) -> None:
    """Fetch the manifest into a folder of the Hub's cache, `CACHE/models--org--name/snapshots/COMMIT`."""
    if folder.parent.name == "snapshots":
        cached_file(model.config.name_or_path, MANIFEST_NAME, revision=folder.name, cache_dir=folder.parents[2])


def _experts(model: Any) -> list[tuple[str, Any]]:
    """Modules that hold a layer's experts, with what the experts interface puts into each."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_bias")
    ]


def _dtypes_beside(model: Any) -> dict[str, torch.dtype]:
    """Dtype of every floating-point tensor beside the experts (the router), in a model that is not filled yet.

    It is the one that the model's code creates the tensor in, or asks transformers for (`_keep_in_fp32_modules_strict`:
    the bias that corrects the choice of experts).
    """
    plan: dict[str, torch.dtype] = model._get_dtype_plan(model.dtype)
    found = {}
    for experts, _ in _experts(model):
        block = experts.rpartition(".")[0]
        inner = model.get_submodule(block)
        for name, tensor in (*inner.named_parameters(block), *inner.named_buffers(block)):
            if tensor.is_floating_point() and not name.startswith(f"{experts}."):
                kept = (dtype for key, dtype in plan.items() if re.search(key.replace("*", ".*"), name))
                found[name] = next(kept, tensor.dtype)
    return found


def _cast(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give tensors the dtypes that transformers gives them in a checkpoint that is not quantised.

    Before 5.21 it leaves tensors of a quantised one that it renames in the dtype of the file, and Mixtral's router is
    one: a file in another dtype than the model's would fail in the first forward pass.
    """
    for name, dtype in dtypes.items():
        module, _, last = name.rpartition(".")
        tensor = getattr(model.get_submodule(module), last)
        tensor.data = tensor.data.to(dtype)


def _layer_number(name: str) -> int:
    found = _LAYER.search(name)
    assert found is not None  # experts are in layers
    return int(found[1])


def _linears(model: Any) -> Mapping[str, tuple[int, int]]:
    """`(out_features, in_features)` of every linear layer."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


def _conversion(quantizer: MoeqQuantizer, linear: QuantizedLinear) -> WeightConverter:
    sources = [f"{linear.module}.{part}" for part in linear.parts]
    return WeightConverter(sources, f"{linear.module}.weight", operations=[DequantizeLinear(quantizer, linear)])


class DequantizeLinear(ConversionOps):  # type: ignore[misc]
    """The tensors of one quantised linear layer as its plain weight."""

    def __init__(self, hf_quantizer: MoeqQuantizer, linear: QuantizedLinear) -> None:
        self.hf_quantizer = hf_quantizer  # transformers leaves the dtypes alone where an operation has one
        self.linear = linear

    def __deepcopy__(self, memo: dict[int, Any]) -> DequantizeLinear:
        return self  # transformers copies converters for every tensor, and there is nothing in here that changes

    def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        """`{module}.weight` in the dtype of the model's parameter."""
        name = f"{self.linear.module}.weight"
        parts = {
            key.rpartition(".")[2]: value[0] if isinstance(value, list) else value for key, value in input_dict.items()
        }
        weight = self.linear.dequantize(parts)
        return {name: weight.to(model.get_parameter(name).dtype)}
