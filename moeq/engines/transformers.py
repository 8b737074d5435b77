"""transformers loads converted checkpoints, once this module is imported.

    import moeq.engines.transformers
    model = AutoModelForCausalLM.from_pretrained("DST", device_map="cuda")

A source works without a conversion: `from_pretrained("SRC", config=packing_config("SRC"))` packs its experts into
memory while it is loaded, with the units and the proof of `moeq convert`.

The import registers the quantisation method `moeq` and the experts implementation `moeq` in transformers' own
registries. transformers loads converted experts without repacking them. They run in `moeq_kernels` on a GPU, and on a
CPU as the float32 reference, which dequantises one expert at a time. Every model works whose experts use transformers'
experts interface (`use_experts_implementation`). Linear layers outside the experts that the source had quantised (GPTQ
attention, for example) are dequantised while they are loaded; transformers loads everything else as usual.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moeq.engines.transformers_versions import check_version

check_version()  # an older transformers lacks what is imported next

# ruff: noqa: E402
from transformers import AutoConfig
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import cached_file
from transformers.utils.quantization_config import QuantizationConfigMixin

from moeq.checkpoint.manifest import MANIFEST_NAME, STACKED_ROLES, LayerEntry
from moeq.deploy.deployment import Deployment
from moeq.deploy.detect import detect_gpu
from moeq.deploy.gpus import parse_gpu
from moeq.engines.converted_config import layer_number
from moeq.engines.experts_module import ConvertedExperts
from moeq.engines.experts_source import PackingExpertsSource, open_experts
from moeq.errors import MoeqError
from moeq.load.ranks import Rank, plan_rank
from moeq.load.torch_loader import check_device, check_kernel, layer_entry, open_converted
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint
from moeq.model.quantized_modules import QuantizedModule, decode, quantized_linears
from moeq.oracle.loaders import TRANSFORMERS_GUARD
from moeq.oracle.versions import BUILTIN
from moeq.schemes.dequantize import dequantize

logger = logging.getLogger(__name__)

#: Name of the experts implementation, as `from_pretrained(experts_implementation=...)` takes it.
IMPLEMENTATION = "moeq"


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts of a layer on `[tokens, H]`, as the experts implementation `moeq`.

    Raises MoeqError `usage.not-converted` if the model's checkpoint is no conversion.
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
        source: folder or Hub repository of a source that is packed while it is loaded; None for a conversion.
        revision: Hub revision of `source`.
        prove_all: whether all packed experts of a source are proven instead of a sample.
    """

    def __init__(
        self,
        manifest: str = MANIFEST_NAME,
        layouts: list[str] | None = None,
        original: dict[str, Any] | None = None,
        source: str | None = None,
        revision: str | None = None,
        prove_all: bool = False,
        **more: Any,
    ) -> None:
        self.quant_method = "moeq"
        self.manifest = manifest
        self.layouts = layouts or []
        self.original = original
        self.source, self.revision, self.prove_all = source, revision, prove_all
        self.more = more


def packing_config(source: str, revision: str | None = None, *, prove_all: bool = False, **options: Any) -> Any:
    """Return a source's config with which `from_pretrained(source, config=...)` packs its experts into memory.

    Layouts are those that `moeq convert --engine moeq` chooses for the GPU of this process, or without one for an A100.

    Args:
        source: folder or Hub repository.
        prove_all: whether all packed experts are compared with the source instead of a sample.
        options: further arguments of `AutoConfig.from_pretrained`.
    """
    config = AutoConfig.from_pretrained(source, revision=revision, **options)
    method = {"quant_method": "moeq", "source": source, "revision": revision, "prove_all": prove_all}
    config.quantization_config = {**method, "original": getattr(config, "quantization_config", None)}
    return config


@register_quantizer("moeq")
class MoeqQuantizer(HfQuantizer):  # type: ignore[misc]
    """Quantiser that replaces transformers' experts by packed ones, before weights are loaded."""

    requires_calibration = True  # transformers must not quantise on the fly

    def __init__(self, quantization_config: MoeqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.converted: ConvertedCheckpoint | None = None
        self.packing: PackingExpertsSource | None = None
        self.linears: list[QuantizedModule] = []
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
        if not _experts(model):
            raise MoeqError(
                "usage.unsupported-model",
                f"{type(model).__name__} has no experts that go through transformers' experts interface",
                "moeq.load_experts loads the layers of any converted checkpoint",
            )
        if self.quantization_config.source is not None:
            self.packing = self._packing(model)
            checkpoint: Checkpoint = self.packing.checkpoint
        else:
            checkpoint = self.converted = _open(model, checkpoint_files)
        self.beside = _dtypes_beside(model)
        for name, module in _experts(model):
            number = layer_number(name)
            assert number is not None  # experts lie in numbered layers
            entry = self._entry(number)
            ConvertedExperts(module, entry)
            module.config._experts_implementation = IMPLEMENTATION
            if self.packing is not None:  # they are filled afterwards
                model._keys_to_ignore_on_load_missing.add(rf"^{re.escape(name)}\.")
                for prefix in (name, checkpoint.expert_prefix(entry.layer)):
                    model._keys_to_ignore_on_load_unexpected.add(rf"^{re.escape(prefix)}\.")
        tensors, declaration = checkpoint.source.tensors.values(), checkpoint.declaration
        shapes = {
            name: (module.out_features, module.in_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self.linears = list(quantized_linears(tensors, declaration, shapes))

    def _packing(self, model: Any) -> PackingExpertsSource:
        """Open the source, and decide how its experts are packed for the device of this process."""
        asked = self.quantization_config
        found = open_experts(asked.source, asked.revision, logger, converted=False)
        if not isinstance(found, PackingExpertsSource):
            raise MoeqError("usage.already-converted", f"{asked.source} is converted", "load it without packing_config")
        is_half = model.dtype == torch.float16
        deployment = Deployment(detect_gpu() or parse_gpu("A100"), engine=BUILTIN, dtype="fp16" if is_half else "bf16")
        found.decide(deployment, "all" if asked.prove_all else "sample")
        return found

    def _entry(self, layer: int) -> LayerEntry:
        """Return how a layer is packed. Raises MoeqError if it is not packed, or packed for several ranks."""
        if self.packing is not None:
            planned = self.packing.entry(layer)
            if planned is None:
                text = f"the experts of layer {layer} are not quantised, and those of other layers are"
                raise MoeqError("answer.not-convertible", text, "load the source without packing_config")
            return planned
        assert self.converted is not None  # the caller has opened it
        entry = layer_entry(self.converted, layer)
        if entry.ranks:
            axis = entry.sharding.axis
            raise MoeqError(
                f"usage.{axis}",
                f"layer {entry.layer} is written rank by rank for {axis} {len(entry.ranks)}, and transformers "
                "loads all of it",
                "convert it for one rank: moeq convert SRC DST --tp 1",
            )
        return entry

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Return a conversion for each linear layer that the source had quantised: its tensors become one weight.

        Every transformers 5 asks for these, directly or, from 5.8 on, inside `update_weight_conversions`, whose
        arguments changed in 5.21.
        """
        return [
            WeightConverter(
                [f"{linear.name}.{part}" for part in linear.parts],
                f"{linear.name}.weight",
                operations=[DequantizeLinear(self, linear)],
            )
            for linear in self.linears
        ]

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, dtype in self.beside.items():  # before 5.21 renamed tensors (Mixtral's router) keep the file's dtype
            parent, _, last = name.rpartition(".")
            tensor = getattr(model.get_submodule(parent), last)
            tensor.data = tensor.data.to(dtype)
        for _, module in _experts(model):
            device = module.w13_weight.device
            if self.packing is not None:
                self._fill(module)
            elif device.type == "cuda":
                assert self.converted is not None  # the method that runs before loading has set it
                check_device(self.converted, device)
                check_kernel(module.converted.entry, model.dtype, "bf16")
        return model

    def _fill(self, module: Any) -> None:
        """Pack the experts of a layer into the parameters of its module."""
        assert self.packing is not None  # the caller has checked it
        entry, rank = module.converted.entry, Rank()
        roles = tuple(f"{role}_" for role in STACKED_ROLES)
        tensors = {name: tensor.data for name, tensor in module.named_parameters() if name.startswith(roles)}
        self.packing.fill(entry, [plan_rank(entry, rank)], rank, tensors)

    def dequantize(self, model: Any, *more: Any, **named: Any) -> Any:
        """Raise MoeqError with a hint; transformers' own method only says that it is not implemented."""
        raise MoeqError(
            "usage.dequantize",
            "packed experts are not made plain weights again inside transformers",
            "moeq restore DST OUT gives the source back",
        )

    def is_serializable(self) -> bool:
        """Return False: saving would lose the manifest."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Whether the model can be trained: packed weights have no gradients."""
        return False


def _open(model: Any, checkpoint_files: list[str] | None) -> ConvertedCheckpoint:
    """Open the converted checkpoint of a model. Raises MoeqError `usage.no-files`, `source.*`."""
    if not checkpoint_files:
        raise MoeqError("usage.no-files", "a converted model needs its files: from_pretrained('DST')")
    folder = Path(checkpoint_files[0]).parent
    if folder.parent.name == "snapshots" and not (folder / MANIFEST_NAME).exists():
        # The Hub's cache, CACHE/models--org--name/snapshots/COMMIT: transformers has not downloaded the manifest.
        cached_file(model.config.name_or_path, MANIFEST_NAME, revision=folder.name, cache_dir=folder.parents[2])
    return open_converted(folder)


def _experts(model: Any) -> list[tuple[str, Any]]:
    """Find the modules of experts, by the attributes that the experts interface adds."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if hasattr(module, "is_transposed") and hasattr(module, "has_bias")
    ]


def _dtypes_beside(model: Any) -> dict[str, torch.dtype]:
    """Return the dtype of every floating-point tensor beside the experts (the router), before the model is filled.

    The dtype is that of the created tensor, or the one that the model's code asks transformers for
    (`_keep_in_fp32_modules_strict`: the bias that corrects the choice of experts).
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


class DequantizeLinear(ConversionOps):  # type: ignore[misc]
    """Conversion of the tensors of one quantised linear layer to a plain weight."""

    def __init__(self, hf_quantizer: MoeqQuantizer, linear: QuantizedModule) -> None:
        self.hf_quantizer = hf_quantizer  # operations with this attribute keep their own dtypes
        self.linear = linear

    def __deepcopy__(self, memo: dict[int, Any]) -> DequantizeLinear:
        return self  # transformers copies converters for every tensor, and this one has no state

    def convert(self, input_dict: dict[str, Any], model: Any = None, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Return `{module}.weight` in the dtype of the model's parameter."""
        name, described = f"{self.linear.name}.weight", self.linear.described
        parts = {
            key.rpartition(".")[2]: value[0] if isinstance(value, list) else value for key, value in input_dict.items()
        }
        device = next(iter(parts.values())).device
        on_cpu = {part: tensor.cpu() for part, tensor in parts.items()}
        weight = dequantize(decode(on_cpu, described.spec, described.scheme, self.linear.name))
        return {name: weight.to(device, model.get_parameter(name).dtype)}
