"""Run converted experts in vLLM, by moeq's kernels or by the engine's own.

Experts are created in their converted shapes and filled from the files with the bytes of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.utils.marlin_utils import get_marlin_input_dtype
from vllm.platforms import current_platform

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry
from moeq.engines.choice import EngineOptions, choose, result_or_error
from moeq.engines.experts_source import ExpertsSource
from moeq.engines.packed_method import PackedMethod
from moeq.engines.vllm.backends import BACKENDS
from moeq.engines.vllm.balancing import follow_balancers, placed_experts
from moeq.engines.vllm.engine_experts import RECORDS, EngineExperts, RankWeights, accepts
from moeq.engines.vllm.own_experts import (
    check_own,
    clamp_arguments,
    compile_early,
    experts_class,
    logger,
    own_kernel,
    runs_alone,
    slow_reason,
)
from moeq.engines.vllm.router import router_of
from moeq.errors import MoeqError
from moeq.layouts.registry import layout_class
from moeq.load.activation_scales import ActivationScales
from moeq.load.kernel_experts import dummy_parts
from moeq.load.ranks import Rank, plan_rank, plan_replicas
from moeq.load.torch_loader import uneven_unit

try:
    from vllm.model_executor.utils import is_weights_pre_processed
except ImportError:  # before 0.31 the engine has no such loader

    def is_weights_pre_processed() -> bool:
        return False


if TYPE_CHECKING:
    from moeq.update.layers import RankTensors
    from moeq_kernels import Router


#: Names of the parameters that hold scales of weights.
SCALES = tuple(f"{role}_scale" for role in STACKED_ROLES)


class MoeqMoEMethod(PackedMethod, FusedMoEMethodBase):  # type: ignore[misc]
    """Method for the experts of one layer.

    Args:
        options: kernels and activations that were asked for; None for the defaults.
        dummy: whether no weights are read (`--load-format dummy`).

    Raises MoeqError `answer.no-backend`, `answer.no-kernel`, `environment.gpu-mismatch`, `environment.marlin-input`,
    `usage.*` if neither moeq's kernels nor those of the engine, as it was started, run these bytes correctly.
    """

    def __init__(
        self,
        moe: Any,
        experts: ExpertsSource,
        entry: LayerEntry,
        options: EngineOptions | None = None,
        dummy: bool = False,
    ) -> None:
        super().__init__(moe)
        self.moe_kernel: Any = None
        self.router: Router | None = None
        options = options or EngineOptions()
        self.activations = options.activations
        self.experts = experts
        self.entry = entry
        self.dummy = dummy
        self.model_config = get_current_vllm_config().model_config
        _check_device(experts)
        parallel = moe.moe_parallel_config
        # Under expert parallelism experts are whole, and the engine says so by tp_size 1.
        within_ep = (parallel.ep_rank, parallel.ep_size) if parallel.use_ep else ()
        self.rank = Rank(parallel.tp_rank, parallel.tp_size, *within_ep)
        if parallel.enable_eplb:
            follow_balancers()
            self.parts = plan_replicas(entry, self.rank, moe.num_experts - moe.num_logical_experts)
            experts.check_parts(entry, self.parts, self.rank)
        else:
            self.parts = [plan_rank(entry, self.rank, uneven_unit(experts.checkpoint, entry.layer))]

        scheme = experts.checkpoint.scheme_of(entry.layer)
        self.weights = RankWeights(
            **self.specs, scheme=scheme, experts=self.part.experts, activation=moe.activation.value
        )
        arguments = moe, entry, self.rank, self.weights, experts.backend
        engine = _eplb_error() if parallel.enable_eplb else result_or_error(partial(_engine_experts, *arguments))
        own = result_or_error(lambda: check_own(moe, entry, self.part))
        slow = None if own else slow_reason(moe, self.packed(self.empty(moe.in_dtype, "meta")))
        title = engine if isinstance(engine, MoeqError) else engine[0].title
        fp8 = self.activations == "fp8"  # no kernel of the engine has e4m3 activations on these bytes
        choice = choose("moeq" if fp8 else options.kernels, own, slow, title)
        # The number of the layer is left out, so that layers of one kind share a line of the log.
        self.choice = replace(choice, why=choice.why.replace(f"layer {entry.layer}: ", ""))
        if not self.choice.own:
            assert not isinstance(engine, MoeqError)  # `choose` has raised it
            self.engine, self.experts_cls = engine
        logger.info_once("moeq: %s: %s%s", self.title, self.choice.why, ", e4m3 activations" if fp8 else "")

    @property
    def supports_eplb(self) -> bool:
        """Whether the engine may move experts between ranks: only if moeq's kernels run them and fold no scales.

        Then the parameters are all that a kernel reads, and an expert's bytes are the same on every rank.
        """
        return self.choice.own and not self.folds_scales

    @property
    def supports_pre_processed_weights(self) -> bool:
        """Whether parameters of another process are taken as they are (`vllm preload`): only moeq's kernels do so.

        The engine's kernels may derive further tensors from them.
        """
        return self.choice.own

    @property
    def is_monolithic(self) -> bool:
        """Whether the engine leaves the choice of experts to the method, and calls `apply_monolithic`."""
        return self.router is not None or bool(super().is_monolithic)

    @property
    def title(self) -> str:
        """Description of the layer's kind, without its number."""
        spec = self.part.matrices["w2"].spec
        return (
            f"{self.num_held} experts of [{spec.n}, {spec.k}], {self.entry.layout} {spec.element}, "
            f"{self.moe.activation.value}"
        )

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Return hidden and intermediate size, rounded up as the layout pads them if the engine's kernels need it."""
        if self.choice.own or not self.engine.rounds_sizes:
            return hidden_size, intermediate_size_per_partition
        w2 = self.part.matrices["w2"].spec
        return w2.n, w2.k

    @property
    def skip_forward_padding(self) -> bool:
        """Whether the engine's kernel takes tokens without the padding of the hidden size."""
        return not self.choice.own and self.engine.unpadded.tokens

    @property
    def has_unpadded_output(self) -> bool:
        """Whether the engine's kernel returns results without the padding of the hidden size."""
        return not self.choice.own and self.engine.unpadded.results

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Create parameters with the names and shapes of the converted tensors of this rank."""
        if num_experts != self.num_held:
            raise MoeqError(
                "usage.ep",
                f"layer {self.entry.layer}: this rank ({self.rank.title}) holds {num_experts} experts in the engine "
                f"and {self.num_held} by moeq's linear placement",
                "start with --expert-placement-strategy linear",
            )
        self.create_parameters(layer, params_dtype)
        if self.choice.own:
            self.router = router_of(self.moe, layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Fill the parameters and set up the kernel. Later calls, which verl makes after every update, do nothing."""
        if self.moe_kernel is not None:
            return
        tensors = {
            f"{role}_{part}": getattr(layer, f"{role}_{part}").data
            for role in STACKED_ROLES
            for part in self.part.matrices[role].stored.tensors
        }
        if self.dummy:
            dummy_parts(tensors)
        elif not is_weights_pre_processed():
            if self.choice.own and self.experts.begins_filling and self.prepares_unfilled:
                compile_early(self.moe, self.packed(dict(layer.named_parameters())), layer)
            self.experts.fill(self.entry, self.parts, self.rank, tensors)
        if self.choice.own:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            packed = self.packed(dict(layer.named_parameters()))
            self.moe_kernel = own_kernel(self.moe, packed, layer, wait=not self.experts.is_filling)
            return
        self.engine.settle(layer, self.weights, self._activation_scales)
        self.moe_quant_config = self.get_fused_moe_quant_config(layer)
        tables, tensors = layer._expert_routing_tables(), _as_engine_dtypes(dict(layer.named_parameters()))
        self.moe_kernel = self.engine.kernel(
            moe_quant_config=self.moe_quant_config,
            moe_config=self.moe,
            experts_cls=self.experts_cls,
            routing_tables=tables,
            **self.engine.kernel_arguments(tensors),
        )
        if self.engine.finishes:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    def _activation_scales(self) -> ActivationScales | None:
        """Read the scales of activations that the source stores; return ones if no weights are read."""
        if not self.dummy:
            return self.experts.activation_scales(self.entry)
        ones = torch.ones(self.entry.num_experts, 2 if self.weights.w13.gated else 1)
        return ActivationScales(ones, ones[:, 0], "input_scale")

    def served(self, layer: Any) -> RankTensors:
        """Return the packed tensors that kernels read, which a layerwise reload may have set aside."""
        return self.parts_of(_read_by_kernels(layer))

    def held(self, layer: Any) -> tuple[int, ...] | None:
        """Return the expert of every row of the served tensors under EPLB, after its transfers; None without EPLB.

        Raises MoeqError `usage.reload` under data parallelism, whose engines do not reload together.
        """
        parallel = self.moe.moe_parallel_config
        if not parallel.enable_eplb:
            return None
        if parallel.dp_size > 1:
            raise MoeqError(
                "usage.reload",
                f"layer {self.entry.layer}: data-parallel engines reload one after the other, and EPLB may copy old "
                "experts to a rank that has new ones",
                "start the engine again with the new weights, or without --enable-eplb",
            )
        initial = tuple(expert for part in self.parts for expert in range(*part.experts))
        return placed_experts(layer) or initial

    def check_reload(self, layer: Any) -> None:
        """Raise MoeqError `usage.reload` if the engine's kernel reads tensors computed from the stored ones."""
        memory = {one.untyped_storage().data_ptr() for parts in self.served(layer).values() for one in parts.values()}
        for name, tensor in {**_read_by_kernels(layer), **getattr(layer, RECORDS, {})}.items():
            computed = name.startswith(STACKED_ROLES) and isinstance(tensor, torch.Tensor)
            if computed and tensor.numel() and tensor.untyped_storage().data_ptr() not in memory:
                raise MoeqError(
                    "usage.reload",
                    f"layer {self.entry.layer}: the engine's kernel reads {name}, which was computed from the stored "
                    "weights or scales when the engine started and would stay as it is",
                    "start the engine again with the new weights, or let moeq's kernels run the experts",
                )

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Make the engine's record of scales, zero points and biases; an empty one if moeq runs the experts."""
        if self.choice.own:
            return FUSED_MOE_UNQUANTIZED_CONFIG
        tensors = _as_engine_dtypes(dict(layer.named_parameters())) | getattr(layer, RECORDS, {})
        return self.engine.quant_config(tensors, self.weights, clamp_arguments(self.moe))

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> Any:
        """Run the routed experts on the tokens `[M, H]` of this rank."""
        kernel = self.moe_kernel
        assert kernel is not None  # `process_weights_after_loading` has set it
        if self.choice.own and runs_alone(kernel):
            return kernel.fused_experts.run(
                x, topk_weights, topk_ids, layer.expert_map, layer.apply_router_weight_on_input
            )
        return kernel.apply(
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

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> Any:
        """Run the routed experts in kernels that route the tokens themselves: moeq's, or one of the engine's."""
        kernel = self.moe_kernel
        assert kernel is not None
        if self.router is not None:
            return kernel.fused_experts.run_routed(x, router_logits, self.router, layer)
        sink = {"routing_sink": layer.routing_sink} if accepts(kernel.apply_monolithic, "routing_sink") else {}
        return kernel.apply_monolithic(
            x,
            layer.w13_weight,
            layer.w2_weight,
            router_logits,
            activation=layer.activation,
            global_num_experts=layer.global_num_experts,
            expert_map=layer.expert_map,
            apply_router_weight_on_input=layer.apply_router_weight_on_input,
            num_expert_group=layer.num_expert_group,
            topk_group=layer.topk_group,
            e_score_correction_bias=layer.e_score_correction_bias,
            routed_scaling_factor=layer.routed_scaling_factor,
            **sink,
        )


def _read_by_kernels(layer: Any) -> dict[str, torch.Tensor]:
    """Return the parameters that kernels read: those that a layerwise reload has set aside, or the layer's own."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # versions without the layerwise reload
        return dict(layer.named_parameters())
    kept = get_layerwise_info(layer).kernel_tensors
    return dict(layer.named_parameters()) if kept is None else {**kept[0], **kept[1]}


def _check_device(experts: ExpertsSource) -> None:
    """Raise MoeqError `environment.gpu-mismatch` if the bytes are for another architecture than this GPU's."""
    capability = current_platform.get_device_capability()
    if capability is not None and current_platform.is_cuda():
        experts.require_arch(f"sm{capability.major}{capability.minor}")


def _eplb_error() -> MoeqError:
    """Make the error that says why the engine's own kernels do not run experts that EPLB moves."""
    return MoeqError(
        "usage.eplb",
        "EPLB moves the converted tensors of an expert, and the engine's kernels may read others that were computed "
        "from them",
        "start without --enable-eplb, or let moeq's kernels run the experts",
    )


def _engine_experts(
    moe: Any, entry: LayerEntry, rank: Rank, weights: RankWeights, preferred: str
) -> tuple[EngineExperts, Any]:
    """Return the engine's experts for a layout, and their class. Raises MoeqError if the engine cannot run them.

    Several backends may read the same bytes. `--moe-backend` limits the choice, and the backend that the checkpoint was
    converted for comes first.
    """
    found = BACKENDS.get(entry.layout)
    if found is None:
        raise MoeqError(
            "answer.no-backend",
            f"layer {entry.layer} is in layout {entry.layout}, which none of vLLM's kernels reads as it is",
            f"moeq convert SRC DST --gpu {_gpu_option()} writes a layout that they read there, if one fits: "
            f"{', '.join(BACKENDS)}",
        )
    readers = (found, *found.instead)
    asked = str(moe.moe_backend)
    allowed = [row for row in readers if asked in ("auto", row.option)]
    if not allowed:
        options = list(dict.fromkeys(row.option for row in readers))
        raise MoeqError(
            "usage.moe-backend",
            f"--moe-backend {asked} was requested, but the experts are packed for {found.title}",
            f"start with --moe-backend {' or '.join(options)}, or convert: moeq convert SRC DST --backend {asked}",
        )
    reasons: list[MoeqError] = []
    for engine in sorted(allowed, key=lambda row: row.reader.backend != preferred):
        kind = result_or_error(partial(_supported_class, engine, moe, entry, rank, weights))
        if not isinstance(kind, MoeqError):
            return engine, kind
        reasons.append(kind)
    raise reasons[0]


def _check_start(engine: EngineExperts, moe: Any, entry: LayerEntry, rank: Rank) -> None:
    """Reject options with which the engine would read the bytes wrongly, or not at all."""
    dtype = str(moe.in_dtype).removeprefix("torch.")
    if dtype not in engine.dtypes:
        raise MoeqError(
            "usage.dtype",
            f"activations are {dtype}; {engine.title} reads these bytes with {' or '.join(engine.dtypes)}",
        )
    if engine.option == "marlin":
        _check_marlin_input(engine)
    if rank.tp_size > 1 and not engine.reader.shards:
        raise MoeqError(
            "usage.tp",
            f"layer {entry.layer}: experts with act-order cannot be split over {rank.tp_size} ranks",
            "start with --tensor-parallel-size 1, or with --enable-expert-parallel",
        )
    if rank.ep_size > 1 and not engine.spreads:
        raise MoeqError(
            "usage.ep",
            f"layer {entry.layer}: {engine.title} has no map of experts, so every rank has to hold all of them",
            "start without --enable-expert-parallel",
        )


def _check_marlin_input(engine: EngineExperts) -> None:
    """Check that Marlin gets the kind of activations that its weights are packed for."""
    try:
        found = get_marlin_input_dtype()
    except ValueError as error:  # this GPU has no such activations
        raise MoeqError("environment.marlin-input", str(error), "unset VLLM_MARLIN_INPUT_DTYPE") from error
    name = {None: None, torch.int8: "int8", torch.float8_e4m3fn: "fp8"}[found]
    if name != engine.marlin_input:
        wanted = f"set VLLM_MARLIN_INPUT_DTYPE={engine.marlin_input}" if engine.marlin_input else None
        asked = f"asks Marlin for {name} activations" if name else "is not set, so Marlin would take 16-bit activations"
        raise MoeqError(
            "environment.marlin-input",
            f"VLLM_MARLIN_INPUT_DTYPE {asked}, whose weights are packed otherwise",
            wanted or "unset VLLM_MARLIN_INPUT_DTYPE",
        )


def _check_order(moe: Any, entry: LayerEntry, engine: EngineExperts) -> None:
    """Check the order of gate and up rows: the engine's activation of gpt-oss takes them interleaved, others in halves.

    Kernel and layout agree on which half comes first. If the kernel applies the activation itself, they agree on the
    whole order.
    """
    order = layout_class(entry.layout).w13_order
    wanted = "interleaved" if moe.activation is MoEActivation.SWIGLUOAI else "gate-up"
    if not engine.reader.activates and (order == "interleaved") != (wanted == "interleaved"):
        siblings = [layout for layout, row in BACKENDS.items() if row.title == engine.title]
        fitting = [layout for layout in siblings if layout_class(layout).w13_order == wanted]
        hint = f"moeq oracle SRC --gpu {_gpu_option()} says which backend takes them"
        if fitting:
            hint = f"convert the source to another layout: moeq convert SRC DST --layout {' or '.join(fitting)}"
        raise MoeqError(
            "answer.no-backend",
            f"layer {entry.layer} is in layout {entry.layout}, whose gate and up rows lie {order}, and vLLM's "
            f"activation {moe.activation.value} takes them {wanted}",
            hint,
        )


def _supported_class(engine: EngineExperts, moe: Any, entry: LayerEntry, rank: Rank, weights: RankWeights) -> Any:
    """Return the engine's expert class that supports the layer, by the engine's own judgement."""
    _check_order(moe, entry, engine)
    _check_start(engine, moe, entry, rank)
    weight, activation = engine.keys(weights)
    reason = None
    for kind in engine.classes():
        supported, reason = kind.is_supported_config(
            kind, moe, weight, activation, experts_class(moe).activation_format()
        )
        if supported:
            reason = engine.obstacle(weights)
            if reason is None:
                return kind
            break
    device = _gpu_option()
    raise MoeqError(
        "answer.no-backend",
        f"layer {entry.layer} is packed for {engine.title}, which vLLM does not run here: {reason}",
        f"moeq oracle SRC --gpu {device} says which backend it runs; moeq convert SRC DST --gpu {device}",
    )


def _gpu_option() -> str:
    """Return the value of `--gpu` that means this device."""
    return "cpu" if current_platform.is_cpu() else "NAME"


def _as_engine_dtypes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """View exponents of scales as the engine's dtype for them."""
    return {
        name: tensor.view(torch.float8_e8m0fnu) if name in SCALES and tensor.dtype == torch.uint8 else tensor
        for name, tensor in tensors.items()
    }
