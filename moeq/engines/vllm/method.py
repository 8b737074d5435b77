"""The quantisation method `moeq` inside vLLM (0.33.0, 0.26.0): experts are created in their converted shapes, filled
with the bytes of this rank, and handed to the engine's own expert kernels as they are.

Layers outside the experts keep the method that the source's config asks for. `moeq.engines.vllm.plugin` registers
this; nothing else imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_input_dtype
from vllm.platforms import current_platform

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry
from moeq.engines.vllm.backends import BACKENDS, EngineExperts
from moeq.engines.vllm.models import MODELS, teach
from moeq.errors import MoeqError
from moeq.layouts.arranged import torch_dtype
from moeq.layouts.registry import get_layout, layout_class
from moeq.load.ranks import Rank, plan_rank
from moeq.load.torch_loader import layer_entry, open_converted, read_parts, require_arch, uneven_unit

if TYPE_CHECKING:
    from moeq.model.converted import ConvertedCheckpoint

_LAYER = re.compile(r"layers\.(\d+)\.")


def register_method() -> None:
    """Register config and experts with the engine. Calling it again does nothing."""
    from vllm.model_executor.custom_op import op_registry_oot

    if op_registry_oot.get("RoutedExperts") is not MoeqRoutedExperts:
        RoutedExperts.register_oot(MoeqRoutedExperts)
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
        """Open the checkpoint. Raises MoeqError `usage.unsupported-model`, `usage.not-local`, `source.*`."""
        kind = getattr(hf_config, "model_type", None)
        if kind not in MODELS:
            raise MoeqError(
                "usage.unsupported-model",
                f"moeq's vLLM loader does not cover model type '{kind}': its weights are not loaded by the method",
                f"it covers {', '.join(MODELS)}; serve the source checkpoint instead",
            )
        if not Path(model_name).is_dir():
            raise MoeqError(
                "usage.not-local",
                f"{model_name} is no local folder, and experts are read from files rank by rank",
                f"hf download {model_name} --local-dir DST, then vllm serve DST",
            )
        self.checkpoint = open_converted(Path(model_name))
        if self.inner is not None:
            self.inner.maybe_update_config(model_name, hf_config=hf_config, revision=revision)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Names in the source's config follow the engine's."""
        if self.inner is not None:
            self.inner.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """Ours for converted experts, the source's for everything else."""
        if isinstance(layer, RoutedExperts) and self.checkpoint is not None:
            found = _LAYER.search(prefix)
            number = int(found[1]) if found else -1
            if self.checkpoint.is_packed(number):
                teach(self.checkpoint.source.config["model_type"], MoeqMoEMethod)
                return MoeqMoEMethod(layer.moe_config, self.checkpoint, layer_entry(self.checkpoint, number))
        if self.inner is None:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        self.inner.packed_modules_mapping = self.packed_modules_mapping
        return self.inner.get_quant_method(layer, prefix)


def _source_method(original: dict[str, Any]) -> Any:
    """The engine's config of the source's method. Raises MoeqError `answer.no-backend` where the engine refuses it."""
    method = str(original["quant_method"])
    try:
        return get_quantization_config(method).from_config(dict(original))
    except ValueError as error:
        raise MoeqError(
            "answer.no-backend",
            f"layers outside the experts are still {method}, as the source had them, and vLLM does not read them: "
            f"{error}",
            "moeq oracle SRC says what serves this checkpoint",
        ) from error


class MoeqMoEMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The experts of one layer.

    Args:
        moe: the engine's record of the layer.
        checkpoint: the converted checkpoint.
        entry: the layer in its manifest.

    Raises:
        MoeqError: `answer.no-backend`, `environment.gpu-mismatch`, `usage.dtype`, `usage.moe-backend`,
            `environment.marlin-input` where this engine, as it was started, would not read the bytes rightly.
    """

    def __init__(self, moe: Any, checkpoint: ConvertedCheckpoint, entry: LayerEntry) -> None:
        super().__init__(moe)
        self.checkpoint = checkpoint
        self.entry = entry
        self.engine = _engine_experts(entry)
        _check_start(self.engine, moe, checkpoint)
        _check_order(moe, entry)
        self.experts_cls = _supported_class(self.engine, moe, entry)
        parallel = moe.moe_parallel_config
        # Under expert parallelism experts are whole, and the engine says so by tp_size 1.
        self.rank = Rank(parallel.tp_rank, parallel.tp_size, parallel.ep_rank, parallel.ep_size)
        if not parallel.use_ep:
            self.rank = Rank(parallel.tp_rank, parallel.tp_size)
        if self.rank.tp_size > 1 and not self.engine.shards:
            raise MoeqError(
                "usage.tp",
                f"layer {entry.layer}: experts with act-order are not cut over {self.rank.tp_size} ranks",
                "start with --tensor-parallel-size 1, or with --enable-expert-parallel",
            )
        self.part = plan_rank(entry, self.rank, uneven_unit(checkpoint, entry.layer))
        self._filled = False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Sizes that the engine rounds up before weights are made, as the layout did."""
        if not self.engine.rounds_sizes:
            return hidden_size, intermediate_size_per_partition
        w2 = self.part.matrices["w2"].spec
        return w2.n, w2.k

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters named and shaped as the converted tensors of this rank."""
        held = self.part.experts[1] - self.part.experts[0]
        if num_experts != held:
            raise MoeqError(
                "usage.ep",
                f"layer {self.entry.layer}: this rank ({self.rank.title}) holds {num_experts} experts in the engine "
                f"and {held} by moeq's linear placement",
                "start without --enable-eplb and with --expert-placement-strategy linear",
            )
        for name, shape, dtype in self.shapes(params_dtype):
            empty = torch.empty(held, *shape, dtype=dtype)
            layer.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))

    def shapes(self, params_dtype: torch.dtype) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape of one expert, and dtype of every parameter."""
        layout = get_layout(self.entry.layout)
        for role in STACKED_ROLES:
            for part, spec in layout.tensors(self.part.matrices[role].spec).items():
                stored = torch_dtype(spec.dtype)
                exponents = part == "scale" and stored == torch.uint8
                floats = stored.is_floating_point and self.engine.cast
                dtype = torch.float8_e8m0fnu if exponents else params_dtype if floats else stored
                yield f"{role}_{part}", spec.shape, dtype

    def load(self, layer: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
        """Names of the parameters that the given tensors fill.

        The engine passes whole tensors that are mapped, not read; this rank's bytes are read from the files instead,
        once, when the first tensor of the layer comes by.
        """
        for name, _ in weights:
            parameter = name.partition(".rank")[0]
            if not self._filled:
                self._fill(layer)
            if hasattr(layer, parameter):
                yield parameter

    def _fill(self, layer: Any) -> None:
        for role in STACKED_ROLES:
            matrix = self.part.matrices[role]
            targets = {part: getattr(layer, f"{role}_{part}").data for part in matrix.stored.tensors}
            exponents = torch.float8_e8m0fnu  # bytes, as moeq has them
            targets = {part: t.view(torch.uint8) if t.dtype == exponents else t for part, t in targets.items()}
            device = next(iter(targets.values())).device
            for part, tensor in read_parts(self.checkpoint, self.entry, self.part, matrix, device, targets).items():
                if tensor.data_ptr() != targets[part].data_ptr():
                    targets[part].copy_(tensor)
        self._filled = True

    def process_weights_after_loading(self, layer: Any) -> None:
        """Set the kernel up on the tensors as they were loaded."""
        if not self._filled:
            raise MoeqError("source.incomplete", f"no tensor of the experts of layer {self.entry.layer} was loaded")
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        self.moe_kernel = self.engine.kernel(
            self.moe_quant_config,
            self.moe,
            self.experts_cls,
            layer._expert_routing_tables(),
            dict(layer.named_parameters()),
        )

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """The engine's record of scales, zero points and biases."""
        return self.engine.quant_config(dict(layer.named_parameters()), self.part.matrices["w13"].spec)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> Any:
        """Run the engine's kernel."""
        assert self.moe_kernel is not None  # the engine sets it up before it calls
        return self.moe_kernel.apply(
            hidden_states=x,
            w1=layer.w13_weight,
            w2=layer.w2_weight,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            expert_map=layer.expert_map,
            shared_experts=shared_experts,
            shared_experts_input=shared_experts_input,
        )


class MoeqRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """The engine's experts, which ask our method for their weights where it is ours."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        """Names of the parameters that were loaded."""
        if isinstance(self.quant_method, MoeqMoEMethod):
            return self.quant_method.load(self, weights)
        found: Iterable[str] = super().load_weights(weights)
        return found


def _engine_experts(entry: LayerEntry) -> EngineExperts:
    found = BACKENDS.get(entry.layout)
    if found is None:
        raise MoeqError(
            "answer.no-backend",
            f"layer {entry.layer} is in layout {entry.layout}, which moeq's vLLM loader hands to no kernel",
            f"it hands over {', '.join(BACKENDS)}: moeq convert SRC DST --backend marlin",
        )
    return found


def _check_start(engine: EngineExperts, moe: Any, checkpoint: ConvertedCheckpoint) -> None:
    """Options and devices that would make the engine read the bytes wrongly, or not at all."""
    asked = str(moe.moe_backend)
    if asked not in ("auto", engine.option):
        raise MoeqError(
            "usage.moe-backend",
            f"--moe-backend {asked} was asked for, and the experts are packed for {engine.title}",
            f"start with --moe-backend {engine.option}, or convert: moeq convert SRC DST --backend {asked}",
        )
    dtype = str(moe.in_dtype).removeprefix("torch.")
    if dtype not in engine.dtypes:
        raise MoeqError(
            "usage.dtype",
            f"activations are {dtype}; {engine.title} reads these bytes with {' or '.join(engine.dtypes)}",
        )
    if engine.option == "marlin" and get_marlin_input_dtype() is not None:
        raise MoeqError(
            "environment.marlin-input",
            "VLLM_MARLIN_INPUT_DTYPE asks Marlin for 8-bit activations, whose weights are packed otherwise",
            "unset VLLM_MARLIN_INPUT_DTYPE",
        )
    capability = current_platform.get_device_capability()
    if capability is not None and current_platform.is_cuda():
        require_arch(checkpoint, f"sm{capability.major}{capability.minor}")


def _check_order(moe: Any, entry: LayerEntry) -> None:
    """The engine's activation of gpt-oss takes gate and up by turns, every other one half after half."""
    order = layout_class(entry.layout).w13_order
    wanted = "interleaved" if moe.activation is MoEActivation.SWIGLUOAI else "gate-up"
    if order != wanted:
        same = [layout for layout, engine in BACKENDS.items() if engine is BACKENDS[entry.layout]]
        fitting = [layout for layout in same if layout_class(layout).w13_order == wanted]
        raise MoeqError(
            "answer.no-backend",
            f"layer {entry.layer} is in layout {entry.layout}, whose gate and up rows lie {order}, and vLLM's "
            f"activation {moe.activation.value} takes them {wanted}",
            f"convert the source to another layout: moeq convert SRC DST --layout {' or '.join(fitting)}",
        )


def _supported_class(engine: EngineExperts, moe: Any, entry: LayerEntry) -> Any:
    """The engine's expert class, by the engine's own judgement."""
    batched = moe.moe_parallel_config.use_batched_activation_format
    form = FusedMoEActivationFormat.BatchedExperts if batched else FusedMoEActivationFormat.Standard
    weight, activation = engine.keys(entry.matrices["w13"].spec)
    reason: str | None = None
    for kind in engine.classes():
        supported, reason = kind.is_supported_config(kind, moe, weight, activation, form)
        if supported:
            return kind
    raise MoeqError(
        "answer.no-backend",
        f"layer {entry.layer} is packed for {engine.title}, which vLLM does not run here: {reason}",
        "moeq oracle SRC --gpu NAME says which backend it runs, moeq convert SRC DST converts for it",
    )


__all__ = ["MoeqConfig", "MoeqMoEMethod", "MoeqRoutedExperts", "register_method"]
